"""`redrive`: repair dead letters with SQL, and put them back into their queue.

A repaired message replaces its dead letter: the broker stores the message and settles the other in
one write to its log (docs/bulk.md). A dead letter that is gone is skipped. So each is put back
once, in spite of crashes and concurrent runs.

A message returns to the group that failed it, to its old partition, with its old id. On request it
goes to every group of its queue; into another queue it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from pyspark.sql import functions as f

from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.queues import Queues
from sluice.spark.pipelines.support.publish_batches import DEAD_LETTER_COLUMN, split_batches
from sluice.spark.pipelines.support.row_collection import POSITION_COLUMNS, collect_in_order
from sluice.spark.source.source_options import ONE_OFF_PREFIX

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

DEAD_LETTER_VIEW: Final = "letters"  # words: allowed (users' SQL names it)
SETTABLE: Final = ("value", "key", "queue", "headers", "delay", "priority")
# Headers that the broker added to the dead letter, and options of the first publish.
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


# Columns that are needed to put a row back; taken from the dead letter if the query leaves them
# out.
REQUIRED_COLUMNS: Final = (
    "value",
    "key",
    "headers",
    "queue",
    "original_queue",
    "original_message_id",
)


def with_dead_letter_columns(rows: DataFrame) -> DataFrame:
    """Add three columns: the id of the dead letter, `text` (the payload as a string), and `home`
    (the dead-letter queue).
    """
    return (
        rows.withColumn(DEAD_LETTER_COLUMN, f.col("message_id"))
        .withColumn("text", f.col("value").cast("string"))
        .withColumn("home", f.col("queue"))
    )


def repair_rows(
    dead_letters: DataFrame, where: str = "", changes: Sequence[str] = (), sql: str = ""
) -> DataFrame:
    """Return the messages to put back.

    Either the dead letters that match `where`, with columns changed (`value = replace(text, 'NaN',
    'null')`), or the result of a query over the view of all dead letters. The query must keep the
    column DEAD_LETTER_COLUMN.
    """
    rows = with_dead_letter_columns(dead_letters)
    if sql:
        rows.createOrReplaceTempView(DEAD_LETTER_VIEW)
        rows = rows.sparkSession.sql(sql)
        if DEAD_LETTER_COLUMN not in rows.columns:
            raise InvalidOption(
                f"the query leaves out the column {DEAD_LETTER_COLUMN}, the id of the dead letter",
                f"Select * or {DEAD_LETTER_COLUMN} besides what you change",
            )
        missing = [
            name
            for name in REQUIRED_COLUMNS
            if name not in rows.columns and name in dead_letters.columns
        ]
        rows = rows.drop(*POSITION_COLUMNS).join(
            with_dead_letter_columns(dead_letters).select(
                DEAD_LETTER_COLUMN, *POSITION_COLUMNS, *missing
            ),
            DEAD_LETTER_COLUMN,
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
    """Select the columns of a message, with the id and the position of its dead letter."""
    columns = {
        "value": f.col("value").cast("binary"),
        "key": f.col("key").cast("binary"),
        "queue": target,
        "headers": f.map_filter("headers", lambda name, value: ~name.isin(*BROKER_HEADERS)),
    }
    more = [name for name in ("delay", "priority") if name in rows.columns]
    return rows.select(
        DEAD_LETTER_COLUMN,
        *POSITION_COLUMNS,
        *(value.alias(name) for name, value in columns.items()),
        *more,
    )


def check_repaired(rows: DataFrame) -> int:
    """Return how many dead letters are to be put back. Refuse all if one of them cannot be."""

    def first_id(test: Column) -> Column:
        return f.min(f.when(test, f.col(DEAD_LETTER_COLUMN)))

    total, distinct_count, empty, without_queue, to_own_queue = rows.agg(
        f.count("*"),
        f.count_distinct(f.struct(*POSITION_COLUMNS)),
        first_id(f.col("value").isNull()),
        first_id(f.coalesce(f.col("queue"), f.lit("")) == ""),
        first_id(f.col("queue") == f.col("home")),
    ).collect()[0]
    if empty is not None:
        raise InvalidOption(
            f"the new payload of dead letter {empty} is NULL, and the old one would be lost",
            'Give it one, such as --set "value = coalesce(EXPR, text)",'
            ' or leave it out: --where "EXPR IS NOT NULL"',
        )
    if without_queue is not None:
        raise InvalidOption(
            f"dead letter {without_queue} does not say which queue it came from",
            "Name one: --set \"queue='tasks/image'\"",
        )
    if to_own_queue is not None:
        raise InvalidOption(
            f"dead letter {to_own_queue} would be put back into its own dead-letter queue",
            "Name another queue, or leave queue out",
        )
    if distinct_count < total:
        [double] = (
            rows.groupBy(DEAD_LETTER_COLUMN)
            .count()
            .where("count > 1")
            .orderBy(DEAD_LETTER_COLUMN)
            .limit(1)
            .collect()
        )
        raise InvalidOption(
            f"the query gives dead letter {double[DEAD_LETTER_COLUMN]} {double['count']} times,"
            " and it can be put back once",
            "Give each dead letter once; for several messages out of one, put them into a queue"
            " with `transform`",
        )
    count: int = total
    return count


@dataclass(frozen=True)
class RedriveResult:
    redriven: int
    skipped: int  # dead letters that were gone, or held by a consumer of the dead-letter queue


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
    """Put back the dead letters that match.

    `queue` is where the messages failed. `dead_letter_queues` are the queues that store them; by
    default the broker is asked. `on_progress` gets the number done and the total.
    """
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
    """Put back rows that were repaired and checked; `total` is their number."""
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
    """Replace the ids of the dead letters by their positions, by which the broker finds them."""
    import pyarrow as pa

    positions = zip(*(batch[name].to_pylist() for name in POSITION_COLUMNS), strict=True)
    dead_letters = pa.array(
        [f"{queue}/{partition}/{sequence}" for queue, partition, sequence in positions], pa.string()
    )
    return batch.set_column(
        batch.column_names.index(DEAD_LETTER_COLUMN), DEAD_LETTER_COLUMN, dead_letters
    )


def preview(
    rows: DataFrame, dead_letters: DataFrame, limit: int = 5
) -> tuple[int, list[dict[str, Any]]]:
    """Count the dead letters that would be put back, with some before and after the change."""
    total = check_repaired(rows)
    before = with_dead_letter_columns(dead_letters).select(
        DEAD_LETTER_COLUMN, "reason", "description", f.col("value").alias("before")
    )
    some = rows.orderBy(*POSITION_COLUMNS).limit(limit).join(before, DEAD_LETTER_COLUMN)
    shown = [
        {
            DEAD_LETTER_COLUMN: one[DEAD_LETTER_COLUMN],
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
