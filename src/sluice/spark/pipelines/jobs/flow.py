"""`flow`: measure throughput and latency per time window.

Throughput is counted by the time at which a message was stored. Latency needs a second time, which
only the user can name: `since` and `until` are SQL expressions over a row, such as
`headers['sent-at']` (written by the publisher) or, in an archive, `archived_at`. A time may be a
timestamp, ISO 8601 text, or a number of seconds, milliseconds, microseconds or nanoseconds since
1970. Publishers can write anything, so implausible values do not count as times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f
from pyspark.sql import types as t

from sluice.report import Piece, element, formatting, page
from sluice.report import time_charts as charts
from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.support import latency_windows
from sluice.spark.pipelines.support.latency_windows import Count, Windows
from sluice.spark.pipelines.support.time_buckets import fill_gaps
from sluice.units import parse_duration

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from sluice.spark.pipelines.queues import Queues

# Limit and divisor of each unit: a number at or above the limit has this unit. As seconds, 1e11
# would be in the year 5138.
TIME_UNITS: Final = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
MAX_CLOCK_SKEW_SECONDS: Final = 60.0  # a larger negative latency is taken for a wrong time
SHOWN_SLOWEST: Final = 10
CHART_BUCKETS: Final = 240  # in a chart
SHOWN_QUEUES: Final = 50
ROWS_PER_BATCH: Final = 200_000


def counts(
    messages: DataFrame, window: str, since: str = "", until: str = "timestamp"
) -> DataFrame:
    """Return rows that can be summed, as `latency_windows.Count`: per queue, window and latency
    step.
    """
    rows = messages.select(
        "queue",
        f.window("timestamp", window).alias("span"),
        f.octet_length("value").alias("size"),
        latency(messages, since, until).alias("latency"),
    )
    step_index = (
        f.floor(
            f.log(f.col("latency") / latency_windows.MIN_LATENCY_SECONDS)
            / math.log(latency_windows.STEP_FACTOR)
        )
        + 1
    )
    step = (
        f.when(f.col("latency") < latency_windows.MIN_LATENCY_SECONDS, 0)
        .when(f.col("latency").isNotNull(), step_index)
        .cast("int")
    )
    return (
        rows.groupBy(
            f.unix_seconds("span.start").alias("start"),
            f.unix_seconds("span.end").alias("end"),
            "queue",
            step.alias("step"),
        )
        .agg(
            f.count("*").alias("messages"),
            f.coalesce(f.sum("size"), f.lit(0)).alias("bytes"),
            f.max("latency").alias("slowest"),
        )
        .select(*Count._fields)
    )


def collect_windows(
    messages: DataFrame,
    window: str = "60 seconds",
    since: str = "",
    until: str = "timestamp",
    max_windows: int = latency_windows.MAX_WINDOWS,
) -> Windows:
    """Read the messages once, and collect a bounded number of windows; longer windows if there
    would be more.
    """
    counted = counts(messages, window, since, until).persist()
    try:
        bounds = counted.agg(
            f.min("start"),
            f.max("start"),
            f.min(f.col("end") - f.col("start")),
            f.count_distinct("queue"),
            f.count_distinct("start", "queue"),
        )
        first, last, wanted, queues, places = bounds.collect()[0]
        found = Windows(wanted or 0, max_windows)
        fitting = (
            latency_windows.window_seconds_for(wanted, last - first, queues, max_windows)
            if places > max_windows
            else wanted
        )
        rows = counted if fitting == wanted else merge_windows(counted, fitting)
        found.add(Count(*row) for row in rows.collect())
        return found
    finally:
        counted.unpersist()


def merge_windows(counted: DataFrame, seconds: int) -> DataFrame:
    """Return the same counts in longer windows."""
    start = f.col("start") - f.pmod("start", f.lit(seconds))
    longer = counted.withColumn("start", start).withColumn("end", start + seconds)
    return (
        longer.groupBy("start", "end", "queue", "step")
        .agg(
            f.sum("messages").alias("messages"),
            f.sum("bytes").alias("bytes"),
            f.max("slowest").alias("slowest"),
        )
        .select(*Count._fields)
    )


def latency(messages: DataFrame, since: str, until: str) -> Column:
    """Return the seconds from one time to the other; null if either is missing.

    Clocks differ: a small negative latency counts as zero, and a start far in the future as
    missing.
    """
    if not since:
        return f.lit(None).cast("double")
    start, end = _seconds(messages, since, "--since"), _seconds(messages, until, "--until")
    elapsed = end - start
    return f.when(elapsed >= -MAX_CLOCK_SKEW_SECONDS, f.greatest(elapsed, f.lit(0.0)))


def _seconds(messages: DataFrame, expression: str, flag: str) -> Column:
    """Return a time of any supported form as seconds since 1970; null if it is not a time."""
    from pyspark.errors import AnalysisException, ParseException

    from sluice.spark.pipelines.support.stream_runner import explain_error

    try:
        kind = messages.select(f.expr(expression).alias("time")).schema["time"].dataType
    except (AnalysisException, ParseException) as fault:
        raise InvalidOption(
            f"{flag} {expression!r} cannot be used: {explain_error(fault).what}",
            f"Give an expression over the columns {', '.join(messages.columns)}",
        ) from None
    value = f.expr(expression)
    if isinstance(kind, t.TimestampType | t.TimestampNTZType | t.DateType):
        return value.cast("timestamp").cast("double")
    number = f.expr(f"try_cast(string({expression}) as double)")
    seconds = number
    for limit, unit in reversed(TIME_UNITS):
        seconds = f.when(number >= limit, number / unit).otherwise(seconds)
    text = f.expr(f"try_cast(string({expression}) as timestamp)").cast("double")
    found = f.when(number.isNull(), text).otherwise(seconds)
    return f.when(~f.isnan(found) & (found >= 0) & (found < math.inf), found)


def summary(found: Windows) -> dict[str, Any]:
    """Return the totals for `--json` and the end of the command."""
    total = found.total()
    figures = total.figures()
    worst = max((one["p99"] for one in found.rows() if one["timed"]), default=None)
    return {
        "messages": total.messages,
        "bytes": total.bytes,
        "queues": sorted(found.queues()),
        "windows": len(found),
        "window": formatting.format_duration(found.seconds) if found.seconds else None,
        "window_seconds": found.seconds or None,
        "peak_per_second": found.peak(),
        "latency": None
        if not total.timed
        else {
            **{name: figures[name] for name in (*latency_windows.PERCENTILES, "slowest")},
            "p99_worst": worst,
        },
    }


def window_note(found: Windows) -> str:
    """Return a note if the windows are longer than requested."""
    if found.seconds == found.requested_seconds:
        return ""
    return (
        f"Windows of {formatting.format_duration(found.requested_seconds)} would be too many:"
        f" these are of {formatting.format_duration(found.seconds)}."
    )


def report(found: Windows, queue: str, now: datetime | None = None) -> str:
    """Return the HTML page."""
    now = now or datetime.now(UTC)
    rows = found.rows()
    if not rows:
        return page.render("Flow", queue, element("p", "Nothing has come through."), made_at=now)
    totals = summary(found)
    first, last = rows[0]["start"], rows[-1]["end"]
    seconds = max((last - first).total_seconds(), 1.0)
    facts = [
        ("messages", formatting.format_count(totals["messages"])),
        ("volume", formatting.format_size(totals["bytes"])),
        ("mean rate", formatting.format_rate(totals["messages"] / seconds)),
        ("peak", formatting.format_rate(totals["peak_per_second"])),
    ]
    timed = totals["latency"]
    if timed is not None:
        facts += [
            ("median latency", formatting.format_duration(timed["p50"])),
            ("p99", formatting.format_duration(timed["p99"])),
            ("slowest", formatting.format_duration(timed["slowest"])),
        ]
    drawn = found.for_chart(CHART_BUCKETS)
    span = f"{formatting.format_time(first)} to {formatting.format_time(last)}"
    return page.render(
        "Flow",
        f"{queue}, {span}, in windows of {totals['window']}",
        element("p", window_note(found), class_="soft") if window_note(found) else None,
        page.facts(facts),
        _throughput(drawn),
        _latency(drawn) if timed is not None else _no_latency(),
        _queue_table(found, rows, seconds),
        _slowest(rows) if timed is not None else None,
        made_at=now,
    )


def _throughput(drawn: Windows) -> Piece:
    """Draw the busiest queues, and the others as one series."""
    bucket, times = _grid(drawn)
    queues = drawn.queues()
    shown = queues if len(queues) <= charts.TONES else queues[: charts.TONES - 1]
    rates: dict[tuple[str, datetime], float] = {}
    for one in drawn.rows():
        position = (one["queue"] if one["queue"] in shown else "", one["start"])
        rates[position] = rates.get(position, 0.0) + one["messages"] / drawn.seconds
    names = {name: name for name in shown}
    if len(shown) < len(queues):
        names[""] = formatting.format_others(len(queues) - len(shown))
    unit, per = formatting.choose_rate_unit(max(rates.values()))
    series = [
        charts.Series(
            label, [per * rates.get((name, time), 0.0) for time in times], nth, area=len(names) == 1
        )
        for nth, (name, label) in enumerate(names.items())
    ]
    return charts.lines(
        "Throughput", f"messages per {unit}, {_bucket_text(drawn)}", times, bucket, series
    )


def _latency(drawn: Windows) -> Piece:
    """Draw the slowest queue of each window: a fast queue must not hide a slow one."""
    bucket, times = _grid(drawn)
    rows = [one for one in drawn.rows() if one["timed"]]

    def worst(name: str) -> list[float | None]:
        most: dict[datetime, float] = {}
        for one in rows:
            most[one["start"]] = max(most.get(one["start"], 0.0), one[name])
        return [most.get(time) for time in times]

    series = [
        charts.Series(name, worst(name), tone)
        for name, tone in (("p50", 4), ("p90", 0), ("p99", 1), ("slowest", 2))
    ]
    unit = _bucket_text(drawn) + (" of the slowest queue" if len(drawn.queues()) > 1 else "")
    return charts.lines("Latency", unit, times, bucket, series, charts.TIMES)


def _bucket_text(drawn: Windows) -> str:
    return f"in spans of {formatting.format_duration(drawn.seconds)}"


def _no_latency() -> Piece:
    return element(
        "p",
        "Latency needs the time at which a message began: publishers write it into a user property,"
        " and --since names it, for example --since \"headers['sent-at']\".",
        class_="soft card",
    )


def _queue_table(found: Windows, rows: Sequence[dict[str, Any]], seconds: float) -> Piece:
    heads = ["messages", "volume", "mean rate", "peak"]
    heads += ["median latency", "p99", "worst p99"] if found.total().timed else []
    columns = [page.Column("queue"), *(page.Column(head, number=True) for head in heads)]
    most: dict[str, int] = {}
    worst: dict[str, float] = {}
    for one in rows:
        name = one["queue"]
        most[name] = max(most.get(name, 0), one["messages"])
        if one["timed"]:
            worst[name] = max(worst.get(name, 0.0), one["p99"])
    top = max(most.values()) / found.seconds
    lines: list[list[Piece]] = []
    for name in found.queues()[:SHOWN_QUEUES]:
        total = found.total(name)
        times = (*total.percentiles((0.5, 0.99)), worst.get(name))
        line: list[Piece] = [
            name,
            formatting.format_count(total.messages),
            formatting.format_size(total.bytes),
            formatting.format_rate(total.messages / seconds, top),
            formatting.format_rate(most[name] / found.seconds, top),
            *("" if time is None else formatting.format_duration(time) for time in times),
        ]
        lines.append(line[: len(columns)])
    left = len(found.queues()) - len(lines)
    note = (
        f"The {len(lines)} busiest; and {formatting.format_others(left)}, not shown."
        if left
        else ""
    )
    return page.table("Queues", columns, lines, note)


def _slowest(found: Sequence[dict[str, Any]]) -> Piece:
    columns = [page.Column("window"), page.Column("queue")]
    columns += [
        page.Column(head, number=True) for head in ("messages", "p50", "p90", "p99", "slowest")
    ]
    worst = sorted((one for one in found if one["timed"]), key=lambda one: -one["p99"])[
        :SHOWN_SLOWEST
    ]
    rows: list[list[Piece]] = [
        [
            formatting.format_time(one["start"]),
            one["queue"],
            formatting.format_count(one["messages"]),
            *(formatting.format_duration(one[name]) for name in ("p50", "p90", "p99", "slowest")),
        ]
        for one in worst
    ]
    return page.table("The slowest windows", columns, rows)


def _grid(drawn: Windows) -> tuple[timedelta, list[datetime]]:
    bucket = timedelta(seconds=drawn.seconds)
    return bucket, fill_gaps([one["start"] for one in drawn.rows()], bucket)


def spark_window(text: str) -> str:
    """Convert `30s` or `5m` to a Spark interval."""
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
    on_update: Callable[[Windows], None],
    *,
    window: str,
    since: str = "",
    until: str = "timestamp",
    every: str = "10 seconds",
    watch: FlowWatch | None = None,
    checkpoint: str | Path | None = None,
) -> StreamingQuery:
    """Count messages as they arrive, beginning with the stored ones.

    `on_update` gets all windows after each batch. The stream has no group, so it keeps no message
    from being deleted. Started again with the same `watch` and `checkpoint`, it continues; a
    checkpoint without its earlier counts would give partial totals.
    """
    messages = queues.stream(spark, queue, rows_per_batch=ROWS_PER_BATCH, failOnDataLoss="false")
    watching = watch or FlowWatch()

    def take(batch: DataFrame, number: int) -> None:
        watching.add_batch(counts(batch, window, since, until), number)
        on_update(watching.windows)

    writer = messages.writeStream.queryName(f"flow {queue}").foreachBatch(take)
    if checkpoint is not None:
        writer = writer.option("checkpointLocation", str(Path(checkpoint).absolute()))
    return writer.trigger(processingTime=every).start()


class FlowWatch:
    """Sums the counts of a stream.

    Batches arrive out of order: each has a share of every partition, in proportion to the backlog,
    so the past of one partition may come after the present of another. A batch that Spark retries
    counts once.
    """

    def __init__(self) -> None:
        self.windows = Windows()
        self._last = -1

    def add_batch(self, counted: DataFrame, number: int) -> None:
        if number > self._last:
            self.windows.add(Count(*row) for row in counted.collect())
            self._last = number
