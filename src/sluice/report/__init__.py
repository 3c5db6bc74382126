"""Reports as one HTML file and charts as SVG, in a light and a dark theme (`theme.css`).

`page` builds the file, `time_charts` its charts over time, `dot_charts` charts on a logarithmic
scale that stand alone; `markup` escapes all text.
"""

from sluice.report import dot_charts, formatting, page, time_charts
from sluice.report.markup import Markup, Piece, element

__all__ = [
    "Markup",
    "Piece",
    "dot_charts",
    "element",
    "formatting",
    "page",
    "time_charts",
]
