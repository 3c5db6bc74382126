"""An archive as a directory of Parquet files.

A batch is added by one rename: its files are first in a directory below `_sluice/arriving/`, which
becomes `batch=<query>-<number>`. A crash leaves files only in directories whose names begin with
`_`, which readers skip.

There are no versions, and only modification times order the batches of different queries. So a
version is a number of batches together with a hash of their names: it reveals a changed order.
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
from sluice.spark.pipelines.tables.base import SLUICE_DIRECTORY, Table
from sluice.spark.pipelines.tables.file_writer import escape_glob, sync, write_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HASH_RANGE: Final = 1 << 16


class ParquetTable(Table):
    def has_batch(self, key: str, batch: int) -> bool:
        return self._batch_directory(key, batch).is_dir()

    def add_batch(self, key: str, batch: int, rows: DataFrame) -> int:
        if self.has_batch(key, batch):
            self._sync_directory()  # the process that renamed it may have crashed before its sync
            return 0
        self._check_columns(rows.columns)
        folder = self.path / SLUICE_DIRECTORY / "arriving"
        # A second driver of the query has another name.
        unique_name = f"{key}-{batch}-{uuid.uuid4().hex}"
        arriving, ready = folder / unique_name, folder / f"{unique_name}-ready"
        arriving.mkdir(parents=True)
        try:
            written = write_rows(rows, arriving)
            ready.mkdir()
            # Only files that were reported to the driver: an abandoned task may still write to
            # `arriving`.
            for name, _, _ in written:
                (arriving / name).rename(ready / name)
            sync(ready)
            os.utime(ready)  # orders the batch by this moment, not by its first file
            ready.rename(self._batch_directory(key, batch))
        except Exception as fault:
            _remove(arriving, ready)
            if isinstance(fault, OSError) and self.has_batch(key, batch):
                self._sync_directory()
                return 0
            raise
        self._sync_directory()
        _remove(arriving)
        # Left by crashes. Keep those of a second driver that writes this same batch.
        for leftover in folder.glob(f"{key}-*"):
            number = leftover.name.removeprefix(f"{key}-").partition("-")[0]
            if number.isdigit() and int(number) < batch:
                _remove(leftover)
        return sum(count for _, _, count in written)

    def check_archive(self) -> None:
        """Accept every table: Parquet files are always an archive."""

    def check_version(self, version: int) -> None:
        raise InvalidOption(
            f"{self.path} holds Parquet files, which have no versions",
            "Leave --version out, or archive into a Delta table",
        )

    def read_files(
        self, spark: SparkSession, files: Sequence[str], version: int | None = None
    ) -> DataFrame:
        return spark.read.parquet(*map(escape_glob, files))

    def _check_columns(self, names: Sequence[str]) -> None:
        """Refuse different columns: readers take the schema of one file for all."""
        import pyarrow.parquet as pq

        file = next(
            (
                file
                for directory in self.path.glob("batch=*")
                for file in directory.glob("*.parquet")
            ),
            None,
        )
        if file is None:
            return
        known = pq.read_schema(file).names
        differing = sorted(set(names) ^ set(known))
        if differing:
            raise InvalidOption(
                f"{self.path} holds Parquet files with other columns"
                f" (differing: {', '.join(differing)})",
                "Give another directory, or archive into a Delta table, which takes up new columns",
            )

    def version(self) -> int:
        return _version_of(self._batch_directories())

    def has_version(self, version: int) -> bool:
        return _version_of(self._batch_directories()[: version // HASH_RANGE]) == version

    def describe_version(self, version: int) -> str:
        return f"batches 1 to {version // HASH_RANGE} of the archive"

    def identities(self) -> list[str]:
        return list(dict.fromkeys(map(_query_of, self._batch_directories())))

    def files(self, version: int | None = None) -> list[str]:
        directories = self._batch_directories()
        return [
            str(file)
            for directory in (
                directories if version is None else directories[: version // HASH_RANGE]
            )
            for file in sorted(directory.glob("*.parquet"))
        ]

    def _batch_directory(self, key: str, batch: int) -> Path:
        return self.path / f"batch={key}-{batch:09d}"

    def _batch_directories(self) -> list[Path]:
        """Return the batches in the order in which they were added.

        A copy or a restore changes modification times. So the batches of one query are ordered by
        their numbers, and times only order different queries.
        """
        timed = sorted(
            self.path.glob("batch=*"),
            key=lambda directory: (directory.stat().st_mtime_ns, directory.name),
        )
        queries: dict[str, list[Path]] = {}
        for directory in timed:
            queries.setdefault(_query_of(directory), []).append(directory)
        numbered = {query: iter(sorted(directories)) for query, directories in queries.items()}
        return [next(numbered[_query_of(directory)]) for directory in timed]


def _version_of(directories: Sequence[Path]) -> int:
    digest = hashlib.sha256(
        "\n".join(directory.name for directory in directories).encode()
    ).digest()
    return (
        len(directories) * HASH_RANGE + int.from_bytes(digest) % HASH_RANGE if directories else -1
    )


def _query_of(directory: Path) -> str:
    return directory.name.rpartition("-")[0]


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
