"""Draw the ratios of messages per CPU-second, Sluice to each peer, with their spread."""

from __future__ import annotations

import math
from collections.abc import Sequence

from comparison.ratios import Spread
from sluice.report import Piece, element
from sluice.report.dot_charts import LogScale, dot, render, span, text

WIDTH = 900
LEFT = 250
RIGHT = 840
TOP = 96
ROW = 22
GAP = 34
MORE, LESS = 0, 1  # tones

Group = tuple[str, Sequence[tuple[str, Spread]]]  # a case as text, and its peers


def draw(groups: Sequence[Group]) -> str:
    values = [
        value for _, rows in groups for _, spread in rows for value in (spread.low, spread.high)
    ]
    low = math.floor(math.log2(min([0.5, *values])) - 0.7)  # leaves space for a figure on the left
    scale = LogScale(2, low, math.ceil(math.log2(max([2.0, *values]))), LEFT, RIGHT)
    y = float(TOP)
    rows_drawn: list[Piece] = []
    for words, rows in groups:
        rows_drawn.append(text(words, 20, y + 4, "head"))
        y += ROW
        for name, spread in rows:
            rows_drawn.append(_row(name, spread, y, scale))
            y += ROW
        y += GAP - ROW
    bottom = y - GAP / 2
    return render(
        WIDTH,
        bottom + 34,
        "Ratios of messages per second of CPU, Sluice to each peer",
        text("What Sluice does with a second of CPU, beside others", 20, 32, "title"),
        text(
            "Messages per second of CPU, Sluice to each: the dot is the median of the rounds' own"
            " ratios, the line their spread. Right of 1x Sluice does more.",
            20,
            54,
            "soft small",
        ),
        scale.grid(TOP - 16, bottom, _times, base_at=1.0),
        rows_drawn,
    )


def _row(name: str, spread: Spread, y: float, scale: LogScale) -> Piece:
    more = spread.median >= 1
    tone = MORE if more else LESS
    low, middle, high = (scale.at(value) for value in (spread.low, spread.median, spread.high))
    beside = high + 10 if more else low - 10  # away from the axis at 1
    return element(
        "g",
        text(name, LEFT - 16, y + 4, "soft", "end"),
        span(low, high, y, tone),
        dot(middle, y, tone, f"{name}: {spread}"),
        text(_times(spread.median), beside, y + 4, "small", "start" if more else "end"),
    )


def _times(value: float) -> str:
    if value >= 10 or value in (1.0, 2.0, 4.0, 8.0):
        return f"{value:.0f}x"
    return f"{value:.2f}x" if value < 1 else f"{value:.1f}x"
