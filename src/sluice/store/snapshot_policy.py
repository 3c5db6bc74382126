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

SMALL_SNAPSHOT_BYTES: Final = 1 << 20  # bytes of a snapshot that is no matter
LOG_BYTES_PER_SNAPSHOT_BYTE: Final = 16  # bytes of log for each byte of a snapshot beyond that


class SnapshotPolicy:
    def __init__(self, max_log_bytes: int) -> None:
        self._max_log_bytes: i64 = max_log_bytes  # bytes of log after which even without a full segment a snapshot is wanted
        self.log_bytes: i64 = 0  # bytes of log since the last snapshot was begun
        self.has_sealed_segment: bool = False  # a segment was filled since then
        self._snapshot_bytes: i64 = 0  # of the last snapshot
        self._running_count: i64 = 0

    def record_loaded_snapshot(self, snapshot_bytes: int) -> None:
        """The store was opened, and had a snapshot."""
        self._snapshot_bytes = snapshot_bytes

    def begin_snapshot(self) -> None:
        """A snapshot is begun, of the log so far."""
        self.log_bytes = 0
        self.has_sealed_segment = False
        self._running_count += 1

    def record_snapshot_size(self, state: list[bytes]) -> None:
        """What it says is known now."""
        size: i64 = 0
        for piece in state:
            size += len(piece)
        self._snapshot_bytes = size

    def finish_snapshot(self) -> None:
        self._running_count -= 1

    def is_due(self) -> bool:
        if self._running_count or self.log_bytes < LOG_BYTES_PER_SNAPSHOT_BYTE * (
            self._snapshot_bytes - SMALL_SNAPSHOT_BYTES
        ):
            return False
        return self.has_sealed_segment or self.log_bytes >= self._max_log_bytes
