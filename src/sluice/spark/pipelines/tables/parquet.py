"""An archive as a directory of Parquet files: a batch is one rename. Its files wait in a directory in
`_sluice/arriving/`, which becomes `batch=<query>-<number>`.

What a crash leaves behind is in a directory whose name begins with `_`, which readers skip.

There are no versions, and nothing but times says which batch was first. So a version is a number of batches with a mark
of their names: by it whoever goes on with one sees that their order is another by now.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.tables.base import OWN, Table
from sluice.spark.pipelines.tables.file_writer import literal, sync, write_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MARKS: Final = 1 << 16


class ParquetTable(Table):
    def has(self, key: str, batch: int) -> bool:
        return self._home(key, batch).is_dir()

    def add(self, key: str, batch: int, rows: DataFrame) -> int:
        if self.has(key, batch):
            self._sync_names()  # whoever has renamed it may have died before
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
            os.utime(ready)  # its place is that of this moment, not of its first file
            ready.rename(self._home(key, batch))
        except Exception as fault:
            _remove(arriving, ready)
            if isinstance(fault, OSError) and self.has(key, batch):
                self._sync_names()
                return 0
            raise
        self._sync_names()
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
        return _version_of(self._homes())

    def keeps(self, version: int) -> bool:
        return _version_of(self._homes()[: version // MARKS]) == version

    def words_of(self, version: int) -> str:
        return f"batches 1 to {version // MARKS} of the archive"

    def identities(self) -> list[str]:
        return list(dict.fromkeys(map(_query_of, self._homes())))

    def files(self, version: int | None = None) -> list[str]:
        homes = self._homes()
        return [
            str(file)
            for home in (homes if version is None else homes[: version // MARKS])
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


def _version_of(homes: Sequence[Path]) -> int:
    mark = hashlib.sha256("\n".join(home.name for home in homes).encode()).digest()
    return len(homes) * MARKS + int.from_bytes(mark) % MARKS if homes else -1


def _query_of(home: Path) -> str:
    return home.name.rpartition("-")[0]


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
