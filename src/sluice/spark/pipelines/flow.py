"""`flow`: how much comes through, and how long it takes, per window of time.

Throughput is counted by the time at which a message was stored. Latency needs a second time, which only the user can
name: `since` and `until` are SQL expressions over a row, such as `headers['sent-at']` (what the publisher wrote) or, of
an archive, `archived_at`. A time may be a timestamp, ISO 8601 text, or a number of seconds or milliseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f
from pyspark.sql import types as t

from sluice.markup import Piece, element
from sluice.notation import parse_duration
from sluice.spark.faults import InvalidOption
from sluice.spark.pipelines.report import charts, page, wording
from sluice.spark.pipelines.spans import fill

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from sluice.spark.pipelines.queues import Queues

PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
ACCURACY: Final = 1000  # of percentiles: off by a thousandth of the rows of a window
MILLISECONDS: Final = (
    100_000_000_000  # from here on a number is not seconds since 1970: that would be the year 5138
)
SLOWEST: Final = 10
ROWS_PER_BATCH: Final = 200_000


def windows(
    messages: DataFrame, window: str = "1 minute", since: str = "", until: str = "timestamp"
) -> DataFrame:
    """One row per queue and window: messages, bytes, keys, and the latency from `since` to `until` in seconds."""
    rows = messages.select(
        "queue",
        "timestamp",
        f.octet_length("value").alias("bytes"),
        "key",
        latency(messages, since, until).alias("latency"),
    )
    found = rows.groupBy(f.window("timestamp", window).alias("span"), "queue").agg(
        f.count("*").alias("messages"),
        f.sum("bytes").alias("bytes"),
        f.approx_count_distinct("key").alias("keys"),
        f.count("latency").alias("timed"),
        f.percentile_approx("latency", list(PERCENTILES.values()), ACCURACY).alias("percentiles"),
        f.max("latency").alias("slowest"),
    )
    return found.select(
        f.col("span.start").alias("start"),
        f.col("span.end").alias("end"),
        "queue",
        "messages",
        "bytes",
        "keys",
        "timed",
        *(f.col("percentiles")[nth].alias(name) for nth, name in enumerate(PERCENTILES)),
        "slowest",
    )


def latency(messages: DataFrame, since: str, until: str) -> Column:
    """Seconds from one time to the other; null where either is missing. Clocks differ: less than nothing is nothing."""
    if not since:
        return f.lit(None).cast("double")
    start, end = _seconds(messages, since, "--since"), _seconds(messages, until, "--until")
    taken = end - start
    return f.when(taken < 0, f.lit(0.0)).otherwise(taken)


def _seconds(messages: DataFrame, expression: str, flag: str) -> Column:
    """Any way to write a time, as seconds since 1970."""
    from pyspark.errors import AnalysisException, ParseException

    from sluice.spark.pipelines.running import explained

    try:
        kind = messages.select(f.expr(expression).alias("time")).schema["time"].dataType
    except (AnalysisException, ParseException) as fault:
        raise InvalidOption(
            f"{flag} {expression!r} cannot be used: {explained(fault).what}",
            f"Give an expression over the columns {', '.join(messages.columns)}",
        ) from None
    value = f.expr(expression)
    if isinstance(kind, t.TimestampType | t.TimestampNTZType | t.DateType):
        return value.cast("timestamp").cast("double")
    number = f.expr(f"try_cast(string({expression}) as double)")
    return f.coalesce(
        f.when(number >= MILLISECONDS, number / 1000).otherwise(number),
        f.expr(f"try_cast(string({expression}) as timestamp)").cast("double"),
    )


def merge(known: dict[tuple[datetime, str], Row], fresh: Sequence[Row], most: int = 10_000) -> None:
    """Windows that a stream has counted anew replace their older counts; the oldest are forgotten."""
    for one in fresh:
        known[one["start"], one["queue"]] = one
    for place in sorted(known)[: max(0, len(known) - most)]:
        del known[place]


def summary(found: Sequence[Row], window: str) -> dict[str, Any]:
    """For `--json` and the end of the command."""
    messages = sum(one["messages"] for one in found)
    timed = [one for one in found if one["timed"]]
    rates: dict[datetime, float] = {}
    for one in found:
        rates[one["start"]] = rates.get(one["start"], 0.0) + one["messages"] / _length(one)
    return {
        "messages": messages,
        "bytes": sum(one["bytes"] or 0 for one in found),
        "queues": sorted({one["queue"] for one in found}),
        "windows": len({one["start"] for one in found}),
        "window": window,
        "peak_per_second": max(rates.values(), default=0.0),
        "latency": None
        if not timed
        else {
            # Of windows, percentiles can only be compared: the median one, and the worst.
            "p50_median": sorted(one["p50"] for one in timed)[len(timed) // 2],
            "p99_worst": max(one["p99"] for one in timed),
            "slowest": max(one["slowest"] for one in timed),
        },
    }


def report(found: Sequence[Row], queue: str, window: str, now: datetime | None = None) -> str:
    """The page."""
    now = now or datetime.now(UTC)
    if not found:
        return page.render("Flow", queue, element("p", "Nothing has come through."), made_at=now)
    told = summary(found, window)
    first, last = min(one["start"] for one in found), max(one["end"] for one in found)
    seconds = max((last - first).total_seconds(), 1.0)
    facts = [
        ("messages", wording.count(told["messages"])),
        ("volume", wording.size(told["bytes"])),
        ("mean rate", f"{wording.short(told['messages'] / seconds)}/s"),
        ("peak", f"{wording.short(told['peak_per_second'])}/s"),
    ]
    timed = told["latency"]
    if timed is not None:
        facts += [
            ("median latency", wording.lasting(timed["p50_median"])),
            ("worst p99", wording.lasting(timed["p99_worst"])),
            ("slowest", wording.lasting(timed["slowest"])),
        ]
    return page.render(
        "Flow",
        f"{queue}, {wording.moment(first)} to {wording.moment(last)}, in windows of {window}",
        page.facts(facts),
        _throughput(found),
        _latency(found) if timed is not None else _no_latency(),
        _queue_table(found, seconds),
        _slowest(found) if timed is not None else None,
        made_at=now,
    )


def _throughput(found: Sequence[Row]) -> Piece:
    bucket, times, queues = _grid(found)
    rates = {(one["queue"], one["start"]): one["messages"] / _length(one) for one in found}
    return charts.lines(
        "Throughput",
        "messages per second",
        times,
        bucket,
        [
            charts.Series(name, [rates.get((name, time), 0.0) for time in times], nth, area=len(queues) == 1)
            for nth, name in enumerate(queues)
        ],
    )


def _latency(found: Sequence[Row]) -> Piece:
    """The worst queue in each window: a quick one must not hide a slow one."""
    bucket, times, _ = _grid(found)

    def worst(name: str) -> list[float | None]:
        most: dict[datetime, float] = {}
        for one in found:
            if one["timed"]:
                most[one["start"]] = max(most.get(one["start"], 0.0), one[name])
        return [most.get(time) for time in times]

    series = [
        charts.Series(label, worst(name), tone)
        for name, label, tone in (
            ("p50", "p50", 4),
            ("p90", "p90", 0),
            ("p99", "p99", 1),
            ("slowest", "slowest", 2),
        )
    ]
    return charts.lines("Latency", "", times, bucket, series, wording.lasting)


def _no_latency() -> Piece:
    return element(
        "p",
        "Latency needs the time at which a message began: publishers write it into a user property, and --since names "
        "it, for example --since \"string(headers['sent-at'])\".",
        class_="soft card",
    )


def _queue_table(found: Sequence[Row], seconds: float) -> Piece:
    columns = [page.Column("queue")]
    columns += [
        page.Column(head, number=True) for head in ("messages", "volume", "mean rate", "peak", "worst p99")
    ]
    rows: list[list[Piece]] = []
    for name in _by_volume(found):
        mine = [one for one in found if one["queue"] == name]
        messages = sum(one["messages"] for one in mine)
        p99 = max((one["p99"] for one in mine if one["timed"]), default=None)
        rows.append(
            [
                name,
                wording.count(messages),
                wording.size(sum(one["bytes"] or 0 for one in mine)),
                f"{wording.short(messages / seconds)}/s",
                f"{wording.short(max(one['messages'] / _length(one) for one in mine))}/s",
                "" if p99 is None else wording.lasting(p99),
            ]
        )
    return page.table("Queues", columns, rows)


def _slowest(found: Sequence[Row]) -> Piece:
    columns = [page.Column("window"), page.Column("queue")]
    columns += [page.Column(head, number=True) for head in ("messages", "p50", "p90", "p99", "slowest")]
    worst = sorted((one for one in found if one["timed"]), key=lambda one: -one["p99"])[:SLOWEST]
    rows: list[list[Piece]] = [
        [
            wording.moment(one["start"]),
            one["queue"],
            wording.count(one["messages"]),
            *(wording.lasting(one[name]) for name in ("p50", "p90", "p99", "slowest")),
        ]
        for one in worst
    ]
    return page.table("The slowest windows", columns, rows)


def _grid(found: Sequence[Row]) -> tuple[timedelta, list[datetime], list[str]]:
    bucket: timedelta = found[0]["end"] - found[0]["start"]
    return bucket, fill([one["start"] for one in found], bucket), _by_volume(found)[: charts.TONES]


def _by_volume(found: Sequence[Row]) -> list[str]:
    sums: dict[str, int] = {}
    for one in found:
        sums[one["queue"]] = sums.get(one["queue"], 0) + one["messages"]
    return sorted(sums, key=lambda name: (-sums[name], name))


def _length(one: Row) -> float:
    seconds: float = (one["end"] - one["start"]).total_seconds()
    return seconds


def spark_window(text: str) -> str:
    """`30s` and `5m`, as Spark says it."""
    try:
        seconds = parse_duration(text)
    except ValueError as fault:
        raise InvalidOption(
            f"--window {text!r}: {fault}", 'Give a duration such as "10s", "1m" or "1h"'
        ) from None
    if seconds < 1 or seconds != int(seconds):
        raise InvalidOption(f"--window {text!r} is too fine", "Give whole seconds")
    return f"{int(seconds)} seconds"


def start(
    spark: SparkSession,
    queues: Queues,
    queue: str,
    tell: Callable[[list[Row]], None],
    *,
    window: str,
    since: str = "",
    until: str = "timestamp",
    every: str = "10 seconds",
    late: str = "10 minutes",
    checkpoint: str | Path | None = None,
) -> StreamingQuery:
    """Count as messages come, those that are kept first. `tell` hears of all windows whenever some have changed; one is
    open for messages that are `late`. Who only watches has no group, and keeps no message from being deleted."""
    messages = queues.stream(spark, queue, rows_per_batch=ROWS_PER_BATCH, failOnDataLoss="false")
    counted = windows(messages.withWatermark("timestamp", late), window, since, until)
    known: dict[tuple[datetime, str], Row] = {}

    def take(batch: DataFrame, number: int) -> None:
        merge(known, batch.collect())
        tell([known[place] for place in sorted(known)])

    writer = counted.writeStream.queryName(f"flow {queue}").outputMode("update").foreachBatch(take)
    if checkpoint is not None:
        writer = writer.option("checkpointLocation", str(Path(checkpoint).absolute()))
    return writer.trigger(processingTime=every).start()
