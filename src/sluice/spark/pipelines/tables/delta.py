"""An archive, or last values, as a Delta table.

A batch is one commit of its log (by delta-rs), which stores the query and the number of the batch.

A table is an archive, which only grows, or holds last values, which each run of `compact` replaces.
The second kind has a property that says so: an archive is never replaced, and no archive is added
to a table that will be replaced.

Files that a crash leaves are in no commit: `vacuum(full=True)` removes them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.tables.base import ARCHIVED_AT, SLUICE_DIRECTORY, Table, TableChanged
from sluice.spark.pipelines.tables.file_writer import WrittenFiles, escape_glob, sync, write_rows

if TYPE_CHECKING:
    import deltalake
    import pyarrow as pa
    from deltalake.transaction import AddAction, RemoveAction
    from pyspark.sql import DataFrame, SparkSession

CONTENT_PROPERTY: Final = "sluice.holds"  # property of a table
LAST_VALUES: Final = "last-values"
HISTORY_LIMIT: Final = 100  # commits that other tools may have made: properties, compaction, vacuum
# Commits and checkpoints. Temporary files of uncommitted changes start with a number as well.
_LOG_FILE: Final = re.compile(r"\d{20}\.(json|checkpoint\..*parquet)")


class DeltaTable(Table):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._last_synced = ""  # the last log file that is known to be on disk

    def has_batch(self, key: str, batch: int) -> bool:
        table = self._open()
        return table is not None and _has_transaction(table, key, batch)

    def add_batch(self, key: str, batch: int, rows: DataFrame) -> int:
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        if self.has_batch(key, batch):
            self._sync_log()  # the process that committed it may have crashed before its sync
            return 0
        self.check_archive()
        schema = _arrow_schema(rows)
        self._missing_columns(self._open(), schema)
        self.path.mkdir(parents=True, exist_ok=True)
        written = write_rows(rows, self.path)
        sync(self.path)
        table = self._open() or self._create(schema)
        # delta-rs refuses a second commit of this transaction only if it is newer than `table`; so
        # check once more.
        if _has_transaction(table, key, batch):
            self._sync_log()
            return self._delete_files(written)
        self._add_columns(table, schema)
        try:
            table.create_write_transaction(
                _add_actions(written),
                mode="append",
                schema=table.schema(),
                commit_properties=CommitProperties(app_transactions=[Transaction(key, batch)]),
            )
        except CommitFailedError:
            if not self.has_batch(key, batch):
                raise
            self._sync_log()
            return self._delete_files(written)
        self._sync_log()
        return sum(count for _, _, count in written)

    def properties(self) -> dict[str, str]:
        """Return the properties of the table; none if it does not exist yet."""
        table = self._open()
        return {} if table is None else dict(table.metadata().configuration)

    def reached_sequence(self, partition: int) -> int | None:
        """Return the sequence up to which the queue is in the last values."""
        table = self._open()
        return (
            None if table is None else table.transaction_version(f"{SLUICE_DIRECTORY}/{partition}")
        )

    def replace_rows(
        self,
        rows: DataFrame,
        version: int,
        properties: dict[str, str] | None = None,
        ends: dict[int, int] | None = None,
    ) -> int:
        """Replace all rows in one step, and return how many there are.

        Readers of the previous version can continue. `version` is the one that the rows were made
        from: if there is a newer one, nothing is replaced. The table gets `properties`, and records
        that it has reached `ends`, the sequences of each partition.
        """
        import deltalake
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import DeltaError

        all_properties = {CONTENT_PROPERTY: LAST_VALUES, **(properties or {})}
        reached = [
            Transaction(f"{SLUICE_DIRECTORY}/{one}", end) for one, end in (ends or {}).items()
        ]
        schema = _arrow_schema(rows)
        self.path.mkdir(parents=True, exist_ok=True)
        written = write_rows(rows, self.path)
        sync(self.path)
        table = None
        try:
            if version < 0:
                table = self._create(schema, "error", all_properties)
            else:
                table = deltalake.DeltaTable(self.path, version=version)
            if not all_properties.items() <= table.metadata().configuration.items():
                table.alter.set_table_properties(all_properties, raise_if_not_exists=False)
            self._add_columns(table, schema)
            table.create_write_transaction(
                _add_actions(written),
                mode="overwrite",
                schema=table.schema(),
                commit_properties=CommitProperties(max_commit_retries=0, app_transactions=reached),
            )
        except DeltaError:
            if self.version() == (version if table is None else table.version()):
                raise
            self._delete_files(written)
            raise TableChanged(
                f"{self.path} was changed by another process meanwhile",
                "Run it again: nothing was replaced",
            ) from None
        self._sync_log()
        return sum(count for _, _, count in written)

    def is_restored(self) -> bool:
        """Return whether the rows are those of an older version, and no write has followed."""
        table = self._open()
        operations = (
            [] if table is None else [one.get("operation") for one in table.history(HISTORY_LIMIT)]
        )
        return (
            "RESTORE" in operations[: operations.index("WRITE") if "WRITE" in operations else None]
        )

    def record_reached(self, ends: dict[int, int]) -> None:
        """Record that the last values have reached `ends`, without new rows."""
        from deltalake import CommitProperties, Transaction

        table = self._open()
        if table is None or table.metadata().configuration.get(CONTENT_PROPERTY) != LAST_VALUES:
            return
        reached = [
            Transaction(f"{SLUICE_DIRECTORY}/{one}", end)
            for one, end in ends.items()
            if table.transaction_version(f"{SLUICE_DIRECTORY}/{one}") != end
        ]
        if reached:
            transaction = CommitProperties(app_transactions=reached)
            table.create_write_transaction(
                [], mode="append", schema=table.schema(), commit_properties=transaction
            )
            self._sync_log()

    def check_archive(self) -> None:
        table = self._open()
        if (
            table is not None
            and table.metadata().configuration.get(CONTENT_PROPERTY) == LAST_VALUES
        ):
            raise InvalidOption(
                f"{self.path} holds the last values of `sluice pipeline compact`,"
                " which replaces them with each run",
                "Archive into another directory",
            )

    def check_last_values(self) -> None:
        """Refuse a table whose rows must not be replaced.

        Older tables of last values lack the property; they are recognized by their columns, which
        are not those of an archive, and by having only overwrites.
        """
        table = self._open()
        if table is None or table.metadata().configuration.get(CONTENT_PROPERTY) == LAST_VALUES:
            return
        writes = [one for one in table.history() if one.get("operation") == "WRITE"]
        modes = {one["operationParameters"].get("mode") for one in writes}
        if ARCHIVED_AT in (one.name for one in table.schema().fields) or modes - {"Overwrite"}:
            raise InvalidOption(
                f"{self.path} is a table that `sluice pipeline compact` has not made,"
                " and would replace",
                "Give a directory of its own, which need not be there yet",
            )

    def check_version(self, version: int) -> None:
        newest = self.version()
        if not 0 <= version <= newest:
            raise InvalidOption(
                f"{self.path} has no version {version}", f"Give one from 0 to {newest}"
            )

    def read_files(
        self, spark: SparkSession, files: Sequence[str], version: int | None = None
    ) -> DataFrame:
        import deltalake
        from pyspark.sql.types import StructType

        schema = deltalake.DeltaTable(self.path, version=version).schema()
        return spark.read.schema(StructType.fromJson(json.loads(schema.to_json()))).parquet(
            *map(escape_glob, files)
        )

    def version(self) -> int:
        table = self._open()
        return -1 if table is None else table.version()

    def describe_version(self, version: int) -> str:
        return f"version {version} of the archive"

    def identities(self) -> list[str]:
        table = self._open()
        return [] if table is None else [str(table.metadata().id)]

    def files(self, version: int | None = None) -> list[str]:
        import deltalake

        if self._open() is None:
            return []
        table = deltalake.DeltaTable(self.path, version=version)
        actions = table.get_add_actions(flatten=True)
        found = zip(actions["modification_time"].to_pylist(), actions["path"].to_pylist())
        return [str(self.path / name) for _, name in sorted(found)]

    def has_version(self, version: int) -> bool:
        from deltalake.exceptions import DeltaError

        try:
            return super().has_version(version)
        except DeltaError:  # the log of that version was cleaned up
            return False

    def _open(self) -> deltalake.DeltaTable | None:
        import deltalake

        if not deltalake.DeltaTable.is_deltatable(str(self.path)):
            return None
        return deltalake.DeltaTable(self.path)

    def _create(
        self,
        schema: pa.Schema,
        mode: Literal["error", "ignore"] = "ignore",
        properties: dict[str, str] | None = None,
    ) -> deltalake.DeltaTable:
        import deltalake

        return deltalake.DeltaTable.create(
            self.path,
            schema=schema,
            mode=mode,
            configuration=properties,
            raise_if_key_not_exists=False,
        )

    def _missing_columns(
        self, table: deltalake.DeltaTable | None, schema: pa.Schema
    ) -> list[deltalake.Field]:
        """Return the columns that the table lacks; refuse a column of another type."""
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
        """Add the columns that the table lacks: dead letters have more than messages. Older rows
        get null.
        """
        missing = self._missing_columns(table, schema)
        if missing:
            table.alter.add_columns(missing)

    def _sync_log(self) -> None:
        """Sync the log to disk; delta-rs leaves it in the page cache.

        Settled messages are deleted from the queue, so a power cut must not lose the commit.
        """
        log = self.path / "_delta_log"
        while True:
            fresh = sorted(
                file
                for file in log.iterdir()
                if _LOG_FILE.fullmatch(file.name) and file.name > self._last_synced
            )
            try:
                for path in fresh:
                    sync(path)
            except FileNotFoundError:  # cleaned up meanwhile: a checkpoint contains it
                continue
            break
        sync(log)
        self._sync_directory()
        if fresh:
            self._last_synced = fresh[-1].name

    def _delete_files(self, written: WrittenFiles) -> int:
        """Delete files that are in no commit and will be in none."""
        for name, _, _ in written:
            (self.path / name).unlink(missing_ok=True)
        return 0


def _has_transaction(table: deltalake.DeltaTable, key: str, batch: int) -> bool:
    last = table.transaction_version(key)
    return last is not None and last >= batch


def _add_actions(written: WrittenFiles) -> list[AddAction | RemoveAction]:
    from deltalake.transaction import AddAction

    now = int(time.time() * 1000)
    return [
        AddAction(name, size, {}, now, True, json.dumps({"numRecords": count}))
        for name, size, count in written
    ]


def _arrow_schema(rows: DataFrame) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(rows.schema, timezone="UTC")
