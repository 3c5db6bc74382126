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

BUSY_CPU_SHARE: Final = 0.4  # of a core; others may want it too, so a loop without a pause does not always get a whole one
READ_TO_WRITE_RATIO: Final = 1.25  # what readers get of what is written
MIN_READ_RATE_PER_CORE: Final = (
    32 << 20
)  # bytes per second for each core of the machine, however little is written
SAMPLE_SECONDS: Final = 0.1


class BrokerLoad:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_time: Callable[[], float] = time.thread_time,
        cores: int = 0,
    ) -> None:
        self._clock = clock
        self._cpu_time = cpu_time
        self._min_rate = float(MIN_READ_RATE_PER_CORE * (cores or len(os.sched_getaffinity(0))))
        self._written_bytes = 0
        self._max_rate = math.inf
        self._last_sample = (
            -math.inf,
            0.0,
            0,
        )  # the last look: time, what the loop had used, what was written

    def record_write(self, size: int) -> None:
        """A frame of so many bytes is kept."""
        self._written_bytes += size

    def max_read_rate(self) -> float:
        """Bytes per second that all who read in bulk may have; without end while the broker has time to spare."""
        last_time, last_used, last_written = self._last_sample
        now = self._clock()
        passed = now - last_time
        if passed >= SAMPLE_SECONDS:
            used = self._cpu_time()
            self._last_sample = (now, used, self._written_bytes)
            is_busy = passed < math.inf and used - last_used > BUSY_CPU_SHARE * passed
            rate = (self._written_bytes - last_written) / passed
            self._max_rate = (
                max(self._min_rate, READ_TO_WRITE_RATIO * rate) if is_busy else math.inf
            )
        return self._max_rate
