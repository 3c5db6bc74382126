"""How hard the broker works, and what that leaves for those who read in bulk.

Reading gives way to messages by its low priority, and still costs them: what it copies goes through the same memory and
the same caches, so that each message takes the broker longer. Only reading less helps. So while the broker is busy,
all readers together get a little more than is published meanwhile: whoever reads keeps up with any rate, and gains on
it. Where little is published they get what costs hardly anybody anything. Asked on the broker's loop, by whoever hands
out places; time is handed in.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Final

BUSY: Final = (
    0.4  # of a core; others may want it too, so a loop without a pause does not always get a whole one
)
TIMES: Final = 1.25  # what readers get of what is written
LEAST: Final = 32 << 20  # bytes per second for each core of the machine, however little is written
LOOK_SECONDS: Final = 0.1


class Strain:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        cores: int = 0,
    ) -> None:
        self._clock = clock
        self._used = used
        self._least = float(LEAST * (cores or len(os.sched_getaffinity(0))))
        self._written = 0
        self._pace = math.inf
        self._then = (-math.inf, 0.0, 0)  # the last look: time, what the loop had used, what was written

    def wrote(self, size: int) -> None:
        """A frame of so many bytes is kept."""
        self._written += size

    def pace(self) -> float:
        """Bytes per second that all who read in bulk may have; without end while the broker has time to spare."""
        then, used_then, written_then = self._then
        now = self._clock()
        passed = now - then
        if passed >= LOOK_SECONDS:
            used = self._used()
            self._then = (now, used, self._written)
            is_busy = passed < math.inf and used - used_then > BUSY * passed
            rate = (self._written - written_then) / passed
            self._pace = max(self._least, TIMES * rate) if is_busy else math.inf
        return self._pace
