"""Ticks of schedules: when they are published, and what a crash, a pause or an outage changes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sluice.errors import InvalidSchedule, ScheduleExists, TooManySchedules, UnknownSchedule
from sluice.message import Message
from sluice.queues.schedules import OUTCOME_NAMES, Schedule
from sluice.queues.service.schedule_timing import check_schedule_name, make_timing
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest

BEGIN = datetime(2027, 1, 15, 8, 0, tzinfo=UTC)  # where the clock of the kit begins


def make_schedule(
    engine: EngineUnderTest,
    name: str = "nightly",
    queue: str = "tasks",
    cron: str = "",
    every: str = "",
    time_zone: str = "UTC",
    jitter: str = "",
    missed: str = "once",
) -> Schedule:
    timing = make_timing(cron, every, time_zone, jitter, missed, engine.loop.now, 1000)
    return Schedule(name, queue, timing, Message(b"go", b"", b"key"))


def add(engine: EngineUnderTest, **options: str) -> Schedule:
    engine.engine.now = engine.loop.now
    schedule = make_schedule(engine, **options)
    engine.engine.schedules.add(schedule)
    engine.run_until_idle()
    return schedule


def current(engine: EngineUnderTest, name: str = "nightly") -> Schedule:
    return engine.engine.schedules.find(name)


def outcomes(engine: EngineUnderTest) -> list[str]:
    return [OUTCOME_NAMES[run.outcome] for run in current(engine).runs]


def ids(engine: EngineUnderTest) -> list[str]:
    """Take all messages and return their ids."""
    worker = engine.worker(prefetch=1000)
    found = []
    while deliveries := worker.lease_all():
        for delivery in deliveries:
            found.append(delivery.message.id.decode())
            worker.ack(delivery)
    worker.leave()
    return found


def restart_after(engine: EngineUnderTest, seconds: float) -> None:
    """Kill the broker and start it again later."""
    engine.backend.crash()
    engine.loop.now += seconds
    engine.reopen()
    engine.advance(seconds=0.001)


def test_each_day_publishes_one_message_with_the_id_of_its_tick(engine: EngineUnderTest) -> None:
    add(engine, cron="30 2 * * *")
    engine.advance(days=3)
    assert ids(engine) == [f"nightly@2027-01-{day}T02:30:00Z" for day in (16, 17, 18)]
    assert outcomes(engine) == ["published"] * 3
    assert [run.message_id for run in current(engine).runs][-1] == b"nightly@2027-01-18T02:30:00Z"


def test_interval_counts_from_the_time_of_its_creation(engine: EngineUnderTest) -> None:
    engine.advance(seconds=100)
    add(engine, every="15m")
    engine.advance(minutes=31)
    assert ids(engine) == ["nightly@2027-01-15T08:16:40Z", "nightly@2027-01-15T08:31:40Z"]


def test_tick_creates_its_queue(make_engine: MakeEngine) -> None:
    engine = make_engine()
    add(engine, every="10s", queue="new/one")
    engine.advance(seconds=10)
    assert engine.engine.lifecycle.get_queue("new/one").depth == 1


@pytest.mark.parametrize("snapshot", [False, True])
def test_schedule_with_its_runs_survives_a_crash(engine: EngineUnderTest, snapshot: bool) -> None:
    add(engine, every="1h", jitter="90s", missed="all")
    engine.advance(hours=2, minutes=10)
    before = current(engine)
    if snapshot:
        engine.take_snapshot()
    engine.crash_and_restart()
    after = current(engine)
    assert after is not before
    for field in ("queue", "ttl_ms", "created_at", "anchor_ms", "handled_ms", "counts", "due_at"):
        assert getattr(after, field) == getattr(before, field), field
    assert vars_of(after.timing) == vars_of(before.timing)
    assert [vars_of(run) for run in after.runs] == [vars_of(run) for run in before.runs]
    engine.advance(hours=1)
    assert len(ids(engine)) == 3


def vars_of(thing: object) -> list[object]:
    names = ("cron", "every_ms", "zone", "jitter_ms", "missed", "tick_ms", "message_id", "outcome")
    return [getattr(thing, name, None) for name in names]


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("skip", []),
        ("once", ["nightly@2027-01-15T12:00:00Z"]),
        ("all", [f"nightly@2027-01-15T{hour:02}:00:00Z" for hour in (9, 10, 11, 12)]),
    ],
)
def test_missed_ticks_are_handled_by_the_policy(
    engine: EngineUnderTest, missed: str, expected: list[str]
) -> None:
    add(engine, cron="@hourly", missed=missed)
    restart_after(engine, 4.5 * 3600)
    assert ids(engine) == expected
    assert current(engine).counts == [len(expected), 0, 0, 4 - len(expected)]
    engine.advance(hours=1)
    assert ids(engine) == ["nightly@2027-01-15T13:00:00Z"]


def test_skip_still_publishes_a_tick_that_is_less_than_a_minute_late(
    engine: EngineUnderTest,
) -> None:
    add(engine, cron="@hourly", missed="skip")
    restart_after(engine, 3600 + 59)
    assert ids(engine) == ["nightly@2027-01-15T09:00:00Z"]


def test_at_most_one_hundred_missed_ticks_are_published(engine: EngineUnderTest) -> None:
    add(engine, every="1m", missed="all")
    restart_after(engine, 30 * 86_400)
    found = ids(engine)
    assert len(found) == 100
    assert found[-1] == "nightly@2027-02-14T08:00:00Z"
    assert current(engine).counts[0] == 100
    assert current(engine).counts[3] > 0
    assert "was late: ticks at least" in engine.warnings[-1]


def test_paused_schedule_has_no_ticks_and_misses_none(engine: EngineUnderTest) -> None:
    schedule = add(engine, cron="@hourly", missed="all")
    engine.engine.schedules.pause(schedule, "ann", "holiday")
    engine.advance(hours=5)
    engine.crash_and_restart()
    assert current(engine).pause.by == "ann"
    assert current(engine).next_ticks(5) == []
    engine.advance(hours=5)
    engine.engine.schedules.resume(current(engine))
    engine.run_until_idle()
    assert ids(engine) == []
    engine.advance(hours=1)
    assert ids(engine) == ["nightly@2027-01-15T19:00:00Z"]


def test_run_now_publishes_apart_from_the_ticks(engine: EngineUnderTest) -> None:
    schedule = add(engine, cron="@daily")
    engine.advance(seconds=1.5)
    engine.engine.now = engine.loop.now
    engine.engine.schedules.run_now(schedule)
    engine.run_until_idle()
    engine.advance(days=1)
    assert ids(engine) == ["nightly@2027-01-15T08:00:01.500Z", "nightly@2027-01-16T00:00:00Z"]


def test_tick_that_was_published_already_is_a_duplicate(engine: EngineUnderTest) -> None:
    add(engine, every="10s")
    engine.advance(seconds=9)
    engine.publish(b"by another", message_id=b"nightly@2027-01-15T08:00:10Z")
    engine.advance(seconds=1)
    assert ids(engine) == ["nightly@2027-01-15T08:00:10Z"]
    assert outcomes(engine) == ["duplicate"]


def test_refused_tick_is_tried_again_until_the_queue_has_space(make_engine: MakeEngine) -> None:
    engine = make_engine(max_depth=1, partitions=1)
    add(engine, cron="@hourly")
    engine.publish(b"full")
    engine.advance(hours=1, minutes=10)
    assert outcomes(engine) == ["refused"]
    assert "full" in current(engine).runs[0].detail
    worker = engine.worker()
    assert worker.ack_all() == [b"full"]
    worker.leave()
    engine.advance(seconds=5)
    assert ids(engine) == ["nightly@2027-01-15T09:00:00Z"]
    assert current(engine).counts == [1, 0, 1, 0]


def test_jitter_delays_each_tick_by_its_own_time_and_keeps_its_id(engine: EngineUnderTest) -> None:
    schedule = add(engine, cron="@hourly", jitter="10m")
    engine.advance(days=1, minutes=10)
    delays = [schedule.jitter_of(run.tick_ms) for run in schedule.runs]
    assert len(set(delays)) == 5
    assert all(0 <= delay < 600_000 for delay in delays)
    late = [run.at - run.tick_ms / 1000 for run in schedule.runs]
    assert late == pytest.approx([delay / 1000 for delay in delays], abs=0.002)
    assert len(ids(engine)) == 24


def test_ticks_of_different_schedules_are_spread_by_jitter(engine: EngineUnderTest) -> None:
    schedules = [
        make_schedule(engine, name=f"job-{nth}", cron="@hourly", jitter="10m") for nth in range(50)
    ]
    delays = [int(one.jitter_of(1_800_003_600_000)) for one in schedules]
    assert max(delays) > 500_000
    assert min(delays) < 100_000


def test_replaced_schedule_keeps_its_runs_and_uses_the_new_times(engine: EngineUnderTest) -> None:
    add(engine, cron="@hourly")
    engine.advance(hours=1)
    engine.engine.schedules.replace(make_schedule(engine, cron="@daily"))
    engine.run_until_idle()
    engine.advance(hours=5)
    assert len(ids(engine)) == 1
    engine.crash_and_restart()
    assert outcomes(engine) == ["published"]
    engine.advance(days=1)
    assert ids(engine) == ["nightly@2027-01-16T00:00:00Z"]


def test_removed_schedule_ticks_no_more(engine: EngineUnderTest) -> None:
    schedule = add(engine, every="10s")
    engine.engine.schedules.remove(schedule)
    engine.run_until_idle()
    engine.crash_and_restart()
    engine.advance(minutes=5)
    with pytest.raises(UnknownSchedule):
        current(engine)
    assert "tasks" not in engine.engine.queues


def test_names_and_numbers_are_limited(engine: EngineUnderTest) -> None:
    engine.engine.schedules.max_schedules = 2
    add(engine, name="one", every="10s")
    add(engine, name="two", every="10s")
    with pytest.raises(ScheduleExists):
        add(engine, name="one", every="10s")
    with pytest.raises(TooManySchedules):
        add(engine, name="three", every="10s")
    for name in ("", "a/b", "a+", "..", "x" * 257, "a\n"):
        with pytest.raises(InvalidSchedule):
            check_schedule_name(name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cron": "@daily", "every": "5m"},
        {"every": "500ms"},
        {"every": "5"},
        {"every": "99999d"},
        {"every": "5m", "time_zone": "Europe/Berlin"},
        {"every": "5m", "jitter": "5m"},
        {"cron": "*/5 * * * *", "jitter": "6m"},
        {"cron": "@daily", "missed": "some"},
        {"cron": "@daily", "time_zone": "Mars/Olympus"},
    ],
)
def test_unusable_times_are_refused_with_advice(
    engine: EngineUnderTest, options: dict[str, str]
) -> None:
    with pytest.raises(InvalidSchedule) as refusal:
        make_schedule(engine, **options)
    assert refusal.value.remedy
