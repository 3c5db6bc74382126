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

from sluice.queues.log.frame_builder import TOLD, Note, NoteWriter

if TYPE_CHECKING:
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.engine import Engine

MOST_RANGES: Final = 1024  # that are told apart; of more, what lies between two counts as lost if it is gone


class Losses:
    """Of one group on one partition, as ranges of sequences in order, none of them below `told`."""

    def __init__(self, told: i64) -> None:
        self.told: i64 = told
        self._starts: list[int] = []
        self._ends: list[int] = []

    def lose(self, start: i64, end: i64) -> None:
        """Others have settled these."""
        start = max(start, self.told)
        if start >= end:
            return
        first = bisect_left(self._ends, int(start))  # the first that touches it, and the first behind it
        behind = bisect_right(self._starts, int(end))
        if first == behind and len(self._starts) >= MOST_RANGES:
            if first > 0:
                first -= 1
            else:
                behind += 1
        if first < behind:
            start = min(start, i64(self._starts[first]))
            end = max(end, i64(self._ends[behind - 1]))
        del self._starts[first:behind]
        del self._ends[first:behind]
        self._starts.insert(first, int(start))
        self._ends.insert(first, int(end))

    def tell(self, end: i64) -> None:
        """The reader is done with everything below; never backwards."""
        if end <= self.told:
            return
        self.told = end
        gone = bisect_right(self._ends, int(end))
        del self._starts[:gone]
        del self._ends[:gone]
        if self._starts and self._starts[0] < end:
            self._starts[0] = int(end)

    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))

    def write(self, out: NoteWriter) -> None:
        out.number(self.told)
        out.number(len(self._starts))
        for start, end in self.ranges():
            out.number(start)
            out.number(end)


def read_losses(note: Note) -> Losses:
    losses = Losses(note.number())
    for _ in range(note.number()):
        start = note.number()
        losses.lose(start, note.number())
    return losses


def first_lost(cursor: Cursor, start: i64, end: i64) -> i64:
    """The first message from `start` on, before `end`, that the group should have had and nobody can read any more; -1
    for none. What is below `told` another reader was done with, or this one in a life that it does not remember."""
    losses = cursor.losses
    if losses is None:
        return -1
    partition = cursor.partition
    if start < losses.told and not partition.queue.rules.compacted:
        seq = partition.first_gone(start, min(losses.told, end))
        if seq >= 0:
            return seq
    for first, behind in losses.ranges():
        if first >= end:
            break
        seq = partition.first_gone(max(i64(first), start), min(i64(behind), end))
        if seq >= 0:
            return seq
    return -1


def tell(engine: Engine, cursor: Cursor, end: i64) -> None:
    """A reader is done with everything below `end`. With the first word of one nothing is lost yet: where the floor is
    behind that, nobody knows what has gone by whom, and what was never for the group."""
    losses = cursor.losses
    if losses is None:
        begin_anew(engine, cursor, end)
    elif losses.told < end:
        _note(engine, cursor, end, -1)
        losses.tell(end)


def begin_anew(engine: Engine, cursor: Cursor, start: i64) -> None:
    """A reader begins here, with what there is."""
    engine.journal.flush(int(engine.now * 1000.0))  # what was settled before it is no loss
    _note(engine, cursor, start, start)
    cursor.losses = Losses(start)


def load_told(note: Note, cursor: Cursor) -> None:
    """A note of an earlier life."""
    told = note.number()
    lost_to = note.number()  # behind `told` in stores of before: it took what it did not know for lost
    if lost_to < 0 and cursor.losses is not None:
        cursor.losses.tell(told)
    else:
        cursor.losses = Losses(told)
        cursor.losses.lose(told, lost_to)


def _note(engine: Engine, cursor: Cursor, told: i64, lost_to: i64) -> None:
    note = NoteWriter(TOLD)
    note.number(cursor.group.gid)
    note.number(cursor.partition.pid)
    note.number(told)
    note.number(lost_to)
    engine.note(note, False)
