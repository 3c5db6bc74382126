"""`dead-letters`: what fails, why, and since when.

Descriptions of one fault differ in numbers and ids ("order 17 has no address", "order 18 ..."), so a cause is the
description with those replaced by `#`: a thousand letters become the handful of things to mend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from sluice.markup import Piece, element
from sluice.spark.pipelines.report import charts, page, wording
from sluice.spark.pipelines.spans import choose_bucket, fill

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

SHOWN_CAUSES: Final = 50
SHOWN_LETTERS: Final = 20
LEAST_SPANS: Final = 24
LAYERS: Final = 7  # causes with a colour of their own; the rest is one layer
# UUIDs, hexadecimal numbers, and any number; in this order, because each would eat parts of the one before.
_VARIABLE: Final = (
    r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|0x[0-9a-fA-F]+|\b[0-9a-f]{16,}\b|\d+"
)


def with_cause(letters: DataFrame) -> DataFrame:
    """Dead letters and, as `cause`, the kind of fault; `died` is when, whoever wrote the letter."""
    why = f.coalesce("reason", f.lit("unknown"))
    said = f.coalesce(
        f.nullif(f.trim("description"), f.lit("")), f.concat(f.lit("("), why, f.lit(", nothing said)"))
    )
    return letters.select(
        "*",
        f.regexp_replace(said, _VARIABLE, "#").alias("cause"),
        f.coalesce("dead_at", "timestamp").alias("died"),
        f.coalesce("original_queue", "queue").alias("failed_queue"),
        why.alias("why"),
    )


def causes(letters: DataFrame) -> DataFrame:
    """One row for each thing that goes wrong, the most frequent first, with an example."""
    return (
        with_cause(letters)
        .groupBy("failed_queue", "why", "cause")
        .agg(
            f.count("*").alias("letters"),
            f.approx_count_distinct("key").alias("keys"),
            f.array_sort(f.collect_set("original_group")).alias("groups"),
            f.round(f.avg("attempts"), 1).alias("attempts"),
            f.min("died").alias("since"),
            f.max("died").alias("until"),
            f.max_by("message_id", "died").alias("example"),
            f.max_by(f.substring("value", 1, 400), "died").alias("payload"),
        )
        .orderBy(f.desc("letters"), "failed_queue", "cause")
    )


def over_time(letters: DataFrame, bucket: timedelta, named: Sequence[str]) -> DataFrame:
    """How many died in each span of time, by cause; those of causes that are not named together, under null."""
    cause = f.when(f.col("cause").isin(list(named)), f.col("cause"))
    return (
        with_cause(letters)
        .withColumn("cause", cause)
        .groupBy(f.window("died", f"{int(bucket.total_seconds())} seconds").alias("span"), "cause")
        .agg(f.count("*").alias("letters"))
        .select(f.col("span.start").alias("start"), "cause", "letters")
        .orderBy("start", "cause")
    )


@dataclass(frozen=True)
class Findings:
    """What a report tells, collected: a bounded number of rows, however many letters and causes there are."""

    total: int
    kinds: int  # of causes; `causes` are the most frequent
    since: datetime | None
    until: datetime | None
    bucket: timedelta
    causes: list[Row]
    spans: list[Row]
    ends: list[Row]  # by queue, group and reason
    newest: list[Row]

    def summary(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "letters": self.total,
            "kinds": self.kinds,
            "since": _iso(self.since),
            "until": _iso(self.until),
            "causes": [
                {
                    "queue": one["failed_queue"],
                    "reason": one["why"],
                    "cause": one["cause"],
                    "letters": one["letters"],
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


NONE: Final = Findings(0, 0, None, None, timedelta(hours=1), [], [], [], [])


def look(letters: DataFrame) -> Findings:
    """Read the letters once, and ask all there is to ask."""
    letters = letters.persist()
    try:
        dated = with_cause(letters)
        kinds = f.count_distinct("failed_queue", "why", "cause")
        total, kinds_, since, until = dated.agg(f.count("*"), kinds, f.min("died"), f.max("died")).collect()[
            0
        ]
        bucket = choose_bucket(since, until)
        group = f.coalesce("original_group", f.lit("(no group)")).alias("group")
        ends = dated.groupBy("failed_queue", group, "why").agg(f.count("*").alias("letters"))
        frequent = causes(letters).limit(SHOWN_CAUSES).collect()
        newest = dated.orderBy(f.desc("died")).select(
            "message_id",
            "died",
            "failed_queue",
            "why",
            "description",
            "cause",
            "attempts",
            f.substring("value", 1, 400).alias("payload"),
        )
        return Findings(
            total,
            kinds_,
            since,
            until,
            bucket,
            frequent,
            over_time(letters, bucket, list(_tones(frequent))[:LAYERS]).collect(),
            ends.collect(),
            newest.limit(SHOWN_LETTERS).collect(),
        )
    finally:
        letters.unpersist()


def report(found: Findings, queue: str, now: datetime | None = None) -> str:
    """The page."""
    now = now or datetime.now(UTC)
    if not found.total:
        return page.render(
            "Dead letters", queue, element("p", "There are none. Nothing has failed for good."), made_at=now
        )
    tones = _tones(found.causes)
    return page.render(
        "Dead letters",
        f"{queue}, {wording.moment(found.since)} to {wording.moment(found.until)}",
        page.facts(
            [
                ("dead letters", wording.count(found.total)),
                ("different causes", wording.count(found.kinds)),
                ("queues", wording.count(len({one["failed_queue"] for one in found.ends}))),
                ("first", f"{wording.lasting(_ago(found.since, now))} ago"),
                ("latest", f"{wording.lasting(_ago(found.until, now))} ago"),
            ]
        ),
        _chart(found, tones),
        element("div", _reasons(found), _groups(found), class_="pair"),
        _cause_table(found, tones, now),
        _letter_table(found),
        made_at=now,
    )


def _tones(causes: Iterable[Row]) -> dict[str, int]:
    tones: dict[str, int] = {}
    for one in causes:
        tones.setdefault(one["cause"], min(len(tones), LAYERS))
    return tones


def _chart(found: Findings, tones: dict[str, int]) -> Piece:
    times = fill([one["start"] for one in found.spans], found.bucket, LEAST_SPANS)
    counts: dict[tuple[int, datetime], float] = {}
    for one in found.spans:
        place = (tones.get(one["cause"], LAYERS), one["start"])
        counts[place] = counts.get(place, 0) + one["letters"]
    named = {tone: cause for cause, tone in reversed(tones.items())}
    layers = [
        charts.Series(
            "other causes" if tone == LAYERS else _cut(named[tone], 60),
            [counts.get((tone, time)) for time in times],
            tone,
        )
        for tone in sorted({tone for tone, _ in counts})
    ]
    return charts.stacked_bars(
        "When they died",
        f"dead letters per {wording.lasting(found.bucket.total_seconds())}",
        times,
        found.bucket,
        layers,
    )


def _reasons(found: Findings) -> Piece:
    sums = _sums((one["why"], one["letters"]) for one in found.ends)
    return charts.shares("Why", "by reason", [(name, number, 0) for name, number in sums])


def _groups(found: Findings) -> Piece:
    queues = {one["failed_queue"] for one in found.ends}
    sums = _sums(
        (one["group"] if len(queues) == 1 else f"{one['failed_queue']} · {one['group']}", one["letters"])
        for one in found.ends
    )
    return charts.shares(
        "Who gave up", "by consumer group", [(name, number, 0) for name, number in sums[:LAYERS]]
    )


def _sums(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The largest first."""
    sums: dict[str, int] = {}
    for name, number in pairs:
        sums[name] = sums.get(name, 0) + number
    return sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))


