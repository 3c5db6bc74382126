"""What an archive is, whatever it lies in: batches that enter as a whole, and files that come out in their order."""

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

SLUICE_DIRECTORY: Final = (
    "_sluice"  # below the table: checkpoint and files on their way; readers skip names with _
)
ARCHIVED_AT: Final = "archived_at"  # a column that every archive has, and nothing else of ours


class TableChanged(SluiceError):
    """Somebody else was faster."""


class Table(ABC):
    """One archive. `key` is how a query is known to it, for as long as its checkpoint lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._are_parents_synced = False  # the directories that lead to it are known to be on disk

    @abstractmethod
    def has_batch(self, key: str, batch: int) -> bool:
        """Whether this batch is part of the table."""

    @abstractmethod
    def add_batch(self, key: str, batch: int, rows: DataFrame) -> int:
        """Make the rows part of the table, unless the batch is already; how many were added."""

    @abstractmethod
    def version(self) -> int:
        """Goes up with each change."""

    @abstractmethod
    def describe_version(self, version: int) -> str:
        """The same for people."""

    @abstractmethod
    def identities(self) -> list[str]:
        """By what a table with rows is told from others, wherever it is moved: the first, or one of the others if it
        was the first before."""

    @abstractmethod
    def files(self, version: int | None = None) -> list[str]:
        """What the table consists of, the oldest first; now, or as it was."""

    def has_version(self, version: int) -> bool:
        """Whether all that it consisted of then is still there."""
        return all(os.path.exists(file) for file in self.files(version))

    @abstractmethod
    def check_version(self, version: int) -> None:
        """Refuse one that the table does not have."""

    @abstractmethod
    def check_archive(self) -> None:
        """Refuse a table that is not for adding to."""

    @abstractmethod
    def read_files(
        self, spark: SparkSession, files: Sequence[str], version: int | None = None
    ) -> DataFrame:
        """What is in some of its files, with all columns of the table: the files of one may have more than others."""

    def read(self, spark: SparkSession, version: int | None = None) -> DataFrame:
        return self.read_files(spark, self.existing_files(version), version)

    def _sync_directory(self) -> None:
        """What is in its directory is on disk when this returns, and so is the way there, which may be new. Whoever has
        made it may have died before he could see to that, so the first time nobody asks who it was."""
        if not self._are_parents_synced:
            folder = self.path
            while not os.path.ismount(folder):
                folder = folder.parent
                with suppress(
                    PermissionError
                ):  # who may not even read it has not made anything in it
                    sync(folder)
            self._are_parents_synced = True
        sync(self.path)

    def existing_files(self, version: int | None = None) -> list[str]:
        """Its files, of which there must be some."""
        found = self.files(version)
        if not found:
            raise InvalidOption(
                f"{self.path} holds no rows", "Run `sluice pipeline archive` into it first"
            )
        return found
