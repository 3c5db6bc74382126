"""A snapshot while it is written: how things stood when it was begun, in parts, while the broker works.

Queues, groups and what is settled are few things that change all the time: they are written at once. Last values are
many that hardly change, and are written before they change: owners of exclusive queues (`Owners.save`), and of shared
queues the parts of what is known of their keys (`latest`) and the blocks of their partitions (`Outline`), of which a
copy is made, which is quicker than writing them down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mypy_extensions import i64

from sluice.queues.model.message_columns import BLOCK, GONE, Outline
from sluice.queues.model.cursor import SEQUENCE_BITS, SEQUENCE_MASK
from sluice.queues.engine import Engine
from sluice.queues.log.frame_builder import NoteWriter
from sluice.queues.compacted.last_values import Latest
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.log.snapshot import write_state

PIECE_BYTES: Final = 1_048_576


class Shared:
    """The last values of a shared queue: which they are, and which messages are there at all."""

    def __init__(self, queue: Queue) -> None:
        self.qid: i64 = queue.qid
        self.latest: Latest = queue.latest
        self.keys: int = len(queue.latest)
        self.partitions: list[tuple[int, int]] = []  # pid, and the sequence of the next message
        self.outlines: list[list[Outline]] = []
        self.latest.begin()
        for partition in queue.partitions:
            self.partitions.append((int(partition.pid), int(partition.next)))
            self.outlines.append(outlines_of(partition))


def outlines_of(partition: Partition) -> list[Outline]:
    return [Outline(block) for block in partition.all_blocks() if block.live]


class Saving:
    """`save_some` until it says that this is all; then `pieces`. About `some` values are written each time, and what is
    written is cut off when it is a piece: to put all of it together would take longer than any of its parts."""

    def __init__(self, engine: Engine, some: int) -> None:
        self._some: int = some
        self._engine: Engine = engine
        self._state: NoteWriter = write_state(engine)
        self._owners: NoteWriter = NoteWriter(0)
        self._owners.cut()  # it begins behind what stands in the state
        self._state_pieces: list[bytes] = []
        self._owner_pieces: list[bytes] = []
        shared = [Shared(queue) for queue in engine.queues.values() if queue.rules.compacted]
        self._parts: Iterator[None] | None = write_shared(self._state, shared, some)
        engine.exclusive.begin_snapshot(self._owners)

    def save_some(self) -> bool:
        """Write some more; whether that is all."""
        if self._state.size() >= PIECE_BYTES:
            self._state_pieces.append(self._state.cut())
        if self._owners.size() >= PIECE_BYTES:
            self._owner_pieces.append(self._owners.cut())
        if self._parts is not None:
            for _ in self._parts:
                return False
            self._parts = None
        return self._engine.exclusive.save_some(self._some)

    def pieces(self) -> list[bytes]:
        return [*self._state_pieces, self._state.cut(), *self._owner_pieces, self._owners.cut()]


def write_shared(out: NoteWriter, shared: list[Shared], some: int) -> Iterator[None]:
    """Which message is the last of its key: the keys themselves are in the bodies, which a start does not read. And
    which messages are gone, as gaps. Comes back each time that enough is written."""
    out.number(len(shared))
    left = some
    for queue in shared:
        out.number(queue.qid)
        out.number(queue.keys)
        part = queue.latest.next_part()
        while part is not None:
            for mark, place in part.items():
                out.number(mark)
                out.number(place >> SEQUENCE_BITS)
                out.number(place & SEQUENCE_MASK)
                left -= 1
                if left <= 0:
                    left = some
                    yield
            part = queue.latest.next_part()
        out.number(len(queue.partitions))
        for nth, (pid, end) in enumerate(queue.partitions):
            gaps = NoteWriter(0)
            reached: i64 = 0
            for outline in queue.outlines[nth]:
                reached = write_gaps(gaps, outline, reached)
                left -= BLOCK
                if left <= 0:
                    left = some
                    yield
            if reached < end:
                gaps.number(reached)
                gaps.number(end - reached)
            out.number(pid)
            out.data(gaps.value())


def write_gaps(out: NoteWriter, outline: Outline, reached: i64) -> i64:
    """What is gone between `reached` and the last that lives in a block; how far that is."""
    address = outline.take()
    at: i64 = 0
    while at < len(address):
        if address[at] != GONE:
            seq = outline.base + at if outline.base >= 0 else outline.seqs[at]
            if seq > reached:
                out.number(reached)
                out.number(seq - reached)
            reached = seq + 1
        at += 1
    return reached
