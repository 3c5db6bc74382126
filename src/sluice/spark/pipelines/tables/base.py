"""The interface of an archive: batches are added atomically, files are listed in order."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sluice.errors import SluiceError
from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.tables.file_writer import sync

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Below the table: checkpoint and files in progress; readers skip names with "_".
SLUICE_DIRECTORY: Final = "_sluice"
ARCHIVED_AT: Final = "archived_at"  # a column that every archive has, and no other table of ours


class TableChanged(SluiceError):
    """Another writer has changed the table."""


class Table(ABC):
    """One archive. `key` identifies a query for as long as its checkpoint exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._are_parents_synced = False  # whether the parent directories are known to be on disk

    @abstractmethod
    def has_batch(self, key: str, batch: int) -> bool:
        """Return whether this batch is part of the table."""

    @abstractmethod
    def add_batch(self, key: str, batch: int, rows: DataFrame) -> int:
        """Add the rows unless the table has the batch already; return how many were added."""

    @abstractmethod
    def version(self) -> int:
        """Return the version, which increases with each change."""

    @abstractmethod
    def describe_version(self, version: int) -> str:
        """Return the version as text for users."""

    @abstractmethod
    def identities(self) -> list[str]:
        """Return ids that identify a table with rows even after it was moved.

        The first one is current; the others may have been first before.
        """

    @abstractmethod
    def files(self, version: int | None = None) -> list[str]:
        """Return the files of the table, oldest first, now or in a version."""

    def has_version(self, version: int) -> bool:
        """Return whether all files of that version still exist."""
        return all(os.path.exists(file) for file in self.files(version))

    @abstractmethod
    def check_version(self, version: int) -> None:
        """Refuse a version that the table does not have."""

    @abstractmethod
    def check_archive(self) -> None:
        """Refuse a table that does not accept new rows."""

    @abstractmethod
    def read_files(
        self, spark: SparkSession, files: Sequence[str], version: int | None = None
    ) -> DataFrame:
        """Read some of its files, with all columns of the table: files may differ in columns."""

    def read(self, spark: SparkSession, version: int | None = None) -> DataFrame:
        return self.read_files(spark, self.existing_files(version), version)

    def _sync_directory(self) -> None:
        """Sync the table's directory and its parents to disk.

        A parent may be new, and the process that created it may have crashed before its sync. So
        the first call syncs all parents.
        """
        if not self._are_parents_synced:
            folder = self.path
            while not os.path.ismount(folder):
                folder = folder.parent
                # A user who cannot read a directory has created nothing in it.
                with suppress(PermissionError):
                    sync(folder)
            self._are_parents_synced = True
        sync(self.path)

    def existing_files(self, version: int | None = None) -> list[str]:
        """Return the files of the table; refuse an empty one."""
        found = self.files(version)
        if not found:
            raise InvalidOption(
                f"{self.path} holds no rows", "Run `sluice pipeline archive` into it first"
            )
        return found
