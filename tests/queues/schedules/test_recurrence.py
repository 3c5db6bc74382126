"""Ticks of cron expressions and intervals, compared with a model that looks at each minute."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import InvalidSchedule
from sluice.queues.schedules.cron import DAY_NAMES, MONTH_NAMES, Cron
from sluice.queues.schedules.recurrence import (
    CronRecurrence,
    IntervalRecurrence,
    format_tick,
    latest_ticks,
)

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu")


def to_ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def ticks(cron: str, zone: str, start: str, count: int) -> list[str]:
    """Return the next ticks in local time."""
    recurrence = CronRecurrence(cron, zone)
    at = to_ms(datetime.fromisoformat(start))
    found = []
    for _ in range(count):
        at = int(recurrence.next_after(at))
        local = datetime.fromtimestamp(at / 1000, ZoneInfo(zone))
        found.append(local.isoformat(timespec="minutes"))
    return found


# ---- a model of cron, without arithmetic: it tries each minute


@cache
def model_values(
    field: str, low: int, high: int, names: tuple[str, ...] = (), first: int = 0
) -> frozenset[int]:
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        first_text, _, last_text = span.partition("-")
        low_value, high_value = low, high
        if span != "*":
            value = {name: nth + first for nth, name in enumerate(names)}
            low_value = value.get(first_text.lower(), -1)
            low_value = int(first_text) if low_value < 0 else low_value
            high_value = low_value if not step else high
            if last_text:
                high_value = value.get(last_text.lower(), -1)
                high_value = int(last_text) if high_value < 0 else high_value
        found |= {
            n for n in range(low_value, high_value + 1) if (n - low_value) % int(step or 1) == 0
        }
    return frozenset(found)


def model_matches(cron: str, local: datetime) -> bool:
    minute, hour, day, month, weekday = cron.split()
    in_day = local.day in model_values(day, 1, 31)
    weekdays = {n % 7 for n in model_values(weekday, 0, 7, tuple(DAY_NAMES))}
    in_weekday = local.isoweekday() % 7 in weekdays
    both = day.startswith("*") or weekday.startswith("*")
    return (
        local.minute in model_values(minute, 0, 59)
        and local.hour in model_values(hour, 0, 23)
        and local.month in model_values(month, 1, 12, tuple(MONTH_NAMES), 1)
        and ((in_day and in_weekday) if both else (in_day or in_weekday))
    )


def model_ticks(cron: str, zone: str, start: datetime, minutes: int) -> set[int]:
    """Return all ticks of a time, by the rules as the documentation states them."""
    zone_info = ZoneInfo(zone)
    every_hour = model_values(cron.split()[1], 0, 23) == set(range(24))
    found: set[int] = set()
    seen: set[datetime] = set()
    one = timedelta(minutes=1)
    before = (start - one).astimezone(zone_info).replace(tzinfo=None)
    for nth in range(-180, minutes):
        at = start + nth * one
        local = at.astimezone(zone_info).replace(tzinfo=None, fold=0)
        is_new = local not in seen
        seen.add(local)
        skipped: list[datetime] = []
        if nth > -180:
            step = before + one
            while step < local:
                skipped.append(step)
                step += one
        before = local
        fires = model_matches(cron, local) and (every_hour or is_new)
        fires = fires or (not every_hour and any(model_matches(cron, one) for one in skipped))
        if fires and nth > 0:
            found.add(to_ms(at))
    return found


def field(
    low: int, high: int, names: list[str] | None = None, first: int = 0
) -> st.SearchStrategy[str]:
    number = st.integers(low, high)

    def text(value: int) -> str:
        return names[value - first] if names and 0 <= value - first < len(names) else str(value)

    span = st.tuples(number, number).map(lambda two: f"{text(min(two))}-{text(max(two))}")
    span = span.filter(lambda one: "sun" not in one.split("-")[1:])  # 7, or 0 after others
    step = st.integers(1, high)
    part = st.one_of(
        st.just("*"),
        number.map(text),
        span,
        step.map(lambda one: f"*/{one}"),
        st.tuples(span, step).map(lambda two: f"{two[0]}/{two[1]}"),
        st.tuples(number, step).map(lambda two: f"{two[0]}/{two[1]}"),
    )
    return st.lists(part, min_size=1, max_size=3).map(",".join)


CRONS = st.tuples(
    field(0, 59), field(0, 23), field(1, 31), field(1, 12, MONTH_NAMES, 1), field(0, 7, DAY_NAMES)
).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(
    cron=CRONS,
    zone=st.sampled_from(ZONES),
    day=st.sampled_from(
        ["2026-03-07", "2026-03-28", "2026-04-04", "2026-10-03", "2026-10-24", "2026-10-31"]
    ),
    offset=st.integers(0, 2880),
)
def test_ticks_are_those_of_the_model_around_changes_of_the_clock(
    cron: str, zone: str, day: str, offset: int
) -> None:
    start = datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(minutes=offset)
    expected = model_ticks(cron, zone, start, 1440)
    try:
        recurrence = CronRecurrence(cron, zone)
    except InvalidSchedule:
        assert not expected
        return
    found = set()
    at = int(recurrence.next_after(to_ms(start)))
    while 0 < at < to_ms(start + timedelta(minutes=1440)):
        found.add(at)
        at = int(recurrence.next_after(at))
    assert found == expected


def test_skipped_local_time_ticks_once_at_the_end_of_the_gap() -> None:
    assert ticks("30 2 * * *", "America/New_York", "2026-03-07T12:00-05:00", 2) == [
        "2026-03-08T03:00-04:00",
        "2026-03-09T02:30-04:00",
    ]
    assert ticks("*/10 2 * * *", "America/New_York", "2026-03-07T12:00-05:00", 2) == [
        "2026-03-08T03:00-04:00",
        "2026-03-09T02:00-04:00",
    ]


def test_repeated_local_time_ticks_once() -> None:
    assert ticks("30 1 * * *", "America/New_York", "2026-10-31T12:00-04:00", 2) == [
        "2026-11-01T01:30-04:00",
        "2026-11-02T01:30-05:00",
    ]


def test_expression_for_every_hour_follows_the_elapsed_time() -> None:
    assert ticks("30 * * * *", "America/New_York", "2026-11-01T00:45-04:00", 3) == [
        "2026-11-01T01:30-04:00",
        "2026-11-01T01:30-05:00",
        "2026-11-01T02:30-05:00",
    ]
    assert ticks("30 * * * *", "America/New_York", "2026-03-08T00:45-05:00", 2) == [
        "2026-03-08T01:30-05:00",
        "2026-03-08T03:30-04:00",
    ]


def test_midnight_that_does_not_exist_ticks_at_the_end_of_the_gap() -> None:
    assert ticks("0 0 * * *", "Africa/Cairo", "2026-04-23T12:00+02:00", 2) == [
        "2026-04-24T01:00+03:00",
        "2026-04-25T00:00+03:00",
    ]


@pytest.mark.parametrize(
    ("macro", "first"),
    [
        ("@hourly", "2026-06-10T13:00+00:00"),
        ("@daily", "2026-06-11T00:00+00:00"),
        ("@weekly", "2026-06-14T00:00+00:00"),
        ("@Monthly", "2026-07-01T00:00+00:00"),
        ("@yearly", "2027-01-01T00:00+00:00"),
    ],
)
def test_macro_stands_for_five_fields(macro: str, first: str) -> None:
    assert ticks(macro, "UTC", "2026-06-10T12:00+00:00", 1) == [first]


def test_leap_day_is_found_after_years() -> None:
    assert ticks("0 0 29 feb *", "UTC", "2096-03-01T00:00+00:00", 1) == ["2104-02-29T00:00+00:00"]


@pytest.mark.parametrize(
    "text",
    [
        "", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *",
        "* * * * 8", "5-1 * * * *", "*/0 * * * *", "a * * * *", "* * * jam *", "1,,2 * * * *",
        "-1 * * * *", "1- * * * *", "* * L * *", "* * * * 1#2", "@reboot", "0 0 31 2 *",
    ],
)  # fmt: skip
def test_other_texts_are_refused_with_advice(text: str) -> None:
    with pytest.raises(InvalidSchedule) as refusal:
        Cron(text)
    assert refusal.value.remedy


def test_unknown_time_zone_is_refused() -> None:
    for name in ("Europe/Atlantis", "", "../etc/passwd", "Europe"):
        with pytest.raises(InvalidSchedule):
            CronRecurrence("@daily", name)


def test_interval_ticks_in_equal_distances_from_its_anchor() -> None:
    recurrence = IntervalRecurrence(1_000, 250)
    assert [recurrence.next_after(at) for at in (0, 1_000, 1_249, 1_250, 9_999)] == [
        1_250, 1_250, 1_250, 1_500, 10_000,
    ]  # fmt: skip


@given(count=st.integers(0, 400), limit=st.integers(1, 150))
def test_latest_ticks_are_the_newest_ones_in_order(count: int, limit: int) -> None:
    recurrence = IntervalRecurrence(0, 90_000)
    found, is_complete = latest_ticks(recurrence, 0, 90_000 * count + 5, limit)
    assert found == [90_000 * nth for nth in range(1, count + 1)][-limit:]
    assert is_complete or count >= limit


def test_tick_is_formatted_in_utc() -> None:
    assert format_tick(1_800_000_000_000) == "2027-01-15T08:00:00Z"
    assert format_tick(1_800_000_000_120) == "2027-01-15T08:00:00.120Z"
