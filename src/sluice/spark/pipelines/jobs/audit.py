"""`audit`: compare published with processed messages, by id: which are missing, which are
duplicates.

Each side is a DataFrame with a column `id`. A redriven message keeps the id that it was published
with, so both deliveries count for the same message.

The waiting side is read before the others: a message that is processed in between is then on two
sides, which is no fault, and not on none, which would be one.

One aggregation over ids combines all sides. Spark does that within bounded memory and spills the
rest. Only counts and a few examples come back to the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from glob import glob
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.queues import Queues, exact_subscription
from sluice.spark.pipelines.tables import open_table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

WAITING: Final = "waiting"
OUTCOMES: Final = ("acked", "dead", WAITING)  # each message must have one of these outcomes
SIDES: Final = ("published", *OUTCOMES, "archived")
POSITION_COLUMNS: Final = ("queue", "partition", "sequence")
MAX_EXAMPLES: Final = 10


def select_ids(rows: DataFrame, expression: str = "") -> DataFrame:
    """Return the ids of one side, with the position of each row if it has one.

    For dead letters that is the id of the original message, else `message_id`, else `id`.
    """
    names = rows.columns
    if expression:
        ids = [f.expr(expression)]
    else:
        ids = [f.col(name) for name in ("original_message_id", "message_id", "id") if name in names]
    if not ids:
        raise InvalidOption(
            f"nothing among {', '.join(names)} is an id",
            "Say which by #EXPRESSION after the source",
        )
    position = (
        [f.struct(*POSITION_COLUMNS).alias("place")] if set(POSITION_COLUMNS) <= set(names) else []
    )
    return rows.select(f.coalesce(*ids).cast("string").alias("id"), *position)


def reconcile(sides: Mapping[str, DataFrame]) -> DataFrame:
    """Return one row per id with its count on each side.

    `sides` maps names out of SIDES to rows. Rows without an id form one row of their own.
    """
    tagged = [
        rows.select("id", f.lit(SIDES.index(name)).cast("tinyint").alias("side"))
        for name, rows in sides.items()
    ]
    together = reduce(lambda one, other: one.unionAll(other), tagged)
    counts = [
        f.count(f.when(f.col("side") == nth, 1)).alias(name)
        for nth, name in enumerate(SIDES)
        if name in sides
    ]
    return together.groupBy("id").agg(*counts)


@dataclass
class AuditResult:
    """The result of an audit. `known`: the sides that took part; `examples`: some ids for each
    fault.
    """

    known: list[str]
    ids: dict[str, int] = field(default_factory=dict)  # distinct ids on each side
    faults: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not any(self.faults.values())

    def summary(self) -> dict[str, Any]:
        return {
            "ok": self.is_good,
            "ids": self.ids,
            "faults": self.faults,
            "examples": self.examples,
        }


WITHOUT_ID: Final = "without an id"
FAULTS: Final = {
    WITHOUT_ID: "rows that cannot be compared with anything",
    "missing": "published, and nothing became of it",
    "not archived": "published, and not in the archive",
    "never published": "acknowledged, dead or archived, and never published",
    "acked twice": "done more than once",
    "archived twice": "one message, more than one row of the archive",
}


def compare_sides(sides: Mapping[str, DataFrame], examples: int = MAX_EXAMPLES) -> AuditResult:
    """Find missing messages and duplicates. A second pass collects examples if there are faults."""
    check_sides(sides)
    result = AuditResult([name for name in SIDES if name in sides])
    counts = reconcile(sides)
    named = f.col("id").isNotNull()
    conditions = {name: named & test for name, test in _conditions(sides).items()}
    every = reduce(lambda one, other: one + other, (f.col(name) for name in result.known))
    totals = counts.agg(
        *(f.count(f.when(named & (f.col(name) > 0), 1)).alias(name) for name in result.known),
        *(f.count(f.when(test, 1)).alias(f"is {name}") for name, test in conditions.items()),
        f.coalesce(f.sum(f.when(~named, every)), f.lit(0)).alias(WITHOUT_ID),
    ).collect()[0]
    result.ids = {name: totals[name] for name in result.known}
    result.faults = {
        WITHOUT_ID: totals[WITHOUT_ID],
        **{name: totals[f"is {name}"] for name in conditions},
    }
    if any(result.faults[name] for name in conditions):
        wrong = counts.where(reduce(lambda one, other: one | other, conditions.values())).persist()
        if result.faults.get("archived twice") and "place" in sides["archived"].columns:
            double = _duplicated_ids(
                sides["archived"], wrong.where(conditions["archived twice"]).select("id")
            )
            result.faults["archived twice"] = double.count()
            conditions["archived twice"] = f.col("id").isin(
                [one["id"] for one in double.limit(examples).collect()]
            )
        for name, test in conditions.items():
            if result.faults[name]:
                some = wrong.where(test).select("id").limit(examples).collect()
                result.examples[name] = sorted(one["id"] for one in some)
        wrong.unpersist()
    return result


def check_sides(sides: Mapping[str, object]) -> None:
    """Refuse an audit that has nothing to compare."""
    if "published" not in sides or len(sides) < 2:
        raise InvalidOption(
            "an audit compares what was published with something",
            "Give --published and at least one of --acked, --dead, --waiting and --archived",
        )


def _conditions(sides: Mapping[str, DataFrame]) -> dict[str, Column]:
    """Return the test for each fault that the known sides can reveal."""
    published = f.col("published") > 0
    ends = [name for name in OUTCOMES if name in sides]
    tests: dict[str, Column] = {}
    if ends:
        became = reduce(lambda one, other: one | other, (f.col(name) > 0 for name in ends))
        tests["missing"] = published & ~became
    if "archived" in sides:
        tests["not archived"] = published & (f.col("archived") == 0)
    tests["never published"] = ~published
    if "acked" in sides:
        tests["acked twice"] = f.col("acked") > 1
    if "archived" in sides:
        tests["archived twice"] = f.col("archived") > 1
    return tests


def _duplicated_ids(archived: DataFrame, suspects: DataFrame) -> DataFrame:
    """Return the suspects with several rows from one position of the queue.

    Two rows of one id are no fault if they are two messages: a redriven one, or one that was
    published again. Few ids are suspects.
    """
    rows = archived.join(suspects, "id", "left_semi").groupBy("id", "place").count()
    return rows.where("count > 1").select("id").distinct()


@dataclass(frozen=True)
class AuditSource:
    """The source of one side.

    `queue:NAME`; the backlog of a group (`queue:NAME?group=GROUP`); the dead letters of a queue
    (DEAD_LETTERS and its name); `json:`, `csv:` or `parquet:` and a path; or the directory of an
    archive. `#EXPRESSION` after it says what the id is.
    """

    kind: str
    location: str
    expression: str
    group: str = ""

    @property
    def queue(self) -> str:
        return self.location if self.kind == QUEUE else ""


QUEUE: Final = "queue"
DEAD_LETTERS: Final = "letters"  # words: allowed (users write it)
GROUP_SUFFIX: Final = "?group="
ARCHIVE: Final = "archive"
FILES: Final = ("json", "csv", "parquet")


def parse_source(text: str) -> AuditSource:
    """Parse a source of the command line; refuse an unknown kind or a missing file."""
    source_text, _, expression = text.partition("#")
    kind, colon, location = source_text.partition(":")
    if not colon:
        kind, location = ARCHIVE, source_text
    group = ""
    if kind == QUEUE and GROUP_SUFFIX in location:
        location, _, group = location.rpartition(GROUP_SUFFIX)
        location = location if group else ""
    if kind not in (QUEUE, DEAD_LETTERS, ARCHIVE, *FILES) or not location:
        raise InvalidOption(
            f"{text!r} names no source",
            f"Give queue:NAME, queue:NAME?group=GROUP, {DEAD_LETTERS}:NAME, json:PATH, csv:PATH,"
            " parquet:PATH or the directory of an archive",
        )
    if kind == ARCHIVE:
        open_table(location).existing_files()
    elif kind in FILES and not glob(location) and "://" not in location:
        raise InvalidOption(f"{text!r}: there is no file {location}", "Correct the path")
    return AuditSource(kind, location, expression, group)


def run(spark: SparkSession, queues: Queues, given: Mapping[str, AuditSource]) -> AuditResult:
    """Read the sides in the right order and compare them."""
    check_sides(given)
    if WAITING not in given:
        return compare_sides(
            {name: read_side(spark, queues, source) for name, source in given.items()}
        )
    waiting = read_side(spark, queues, given[WAITING]).persist()
    try:
        waiting.count()
        others = {
            name: read_side(spark, queues, one) for name, one in given.items() if name != WAITING
        }
        return compare_sides({**others, WAITING: waiting})
    finally:
        waiting.unpersist()


def read_side(spark: SparkSession, queues: Queues, source: AuditSource) -> DataFrame:
    """Return the rows of a side.

    A queue that does not exist counts as an empty dead-letter queue; the caller checks that the
    others exist.
    """
    location = source.location
    if source.kind == ARCHIVE:
        rows = open_table(location).read(spark)
    elif source.kind == "json":
        rows = spark.read.json(location)
    elif source.kind == "csv":
        rows = spark.read.csv(location, header=True)
    elif source.kind == "parquet":
        rows = spark.read.parquet(location)
    elif source.kind == DEAD_LETTERS:
        dead_letter_queues = queues.dead_letter_queues(location)
        if not dead_letter_queues:
            return spark.createDataFrame([], "id string")
        rows = queues.dead_letters(spark, location, dead_letter_queues)
    elif not queues.exists(location):
        return spark.createDataFrame([], "id string")
    elif source.group:  # messages settled during the read were processed
        rows = queues.read(
            spark,
            exact_subscription(location),
            group=source.group,
            startingOffsets="group",
            failOnDataLoss="false",
        )
    else:
        rows = queues.read(spark, exact_subscription(location))
    return select_ids(rows, source.expression)
