"""Write rows to Parquet files on the executors, and report each synced file to the driver.

Spark retries tasks, and may run one twice. Each attempt writes a file of its own, and the driver
gets one file per task. Other files in the directory are incomplete or second copies, and are never
added to a table.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

WrittenFiles = list[tuple[str, int, int]]  # name, bytes and rows of each file
FILES_SCHEMA: Final = "name string, bytes bigint, rows bigint"
ROWS_PER_GROUP: Final = 65_536
_GLOB: Final = re.compile(r"[\\\[\]{}*?]")


def write_rows(rows: DataFrame, folder: Path) -> WrittenFiles:
    """Write the rows on the executors and return the files: name, bytes, rows. A task without rows
    writes none.
    """
    found = rows.mapInArrow(_writer(str(folder)), FILES_SCHEMA).collect()
    return sorted((one["name"], one["bytes"], one["rows"]) for one in found)


def _writer(folder: str) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows of one task, on an executor."""
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
        sync(path)  # the commit promises that the file is on disk
        size = os.path.getsize(path)
        yield pa.RecordBatch.from_pydict({"name": [name], "bytes": [size], "rows": [rows]})

    return write


def sync(path: str | Path) -> None:
    """Sync a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def escape_glob(path: str) -> str:
    """Escape a path for Spark, which would take it for a pattern."""
    return _GLOB.sub(r"\\\g<0>", path)