def _cause_table(found: Findings, tones: dict[str, int], now: datetime) -> Piece:
    columns = [
        page.Column("what was said, and a payload for which", wide=True),
        page.Column("letters", number=True),
        page.Column("queue"),
        page.Column("reason"),
        page.Column("keys", number=True),
        page.Column("tries", number=True),
        page.Column("since"),
        page.Column("latest", number=True),
    ]
    rows: list[list[Piece]] = [
        [
            _said(one["cause"], one["payload"], tones.get(one["cause"], LAYERS)),
            wording.count(one["letters"]),
            one["failed_queue"],
            one["why"],
            wording.count(one["keys"]),
            "" if one["attempts"] is None else f"{one['attempts']:g}",
            wording.moment(one["since"]),
            f"{wording.lasting(_ago(one['until'], now))} ago",
        ]
        for one in found.causes
    ]
    return page.table(
        "What goes wrong",
        columns,
        rows,
        "Numbers and ids in what was said are written as #: letters that differ in nothing else are one cause."
        + (f" These are the {len(rows)} most frequent." if found.kinds > len(rows) else ""),
    )


def _letter_table(found: Findings) -> Piece:
    columns = [
        page.Column("what was said, and the payload", wide=True),
        page.Column("queue"),
        page.Column("reason"),
        page.Column("tries", number=True),
        page.Column("died"),
        page.Column("dead letter", code=True),
    ]
    rows: list[list[Piece]] = [
        [
            _said(one["description"] or one["cause"], one["payload"]),
            one["failed_queue"],
            one["why"],
            "" if one["attempts"] is None else str(one["attempts"]),
            wording.moment(one["died"]),
            one["message_id"],
        ]
        for one in found.newest
    ]
    return page.table("The newest", columns, rows)


def _said(text: str, payload: bytes | None, tone: int | None = None) -> Piece:
    swatch = None if tone is None else element("span", class_=f"swatch tone-{tone}")
    shown = wording.text_of(payload)
    return [
        element("div", swatch, text, class_="cause"),
        element("div", shown, class_="code soft") if shown else None,
    ]


def _ago(time: datetime | None, now: datetime) -> float:
    if time is None:
        return 0.0
    return max(0.0, (now - wording.utc(time)).total_seconds())


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _iso(time: datetime | None) -> str | None:
    return None if time is None else wording.utc(time).isoformat()
