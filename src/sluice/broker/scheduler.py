"""The one timer of the broker: session expiry, delayed wills, keep-alives, CONNECT timeouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sluice.broker.turn import Turn
from sluice.clock import Deadline, DeadlineHeap


class PeriodicTask(Deadline):
    """Call a function periodically for as long as the broker runs."""

    def __init__(self, seconds: float, callback: Callable[[], None]) -> None:
        self._seconds = seconds
        self._callback = callback

    def fire(self, now: float) -> float:
        self._callback()
        return now + self._seconds


class Scheduler:
    """Run deadlines on the event loop.

    `call_later(seconds, callback)` is the loop's function; it returns a handle that can be
    canceled.
    """

    def __init__(self, turn: Turn, call_later: Callable[[float, Callable[[], None]], Any]) -> None:
        self._turn = turn
        self._call_later = call_later
        self._deadlines = DeadlineHeap()
        self._timer: Any = None

    def __len__(self) -> int:
        return len(self._deadlines)

    def wake_at(self, when: float, deadline: Deadline) -> None:
        if self._deadlines.add(when, deadline):
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        first = self._deadlines.next_due_at()
        self._timer = (
            self._call_later(max(0.0, first - self._turn.now), self._run) if first else None
        )

    def _run(self) -> None:
        self._timer = None
        try:
            self._deadlines.run_due(self._turn.begin())
        finally:
            self._arm()  # if one deadline raises, the others still run

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
