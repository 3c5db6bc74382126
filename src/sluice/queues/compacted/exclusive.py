"""Exclusive compacted queues: one owner each, the last value of each key, and the owner's position.

Values are records of the same log, in the same frames, with the same durability as all other
messages. Each owner numbers its values, and a value replaces the older value of its key when it is
written: one update in, at most one copy stored. There are no groups, leases and retries, and none
of their cost: an owner is some rows of integers (`owner.py`), and a subscriber while it is
subscribed.

    publish ─▶ frame_builder ─▶ frame … store … on_frame_committed ─▶ dispatch
            ─▶ OwnerSubscriber.deliver ─▶ ack ─▶ frame_builder (one note per frame)

A tombstone (an empty payload) replaces the value of its key like any value, so that the owner
receives the end of the key; once acknowledged it is deleted. All other values stay until they are
replaced, purged, or older than the retention: so the owner can be rewound.

The state and its recovery are in `owners`; this module has the commands, which write notes.
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i64_le
from mypy_extensions import i64

from sluice.errors import TooManyKeys, TooManyOwners, ValueTooLarge
from sluice.message import FIXED_FIELDS_BYTES, TOMBSTONE, Message, decode_headers, encode_header
from sluice.queues.bodies import decode_message
from sluice.queues.compacted.owner import NO_ACKS, SLOT_BITS, SLOT_MASK, Owner
from sluice.queues.compacted.owner_subscriber import OwnerSubscriber
from sluice.queues.compacted.owner_table import (
    ENTRY_WORDS,
    FLAGS_WORD,
    HAS_SLOW_PATH,
    NEXT_SEQ_WORD,
    NUMBER_SHIFT,
    hash_client,
)
from sluice.queues.compacted.owners import Owners
from sluice.queues.log import FIRST_OWNER_PID, FrameBuilder, NoteWriter, SegmentUsage, notes
from sluice.queues.model import hash_key
from sluice.queues.ports import Codec
from sluice.store.protocol import HEADER_BYTES, KEY_OFFSET, Record

MAX_READ_VALUES: Final = 64  # values per read
MAX_READ_BYTES: Final = 262_144
MAX_OWNERS: Final = 1 << 24  # limited by the bits of a lookup entry
# An owner without values is deleted after this time, or after the retention.
IDLE_OWNER_SECONDS: Final = 7 * 86_400


class ExclusiveRules:
    """The rules of all exclusive queues."""

    def __init__(self) -> None:
        self.retention: float = 604_800.0  # seconds; 0.0: forever
        self.sweep_interval: float = 60.0
        self.max_message_size: i64 = 1_048_576
        self.max_keys: i64 = 100_000  # of one owner
        self.sync: bool = True
        self.cache_bytes: i64 = 4_194_304  # bodies in memory for subscribed owners


class OwnerRead:
    """A read of bodies for one subscriber."""

    def __init__(self, subscriber: OwnerSubscriber, owner: Owner) -> None:
        self.subscriber: OwnerSubscriber = subscriber
        self.owner: Owner = owner
        self.read_number: i64 = subscriber.read_count  # the value of `read_count` for this read
        self.sequences: list[int] = []
        self.addresses: list[int] = []


class ExclusiveQueues(Owners):
    """Commands on exclusive queues: write, read, acknowledge, apply retention."""

    def __init__(self, frame_builder: FrameBuilder, segments: SegmentUsage) -> None:
        super().__init__(frame_builder, segments)
        self.rules: ExclusiveRules = ExclusiveRules()
        self.reads: list[OwnerRead] = []
        self.scheduled_subscribers: list[OwnerSubscriber] = []
        # When the next sweep is due; 0.0: there is nothing to sweep.
        self.sweep_due_at: float = 0.0
        # A sweep is over and little is written: a good time to compact segments.
        self.wants_compaction: bool = False
        # Records before this address are durable and may be delivered.
        self.durable_before: i64 = 0
        self.written: i64 = 0  # counters, since the start
        self.delivered: i64 = 0
        self.acked: i64 = 0
        self._written_at_last_sweep: i64 = 0
        self._owners_with_acks: list[Owner] = []
        # Subscribers with values in the open frame.
        self._awaiting_commit: list[OwnerSubscriber] = []
        # Subscribers with values in the frame in commit.
        self._awaiting_sent_frame: list[OwnerSubscriber] = []

    # ---- writing

    def publish(self, client: str, message: Message, now: float) -> Owner:
        """Add a value to the open frame; it replaces the older value of its key."""
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
        key_hash: i64,
        key: bytes,
        props: bytes,
        payload: bytes,
        expires: i64,
        now: float,
    ) -> i64:
        """Write a value; return its location.

        `found` is the location of the key's value if the caller has looked it up, else -1; then the
        client's name is not used. No message object is created unless the owner has a subscriber.
        """
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
            found = self.lookup.find_value(client_hash, key_hash)
        slot: i64 = -1
        owner_index: i64 = 0
        if found >= 0:
            slot = found & SLOT_MASK
            owner_index = found >> SLOT_BITS
        else:
            owner_index = self._owner_for_new_key(decode_client(client), now).owner_index
        now_ms: i64 = int(now * 1000.0)
        headers = encode_header("expires", str(expires)) if expires else b""
        words = self.table.words
        entry_start = owner_index * ENTRY_WORDS
        seq = words[entry_start + NEXT_SEQ_WORD]
        flags = words[entry_start + FLAGS_WORD]
        record_size: i64 = (
            HEADER_BYTES + FIXED_FIELDS_BYTES + len(key) + len(props) + len(headers) + size
        )
        address = self.frame_builder.add_owner_value(
            FIRST_OWNER_PID + (flags >> NUMBER_SHIFT),
            seq,
            TOMBSTONE if size == 0 else 0,
            key_hash,
            now_ms,
            record_size,
            key,
            props,
            headers,
            payload,
            rules.sync,
        )
        slot = self.put_value(
            owner_index, slot, seq, address, key_hash, now_ms // 1000, record_size, size == 0
        )
        self.written += 1
        if self.sweep_due_at == 0.0:
            self.sweep_due_at = now + rules.sweep_interval
        if flags & HAS_SLOW_PATH:
            subscriber = self.lookup.owners[owner_index].subscriber
            if subscriber is not None:
                message = Message(payload, props, key)
                message.expires = expires
                message.headers = headers
                message.enqueued_at_ms = now_ms
                self._cache_body(subscriber, seq, message)
        return owner_index << SLOT_BITS | slot

    def _cache_body(self, subscriber: OwnerSubscriber, seq: i64, message: Message) -> None:
        """Cache a value for a subscriber if there is space, and if the subscriber can take it soon.

        Bodies for absent or slow subscribers would fill the cache for all.
        """
        cost = message.memory_bytes()
        if self.cached_bytes + cost <= self.rules.cache_bytes and subscriber.capacity() > len(
            subscriber.pending_bodies
        ):
            message.cached_bytes = cost
            self.cached_bytes += cost
            subscriber.pending_bodies[int(seq)] = message
        self._await_commit(subscriber)

    def _owner_for_new_key(self, client: str, now: float) -> Owner:
        """Return the owner of a new key; create it if needed."""
        owner = self.owners.get(client)
        if owner is None:
            return self.create_owner(client, now)
        if owner.live_values >= self.rules.max_keys:
            raise TooManyKeys(client, int(owner.live_values))
        return owner

    def create_owner(self, client: str, now: float) -> Owner:
        """Create the queue of an owner."""
        if len(self.owners) >= MAX_OWNERS:
            raise TooManyOwners(len(self.owners))
        note = NoteWriter(notes.OWNER_CREATED)
        note.write_int(self.next_number)
        note.write_text(client)
        note.write_int(self.first_seq)
        self.frame_builder.add_note(note, int(now * 1000.0), False)
        owner = self.add_owner(client, self.next_number, self.first_seq)
        owner.newest_removed_at = int(now)
        return owner

    # ---- reading

    def subscribe(self, subscriber: OwnerSubscriber, client: str, now: float) -> Owner:
        """Subscribe an owner; delivery continues after its last acknowledged value."""
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
        """Drop the bodies cached for a subscriber that takes nothing for a while."""
        for message in subscriber.pending_bodies.values():
            self.cached_bytes -= message.cached_bytes
        subscriber.pending_bodies.clear()

    def schedule_dispatch(self, subscriber: OwnerSubscriber) -> None:
        """Dispatch to a subscriber that may have capacity, at the end of the turn."""
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
        """Deliver values in the order of sequences, as far as the subscriber has capacity.

        Expired values are removed instead.
        """
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
        """Move the waiting subscribers from the open frame to the frame in commit."""
        for subscriber in self._awaiting_commit:
            subscriber.has_values_in_open_frame = False
        self._awaiting_sent_frame = self._awaiting_commit
        self._awaiting_commit = []

    def on_frame_committed(self, open_frame_address: i64, now: float) -> None:
        """Deliver the values of committed frames: all before the open frame."""
        self.durable_before = open_frame_address
        if self._awaiting_sent_frame:
            subscribers = self._awaiting_sent_frame
            self._awaiting_sent_frame = []
            for subscriber in subscribers:
                self.dispatch(subscriber, now)

    def restart_stalled_read(self, subscriber: OwnerSubscriber) -> bool:
        """Restart delivery to a subscriber that should have received values; called periodically.

        A read that was already in progress at the last call is given up and repeated; a late answer
        to it does no harm. Return whether there was such a read.
        """
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

    # ---- bodies that are not cached

    def _request_bodies(
        self, subscriber: OwnerSubscriber, owner: Owner, slot: i64, capacity: i64
    ) -> None:
        subscriber.read_count += 1
        read = OwnerRead(subscriber, owner)
        size: i64 = 0
        remaining: i64 = min(capacity, MAX_READ_VALUES)
        while (
            slot >= 0
            and remaining > 0
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
                remaining -= 1
            slot = owner.slot_after(seq)
        subscriber.is_reading = True
        self.reads.append(read)

    def on_read_done(
        self, read: OwnerRead, records: list[bytes | None], now: float, codec: Codec
    ) -> list[str]:
        """Process the result of a read; return a warning for each lost value."""
        subscriber = read.subscriber
        owner = read.owner
        if read.read_number == subscriber.read_count:
            subscriber.is_reading = False
        lost: list[str] = []
        for seq, address, data in zip(read.sequences, read.addresses, records, strict=True):
            slot = owner.slot_of_sequence(seq)
            if slot < 0:
                continue
            message = None if data is None else decode_message(data, codec)
            if message is None:
                if owner.address(slot) == address:
                    lost.append(
                        f"value lost: damaged on disk ($ECQ/{owner.client}, sequence {seq})"
                    )
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
        """Remove a value whose expiry a subscriber of the body has found."""
        slot = owner.slot_of_sequence(seq) if self.owners.get(owner.client) is owner else -1
        if slot >= 0:
            self._remove_value(owner, slot, now)

    def _remove_value(self, owner: Owner, slot: i64, now: float) -> None:
        note = NoteWriter(notes.OWNER_VALUE_REMOVED)
        note.write_int(owner.number)
        note.write_int(owner.seq(slot))
        note.write_int(owner.key_hash(slot))
        self.frame_builder.add_note(note, int(now * 1000.0), False)
        self.drop_value(owner, slot)
        self.shrink_if_sparse(owner)

    # ---- acknowledging

    def ack(self, subscriber: OwnerSubscriber, seq: i64, epoch: i64, now: float) -> None:
        """Acknowledge a value of a subscriber.

        It counts for the owner unless the owner was rewound since, even if the subscriber has left
        [MQTT-3.10.4-3] or the value is deleted. Values before the first stored unacknowledged one
        are not delivered again.
        """
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
            if not self._owners_with_acks:
                self.frame_builder.write_at_close(self)
            self._owners_with_acks.append(owner)

    def _advance_acked(self, owner: Owner, sent_to: i64) -> None:
        """Advance the owner's position over acknowledged and deleted values.

        Values that were acknowledged out of order count when all before them are. If no later value
        is stored, the position advances to `sent_to`.
        """
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
        """Delete a tombstone that the owner has acknowledged with all values before it."""
        if owner.is_tombstone(slot):
            self.drop_value(owner, slot)
            self.shrink_if_sparse(owner)

    def write_notes(self, frame_builder: FrameBuilder, now_ms: i64) -> None:
        """Write the new positions of owners as a note."""
        if not self._owners_with_acks:
            return
        note = NoteWriter(notes.OWNER_ACKED)
        for owner in self._owners_with_acks:
            owner.has_new_acks = False
            self.write_ack_state(note, owner)
        self._owners_with_acks = []
        frame_builder.add_note(note, now_ms, False)

    # ---- administration

    def seek(self, owner: Owner, after_seq: i64, now: float) -> None:
        """Set the position of an owner: back to stored values, or forward past unread ones."""
        note = NoteWriter(notes.OWNER_SEEK)
        note.write_int(owner.number)
        note.write_int(after_seq)
        # Earlier acknowledgements must not apply after the seek.
        if owner.has_new_acks:
            self.write_notes(self.frame_builder, int(now * 1000.0))
        self.frame_builder.add_note(note, int(now * 1000.0), True)
        self.seek_after(owner, after_seq)
        owner.epoch += 1
        subscriber = owner.subscriber
        if subscriber is not None:
            subscriber.last_sent_seq = owner.acked
            subscriber.epoch = owner.epoch
            subscriber.in_flight.clear()
            self.schedule_dispatch(subscriber)

    def purge(self, owner: Owner, now: float) -> int:
        """Remove all values of an owner; return their number."""
        count = int(owner.live_values)
        note = NoteWriter(notes.OWNER_PURGED)
        note.write_int(owner.number)
        self.frame_builder.add_note(note, int(now * 1000.0), True)
        self.remove_values(owner)
        return count

    def delete_owner(self, owner: Owner, now: float) -> None:
        """Delete an owner with its values. If it returns, its sequences continue after these."""
        note = NoteWriter(notes.OWNER_DELETED)
        note.write_int(owner.number)
        self.frame_builder.add_note(note, int(now * 1000.0), True)
        if owner.subscriber is not None:
            self.unsubscribe(owner.subscriber)
        if owner.has_new_acks:
            self._owners_with_acks.remove(owner)
        owner.epoch += 1  # later acknowledgements no longer count
        self.remove_owner(owner)

    # ---- retention

    def apply_retention(self, now: float) -> None:
        """Remove values older than the retention, and owners that have been empty for as long."""
        self.sweep_due_at = 0.0
        if not self.owners:
            return
        self.sweep_due_at = now + self.rules.sweep_interval
        self.wants_compaction = 4 * (self.written - self._written_at_last_sweep) <= self.value_count
        self._written_at_last_sweep = self.written
        retention = self.rules.retention
        if retention > 0.0 and self.remove_older_than(int(now - retention)):
            note = NoteWriter(notes.OWNERS_SWEPT)
            note.write_int(int(now - retention))
            self.frame_builder.add_note(note, int(now * 1000.0), False)
        idle_before: i64 = int(now - (retention if retention > 0.0 else float(IDLE_OWNER_SECONDS)))
        for owner in list(self.owners.values()):
            if (
                owner.live_values == 0
                and owner.subscriber is None
                and owner.newest_removed_at < idle_before
                and owner.acked_at < idle_before * 1000
            ):
                self.delete_owner(owner, now)

    # ---- compaction

    def rewrite_record(self, pid: i64, data: bytes, address: i64) -> bool:
        """Copy the record of a value that is live at `address`, to free its segment."""
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
        """Remove a value that compaction cannot read; return a warning."""
        location = self.find_record(record)
        if location < 0:
            return ""
        owner = self.lookup.owners[location >> SLOT_BITS]
        self._remove_value(owner, location & SLOT_MASK, now)
        return f"value lost: damaged on disk ($ECQ/{owner.client}, sequence {record.seq})"

    def finish_recovery(self, now: float) -> None:
        """Schedule the first sweep after all records were loaded."""
        if self.owners:
            self.sweep_due_at = now + self.rules.sweep_interval


def decode_client(client: bytes) -> str:
    return client.decode("utf-8", "surrogateescape")


def read_expiry(message: Message) -> i64:
    """Return the expiry that the publisher set, in seconds since 1970; 0: never.

    It is in the message headers, because the record header has no field for it.
    """
    if message.headers:
        for name, value in decode_headers(message.headers):
            if name == "expires":
                return int(value)
    return 0
