"""What bulk readers and writers ask of the queues: where messages are, progress by sequences, batches that count once.

A batch of messages comes from an application that numbers its batches. Its messages and a note of its number go into
one frame, so a crash leaves all of it or nothing, and a batch that is sent again is known and not stored again. What is
remembered of an application is the number of its last batch; applications that have sent nothing for a month are
forgotten. Everything here is done in portions: whoever calls gives others their turn in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.errors import QueueFull
from sluice.message import Message
from sluice.queues import dead_letters, removal
from sluice.queues.block import GONE
from sluice.queues.journal import ACKED, BATCH, Note, NoteWriter
from sluice.queues.losses import tell
from sluice.queues.partition import Partition
from sluice.queues.rules import DEAD_LETTER, DROP_OLDEST

if TYPE_CHECKING:
    from sluice.queues.cursor import Cursor
    from sluice.queues.engine import Engine
    from sluice.queues.queue import Queue

FORGET_SECONDS: Final = 30 * 86_400.0


# ---- reading


class Places:
    """Where messages are: i64 seq, i64 address, i32 size of each."""

    def __init__(self) -> None:
        self.count: i64 = 0
        self.bytes: i64 = 0
        self._out = BytesWriter()

    def add(self, seq: i64, address: i64, size: i32) -> None:
        write_i64_le(self._out, seq)
        write_i64_le(self._out, address)
        write_i32_le(self._out, size)
        self.count += 1
        self.bytes += i64(size)

    def value(self) -> bytes:
        return self._out.getvalue()


def collect(
    partition: Partition, start: i64, end: i64, gid: i64, most: i64, most_bytes: i64, places: Places
) -> i64:
    """Add where the messages from `start` to `end` are, until there are so many, or they have about so many bytes;
    where to go on. With a group (`gid` is not 0), those that are for another one alone are left out."""
    seq = partition.first_live(start)
    while seq < end and places.count < most and places.bytes < most_bytes:
        block = partition.block(seq)
        if block is None:
            break
        at = block.at(seq)
        stop: i64 = len(block.address)
        while at < stop and seq < end and places.count < most and places.bytes < most_bytes:
            address: i64 = block.address[at]
            if address != GONE and (gid == 0 or partition.is_for(seq, gid)):
                places.add(seq, address, block.size[at])
            at += 1
            seq = block.seq(at) if at < stop else seq + 1
        seq = partition.first_live(seq)
    return min(seq, end)


# ---- progress


def settle_some(engine: Engine, cursor: Cursor, end: i64, most: i64) -> bool:
    """Let a group be done with everything before `end`, at most so many at a time; whether that is all."""
    tell(engine, cursor, end)
    partition = cursor.partition
    gid = cursor.group.gid
    seq = partition.first_live(cursor.floor)
    while seq < end:
        if most <= 0:
            return False
        if not cursor.settled(seq) and partition.is_for(seq, gid):
            removal.take_from(engine, cursor, seq, ACKED, cursor.leases.get(int(seq)))
            most -= 1
        seq = partition.first_live(seq + 1)
    if cursor.floor < end:
        cursor.advance(end)  # what lay between was gone already
    return True


# ---- writing


class Fence:
    """The last batch of an application."""

    def __init__(self, batch: i64, rows: i64, at: float) -> None:
        self.batch: i64 = batch
        self.rows: i64 = rows
        self.at: float = at


class Batches:
    def __init__(self) -> None:
        self._fences: dict[str, Fence] = {}

    def last(self, app: str) -> Fence | None:
        return self._fences.get(app)

    def put(self, app: str, batch: i64, rows: i64, at: float) -> None:
        self._fences[app] = Fence(batch, rows, at)

    def forget_old(self, now: float) -> None:
        old = [app for app, fence in self._fences.items() if now - fence.at > FORGET_SECONDS]
        for app in old:
            del self._fences[app]

    def load(self, note: Note) -> None:
        """A note of an earlier life."""
        app = note.text()
        batch = note.number()
        rows = note.number()
        self.put(app, batch, rows, note.real())

    def write_snapshot(self, out: NoteWriter, now: float) -> None:
        self.forget_old(now)
        out.number(len(self._fences))
        for app, fence in self._fences.items():
            _write(out, app, fence)

    def load_snapshot(self, note: Note) -> None:
        for _ in range(note.number()):
            self.load(note)


def _write(out: NoteWriter, app: str, fence: Fence) -> None:
    out.text(app)
    out.number(fence.batch)
    out.number(fence.rows)
    out.real(fence.at)


def check_room(queue: Queue, count: i64) -> None:
    """Refuse a batch that a queue has no room for and no way to make some. Nothing is refused once it has begun."""
    rules = queue.rules
    if rules.overflow == DEAD_LETTER and rules.dlq_enabled:
        return
    room = rules.max_depth if rules.overflow == DROP_OLDEST else max(0, rules.max_depth - queue.depth)
    if count > room:
        queue.refused += 1
        raise QueueFull(queue.name, int(queue.depth), rules.compacted, int(room), int(count))


def append_some(engine: Engine, queue: Queue, messages: list[Message], start: i64, end: i64) -> i64:
    """Messages `start` to `end` of a batch, by the rules for every other message; how many of them the queue took. None
    is refused: what was found out before the first of them must hold for the last, whoever has published meanwhile."""
    taken: i64 = 0
    nth = start
    while nth < end:
        message = messages[nth]
        nth += 1
        if message.id and queue.seen(message.id, engine.now):
            queue.duplicates += 1
            continue
        is_taken = True
        if queue.depth >= queue.rules.max_depth:
            if queue.rules.overflow == DROP_OLDEST:
                removal.drop_oldest(engine, queue)
            elif queue.rules.overflow == DEAD_LETTER:
                is_taken = not dead_letters.bury_unborn(engine, queue, message, "overflow")
        if is_taken:
            engine.put(queue, message)
            taken += 1
        if message.id:
            queue.remember(message.id, engine.now)
    return taken


def note_batch(engine: Engine, app: str, batch: i64, rows: i64) -> None:
    """The fence, in the frame of the messages."""
    engine.batches.put(app, batch, rows, engine.now)
    note = NoteWriter(BATCH)
    _write(note, app, Fence(batch, rows, engine.now))
    engine.note(note, True)
