"""Where an archive lies: a Delta table (`delta`), or a directory of Parquet files (`parquet`). A batch enters as a
whole, and once.

Executors write files (`writing`); the driver makes them part of the table in one step, which names the query and its
batch. A batch that is tried again after a crash is known by its name and left out; so is one that a second driver of
the same query brings at the same time, because the step itself fails for whoever comes second.

A path is one that the driver and all executors see: a local disk for `local[...]`, a shared one for a cluster.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.tables.base import ARCHIVED_AT, SLUICE_DIRECTORY, Table, TableChanged
from sluice.spark.pipelines.tables.delta import DeltaTable
from sluice.spark.pipelines.tables.parquet import ParquetTable

__all__ = [
    "ARCHIVED_AT",
    "FORMATS",
    "SLUICE_DIRECTORY",
    "DeltaTable",
    "ParquetTable",
    "Table",
    "TableChanged",
    "open_table",
]

FORMATS: Final = ("delta", "parquet")
_URL_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]+:/")  # s3://...; a Path has one slash of it left


def open_table(path: str | Path, table_format: str = "") -> Table:
    """`kind` is delta or parquet; without it the table is what it is, and a new one is Delta."""
    if _URL_SCHEME.match(str(path)):
        raise InvalidOption(
            f"{path} is not a path",
            "Archive into a directory that the driver and all executors see",
        )
    path = Path(path).absolute()
    if path.exists() and not path.is_dir():
        raise InvalidOption(f"{path} is a file", "Give a directory")
    if not table_format:
        table_format = "parquet" if any(path.glob("batch=*")) else "delta"
    if table_format not in FORMATS:
        raise InvalidOption(f"format {table_format!r} is not known", f"Give {' or '.join(FORMATS)}")
    is_delta = (path / "_delta_log").is_dir()
    if is_delta != (table_format == "delta") and (is_delta or any(path.glob("batch=*"))):
        raise InvalidOption(
            f"{path} holds {'a Delta table' if is_delta else 'Parquet files'}, not {table_format}",
            "Give another directory, or leave --format out",
        )
    return DeltaTable(path) if table_format == "delta" else ParquetTable(path)
