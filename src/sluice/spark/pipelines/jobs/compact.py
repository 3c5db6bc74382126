"""`compact`: the last value of each key, kept up to date in a table, or published to a queue.

The state of a table after one run is where the next begins: what the queue has got since is laid over it. Progress of
the group is saved after the table, so a crash between the two repeats rows that change nothing. A table and a group
belong together, because what the group has settled is in the table alone: the table says which group it is, and how far
it has come, and a run in which the two do not fit is refused. Of a table whose files come from a backup the next run
reads once more what has come since, or says that it is gone.
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
from sluice.spark.http.bulk_client import BulkClient
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
START_OVER_REMEDY: Final = "Compact into another directory, which need not be there yet: it begins with what the queue keeps"


def last_messages(messages: DataFrame, by: str = "key", drop_empty: bool = False) -> DataFrame:
    """The last message of each key. `by` is an SQL expression; rows for which it is null have no key and are left out.
    `drop_empty`: an empty payload says that its key is gone."""
    last = _last_by_key(messages, by).drop("_by")
    return last.where(f.octet_length("value") > 0) if drop_empty else last


def _last_by_key(messages: DataFrame, by: str) -> DataFrame:
    """The same with the key itself, in the column `_by`."""
    rows = messages.withColumn("_by", f.expr(by)).where("_by is not null")
    whole = f.struct(*(f.col(name) for name in messages.columns))
    chosen = f.max_by(whole, f.struct("timestamp", "sequence")).alias("last")
    return rows.groupBy("_by").agg(chosen).select("last.*", "_by")


class ConcurrentPublish(SluiceError):
    """Not all was published."""


@dataclass(frozen=True)
class CompactResult:
    read: int
    keys: int


def open_last_values(path: str | Path) -> DeltaTable:
    """The table at a place, which is new or was made by an earlier run: what it holds will be replaced."""
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
    """Lay what has come since the last run over the table, which must be one of these. `skip_lost`: what is gone before
    it was read is no fault."""
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
        # What cannot be understood is told before there is a group.
        last = last_messages(_merge_rows(table, version, fresh, spark), by, drop_empty)
        positions = client.advance(queue, group, {}, create=True, incarnation=seen.incarnation)
        if settled is None:  # until it was there, nothing was kept for it
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
    """Refuse a table in which something would be missing. `about` is what it would say of itself, `settled` how many
    messages the group has settled, None if it is not there, and `start` where it stands."""
    queue, group = properties[QUEUE_PROPERTY], properties[GROUP_PROPERTY]
    if table.version() < 0:
        if settled:
            raise InvalidOption(
                f"group {group} has read {queue} for another table, and what it has settled would be missing in"
                f" {table.path}",
                "Give the directory of that table, or --group NAME, which is not there yet: it begins with what the"
                " queue keeps. Dead letters that were put back count as settled too",
            )
        return
    known = table.properties()
    if QUEUE_PROPERTY in known and (known[QUEUE_PROPERTY], known[GROUP_PROPERTY]) != (queue, group):
        raise InvalidOption(
            f"{table.path} holds the last values of {known[QUEUE_PROPERTY]}, as group {known[GROUP_PROPERTY]} brings them",
            f"Give --queue {known[QUEUE_PROPERTY]} and --group {known[GROUP_PROPERTY]}, or another directory",
        )
    if (
        known.get(INCARNATION_PROPERTY, properties[INCARNATION_PROPERTY])
        != properties[INCARNATION_PROPERTY]
    ):
        raise InvalidOption(
            f"{table.path} holds the last values of a queue {queue} that was deleted, and made again since",
            START_OVER_REMEDY,
        )
    reached = {one: table.reached_sequence(one) for one in start}
    is_new = not settled and any(
        end is not None and start[one] > end for one, end in reached.items()
    )
    if settled is None or is_new:
        raise InvalidOption(
            f"group {group} of {queue}, which {table.path} was brought up to date by, was deleted: what came since"
            " may be gone with it",
            START_OVER_REMEDY,
        )


def check_not_restored(table: DeltaTable, skip_lost: bool) -> None:
    """Refuse a table whose rows were taken back: Delta leaves what it says of how far they go as it was."""
    if table.is_restored() and not skip_lost:
        raise InvalidOption(
            f"{table.path} was restored to an older version, and what had come since is missing in it",
            "Go on without it: --skip-lost; or begin anew with what the queue keeps, in another directory and with"
            " --group NAME",
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
    """Publish the last value of each key to a queue: of the queue `queue`, or of the archive in the directory `source`.
    Run again, it publishes again: meant for a queue of type compacted, which keeps one value per key anyway, and takes
    an empty payload for the end of its key. So those are published, and with `drop_empty` only not counted. Of two at
    the same time one ends with `PublishedMeanwhile`: what it has read may be older than what the other publishes."""
    app = app_name("compact", to)
    number = queues.last_batch_number(
        app
    )  # before anything is read: who reads later has newer values
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
    """Exactly what lies between two places, so that what is settled afterwards is what was read. What was put back for
    another group alone is left out: it is old, and would look like the newest."""
    return queues.read(
        spark,
        queue,
        group=group,
        failOnDataLoss="false" if skip_lost else "true",
        startingOffsets=json.dumps({queue: {str(one): seq for one, seq in start.items()}}),
        endingOffsets=json.dumps({queue: {str(one): seq for one, seq in end.items()}}),
    )


def _resume_sequences(table: DeltaTable, start: Mapping[int, int]) -> dict[int, int]:
    """Where to go on: where the group stands, or before that, where the table ends."""
    ends = {one: table.reached_sequence(one) for one in start}
    return {
        one: position if (end := ends[one]) is None else min(position, end)
        for one, position in start.items()
    }


def _merge_rows(
    table: DeltaTable, version: int, fresh: DataFrame, spark: SparkSession
) -> DataFrame:
    """What the table holds, and what is new."""
    if version < 0 or not table.files(version):
        return fresh
    return table.read(spark, version).unionByName(fresh, allowMissingColumns=True)


def _count_rows(table: DeltaTable, spark: SparkSession) -> int:
    return table.read(spark).count() if table.files() else 0
