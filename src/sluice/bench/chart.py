"""Draw the results as one self-contained SVG, light and dark, with every figure beside its mark.

Scenarios differ by factors of a hundred, so both scales are logarithmic, and values are positions,
not lengths, which would mislead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sluice.markup import Markup, Piece, element

WIDTH: Final = 1000
LEFT: Final = 130  # names of scenarios
MIDDLE: Final = 610  # throughput up to here
LATENCY: Final = 660  # latency from here
RIGHT: Final = 970
TOP: Final = 150
ROW_HEIGHT: Final = 46

STYLE: Final = """
svg { --ink: #1d2733; --soft: #66717e; --line: #dfe4ea; --paper: #ffffff;
      --rate: #0b6bcb; --cpu: #b8620e; --late: #6b4fbb; --bad: #c23030;
      font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6edf3; --soft: #97a3b0; --line: #2c3540; --paper: #11161c;
        --rate: #58a6ff; --cpu: #f0a455; --late: #a48bf0; --bad: #ff7b72; } }
.paper { fill: var(--paper); }
text { fill: var(--ink); }
.soft { fill: var(--soft); }
.title { font-size: 20px; font-weight: 600; }
.head { font-weight: 600; }
.small { font-size: 11px; }
.grid { stroke: var(--line); stroke-width: 1; }
.rate { fill: var(--rate); }
.cpu { fill: var(--cpu); }
.late { fill: var(--late); }
.bad { fill: var(--bad); font-weight: 600; }
.tie { stroke: var(--line); stroke-width: 3; stroke-linecap: round; }
.latency { stroke: var(--late); stroke-width: 3; stroke-linecap: round; opacity: .45; }
"""


class Scale:
    """A logarithmic axis from a power of ten to a power of ten."""

    def __init__(self, values: Sequence[float], left: float, right: float) -> None:
        known = [value for value in values if value > 0] or [1.0, 10.0]
        self.low = math.floor(math.log10(min(known)))
        self.high = max(math.ceil(math.log10(max(known))), self.low + 1)
        self._left = left
        self._right = right

    def at(self, value: float) -> float:
        share = (math.log10(max(value, 10.0**self.low)) - self.low) / (self.high - self.low)
        return self._left + (self._right - self._left) * share

    @property
    def marks(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def draw_chart(document: Mapping[str, Any]) -> str:
    """Draw the output of `sluice bench --json`."""
    results: list[Mapping[str, Any]] = document["results"]
    rates = Scale(
        [value for each in results for value in (each["per_second"], each["per_cpu_second"] or 0)],
        LEFT,
        MIDDLE,
    )
    latencies = Scale(
        [value or 0 for each in results for value in each["latency_ms"].values()], LATENCY, RIGHT
    )
    bottom = TOP + ROW_HEIGHT * len(results)
    height = bottom + 58
    parts: list[Piece] = [
        element("style", Markup(STYLE)),
        element("rect", width=WIDTH, height=height, class_="paper"),
        *_head(document),
        *_grid(rates, bottom, _short),
        *_grid(latencies, bottom, _milliseconds),
        *(
            _row(each, TOP + ROW_HEIGHT * nth + ROW_HEIGHT / 2, rates, latencies)
            for nth, each in enumerate(results)
        ),
        element("text", _summary_line(results), x=24, y=height - 16, class_="soft small"),
    ]
    svg = element(
        "svg",
        parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        width=WIDTH,
        height=height,
        role="img",
        aria_label="Messages per second and latency of each scenario",
    )
    return f"{svg}\n"


def _head(document: Mapping[str, Any]) -> list[Markup]:
    machine, disk = document["machine"], document["disk"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['kernel']}, {machine['python']}"
    how = f"Sluice {machine['sluice']} ({machine['build']}), durability {document['durability']}"
    how += f", messages of {document['settings']['payload']:,} bytes"
    if disk is not None:
        how += f"; {disk['filesystem']}, one fdatasync {disk['sync_median_ms']:.2f} ms"
    return [
        element("text", "sluice bench", x=24, y=36, class_="title"),
        element("text", where, x=24, y=60, class_="soft"),
        element("text", how, x=24, y=79, class_="soft"),
        element("circle", cx=LEFT + 5, cy=112, r=5, class_="rate"),
        element("text", "messages per second", x=LEFT + 16, y=116, class_="head"),
        element("circle", cx=LEFT + 190, cy=112, r=5, class_="cpu"),
        element("text", "per second of broker CPU", x=LEFT + 201, y=116, class_="head"),
        element("circle", cx=LATENCY + 5, cy=112, r=5, class_="late"),
        element("text", "latency: p50, p99, p99.9", x=LATENCY + 16, y=116, class_="head"),
    ]


def _grid(scale: Scale, bottom: float, write: Any) -> list[Markup]:
    drawn: list[Markup] = []
    for mark in scale.marks:
        x = scale.at(mark)
        drawn.append(element("line", x1=x, x2=x, y1=TOP - 8, y2=bottom, class_="grid"))
        drawn.append(
            element(
                "text", write(mark), x=x, y=bottom + 18, text_anchor="middle", class_="soft small"
            )
        )
    return drawn


def _row(result: Mapping[str, Any], y: float, rates: Scale, latencies: Scale) -> Markup:
    parts: list[Piece] = [element("text", result["scenario"], x=24, y=y + 4, class_="head")]
    points = [("rate", result["per_second"])]
    if result["per_cpu_second"]:
        points.append(("cpu", result["per_cpu_second"]))
    points.sort(key=lambda point: float(point[1]))
    places = [rates.at(value) for _, value in points]
    parts.append(element("line", x1=places[0], x2=places[-1], y1=y, y2=y, class_="tie"))
    for nth, ((kind, value), x) in enumerate(zip(points, places)):
        parts.append(
            element("circle", element("title", f"{value:,.0f}"), cx=x, cy=y, r=6, class_=kind)
        )
        # The label of the larger value is on the right, that of the smaller one on the left.
        outward = nth == len(points) - 1
        fits_left = x - LEFT > 46
        parts.append(
            element(
                "text",
                _short(value),
                x=x + 11 if outward else (x - 11 if fits_left else x),
                y=y + 4 if outward or fits_left else y - 11,
                text_anchor="start" if outward else ("end" if fits_left else "start"),
                class_=f"small {kind}",
            )
        )
    parts += _latency(result["latency_ms"], y, latencies)
    for name, value in result["facts"].items():
        if name.startswith("memory_bytes_per_"):
            memory_text = f"{value:,.0f} bytes of memory per {name.rpartition('_')[2]}"
            parts.append(element("text", memory_text, x=LATENCY, y=y + 18, class_="small soft"))
    if not result["whole"]:
        wrong = (
            f"{result['lost']} lost, {result['doubled']} doubled,"
            f" {result['disordered']} out of order"
        )
        parts.append(element("text", wrong, x=24, y=y + 18, class_="small bad"))
    return element("g", parts)


def _latency(latency: Mapping[str, float | None], y: float, latencies: Scale) -> list[Markup]:
    known = [(name, value) for name, value in latency.items() if value is not None]
    if not known:
        return []  # not measured, or meaningless
    places = [latencies.at(value) for _, value in known]
    drawn = [element("line", x1=places[0], x2=places[-1], y1=y, y2=y, class_="latency")]
    for nth, ((name, value), x) in enumerate(zip(known, places)):
        title = element("title", f"{name} {value:.2f} ms")
        drawn.append(element("circle", title, cx=x, cy=y, r=6 - 1.5 * nth, class_="late"))
    first, last = known[0], known[-1]
    drawn.append(
        element(
            "text",
            _milliseconds(first[1]),
            x=places[0] - 10,
            y=y + 4,
            text_anchor="end",
            class_="small late",
        )
    )
    beyond = places[-1] > RIGHT - 30
    drawn.append(
        element(
            "text",
            _milliseconds(last[1]),
            x=places[-1] + (2 if beyond else 9),
            y=y - 10 if beyond else y + 4,
            text_anchor="middle" if beyond else "start",
            class_="small late",
        )
    )
    return drawn


def _summary_line(results: Sequence[Mapping[str, Any]]) -> str:
    if all(result["whole"] for result in results):
        return (
            "Nothing was lost, doubled or out of order. "
            "Latency under full load is mostly time in the queue: see the row latency."
        )
    return "Messages were lost, doubled or out of order: these figures are worth nothing."


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.1f}M".replace(".0M", "M")
    if value >= 1e3:
        return f"{value / 1e3:.0f}k" if value >= 1e4 else f"{value / 1e3:.1f}k".replace(".0k", "k")
    return f"{value:.0f}"


def _milliseconds(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:g} s" if value % 1000 == 0 else f"{value / 1000:.1f} s"
    if value >= 10:
        return f"{value:.0f} ms"
    return (
        f"{value:.2f} ms".replace(".00 ms", " ms")
        if value < 1
        else f"{value:.1f} ms".replace(".0 ms", " ms")
    )
