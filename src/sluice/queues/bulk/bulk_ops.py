"""What bulk readers and writers ask of the queues: where messages are, progress by sequences, batches that count once.

A batch of messages comes from an application that numbers its batches. Its messages and a note of its number go into
one frame, so a crash leaves all of it or nothing, and a batch that is sent again is known and not stored again. What is
remembered of an application is the number of its last batch; applications that have sent nothing for a month are
forgotten, and those of one batch after a day. Everything here is done in portions: whoever calls gives others their
turn in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.errors import PartitionFull, QueueFull
from sluice.message import Message
from sluice.queues.flow import dead_letters
from sluice.queues.flow import removal
from sluice.queues.model.message_columns import GONE
from sluice.queues.log.frame_builder import ACKED, BATCH, Note, NoteWriter
from sluice.queues.compacted.key_index import mark_of, place_of
from sluice.queues.bulk.lost_ranges import tell
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue_rules import DEAD_LETTER, DROP_OLDEST

if TYPE_CHECKING:
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.engine import Engine
    from sluice.queues.model.queue import Queue

FORGET_SECONDS: Final = 30 * 86_400.0
# An application that calls itself so sends one batch and does not come again: its fence is for who says it twice.
ONCE: Final = "once/"
FORGET_ONCE_SECONDS: Final = 86_400.0

# What will be of a key when a batch is in its queue: nothing, the value that is there, or one of the batch.
ABSENT: Final = 0
THERE: Final = 1
WRITTEN: Final = 2


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
        old = [app for app, fence in self._fences.items() if now - fence.at > _lifetime(app)]
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


def _lifetime(app: str) -> float:
    return FORGET_ONCE_SECONDS if app.startswith(ONCE) else FORGET_SECONDS


def _write(out: NoteWriter, app: str, fence: Fence) -> None:
    out.text(app)
    out.number(fence.batch)
    out.number(fence.rows)
    out.real(fence.at)


class Load:
    """What a batch of `count` messages brings to a queue: a batch is refused as a whole or not at all, so what it needs
    is counted before the first of it is appended. Of a compacted queue only keys that are not there need room."""

    def __init__(self, engine: Engine, queue: Queue, count: i64) -> None:
        rules = queue.rules
        self._engine: Engine = engine
        self._queue: Queue = queue
        self._brings: i64 = count
        self._buries: bool = rules.overflow == DEAD_LETTER and rules.dlq_enabled
        self._room: i64 = (
            rules.max_depth if rules.overflow == DROP_OLDEST else max(0, rules.max_depth - queue.depth)
        )
        # Whether the messages must be looked at, by `add`; else their number says it all.
        self.looks: bool = not self._buries and (
            count > self._room if rules.compacted else engine.max_length > 0
        )
        self._keys: dict[int, int] = {}  # by their marks: what will be there of them, see below
        self._more: i64 = 0  # keys by which the queue has grown by then,
        self._most: i64 = 0  # the most of them,
        self._written: i64 = 0  # and those whose value is of this batch
        self._by_partition: list[int] = [0] * len(queue.partitions)
        self._keyless: i64 = 0

    def add(self, messages: list[Message], start: i64, end: i64) -> None:
        compacted = self._queue.rules.compacted
        nth = start
        while nth < end:
            message = messages[nth]
            nth += 1
            if compacted:
                self._add_key(message)
                continue
            key = self._engine.key_hash(self._queue, message.key)
            if key:
                self._by_partition[key % len(self._by_partition)] += 1
            else:
                self._keyless += 1

    def _add_key(self, message: Message) -> None:
        mark = int(mark_of(message.key))
        was = self._keys.get(mark, -1)
        if was < 0:
            was = ABSENT if place_of(self._engine, self._queue, message.key) is None else THERE
        will_be = WRITTEN
        if not message.payload:
            # Groups hear of the end of a key, and its place is taken until they have.
            will_be = was if self._queue.groups else ABSENT
        self._more += (will_be != ABSENT) - (was != ABSENT)
        self._most = max(self._most, self._more)
        self._written += (will_be == WRITTEN) - (was == WRITTEN)
        self._keys[mark] = will_be

    def check(self) -> None:
        """Refuse what there is no room for, and no way to make some."""
        if self._buries:
            return
        queue = self._queue
        if self.looks and queue.rules.compacted:
            self._brings = self._written if queue.rules.overflow == DROP_OLDEST else self._most
        if self._brings > self._room:
            queue.refused += 1
            raise QueueFull(
                queue.name, int(queue.depth), queue.rules.compacted, int(self._room), int(self._brings)
            )
        if self.looks and not queue.rules.compacted:
            self._check_lengths()

    def _check_lengths(self) -> None:
        """The same of partitions, where those may not be longer than `engine.max_length`."""
        queue = self._queue
        count: i64 = len(self._by_partition)
        each: i64 = (self._keyless + count - 1) // count
        for partition in queue.partitions:
            if partition.number >= count:
                continue  # there were fewer when it was begun
            brings: i64 = self._by_partition[partition.number] + each
            room = removal.room_within(partition, self._engine.max_length, brings)
            if brings > room:
                queue.refused += 1
                raise PartitionFull(
                    queue.name, int(partition.number), int(self._engine.max_length), int(room), int(brings)
                )


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
        if _has_room(engine, queue, message) and _put(engine, queue, message):
            taken += 1
        if message.id:
            queue.remember(message.id, engine.now)
    return taken


def _has_room(engine: Engine, queue: Queue, message: Message) -> bool:
    """False: it went to the dead letters. See `removal.make_room`; but nothing is refused here."""
    rules = queue.rules
    if queue.depth < rules.max_depth or (rules.compacted and not removal.adds_key(engine, queue, message)):
        return True
    if rules.overflow == DROP_OLDEST:
        removal.drop_oldest(engine, queue)
    elif rules.overflow == DEAD_LETTER:
        return not dead_letters.bury_unborn(engine, queue, message, "overflow")
    return True


def _put(engine: Engine, queue: Queue, message: Message) -> bool:
    if engine.max_length and not queue.rules.compacted:
        return removal.append_within(engine, queue, message, True)
    engine.put(queue, message)
    return True


def note_batch(engine: Engine, app: str, batch: i64, rows: i64) -> None:
    """The fence, in the frame of the messages."""
    engine.batches.put(app, batch, rows, engine.now)
    note = NoteWriter(BATCH)
    _write(note, app, Fence(batch, rows, engine.now))
    engine.note(note, True)
