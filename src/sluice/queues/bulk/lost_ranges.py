"""What a group has lost that is read in bulk: messages that somebody else has settled for it before it was told to.

Whoever reads in bulk keeps its own place, and tells the group how far it is (`told`). What the group waits for behind
that is kept for it, unless it is purged, expires, is pushed out, or is settled by others: a seek, consumers over MQTT,
another reader in the same group. None of that leaves anything to read, and a gap is no sign of it: messages for other
groups alone, and those from before the group, leave gaps as well. So it is remembered here, until the group is told of
a place behind it. It begins with the first word of a reader; other groups have none of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.queues.log.frame_builder import BULK_PROGRESS, NoteReader, NoteWriter

if TYPE_CHECKING:
    from sluice.queues.engine import Engine
    from sluice.queues.model.cursor import Cursor

MAX_RANGES: Final = (
    1024  # that are told apart; of more, what lies between two counts as lost if it is gone
)


class LostRanges:
    """Of one group on one partition, as ranges of sequences in order, none of them below `told`."""

    def __init__(self, acknowledged_to: i64) -> None:
        self.acknowledged_to: i64 = acknowledged_to
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: i64, end: i64) -> None:
        """Others have settled these."""
        start = max(start, self.acknowledged_to)
        if start >= end:
            return
        first = bisect_left(
            self._ends, int(start)
        )  # the first that touches it, and the first behind it
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
        """The reader is done with everything below; never backwards."""
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


def first_lost(cursor: Cursor, start: i64, end: i64) -> i64:
    """The first message from `start` on, before `end`, that the group should have had and nobody can read any more; -1
    for none. What is below `told` another reader was done with, or this one in a life that it does not remember."""
    lost_ranges = cursor.lost_ranges
    if lost_ranges is None:
        return -1
    partition = cursor.partition
    if start < lost_ranges.acknowledged_to and not partition.queue.rules.is_compacted:
        seq = partition.first_missing(start, min(lost_ranges.acknowledged_to, end))
        if seq >= 0:
            return seq
    for first, after in lost_ranges.ranges():
        if first >= end:
            break
        seq = partition.first_missing(max(i64(first), start), min(i64(after), end))
        if seq >= 0:
            return seq
    return -1


def acknowledge(engine: Engine, cursor: Cursor, end: i64) -> None:
    """A reader is done with everything below `end`. With the first word of one nothing is lost yet: where the floor is
    behind that, nobody knows what has gone by whom, and what was never for the group."""
    lost_ranges = cursor.lost_ranges
    if lost_ranges is None:
        start_tracking(engine, cursor, end)
    elif lost_ranges.acknowledged_to < end:
        _write_note(engine, cursor, end, -1)
        lost_ranges.acknowledge(end)


def start_tracking(engine: Engine, cursor: Cursor, start: i64) -> None:
    """A reader begins here, with what there is."""
    engine.frame_builder.flush(int(engine.now * 1000.0))  # what was settled before it is no loss
    _write_note(engine, cursor, start, start)
    cursor.lost_ranges = LostRanges(start)


def load_acknowledged(note: NoteReader, cursor: Cursor) -> None:
    """A note of an earlier life."""
    acknowledged_to = note.read_int()
    lost_to = (
        note.read_int()
    )  # behind `told` in stores of before: it took what it did not know for lost
    if lost_to < 0 and cursor.lost_ranges is not None:
        cursor.lost_ranges.acknowledge(acknowledged_to)
    else:
        cursor.lost_ranges = LostRanges(acknowledged_to)
        cursor.lost_ranges.add(acknowledged_to, lost_to)


def _write_note(engine: Engine, cursor: Cursor, acknowledged_to: i64, lost_to: i64) -> None:
    note = NoteWriter(BULK_PROGRESS)
    note.write_int(cursor.group.gid)
    note.write_int(cursor.partition.pid)
    note.write_int(acknowledged_to)
    note.write_int(lost_to)
    engine.add_note(note, False)
