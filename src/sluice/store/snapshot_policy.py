"""When a store wants the next snapshot: after so much log that the last one was worth its price.

A start reads the log from the last snapshot on, and a segment is given back with a snapshot only. So one is wanted as
soon as a segment is full. But a snapshot of millions of last values takes a tenth of a second and tens of megabytes.
For each segment that would be a good part of all that the broker does, so a large one is wanted after a multiple of its
own size: what a start has to read grows with what there is to bring back, and writing snapshots is never more than a
fixed share of writing the log. (That a segment is empty is reason enough for one at any time: see `Runner`.)
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

SMALL: Final = 1 << 20  # bytes of a snapshot that is no matter
WORTH: Final = 16  # bytes of log for each byte of a snapshot beyond that


class Pace:
    def __init__(self, most: int) -> None:
        self._most: i64 = most  # bytes of log after which even without a full segment a snapshot is wanted
        self.written: i64 = 0  # bytes of log since the last snapshot was begun
        self.sealed: bool = False  # a segment was filled since then
        self._size: i64 = 0  # of the last snapshot
        self._under_way: i64 = 0

    def loaded(self, size: int) -> None:
        """The store was opened, and had a snapshot."""
        self._size = size

    def begin(self) -> None:
        """A snapshot is begun, of the log so far."""
        self.written = 0
        self.sealed = False
        self._under_way += 1

    def given(self, state: list[bytes]) -> None:
        """What it says is known now."""
        size: i64 = 0
        for piece in state:
            size += len(piece)
        self._size = size

    def done(self) -> None:
        self._under_way -= 1

    def wants(self) -> bool:
        if self._under_way or self.written < WORTH * (self._size - SMALL):
            return False
        return self.sealed or self.written >= self._most
