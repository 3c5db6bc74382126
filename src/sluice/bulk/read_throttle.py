"""Limit how fast bulk readers get places: at most the rate that the broker allows, in turn.

A reader reserves no bytes before its turn. So no reader waits for the share of readers that have
left, and a changed rate applies to all waiting readers at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

# How long the first in turn waits at a time; the rate may change meanwhile.
STEP_SECONDS: Final = 0.25


class ReadThrottle:
    """Throttle for all readers of the HTTP API, on its loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._bytes_per_second = math.inf
        self._free_at = -math.inf  # when the bytes taken last have been sent at the current rate
        self._lock = asyncio.Lock()  # first come, first served

    async def wait(self, size: int, bytes_per_second: float) -> None:
        """Wait for this caller's turn, then take `size` bytes of the allowed rate."""
        now = self._clock()
        if now < self._free_at:
            self._free_at = now + (self._free_at - now) * self._bytes_per_second / bytes_per_second
        self._bytes_per_second = bytes_per_second
        if bytes_per_second == math.inf:
            return
        async with self._lock:
            begins = now = self._clock()
            while now < self._free_at:
                begins = self._free_at
                await self._sleep(min(begins - now, STEP_SECONDS))
                now = self._clock()
            if self._bytes_per_second < math.inf:
                # Counted from when it could begin; the wake-up is always a little later.
                self._free_at = min(begins, now) + size / self._bytes_per_second
