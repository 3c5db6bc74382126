"""All owners of exclusive queues: their values in the log, and their recovery.

These functions run twice: when a command is carried out, and when recovery replays its notes. So
this module writes no notes; the subclass in `exclusive` does. A value that replaces another needs
no note: replaying it has the same effect. The snapshot has the stored sequences; the index rows of
the store have their addresses and key hashes.

Writing a snapshot of millions of values takes too long for one turn. So it is written some owners
at a time while the broker works, and still shows the state when it began: an owner that is not
written yet is written before it changes (`save_owner`).
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i64_le
from librt.vecs import vec
from mypy_extensions import i64

from sluice.message import TOMBSTONE
from sluice.queues.compacted.owner import NO_ACKS, Owner
from sluice.queues.compacted.owner_lookup import OwnerLookup
from sluice.queues.compacted.owner_subscriber import OwnerSubscriber
from sluice.queues.compacted.owner_table import (
    CHUNK_SHIFT,
    ENTRY_WORDS,
    FLAGS_WORD,
    HAS_SLOW_PATH,
    NEXT_SEQ_WORD,
    OFFSET_MASK,
    ROWS_WORD,
    UNSAVED,
    OwnerTable,
    zeros,
)
from sluice.queues.compacted.slab import Slab
from sluice.queues.compacted.value_rows import ADDRESS_WORD, METADATA_WORD, ROW_WORDS
from sluice.queues.log import (
    FIRST_OWNER_PID,
    FIRST_STATE_PID,
    FrameBuilder,
    NoteReader,
    NoteSource,
    NoteWriter,
    SegmentUsage,
    notes,
)
from sluice.queues.model import SEQUENCE_BITS
from sluice.store.protocol import ROW_BYTES, Record, read_row_address, read_row_pid

WARM_BATCH_ROWS: Final = 64  # index rows that are loaded together


class Owners(NoteSource):
    def __init__(self, frame_builder: FrameBuilder, segments: SegmentUsage) -> None:
        self.frame_builder: FrameBuilder = frame_builder
        self.segments: SegmentUsage = segments
        self._slab: Slab = Slab()
        self.table: OwnerTable = self._slab.table
        self.lookup: OwnerLookup = OwnerLookup(self._slab)
        self._no_owner: Owner = Owner("", 0, 1, Slab())
        self.owners: dict[str, Owner] = {}
        self.next_number: i64 = 1
        # First sequence of a new owner: above those of all deleted owners.
        self.first_seq: i64 = 1
        self.value_count: i64 = 0  # of all owners
        self.replaced: i64 = 0  # counters, since the start
        self.removed_by_age: i64 = 0  # removed by sweeps
        self.cached_bytes: i64 = 0  # bytes of bodies cached for subscribers
        self.is_saving: bool = False  # a snapshot is being written
        # Owners to write, unless a change has caused it already.
        self._unsaved: list[Owner] = []
        self._save_position: i64 = 0
        self._out: NoteWriter | None = None
        # Owners and keys for `warm_rows`.
        self._warm_owner_indexes: vec[i64] = zeros(WARM_BATCH_ROWS)
        self._warm_key_hashes: vec[i64] = zeros(WARM_BATCH_ROWS)

    # ---- adding and removing owners and values

    def add_owner(self, client: str, number: i64, first_seq: i64) -> Owner:
        owner = Owner(client, number, first_seq, self._slab)
        self.owners[client] = owner
        self.lookup.admit(owner)
        if number >= self.next_number:
            self.next_number = number + 1
        return owner

    def find_slot(self, owner: Owner, key_hash: i64) -> i64:
        """Return the slot of a key; -1 if there is none."""
        return owner.find_slot(key_hash)

    def put_value(
        self,
        owner_index: i64,
        slot: i64,
        seq: i64,
        address: i64,
        key_hash: i64,
        seconds: i64,
        size: i64,
        is_tombstone: bool,
    ) -> i64:
        """Store a value; `slot` has the value of the same key, -1 if there is none.

        Return the slot of the new value.
        """
        segments = self.segments
        words = self.table.words
        entry_start = owner_index * ENTRY_WORDS
        if (
            slot >= 0
            and not is_tombstone
            and not words[entry_start + FLAGS_WORD] & (HAS_SLOW_PATH | UNSAVED)
        ):
            base = words[entry_start + ROWS_WORD]
            rows = self._slab.chunks[base >> CHUNK_SHIFT].rows
            at = (base & OFFSET_MASK) + slot * ROW_WORDS
            metadata = rows[at + METADATA_WORD]
            # Neither value is a tombstone: only the row and the table entry change.
            if not metadata & 1:
                segments.drop(rows[at + ADDRESS_WORD], (metadata >> 1) & 0x7FFF_FFFF)
                rows[at] = seq
                rows[at + ADDRESS_WORD] = address
                rows[at + METADATA_WORD] = seconds << 32 | size << 1
                words[entry_start + NEXT_SEQ_WORD] = seq + 1
                self.replaced += 1
                segments.add_last_value(address, size)
                return slot
        owner = self.lookup.owners[owner_index]
        if owner.is_unsaved:
            self.save_owner(owner)
        if slot >= 0:
            segments.drop(owner.address(slot), owner.size(slot))
            if owner.subscriber is not None or owner.acked_out_of_order:
                self._forget_delivery(owner, owner.seq(slot))
            owner.replace(slot, seq, address, seconds, size, is_tombstone)
            self.replaced += 1
        else:
            slot = owner.add(seq, address, key_hash, seconds, size, is_tombstone)
            self.value_count += 1
        segments.add_last_value(address, size)
        return slot

    def drop_value(self, owner: Owner, slot: i64) -> None:
        """Remove a value, even if it was delivered."""
        if owner.is_unsaved:
            self.save_owner(owner)
        self.segments.drop(owner.address(slot), owner.size(slot))
        if owner.subscriber is not None or owner.acked_out_of_order:
            self._forget_delivery(owner, owner.seq(slot))
        owner.remove(slot)
        self.value_count -= 1

    def _forget_delivery(self, owner: Owner, seq: i64) -> None:
        """Forget the delivery of a removed value."""
        if owner.acked_out_of_order:
            owner.acked_out_of_order.discard(int(seq))
        subscriber = owner.subscriber
        if subscriber is not None:
            self.drop_cached_body(subscriber, seq)
            if subscriber.in_flight:
                subscriber.in_flight.pop(int(seq), None)

    def shrink_if_sparse(self, owner: Owner) -> None:
        """Free rows after values were dropped, if many are free. Slots change."""
        if owner.is_sparse():
            owner.shrink()

    def drop_cached_body(self, subscriber: OwnerSubscriber, seq: i64) -> None:
        message = (
            subscriber.pending_bodies.pop(int(seq), None) if subscriber.pending_bodies else None
        )
        if message is not None:
            self.cached_bytes -= message.cached_bytes

    def remove_values(self, owner: Owner) -> None:
        slot: i64 = 0
        while slot < owner.row_count():
            if owner.seq(slot):
                self.drop_value(owner, slot)
            slot += 1
        self.shrink_if_sparse(owner)

    def remove_owner(self, owner: Owner) -> None:
        """Remove an owner with its values."""
        if owner.is_unsaved:
            self.save_owner(owner)
        self.remove_values(owner)
        self.lookup.remove(owner)
        self.first_seq = max(self.first_seq, owner.next_seq)
        self.owners.pop(owner.client, None)

    def remove_older_than(self, seconds: i64) -> bool:
        """Remove older values. An owner is scanned only if it may have such a value."""
        found = False
        for owner in self.owners.values():
            if owner.live_values == 0 or owner.oldest_at >= seconds:
                continue
            oldest: i64 = 0x7FFF_FFFF
            slot: i64 = 0
            while slot < owner.row_count():
                if owner.seq(slot):
                    time = owner.time(slot)
                    if time < seconds:
                        self.drop_value(owner, slot)
                        self.removed_by_age += 1
                        found = True
                    elif time < oldest:
                        oldest = time
                slot += 1
            owner.oldest_at = oldest
            self.shrink_if_sparse(owner)
        return found

    # ---- positions of owners

    def seek_after(self, owner: Owner, after_seq: i64) -> None:
        if owner.is_unsaved:
            self.save_owner(owner)
        owner.acked = max(0, min(after_seq, owner.next_seq - 1))
        owner.acked_out_of_order = NO_ACKS
        if owner.tombstones:
            self.remove_acked_tombstones(owner)

    def remove_acked_tombstones(self, owner: Owner) -> None:
        """Remove the tombstones that the owner has acknowledged."""
        slot: i64 = 0
        while slot < owner.row_count() and owner.tombstones:
            if owner.is_tombstone(slot) and 0 < owner.seq(slot) <= owner.acked:
                self.drop_value(owner, slot)
            slot += 1
        self.shrink_if_sparse(owner)

    def write_ack_state(self, note: NoteWriter, owner: Owner) -> None:
        note.write_int(owner.number)
        note.write_int(owner.acked)
        note.write_int(owner.acked_at)
        note.write_int(len(owner.acked_out_of_order))
        for seq in owner.acked_out_of_order:
            note.write_int(seq)

    def read_ack_state(self, note: NoteReader, owner: Owner) -> None:
        owner.acked = note.read_int()
        owner.acked_at = note.read_int()
        count = note.read_int()
        owner.acked_out_of_order = (
            {int(note.read_int()) for _ in range(count)} if count else NO_ACKS
        )

    # ---- snapshot

    def begin_snapshot(self, out: NoteWriter) -> None:
        """Begin a snapshot at the end of `out`; `save_some_owners` writes it."""
        self.is_saving = True
        self.table.mark_all_unsaved()
        self._unsaved = list(self.owners.values())
        self._save_position = 0
        self._out = out
        out.write_int(self.next_number)
        out.write_int(self.first_seq)
        out.write_int(len(self.owners))

    def save_some_owners(self, max_values: i64) -> bool:
        """Write owners with about `max_values` values; return whether all are written."""
        remaining = max_values
        size: i64 = len(self._unsaved)
        while self._save_position < size and remaining > 0:
            owner = self._unsaved[self._save_position]
            self._save_position += 1
            if owner.is_unsaved:
                self.save_owner(owner)
                remaining -= 8 + owner.row_count()
        if self._save_position < size:
            return False
        self.is_saving = False
        self._unsaved = []
        self._out = None
        return True

    def save_owner(self, owner: Owner) -> None:
        """Write an owner into the snapshot, before it changes."""
        out = self._out
        if out is not None:
            owner.set_saved()
            out.write_text(owner.client)
            out.write_int(owner.next_seq)
            out.write_int(owner.newest_removed_at)
            self.write_ack_state(out, owner)
            out.write_bytes(owner.encode_sequences())

    def load_snapshot(self, note: NoteReader) -> None:
        self.next_number = note.read_int()
        self.first_seq = note.read_int()
        for _ in range(note.read_int()):
            client = note.read_text()
            next_seq = note.read_count(1 << SEQUENCE_BITS)
            newest_removed_at = note.read_int()
            owner = self.add_owner(client, note.read_int(), next_seq)
            owner.newest_removed_at = newest_removed_at
            self.read_ack_state(note, owner)
            owner.decode_sequences(note.read_bytes())

    def load_row(self, record: Record) -> None:
        """Load a value from before the snapshot; a record that was moved comes again later."""
        owner = self.lookup.owner_of_number(record.pid - FIRST_OWNER_PID)
        slot: i64 = -1 if owner is None else owner.slot_of_sequence(record.seq)
        if owner is not None and slot >= 0:
            owner.restore_row(
                slot,
                record.address,
                key_hash_of_record(record),
                record.time // 1000,
                record.size,
                record.flags & TOMBSTONE != 0,
            )

    def finish_rows(self) -> list[str]:
        """Count the values after all index rows were loaded; return a warning for missing ones."""
        lost: list[str] = []
        for owner in self.owners.values():
            missing = owner.finish_rows()
            self.value_count += owner.live_values
            if missing:
                lost.append(f"values missing in the store: {missing} ($ECQ/{owner.client})")
            slot: i64 = 0
            while slot < owner.row_count():
                if owner.seq(slot):
                    self.segments.add_last_value(owner.address(slot), owner.size(slot))
                slot += 1
        return lost

    # ---- records after the snapshot

    def load_record(self, record: Record) -> None:
        """Load a value from after the snapshot, as published or as copied by compaction."""
        owner = self.lookup.owner_of_number(record.pid - FIRST_OWNER_PID)
        if owner is None:
            return
        if record.seq >= 1 << SEQUENCE_BITS:
            raise ValueError(f"value {record.seq} follows value {owner.next_seq - 1}")
        if record.seq >= owner.next_seq:
            key_hash = key_hash_of_record(record)
            self.put_value(
                owner.owner_index,
                self.find_slot(owner, key_hash),
                record.seq,
                record.address,
                key_hash,
                record.time // 1000,
                record.size,
                record.flags & TOMBSTONE != 0,
            )
            return
        location = self.find_record(record)
        if location >= 0:
            self.segments.drop(self.lookup.address(location), record.size)
            self.segments.add_last_value(record.address, record.size)
            self.lookup.set_address(location, record.address)

    def apply_note(self, note: NoteReader) -> None:
        kind = note.kind
        if kind == notes.OWNERS_SWEPT:
            self.remove_older_than(note.read_int())
        elif kind == notes.OWNER_ACKED:
            while note.has_more():
                found = self.lookup.owner_of_number(note.read_int())
                # For an unknown owner, only skip the fields.
                owner = found if found is not None else self._no_owner
                self.read_ack_state(note, owner)
                if owner.tombstones:
                    self.remove_acked_tombstones(owner)
        elif kind == notes.OWNER_CREATED:
            number = note.read_int()
            client = note.read_text()
            self.add_owner(client, number, note.read_count(1 << SEQUENCE_BITS))
        else:
            found = self.lookup.owner_of_number(note.read_int())
            if found is None:
                return
            if kind == notes.OWNER_SEEK:
                self.seek_after(found, note.read_int())
            elif kind == notes.OWNER_PURGED:
                self.remove_values(found)
            elif kind == notes.OWNER_VALUE_REMOVED:
                seq = note.read_int()
                slot = (
                    self.find_slot(found, note.read_int())
                    if note.has_more()
                    else found.slot_of_sequence(seq)
                )
                if slot >= 0 and found.seq(slot) == seq:
                    self.drop_value(found, slot)
                    self.shrink_if_sparse(found)
            elif kind == notes.OWNER_DELETED:
                self.remove_owner(found)

    def find_record(self, record: Record) -> i64:
        """Return the location of a record's value; -1 if it is no longer stored."""
        location = self.lookup.find_value_of_number(
            record.pid - FIRST_OWNER_PID, key_hash_of_record(record)
        )
        return location if location >= 0 and self.lookup.seq(location) == record.seq else -1

    def is_live(self, record: Record) -> bool:
        """Return whether an index row refers to a live value."""
        location = self.find_record(record)
        return location >= 0 and self.lookup.address(location) == record.address

    def is_row_live(self, rows: bytes, at: i64) -> bool:
        """Return whether an encoded index row refers to a live value."""
        lookup = self.lookup
        location = lookup.find_value_of_number(
            read_row_pid(rows, at) - FIRST_OWNER_PID, key_hash_of_row(rows, at)
        )
        return location >= 0 and lookup.address(location) == read_row_address(rows, at)

    def warm_rows(self, rows: bytes, at: i64) -> i64:
        """Load the memory that the next index rows need into the CPU cache; return their end.

        A segment has hundreds of thousands of rows.
        """
        lookup = self.lookup
        end = min(at + WARM_BATCH_ROWS * ROW_BYTES, len(rows))
        size: i64 = 0
        while at < end:
            pid = read_row_pid(rows, at)
            if FIRST_OWNER_PID <= pid < FIRST_STATE_PID:
                self._warm_owner_indexes[size] = lookup.find_owner_number(pid - FIRST_OWNER_PID)
                self._warm_key_hashes[size] = key_hash_of_row(rows, at)
                size += 1
            at += ROW_BYTES
        if size > 1:
            lookup.warm_rows(self._warm_owner_indexes, self._warm_key_hashes, size)
        return end


def key_hash_of_row(rows: bytes, at: i64) -> i64:
    """Return the key hash in an index row."""
    return read_i64_le(rows, at + 24)


def key_hash_of_record(record: Record) -> i64:
    """Return the key hash in the header of a record: see `FrameBuilder.add_owner_value`."""
    high: i64 = record.expires if record.expires < 0x8000_0000 else record.expires - 0x1_0000_0000
    return high << 32 | record.key_hash
