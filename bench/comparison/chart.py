"""Draw the ratios of messages per CPU-second, Sluice to each peer, with their spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from comparison.ratios import Spread
from sluice.markup import Markup, Piece, element

WIDTH = 900
LEFT = 250
RIGHT = 840
TOP = 96
ROW = 22
GAP = 34

STYLE = """
svg { --ink: #1d2733; --soft: #66717e; --line: #dfe4ea; --paper: #ffffff;
      --more: #0b6bcb; --less: #b8620e;
      font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6edf3; --soft: #97a3b0; --line: #2c3540; --paper: #11161c;
        --more: #58a6ff; --less: #f0a455; } }
.paper { fill: var(--paper); }
text { fill: var(--ink); }
.soft { fill: var(--soft); }
.title { font-size: 18px; font-weight: 600; }
.head { font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 5px; }
.small { font-size: 11px; }
.grid { stroke: var(--line); stroke-width: 1; }
.one { stroke: var(--soft); stroke-width: 1.5; }
.more { fill: var(--more); stroke: var(--more); }
.less { fill: var(--less); stroke: var(--less); }
.bar { stroke-width: 3; stroke-linecap: round; opacity: .45; }
.figure { font-size: 11px; stroke: none; }
"""

Group = tuple[str, Sequence[tuple[str, Spread]]]  # a case as text, and its peers


def draw(groups: Sequence[Group]) -> str:
    values = [
        value for _, rows in groups for _, spread in rows for value in (spread.low, spread.high)
    ]
    low = math.floor(math.log2(min([0.5, *values])) - 0.7)  # leaves space for a figure on the left
    high = math.ceil(math.log2(max([2.0, *values])))

    def at(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (math.log2(value) - low) / (high - low)

    y = float(TOP)
    parts: list[Piece] = []
    for words, rows in groups:
        parts.append(element("text", words, x=20, y=y + 4, class_="head"))
        y += ROW
        for name, spread in rows:
            parts.append(_row(name, spread, y, at))
            y += ROW
        y += GAP - ROW
    bottom = y - GAP / 2
    grid: list[Piece] = []
    for power in range(low, high + 1):
        x = at(2.0**power)
        kind = "one" if power == 0 else "grid"
        grid.append(element("line", x1=x, x2=x, y1=TOP - 16, y2=bottom, class_=kind))
        grid.append(
            element(
                "text",
                _times(2.0**power),
                x=x,
                y=bottom + 16,
                text_anchor="middle",
                class_="soft small",
            )
        )
    height = bottom + 34
    svg = element(
        "svg",
        element("style", Markup(STYLE)),
        element("rect", width=WIDTH, height=height, class_="paper"),
        element(
            "text",
            "What Sluice does with a second of CPU, beside others",
            x=20,
            y=32,
            class_="title",
        ),
        element(
            "text",
            "Messages per second of CPU, Sluice to each: the dot is the median of the rounds' own"
            " ratios, the line their spread. Right of 1x Sluice does more.",
            x=20,
            y=54,
            class_="soft small",
        ),
        grid,
        parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        width=WIDTH,
        height=round(height),
        role="img",
        aria_label="Ratios of messages per second of CPU, Sluice to each peer",
    )
    return f"{svg}\n"


def _row(name: str, spread: Spread, y: float, place: Callable[[float], float]) -> Markup:
    kind = "more" if spread.median >= 1 else "less"
    low, middle, high = (place(value) for value in (spread.low, spread.median, spread.high))
    beside = high + 10 if spread.median >= 1 else low - 10  # away from the axis at 1
    return element(
        "g",
        element("text", name, x=LEFT - 16, y=y + 4, text_anchor="end", class_="soft"),
        element("line", x1=low, x2=high, y1=y, y2=y, class_=f"bar {kind}"),
        element("circle", element("title", f"{name}: {spread}"), cx=middle, cy=y, r=5, class_=kind),
        element(
            "text",
            _times(spread.median),
            x=beside,
            y=y + 4,
            text_anchor="start" if spread.median >= 1 else "end",
            class_=f"figure {kind}",
        ),
    )


def _times(value: float) -> str:
    if value >= 10 or value in (1.0, 2.0, 4.0, 8.0):
        return f"{value:.0f}x"
    return f"{value:.2f}x" if value < 1 else f"{value:.1f}x"
