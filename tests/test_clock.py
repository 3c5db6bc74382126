"""Tests of deadlines: called when due, in order, once; with one timer for all of them.

Compiled classes have no interpreted subclasses, so the deadlines here are real connections with a
keep-alive. A call closes the transport, which records it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from sluice.broker.net.connection import Connection
from sluice.broker.turn import Scheduler, Turn
from sluice.clock import DeadlineHeap, steady_time
from tests.broker.kit import BrokerHarness


class TimedCall:
    """A transport that records its close."""

    def __init__(self, name: str, call_log: list[str], then: Callable[[], None] | None) -> None:
        self.name, self.book, self.then = name, call_log, then

    def close(self) -> None:
        self.book.append(self.name)
        if self.then is not None:
            self.then()


class CallLog:
    """The calls, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._broker = BrokerHarness().broker

    def entry(self, name: str, then: Callable[[], None] | None = None) -> Connection:
        """Return a deadline that records `name` and calls `then`."""
        connection = Connection(self._broker)
        connection.transport = TimedCall(name, self.names, then)
        return connection


@pytest.fixture
def call_log() -> CallLog:
    return CallLog()


def test_steady_time_follows_the_date_and_never_runs_backwards() -> None:
    assert abs(steady_time() - time.time()) < 5
    moments = [steady_time() for _ in range(1000)]
    assert moments == sorted(moments)


def test_add_returns_whether_the_entry_is_now_the_first(call_log: CallLog) -> None:
    waiting = DeadlineHeap()
    assert waiting.next_due_at() == 0.0
    assert waiting.add(10.0, call_log.entry("a"))
    assert not waiting.add(20.0, call_log.entry("b"))
    assert waiting.add(5.0, call_log.entry("c"))
    assert not waiting.add(5.0, call_log.entry("d"))
    assert (waiting.next_due_at(), len(waiting)) == (5.0, 4)


def test_entries_are_called_in_order_of_time_and_arrival(call_log: CallLog) -> None:
    waiting = DeadlineHeap()
    for name, when in (
        ("late", 3.0),
        ("first", 1.0),
        ("second", 1.0),
        ("never", 9.0),
        ("third", 2.0),
    ):
        waiting.add(when, call_log.entry(name))
    waiting.run_due(0.9)
    assert call_log.names == []
    waiting.run_due(3.0)
    assert call_log.names == ["first", "second", "third", "late"]
    assert (len(waiting), waiting.next_due_at()) == (1, 9.0)


def test_entry_may_reschedule_itself(call_log: CallLog) -> None:
    waiting = DeadlineHeap()
    entry = call_log.entry("a")
    entry.keep_alive, entry.last_read_at = 2.0, 0.0
    waiting.add(1.0, entry)
    waiting.run_due(1.0)
    assert waiting.next_due_at() == 2.0
    entry.last_read_at = 3.0
    waiting.run_due(2.5)
    assert waiting.next_due_at() == 5.0
    waiting.run_due(4.9)
    assert call_log.names == []
    waiting.run_due(5.0)
    assert call_log.names == ["a"]
    assert len(waiting) == 0


def test_cancelled_entry_is_not_called(call_log: CallLog) -> None:
    waiting = DeadlineHeap()
    entry = call_log.entry("a")
    waiting.add(1.0, entry)
    entry.closing = True
    waiting.run_due(2.0)
    assert call_log.names == [] and len(waiting) == 0


def test_cancelled_entries_are_removed_long_before_their_time(call_log: CallLog) -> None:
    waiting = DeadlineHeap()
    lapsed = call_log.entry("lapsed")
    lapsed.closing = True
    for nth in range(1500):
        waiting.add(1e6 + nth, call_log.entry(f"needed {nth}"))
    for nth in range(100_000):
        waiting.add(2e6 + nth, lapsed)
        assert len(waiting) <= 4096
    waiting.run_due(1e6 + 1500)
    assert call_log.names == [f"needed {nth}" for nth in range(1500)]


class Timers:
    """The timers of a loop: at most one may be running at a time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.running: list[Timer] = []

    def clock(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self, self.now + seconds, callback)
        self.running.append(timer)
        assert len(self.running) == 1
        return timer

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.running and self.running[0].when <= end:
            timer = self.running.pop()
            self.now = max(self.now, timer.when)
            timer.callback()
        self.now = end


class Timer:
    def __init__(self, timers: Timers, when: float, callback: Callable[[], None]) -> None:
        self.timers, self.when, self.callback = timers, when, callback

    def cancel(self) -> None:
        if self in self.timers.running:
            self.timers.running.remove(self)


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.fixture
def scheduler(timers: Timers) -> Scheduler:
    return Scheduler(Turn(lambda callback: None, timers.clock), timers.call_later)


def test_timer_is_set_for_the_first_entry_and_again_for_the_next(
    scheduler: Scheduler, timers: Timers, call_log: CallLog
) -> None:
    scheduler.wake_at(110.0, call_log.entry("b"))
    assert [timer.when for timer in timers.running] == [110.0]
    scheduler.wake_at(105.0, call_log.entry("a"))
    assert [timer.when for timer in timers.running] == [105.0]
    scheduler.wake_at(120.0, call_log.entry("c"))
    assert [timer.when for timer in timers.running] == [105.0]
    timers.advance(6)
    assert call_log.names == ["a"]
    assert [timer.when for timer in timers.running] == [110.0]
    timers.advance(100)
    assert call_log.names == ["a", "b", "c"]
    assert timers.running == []


def test_overdue_entry_is_called_in_the_next_turn(
    scheduler: Scheduler, timers: Timers, call_log: CallLog
) -> None:
    scheduler.wake_at(50.0, call_log.entry("late"))
    timers.advance(0)
    assert call_log.names == ["late"]


def test_deadline_may_add_another_while_it_is_called(
    scheduler: Scheduler, timers: Timers, call_log: CallLog
) -> None:
    parent = call_log.entry("parent", lambda: scheduler.wake_at(102.0, call_log.entry("child")))
    scheduler.wake_at(101.0, parent)
    timers.advance(1.5)
    assert call_log.names == ["parent"]
    timers.advance(1)
    assert call_log.names == ["parent", "child"]


def test_failing_deadline_does_not_stop_the_others(
    scheduler: Scheduler, timers: Timers, call_log: CallLog
) -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    scheduler.wake_at(101.0, call_log.entry("broken", fail))
    scheduler.wake_at(102.0, call_log.entry("whole"))
    with pytest.raises(RuntimeError, match="broken"):
        timers.advance(1)
    timers.advance(5)
    assert call_log.names == ["broken", "whole"]


def test_closed_scheduler_calls_nothing(
    scheduler: Scheduler, timers: Timers, call_log: CallLog
) -> None:
    scheduler.wake_at(101.0, call_log.entry("a"))
    scheduler.close()
    timers.advance(10)
    assert call_log.names == []
    assert len(scheduler) == 1
