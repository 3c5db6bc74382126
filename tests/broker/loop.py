"""The event loop calls that a broker makes, on a clock that tests advance."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

MIDDAY = 1_800_000_000.0  # when every test begins


class Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """The event loop calls that the broker makes, and a clock."""

    def __init__(self) -> None:
        self.now = MIDDAY
        self.tick = 0.0  # what a read of the clock costs: time passes while the broker works
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0

    def clock(self) -> float:
        self.now += self.tick
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        assert seconds >= 0
        timer = Timer(callback)
        self._count += 1
        heapq.heappush(self._timers, (self.now + seconds, self._count, timer))
        return timer

    def step(self) -> None:
        """Run one callback that is due."""
        self._soon.popleft()()

    def settle(self) -> None:
        """Run all callbacks that are due."""
        while self._soon:
            self._soon.popleft()()

    def advance(self, seconds: float) -> None:
        self.settle()
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            if not timer.cancelled:
                timer.callback()
            self.settle()
        self.now = end
