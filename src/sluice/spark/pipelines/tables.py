"""Where an archive lies: a Delta table, or a directory of Parquet files. A batch enters as a whole, and once.

Executors write files; the driver makes them part of the table in one step, which names the query and its batch:

    delta     one commit of the transaction log, by delta-rs, with the transaction (query, batch)
    parquet   one rename: the files wait in `_sluice/arriving/` and become the directory `batch=<query>-<number>`

A batch that is tried again after a crash is known by its name and left out. Files that a crash leaves behind are in no
commit (delta: `vacuum` removes them), or in a directory whose name begins with `_`, which readers skip.

A path is one that the driver and all executors see: a local disk for `local[...]`, a shared one for a cluster.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sluice.spark.faults import InvalidOption

if TYPE_CHECKING:
    import deltalake
    import pyarrow as pa
    from deltalake.transaction import AddAction, RemoveAction
    from pyspark.sql import DataFrame, SparkSession

FORMATS: Final = ("delta", "parquet")
OWN: Final = "_sluice"  # below the table: checkpoint and files on their way; readers skip names with _
FILES_SCHEMA: Final = "name string, bytes bigint, rows bigint"
ROWS_PER_GROUP: Final = 65_536
_ELSEWHERE: Final = re.compile(r"[a-z][a-z0-9+.-]+:/")  # s3://...; a Path has one slash of it left


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

    def read(self, spark: SparkSession, version: int | None = None) -> DataFrame:
        return spark.read.parquet(*self.check(version))

    def check(self, version: int | None = None) -> list[str]:
        """Its files, of which there must be some."""
        found = self.files(version)
        if not found:
            raise InvalidOption(f"{self.path} holds no rows", "Run `sluice pipeline archive` into it first")
        return found


class DeltaTable(Table):
    def has(self, key: str, batch: int) -> bool:
        table = self._open()
        last = None if table is None else table.transaction_version(key)
        return last is not None and last >= batch

    def add(self, key: str, batch: int, rows: DataFrame) -> int:
        from deltalake import CommitProperties, Transaction

        if self.has(key, batch):
            return 0
        self.path.mkdir(parents=True, exist_ok=True)
        written = _write(rows, self.path)
        _sync(self.path)
        table = self._open() or self._create(rows)
        table.create_write_transaction(
            _actions(written),
            mode="append",
            schema=table.schema(),
            commit_properties=CommitProperties(app_transactions=[Transaction(key, batch)]),
        )
        return sum(count for _, _, count in written)

    def replace(self, rows: DataFrame) -> int:
        """Make these rows all there is, in one step; how many they are. Who reads the version before can go on."""
        self.path.mkdir(parents=True, exist_ok=True)
        written = _write(rows, self.path)
        _sync(self.path)
        table = self._open() or self._create(rows)
        table.create_write_transaction(_actions(written), mode="overwrite", schema=table.schema())
        return sum(count for _, _, count in written)

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

    def _create(self, rows: DataFrame) -> deltalake.DeltaTable:
        import deltalake

        return deltalake.DeltaTable.create(self.path, schema=_arrow_schema(rows), mode="ignore")


class ParquetTable(Table):
    def has(self, key: str, batch: int) -> bool:
        return self._home(key, batch).is_dir()

    def add(self, key: str, batch: int, rows: DataFrame) -> int:
        if self.has(key, batch):
            return 0
        arriving = self.path / OWN / "arriving" / f"{key}-{batch}"
        shutil.rmtree(arriving, ignore_errors=True)  # of an attempt that did not come to its end
        arriving.mkdir(parents=True)
        written = _write(rows, arriving)
        _sync(arriving)
        try:
            arriving.rename(self._home(key, batch))
        except OSError:
            if not self.has(key, batch):  # else: a second driver of the same query was faster
                raise
            return 0
        _sync(self.path)
        return sum(count for _, _, count in written)

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
        """In the order in which they came to be part of the table."""
        return sorted(self.path.glob("batch=*"), key=lambda home: (home.stat().st_mtime_ns, home.name))


def _actions(written: list[tuple[str, int, int]]) -> list[AddAction | RemoveAction]:
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


def _write(rows: DataFrame, folder: Path) -> list[tuple[str, int, int]]:
    """Write the rows where they are, and tell of the files: name, bytes, rows. No file for a task without rows."""
    found = rows.mapInArrow(_writer(str(folder)), FILES_SCHEMA).collect()
    return sorted((one["name"], one["bytes"], one["rows"]) for one in found)


def _writer(folder: str) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """On an executor. A task that is run again writes another file, and only the one it tells of counts."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        name = f"part-{uuid.uuid4().hex}.parquet"
        path = os.path.join(folder, name)
        writer = None
        rows = 0
        for batch in batches:
            if not batch.num_rows:
                continue
            if writer is None:
                writer = pq.ParquetWriter(path, batch.schema, compression="zstd")
            writer.write_batch(batch, row_group_size=ROWS_PER_GROUP)
            rows += batch.num_rows
        if writer is None:
            return
        writer.close()
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # the commit will promise that it is there
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        yield pa.RecordBatch.from_pydict({"name": [name], "bytes": [size], "rows": [rows]})

    return write


def _arrow_schema(rows: DataFrame) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(rows.schema, timezone="UTC")


def _sync(folder: Path) -> None:
    """New names in a directory are on disk when it is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
