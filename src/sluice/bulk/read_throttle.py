"""How fast readers are told where messages are: together no faster than the broker says, and in turn.

Nothing is taken before its turn has come: so nobody waits for what others wanted who have gone, and a rate that has
changed meanwhile counts for all who stand in line, whoever was told of it last.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

STEP_SECONDS: Final = (
    0.25  # that the first in line waits at a time: by then the rate may be another
)


class ReadThrottle:
    """For all readers of a door, on its loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._bytes_per_second = math.inf
        self._free_at = -math.inf  # when the bytes that were taken last are through
        self._lock = asyncio.Lock()  # first come, first served

    async def wait(self, size: int, bytes_per_second: float) -> None:
        """Take so many bytes of the `rate` that may be read per second, as soon as it is one's turn."""
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
                # Counted from when it could begin, not from when one was woken, which is always a little later.
                self._free_at = min(begins, now) + size / self._bytes_per_second
