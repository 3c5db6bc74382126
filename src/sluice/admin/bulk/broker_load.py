"""How busy the broker is, and the read rate that this leaves for bulk readers.

Bulk reading has low priority and still slows messages down: its copies use the same memory and
caches, so that each message takes the broker longer. Only reading less helps. While the broker is
busy, all readers together get a little more than is published meanwhile: a reader keeps up with any
publish rate and gains on it. If little is published, they get a minimum that costs hardly anything.
Called on the broker's loop when places are handed out; the time is a parameter.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Final

# Share of a core. Other processes want the core too, so a busy loop does not always get all of it.
BUSY_CPU_SHARE: Final = 0.4
READ_TO_WRITE_RATIO: Final = 1.25  # bytes that readers get per byte written
# Bytes per second for each core of the machine, however little is written.
MIN_READ_RATE_PER_CORE: Final = 32 << 20
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
        # The last sample: time, CPU seconds of the loop, bytes written.
        self._last_sample = (
            -math.inf,
            0.0,
            0,
        )

    def record_write(self, size: int) -> None:
        """Count a committed frame."""
        self._written_bytes += size

    def max_read_rate(self) -> float:
        """Return the bytes per second for all bulk readers; infinite while the broker has time."""
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
