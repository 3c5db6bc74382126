"""Exclusive compacted queues: one owner each, the last value of each key, and how far the owner has acknowledged.

They are records of the same log, in the same frames, under the same promise as every other message. A value is numbered
by its owner, and takes the place of the older value of its key in the moment it is written down: one update in, at most
one copy kept. There are no groups, leases and retries here, so there is none of what they cost: an owner is some rows
of numbers (`owner.py`), and a reader while it is subscribed.

    publish ─▶ journal ─▶ frame … store … frame_done ─▶ offer ─▶ Reader.deliver ─▶ ack ─▶ journal (a note per frame)

A tombstone (an empty payload) takes its key's place like any value, so that the owner hears of the end of the key; once
acknowledged it is forgotten. Everything else stays until it is replaced, purged, or older than the retention: so the
owner can be rewound.

The state, and what recovery does with it, is `owners`; here are the commands, which write notes.
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i64_le
from mypy_extensions import i64

from sluice.errors import TooManyKeys, TooManyOwners, ValueTooLarge
from sluice.message import FIELDS_BYTES, TOMBSTONE, Message, decode_headers, encode_header
from sluice.queues.compacted.owner_table import FACTS, HEAD, MINDS, NEXT, NUMBER_AT, hash_of
from sluice.queues.log.frame_builder import Journal, NoteWriter
from sluice.queues.log.broker_state import FIRST_OWNER
from sluice.queues.compacted.key_index import mark_of
from sluice.queues.compacted.owner import NOTHING_DONE, SLOT_BITS, SLOT_MASK, Owner
from sluice.queues.compacted.owners import (
    OWNER_ACKED,
    OWNER_GONE,
    OWNER_MADE,
    OWNER_PURGED,
    OWNER_REMOVED,
    OWNER_SOUGHT,
    OWNERS_SWEPT,
    Owners,
)
from sluice.queues.ports import Codec, Reader
from sluice.queues.bodies.body_reads import message_of
from sluice.queues.log.segment_usage import Segments
from sluice.store.protocol import HEADER_BYTES, KEY_AT, Record

READ_AHEAD: Final = 64  # values that one read brings, at most
READ_BYTES: Final = 262_144
MOST_OWNERS: Final = 1 << 24  # so many places an entry of the finder can name
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
        self.nth: i64 = reader.fetches  # of that reader
        self.sequences: list[int] = []
        self.addresses: list[int] = []


class Exclusive(Owners):
    """What is done with them: values written, read and acknowledged, and time."""

    def __init__(self, journal: Journal, segments: Segments) -> None:
        super().__init__(journal, segments)
        self.rules: ExclusiveRules = ExclusiveRules()
        self.reads: list[OwnedRead] = []
        self.hungry: list[Reader] = []
        self.due: float = 0.0  # when the next sweep is due; 0.0: there is nothing to sweep
        self.swept: bool = False  # a sweep is over and little is written: a good moment to make room on disk
        self.kept_before: i64 = 0  # records before this address are durable, and may be delivered
        self.written: i64 = 0  # counters, since the start
        self.delivered: i64 = 0
        self.acked: i64 = 0
        self._written_then: i64 = 0  # at the last sweep
        self._dirty: list[Owner] = []
        self._expecting: list[Reader] = []  # in the open frame there is something for them,
        self._expecting_sent: list[Reader] = []  # and in the one under way

    # ---- writing

    def publish(self, client: str, message: Message, now: float) -> Owner:
        """Take a value into the open frame, in the place of the older one of its key."""
        name = client.encode("utf-8", "surrogateescape")
        found = self.write(
            -1,
            name,
            hash_of(name),
            mark_of(message.key),
            message.key,
            message.props,
            message.payload,
            message.expires,
            now,
        )
        return self.finder.at[found >> SLOT_BITS]

    def write(
        self,
        found: i64,
        client: bytes,
        client_hash: i64,
        mark: i64,
        key: bytes,
        props: bytes,
        payload: bytes,
        expires: i64,
        now: float,
    ) -> i64:
        """The same for what a topic says; where its value stands then. If that was `found` already, nobody asks for the
        name of the client.
        Nothing is made of a value but its record, and what its owner's reader is to get."""
        rules = self.rules
        size: i64 = len(payload)
        if size > rules.max_message_size:
            name = self.finder.at[found >> SLOT_BITS].client if found >= 0 else text_of(client)
            raise ValueTooLarge(name, int(size), int(rules.max_message_size))
        if found < 0:
            found = self.finder.find(client_hash, mark)
        slot: i64 = -1
        place: i64 = 0
        if found >= 0:
            slot = found & SLOT_MASK
            place = found >> SLOT_BITS
        else:
            place = self._first_of_key(text_of(client), now).place
        now_ms: i64 = int(now * 1000.0)
        headers = encode_header("expires", str(expires)) if expires else b""
        words = self.heads.words
        head = place * HEAD
        seq = words[head + NEXT]
        facts = words[head + FACTS]
        whole: i64 = HEADER_BYTES + FIELDS_BYTES + len(key) + len(props) + len(headers) + size
        address = self.journal.add_owned(
            FIRST_OWNER + (facts >> NUMBER_AT),
            seq,
            TOMBSTONE if size == 0 else 0,
            mark,
            now_ms,
            whole,
            key,
            props,
            headers,
            payload,
            rules.sync,
        )
        slot = self.take(place, slot, seq, address, mark, now_ms // 1000, whole, size == 0)
        self.written += 1
        if self.due == 0.0:
            self.due = now + rules.sweep_interval
        if facts & MINDS:
            reader = self.finder.at[place].reader
            if reader is not None:
                message = Message(payload, props, key)
                message.expires = expires
                message.headers = headers
                message.enqueued_at = now_ms
                self._bring(reader, seq, message)
        return place << SLOT_BITS | slot

    def _bring(self, reader: Reader, seq: i64, message: Message) -> None:
        """A value for a reader: it is at hand if there is room, and if the reader will soon take it. Who is away, or
        slow, would fill what is there for all."""
        cost = message.size()
        if self.cached + cost <= self.rules.cache_bytes and reader.room() > len(reader.bodies):
            message.cost = cost
            self.cached += cost
            reader.bodies[int(seq)] = message
        self._expect(reader)

    def _first_of_key(self, client: str, now: float) -> Owner:
        """The owner of a key that is new."""
        owner = self.owners.get(client)
        if owner is None:
            return self.make(client, now)
        if owner.live >= self.rules.max_keys:
            raise TooManyKeys(client, int(owner.live))
        return owner

    def make(self, client: str, now: float) -> Owner:
        """The queue of an owner that has none yet."""
        if len(self.owners) >= MOST_OWNERS:
            raise TooManyOwners(len(self.owners))
        note = NoteWriter(OWNER_MADE)
        note.number(self.next_number)
        note.text(client)
        note.number(self.first)
        self.journal.add_note(note.value(), int(now * 1000.0), False)
        owner = self.add_owner(client, self.next_number, self.first)
        owner.gone_at = int(now)
        return owner

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
        reader.served = owner
        reader.sent = owner.acked
        reader.epoch = owner.epoch
        self.feed(reader)
        return owner

    def leave(self, reader: Reader) -> None:
        owner = reader.owner
        reader.owner = None
        reader.out.clear()
        self.put_down(reader)
        if owner is not None and owner.reader is reader:
            owner.reader = None
            owner.forget_order()

    def put_down(self, reader: Reader) -> None:
        """It takes nothing for a while: what was at hand for it stands in the store."""
        for message in reader.bodies.values():
            self.cached -= message.cost
        reader.bodies.clear()

    def feed(self, reader: Reader) -> None:
        """It may have room: offer it more at the end of the turn."""
        if not reader.is_hungry:
            reader.is_hungry = True
            self.hungry.append(reader)

    def feed_all(self, now: float) -> None:
        while self.hungry:
            hungry = self.hungry
            self.hungry = []
            for reader in hungry:
                reader.is_hungry = False
            for reader in hungry:
                self.offer(reader, now)

    def offer(self, reader: Reader, now: float) -> None:
        """Give a reader what it has not got yet, in the order of sequences, as far as it has room. What has expired
        meanwhile is not given, and is removed."""
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
            message = reader.bodies.get(int(seq))
            if message is None:
                self._read(reader, owner, slot, room)
                return
            if message.expires and float(message.expires) <= now:
                self._remove(owner, slot, now)
                continue
            del reader.bodies[int(seq)]
            self.cached -= message.cost
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

    def frame_done(self, now: float) -> None:
        """The store has all that stands before the open frame."""
        self.kept_before = self.journal.base()
        if self._expecting_sent:
            sent = self._expecting_sent
            self._expecting_sent = []
            for reader in sent:
                self.offer(reader, now)

    def heal(self, reader: Reader) -> bool:
        """Called from time to time: whoever should have something and gets it not, for whatever reason, gets it from
        here on. A read that has been under way since the last time is given up, and asked for again; should it be
        answered after all, that does no harm. Whether it was so."""
        given_up = reader.fetching and reader.fetches == reader.fetches_seen
        reader.fetches_seen = reader.fetches
        if given_up:
            reader.fetching = False
        owner = reader.owner
        if owner is not None and owner.after(reader.sent) >= 0:
            self.feed(reader)
        return given_up

    # ---- bodies that are not at hand

    def _read(self, reader: Reader, owner: Owner, slot: i64, room: i64) -> None:
        reader.fetches += 1
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
        if read.nth == reader.fetches:
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
            elif reader.owner is owner and number > reader.sent and number not in reader.bodies:
                message.cost = message.size()
                self.cached += message.cost
                reader.bodies[number] = message
        self.offer(reader, now)
        return lost

    def expire(self, owner: Owner, seq: i64, now: float) -> None:
        """Somebody who has looked at this value says that its time is over."""
        slot = owner.slot_of(seq) if self.owners.get(owner.client) is owner else -1
        if slot >= 0:
            self._remove(owner, slot, now)

    def _remove(self, owner: Owner, slot: i64, now: float) -> None:
        note = NoteWriter(OWNER_REMOVED)
        note.number(owner.number)
        note.number(owner.seq(slot))
        note.number(owner.mark(slot))
        self.journal.add_note(note.value(), int(now * 1000.0), False)
        self.drop(owner, slot)
        self.tidy(owner)

    # ---- acknowledging

    def ack(self, reader: Reader, seq: i64, epoch: i64, now: float) -> None:
        """A reader has what it was given. It counts for the owner unless that was rewound since: also if the reader has
        left meanwhile [MQTT-3.10.4-3], or the value is gone. Nothing up to the first that is kept and not acknowledged
        is given again."""
        owner = reader.served
        if owner is None:
            return
        if epoch == owner.epoch:
            if owner.is_unsaved:
                self.save(owner)
            self.acked += 1
            owner.acked_at = int(now * 1000.0)
            present = owner.reader
            if present is not None and present.out:
                present.out.pop(int(seq), None)
            slot = owner.after(owner.acked)
            if slot >= 0 and owner.seq(slot) == seq and not owner.done:
                owner.acked = seq
                if owner.tombstones:
                    self._end_tombstone(owner, slot)
            elif seq > owner.acked and owner.slot_of(seq) >= 0:
                if owner.done is NOTHING_DONE:
                    owner.done = set()
                owner.done.add(int(seq))
            self._pass_done(owner, reader.sent)
            self._note_ack(owner)
        if owner.reader is not None:
            self.feed(owner.reader)
        else:
            owner.forget_order()

    def _note_ack(self, owner: Owner) -> None:
        if not owner.is_dirty:
            owner.is_dirty = True
            self._dirty.append(owner)
            self.journal.note_acks = self

    def _pass_done(self, owner: Owner, sent: i64) -> None:
        """Go as far as everything is acknowledged, or gone: what was out of turn is in turn when all before it is done.
        Behind the last that is kept, that is as far as values were `sent`."""
        acked = owner.acked
        slot = owner.after(acked)
        while slot >= 0 and owner.done and int(owner.seq(slot)) in owner.done:
            acked = owner.seq(slot)
            owner.done.discard(int(acked))
            if owner.tombstones:
                self._end_tombstone(owner, slot)
            slot = owner.after(acked)
        if slot >= 0:
            sent = min(sent, owner.seq(slot) - 1)
        owner.acked = max(acked, sent)
        if owner.done is not NOTHING_DONE and not owner.done:
            owner.done = NOTHING_DONE

    def _end_tombstone(self, owner: Owner, slot: i64) -> None:
        """Its owner has heard of the end of a key, and of all before it."""
        if owner.is_tombstone(slot):
            self.drop(owner, slot)
            self.tidy(owner)

    def write_acks(self, now_ms: i64) -> None:
        """The frame is closed: how far each owner has come since the last one."""
        note = NoteWriter(OWNER_ACKED)
        for owner in self._dirty:
            owner.is_dirty = False
            self.write_state(note, owner)
        self._dirty = []
        self.journal.add_note(note.value(), now_ms, False)

    # ---- what people ask for

    def seek(self, owner: Owner, behind: i64, now: float) -> None:
        """Go on behind a sequence, back to what is still kept or forward past what was never taken."""
        note = NoteWriter(OWNER_SOUGHT)
        note.number(owner.number)
        note.number(behind)
        if owner.is_dirty:  # what was acknowledged before this is not to count behind it
            self.write_acks(int(now * 1000.0))
            self.journal.note_acks = None
        self.journal.add_note(note.value(), int(now * 1000.0), True)
        self.go_behind(owner, behind)
        owner.epoch += 1
        reader = owner.reader
        if reader is not None:
            reader.sent = owner.acked
            reader.epoch = owner.epoch
            reader.out.clear()
            self.feed(reader)

    def purge(self, owner: Owner, now: float) -> int:
        """Remove every value of an owner; how many there were."""
        count = int(owner.live)
        note = NoteWriter(OWNER_PURGED)
        note.number(owner.number)
        self.journal.add_note(note.value(), int(now * 1000.0), True)
        self.remove_all(owner)
        return count

    def forget(self, owner: Owner, now: float) -> None:
        """The owner itself, with all that is kept of it. Should it come back, its sequences go on behind these."""
        note = NoteWriter(OWNER_GONE)
        note.number(owner.number)
        self.journal.add_note(note.value(), int(now * 1000.0), True)
        if owner.reader is not None:
            self.leave(owner.reader)
        if owner.is_dirty:
            self._dirty.remove(owner)
        owner.epoch += 1  # what is still said to it counts no more
        self.let_go(owner)

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
        if retention > 0.0 and self.sweep(int(now - retention)):
            note = NoteWriter(OWNERS_SWEPT)
            note.number(int(now - retention))
            self.journal.add_note(note.value(), int(now * 1000.0), False)
        idle: i64 = int(now - (retention if retention > 0.0 else float(KEPT_IDLE)))
        for owner in list(self.owners.values()):
            if (
                owner.live == 0
                and owner.reader is None
                and owner.gone_at < idle
                and owner.acked_at < idle * 1000
            ):
                self.forget(owner, now)

    # ---- room on disk

    def rewrite(self, pid: i64, data: bytes, address: i64) -> bool:
        """Write the record of a value that still lives at `address` anew, so that its segment can go."""
        finder = self.finder
        found = finder.find_numbered(pid - FIRST_OWNER, read_i64_le(data, KEY_AT))
        if found < 0 or finder.address(found) != address:
            return False
        moved = self.journal.copy_owned(data)
        self.segments.drop(address, len(data))
        self.segments.add_lasting(moved, len(data))
        finder.move(found, moved)
        if finder.minds(found):
            reader = finder.at[found >> SLOT_BITS].reader
            if reader is not None:
                self._expect(reader)
        return True

    def damaged(self, record: Record, now: float) -> str:
        """What compaction cannot read is given up, in words."""
        found = self.place_of(record)
        if found < 0:
            return ""
        owner = self.finder.at[found >> SLOT_BITS]
        self._remove(owner, found & SLOT_MASK, now)
        return f"value {record.seq} of $ECQ/{owner.client} is damaged on disk: lost"

    def finish(self, now: float) -> None:
        """All is read."""
        if self.owners:
            self.due = now + self.rules.sweep_interval


def text_of(client: bytes) -> str:
    return client.decode("utf-8", "surrogateescape")


def expiry_of(message: Message) -> i64:
    """When a value ends by its writer's wish, in seconds since 1970; 0: never. Its header has no room for it."""
    if message.headers:
        for name, value in decode_headers(message.headers):
            if name == "expires":
                return int(value)
    return 0
