"""Recurrence: when the ticks of a schedule are, as milliseconds since 1970. It reads no clock.

Cron expressions are local times of a time zone, which has hours that occur twice and hours that do
not occur. A local time that is skipped is a tick at the end of the gap, and a local time that is
repeated is a tick once, the first time. Several skipped times are one tick. An expression for every
hour follows the elapsed time instead: it has no additional tick after a gap, and ticks in both of
two equal hours.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo

from mypy_extensions import i64

from sluice.errors import InvalidSchedule
from sluice.queues.schedules.cron import Cron

MINUTE: Final = timedelta(minutes=1)
DAY: Final = timedelta(days=1)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
NEVER: Final = -1
FIRST_WINDOW_MS: Final = 7_200_000  # in which `latest_ticks` looks first


class Recurrence:
    def next_after(self, at_ms: i64) -> i64:
        """Return the first tick after `at_ms`, or NEVER."""
        raise NotImplementedError


class IntervalRecurrence(Recurrence):
    """Ticks in equal distances. `anchor_ms` is the tick before the first one."""

    def __init__(self, anchor_ms: i64, every_ms: i64) -> None:
        self._anchor_ms: i64 = anchor_ms
        self._every_ms: i64 = every_ms

    def next_after(self, at_ms: i64) -> i64:
        if at_ms < self._anchor_ms:
            return self._anchor_ms + self._every_ms
        count: i64 = (at_ms - self._anchor_ms) // self._every_ms + 1
        return self._anchor_ms + count * self._every_ms


class CronRecurrence(Recurrence):
    def __init__(self, text: str, zone_name: str) -> None:
        self._cron: Cron = Cron(text)
        self._zone: tzinfo = find_zone(zone_name)

    def next_after(self, at_ms: i64) -> i64:
        at = EPOCH + timedelta(milliseconds=int(at_ms))
        if at.year >= 9990:
            return NEVER
        found = self._next_elapsed(at) if self._cron.runs_every_hour() else self._next_local(at)
        return NEVER if found is None else _to_ms(found)

    def _next_local(self, at: datetime) -> datetime | None:
        """Return the first instant after `at` at which a matching local time begins.

        Local times in order begin in the same order, so those before the local time of `at` began
        already, also if that time is repeated.
        """
        local = at.astimezone(self._zone)
        day: date | None = local.date()
        first_hour = local.hour
        while day is not None:
            day = self._cron.next_day(day)
            if day is None:
                break
            if day != local.date():
                first_hour = 0
            for hour in self._cron.hours:
                if hour < first_hour:
                    continue
                for minute in self._cron.minutes:
                    begin = self._begin_of(datetime.combine(day, time(hour, minute)))
                    if begin > at:
                        return begin
            day = day + DAY
        return None

    def _begin_of(self, local: datetime) -> datetime:
        """Return when a local time begins: at the end of the gap, if it is skipped."""
        begin = local.replace(tzinfo=self._zone).astimezone(UTC)
        if begin.astimezone(self._zone).replace(tzinfo=None) == local:
            return begin
        # Python reads a skipped time with the offset before the gap, so it is after the gap.
        low = begin - DAY
        while begin - low > timedelta(seconds=1):
            middle = low + (begin - low) / 2
            if middle.astimezone(self._zone).replace(tzinfo=None, fold=0) < local:
                low = middle
            else:
                begin = middle
        return begin.replace(microsecond=0)

    def _next_elapsed(self, at: datetime) -> datetime | None:
        """Return the first minute after `at` whose local time matches."""
        minute = at.replace(second=0, microsecond=0) + MINUTE
        while True:
            local = minute.astimezone(self._zone)
            if self._cron.matches_day(local.date()):
                if local.minute in self._cron.minutes:
                    return minute
                minute += MINUTE
                continue
            day = self._cron.next_day(local.date())
            if day is None:
                return None
            minute = max(minute + MINUTE, self._begin_of(datetime.combine(day, time(0, 0))))


def _to_ms(at: datetime) -> i64:
    return (at - EPOCH) // timedelta(milliseconds=1)


def find_zone(name: str) -> tzinfo:
    """Return a time zone of the IANA database. UTC needs no database."""
    if name.upper() == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        raise InvalidSchedule(
            f"there is no time zone {name!r}",
            "Give a name of the IANA database, such as Europe/Berlin, or UTC. If the system has no "
            "time zones, install its package tzdata",
        ) from None


def latest_ticks(
    recurrence: Recurrence, after_ms: i64, until_ms: i64, limit: i64
) -> tuple[list[int], bool]:
    """Return at most `limit` ticks after `after_ms` up to `until_ms`, the latest, oldest first.

    The second value is False if there may be earlier ones. It looks back in growing windows, since
    a tick tells only the next one.
    """
    window: i64 = FIRST_WINDOW_MS
    while True:
        start = max(after_ms, until_ms - window)
        found: list[int] = []
        tick = recurrence.next_after(start)
        while tick != NEVER and tick <= until_ms:
            found.append(int(tick))
            tick = recurrence.next_after(tick)
        if start == after_ms or len(found) >= limit:
            count = len(found)
            return found[-int(limit) :], start == after_ms and count <= limit
        window *= 2


def format_tick(tick_ms: i64) -> str:
    """Return a time in UTC, ISO 8601; with milliseconds if it has any."""
    at = EPOCH + timedelta(milliseconds=int(tick_ms))
    text = at.strftime("%Y-%m-%dT%H:%M:%S")
    thousandths = int(tick_ms % 1000)
    return f"{text}.{thousandths:03d}Z" if thousandths else f"{text}Z"
