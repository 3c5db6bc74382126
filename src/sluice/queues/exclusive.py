"""Exclusive compacted queues: one owner each, the last value of each key, and how far the owner has acknowledged.

They are records of the same log, in the same frames, under the same promise as every other message. A value is numbered
by its owner, and takes the place of the older value of its key in the moment it is written down: one update in, at most
one copy kept. There are no groups, leases and retries here, so there is none of what they cost: an owner is a handful
of columns (`owner.py`), and a reader while it is subscribed.

    publish ─▶ journal ─▶ frame … store … frame_done ─▶ offer ─▶ Reader.deliver ─▶ ack ─▶ journal (a note per frame)

A tombstone (an empty payload) takes its key's place like any value, so that the owner hears of the end of the key; once
acknowledged it is forgotten. Everything else stays until it is replaced, purged, or older than the retention: so the
owner can be rewound.

What is said of replay in `lifecycle` holds here too: what changes state runs when it happens and when its note is read
again, and only the functions that say so write notes.
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i64_le
from mypy_extensions import i64

from sluice.errors import MessageTooLarge, QueueFull
from sluice.message import TOMBSTONE, Message, decode_headers, encode_header, encode_start
from sluice.queues.journal import Journal, Note, NoteWriter
from sluice.queues.keeping import FIRST_OWNER
from sluice.queues.keys import mark_of
from sluice.queues.owner import NOTHING_DONE, Owner
from sluice.queues.ports import Codec, Reader
from sluice.queues.reading import message_of
from sluice.queues.segments import Segments
from sluice.store.protocol import HEADER_BYTES, SEQ_AT, Record

# Notes, behind those of `keeping`.
OWNER_MADE: Final = 48  # number, client, first sequence
OWNER_ACKED: Final = 49  # for each: number, acked, when, how many out of turn, and those
OWNER_SOUGHT: Final = 50  # number, the sequence it goes on behind
OWNER_REMOVED: Final = 51  # number, seq: expired or damaged
OWNERS_SWEPT: Final = 52  # time in seconds: what is older is gone, of every owner
OWNER_PURGED: Final = 53  # number
OWNER_GONE: Final = 54  # number

READ_AHEAD: Final = 64  # values that one read brings, at most
READ_BYTES: Final = 262_144
KEPT_IDLE: Final = 7 * 86_400  # an owner of whom nothing is kept is forgotten after so long, or the retention


class ExclusiveRules:
    """How all exclusive queues behave."""

    def __init__(self) -> None:
        self.retention: float = 604_800.0  # seconds; 0.0: for ever
        self.sweep_interval: float = 60.0
        self.max_message_size: i64 = 1_048_576
        self.max_keys: i64 = 100_000  # of one owner
        self.sync: bool = True
        self.cache_bytes: i64 = 4_194_304  # bodies that wait for owners who are there


class OwnedRead:
    """Bodies that are read for one reader."""

    def __init__(self, reader: Reader, owner: Owner) -> None:
        self.reader: Reader = reader
        self.owner: Owner = owner
        self.sequences: list[int] = []
        self.addresses: list[int] = []


class Exclusive:
    def __init__(self, journal: Journal, segments: Segments) -> None:
        self.rules: ExclusiveRules = ExclusiveRules()
        self.owners: dict[str, Owner] = {}
        self.reads: list[OwnedRead] = []
        self.hungry: list[Reader] = []
        self.due: float = 0.0  # when the next sweep is due; 0.0: there is nothing to sweep
        self.swept: bool = False  # a sweep is over and little is written: a good moment to make room on disk
        self.values: i64 = 0  # of all owners
        self.kept_before: i64 = 0  # records before this address are durable, and may be delivered
        self.written: i64 = 0  # counters, since the start
        self.replaced: i64 = 0
        self.delivered: i64 = 0
        self.acked: i64 = 0
        self.aged: i64 = 0  # removed by the sweep
        self._journal = journal
        self._segments = segments
        self._by_number: dict[int, Owner] = {}
        self._next_number: i64 = 1
        self.first: i64 = (
            1  # where a new owner's sequences begin: behind those of every owner that was forgotten
        )
        self._cached: i64 = 0
        self._written_then: i64 = 0  # at the last sweep
        self._dirty: list[Owner] = []
        self._expecting: list[Reader] = []  # in the open frame there is something for them,
        self._expecting_sent: list[Reader] = []  # and in the one under way

    # ---- writing

    def publish(self, client: str, message: Message, now: float) -> Owner:
        """Take a value into the open frame, in the place of the older one of its key."""
        rules = self.rules
        size: i64 = len(message.payload)
        if size > rules.max_message_size:
            raise MessageTooLarge(f"$ECQ/{client}", int(size), int(rules.max_message_size))
        mark = mark_of(message.key)
        owner = self.owners.get(client)
        if owner is None:
            owner = self.make(client, now)
        slot = owner.find(mark)
        if slot < 0 and owner.live >= rules.max_keys:
            raise QueueFull(f"$ECQ/{client}", int(owner.live))
        now_ms: i64 = int(now * 1000.0)
        message.enqueued_at = now_ms
        if message.expires:
            message.headers = encode_header("expires", str(message.expires))
        start = encode_start(message)
        seq = owner.next
        flags: i64 = TOMBSTONE if size == 0 else 0
        address = self._journal.add_owned(
            FIRST_OWNER + owner.number, seq, flags, mark, now_ms, start, message.payload, rules.sync
        )
        self._take(
            owner, slot, seq, address, mark, now_ms // 1000, HEADER_BYTES + len(start) + size, size == 0
        )
        self.written += 1
        if self.due == 0.0:
            self.due = now + rules.sweep_interval
        reader = owner.reader
        if reader is not None:
            cost = message.size()
            if self._cached + cost <= rules.cache_bytes:
                message.cost = cost
                self._cached += cost
                reader.bodies[int(seq)] = message
            self._expect(reader)
        return owner

    def make(self, client: str, now: float) -> Owner:
        """The queue of an owner that has none yet."""
        note = NoteWriter(OWNER_MADE)
        note.number(self._next_number)
        note.text(client)
        note.number(self.first)
        self._journal.add_note(note.value(), int(now * 1000.0), False)
        owner = self._add_owner(client, self._next_number, self.first)
        owner.heard_at = int(now)
        return owner

    def _add_owner(self, client: str, number: i64, first: i64) -> Owner:
        owner = Owner(client, number, first)
        self.owners[client] = owner
        self._by_number[int(number)] = owner
        if number >= self._next_number:
            self._next_number = number + 1
        return owner

    def _take(
        self,
        owner: Owner,
        slot: i64,
        seq: i64,
        address: i64,
        mark: i64,
        seconds: i64,
        size: i64,
        tombstone: bool,
    ) -> None:
        """A value comes, and the one in `slot`, if there is one, goes."""
        if slot >= 0:
            self._drop(owner, slot)
            self.replaced += 1
        owner.add(seq, address, mark, seconds, size, tombstone)
        owner.heard_at = seconds
        self.values += 1
        self._segments.add_lasting(address, size)

    def _drop(self, owner: Owner, slot: i64) -> None:
        """A value is gone, whatever its reader makes of it."""
        seq = owner.seq(slot)
        self._segments.drop(owner.address(slot), owner.size(slot))
        owner.remove(slot)
        self.values -= 1
        if owner.done:
            owner.done.discard(int(seq))
        reader = owner.reader
        if reader is not None:
            self._forget_body(reader, seq)
            if reader.out:
                reader.out.pop(int(seq), None)

    def _forget_body(self, reader: Reader, seq: i64) -> None:
        message = reader.bodies.pop(int(seq), None) if reader.bodies else None
        if message is not None:
            self._cached -= message.cost

    # ---- reading

    def join(self, reader: Reader, client: str, now: float) -> Owner:
        """An owner has subscribed: it goes on behind what it has acknowledged."""
        owner = self.owners.get(client)
        if owner is None:
            owner = self.make(client, now)
        if owner.reader is not None:
            self.leave(owner.reader)
        owner.reader = reader
        reader.owner = owner
        reader.sent = owner.acked
        self.feed(reader)
        return owner

    def leave(self, reader: Reader) -> None:
        owner = reader.owner
        reader.owner = None
        reader.out.clear()
        for message in reader.bodies.values():
            self._cached -= message.cost
        reader.bodies.clear()
        if owner is not None and owner.reader is reader:
            owner.reader = None

    def feed(self, reader: Reader) -> None:
        """It may have room: offer it more at the end of the turn."""
        if not reader.is_hungry:
            reader.is_hungry = True
            self.hungry.append(reader)

    def feed_all(self) -> None:
        while self.hungry:
            hungry = self.hungry
            self.hungry = []
            for reader in hungry:
                reader.is_hungry = False
                self.offer(reader)

    def offer(self, reader: Reader) -> None:
        """Give a reader what it has not got yet, in the order of sequences, as far as it has room."""
        owner = reader.owner
        if owner is None or reader.fetching:
            return
        room: i64 = reader.room()
        while room > 0:
            slot = owner.after(reader.sent if reader.sent > owner.acked else owner.acked)
            if slot < 0:
                return
            seq = owner.seq(slot)
            if owner.done and int(seq) in owner.done:
                reader.sent = seq
                continue
            if owner.address(slot) >= self.kept_before:
                self._expect(reader)
                return
            message = reader.bodies.pop(int(seq), None)
            if message is None:
                self._read(reader, owner, slot, room)
                return
            self._cached -= message.cost
            reader.sent = seq
            reader.out[int(seq)] = int(reader.epoch)
            self.delivered += 1
            reader.deliver(seq, message)
            room = reader.room()

    def _expect(self, reader: Reader) -> None:
        if not reader.expects:
            reader.expects = True
            self._expecting.append(reader)

    def frame_taken(self) -> None:
        """The open frame is closed: what is written from here on is in the next one."""
        for reader in self._expecting:
            reader.expects = False
        self._expecting_sent = self._expecting
        self._expecting = []

    def frame_done(self) -> None:
        """The store has all that stands before the open frame."""
        self.kept_before = self._journal.base()
        if self._expecting_sent:
            sent = self._expecting_sent
            self._expecting_sent = []
            for reader in sent:
                self.offer(reader)

    # ---- bodies that are not at hand

    def _read(self, reader: Reader, owner: Owner, slot: i64, room: i64) -> None:
        read = OwnedRead(reader, owner)
        size: i64 = 0
        left: i64 = min(room, READ_AHEAD)
        while slot >= 0 and left > 0 and size < READ_BYTES and owner.address(slot) < self.kept_before:
            seq = owner.seq(slot)
            if int(seq) not in reader.bodies and not (owner.done and int(seq) in owner.done):
                read.sequences.append(int(seq))
                read.addresses.append(int(owner.address(slot)))
                size += owner.size(slot)
                left -= 1
            slot = owner.after(seq)
        reader.fetching = True
        self.reads.append(read)

    def fetched(self, read: OwnedRead, records: list[bytes | None], now: float, codec: Codec) -> list[str]:
        """The answer to a read; what had to be given up, in words."""
        reader = read.reader
        owner = read.owner
        reader.fetching = False
        lost: list[str] = []
        for number, address, data in zip(read.sequences, read.addresses, records, strict=True):
            slot = owner.slot_of(number)
            if slot < 0:
                continue
            message = None if data is None else message_of(data, codec)
            if message is None:
                if owner.address(slot) == address:
                    lost.append(f"value {number} of $ECQ/{owner.client} is damaged on disk: lost")
                    self._remove(owner, slot, now)
                continue
            message.expires = expiry_of(message)
            if message.expires and float(message.expires) <= now:
                self._remove(owner, slot, now)
            elif reader.owner is owner and number > reader.sent:
                message.cost = message.size()
                self._cached += message.cost
                reader.bodies[number] = message
        self.offer(reader)
        return lost

    def _remove(self, owner: Owner, slot: i64, now: float) -> None:
        note = NoteWriter(OWNER_REMOVED)
        note.number(owner.number)
        note.number(owner.seq(slot))
        self._journal.add_note(note.value(), int(now * 1000.0), False)
        self._drop(owner, slot)

    # ---- acknowledging

    def ack(self, reader: Reader, seq: i64, epoch: i64, now: float) -> None:
        """A reader has what it was given. Nothing up to the first that it has not acknowledged is given again."""
        owner = reader.owner
        if owner is None:
            return
        if reader.out.get(int(seq), -1) == epoch:
            del reader.out[int(seq)]
            self.acked += 1
            owner.acked_at = int(now * 1000.0)
            slot = owner.after(owner.acked)
            if slot >= 0 and owner.seq(slot) == seq and not owner.done:
                owner.acked = seq
                if owner.tombstones:
                    self._end_tombstones(owner)
            else:
                if owner.done is NOTHING_DONE:
                    owner.done = set()
                owner.done.add(int(seq))
                self._pass_done(owner)
            self._note_ack(owner)
        self.feed(reader)

    def _note_ack(self, owner: Owner) -> None:
        if not owner.is_dirty:
            owner.is_dirty = True
            self._dirty.append(owner)
            self._journal.note_acks = self

    def _pass_done(self, owner: Owner) -> None:
        """Go as far as everything is acknowledged: what was out of turn is in turn when all before it is done."""
        acked = owner.acked
        slot = owner.after(acked)
        while slot >= 0 and int(owner.seq(slot)) in owner.done:
            acked = owner.seq(slot)
            owner.done.discard(int(acked))
            slot = owner.after(acked)
        owner.acked = acked
        if not owner.done:
            owner.done = NOTHING_DONE
        if owner.tombstones:
            self._end_tombstones(owner)

    def _end_tombstones(self, owner: Owner) -> None:
        """Those that the owner has heard of are forgotten."""
        slot = owner.after(0)
        while slot >= 0 and owner.tombstones and owner.seq(slot) <= owner.acked:
            seq = owner.seq(slot)
            if owner.is_tombstone(slot):
                self._drop(owner, slot)
            slot = owner.after(seq)

    def write_acks(self, now_ms: i64) -> None:
        """The frame is closed: how far each owner has come since the last one."""
        note = NoteWriter(OWNER_ACKED)
        for owner in self._dirty:
            owner.is_dirty = False
            self._write_state(note, owner)
        self._dirty = []
        self._journal.add_note(note.value(), now_ms, False)

    def _write_state(self, note: NoteWriter, owner: Owner) -> None:
        note.number(owner.number)
        note.number(owner.acked)
        note.number(owner.acked_at)
        note.number(len(owner.done))
        for seq in owner.done:
            note.number(seq)

    # ---- what people ask for

    def seek(self, owner: Owner, behind: i64, now: float) -> None:
        """Go on behind a sequence, back to what is still kept or forward past what was never taken."""
        note = NoteWriter(OWNER_SOUGHT)
        note.number(owner.number)
        note.number(behind)
        if owner.is_dirty:  # what was acknowledged before this is not to count behind it
            self.write_acks(int(now * 1000.0))
            self._journal.note_acks = None
        self._journal.add_note(note.value(), int(now * 1000.0), True)
        self._go_behind(owner, behind)
        reader = owner.reader
        if reader is not None:
            reader.sent = owner.acked
            reader.epoch += 1
            reader.out.clear()
            self.feed(reader)

    def _go_behind(self, owner: Owner, behind: i64) -> None:
        owner.acked = max(0, min(behind, owner.next - 1))
        owner.done = NOTHING_DONE
        if owner.tombstones:
            self._end_tombstones(owner)

    def purge(self, owner: Owner, now: float) -> int:
        """Remove every value of an owner; how many there were."""
        count = int(owner.live)
        note = NoteWriter(OWNER_PURGED)
        note.number(owner.number)
        self._journal.add_note(note.value(), int(now * 1000.0), True)
        self._remove_all(owner)
        return count

    def _remove_all(self, owner: Owner) -> None:
        slot = owner.after(0)
        while slot >= 0:
            seq = owner.seq(slot)
            self._drop(owner, slot)
            slot = owner.after(seq)

    def forget(self, owner: Owner, now: float) -> None:
        """The owner itself, with all that is kept of it. Should it come back, its sequences go on behind these."""
        note = NoteWriter(OWNER_GONE)
        note.number(owner.number)
        self._journal.add_note(note.value(), int(now * 1000.0), True)
        self._forget(owner)

    def _forget(self, owner: Owner) -> None:
        if owner.reader is not None:
            self.leave(owner.reader)
        self._remove_all(owner)
        self.first = max(self.first, owner.next)
        if owner.is_dirty:
            self._dirty.remove(owner)
        self.owners.pop(owner.client, None)
        self._by_number.pop(int(owner.number), None)

    # ---- retention

    def tick(self, now: float) -> None:
        """Take out what is older than the retention, and owners of whom nothing has been left for as long."""
        self.due = 0.0
        if not self.owners:
            return
        self.due = now + self.rules.sweep_interval
        self.swept = 4 * (self.written - self._written_then) <= self.values
        self._written_then = self.written
        retention = self.rules.retention
        if retention > 0.0 and self._sweep(int(now - retention)):
            note = NoteWriter(OWNERS_SWEPT)
            note.number(int(now - retention))
            self._journal.add_note(note.value(), int(now * 1000.0), False)
        idle: i64 = int(now - (retention if retention > 0.0 else float(KEPT_IDLE)))
        for owner in list(self.owners.values()):
            if (
                owner.live == 0
                and owner.reader is None
                and owner.heard_at < idle
                and owner.acked_at < idle * 1000
            ):
                self.forget(owner, now)

    def _sweep(self, seconds: i64) -> bool:
        """Values rise in time with their sequences, so one look at the first tells of all the rest of an owner."""
        found = False
        for owner in self.owners.values():
            slot = owner.after(0)
            while slot >= 0 and owner.time(slot) < seconds:
                seq = owner.seq(slot)
                self._drop(owner, slot)
                self.aged += 1
                found = True
                slot = owner.after(seq)
        return found

    # ---- room on disk

    def lives(self, record: Record) -> bool:
        """Whether an index row stands for a value that lives there."""
        owner = self._by_number.get(int(record.pid - FIRST_OWNER))
        if owner is None:
            return False
        slot = owner.slot_of(record.seq)
        return slot >= 0 and owner.address(slot) == record.address

    def rewrite(self, pid: i64, data: bytes, address: i64) -> bool:
        """Write the record of a value that still lives at `address` anew, so that its segment can go."""
        owner = self._by_number.get(int(pid - FIRST_OWNER))
        slot: i64 = -1 if owner is None else owner.slot_of(read_i64_le(data, SEQ_AT))
        if owner is None or slot < 0 or owner.address(slot) != address:
            return False
        moved = self._journal.copy_owned(data)
        self._segments.drop(address, len(data))
        self._segments.add_lasting(moved, len(data))
        owner.move(slot, moved)
        if owner.reader is not None:
            self._expect(owner.reader)
        return True

    def damaged(self, record: Record, now: float) -> str:
        """What compaction cannot read is given up, in words."""
        owner = self._by_number.get(int(record.pid - FIRST_OWNER))
        slot: i64 = -1 if owner is None else owner.slot_of(record.seq)
        if owner is None or slot < 0:
            return ""
        self._remove(owner, slot, now)
        return f"value {record.seq} of $ECQ/{owner.client} is damaged on disk: lost"

    # ---- snapshot and recovery

    def write_snapshot(self, out: NoteWriter) -> None:
        out.number(self._next_number)
        out.number(self.first)
        out.number(len(self.owners))
        for owner in self.owners.values():
            out.text(owner.client)
            out.number(owner.next)
            out.number(owner.heard_at)
            self._write_state(out, owner)
            out.data(owner.write_sequences())

    def load_snapshot(self, note: Note) -> None:
        self._next_number = note.number()
        self.first = note.number()
        for _ in range(note.number()):
            client = note.text()
            next_seq = note.number()
            heard_at = note.number()
            owner = self._add_owner(client, note.number(), next_seq)
            owner.heard_at = heard_at
            self._read_state(note, owner)
            owner.read_sequences(note.data())

    def _read_state(self, note: Note, owner: Owner) -> None:
        owner.acked = note.number()
        owner.acked_at = note.number()
        count = note.number()
        owner.done = {int(note.number()) for _ in range(count)} if count else NOTHING_DONE

    def load_row(self, record: Record) -> None:
        """A value from before the snapshot, without its body; one that was moved comes again, further on."""
        owner = self._by_number.get(int(record.pid - FIRST_OWNER))
        slot: i64 = -1 if owner is None else owner.named(record.seq)
        if owner is not None and slot >= 0:
            owner.place(
                slot,
                record.address,
                mark_in(record),
                record.time // 1000,
                record.size,
                record.flags & TOMBSTONE != 0,
            )

    def end_rows(self) -> list[str]:
        """All rows are read; what is missing, in words."""
        lost: list[str] = []
        for owner in self.owners.values():
            missing = owner.settle()
            self.values += owner.live
            if missing:
                lost.append(f"of $ECQ/{owner.client} values are missing in the store: {missing}")
            slot = owner.after(0)
            while slot >= 0:
                self._segments.add_lasting(owner.address(slot), owner.size(slot))
                slot = owner.after(owner.seq(slot))
        return lost

    def load_record(self, record: Record) -> None:
        """A value behind the snapshot, as it came, or as compaction wrote it anew."""
        owner = self._by_number.get(int(record.pid - FIRST_OWNER))
        if owner is None:
            return
        if record.seq >= owner.next:
            mark = mark_in(record)
            self._take(
                owner,
                owner.find(mark),
                record.seq,
                record.address,
                mark,
                record.time // 1000,
                record.size,
                record.flags & TOMBSTONE != 0,
            )
            return
        slot = owner.slot_of(record.seq)
        if slot >= 0:
            self._segments.drop(owner.address(slot), record.size)
            self._segments.add_lasting(record.address, record.size)
            owner.move(slot, record.address)

    def apply(self, note: Note) -> None:
        what = note.what
        if what == OWNERS_SWEPT:
            self._sweep(note.number())
        elif what == OWNER_ACKED:
            while note.more():
                found = self._by_number.get(int(note.number()))
                owner = found if found is not None else Owner("", 0, 1)  # its numbers are passed over
                self._read_state(note, owner)
                if owner.tombstones:
                    self._end_tombstones(owner)
        elif what == OWNER_MADE:
            number = note.number()
            client = note.text()
            self._add_owner(client, number, note.number())
        else:
            found = self._by_number.get(int(note.number()))
            if found is None:
                return
            if what == OWNER_SOUGHT:
                self._go_behind(found, note.number())
            elif what == OWNER_PURGED:
                self._remove_all(found)
            elif what == OWNER_REMOVED:
                slot = found.slot_of(note.number())
                if slot >= 0:
                    self._drop(found, slot)
            elif what == OWNER_GONE:
                self._forget(found)

    def finish(self, now: float) -> None:
        """All is read."""
        if self.owners:
            self.due = now + self.rules.sweep_interval


def mark_in(record: Record) -> i64:
    """The mark as it stands in the header of a record: see `Journal.add_owned`."""
    high: i64 = record.expires if record.expires < 0x8000_0000 else record.expires - 0x1_0000_0000
    return high << 32 | record.key


def expiry_of(message: Message) -> i64:
    """When a value ends by its writer's wish, in seconds since 1970; 0: never. Its header has no room for it."""
    if message.headers:
        for name, value in decode_headers(message.headers):
            if name == "expires":
                return int(value)
    return 0
