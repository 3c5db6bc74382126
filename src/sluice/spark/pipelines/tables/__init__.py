"""Archives: a Delta table (`delta`), or a directory of Parquet files (`parquet`).

A batch is added atomically, and once. Executors write files (`file_writer`); the driver adds them
to the table in one step, which stores the query and the batch number. A batch that is retried after
a crash is recognized by these and skipped; so is one that a second driver of the same query adds at
the same time, because the step fails for the second one.

The driver and all executors must see the path: a local disk for `local[...]`, a shared one for a
cluster.
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
# s3://...; Path() reduces the slashes to one
_URL_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]+:/")


def open_table(path: str | Path, table_format: str = "") -> Table:
    """Open the table at `path`. `table_format` is delta or parquet.

    Without it, an existing table keeps its format, and a new one is Delta.
    """
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
