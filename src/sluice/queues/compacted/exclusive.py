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
from sluice.message import FIXED_FIELDS_BYTES, TOMBSTONE, Message, decode_headers, encode_header
from sluice.queues.bodies.body_reads import decode_message
from sluice.queues.compacted.key_index import hash_key
from sluice.queues.compacted.owner import NO_ACKS, SLOT_BITS, SLOT_MASK, Owner
from sluice.queues.compacted.owner_table import (
    ENTRY_WORDS,
    FLAGS_WORD,
    HAS_SLOW_PATH,
    NEXT_SEQ_WORD,
    NUMBER_SHIFT,
    hash_client,
)
from sluice.queues.compacted.owners import (
    OWNER_ACKED,
    OWNER_CREATED,
    OWNER_DELETED,
    OWNER_PURGED,
    OWNER_SEEK,
    OWNER_VALUE_REMOVED,
    OWNERS_SWEPT,
    Owners,
)
from sluice.queues.log.broker_state import FIRST_OWNER_PID
from sluice.queues.log.frame_builder import FrameBuilder, NoteWriter
from sluice.queues.log.segment_usage import SegmentUsage
from sluice.queues.ports import Codec, OwnerSubscriber
from sluice.store.protocol import HEADER_BYTES, KEY_OFFSET, Record

MAX_READ_VALUES: Final = 64  # values that one read brings, at most
MAX_READ_BYTES: Final = 262_144
MAX_OWNERS: Final = 1 << 24  # so many places an entry of the finder can name
IDLE_OWNER_SECONDS: Final = (
    7 * 86_400
)  # an owner of whom nothing is kept is forgotten after so long, or the retention


class ExclusiveRules:
    """How all exclusive queues behave."""

    def __init__(self) -> None:
        self.retention: float = 604_800.0  # seconds; 0.0: for ever
        self.sweep_interval: float = 60.0
        self.max_message_size: i64 = 1_048_576
        self.max_keys: i64 = 100_000  # of one owner
        self.sync: bool = True
        self.cache_bytes: i64 = 4_194_304  # bodies that wait for owners who are there


class OwnerRead:
    """Bodies that are read for one reader."""

    def __init__(self, subscriber: OwnerSubscriber, owner: Owner) -> None:
        self.subscriber: OwnerSubscriber = subscriber
        self.owner: Owner = owner
        self.fetch_number: i64 = subscriber.read_count  # of that reader
        self.sequences: list[int] = []
        self.addresses: list[int] = []


