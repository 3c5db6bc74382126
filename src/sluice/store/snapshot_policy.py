"""Decides when a store needs the next snapshot: when enough log was written to justify its cost.

A start reads the log from the last snapshot on, and segments are deleted only together with a
snapshot. So a snapshot is due as soon as a segment is full. But a snapshot of millions of last
values takes a tenth of a second and tens of megabytes; writing it for each segment would be a large
part of the broker's work. So a large snapshot is due after a multiple of its own size. The log that
a start reads then grows with the amount of state, and snapshots never take more than a fixed share
of all writes. (A segment without live records is a reason for a snapshot at any time: see
`queues/commit_loop/housekeeping.py`.)
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

SMALL_SNAPSHOT_BYTES: Final = 1 << 20  # the cost of a snapshot up to this size is ignored
LOG_BYTES_PER_SNAPSHOT_BYTE: Final = 16  # bytes of log for each byte of a snapshot beyond that


class SnapshotPolicy:
    def __init__(self, max_log_bytes: int) -> None:
        # A snapshot is due after this many bytes of log even without a full segment.
        self._max_log_bytes: i64 = max_log_bytes
        self.log_bytes: i64 = 0  # bytes of log since the last snapshot began
        self.has_sealed_segment: bool = False  # whether a segment was filled since then
        self._snapshot_bytes: i64 = 0  # size of the last snapshot
        self._running_count: i64 = 0

    def record_loaded_snapshot(self, snapshot_bytes: int) -> None:
        """Record the size of the snapshot that the store loaded when it was opened."""
        self._snapshot_bytes = snapshot_bytes

    def begin_snapshot(self) -> None:
        """Record that a snapshot of the log so far begins."""
        self.log_bytes = 0
        self.has_sealed_segment = False
        self._running_count += 1

    def record_snapshot_size(self, state: list[bytes]) -> None:
        """Record the size of the state in the snapshot."""
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
