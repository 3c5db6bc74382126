"""Draw the results as one self-contained SVG, light and dark, with every figure beside its mark.

Scenarios differ by factors of a hundred, so both scales are logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sluice.report.dot_charts import LogScale, dot, render, span, text
from sluice.report.formatting import format_short
from sluice.report.markup import Markup, Piece, element

WIDTH: Final = 1000
LEFT: Final = 130  # names of scenarios
MIDDLE: Final = 610  # throughput up to here
LATENCY: Final = 660  # latency from here
RIGHT: Final = 970
TOP: Final = 150
ROW_HEIGHT: Final = 46
RATE, CPU, LATE = 0, 1, 3  # tones


def draw_chart(document: Mapping[str, Any]) -> str:
    """Draw the output of `sluice bench --json`."""
    results: list[Mapping[str, Any]] = document["results"]
    rates = _decimal_scale(
        [value for each in results for value in (each["per_second"], each["per_cpu_second"] or 0)],
        LEFT,
        MIDDLE,
    )
    latencies = _decimal_scale(
        [value or 0 for each in results for value in each["latency_ms"].values()], LATENCY, RIGHT
    )
    bottom = TOP + ROW_HEIGHT * len(results)
    height = bottom + 58
    return render(
        WIDTH,
        height,
        "Messages per second and latency of each scenario",
        _head(document),
        rates.grid(TOP - 8, bottom, format_short),
        latencies.grid(TOP - 8, bottom, _milliseconds),
        [
            _row(each, TOP + ROW_HEIGHT * nth + ROW_HEIGHT / 2, rates, latencies)
            for nth, each in enumerate(results)
        ],
        text(_summary_line(results), 24, height - 16, "soft small"),
    )


def _decimal_scale(values: Sequence[float], left: float, right: float) -> LogScale:
    """Return the axis of whole powers of ten around all positive values."""
    known = [value for value in values if value > 0] or [1.0, 10.0]
    low = math.floor(math.log10(min(known)))
    return LogScale(10, low, max(math.ceil(math.log10(max(known))), low + 1), left, right)


def _head(document: Mapping[str, Any]) -> list[Piece]:
    machine, disk = document["machine"], document["disk"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['kernel']}, {machine['python']}"
    how = f"Sluice {machine['sluice']} ({machine['build']}), durability {document['durability']}"
    how += f", messages of {document['settings']['payload']:,} bytes"
    if disk is not None:
        how += f"; {disk['filesystem']}, one fdatasync {disk['sync_median_ms']:.2f} ms"
    legend = (
        (LEFT, RATE, "messages per second"),
        (LEFT + 185, CPU, "per second of broker CPU"),
        (LATENCY, LATE, "latency: p50, p99, p99.9"),
    )
    return [
        text("sluice bench", 24, 36, "title"),
        text(where, 24, 60, "soft"),
        text(how, 24, 79, "soft"),
        *([dot(x + 5, 112, tone), text(label, x + 16, 116, "head")] for x, tone, label in legend),
    ]


def _row(result: Mapping[str, Any], y: float, rates: LogScale, latencies: LogScale) -> Markup:
    points = [(RATE, result["per_second"])]
    if result["per_cpu_second"]:
        points.append((CPU, result["per_cpu_second"]))
    points.sort(key=lambda point: float(point[1]))
    places = [rates.at(value) for _, value in points]
    parts: list[Piece] = [
        text(result["scenario"], 24, y + 4, "head"),
        element("line", x1=places[0], x2=places[-1], y1=y, y2=y, class_="grid"),
    ]
    for nth, ((tone, value), x) in enumerate(zip(points, places)):
        parts.append(dot(x, y, tone, f"{value:,.0f}", 6))
        # The label of the larger value is on the right, that of the smaller one on the left.
        if nth == len(points) - 1:
            parts.append(text(format_short(value), x + 11, y + 4, "small"))
        elif x - LEFT > 46:
            parts.append(text(format_short(value), x - 11, y + 4, "small", "end"))
        else:
            parts.append(text(format_short(value), x, y - 11, "small"))
    parts += _latency(result["latency_ms"], y, latencies)
    for name, value in result["facts"].items():
        if name.startswith("memory_bytes_per_"):
            memory_text = f"{value:,.0f} bytes of memory per {name.rpartition('_')[2]}"
            parts.append(text(memory_text, LATENCY, y + 18, "small soft"))
    if not result["whole"]:
        wrong = (
            f"{result['lost']} lost, {result['doubled']} doubled,"
            f" {result['disordered']} out of order"
        )
        parts.append(text(wrong, 24, y + 18, "small bad"))
    return element("g", parts)


def _latency(latency: Mapping[str, float | None], y: float, latencies: LogScale) -> list[Piece]:
    known = [(name, value) for name, value in latency.items() if value is not None]
    if not known:
        return []  # not measured, or meaningless
    places = [latencies.at(value) for _, value in known]
    first, last = places[0], places[-1]
    beyond = last > RIGHT - 30
    return [
        span(first, last, y, LATE),
        *(
            dot(x, y, LATE, f"{name} {value:.2f} ms", 6 - 1.5 * nth)
            for nth, ((name, value), x) in enumerate(zip(known, places))
        ),
        text(_milliseconds(known[0][1]), first - 10, y + 4, "small", "end"),
        text(_milliseconds(known[-1][1]), last + 2, y - 10, "small", "middle")
        if beyond
        else text(_milliseconds(known[-1][1]), last + 9, y + 4, "small"),
    ]


def _summary_line(results: Sequence[Mapping[str, Any]]) -> str:
    if all(result["whole"] for result in results):
        return (
            "Nothing was lost, doubled or out of order. "
            "Latency under full load is mostly time in the queue: see the row latency."
        )
    return "Messages were lost, doubled or out of order: these figures are worth nothing."


def _milliseconds(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:g} s" if value % 1000 == 0 else f"{value / 1000:.1f} s"
    digits = 0 if value >= 10 else 1 if value >= 1 else 2
    return f"{value:.{digits}f}".removesuffix("." + "0" * digits) + " ms"
