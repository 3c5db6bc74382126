"""Static SVG charts: stacked bars and lines over time, and labeled bars.

Colors are CSS classes; the style sheet defines them, in light and dark mode. Each bar, and each
time of a line chart, has a title that browsers show as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sluice.report.formatting import (
    format_axis_time,
    format_count,
    format_duration,
    format_short,
    format_time,
    to_utc,
)
from sluice.report.markup import Markup, Piece, element

WIDTH: Final = 1040
HEIGHT: Final = 220
TOP, RIGHT, BOTTOM, LEFT = 10, 14, 24, 70
TONES: Final = 8
MAX_AXIS_MARKS: Final = 8  # under an axis
AXIS_STEPS: Final = (1, 5, 10, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 86400, 604800, 2592000)
# Ticks of a duration axis, in seconds; shorter ones, and days, use decimal steps.
DURATIONS: Final = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400),
)


@dataclass(frozen=True)
class Series:
    """One line, or one layer of the bars. `values` belong to the chart's times; None: unknown."""

    label: str
    values: Sequence[float | None]
    tone: int = 0
    area: bool = False


@dataclass(frozen=True)
class Axis:
    """The vertical axis: how to format a value, and where its ticks are."""

    show: Callable[[float], str]
    scale: Callable[[float], tuple[float, list[float]]]


def scale(maximum: float, sizes: Sequence[float] = (1, 2, 2.5, 5, 10)) -> tuple[float, list[float]]:
    """Return the smallest round number at or above `maximum`, and about four ticks up to it."""
    maximum = maximum if maximum > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(maximum / 4))
    return _steps(
        maximum, next(size * power for size in sizes if size * power * 4 >= maximum * 0.999)
    )


def scale_whole(maximum: float) -> tuple[float, list[float]]:
    """Return the scale for counts, with whole ticks."""
    return scale(max(maximum, 4.0), (1, 2, 5, 10))


def scale_duration(maximum: float) -> tuple[float, list[float]]:
    """Return the scale for seconds, with ticks at whole minutes and hours, and a top of at least 4
    ms.
    """
    maximum = max(maximum, 0.004)
    if maximum <= 4:
        return scale(maximum, (1, 2, 5, 10))
    step = next((size for size in DURATIONS if size * 4 >= maximum), 0)
    return _steps(maximum, step) if step else _in_days(maximum)


def _in_days(maximum: float) -> tuple[float, list[float]]:
    top, ticks = scale_whole(maximum / 86_400)
    return top * 86_400, [tick * 86_400 for tick in ticks]


def _steps(maximum: float, step: float) -> tuple[float, list[float]]:
    ticks = [step * nth for nth in range(math.ceil(maximum / step - 1e-9) + 1)]
    return ticks[-1], ticks


NUMBERS: Final = Axis(format_short, scale)
COUNTS: Final = Axis(format_short, scale_whole)
TIMES: Final = Axis(format_duration, scale_duration)


def round_times(first: datetime, seconds: float) -> list[datetime]:
    """Return whole minutes, hours or days on an axis, at most MAX_AXIS_MARKS."""
    step = next((size for size in AXIS_STEPS if seconds / size <= MAX_AXIS_MARKS), AXIS_STEPS[-1])
    start = to_utc(first).timestamp()
    at = math.ceil(start / step) * step
    zone = first.tzinfo
    found: list[datetime] = []
    while at <= start + seconds + 1e-6:
        found.append(datetime.fromtimestamp(at, zone))
        at += step
    return found


def stacked_bars(
    title: str, unit: str, times: Sequence[datetime], bucket: timedelta, layers: Sequence[Series]
) -> Markup:
    """Draw counts per time bucket, one layer for each kind."""
    totals = [sum(layer.values[nth] or 0 for layer in layers) for nth in range(len(times))]
    top, ticks = COUNTS.scale(max(totals, default=0))
    frame = _Frame(times, bucket, top)
    bars: list[Piece] = []
    gap = 1.0 if frame.step > 4 else 0.0
    for nth, time in enumerate(times):
        base = 0.0
        for layer in layers:
            value = layer.values[nth] or 0
            if not value:
                continue
            y, bottom = frame.y(base + value), frame.y(base)
            base += value
            bars.append(
                element(
                    "rect",
                    element("title", f"{format_time(time)}: {format_count(value)} {layer.label}"),
                    x=frame.x(time) + gap / 2,
                    y=y,
                    width=max(frame.step - gap, 0.8),
                    height=max(bottom - y, 0.6),
                    class_=f"tone-{layer.tone % TONES}",
                )
            )
    return _card(title, unit, layers, frame.axes(ticks, COUNTS.show), bars)


