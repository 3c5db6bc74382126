"""`dead-letters`: count what fails, why, and since when.

Descriptions of one fault differ in numbers and ids ("order 17 has no address", "order 18 ..."), so
a cause is the description with those replaced by `#`: a thousand dead letters become a handful of
faults to fix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from sluice.report import Piece, element, formatting, page
from sluice.report import time_charts as charts
from sluice.spark.pipelines.support.time_buckets import choose_bucket, fill_gaps

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SHOWN_CAUSES: Final = 50
SHOWN_DEAD_LETTERS: Final = 20
MIN_BUCKETS: Final = 24
COUNT_COLUMN: Final = "letters"  # words: allowed (column of reports, JSON key)
MAX_LAYERS: Final = 7  # causes with a color of their own; the rest is one layer
MAX_SHARES: Final = 7  # reasons and groups with a bar of their own
SHOWN_BYTES: Final = 400  # of a payload that are collected
SHOWN_CHARS: Final = 600  # of a description
# UUIDs, hexadecimal numbers, and decimal numbers; in this order, because each would match parts of
# the one before.
_VARIABLE: Final = (
    r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|0x[0-9a-fA-F]+|\b[0-9a-f]{16,}\b|\d+"
)


def with_cause(dead_letters: DataFrame) -> DataFrame:
    """Add the columns `cause` (the kind of fault), `died` (when), `failed_queue` and `why`.

    `died` is the time of the message if it was published to the dead-letter queue directly.
    """
    why = f.coalesce("reason", f.lit("unknown"))
    description = f.coalesce(
        f.nullif(f.trim("description"), f.lit("")),
        f.concat(f.lit("("), why, f.lit(", no description)")),
    )
    return dead_letters.select(
        "*",
        f.regexp_replace(description, _VARIABLE, "#").alias("cause"),
        f.coalesce("dead_at", "timestamp").alias("died"),
        f.coalesce("original_queue", "queue").alias("failed_queue"),
        why.alias("why"),
    )


def causes(dead_letters: DataFrame) -> DataFrame:
    """Return one row per cause, the most frequent first, with an example."""
    return (
        with_cause(dead_letters)
        .groupBy("failed_queue", "why", "cause")
        .agg(
            f.count("*").alias(COUNT_COLUMN),
            f.count_distinct("key").alias("keys"),
            f.array_sort(f.collect_set("original_group")).alias("groups"),
            f.round(f.avg("attempts"), 1).alias("attempts"),
            f.min("died").alias("since"),
            f.max("died").alias("until"),
            f.max_by(f.struct("message_id", *_payload()), "died").alias("newest"),
        )
        .select("*", "newest.*")
        .withColumnRenamed("message_id", "example")
        .drop("newest")
        .orderBy(f.desc(COUNT_COLUMN), "failed_queue", "cause")
    )


def _payload() -> tuple[Column, Column]:
    """Return the beginning of the payload, and its full length."""
    return f.substring("value", 1, SHOWN_BYTES).alias("payload"), f.octet_length("value").alias(
        "size"
    )


def over_time(dead_letters: DataFrame, bucket: timedelta, named: Sequence[str]) -> DataFrame:
    """Count dead letters per time bucket and cause. Causes that are not in `named` are one, under
    null.
    """
    cause = f.when(f.col("cause").isin(list(named)), f.col("cause"))
    return (
        with_cause(dead_letters)
        .withColumn("cause", cause)
        .groupBy(f.window("died", f"{int(bucket.total_seconds())} seconds").alias("span"), "cause")
        .agg(f.count("*").alias(COUNT_COLUMN))
        .select(f.col("span.start").alias("start"), "cause", COUNT_COLUMN)
        .orderBy("start", "cause")
    )


Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Shares:
    """The largest of `kinds`, each with its number of dead letters."""

    kinds: int = 0
    largest: Rows = field(default_factory=list)

    def bars(
        self, total: int, name: Callable[[dict[str, Any]], str]
    ) -> list[tuple[str, float, int]]:
        """Return one bar for each of the largest, and one in another tone for the rest."""
        bars = [(name(one), float(one[COUNT_COLUMN]), 0) for one in self.largest]
        rest = self.kinds - len(bars)
        if rest:
            left = total - sum(count for _, count, _ in bars)
            bars.append((formatting.format_others(rest), left, charts.TONES - 1))
        return bars


@dataclass(frozen=True)
class Findings:
    """The content of a report, collected.

    The number of rows is bounded, independent of the number of dead letters, causes, reasons and
    groups. All times are UTC.
    """

    total: int = 0
    kinds: int = 0  # of causes; `causes` holds the most frequent
    queues: int = 0
    since: datetime | None = None
    until: datetime | None = None
    bucket: timedelta = timedelta(hours=1)
    causes: Rows = field(default_factory=list)
    buckets: Rows = field(default_factory=list)
    reasons: Shares = field(default_factory=Shares)
    groups: Shares = field(default_factory=Shares)
    newest: Rows = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the findings for `--json`."""
        return {
            COUNT_COLUMN: self.total,
            "kinds": self.kinds,
            "since": _iso(self.since),
            "until": _iso(self.until),
            "causes": [
                {
                    "queue": one["failed_queue"],
                    "reason": one["why"],
                    "cause": one["cause"],
                    COUNT_COLUMN: one[COUNT_COLUMN],
                    "keys": one["keys"],
                    "groups": one["groups"],
                    "attempts": one["attempts"],
                    "since": _iso(one["since"]),
                    "until": _iso(one["until"]),
                    "example": one["example"],
                }
                for one in self.causes
            ],
        }


