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
            self._sync_directory()  # whoever has renamed it may have died before
            return 0
        self._check_columns(rows.columns)
        folder = self.path / SLUICE_DIRECTORY / "arriving"
        unique_name = (
            f"{key}-{batch}-{uuid.uuid4().hex}"  # a second driver of the query has another one
        )
        arriving, ready = folder / unique_name, folder / f"{unique_name}-ready"
        arriving.mkdir(parents=True)
        try:
            written = write_rows(rows, arriving)
            ready.mkdir()
            # Only what the driver was told of: a task that nobody waits for any more may still be at it in `arriving`.
            for name, _, _ in written:
                (arriving / name).rename(ready / name)
            sync(ready)
            os.utime(ready)  # its place is that of this moment, not of its first file
            ready.rename(self._batch_directory(key, batch))
        except Exception as fault:
            _remove(arriving, ready)
            if isinstance(fault, OSError) and self.has_batch(key, batch):
                self._sync_directory()
                return 0
            raise
        self._sync_directory()
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

    def read_files(
        self, spark: SparkSession, files: Sequence[str], version: int | None = None
    ) -> DataFrame:
        return spark.read.parquet(*map(escape_glob, files))

    def _check_columns(self, names: Sequence[str]) -> None:
        """All files have the same: readers go by one of them."""
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
                f"{self.path} holds Parquet files with other columns (differing: {', '.join(differing)})",
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
        """In the order in which they came to be part of the table. A copy or a restore gives them other times: the
        batches of one query go by their numbers, and only between queries does the time say who was first."""
        timed = sorted(
            self.path.glob("batch=*"), key=lambda home: (home.stat().st_mtime_ns, home.name)
        )
        queries: dict[str, list[Path]] = {}
        for home in timed:
            queries.setdefault(_query_of(home), []).append(home)
        numbered = {query: iter(sorted(directories)) for query, directories in queries.items()}
        return [next(numbered[_query_of(home)]) for home in timed]


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
