"""`archive`: a queue into a table, each message once.

Spark reads with a consumer group of its own, so messages are kept until they are in the table, and deleted (or counted
as done) when they are: the stream's progress is the group's. A batch is a transaction of the table, known by the
stream's checkpoint and its number; one that was cut short by a crash is written again, one that was committed is not.

Dead letters stay until somebody settles them, and a group of their own would delete them: of those a stream without a
group is archived, whose memory is its checkpoint alone, unless they are to go.
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
    """The rows of an archive: all columns of the queue, and when Spark had them. `files` bounds how many files a batch
    becomes; 0 leaves it to Spark."""
    rows = messages.withColumn(ARCHIVED_AT, f.current_timestamp())
    return rows.coalesce(files) if files else rows


def make_batch_writer(
    table: Table, key: Callable[[], str], files: int = 0
) -> Callable[[DataFrame, int], None]:
    """What a stream does with each batch."""

    def store(batch: DataFrame, number: int) -> None:
        table.add_batch(key(), number, archive_rows(batch, files))

    return store


def query_id(checkpoint: Path) -> str:
    """How the stream of a checkpoint is known: Spark's own id for it, which lives as long as the checkpoint."""
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
    """Begin, or go on where it stopped. `once`: to the end of what there is, and then the stream ends by itself.
    `keeps`: settle nothing, so that nothing is deleted. What others take away before it was read is not missed then,
    nor with `skip_lost`."""
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