class ExclusiveQueues(Owners):
    """What is done with them: values written, read and acknowledged, and time."""

    def __init__(self, frame_builder: FrameBuilder, segments: SegmentUsage) -> None:
        super().__init__(frame_builder, segments)
        self.rules: ExclusiveRules = ExclusiveRules()
        self.reads: list[OwnerRead] = []
        self.scheduled_subscribers: list[OwnerSubscriber] = []
        self.sweep_due_at: float = 0.0  # when the next sweep is due; 0.0: there is nothing to sweep
        self.wants_compaction: bool = (
            False  # a sweep is over and little is written: a good moment to make room on disk
        )
        self.durable_before: i64 = (
            0  # records before this address are durable, and may be delivered
        )
        self.written: i64 = 0  # counters, since the start
        self.delivered: i64 = 0
        self.acked: i64 = 0
        self._written_at_last_sweep: i64 = 0  # at the last sweep
        self._owners_with_acks: list[Owner] = []
        self._awaiting_commit: list[
            OwnerSubscriber
        ] = []  # in the open frame there is something for them,
        self._awaiting_sent_frame: list[OwnerSubscriber] = []  # and in the one under way

    # ---- writing

    def publish(self, client: str, message: Message, now: float) -> Owner:
        """Take a value into the open frame, in the place of the older one of its key."""
        name = client.encode("utf-8", "surrogateescape")
        location = self.write(
            -1,
            name,
            hash_client(name),
            hash_key(message.key),
            message.key,
            message.props,
            message.payload,
            message.expires,
            now,
        )
        return self.lookup.owners[location >> SLOT_BITS]

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
            name = (
                self.lookup.owners[found >> SLOT_BITS].client
                if found >= 0
                else decode_client(client)
            )
            raise ValueTooLarge(name, int(size), int(rules.max_message_size))
        if found < 0:
            found = self.lookup.find_value(client_hash, mark)
        slot: i64 = -1
        place: i64 = 0
        if found >= 0:
            slot = found & SLOT_MASK
            place = found >> SLOT_BITS
        else:
            place = self._owner_for_new_key(decode_client(client), now).owner_index
        now_ms: i64 = int(now * 1000.0)
        headers = encode_header("expires", str(expires)) if expires else b""
        words = self.table.words
        head = place * ENTRY_WORDS
        seq = words[head + NEXT_SEQ_WORD]
        facts = words[head + FLAGS_WORD]
        whole: i64 = HEADER_BYTES + FIXED_FIELDS_BYTES + len(key) + len(props) + len(headers) + size
        address = self.frame_builder.add_owner_value(
            FIRST_OWNER_PID + (facts >> NUMBER_SHIFT),
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
        slot = self.put_value(place, slot, seq, address, mark, now_ms // 1000, whole, size == 0)
        self.written += 1
        if self.sweep_due_at == 0.0:
            self.sweep_due_at = now + rules.sweep_interval
        if facts & HAS_SLOW_PATH:
            reader = self.lookup.owners[place].subscriber
            if reader is not None:
                message = Message(payload, props, key)
                message.expires = expires
                message.headers = headers
                message.enqueued_at = now_ms
                self._cache_body(reader, seq, message)
        return place << SLOT_BITS | slot

    def _cache_body(self, subscriber: OwnerSubscriber, seq: i64, message: Message) -> None:
        """A value for a reader: it is at hand if there is room, and if the reader will soon take it. Who is away, or
        slow, would fill what is there for all."""
        cost = message.memory_bytes()
        if self.cached_bytes + cost <= self.rules.cache_bytes and subscriber.capacity() > len(
            subscriber.pending_bodies
        ):
            message.cached_bytes = cost
            self.cached_bytes += cost
            subscriber.pending_bodies[int(seq)] = message
        self._await_commit(subscriber)

    def _owner_for_new_key(self, client: str, now: float) -> Owner:
        """The owner of a key that is new."""
        owner = self.owners.get(client)
        if owner is None:
            return self.create_owner(client, now)
        if owner.live_values >= self.rules.max_keys:
            raise TooManyKeys(client, int(owner.live_values))
        return owner

    def create_owner(self, client: str, now: float) -> Owner:
        """The queue of an owner that has none yet."""
        if len(self.owners) >= MAX_OWNERS:
            raise TooManyOwners(len(self.owners))
        note = NoteWriter(OWNER_CREATED)
        note.write_int(self.next_number)
        note.write_text(client)
        note.write_int(self.first_seq)
        self.frame_builder.add_note(note.to_bytes(), int(now * 1000.0), False)
        owner = self.add_owner(client, self.next_number, self.first_seq)
        owner.newest_removed_at = int(now)
        return owner

    # ---- reading

    def subscribe(self, subscriber: OwnerSubscriber, client: str, now: float) -> Owner:
        """An owner has subscribed: it goes on behind what it has acknowledged."""
        owner = self.owners.get(client)
        if owner is None:
            owner = self.create_owner(client, now)
        if owner.subscriber is not None:
            self.unsubscribe(owner.subscriber)
        owner.subscriber = subscriber
        subscriber.owner = owner
        subscriber.last_owner = owner
        subscriber.last_sent_seq = owner.acked
        subscriber.epoch = owner.epoch
        self.schedule_dispatch(subscriber)
        return owner

    def unsubscribe(self, subscriber: OwnerSubscriber) -> None:
        owner = subscriber.owner
        subscriber.owner = None
        subscriber.in_flight.clear()
        self.drop_cached_bodies(subscriber)
        if owner is not None and owner.subscriber is subscriber:
            owner.subscriber = None
            owner.drop_order()

    def drop_cached_bodies(self, subscriber: OwnerSubscriber) -> None:
        """It takes nothing for a while: what was at hand for it stands in the store."""
        for message in subscriber.pending_bodies.values():
            self.cached_bytes -= message.cached_bytes
        subscriber.pending_bodies.clear()

    def schedule_dispatch(self, subscriber: OwnerSubscriber) -> None:
        """It may have room: offer it more at the end of the turn."""
        if not subscriber.is_scheduled:
            subscriber.is_scheduled = True
            self.scheduled_subscribers.append(subscriber)

    def dispatch_scheduled(self, now: float) -> None:
        while self.scheduled_subscribers:
            scheduled = self.scheduled_subscribers
            self.scheduled_subscribers = []
            for subscriber in scheduled:
                subscriber.is_scheduled = False
            for subscriber in scheduled:
                self.dispatch(subscriber, now)

    def dispatch(self, subscriber: OwnerSubscriber, now: float) -> None:
        """Give a reader what it has not got yet, in the order of sequences, as far as it has room. What has expired
        meanwhile is not given, and is removed."""
        owner = subscriber.owner
        if owner is None or subscriber.is_reading:
            return
        capacity: i64 = subscriber.capacity()
        while capacity > 0:
            slot = owner.slot_after(
                subscriber.last_sent_seq if subscriber.last_sent_seq > owner.acked else owner.acked
            )
            if slot < 0:
                return
            seq = owner.seq(slot)
            if owner.acked_out_of_order and int(seq) in owner.acked_out_of_order:
                subscriber.last_sent_seq = seq
                continue
            if owner.address(slot) >= self.durable_before:
                self._await_commit(subscriber)
                return
            message = subscriber.pending_bodies.get(int(seq))
            if message is None:
                self._request_bodies(subscriber, owner, slot, capacity)
                return
            if message.expires and float(message.expires) <= now:
                self._remove_value(owner, slot, now)
                continue
            del subscriber.pending_bodies[int(seq)]
            self.cached_bytes -= message.cached_bytes
            subscriber.last_sent_seq = seq
            subscriber.in_flight[int(seq)] = int(subscriber.epoch)
            self.delivered += 1
            subscriber.deliver(seq, message)
            capacity = subscriber.capacity()

    def _await_commit(self, subscriber: OwnerSubscriber) -> None:
        if not subscriber.has_values_in_open_frame:
            subscriber.has_values_in_open_frame = True
            self._awaiting_commit.append(subscriber)

    def on_frame_closed(self) -> None:
        """The open frame is closed: what is written from here on is in the next one."""
        for subscriber in self._awaiting_commit:
            subscriber.has_values_in_open_frame = False
        self._awaiting_sent_frame = self._awaiting_commit
        self._awaiting_commit = []

    def on_frame_committed(self, now: float) -> None:
        """The store has all that stands before the open frame."""
        self.durable_before = self.frame_builder.base_address()
        if self._awaiting_sent_frame:
            subscribers = self._awaiting_sent_frame
            self._awaiting_sent_frame = []
            for subscriber in subscribers:
                self.dispatch(subscriber, now)

    def restart_stalled_read(self, subscriber: OwnerSubscriber) -> bool:
        """Called from time to time: whoever should have something and gets it not, for whatever reason, gets it from
        here on. A read that has been under way since the last time is given up, and asked for again; should it be
        answered after all, that does no harm. Whether it was so."""
        is_stalled = (
            subscriber.is_reading and subscriber.read_count == subscriber.last_checked_read_count
        )
        subscriber.last_checked_read_count = subscriber.read_count
        if is_stalled:
            subscriber.is_reading = False
        owner = subscriber.owner
        if owner is not None and owner.slot_after(subscriber.last_sent_seq) >= 0:
            self.schedule_dispatch(subscriber)
        return is_stalled

    # ---- bodies that are not at hand

    def _request_bodies(
        self, subscriber: OwnerSubscriber, owner: Owner, slot: i64, capacity: i64
    ) -> None:
        subscriber.read_count += 1
        read = OwnerRead(subscriber, owner)
        size: i64 = 0
        left: i64 = min(capacity, MAX_READ_VALUES)
        while (
            slot >= 0
            and left > 0
            and size < MAX_READ_BYTES
            and owner.address(slot) < self.durable_before
        ):
            seq = owner.seq(slot)
            if int(seq) not in subscriber.pending_bodies and not (
                owner.acked_out_of_order and int(seq) in owner.acked_out_of_order
            ):
                read.sequences.append(int(seq))
                read.addresses.append(int(owner.address(slot)))
                size += owner.size(slot)
                left -= 1
            slot = owner.slot_after(seq)
        subscriber.is_reading = True
        self.reads.append(read)

    def on_read_done(
        self, read: OwnerRead, records: list[bytes | None], now: float, codec: Codec
    ) -> list[str]:
        """The answer to a read; what had to be given up, in words."""
        subscriber = read.subscriber
        owner = read.owner
        if read.fetch_number == subscriber.read_count:
            subscriber.is_reading = False
        lost: list[str] = []
        for seq, address, data in zip(read.sequences, read.addresses, records, strict=True):
            slot = owner.slot_of_sequence(seq)
            if slot < 0:
                continue
            message = None if data is None else decode_message(data, codec)
            if message is None:
                if owner.address(slot) == address:
                    lost.append(f"value {seq} of $ECQ/{owner.client} is damaged on disk: lost")
                    self._remove_value(owner, slot, now)
                continue
            message.expires = read_expiry(message)
            if message.expires and float(message.expires) <= now:
                self._remove_value(owner, slot, now)
            elif (
                subscriber.owner is owner
                and seq > subscriber.last_sent_seq
                and seq not in subscriber.pending_bodies
            ):
                message.cached_bytes = message.memory_bytes()
                self.cached_bytes += message.cached_bytes
                subscriber.pending_bodies[seq] = message
        self.dispatch(subscriber, now)
        return lost

    def expire_value(self, owner: Owner, seq: i64, now: float) -> None:
        """Somebody who has looked at this value says that its time is over."""
        slot = owner.slot_of_sequence(seq) if self.owners.get(owner.client) is owner else -1
        if slot >= 0:
            self._remove_value(owner, slot, now)

    def _remove_value(self, owner: Owner, slot: i64, now: float) -> None:
        note = NoteWriter(OWNER_VALUE_REMOVED)
        note.write_int(owner.number)
        note.write_int(owner.seq(slot))
        note.write_int(owner.key_hash(slot))
        self.frame_builder.add_note(note.to_bytes(), int(now * 1000.0), False)
        self.drop_value(owner, slot)
        self.shrink_if_sparse(owner)

    # ---- acknowledging

    def ack(self, subscriber: OwnerSubscriber, seq: i64, epoch: i64, now: float) -> None:
        """A reader has what it was given. It counts for the owner unless that was rewound since: also if the reader has
        left meanwhile [MQTT-3.10.4-3], or the value is gone. Nothing up to the first that is kept and not acknowledged
        is given again."""
        owner = subscriber.last_owner
        if owner is None:
            return
        if epoch == owner.epoch:
            if owner.is_unsaved:
                self.save_owner(owner)
            self.acked += 1
            owner.acked_at = int(now * 1000.0)
            current_subscriber = owner.subscriber
            if current_subscriber is not None and current_subscriber.in_flight:
                current_subscriber.in_flight.pop(int(seq), None)
            slot = owner.slot_after(owner.acked)
            if slot >= 0 and owner.seq(slot) == seq and not owner.acked_out_of_order:
                owner.acked = seq
                if owner.tombstones:
                    self._remove_tombstone(owner, slot)
            elif seq > owner.acked and owner.slot_of_sequence(seq) >= 0:
                if owner.acked_out_of_order is NO_ACKS:
                    owner.acked_out_of_order = set()
                owner.acked_out_of_order.add(int(seq))
            self._advance_acked(owner, subscriber.last_sent_seq)
            self._schedule_ack_note(owner)
        if owner.subscriber is not None:
            self.schedule_dispatch(owner.subscriber)
        else:
            owner.drop_order()

    def _schedule_ack_note(self, owner: Owner) -> None:
        if not owner.has_new_acks:
            owner.has_new_acks = True
            self._owners_with_acks.append(owner)
            self.frame_builder.pending_owner_acks = self

    def _advance_acked(self, owner: Owner, sent_to: i64) -> None:
        """Go as far as everything is acknowledged, or gone: what was out of turn is in turn when all before it is done.
        Behind the last that is kept, that is as far as values were `sent`."""
        acked = owner.acked
        slot = owner.slot_after(acked)
        while (
            slot >= 0
            and owner.acked_out_of_order
            and int(owner.seq(slot)) in owner.acked_out_of_order
        ):
            acked = owner.seq(slot)
            owner.acked_out_of_order.discard(int(acked))
            if owner.tombstones:
                self._remove_tombstone(owner, slot)
            slot = owner.slot_after(acked)
        if slot >= 0:
            sent_to = min(sent_to, owner.seq(slot) - 1)
        owner.acked = max(acked, sent_to)
        if owner.acked_out_of_order is not NO_ACKS and not owner.acked_out_of_order:
            owner.acked_out_of_order = NO_ACKS

    def _remove_tombstone(self, owner: Owner, slot: i64) -> None:
        """Its owner has heard of the end of a key, and of all before it."""
        if owner.is_tombstone(slot):
            self.drop_value(owner, slot)
            self.shrink_if_sparse(owner)

    def write_acks(self, now_ms: i64) -> None:
        """The frame is closed: how far each owner has come since the last one."""
        note = NoteWriter(OWNER_ACKED)
        for owner in self._owners_with_acks:
            owner.has_new_acks = False
            self.write_ack_state(note, owner)
        self._owners_with_acks = []
        self.frame_builder.add_note(note.to_bytes(), now_ms, False)

    # ---- what people ask for

    def seek(self, owner: Owner, after_seq: i64, now: float) -> None:
        """Go on behind a sequence, back to what is still kept or forward past what was never taken."""
        note = NoteWriter(OWNER_SEEK)
        note.write_int(owner.number)
        note.write_int(after_seq)
        if owner.has_new_acks:  # what was acknowledged before this is not to count behind it
            self.write_acks(int(now * 1000.0))
            self.frame_builder.pending_owner_acks = None
        self.frame_builder.add_note(note.to_bytes(), int(now * 1000.0), True)
        self.seek_after(owner, after_seq)
        owner.epoch += 1
        subscriber = owner.subscriber
        if subscriber is not None:
            subscriber.last_sent_seq = owner.acked
            subscriber.epoch = owner.epoch
            subscriber.in_flight.clear()
            self.schedule_dispatch(subscriber)

    def purge(self, owner: Owner, now: float) -> int:
        """Remove every value of an owner; how many there were."""
        count = int(owner.live_values)
        note = NoteWriter(OWNER_PURGED)
        note.write_int(owner.number)
        self.frame_builder.add_note(note.to_bytes(), int(now * 1000.0), True)
        self.remove_values(owner)
        return count

    def delete_owner(self, owner: Owner, now: float) -> None:
        """The owner itself, with all that is kept of it. Should it come back, its sequences go on behind these."""
        note = NoteWriter(OWNER_DELETED)
        note.write_int(owner.number)
        self.frame_builder.add_note(note.to_bytes(), int(now * 1000.0), True)
        if owner.subscriber is not None:
            self.unsubscribe(owner.subscriber)
        if owner.has_new_acks:
            self._owners_with_acks.remove(owner)
        owner.epoch += 1  # what is still said to it counts no more
        self.remove_owner(owner)

    # ---- retention

    def apply_retention(self, now: float) -> None:
        """Take out what is older than the retention, and owners of whom nothing has been left for as long."""
        self.sweep_due_at = 0.0
        if not self.owners:
            return
        self.sweep_due_at = now + self.rules.sweep_interval
        self.wants_compaction = 4 * (self.written - self._written_at_last_sweep) <= self.value_count
        self._written_at_last_sweep = self.written
        retention = self.rules.retention
        if retention > 0.0 and self.remove_older_than(int(now - retention)):
            note = NoteWriter(OWNERS_SWEPT)
            note.write_int(int(now - retention))
            self.frame_builder.add_note(note.to_bytes(), int(now * 1000.0), False)
        idle_before: i64 = int(now - (retention if retention > 0.0 else float(IDLE_OWNER_SECONDS)))
        for owner in list(self.owners.values()):
            if (
                owner.live_values == 0
                and owner.subscriber is None
                and owner.newest_removed_at < idle_before
                and owner.acked_at < idle_before * 1000
            ):
                self.delete_owner(owner, now)

    # ---- room on disk

    def rewrite_record(self, pid: i64, data: bytes, address: i64) -> bool:
        """Write the record of a value that still lives at `address` anew, so that its segment can go."""
        lookup = self.lookup
        location = lookup.find_value_of_number(pid - FIRST_OWNER_PID, read_i64_le(data, KEY_OFFSET))
        if location < 0 or lookup.address(location) != address:
            return False
        new_address = self.frame_builder.copy_owner_value(data)
        self.segments.drop(address, len(data))
        self.segments.add_last_value(new_address, len(data))
        lookup.set_address(location, new_address)
        if lookup.has_slow_path(location):
            subscriber = lookup.owners[location >> SLOT_BITS].subscriber
            if subscriber is not None:
                self._await_commit(subscriber)
        return True

    def drop_damaged(self, record: Record, now: float) -> str:
        """What compaction cannot read is given up, in words."""
        location = self.find_record(record)
        if location < 0:
            return ""
        owner = self.lookup.owners[location >> SLOT_BITS]
        self._remove_value(owner, location & SLOT_MASK, now)
        return f"value {record.seq} of $ECQ/{owner.client} is damaged on disk: lost"

    def finish_recovery(self, now: float) -> None:
        """All is read."""
        if self.owners:
            self.sweep_due_at = now + self.rules.sweep_interval


def decode_client(client: bytes) -> str:
    return client.decode("utf-8", "surrogateescape")


def read_expiry(message: Message) -> i64:
    """When a value ends by its writer's wish, in seconds since 1970; 0: never. Its header has no room for it."""
    if message.headers:
        for name, value in decode_headers(message.headers):
            if name == "expires":
                return int(value)
    return 0
