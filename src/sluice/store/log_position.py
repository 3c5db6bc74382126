"""Where the next frame of a log goes: its address, the open segment and the size of each segment.

All stores number their segments and addresses in this way. A frame never spans two segments: a
segment that has reached its size is full, and the next frame begins another.
"""

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import i64

from sluice.store.snapshot_policy import SnapshotPolicy


class LogPosition:
    """`frame_gap` bytes precede the records of each frame: no two frames are adjacent."""

    def __init__(
        self, frame_gap: int, segment_bytes: int, max_segment_bytes: int, policy: SnapshotPolicy
    ) -> None:
        self.segment: i64 = 1  # the open segment
        self.offset: i64 = 0  # its size, where the next frame begins
        self.segment_sizes: dict[int, int] = {}
        self._frame_gap: i64 = frame_gap
        self._segment_bytes: i64 = segment_bytes  # size from which on a segment is full
        self._max_segment_bytes: i64 = max_segment_bytes  # size that the format can express
        self._policy: SnapshotPolicy = policy

    def resume(self, segment: int, segment_sizes: dict[int, int]) -> None:
        """Continue a recovered log in its last segment."""
        self.segment = segment
        self.offset = segment_sizes.setdefault(segment, 0)
        self.segment_sizes = segment_sizes

    def next_address(self) -> int:
        """Return the address of the first record of the next frame."""
        return int(self.segment << 32 | (self.offset + self._frame_gap))

    def append(self, frame_bytes: i64) -> bool:
        """Advance by a frame; return whether it has filled its segment."""
        size: i64 = self._frame_gap + frame_bytes
        if self.offset + size > self._max_segment_bytes:
            raise ValueError(f"a frame of {frame_bytes} bytes does not fit into a segment")
        self.offset += size
        self._policy.log_bytes += size
        self.segment_sizes[int(self.segment)] = int(self.offset)
        return self.roll_if_full()

    def roll_if_full(self) -> bool:
        if self.offset < self._segment_bytes:
            return False
        self.roll()
        return True

    def roll(self) -> None:
        """Begin the next segment."""
        self.segment += 1
        self.offset = 0
        self.segment_sizes[int(self.segment)] = 0
        self._policy.has_sealed_segment = True

    def delete_segments(self, freed_segments: Sequence[int]) -> list[int]:
        """Delete segments, but never the open one; return those that were deleted."""
        deleted = [
            segment
            for segment in freed_segments
            if segment in self.segment_sizes and segment != self.segment
        ]
        for segment in deleted:
            del self.segment_sizes[segment]
        return deleted
