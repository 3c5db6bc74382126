"""Where an archive lies: a Delta table, or a directory of Parquet files. A batch enters as a whole, and once.

Executors write files; the driver makes them part of the table in one step, which names the query and its batch:

    delta     one commit of the transaction log, by delta-rs, with the transaction (query, batch)
    parquet   one rename: the files wait in a directory in `_sluice/arriving/`, which becomes `batch=<query>-<number>`

A batch that is tried again after a crash is known by its name and left out; so is one that a second driver of the same
query brings at the same time, because the step itself fails for whoever comes second. Files that a crash leaves behind
are in no commit (delta: `vacuum` removes them), or in a directory whose name begins with `_`, which readers skip.

A Delta table is an archive, which only grows, or holds last values, which each run of `compact` replaces. The second
kind says so in its properties, so that nobody replaces an archive and nobody archives into what will be replaced.

A path is one that the driver and all executors see: a local disk for `local[...]`, a shared one for a cluster.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from sluice.errors import SluiceError
from sluice.spark.faults import InvalidOption
from sluice.spark.pipelines.writing import Written, literal, sync, write_rows

if TYPE_CHECKING:
    import deltalake
    import pyarrow as pa
    from deltalake.transaction import AddAction, RemoveAction
    from pyspark.sql import DataFrame, SparkSession

FORMATS: Final = ("delta", "parquet")
OWN: Final = "_sluice"  # below the table: checkpoint and files on their way; readers skip names with _
HOLDS: Final = "sluice.holds"  # property of a Delta table
LAST_VALUES: Final = "last-values"
ARCHIVED_AT: Final = "archived_at"  # a column that every archive has, and nothing else of ours
_ELSEWHERE: Final = re.compile(r"[a-z][a-z0-9+.-]+:/")  # s3://...; a Path has one slash of it left


class TableChanged(SluiceError):
    """Somebody else was faster."""


class Table(ABC):
    """One archive. `key` is how a query is known to it, for as long as its checkpoint lives."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def has(self, key: str, batch: int) -> bool:
        """Whether this batch is part of the table."""

    @abstractmethod
    def add(self, key: str, batch: int, rows: DataFrame) -> int:
        """Make the rows part of the table, unless the batch is already; how many were added."""

    @abstractmethod
    def version(self) -> int:
        """Goes up with each change."""

    @abstractmethod
    def files(self, version: int | None = None) -> list[str]:
        """What the table consists of, the oldest first; now, or as it was."""

    @abstractmethod
    def check_version(self, version: int) -> None:
        """Refuse one that the table does not have."""

    @abstractmethod
    def check_archive(self) -> None:
        """Refuse a table that is not for adding to."""

    @abstractmethod
    def rows(self, spark: SparkSession, files: Sequence[str], version: int | None = None) -> DataFrame:
        """What is in some of its files, with all columns of the table: the files of one may have more than others."""

    def read(self, spark: SparkSession, version: int | None = None) -> DataFrame:
        return self.rows(spark, self.check(version), version)

    def check(self, version: int | None = None) -> list[str]:
        """Its files, of which there must be some."""
        found = self.files(version)
        if not found:
            raise InvalidOption(f"{self.path} holds no rows", "Run `sluice pipeline archive` into it first")
        return found


