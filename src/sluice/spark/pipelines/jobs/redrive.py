"""`redrive`: repair dead letters with SQL, and put them back.

What is put back takes the place of its letter: the broker keeps the repaired message and ends the letter in one write
to its log (docs/bulk.md, the column `letter`). A letter that is gone is passed over. So each is put back once, whoever
dies in the middle, and however many do it at the same time.

A message goes back to the group that failed it, on its old partition, under its old id; on request to every group of
its queue, and always so into another queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from pyspark.sql import functions as f

from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.support.row_collection import PLACE, brought
from sluice.spark.pipelines.support.publish_batches import portions
from sluice.spark.pipelines.queues import Queues
from sluice.spark.source.sink import ONCE

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

SETTABLE: Final = ("value", "key", "queue", "headers", "delay", "priority")
# What the broker wrote on the letter, and what the publisher asked of the queue the first time.
STORY: Final = (
    *(f"original-{name}" for name in ("queue", "topic", "partition", "sequence", "message-id", "group")),
    *("original-enqueued-at", "original-priority", "dead-reason", "dead-description", "dead-at", "attempts"),
    *("first-attempt-at", "last-attempt-at", "originalTopic", "originalMessageType", "rejectionReason"),
    *("rejectionTimestamp", "rejectionMessage", "history", "message-id", "delay", "deliver-at"),
)


# Without these columns a query's result cannot be put back; they come from the letter where the query leaves them out.
NEEDED: Final = ("value", "key", "headers", "queue", "original_queue", "original_message_id")


def letters_of(rows: DataFrame) -> DataFrame:
    """Dead letters with three columns more: `letter`, its own id, `text`, the payload as a string, and `home`, the
    queue that it lies in."""
    return (
        rows.withColumn("letter", f.col("message_id"))
        .withColumn("text", f.col("value").cast("string"))
        .withColumn("home", f.col("queue"))
    )


def repaired(letters: DataFrame, where: str = "", changes: Sequence[str] = (), sql: str = "") -> DataFrame:
    """What is to be put back: the letters that fit, with columns changed (`value = replace(text, 'NaN', 'null')`), or
    whatever a query over the view `letters` gives, as long as it keeps the column `letter`."""
    rows = letters_of(letters)
    if sql:
        rows.createOrReplaceTempView("letters")
        rows = rows.sparkSession.sql(sql)
        if "letter" not in rows.columns:
            raise InvalidOption(
                "the query leaves out the column letter, by which a letter is known",
                "Select * or letter besides what you change",
            )
        missing = [name for name in NEEDED if name not in rows.columns and name in letters.columns]
        rows = rows.drop(*PLACE).join(letters_of(letters).select("letter", *PLACE, *missing), "letter")
    if where:
        rows = rows.where(where)
    given: dict[str, Any] = {}
    for change in changes:
        name, equals, expression = (part.strip() for part in change.partition("="))
        if not equals or name not in SETTABLE:
            raise InvalidOption(
                f"--set {change!r} cannot be used",
                f"Write NAME=EXPRESSION, with NAME one of {', '.join(SETTABLE)}",
            )
        given[name] = f.expr(expression)
    if given:
        rows = rows.withColumns(given)
    target = f.col("original_queue")
    if "queue" in given:
        target = f.col("queue")
    elif sql:  # a column queue that still names the dead-letter queue was not changed
        target = f.coalesce(f.when(f.col("queue") != f.col("home"), f.col("queue")), target)
    return _messages(rows, target)


def _messages(rows: DataFrame, target: Column) -> DataFrame:
    """The columns of a message, with the name of its letter and where that lies."""
    told = {
        "value": f.col("value").cast("binary"),
        "key": f.col("key").cast("binary"),
        "queue": target,
        "headers": f.map_filter("headers", lambda name, value: ~name.isin(*STORY)),
    }
    more = [name for name in ("delay", "priority") if name in rows.columns]
    return rows.select("letter", *PLACE, *(value.alias(name) for name, value in told.items()), *more)


def check(rows: DataFrame) -> int:
    """How many letters are to be put back. If one of them cannot be, none is."""

    def such(test: Column) -> Column:
        return f.min(f.when(test, f.col("letter")))

    total, letters, empty, homeless, at_home = rows.agg(
        f.count("*"),
        f.count_distinct(f.struct(*PLACE)),
        such(f.col("value").isNull()),
        such(f.coalesce(f.col("queue"), f.lit("")) == ""),
        such(f.col("queue") == f.col("home")),
    ).collect()[0]
    if empty is not None:
        raise InvalidOption(
            f"the new payload of dead letter {empty} is NULL, and the old one would be lost",
            'Give it one, such as --set "value = coalesce(EXPR, text)", or leave it out: --where "EXPR IS NOT NULL"',
        )
    if homeless is not None:
        raise InvalidOption(
            f"dead letter {homeless} does not say which queue it came from",
            "Name one: --set \"queue='tasks/image'\"",
        )
    if at_home is not None:
        raise InvalidOption(
            f"dead letter {at_home} would be put back into the queue of dead letters in which it lies",
            "Name another queue, or leave queue out",
        )
    if letters < total:
        [double] = rows.groupBy("letter").count().where("count > 1").orderBy("letter").limit(1).collect()
        raise InvalidOption(
            f"the query gives dead letter {double['letter']} {double['count']} times, and it can be put back once",
            "Give each letter once; for several messages out of one, put them into a queue with `transform`",
        )
    count: int = total
    return count


@dataclass(frozen=True)
class Redriven:
    put_back: int
    skipped: int  # letters that were gone by then, or with a consumer of the dead letters


def run(
    spark: SparkSession,
    queues: Queues,
    queue: str,
    *,
    where: str = "",
    changes: Sequence[str] = (),
    sql: str = "",
    to_all: bool = False,
    homes: Sequence[str] = (),
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Redriven:
    """Put back what fits. `queue` is the one whose messages died, `homes` the queues in which they lie, which else are
    asked for. `tell` hears how many of how many are done."""
    rows = repaired(queues.letters(spark, queue, homes), where, changes, sql).persist()
    try:
        return put_back(queues, queue, rows, check(rows), to_all, tell)
    finally:
        rows.unpersist()


def put_back(
    queues: Queues,
    queue: str,
    rows: DataFrame,
    total: int,
    to_all: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Redriven:
    """Put back what was repaired and checked, which whoever calls this has seen to be so many."""
    app = f"{ONCE}redrive/{uuid4()}"
    done = skipped = number = 0
    for table in brought(rows):
        for portion in portions(table):
            number += 1
            skipped += queues.mend(app, number, queue, _placed(portion), to_all)
            done += portion.num_rows
            tell(done, total)
    return Redriven(done - skipped, skipped)


def _placed(portion: pa.Table) -> pa.Table:
    """With the places of the letters in their column `letter`, in which the broker looks for them."""
    import pyarrow as pa

    places = zip(*(portion[name].to_pylist() for name in PLACE), strict=True)
    letters = pa.array(
        [f"{home}/{partition}/{sequence}" for home, partition, sequence in places], pa.string()
    )
    return portion.set_column(portion.column_names.index("letter"), "letter", letters)


def preview(rows: DataFrame, letters: DataFrame, limit: int = 5) -> tuple[int, list[dict[str, Any]]]:
    """How many letters would be put back, and some of them: what they are and what they would become."""
    total = check(rows)
    before = letters_of(letters).select("letter", "reason", "description", f.col("value").alias("before"))
    some = rows.orderBy(*PLACE).limit(limit).join(before, "letter")
    shown = [
        {
            "letter": one["letter"],
            "queue": one["queue"],
            "reason": one["reason"],
            "description": one["description"],
            "before": _text(one["before"]),
            "after": _text(one["value"]),
        }
        for one in some.orderBy(*PLACE).collect()
    ]
    return total, shown


def _text(value: bytes | bytearray | None) -> str | None:
    return None if value is None else bytes(value).decode("utf-8", "replace")
