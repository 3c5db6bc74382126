"""Lost ranges: messages that a bulk reader will never see because others settled them.

A bulk reader keeps its own position and reports its progress to the group (`acknowledged_to`).
Unsettled messages after it are stored for the group, unless they are purged, expired or displaced,
or settled by others: a seek, MQTT consumers, another reader of the same group. Such messages cannot
be read, and a gap is no sign of them: messages for other groups only, and those from before the
group, leave gaps too. So lost ranges are recorded here, until the reader reports a later position.
Tracking starts with the first report of a reader; other groups have no lost ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

from mypy_extensions import i64

from sluice.queues.log import NoteReader, NoteWriter

# Distinct ranges; beyond that, neighbors are merged, and missing messages between them count as
# lost.
MAX_RANGES: Final = 1024


class LostRanges:
    """Lost ranges of one group in one partition, in order, none of them below `acknowledged_to`."""

    def __init__(self, acknowledged_to: i64) -> None:
        self.acknowledged_to: i64 = acknowledged_to
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: i64, end: i64) -> None:
        """Add a range that others have settled."""
        start = max(start, self.acknowledged_to)
        if start >= end:
            return
        # The first range that touches it, and the first range after it.
        first = bisect_left(self._ends, int(start))
        after = bisect_right(self._starts, int(end))
        if first == after and len(self._starts) >= MAX_RANGES:
            if first > 0:
                first -= 1
            else:
                after += 1
        if first < after:
            start = min(start, i64(self._starts[first]))
            end = max(end, i64(self._ends[after - 1]))
        del self._starts[first:after]
        del self._ends[first:after]
        self._starts.insert(first, int(start))
        self._ends.insert(first, int(end))

    def acknowledge(self, end: i64) -> None:
        """Record that the reader is done with everything below `end`; never moves back."""
        if end <= self.acknowledged_to:
            return
        self.acknowledged_to = end
        passed = bisect_right(self._ends, int(end))
        del self._starts[:passed]
        del self._ends[:passed]
        if self._starts and self._starts[0] < end:
            self._starts[0] = int(end)

    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))

    def write(self, out: NoteWriter) -> None:
        out.write_int(self.acknowledged_to)
        out.write_int(len(self._starts))
        for start, end in self.ranges():
            out.write_int(start)
            out.write_int(end)


def read_lost_ranges(note: NoteReader) -> LostRanges:
    lost_ranges = LostRanges(note.read_int())
    for _ in range(note.read_int()):
        start = note.read_int()
        lost_ranges.add(start, note.read_int())
    return lost_ranges
