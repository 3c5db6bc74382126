"""How fast readers are told where messages are: together no faster than the broker says, and in turn."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

LONGEST_SECONDS: Final = 2.0  # that one waits at a time: by then the broker may have become idle


class Pace:
    """For all readers of a door. What one of them takes, those behind it wait for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_at = -math.inf

    def delay(self, size: int, rate: float) -> float:
        """Take so many bytes of what may be read per second; how long to wait before they are used."""
        now = self._clock()
        if rate == math.inf:
            self._free_at = now
            return 0.0
        begins = max(now, self._free_at)
        self._free_at = begins + size / rate
        return min(begins - now, LONGEST_SECONDS)

    async def wait(self, size: int, rate: float) -> None:
        delay = self.delay(size, rate)
        if delay > 0.0:
            await asyncio.sleep(delay)