NO_FINDINGS: Final = Findings()


def summarize(dead_letters: DataFrame) -> Findings:
    """Read the dead letters once and collect everything for the report."""
    dead_letters = dead_letters.persist()
    try:
        group = f.coalesce("original_group", f.lit("(no group)"))
        dated = with_cause(dead_letters).withColumn("group", group)
        [totals] = _collect_rows(
            dated.agg(
                f.count("*").alias("total"),
                f.count_distinct("failed_queue", "why", "cause").alias("kinds"),
                f.count_distinct("failed_queue").alias("queues"),
                f.count_distinct("failed_queue", "group").alias("groups"),
                f.count_distinct("why").alias("reasons"),
                f.min("died").alias("since"),
                f.max("died").alias("until"),
            )
        )
        bucket = choose_bucket(totals["since"], totals["until"])
        frequent = _collect_rows(causes(dead_letters).limit(SHOWN_CAUSES))
        newest = dated.orderBy(f.desc("died")).select(
            "message_id",
            "died",
            "failed_queue",
            "why",
            "description",
            "cause",
            "attempts",
            *_payload(),
        )
        return Findings(
            totals["total"],
            totals["kinds"],
            totals["queues"],
            totals["since"],
            totals["until"],
            bucket,
            frequent,
            _collect_rows(over_time(dead_letters, bucket, list(_tones(frequent))[:MAX_LAYERS])),
            Shares(totals["reasons"], _largest(dated, "why")),
            Shares(totals["groups"], _largest(dated, "failed_queue", "group")),
            _collect_rows(newest.limit(SHOWN_DEAD_LETTERS)),
        )
    finally:
        dead_letters.unpersist()


def _largest(dated: DataFrame, *names: str) -> Rows:
    counted = dated.groupBy(*names).agg(f.count("*").alias(COUNT_COLUMN))
    return _collect_rows(counted.orderBy(f.desc(COUNT_COLUMN), *names).limit(MAX_SHARES))


def _collect_rows(frame: DataFrame) -> Rows:
    """Collect rows, with times in UTC.

    Spark's rows have local times without a zone. One hour each autumn exists twice, and one each
    spring makes differences wrong, so times are converted before any arithmetic.
    """
    return [
        {
            name: formatting.to_utc(value) if isinstance(value, datetime) else value
            for name, value in row.asDict().items()
        }
        for row in frame.collect()
    ]


def report(found: Findings, queue: str, now: datetime | None = None) -> str:
    """Return the HTML page."""
    now = now or datetime.now(UTC)
    if not found.total:
        return page.render(
            "Dead letters",
            queue,
            element("p", "There are none. Nothing has failed for good."),
            made_at=now,
        )
    tones = _tones(found.causes)
    return page.render(
        "Dead letters",
        f"{queue}, {formatting.format_time(found.since)} to {formatting.format_time(found.until)}",
        page.facts(
            [
                ("dead letters", formatting.format_count(found.total)),
                ("different causes", formatting.format_count(found.kinds)),
                ("queues", formatting.format_count(found.queues)),
                ("first", _ago(found.since, now)),
                ("latest", _ago(found.until, now)),
            ]
        ),
        _chart(found, tones),
        element("div", _reasons(found), _groups(found), class_="pair"),
        _cause_table(found, tones, now),
        _dead_letter_table(found),
        made_at=now,
    )