class DeltaTable(Table):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._on_disk = ""  # the last file of the log that is known to be

    def has(self, key: str, batch: int) -> bool:
        table = self._open()
        return table is not None and _has(table, key, batch)

    def add(self, key: str, batch: int, rows: DataFrame) -> int:
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        if self.has(key, batch):
            self._sync_log()  # whoever has committed it may have died before
            return 0
        self.check_archive()
        schema = _arrow_schema(rows)
        self._missing(self._open(), schema)
        self.path.mkdir(parents=True, exist_ok=True)
        written = write_rows(rows, self.path)
        sync(self.path)
        table = self._open() or self._create(schema)
        # From what `table` has seen on, delta-rs refuses a second commit of this transaction. So it is asked once more.
        if _has(table, key, batch):
            self._sync_log()
            return self._discard(written)
        self._add_columns(table, schema)
        try:
            table.create_write_transaction(
                _actions(written),
                mode="append",
                schema=table.schema(),
                commit_properties=CommitProperties(app_transactions=[Transaction(key, batch)]),
            )
        except CommitFailedError:
            if not self.has(key, batch):
                raise
            self._sync_log()
            return self._discard(written)
        self._sync_log()
        return sum(count for _, _, count in written)

    def replace(self, rows: DataFrame, version: int) -> int:
        """Make these rows all there is, in one step; how many they are. Who reads the version before can go on.
        `version` is the one that the rows were made from: if there is a newer one by now, nothing is replaced."""
        import deltalake
        from deltalake import CommitProperties
        from deltalake.exceptions import DeltaError

        schema = _arrow_schema(rows)
        self.path.mkdir(parents=True, exist_ok=True)
        written = write_rows(rows, self.path)
        sync(self.path)
        try:
            if version < 0:
                table = self._create(schema, "error", {HOLDS: LAST_VALUES})
            else:
                table = deltalake.DeltaTable(self.path, version=version)
            if (
                table.metadata().configuration.get(HOLDS) != LAST_VALUES
            ):  # of a time before there was the mark
                table.alter.set_table_properties({HOLDS: LAST_VALUES}, raise_if_not_exists=False)
            self._add_columns(table, schema)
            table.create_write_transaction(
                _actions(written),
                mode="overwrite",
                schema=table.schema(),
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except DeltaError:
            if self.version() == version:
                raise
            self._discard(written)
            raise TableChanged(
                f"{self.path} was changed by somebody else meanwhile", "Run it again: nothing was replaced"
            ) from None
        self._sync_log()
        return sum(count for _, _, count in written)

    def check_archive(self) -> None:
        table = self._open()
        if table is not None and table.metadata().configuration.get(HOLDS) == LAST_VALUES:
            raise InvalidOption(
                f"{self.path} holds the last values of `sluice pipeline compact`, which replaces them with each run",
                "Archive into another directory",
            )

    def check_last_values(self) -> None:
        """Refuse a table whose rows are not for being replaced. Those of a time before there was a mark are known by
        their columns, which are not those of an archive, and by having been replaced whole each time."""
        table = self._open()
        if table is None or table.metadata().configuration.get(HOLDS) == LAST_VALUES:
            return
        writes = [one for one in table.history() if one.get("operation") == "WRITE"]
        modes = {one["operationParameters"].get("mode") for one in writes}
        if ARCHIVED_AT in (one.name for one in table.schema().fields) or modes - {"Overwrite"}:
            raise InvalidOption(
                f"{self.path} is a table that `sluice pipeline compact` has not made, and would replace",
                "Give a directory of its own, which need not be there yet",
            )

    def check_version(self, version: int) -> None:
        newest = self.version()
        if not 0 <= version <= newest:
            raise InvalidOption(f"{self.path} has no version {version}", f"Give one from 0 to {newest}")

    def rows(self, spark: SparkSession, files: Sequence[str], version: int | None = None) -> DataFrame:
        import deltalake
        from pyspark.sql.types import StructType

        schema = deltalake.DeltaTable(self.path, version=version).schema()
        return spark.read.schema(StructType.fromJson(json.loads(schema.to_json()))).parquet(
            *map(literal, files)
        )

    def version(self) -> int:
        table = self._open()
        return -1 if table is None else table.version()

    def files(self, version: int | None = None) -> list[str]:
        import deltalake

        if self._open() is None:
            return []
        table = deltalake.DeltaTable(self.path, version=version)
        actions = table.get_add_actions(flatten=True)
        found = zip(actions["modification_time"].to_pylist(), actions["path"].to_pylist())
        return [str(self.path / name) for _, name in sorted(found)]

    def _open(self) -> deltalake.DeltaTable | None:
        import deltalake

        if not deltalake.DeltaTable.is_deltatable(str(self.path)):
            return None
        return deltalake.DeltaTable(self.path)

    def _create(
        self,
        schema: pa.Schema,
        mode: Literal["error", "ignore"] = "ignore",
        told: dict[str, str] | None = None,
    ) -> deltalake.DeltaTable:
        import deltalake

        return deltalake.DeltaTable.create(
            self.path, schema=schema, mode=mode, configuration=told, raise_if_key_not_exists=False
        )

    def _missing(self, table: deltalake.DeltaTable | None, schema: pa.Schema) -> list[deltalake.Field]:
        """Columns of rows that the table does not have yet; refused where a column is another one."""
        import deltalake

        if table is None:
            return []
        known = {one.name: one.type for one in table.schema().fields}
        wanted = deltalake.Schema.from_arrow(schema).fields
        for one in wanted:
            if known.get(one.name, one.type) != one.type:
                raise InvalidOption(
                    f"{self.path} has a column {one.name} of another type", "Give another directory"
                )
        return [one for one in wanted if one.name not in known]

    def _add_columns(self, table: deltalake.DeltaTable, schema: pa.Schema) -> None:
        """Dead letters have more to tell than messages: rows that were there before have null."""
        missing = self._missing(table, schema)
        if missing:
            table.alter.add_columns(missing)

    def _sync_log(self) -> None:
        """delta-rs leaves its log to the page cache. What counts as done goes from the queue, and a power cut must not
        take the commit."""
        log = self.path / "_delta_log"
        fresh = sorted(
            file for file in log.iterdir() if file.name[:1].isdigit() and file.name > self._on_disk
        )
        for path in (*fresh, log, self.path):
            sync(path)
        if fresh:
            self._on_disk = fresh[-1].name

    def _discard(self, written: Written) -> int:
        """Files that are in no commit, and will be in none."""
        for name, _, _ in written:
            (self.path / name).unlink(missing_ok=True)
        return 0


def _has(table: deltalake.DeltaTable, key: str, batch: int) -> bool:
    last = table.transaction_version(key)
    return last is not None and last >= batch


class ParquetTable(Table):
    def has(self, key: str, batch: int) -> bool:
        return self._home(key, batch).is_dir()

    def add(self, key: str, batch: int, rows: DataFrame) -> int:
        if self.has(key, batch):
            return 0
        self._check_columns(rows.columns)
        folder = self.path / OWN / "arriving"
        mine = f"{key}-{batch}-{uuid.uuid4().hex}"  # a second driver of the query has another one
        arriving, ready = folder / mine, folder / f"{mine}-ready"
        arriving.mkdir(parents=True)
        try:
            written = write_rows(rows, arriving)
            ready.mkdir()
            # Only what the driver was told of: a task that nobody waits for any more may still be at it in `arriving`.
            for name, _, _ in written:
                (arriving / name).rename(ready / name)
            sync(ready)
            ready.rename(self._home(key, batch))
        except Exception as fault:
            _remove(arriving, ready)
            if isinstance(fault, OSError) and self.has(key, batch):
                return 0
            raise
        sync(self.path)
        _remove(arriving)
        # Left by crashes. A second driver that is at this very batch is let alone.
        for left in folder.glob(f"{key}-*"):
            number = left.name.removeprefix(f"{key}-").partition("-")[0]
            if number.isdigit() and int(number) < batch:
                _remove(left)
        return sum(count for _, _, count in written)

    def check_archive(self) -> None:
        """Parquet files are always an archive."""

    def check_version(self, version: int) -> None:
        raise InvalidOption(
            f"{self.path} holds Parquet files, which have no versions",
            "Leave --version out, or archive into a Delta table",
        )

    def rows(self, spark: SparkSession, files: Sequence[str], version: int | None = None) -> DataFrame:
        return spark.read.parquet(*map(literal, files))

    def _check_columns(self, names: Sequence[str]) -> None:
        """All files have the same: readers go by one of them."""
        import pyarrow.parquet as pq

        file = next((file for home in self.path.glob("batch=*") for file in home.glob("*.parquet")), None)
        if file is None:
            return
        known = pq.read_schema(file).names
        differing = sorted(set(names) ^ set(known))
        if differing:
            raise InvalidOption(
                f"{self.path} holds Parquet files with other columns (differing: {', '.join(differing)})",
                "Give another directory, or archive into a Delta table, which takes up new columns",
            )

    def version(self) -> int:
        return len(self._homes()) - 1

    def files(self, version: int | None = None) -> list[str]:
        homes = self._homes()
        return [
            str(file)
            for home in (homes if version is None else homes[: version + 1])
            for file in sorted(home.glob("*.parquet"))
        ]

    def _home(self, key: str, batch: int) -> Path:
        return self.path / f"batch={key}-{batch:09d}"

    def _homes(self) -> list[Path]:
        """In the order in which they came to be part of the table. A copy or a restore gives them other times: the
        batches of one query go by their numbers, and only between queries does the time say who was first."""
        timed = sorted(self.path.glob("batch=*"), key=lambda home: (home.stat().st_mtime_ns, home.name))
        queries: dict[str, list[Path]] = {}
        for home in timed:
            queries.setdefault(_query_of(home), []).append(home)
        numbered = {query: iter(sorted(homes)) for query, homes in queries.items()}
        return [next(numbered[_query_of(home)]) for home in timed]


def _query_of(home: Path) -> str:
    return home.name.rpartition("-")[0]


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _actions(written: Written) -> list[AddAction | RemoveAction]:
    from deltalake.transaction import AddAction

    now = int(time.time() * 1000)
    return [
        AddAction(name, size, {}, now, True, json.dumps({"numRecords": count}))
        for name, size, count in written
    ]


def open_table(path: str | Path, kind: str = "") -> Table:
    """`kind` is delta or parquet; without it the table is what it is, and a new one is Delta."""
    if _ELSEWHERE.match(str(path)):
        raise InvalidOption(
            f"{path} is not a path", "Archive into a directory that the driver and all executors see"
        )
    path = Path(path).absolute()
    if path.exists() and not path.is_dir():
        raise InvalidOption(f"{path} is a file", "Give a directory")
    if not kind:
        kind = "parquet" if any(path.glob("batch=*")) else "delta"
    if kind not in FORMATS:
        raise InvalidOption(f"format {kind!r} is not known", f"Give {' or '.join(FORMATS)}")
    is_delta = (path / "_delta_log").is_dir()
    if is_delta != (kind == "delta") and (is_delta or any(path.glob("batch=*"))):
        raise InvalidOption(
            f"{path} holds {'a Delta table' if is_delta else 'Parquet files'}, not {kind}",
            "Give another directory, or leave --format out",
        )
    return DeltaTable(path) if kind == "delta" else ParquetTable(path)


def _arrow_schema(rows: DataFrame) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(rows.schema, timezone="UTC")
