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
from sluice.spark.pipelines.queues import Queues
from sluice.spark.pipelines.support.publish_batches import split_batches
from sluice.spark.pipelines.support.row_collection import POSITION_COLUMNS, collect_in_order
from sluice.spark.source.source_options import ONE_OFF_PREFIX

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

SETTABLE: Final = ("value", "key", "queue", "headers", "delay", "priority")
# What the broker wrote on the letter, and what the publisher asked of the queue the first time.
BROKER_HEADERS: Final = (
    *(
        f"original-{name}"
        for name in ("queue", "topic", "partition", "sequence", "message-id", "group")
    ),
    *(
        "original-enqueued-at",
        "original-priority",
        "dead-reason",
        "dead-description",
        "dead-at",
        "attempts",
    ),
    *(
        "first-attempt-at",
        "last-attempt-at",
        "originalTopic",
        "originalMessageType",
        "rejectionReason",
    ),
    *("rejectionTimestamp", "rejectionMessage", "history", "message-id", "delay", "deliver-at"),
)


# Without these columns a query's result cannot be put back; they come from the letter where the query leaves them out.
REQUIRED_COLUMNS: Final = (
    "value",
    "key",
    "headers",
    "queue",
    "original_queue",
    "original_message_id",
)


def with_dead_letter_columns(rows: DataFrame) -> DataFrame:
    """Dead letters with three columns more: `letter`, its own id, `text`, the payload as a string, and `home`, the
    queue that it lies in."""
    return (
        rows.withColumn("letter", f.col("message_id"))
        .withColumn("text", f.col("value").cast("string"))
        .withColumn("home", f.col("queue"))
    )


def repair_rows(
    dead_letters: DataFrame, where: str = "", changes: Sequence[str] = (), sql: str = ""
) -> DataFrame:
    """What is to be put back: the letters that fit, with columns changed (`value = replace(text, 'NaN', 'null')`), or
    whatever a query over the view `letters` gives, as long as it keeps the column `letter`."""
    rows = with_dead_letter_columns(dead_letters)
    if sql:
        rows.createOrReplaceTempView("letters")
        rows = rows.sparkSession.sql(sql)
        if "letter" not in rows.columns:
            raise InvalidOption(
                "the query leaves out the column letter, by which a letter is known",
                "Select * or letter besides what you change",
            )
        missing = [
            name
            for name in REQUIRED_COLUMNS
            if name not in rows.columns and name in dead_letters.columns
        ]
        rows = rows.drop(*POSITION_COLUMNS).join(
            with_dead_letter_columns(dead_letters).select("letter", *POSITION_COLUMNS, *missing),
            "letter",
        )
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
    columns = {
        "value": f.col("value").cast("binary"),
        "key": f.col("key").cast("binary"),
        "queue": target,
        "headers": f.map_filter("headers", lambda name, value: ~name.isin(*BROKER_HEADERS)),
    }
    more = [name for name in ("delay", "priority") if name in rows.columns]
    return rows.select(
        "letter", *POSITION_COLUMNS, *(value.alias(name) for name, value in columns.items()), *more
    )


def check_repaired(rows: DataFrame) -> int:
    """How many letters are to be put back. If one of them cannot be, none is."""

    def such(test: Column) -> Column:
        return f.min(f.when(test, f.col("letter")))

    total, distinct_count, empty, without_queue, to_own_queue = rows.agg(
        f.count("*"),
        f.count_distinct(f.struct(*POSITION_COLUMNS)),
        such(f.col("value").isNull()),
        such(f.coalesce(f.col("queue"), f.lit("")) == ""),
        such(f.col("queue") == f.col("home")),
    ).collect()[0]
    if empty is not None:
        raise InvalidOption(
            f"the new payload of dead letter {empty} is NULL, and the old one would be lost",
            'Give it one, such as --set "value = coalesce(EXPR, text)", or leave it out: --where "EXPR IS NOT NULL"',
        )
    if without_queue is not None:
        raise InvalidOption(
            f"dead letter {without_queue} does not say which queue it came from",
            "Name one: --set \"queue='tasks/image'\"",
        )
    if to_own_queue is not None:
        raise InvalidOption(
            f"dead letter {to_own_queue} would be put back into the queue of dead letters in which it lies",
            "Name another queue, or leave queue out",
        )
    if distinct_count < total:
        [double] = (
            rows.groupBy("letter").count().where("count > 1").orderBy("letter").limit(1).collect()
        )
        raise InvalidOption(
            f"the query gives dead letter {double['letter']} {double['count']} times, and it can be put back once",
            "Give each letter once; for several messages out of one, put them into a queue with `transform`",
        )
    count: int = total
    return count


@dataclass(frozen=True)
class RedriveResult:
    redriven: int
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
    dead_letter_queues: Sequence[str] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RedriveResult:
    """Put back what fits. `queue` is the one whose messages died, `homes` the queues in which they lie, which else are
    asked for. `tell` hears how many of how many are done."""
    rows = repair_rows(
        queues.dead_letters(spark, queue, dead_letter_queues), where, changes, sql
    ).persist()
    try:
        return publish_repaired(queues, queue, rows, check_repaired(rows), to_all, on_progress)
    finally:
        rows.unpersist()


def publish_repaired(
    queues: Queues,
    queue: str,
    rows: DataFrame,
    total: int,
    to_all: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RedriveResult:
    """Put back what was repaired and checked, which whoever calls this has seen to be so many."""
    app = f"{ONE_OFF_PREFIX}redrive/{uuid4()}"
    done = skipped = number = 0
    for table in collect_in_order(rows):
        for batch in split_batches(table):
            number += 1
            skipped += queues.publish_redriven(app, number, queue, _with_positions(batch), to_all)
            done += batch.num_rows
            on_progress(done, total)
    return RedriveResult(done - skipped, skipped)


def _with_positions(batch: pa.Table) -> pa.Table:
    """With the places of the letters in their column `letter`, in which the broker looks for them."""
    import pyarrow as pa

    positions = zip(*(batch[name].to_pylist() for name in POSITION_COLUMNS), strict=True)
    dead_letters = pa.array(
        [f"{queue}/{partition}/{sequence}" for queue, partition, sequence in positions], pa.string()
    )
    return batch.set_column(batch.column_names.index("letter"), "letter", dead_letters)


def preview(
    rows: DataFrame, dead_letters: DataFrame, limit: int = 5
) -> tuple[int, list[dict[str, Any]]]:
    """How many letters would be put back, and some of them: what they are and what they would become."""
    total = check_repaired(rows)
    before = with_dead_letter_columns(dead_letters).select(
        "letter", "reason", "description", f.col("value").alias("before")
    )
    some = rows.orderBy(*POSITION_COLUMNS).limit(limit).join(before, "letter")
    shown = [
        {
            "letter": one["letter"],
            "queue": one["queue"],
            "reason": one["reason"],
            "description": one["description"],
            "before": _text(one["before"]),
            "after": _text(one["value"]),
        }
        for one in some.orderBy(*POSITION_COLUMNS).collect()
    ]
    return total, shown


def _text(value: bytes | bytearray | None) -> str | None:
    return None if value is None else bytes(value).decode("utf-8", "replace")
