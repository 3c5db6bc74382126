"""Format numbers, sizes, times and payloads for reports."""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from datetime import UTC, datetime
from typing import Final

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")
RATE_UNITS: Final = (("second", 1), ("minute", 60), ("hour", 3600), ("day", 86_400))
_SHORT: Final = {"second": "s", "minute": "min", "hour": "h", "day": "d"}


def format_count(number: float) -> str:
    return f"{number:,.0f}"


def format_others(number: int) -> str:
    """Format the number of items that are not shown one by one."""
    return f"{format_count(number)} other" + ("" if number == 1 else "s")


def format_short(number: float) -> str:
    """Format a number for an axis: 0.0025, 950, 1.2k, 3.4M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}".removesuffix(".0") + unit
    if number >= 10 or number <= 0:
        return f"{number:.0f}"
    digits = 2 - min(0, math.floor(math.log10(number)))  # two decimals, or three significant digits
    return f"{number:.{digits}f}".rstrip("0").removesuffix(".")


def choose_rate_unit(per_second: float) -> tuple[str, int]:
    """Return the best unit of a rate with its seconds: one message in five minutes is twelve in an
    hour.
    """
    return next(
        (unit for unit in RATE_UNITS if per_second * unit[1] >= 0.999),
        RATE_UNITS[-1] if per_second else RATE_UNITS[0],
    )


def format_rate(per_second: float, reference: float | None = None) -> str:
    """Format a rate, in the unit of `reference` if given."""
    unit, seconds = choose_rate_unit(per_second if reference is None else reference)
    return f"{format_short(per_second * seconds)}/{_SHORT[unit]}"


def format_size(number: float) -> str:
    if number < 1024:
        return f"{number:.0f} B"
    step = -1
    while number >= 1024 and step < len(_UNITS) - 1:
        number, step = number / 1024, step + 1
    return f"{number:.1f} {_UNITS[step]}"


def format_duration(seconds: float) -> str:
    """350 ms, 4.2 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 0.00995:
        return f"{seconds * 1000:.1f}".removesuffix(".0") + " ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    for large, unit, part_size, part in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= large:
            rest = whole % large // part_size
            return f"{whole // large} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def format_time(time: datetime | None) -> str:
    return "" if time is None else f"{to_utc(time):%Y-%m-%d %H:%M:%S}"


def format_axis_time(time: datetime, span_seconds: float) -> str:
    """Format a time for an axis of `span_seconds`, as short as tells its marks apart."""
    form = (
        "%H:%M:%S" if span_seconds <= 600 else "%H:%M" if span_seconds <= 86_400 else "%d %b %H:%M"
    )
    return format(to_utc(time), form if span_seconds <= 7 * 86_400 else "%d %b")


def payload_text(
    payload: bytes | bytearray | None, max_chars: int = 160, length: int | None = None
) -> str:
    """Return the printable beginning of a payload of `length` bytes. `payload` may end within a
    character.
    """
    if payload is None:
        return ""
    data = bytes(payload)
    length = len(data) if length is None else length
    try:
        text = getincrementaldecoder("utf-8")().decode(data, final=len(data) >= length)
    except UnicodeDecodeError:
        return f"({format_size(length)}, not text)"
    shown = "".join(sign if sign.isprintable() else " " for sign in text[: max_chars + 1])
    return shown if len(shown) <= max_chars and len(data) >= length else shown[:max_chars] + "…"


def to_utc(time: datetime) -> datetime:
    """Convert a time to UTC. Spark returns local times without a zone."""
    return time.astimezone(UTC)
