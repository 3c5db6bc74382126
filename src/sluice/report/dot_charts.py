"""SVG charts that stand alone: dots on logarithmic scales, with their figures beside them.

Values that differ by factors of a hundred are positions on such a scale; lengths would mislead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.resources import files
from typing import Final

from sluice.report.markup import Markup, Piece, element

STYLE: Final = """
svg { font: 13px var(--sans); }
.paper { fill: var(--card); }
text { fill: var(--ink); }
text.soft { fill: var(--soft); }
text.bad { fill: var(--bad); font-weight: 600; }
.title { font-size: 20px; font-weight: 600; }
.head { font-weight: 600; }
.small { font-size: 11px; }
.span { stroke-width: 3; stroke-linecap: round; opacity: .45; }
"""


def read_theme() -> str:
    """Return the style sheet with the colors of both themes."""
    return files("sluice.report").joinpath("theme.css").read_text("utf-8")


class LogScale:
    """A logarithmic axis from the power `low` of `base` to the power `high`."""

    def __init__(self, base: float, low: int, high: int, left: float, right: float) -> None:
        self._base = base
        self._low = low
        self._high = high
        self._left = left
        self._right = right

    def at(self, value: float) -> float:
        """Return the position of a value; values below the axis are at its beginning."""
        power = math.log(max(value, self._base**self._low), self._base)
        share = (power - self._low) / (self._high - self._low)
        return self._left + (self._right - self._left) * share

    def grid(
        self, top: float, bottom: float, show: Callable[[float], str], base_at: float = 0.0
    ) -> list[Piece]:
        """Draw a line and a label for each power; the line at `base_at` is stronger."""
        drawn: list[Piece] = []
        for power in range(self._low, self._high + 1):
            mark = float(self._base**power)
            x = self.at(mark)
            kind = "grid base" if mark == base_at else "grid"
            drawn.append(element("line", x1=x, x2=x, y1=top, y2=bottom, class_=kind))
            drawn.append(text(show(mark), x, bottom + 17, "soft small", "middle"))
        return drawn


def text(content: str, x: float, y: float, kind: str = "", anchor: str = "start") -> Markup:
    return element("text", content, x=x, y=y, class_=kind or None, text_anchor=anchor)


def dot(x: float, y: float, tone: int, title: str = "", radius: float = 5.0) -> Markup:
    tooltip = element("title", title) if title else None
    return element("circle", tooltip, cx=x, cy=y, r=radius, class_=f"tone-{tone}")


def span(first: float, last: float, y: float, tone: int) -> Markup:
    return element("line", x1=first, x2=last, y1=y, y2=y, class_=f"span tone-{tone}")


def render(width: int, height: float, label: str, *parts: Piece) -> str:
    """Render the whole file; `label` describes it to a reader who cannot see it."""
    svg = element(
        "svg",
        element("style", Markup(f"{read_theme()}{STYLE}")),
        element("rect", width=width, height=height, class_="paper"),
        parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height:.0f}",
        width=width,
        height=round(height),
        role="img",
        aria_label=label,
    )
    return f"{svg}\n"
