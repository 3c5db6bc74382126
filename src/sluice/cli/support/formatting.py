"""Format numbers, times and texts for people. Pure functions; JSON output does not use them.

Times are UTC, like those of the log. Control characters in data of clients (payloads, client ids,
keys) are escaped, so that a message cannot control the terminal of a user.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

# Also bidirectional and invisible characters: a name must look like what it is.
_CONTROL: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_BARS: Final = "▁▂▃▄▅▆▇█"
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")


def escape_controls(text: str, multiline: bool = False) -> str:
    """Escape control characters in `text`; `multiline` keeps newlines and tabs."""

    def escape(found: re.Match[str]) -> str:
        sign = found[0]
        if sign in "\n\t\r":
            return (
                sign
                if multiline and sign != "\r"
                else {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[sign]
            )
        return f"\\x{ord(sign):02x}" if ord(sign) < 256 else f"\\u{ord(sign):04x}"

    return _CONTROL.sub(escape, text)


def format_count(number: int) -> str:
    return f"{number:,}"


def format_plural(number: int, one: str, plural_form: str = "") -> str:
    return f"{number:,} {one if number == 1 else plural_form or one + 's'}"


def format_size(number: int) -> str:
    if number < 1024:
        return f"{number} B"
    amount, step = number / 1024, 0
    while amount >= 999.5 and step < len(_UNITS) - 1:
        amount, step = amount / 1024, step + 1
    return f"{amount:.1f} {_UNITS[step]}" if amount < 100 else f"{amount:.0f} {_UNITS[step]}"


def format_rate(per_second: float) -> str:
    """Format a rate without "/s", which is in the head of the column."""
    if per_second < 0.05:
        return "0"
    return f"{per_second:.1f}" if per_second < 10 else f"{per_second:,.0f}"


def format_duration(seconds: float) -> str:
    """Format with at most two units: 350ms, 4.2s, 3m 20s, 2h 5m, 3d 4h."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    for large, small, unit, part in (
        (86400, 3600, "d", "h"),
        (3600, 60, "h", "m"),
        (60, 1, "m", "s"),
    ):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large}{unit}" + (f" {rest}{part}" if rest else "")
    return f"{whole}s"


def to_timestamp(text: str | None) -> float:
    """Return seconds since 1970 of a time in a response; 0.0 for never."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def format_clock(text: str | None, today: float) -> str:
    """Format the time of day, with the date if that is not today."""
    if not text:
        return ""
    parsed = datetime.fromisoformat(text).astimezone(UTC)
    text_utc = parsed.isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
    date, _, time = text_utc.partition(" ")
    return (
        time if date == datetime.fromtimestamp(today, UTC).date().isoformat() else f"{date} {time}"
    )


def format_age(text: str | None, now: float) -> str:
    """Format the time since `text`, or until it. Clocks differ: up to 0.5 s is "now"."""
    if not text:
        return "never"
    passed = now - to_timestamp(text)
    if abs(passed) < 0.5:
        return "now"
    return f"{format_duration(passed)} ago" if passed > 0 else f"in {format_duration(-passed)}"


def format_ranges(numbers: Sequence[int]) -> str:
    """Format 0, 1, 2, 5 as "0-2, 5"."""
    ranges: list[str] = []
    start = previous = None
    for number in [*sorted(numbers), None]:
        if start is not None and previous is not None and number != previous + 1:
            ranges.append(f"{start}" if start == previous else f"{start}-{previous}")
            start = number
        elif start is None:
            start = number
        previous = number
    return ", ".join(ranges)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the last `width` values as bars, from zero to the largest shown."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    bars = "".join(
        _BARS[min(7, int(value / top * 7.999))] if top > 0 else _BARS[0] for value in shown
    )
    return bars.rjust(width)


def format_payload(text: str | None, size_in_bytes: int, limit: int) -> str:
    """Format a payload for a row of a table; None means that it is not text."""
    if text is None:
        return f"({format_size(size_in_bytes)}, not text)"
    shown = escape_controls(text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
