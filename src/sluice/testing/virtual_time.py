"""Virtual time that moves on request, and callbacks that run on the loop of the test."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

START_TIME: Final = 1_800_000_000.0  # time at which every test begins: 15 January 2027, 08:00 UTC


class Timer:
    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self._callback = None

    @property
    def is_set(self) -> bool:
        return self._callback is not None

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class VirtualTime:
    """The part of an event loop that the broker uses.

    `call_soon` runs on the running loop, `call_later` when virtual time has moved. `activity`
    counts calls: while it grows, the broker is active.
    """

    def __init__(self, now: float = START_TIME) -> None:
        self.now = now
        self.activity = 0
        self._ready: deque[Callable[[], Any]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        self._ready.append(partial(callback, *arguments) if arguments else callback)
        if len(self._ready) == 1:
            try:
                asyncio.get_running_loop().call_soon(self.run_ready)
            except RuntimeError:
                pass  # no loop is running yet: the builder of the broker calls `run_ready` itself

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        self._count += 1
        heapq.heappush(self._timers, (self.now + max(0.0, seconds), self._count, timer))
        return timer

    def run_ready(self) -> None:
        """Run all callbacks that are ready."""
        while self._ready:
            # Removed afterwards: while the list is not empty, added callbacks need no other call.
            callback = self._ready[0]
            self.activity += 1
            try:
                callback()
            finally:
                self._ready.popleft()

    def next_due(self) -> float | None:
        while self._timers and not self._timers[0][2].is_set:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def fire_next(self) -> None:
        """Advance to the first timer and fire it."""
        due, _, timer = heapq.heappop(self._timers)
        self.now = max(self.now, due)
        self.activity += 1
        timer.fire()
