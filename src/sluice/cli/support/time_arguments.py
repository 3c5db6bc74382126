"""Parse times on a command line."""

from __future__ import annotations

from datetime import UTC, datetime

from sluice.cli.support.errors import usage_error
from sluice.units import parse_duration


def parse_time_argument(flag: str, text: str, now: float | None) -> str:
    """Return a time as ISO text, in UTC unless it has a zone; `2h` means two hours before now.

    Without `now` only a time is valid: the command must mean the same when it is repeated.
    """
    if not text:
        return ""
    if now is not None:
        try:
            return datetime.fromtimestamp(now - parse_duration(text), UTC).isoformat(
                timespec="milliseconds"
            )
        except (ValueError, OverflowError, OSError):
            pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        if now is None:
            raise usage_error(
                f"{flag} {text!r} is not a time", "Write 2030-01-31T12:00:00Z"
            ) from None
        raise usage_error(
            f"{flag} {text!r} is neither a time nor a duration",
            "Write 2h for two hours ago, or 2030-01-31T12:00:00Z",
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).isoformat(timespec="milliseconds")
