"""Decides which frames the loop writes itself instead of handing them to the writer thread.

A hand-over wakes two threads, which then compete for the GIL: 100 to 200 us of CPU for each frame,
about as long as a fast disk takes to sync it. So while syncs are fast, the loop writes a frame,
does other work while the disk begins, and waits for the rest. Slow syncs would delay every
connection: the first one ends direct writes for a multiple of its duration, so slow syncs cost the
loop at most a twentieth of its time. Then syncs in the writer thread must prove that the disk is
fast again. On a slow disk they never do.

This module measures nothing itself and knows no file.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

MAX_DIRECT_BYTES: Final = 512 << 10  # larger frames take the loop too long, even on a fast disk
FAST_SECONDS: Final = 0.0005  # on average, a sync up to this costs little more than a hand-over
SLOW_SECONDS: Final = 0.002  # a single one ends direct writes
SECONDS_PER_BYTE: Final = 1.0e-9  # for the copy of a frame: larger frames are not slower syncs
SAMPLES_NEEDED: Final = 8  # syncs in the thread, the best of which proves that the disk is fast
PAUSE_FACTOR: Final = 20.0  # of the duration of a slow sync


class DirectWrites:
    """What recent syncs tell about the disk.

    The thread that wrote a frame records its sync: the loop's or the writer thread, never both at
    once.
    """

    def __init__(
        self, fast_seconds: float = FAST_SECONDS, slow_seconds: float = SLOW_SECONDS
    ) -> None:
        self._fast_seconds = fast_seconds
        self._slow_seconds = slow_seconds
        self._is_fast = False
        self._average_seconds = 0.0
        self._sample_count: i64 = 0
        self._best_seconds = 0.0
        self._paused_until = 0.0

    def allows(self, size: i64) -> bool:
        """Return whether the loop may write a frame of `size` bytes."""
        return self._is_fast and size <= MAX_DIRECT_BYTES

    def record_direct(self, size: i64, seconds: float, now: float) -> None:
        """Record the time that the loop took to write and sync a frame."""
        adjusted = seconds - float(size) * SECONDS_PER_BYTE
        self._average_seconds += (adjusted - self._average_seconds) / 8.0
        if adjusted > self._slow_seconds or self._average_seconds > self._fast_seconds:
            self._is_fast = False
            self._paused_until = now + seconds * PAUSE_FACTOR

    def record_in_thread(self, size: i64, seconds: float, now: float) -> None:
        """Record a sync of the writer thread.

        It includes a wait for the GIL, so the best of several counts.
        """
        if self._is_fast or now < self._paused_until:
            return
        adjusted = seconds - float(size) * SECONDS_PER_BYTE
        if self._sample_count == 0 or adjusted < self._best_seconds:
            self._best_seconds = adjusted
        self._sample_count += 1
        if self._sample_count == SAMPLES_NEEDED:
            self._sample_count = 0
            self._average_seconds = self._best_seconds
            self._is_fast = self._best_seconds <= self._fast_seconds
