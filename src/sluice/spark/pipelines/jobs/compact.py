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
from sluice.spark.http.bulk_client import Door
from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.support.run_lock import alone
from sluice.spark.pipelines.support.row_collection import brought
from sluice.spark.pipelines.support.publish_batches import portions
from sluice.spark.pipelines.queues import Queues, app_of, as_binary
from sluice.spark.pipelines.tables import OWN, DeltaTable, open_table
from sluice.spark.source.planner import floors_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUEUE: Final = "sluice.queue"  # properties of a table of last values
GROUP: Final = "sluice.group"
INCARNATION: Final = "sluice.incarnation"
ANEW: Final = (
    "Compact into another directory, which need not be there yet: it begins with what the queue keeps"
)


def latest(messages: DataFrame, by: str = "key", drop_empty: bool = False) -> DataFrame:
    """The last message of each key. `by` is an SQL expression; rows for which it is null have no key and are left out.
    `drop_empty`: an empty payload says that its key is gone."""
    last = _last(messages, by).drop("_by")
    return last.where(f.octet_length("value") > 0) if drop_empty else last


def _last(messages: DataFrame, by: str) -> DataFrame:
    """The same with the key itself, in the column `_by`."""
    rows = messages.withColumn("_by", f.expr(by)).where("_by is not null")
    whole = f.struct(*(f.col(name) for name in messages.columns))
    chosen = f.max_by(whole, f.struct("timestamp", "sequence")).alias("last")
    return rows.groupBy("_by").agg(chosen).select("last.*", "_by")


class PublishedMeanwhile(SluiceError):
    """Not all was published."""


@dataclass(frozen=True)
class Compacted:
    read: int
    keys: int


def last_values(path: str | Path) -> DeltaTable:
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
) -> Compacted:
    """Lay what has come since the last run over the table, which must be one of these. `skip_lost`: what is gone before
    it was read is no fault."""
    table = last_values(to)
    with alone(table.path / OWN), Door(queues.where) as door:
        version = table.version()
        seen = door.offsets(queue)
        about = {QUEUE: queue, GROUP: group, INCARNATION: seen.incarnation}
        start, end = floors_of(door, queue, group, seen, may_lose=skip_lost), seen.latest()
        settled = queues.settled(queue, group)
        check_following(table, about, settled, start)
        check_restored(table, skip_lost)
        start = _behind(table, start)
        fresh = _range(spark, queues, queue, group, start, end, skip_lost)
        # What cannot be understood is told before there is a group.
        last = latest(_laid_over(table, version, fresh, spark), by, drop_empty)
        places = door.advance(queue, group, {}, create=True, incarnation=seen.incarnation)
        if settled is None:  # until it was there, nothing was kept for it
            check_following(table, about, queues.settled(queue, group), places)
            start, end = places, {one: max(place, end.get(one, 0)) for one, place in places.items()}
            fresh = _range(spark, queues, queue, group, start, end, skip_lost)
            last = latest(_laid_over(table, version, fresh, spark), by, drop_empty)
        read = fresh.count()
        if read:
            keys = table.replace(last, version, about, end)
        else:
            table.reach(end)
            keys = _count(table, spark)
        door.advance(queue, group, end, incarnation=seen.incarnation)
    return Compacted(read, keys)


def check_following(
    table: DeltaTable, about: Mapping[str, str], settled: int | None, start: Mapping[int, int]
) -> None:
    """Refuse a table in which something would be missing. `about` is what it would say of itself, `settled` how many
    messages the group has settled, None if it is not there, and `start` where it stands."""
    queue, group = about[QUEUE], about[GROUP]
    if table.version() < 0:
        if settled:
            raise InvalidOption(
                f"group {group} has read {queue} for another table, and what it has settled would be missing in"
                f" {table.path}",
                "Give the directory of that table, or --group NAME, which is not there yet: it begins with what the"
                " queue keeps. Dead letters that were put back count as settled too",
            )
        return
    known = table.about()
    if QUEUE in known and (known[QUEUE], known[GROUP]) != (queue, group):
        raise InvalidOption(
            f"{table.path} holds the last values of {known[QUEUE]}, as group {known[GROUP]} brings them",
            f"Give --queue {known[QUEUE]} and --group {known[GROUP]}, or another directory",
        )
    if known.get(INCARNATION, about[INCARNATION]) != about[INCARNATION]:
        raise InvalidOption(
            f"{table.path} holds the last values of a queue {queue} that was deleted, and made again since",
            ANEW,
        )
    reached = {one: table.reached(one) for one in start}
    is_new = not settled and any(end is not None and start[one] > end for one, end in reached.items())
    if settled is None or is_new:
        raise InvalidOption(
            f"group {group} of {queue}, which {table.path} was brought up to date by, was deleted: what came since"
            " may be gone with it",
            ANEW,
        )


def check_restored(table: DeltaTable, skip_lost: bool) -> None:
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
) -> Compacted:
    """Publish the last value of each key to a queue: of the queue `queue`, or of the archive in the directory `source`.
    Run again, it publishes again: meant for a queue of type compacted, which keeps one value per key anyway, and takes
    an empty payload for the end of its key. So those are published, and with `drop_empty` only not counted. Of two at
    the same time one ends with `PublishedMeanwhile`: what it has read may be older than what the other publishes."""
    app = app_of("compact", to)
    number = queues.last_portion(app)  # before anything is read: who reads later has newer values
    rows = queues.read(spark, queue, headers=False) if source is None else open_table(source).read(spark)
    last = _last(rows, by)
    place = (f.col("queue").alias("home"), "partition", "sequence")
    last = last.select("value", as_binary(last, "_by").alias("key"), *place).persist()
    try:
        read = rows.count()
        keys = last.where(f.octet_length("value") > 0).count() if drop_empty else last.count()
        for table in brought(last):
            for portion in portions(table):
                number += 1
                if not queues.publish(app, number, to, portion):
                    raise PublishedMeanwhile(
                        f"another run publishes last values to {to} at the same time",
                        "Run it again when the other has ended",
                    )
        return Compacted(read, keys)
    finally:
        last.unpersist()


def _range(
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


def _behind(table: DeltaTable, start: Mapping[int, int]) -> dict[int, int]:
    """Where to go on: where the group stands, or before that, where the table ends."""
    ends = {one: table.reached(one) for one in start}
    return {one: place if (end := ends[one]) is None else min(place, end) for one, place in start.items()}


def _laid_over(table: DeltaTable, version: int, fresh: DataFrame, spark: SparkSession) -> DataFrame:
    """What the table holds, and what is new."""
    if version < 0 or not table.files(version):
        return fresh
    return table.read(spark, version).unionByName(fresh, allowMissingColumns=True)


def _count(table: DeltaTable, spark: SparkSession) -> int:
    return table.read(spark).count() if table.files() else 0
