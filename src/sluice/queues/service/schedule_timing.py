"""The times of a schedule as users write them: checked, and converted to `Timing`."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.errors import InvalidSchedule
from sluice.queues.names import group_name_error, is_dot_segment
from sluice.queues.schedules import MISSED_NAMES, NEVER, Timing
from sluice.units import format_duration, parse_duration

CHECKED_TICKS: Final = 100  # whose distances are compared with the limits
MAX_INTERVAL_SECONDS: Final = 3650 * 86_400.0


def check_schedule_name(name: str) -> None:
    """Refuse a name that no REST path or message id can contain."""
    fault = group_name_error(name).replace("consumer-group", "name")
    if is_dot_segment(name):
        fault = "Give another name than '.' and '..', because REST paths lose such a name"
    if fault:
        raise InvalidSchedule(f"{name!r} is not a valid name of a schedule", fault)


def make_timing(
    cron: str, every: str, time_zone: str, jitter: str, missed: str, now: float, min_ms: i64
) -> Timing:
    """Return the times of a schedule; `min_ms` is the smallest distance of ticks."""
    if bool(cron) == bool(every):
        raise InvalidSchedule(
            "a schedule needs a cron expression or an interval, and not both",
            'Give cron, such as "30 2 * * *", or every, such as "15m"',
        )
    if missed not in MISSED_NAMES:
        raise InvalidSchedule(f"missed is {missed!r}", f"Give one of {', '.join(MISSED_NAMES)}")
    if every and time_zone not in ("", "UTC"):
        raise InvalidSchedule(
            "an interval has no time zone", "Leave time_zone out, or give cron instead of every"
        )
    every_ms = _parse_ms("every", every) if every else 0
    if every and not 0.001 <= float(every_ms) / 1000.0 <= MAX_INTERVAL_SECONDS:
        raise InvalidSchedule(f"every is {every!r}", "Give at most 3650d")
    timing = Timing(
        " ".join(cron.split()),
        every_ms,
        time_zone or "UTC",
        _parse_ms("jitter", jitter) if jitter else 0,
        MISSED_NAMES.index(missed),
    )
    distance = _smallest_distance(timing, int(now * 1000.0))
    if distance < min_ms:
        raise InvalidSchedule(
            f"ticks are only {_show(distance)} apart",
            f"Let {_show(min_ms)} pass between them, or lower queues.min_schedule_interval",
        )
    if timing.jitter_ms >= distance:
        raise InvalidSchedule(
            f"jitter is {jitter!r}, and ticks are {_show(distance)} apart",
            "Give a jitter that is shorter than the time between two ticks",
        )
    return timing


def _parse_ms(field: str, text: str) -> i64:
    try:
        return int(parse_duration(text) * 1000.0 + 0.5)
    except ValueError as error:
        raise InvalidSchedule(f"{field}: {error}", f"Give {field} as a duration") from None


def _smallest_distance(timing: Timing, now_ms: i64) -> i64:
    recurrence = timing.recurrence(now_ms)
    smallest: i64 = 0x7FFF_FFFF_FFFF_FFFF
    last = recurrence.next_after(now_ms)
    for _ in range(CHECKED_TICKS):
        tick = recurrence.next_after(last) if last != NEVER else NEVER
        if tick == NEVER:
            break
        smallest = min(smallest, tick - last)
        last = tick
    return smallest


def _show(milliseconds: i64) -> str:
    return format_duration(float(milliseconds) / 1000.0)
