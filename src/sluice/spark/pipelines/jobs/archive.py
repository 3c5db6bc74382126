"""`archive`: copy a queue to a table, each message once.

Spark reads with a consumer group of its own, so messages stay stored until they are in the table,
and are then deleted (or count as settled): the progress of the stream is that of the group. A batch
is a transaction of the table, identified by the checkpoint of the stream and its number. A batch
that a crash interrupted is written again; a committed one is not.

Dead letters stay until they are settled, and a group of their own would delete them. So they are
archived by a stream without a group, which is tracked by its checkpoint alone, unless they are to
be deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from sluice.spark.pipelines.queues import Queues
from sluice.spark.pipelines.tables import ARCHIVED_AT, SLUICE_DIRECTORY, Table, open_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def archive_rows(messages: DataFrame, files: int = 0) -> DataFrame:
    """Return the rows of an archive: all columns of the queue, and when Spark read them.

    `files` bounds the number of files per batch; 0 leaves it to Spark.
    """
    rows = messages.withColumn(ARCHIVED_AT, f.current_timestamp())
    return rows.coalesce(files) if files else rows


def make_batch_writer(
    table: Table, key: Callable[[], str], files: int = 0
) -> Callable[[DataFrame, int], None]:
    """Return the function that stores each batch of a stream."""

    def store(batch: DataFrame, number: int) -> None:
        table.add_batch(key(), number, archive_rows(batch, files))

    return store


def query_id(checkpoint: Path) -> str:
    """Return Spark's id of the stream, which lives as long as its checkpoint."""
    metadata = json.loads((checkpoint / "metadata").read_text("utf-8"))
    return str(metadata["id"])


def checkpoint_path(table: Table, given: str | Path | None) -> Path:
    return Path(given or table.path / SLUICE_DIRECTORY / "checkpoint").absolute()


def start(
    spark: SparkSession,
    queues: Queues,
    queue: str,
    to: str | Path,
    *,
    group: str = "archive",
    read_only: bool = False,
    table_format: str = "",
    checkpoint: str | Path | None = None,
    once: bool = False,
    every: str = "30 seconds",
    rows_per_batch: int = 200_000,
    files: int = 0,
    skip_lost: bool = False,
) -> StreamingQuery:
    """Start the stream, or continue from its checkpoint.

    `once`: the stream ends when it has read everything that is stored at its start. `read_only`:
    settle nothing, so that nothing is deleted. With `read_only` or `skip_lost`, messages that were
    removed before they were read are no error.
    """
    table = open_table(to, table_format)
    table.check_archive()
    checkpoint_directory = checkpoint_path(table, checkpoint)
    messages = queues.stream(
        spark,
        queue,
        group="" if read_only else group,
        rows_per_batch=rows_per_batch,
        skip_lost=read_only or skip_lost,
    )
    writer = (
        messages.writeStream.queryName(f"archive {queue}")
        .option("checkpointLocation", str(checkpoint_directory))
        .foreachBatch(make_batch_writer(table, lambda: query_id(checkpoint_directory), files))
    )
    return (
        writer.trigger(availableNow=True) if once else writer.trigger(processingTime=every)
    ).start()
