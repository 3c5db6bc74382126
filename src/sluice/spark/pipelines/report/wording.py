"""Numbers and times as a report says them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")


def count(number: float) -> str:
    return f"{number:,.0f}"


def short(number: float) -> str:
    """For an axis: 950, 1.2k, 3.4M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}".removesuffix(".0") + unit
    return f"{number:.2f}".rstrip("0").removesuffix(".") if number < 10 else f"{number:.0f}"


def size(number: float) -> str:
    if number < 1024:
        return f"{number:.0f} B"
    step = -1
    while number >= 1024 and step < len(_UNITS) - 1:
        number, step = number / 1024, step + 1
    return f"{number:.1f} {_UNITS[step]}"


def lasting(seconds: float) -> str:
    """350 ms, 4.2 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 0.001:
        return "0 ms" if seconds <= 0 else f"{seconds * 1000:.1f} ms"
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


def moment(time: datetime | None) -> str:
    return "" if time is None else f"{utc(time):%Y-%m-%d %H:%M:%S}"


def mark(time: datetime, span_seconds: float) -> str:
    """Under an axis of `span_seconds`: as much of a time as tells its marks apart."""
    form = "%H:%M:%S" if span_seconds <= 600 else "%H:%M" if span_seconds <= 86_400 else "%d %b %H:%M"
    return format(utc(time), form if span_seconds <= 7 * 86_400 else "%d %b")


def text_of(payload: bytes | bytearray | None, most: int = 160) -> str:
    """What can be shown of a payload."""
    if payload is None:
        return ""
    data = bytes(payload)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"({size(len(data))}, not text)"
    shown = "".join(sign if sign.isprintable() else " " for sign in text[: most + 1])
    return shown if len(shown) <= most else shown[:most] + "…"


def utc(time: datetime) -> datetime:
    """Spark hands times over in the zone of this machine without saying so, as Python means times without a zone."""
    return time.astimezone(UTC)
