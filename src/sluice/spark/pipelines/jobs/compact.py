"""`compact`: store the last value of each key in a table, or publish it to a queue.

Each run merges the new messages of the queue into the table of the previous run. The progress of
the group is stored after the table, so a crash between the two repeats rows that change nothing. A
table and a group belong together, because messages that the group has settled are only in the
table: the table stores its group and how far it has read, and a run whose table and group do not
match is refused. If the files of a table come from a backup, the next run reads the newer messages
again, or reports that they are gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from sluice.errors import SluiceError
from sluice.spark.errors import InvalidOption
from sluice.spark.http import BulkClient
from sluice.spark.pipelines.queues import Queues, app_name, to_binary
from sluice.spark.pipelines.support.publish_batches import split_batches
from sluice.spark.pipelines.support.row_collection import collect_in_order
from sluice.spark.pipelines.support.run_lock import exclusive_run
from sluice.spark.pipelines.tables import SLUICE_DIRECTORY, DeltaTable, open_table
from sluice.spark.source.planner import group_low_watermarks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUEUE_PROPERTY: Final = "sluice.queue"  # properties of a table of last values
GROUP_PROPERTY: Final = "sluice.group"
INCARNATION_PROPERTY: Final = "sluice.incarnation"
START_OVER_REMEDY: Final = (
    "Compact into another directory, which need not be there yet:"
    " it begins with what the queue keeps"
)


def last_messages(messages: DataFrame, by: str = "key", drop_empty: bool = False) -> DataFrame:
    """Return the last message of each key.

    `by` is an SQL expression; rows for which it is null have no key and are left out. `drop_empty`:
    an empty payload means that its key was deleted.
    """
    last = _last_by_key(messages, by).drop("_by")
    return last.where(f.octet_length("value") > 0) if drop_empty else last


def _last_by_key(messages: DataFrame, by: str) -> DataFrame:
    """Return the last message of each key, with the key in the column `_by`."""
    rows = messages.withColumn("_by", f.expr(by)).where("_by is not null")
    whole = f.struct(*(f.col(name) for name in messages.columns))
    chosen = f.max_by(whole, f.struct("timestamp", "sequence")).alias("last")
    return rows.groupBy("_by").agg(chosen).select("last.*", "_by")


class ConcurrentPublish(SluiceError):
    """Another run publishes to the same queue. Not everything was published."""


@dataclass(frozen=True)
class CompactResult:
    read: int
    keys: int


def open_last_values(path: str | Path) -> DeltaTable:
    """Open the table at `path`, which is new or was created by `compact`: its rows will be
    replaced.
    """
    table = open_table(path, "delta")
    assert isinstance(table, DeltaTable)
    table.check_last_values()
    return table


def to_table(
    spark: SparkSession,
    queues: Queues,
    queue: str,
    to: str | Path,
    *,
    group: str = "compact",
    by: str = "key",
    drop_empty: bool = False,
    skip_lost: bool = False,
) -> CompactResult:
    """Merge the messages since the last run into the table, which must be one of last values.

    `skip_lost`: messages that were removed before they were read are no error.
    """
    table = open_last_values(to)
    with exclusive_run(table.path / SLUICE_DIRECTORY), BulkClient(queues.where) as client:
        version = table.version()
        seen = client.offsets(queue)
        properties = {
            QUEUE_PROPERTY: queue,
            GROUP_PROPERTY: group,
            INCARNATION_PROPERTY: seen.incarnation,
        }
        start, end = (
            group_low_watermarks(client, queue, group, seen, allow_loss=skip_lost),
            seen.latest(),
        )
        settled = queues.settled_count(queue, group)
        check_table_matches_group(table, properties, settled, start)
        check_not_restored(table, skip_lost)
        start = _resume_sequences(table, start)
        fresh = _read_range(spark, queues, queue, group, start, end, skip_lost)
        # An invalid expression must fail before the group is created.
        last = last_messages(_merge_rows(table, version, fresh, spark), by, drop_empty)
        positions = client.advance(queue, group, {}, create=True, incarnation=seen.incarnation)
        if settled is None:  # messages are stored for a group only while it exists
            check_table_matches_group(
                table, properties, queues.settled_count(queue, group), positions
            )
            start, end = (
                positions,
                {one: max(position, end.get(one, 0)) for one, position in positions.items()},
            )
            fresh = _read_range(spark, queues, queue, group, start, end, skip_lost)
            last = last_messages(_merge_rows(table, version, fresh, spark), by, drop_empty)
        read = fresh.count()
        if read:
            keys = table.replace_rows(last, version, properties, end)
        else:
            table.record_reached(end)
            keys = _count_rows(table, spark)
        client.advance(queue, group, end, incarnation=seen.incarnation)
    return CompactResult(read, keys)


def check_table_matches_group(
    table: DeltaTable, properties: Mapping[str, str], settled: int | None, start: Mapping[int, int]
) -> None:
    """Refuse a table that would lack messages.

    `properties` are those that the table would get, `settled` is how many messages the group has
    settled (None if it does not exist), and `start` its low watermarks.
    """
    queue, group = properties[QUEUE_PROPERTY], properties[GROUP_PROPERTY]
    if table.version() < 0:
        if settled:
            raise InvalidOption(
                f"group {group} has read {queue} for another table, and what it has settled would"
                f" be missing in {table.path}",
                "Give the directory of that table, or --group NAME, which is not there yet:"
                " it begins with what the queue keeps."
                " Dead letters that were put back count as settled too",
            )
        return
    known = table.properties()
    if QUEUE_PROPERTY in known and (known[QUEUE_PROPERTY], known[GROUP_PROPERTY]) != (queue, group):
        raise InvalidOption(
            f"{table.path} holds the last values of {known[QUEUE_PROPERTY]},"
            f" read by group {known[GROUP_PROPERTY]}",
            f"Give --queue {known[QUEUE_PROPERTY]} and --group {known[GROUP_PROPERTY]},"
            " or another directory",
        )
    if (
        known.get(INCARNATION_PROPERTY, properties[INCARNATION_PROPERTY])
        != properties[INCARNATION_PROPERTY]
    ):
        raise InvalidOption(
            f"{table.path} holds the last values of a queue {queue} that was deleted,"
            " and made again since",
            START_OVER_REMEDY,
        )
    reached = {one: table.reached_sequence(one) for one in start}
    is_new = not settled and any(
        end is not None and start[one] > end for one, end in reached.items()
    )
    if settled is None or is_new:
        raise InvalidOption(
            f"group {group} of {queue}, which {table.path} was brought up to date by, was deleted:"
            " what came since may be gone with it",
            START_OVER_REMEDY,
        )


def check_not_restored(table: DeltaTable, skip_lost: bool) -> None:
    """Refuse a table that was restored to an older version: Delta keeps its progress."""
    if table.is_restored() and not skip_lost:
        raise InvalidOption(
            f"{table.path} was restored to an older version, and what had come since is missing in"
            " it",
            "Go on without it: --skip-lost; or start over with what the queue keeps,"
            " in another directory and with --group NAME",
        )


def to_queue(
    spark: SparkSession,
    queues: Queues,
    to: str,
    *,
    queue: str = "",
    source: str | Path | None = None,
    by: str = "key",
    drop_empty: bool = False,
) -> CompactResult:
    """Publish the last value of each key of the queue `queue`, or of the archive `source`, to a
    queue.

    A second run publishes again. The target is meant to be a compacted queue, which stores one
    value per key anyway, and takes an empty payload for the deletion of its key. So empty payloads
    are published, and with `drop_empty` only not counted. Of two concurrent runs one ends with
    `ConcurrentPublish`: the values that it has read may be older than those that the other
    publishes.
    """
    app = app_name("compact", to)
    # Before anything is read: a run that reads later has newer values.
    number = queues.last_batch_number(app)
    rows = (
        queues.read(spark, queue, headers=False)
        if source is None
        else open_table(source).read(spark)
    )
    last = _last_by_key(rows, by)
    place = (f.col("queue").alias("home"), "partition", "sequence")
    last = last.select("value", to_binary(last, "_by").alias("key"), *place).persist()
    try:
        read = rows.count()
        keys = last.where(f.octet_length("value") > 0).count() if drop_empty else last.count()
        for table in collect_in_order(last):
            for batch in split_batches(table):
                number += 1
                if not queues.publish(app, number, to, batch):
                    raise ConcurrentPublish(
                        f"another run publishes last values to {to} at the same time",
                        "Run it again when the other has ended",
                    )
        return CompactResult(read, keys)
    finally:
        last.unpersist()


def _read_range(
    spark: SparkSession,
    queues: Queues,
    queue: str,
    group: str,
    start: dict[int, int],
    end: dict[int, int],
    skip_lost: bool,
) -> DataFrame:
    """Read exactly the messages between two offsets, so that only these are settled afterwards.

    Messages that were redriven for another group alone are left out: they are old, and would look
    like the newest.
    """
    return queues.read(
        spark,
        queue,
        group=group,
        failOnDataLoss="false" if skip_lost else "true",
        startingOffsets=json.dumps({queue: {str(one): seq for one, seq in start.items()}}),
        endingOffsets=json.dumps({queue: {str(one): seq for one, seq in end.items()}}),
    )


def _resume_sequences(table: DeltaTable, start: Mapping[int, int]) -> dict[int, int]:
    """Return where to continue: at the low watermark of the group, or where the table ends, if
    lower.
    """
    ends = {one: table.reached_sequence(one) for one in start}
    return {
        one: position if (end := ends[one]) is None else min(position, end)
        for one, position in start.items()
    }


def _merge_rows(
    table: DeltaTable, version: int, fresh: DataFrame, spark: SparkSession
) -> DataFrame:
    """Return the rows of the table together with the new ones."""
    if version < 0 or not table.files(version):
        return fresh
    return table.read(spark, version).unionByName(fresh, allowMissingColumns=True)


def _count_rows(table: DeltaTable, spark: SparkSession) -> int:
    return table.read(spark).count() if table.files() else 0
