"""Everything that waits: called when its time has come, in order, once; and one timer for all of it.

Compiled classes have no interpreted heirs, so what waits here are real connections with a keep-alive: called in time,
they close their line, and that is written down.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from sluice.broker.net.connection import Connection
from sluice.broker.scheduler import Scheduler
from sluice.broker.turn import Turn
from sluice.clock import Deadlines, steady_time
from tests.broker.kit import House


class Line:
    """A transport that writes down when it is closed."""

    def __init__(self, name: str, book: list[str], then: Callable[[], None] | None) -> None:
        self.name, self.book, self.then = name, book, then

    def close(self) -> None:
        self.book.append(self.name)
        if self.then is not None:
            self.then()


class Book:
    """What was called, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._broker = House().broker

    def entry(self, name: str, then: Callable[[], None] | None = None) -> Connection:
        """Something that waits; called, it writes `name` down and does `then`."""
        connection = Connection(self._broker)
        connection.transport = Line(name, self.names, then)
        return connection


@pytest.fixture
def book() -> Book:
    return Book()


def test_the_steady_time_is_the_date_and_does_not_run_backwards() -> None:
    assert abs(steady_time() - time.time()) < 5
    moments = [steady_time() for _ in range(1000)]
    assert moments == sorted(moments)


def test_adding_says_whether_it_is_now_the_first(book: Book) -> None:
    waiting = Deadlines()
    assert waiting.first() == 0.0
    assert waiting.add(10.0, book.entry("a"))
    assert not waiting.add(20.0, book.entry("b"))
    assert waiting.add(5.0, book.entry("c"))
    assert not waiting.add(5.0, book.entry("d"))
    assert (waiting.first(), len(waiting)) == (5.0, 4)


def test_they_are_called_in_the_order_of_their_times_and_of_their_arrival(book: Book) -> None:
    waiting = Deadlines()
    for name, when in (("late", 3.0), ("first", 1.0), ("second", 1.0), ("never", 9.0), ("third", 2.0)):
        waiting.add(when, book.entry(name))
    waiting.run(0.9)
    assert book.names == []
    waiting.run(3.0)
    assert book.names == ["first", "second", "third", "late"]
    assert (len(waiting), waiting.first()) == (1, 9.0)


def test_one_that_asks_to_be_called_again_is(book: Book) -> None:
    waiting = Deadlines()
    entry = book.entry("a")
    entry.keep_alive, entry.heard_at = 2.0, 0.0
    waiting.add(1.0, entry)
    waiting.run(1.0)
    assert waiting.first() == 2.0
    entry.heard_at = 3.0
    waiting.run(2.5)
    assert waiting.first() == 5.0
    waiting.run(4.9)
    assert book.names == []
    waiting.run(5.0)
    assert book.names == ["a"]
    assert len(waiting) == 0


def test_one_that_nobody_needs_any_more_is_not_called(book: Book) -> None:
    waiting = Deadlines()
    entry = book.entry("a")
    waiting.add(1.0, entry)
    entry.closing = True
    waiting.run(2.0)
    assert book.names == [] and len(waiting) == 0


def test_what_nobody_needs_is_swept_out_long_before_its_time(book: Book) -> None:
    waiting = Deadlines()
    lapsed = book.entry("lapsed")
    lapsed.closing = True
    for nth in range(1500):
        waiting.add(1e6 + nth, book.entry(f"needed {nth}"))
    for nth in range(100_000):
        waiting.add(2e6 + nth, lapsed)
        assert len(waiting) <= 4096
    waiting.run(1e6 + 1500)
    assert book.names == [f"needed {nth}" for nth in range(1500)]


class Timers:
    """The loop's side: at most one timer may be running at a time."""

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


def test_the_timer_is_set_for_the_first_and_again_for_the_next(
    scheduler: Scheduler, timers: Timers, book: Book
) -> None:
    scheduler.wake_at(110.0, book.entry("b"))
    assert [timer.when for timer in timers.running] == [110.0]
    scheduler.wake_at(105.0, book.entry("a"))
    assert [timer.when for timer in timers.running] == [105.0]
    scheduler.wake_at(120.0, book.entry("c"))
    assert [timer.when for timer in timers.running] == [105.0]
    timers.advance(6)
    assert book.names == ["a"]
    assert [timer.when for timer in timers.running] == [110.0]
    timers.advance(100)
    assert book.names == ["a", "b", "c"]
    assert timers.running == []


def test_what_is_overdue_is_called_at_the_next_turn(scheduler: Scheduler, timers: Timers, book: Book) -> None:
    scheduler.wake_at(50.0, book.entry("late"))
    timers.advance(0)
    assert book.names == ["late"]


def test_a_deadline_may_add_another_while_it_is_called(
    scheduler: Scheduler, timers: Timers, book: Book
) -> None:
    parent = book.entry("parent", lambda: scheduler.wake_at(102.0, book.entry("child")))
    scheduler.wake_at(101.0, parent)
    timers.advance(1.5)
    assert book.names == ["parent"]
    timers.advance(1)
    assert book.names == ["parent", "child"]


def test_a_deadline_that_fails_does_not_stop_the_others(
    scheduler: Scheduler, timers: Timers, book: Book
) -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    scheduler.wake_at(101.0, book.entry("broken", fail))
    scheduler.wake_at(102.0, book.entry("whole"))
    with pytest.raises(RuntimeError, match="broken"):
        timers.advance(1)
    timers.advance(5)
    assert book.names == ["broken", "whole"]


def test_a_closed_scheduler_calls_nobody(scheduler: Scheduler, timers: Timers, book: Book) -> None:
    scheduler.wake_at(101.0, book.entry("a"))
    scheduler.close()
    timers.advance(10)
    assert book.names == []
    assert len(scheduler) == 1
