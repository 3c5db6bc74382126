"""`redrive`: repair dead letters with SQL, and put them back.

Putting back is two steps, and a crash may come between them: the repaired messages are published, and the letters are
ended. So each portion is published together, in one commit of the broker, with a receipt: a message of the queue
`redriven/<queue>` that lists the letters. Whoever redrives first ends the letters of receipts that are still there.
A letter is thus put back once, from whatever machine, and two runs at the same time cannot both win: portions are
numbered, and the broker takes each number once.

What is put back is a new message with an id of its own (the broker would take the old one for a repetition) and the
header `redriven-from`. It goes to every group of its queue; `sluice dlq retry` puts letters back unchanged, and to the
group that failed alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import functions as f

from sluice.errors import SluiceError
from sluice.spark.door import Door
from sluice.spark.faults import InvalidOption, Refused
from sluice.spark.pipelines.audit import ROOT
from sluice.spark.pipelines.queues import COLUMNS, Queues, portions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AT_ONCE: Final = 50_000  # letters brought to the driver together
GROUP: Final = "redrive"
SETTABLE: Final = ("value", "key", "queue", "headers", "delay", "priority")
# What the broker wrote on the letter, and what the publisher asked of the queue the first time.
STORY: Final = (
    *(f"original-{name}" for name in ("queue", "topic", "partition", "sequence", "message-id", "group")),
    *("original-enqueued-at", "original-priority", "dead-reason", "dead-description", "dead-at", "attempts"),
    *("first-attempt-at", "last-attempt-at", "originalTopic", "originalMessageType", "rejectionReason"),
    *("rejectionTimestamp", "rejectionMessage", "history", "message-id", "delay", "deliver-at"),
)


# Without these columns a query's result cannot be put back; they come from the letter where the query leaves them out.
NEEDED: Final = (
    "value",
    "key",
    "headers",
    "partition",
    "sequence",
    "queue",
    "original_queue",
    "original_message_id",
)


class RedriveFailed(SluiceError):
    """Nothing more was put back."""


def letters_of(rows: DataFrame) -> DataFrame:
    """Dead letters with two columns more: `letter`, its own id, and `text`, the payload as a string."""
    return rows.withColumn("letter", f.col("message_id")).withColumn("text", f.col("value").cast("string"))


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
        kept = letters_of(letters).select(
            "letter", *(name for name in NEEDED if name not in rows.columns and name in letters.columns)
        )
        rows = rows.join(kept, "letter")
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
    return _messages(rows, "queue" in given or bool(sql))


def _messages(rows: DataFrame, sends_elsewhere: bool) -> DataFrame:
    """The columns of a message, with the name of its letter and where that lies."""
    home = f.col("original_queue")
    if sends_elsewhere:  # a column queue that still names the dead-letter queue was not changed
        home = f.when(f.col("queue").startswith("dlq/"), home).otherwise(f.col("queue"))
    root = f.coalesce(f.expr(f"string(headers['{ROOT}'])"), "original_message_id")
    own = f.map_filter("headers", lambda name, value: ~name.isin(*STORY, ROOT))
    marked = f.map_from_arrays(f.array(f.lit(ROOT)), f.array(root.cast("binary")))
    told = {
        "value": f.col("value").cast("binary"),
        "key": f.col("key").cast("binary"),
        "queue": home,
        "headers": f.map_concat(f.coalesce(own, f.create_map().cast("map<string,binary>")), marked),
        "message_id": f.concat_ws("~", root, f.concat_ws(".", "partition", "sequence")),
    }
    more = [name for name in ("delay", "priority") if name in rows.columns]
    return rows.select(
        "letter", "partition", "sequence", *(value.alias(name) for name, value in told.items()), *more
    )


@dataclass(frozen=True)
class Redriven:
    put_back: int
    finished: int  # letters of an earlier run that was cut short between its two steps


def run(
    spark: SparkSession,
    queues: Queues,
    queue: str,
    *,
    where: str = "",
    changes: Sequence[str] = (),
    sql: str = "",
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Redriven:
    """Put back what fits. `queue` is the one whose messages died. `tell` hears how many of how many are done."""
    finished = finish(queues, queue, careful=True)
    rows = repaired(queues.read(spark, f"dlq/{queue}"), where, changes, sql).persist()
    done = 0
    try:
        total = rows.count()
        for table in _collected(rows, total):
            for portion in portions(table):
                put_back(queues, queue, portion)
                done += portion.num_rows
                tell(done, total)
    finally:
        rows.unpersist()
    return Redriven(done, finished)


def put_back(queues: Queues, queue: str, portion: pa.Table) -> None:
    """Publish a portion and its receipt in one step, then end its letters."""
    missing = [nth for nth, name in enumerate(portion["queue"].to_pylist()) if not name]
    if missing:
        letter = portion["letter"][missing[0]].as_py()
        raise RedriveFailed(
            f"dead letter {letter} does not say which queue it came from",
            "Name one: --set \"queue='tasks/image'\"",
        )
    app = f"redrive/{queue}"
    ids: list[str] = portion["letter"].to_pylist()
    number = queues.last_portion(app) + 1
    if not queues.publish(app, number, queue, _with_receipt(portion, queue, ids)):
        raise RedriveFailed(
            f"somebody else puts dead letters of {queue} back at this moment",
            "Wait until that is done, then run again",
        )
    finish(queues, queue)


def finish(queues: Queues, queue: str, careful: bool = False) -> int:
    """End the letters of every receipt that is still there; how many that were."""
    receipts = f"redriven/{queue}"
    ended = 0
    with Door(queues.where) as door:
        try:
            told = door.offsets(receipts)
        except Refused as refusal:
            if refusal.code == "unknown_queue":
                return 0
            raise
        done = door.advance(receipts, GROUP, {}, create=True)
        for part in told.partitions:
            start = max(part.earliest, done.get(part.partition, 0))
            if start >= part.latest:
                continue
            for batch in door.rows(receipts, part.partition, start, part.latest, ["value"], lenient=True):
                for value in batch.column("value").to_pylist():
                    ended += queues.settle_letters(queue, json.loads(value)["letters"], careful)
        door.advance(receipts, GROUP, told.latest())
    return ended


def _with_receipt(portion: pa.Table, queue: str, ids: list[str]) -> pa.Table:
    rows = portion.select([name for name in COLUMNS if name in portion.column_names])
    receipt: dict[str, Any] = {
        "value": json.dumps({"queue": queue, "letters": ids}).encode(),
        "queue": f"redriven/{queue}",
    }
    last = pa.Table.from_pylist([{name: receipt.get(name) for name in rows.column_names}], schema=rows.schema)
    return pa.concat_tables([rows, last])


def _collected(rows: DataFrame, total: int) -> Iterator[pa.Table]:
    """The rows on the driver, in their order, at most AT_ONCE at a time."""
    if total <= AT_ONCE:
        yield rows.orderBy("partition", "sequence").toArrow()
        return
    limits = (
        rows.groupBy("partition").agg(f.min("sequence"), f.max("sequence")).orderBy("partition").collect()
    )
    for partition, first, last in limits:
        for start in range(first, last + 1, AT_ONCE):
            some = rows.where(
                (f.col("partition") == partition) & f.col("sequence").between(start, start + AT_ONCE - 1)
            )
            yield some.orderBy("sequence").toArrow()


def preview(rows: DataFrame, letters: DataFrame, limit: int = 5) -> tuple[int, list[dict[str, Any]]]:
    """How many letters would be put back, and some of them: what they are and what they would become."""
    before = letters_of(letters).select("letter", "reason", "description", f.col("value").alias("before"))
    some = rows.orderBy("partition", "sequence").limit(limit).join(before, "letter")
    shown = [
        {
            "letter": one["letter"],
            "queue": one["queue"],
            "reason": one["reason"],
            "description": one["description"],
            "before": _text(one["before"]),
            "after": _text(one["value"]),
        }
        for one in some.orderBy("partition", "sequence").collect()
    ]
    return rows.count(), shown


def _text(value: bytes | bytearray | None) -> str | None:
    return None if value is None else bytes(value).decode("utf-8", "replace")
