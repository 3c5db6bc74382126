"""`compact`: the last value of each key, kept up to date in a table, or published to a queue.

The state of a table after one run is where the next begins: what the queue has got since is laid over it. Progress of
the group is saved after the table, so a crash between the two repeats rows that change nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import functions as f

from sluice.errors import SluiceError
from sluice.spark.door import Door
from sluice.spark.pipelines.alone import alone
from sluice.spark.pipelines.portions import portions
from sluice.spark.pipelines.queues import Queues
from sluice.spark.pipelines.tables import OWN, DeltaTable, open_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AT_ONCE: Final = 50_000  # keys brought to the driver together


def latest(messages: DataFrame, by: str = "key", drop_empty: bool = False) -> DataFrame:
    """The last message of each key. `by` is an SQL expression; rows for which it is null have no key and are left out.
    `drop_empty`: an empty payload says that its key is gone."""
    rows = messages.withColumn("_by", f.expr(by)).where("_by is not null")
    whole = f.struct(*(f.col(name) for name in messages.columns))
    last = (
        rows.groupBy("_by")
        .agg(f.max_by(whole, f.struct("timestamp", "sequence")).alias("last"))
        .select("last.*")
    )
    return last.where(f.octet_length("value") > 0) if drop_empty else last


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
) -> Compacted:
    """Lay what has come since the last run over the table, which must be one of these."""
    table = last_values(to)
    with alone(table.path / OWN), Door(queues.where) as door:
        version = table.version()
        start = door.advance(queue, group, {}, create=True)
        seen = door.offsets(queue)
        end = seen.latest()
        fresh = _range(spark, queues, queue, start, end)
        read = fresh.count()
        rows = fresh
        if version >= 0 and table.files(version):
            rows = table.read(spark, version).unionByName(fresh, allowMissingColumns=True)
        keys = table.replace(latest(rows, by, drop_empty), version) if read else _count(table, spark)
        door.advance(queue, group, end, incarnation=seen.incarnation)
    return Compacted(read, keys)


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
    Run again, it publishes again: meant for a queue of type compacted, which keeps one value per key anyway. Of two at
    the same time one ends with `PublishedMeanwhile`: what it has read may be older than what the other publishes."""
    app = f"compact/{to}"
    number = queues.last_portion(app)  # before anything is read: who reads later has newer values
    rows = queues.read(spark, queue, headers=False) if source is None else open_table(source).read(spark)
    last = latest(rows, by, drop_empty).select("value", "key", "timestamp", "sequence").persist()
    try:
        read, keys = rows.count(), last.count()
        parts = max(1, -(-keys // AT_ONCE))
        for nth in range(parts):
            some = last.where(f.pmod(f.xxhash64("key"), f.lit(parts)) == nth) if parts > 1 else last
            table: pa.Table = some.orderBy("timestamp", "sequence").select("value", "key").toArrow()
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
    spark: SparkSession, queues: Queues, queue: str, start: dict[int, int], end: dict[int, int]
) -> DataFrame:
    """Exactly what lies between two places, so that what is settled afterwards is what was read."""
    return queues.read(
        spark,
        queue,
        startingOffsets=json.dumps({queue: {str(one): seq for one, seq in start.items()}}),
        endingOffsets=json.dumps({queue: {str(one): seq for one, seq in end.items()}}),
    )


def _count(table: DeltaTable, spark: SparkSession) -> int:
    return table.read(spark).count() if table.files() else 0
