"""Cron expressions: five fields, as in crontab(5), without a time zone.

    minute  hour  day of the month  month  day of the week

A field is `*`, or numbers, ranges (`1-5`) and steps (`*/15`, `10-40/10`), separated by commas.
Months and days of the week have names (`jan`, `mon`); 0 and 7 are Sunday. If neither day field
begins with `*`, a day matches when one of them does. `@hourly` and the like stand for five fields.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import Final

from sluice.errors import InvalidSchedule

MACROS: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
MONTH_NAMES: Final = [
    *("jan", "feb", "mar", "apr", "may", "jun"),
    *("jul", "aug", "sep", "oct", "nov", "dec"),
]
DAY_NAMES: Final = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
# The 29th of February on a given day of the week occurs at least once in so many days.
MAX_DAYS: Final = 366 * 41
REMEDY: Final = (
    'Give five fields: minute, hour, day of the month, month, day of the week, such as "30 2 * * '
    'mon-fri", or @hourly, @daily, @weekly, @monthly, @yearly'
)


class Cron:
    """The times of a cron expression. Raises InvalidSchedule if it is none, or never matches."""

    def __init__(self, text: str) -> None:
        fields = MACROS.get(text.strip().lower(), text).split()
        if len(fields) != 5:
            raise InvalidSchedule(f"{text!r} is not a cron expression", REMEDY)
        no_names: list[str] = []
        self.minutes: list[int] = _parse_field(fields[0], "minute", 0, 59, no_names, 0)
        self.hours: list[int] = _parse_field(fields[1], "hour", 0, 23, no_names, 0)
        self._days: list[int] = _parse_field(fields[2], "day of the month", 1, 31, no_names, 0)
        self._months: list[int] = _parse_field(fields[3], "month", 1, 12, MONTH_NAMES, 1)
        weekdays = _parse_field(fields[4], "day of the week", 0, 7, DAY_NAMES, 0)
        self._weekdays: list[int] = sorted({day % 7 for day in weekdays})
        self._needs_both: bool = fields[2].startswith("*") or fields[4].startswith("*")
        if self.next_day(date(2000, 1, 1)) is None:
            raise InvalidSchedule(
                f"{text!r} never matches a day", "Check the day of the month and the month"
            )

    def runs_every_hour(self) -> bool:
        return len(self.hours) == 24

    def matches_day(self, day: date) -> bool:
        if day.month not in self._months:
            return False
        is_day = day.day in self._days
        is_weekday = day.isoweekday() % 7 in self._weekdays
        return is_day and is_weekday if self._needs_both else is_day or is_weekday

    def next_day(self, day: date) -> date | None:
        """Return the first matching day from `day` on; None if there is none for decades."""
        for _ in range(MAX_DAYS):
            if self.matches_day(day):
                return day
            if day.year >= 9998:
                return None
            if day.month not in self._months:
                day = date(day.year + day.month // 12, day.month % 12 + 1, 1)
            else:
                day = day + timedelta(days=1)
        return None


def _parse_field(
    text: str, field: str, low: int, high: int, names: list[str], first_name: int
) -> list[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        step = 1
        if slash:
            if not _is_number(step_text) or not 1 <= int(step_text) <= high:
                raise InvalidSchedule(f"{part!r} is no {field}: the step is not a number", REMEDY)
            step = int(step_text)
        begin_text, dash, end_text = span.partition("-")
        if span == "*":
            begin, end = low, high
        else:
            begin = _parse_value(begin_text, field, low, high, names, first_name)
            end = begin
            if dash:
                end = _parse_value(end_text, field, low, high, names, first_name)
            elif slash:
                end = high  # "5/15" is "5-59/15"
        if begin > end:
            raise InvalidSchedule(
                f"{part!r} is no {field}: the range ends before it begins", REMEDY
            )
        found.update(range(begin, end + 1, step))
    return sorted(found)


def _parse_value(
    text: str, field: str, low: int, high: int, names: list[str], first_name: int
) -> int:
    if text.lower() in names:
        return names.index(text.lower()) + first_name
    if not _is_number(text) or not low <= int(text) <= high:
        known = f"{low} to {high}" + (f", or {names[0]} to {names[-1]}" if names else "")
        raise InvalidSchedule(f"{text!r} is no {field}: it is {known}", REMEDY)
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 4