def lines(
    title: str,
    unit: str,
    times: Sequence[datetime],
    bucket: timedelta,
    series: Sequence[Series],
    axis: Axis = NUMBERS,
) -> Markup:
    """Draw values over time. An unknown value interrupts a line."""
    known = [value for one in series for value in one.values if value is not None]
    top, ticks = axis.scale(max(known, default=1.0))
    frame = _Frame(times, bucket, top)
    drawn: list[Piece] = []
    for one in series:
        runs = _runs(one.values)
        points = [(frame.x(time) + frame.step / 2, value) for time, value in zip(times, one.values)]
        for run in runs:
            path = "L".join(
                f"{points[nth][0]:.1f},{frame.y(points[nth][1] or 0):.1f}" for nth in run
            )
            tone = f"tone-{one.tone % TONES}"
            if one.area and len(run) > 1:
                first, last = points[run[0]][0], points[run[-1]][0]
                bottom = frame.y(0)
                around = f"M{first:.1f},{bottom:.1f}L{path}L{last:.1f},{bottom:.1f}Z"
                drawn.append(element("path", d=around, class_=f"area {tone}"))
            drawn.append(element("path", d=f"M{path}", class_=f"line {tone}"))
            for nth in run if len(run) == 1 or len(times) <= 60 else ():
                x, y = points[nth][0], frame.y(points[nth][1] or 0)
                drawn.append(element("circle", cx=x, cy=y, r=2.4, class_=tone))
    drawn += [frame.hover(time, _hover_text(nth, series, axis)) for nth, time in enumerate(times)]
    return _card(title, unit, series, frame.axes(ticks, axis.show), drawn)


def _hover_text(nth: int, series: Sequence[Series], axis: Axis) -> str:
    """Return the tooltip of one time."""
    known = [(one.label, one.values[nth]) for one in series]
    return ", ".join(f"{label} {axis.show(value)}" for label, value in known if value is not None)


def share_bars(
    title: str,
    unit: str,
    rows: Sequence[tuple[str, float, int]],
    show: Callable[[float], str] = format_count,
) -> Markup:
    """Draw labeled bars: a name, a value and a tone each, in proportion to the largest value."""
    maximum = max((value for _, value, _ in rows), default=0) or 1
    lines_: list[Piece] = [
        element(
            "li",
            element("span", name, class_="share-name", title=name),
            element(
                "span",
                element(
                    "svg",
                    element(
                        "rect",
                        width=max(value / maximum * 100, 0.5),
                        height=10,
                        rx=1,
                        class_=f"tone-{tone % TONES}",
                    ),
                    viewBox="0 0 100 10",
                    preserveAspectRatio="none",
                    aria_hidden="true",
                ),
                class_="share-bar",
            ),
            element("span", show(value), class_="share-value num"),
        )
        for name, value, tone in rows
    ]
    return element(
        "figure",
        element("figcaption", element("h3", title, " ", element("span", unit, class_="soft"))),
        element("ul", lines_, class_="shares"),
        class_="card",
    )


def _runs(values: Sequence[float | None]) -> list[list[int]]:
    """Return runs of indexes whose values are known."""
    runs: list[list[int]] = []
    for nth, value in enumerate(values):
        if value is None:
            continue
        if runs and runs[-1][-1] == nth - 1:
            runs[-1].append(nth)
        else:
            runs.append([nth])
    return runs


class _Frame:
    """Maps times to x, and values from 0 to `top` to y."""

    def __init__(self, times: Sequence[datetime], bucket: timedelta, top: float) -> None:
        self.first = times[0] if times else datetime.now().astimezone()
        end = (times[-1] if times else self.first) + bucket
        self.seconds = max((end - self.first).total_seconds(), 1e-6)
        self.top = top
        self.inner = WIDTH - LEFT - RIGHT
        self.step = self.inner * bucket.total_seconds() / self.seconds

    def x(self, time: datetime) -> float:
        return LEFT + self.inner * (time - self.first).total_seconds() / self.seconds

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / self.top)

    def hover(self, time: datetime, text: str) -> Markup | None:
        """Return a full-height strip with a tooltip: a line itself is hard to hit."""
        if not text:
            return None
        title = element("title", f"{format_time(time)}: {text}")
        height = HEIGHT - TOP - BOTTOM
        return element(
            "rect", title, x=self.x(time), y=TOP, width=self.step, height=height, class_="hover"
        )

    def axes(self, ticks: Sequence[float], show: Callable[[float], str]) -> list[Piece]:
        grid = [
            element(
                "line",
                x1=LEFT,
                x2=WIDTH - RIGHT,
                y1=self.y(tick),
                y2=self.y(tick),
                class_="base" if tick == 0 else None,
            )
            for tick in ticks
        ]
        labels = [
            element("text", show(tick), x=LEFT - 8, y=self.y(tick) + 4, text_anchor="end")
            for tick in ticks
        ]
        for time in round_times(self.first, self.seconds):
            x = self.x(time)
            # Centered, the last label would be cut off.
            anchor = "end" if x > WIDTH - RIGHT - 24 else "middle"
            labels.append(
                element(
                    "text",
                    format_axis_time(time, self.seconds),
                    x=x,
                    y=HEIGHT - 6,
                    text_anchor=anchor,
                )
            )
        return [element("g", grid, class_="grid"), element("g", labels)]


def _card(
    title: str, unit: str, series: Sequence[Series], axes: list[Piece], drawn: list[Piece]
) -> Markup:
    legend = [
        element("li", element("span", class_=f"swatch tone-{one.tone % TONES}"), one.label)
        for one in series
    ]
    return element(
        "figure",
        element("figcaption", element("h3", title, " ", element("span", unit, class_="soft"))),
        element("ul", legend, class_="legend") if len(series) > 1 else None,
        element(
            "svg",
            axes,
            drawn,
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            aria_label=f"{title}: {', '.join(one.label for one in series)}",
            class_="chart",
        ),
        class_="card",
    )