def _tones(causes: Rows) -> dict[str, int]:
    tones: dict[str, int] = {}
    for one in causes:
        tones.setdefault(one["cause"], min(len(tones), MAX_LAYERS))
    return tones


def _chart(found: Findings, tones: dict[str, int]) -> Piece:
    times = fill_gaps([one["start"] for one in found.buckets], found.bucket, MIN_BUCKETS)
    counts: dict[tuple[int, datetime], float] = {}
    for one in found.buckets:
        position = (tones.get(one["cause"], MAX_LAYERS), one["start"])
        counts[position] = counts.get(position, 0) + one[COUNT_COLUMN]
    named = {tone: cause for cause, tone in reversed(tones.items())}
    layers = [
        charts.Series(
            "other causes" if tone == MAX_LAYERS else _truncate(named[tone], 60),
            [counts.get((tone, time)) for time in times],
            tone,
        )
        for tone in sorted({tone for tone, _ in counts})
    ]
    return charts.stacked_bars(
        "When they died",
        f"dead letters per {formatting.format_duration(found.bucket.total_seconds())}",
        times,
        found.bucket,
        layers,
    )


def _reasons(found: Findings) -> Piece:
    return charts.share_bars(
        "Why", "by reason", found.reasons.bars(found.total, lambda one: str(one["why"]))
    )


def _groups(found: Findings) -> Piece:
    def name(one: dict[str, Any]) -> str:
        return one["group"] if found.queues == 1 else f"{one['failed_queue']} · {one['group']}"

    return charts.share_bars(
        "Who gave up", "by consumer group", found.groups.bars(found.total, name)
    )


def _cause_table(found: Findings, tones: dict[str, int], now: datetime) -> Piece:
    columns = [
        page.Column("description, and an example payload", wide=True),
        page.Column("dead letters", number=True),
        page.Column("queue"),
        page.Column("reason"),
        page.Column("keys", number=True),
        page.Column("tries", number=True),
        page.Column("since"),
        page.Column("latest", number=True),
    ]
    rows: list[list[Piece]] = [
        [
            _cause_cell(one["cause"], one, tones.get(one["cause"], MAX_LAYERS)),
            formatting.format_count(one[COUNT_COLUMN]),
            one["failed_queue"],
            one["why"],
            formatting.format_count(one["keys"]),
            "" if one["attempts"] is None else f"{one['attempts']:g}",
            formatting.format_time(one["since"]),
            _ago(one["until"], now),
        ]
        for one in found.causes
    ]
    return page.table(
        "What goes wrong",
        columns,
        rows,
        "Numbers and ids in descriptions are written as #:"
        " dead letters that differ in nothing else are one cause."
        + (f" These are the {len(rows)} most frequent." if found.kinds > len(rows) else ""),
    )


def _dead_letter_table(found: Findings) -> Piece:
    columns = [
        page.Column("description, and the payload", wide=True),
        page.Column("queue"),
        page.Column("reason"),
        page.Column("tries", number=True),
        page.Column("died"),
        page.Column("dead letter", code=True),
    ]
    rows: list[list[Piece]] = [
        [
            _cause_cell(one["description"] or one["cause"], one),
            one["failed_queue"],
            one["why"],
            "" if one["attempts"] is None else str(one["attempts"]),
            formatting.format_time(one["died"]),
            one["message_id"],
        ]
        for one in found.newest
    ]
    note = f"The {len(rows)} that died last." if found.total > len(rows) else ""
    return page.table("The newest", columns, rows, note)


def _cause_cell(text: str, row: dict[str, Any], tone: int | None = None) -> Piece:
    swatch = None if tone is None else element("span", class_=f"swatch tone-{tone}")
    shown = formatting.payload_text(row["payload"], length=row["size"])
    return [
        element("div", swatch, _truncate(text, SHOWN_CHARS), class_="cause"),
        element("div", shown, class_="code soft") if shown else None,
    ]


def _ago(time: datetime | None, now: datetime) -> str:
    """Format the time since `time`, in whole seconds."""
    seconds = 0.0 if time is None else (now - time).total_seconds()
    return f"{formatting.format_duration(max(1, round(seconds)))} ago"


def _truncate(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()
