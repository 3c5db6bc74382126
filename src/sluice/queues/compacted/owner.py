"""The queue of one owner: the location of the last value of each key.

There may be a hundred thousand owners with a hundred keys each. So a value is a row of four native
integers, and the only Python object of an owner is the owner itself. Consecutive writes go to
different owners, and each access to uncached memory costs more than a hundred comparisons. So a
write touches three locations: the table that finds the owner of a client (`owner_lookup`), the
owner's entry (`owner_table`), and the row (`value_rows`), which the new value takes over from the
old one. The owner object is used only if the flags of its entry say so: it has a subscriber, has
acknowledged values out of order, or has an order.

Rows are therefore unordered. Delivery needs the order of sequences: it is built on demand, grows
with writes while there is a subscriber, and is dropped with the first write without one. The order
may contain deleted values: the sequence of the row tells.

A key is identified by 64 bits of BLAKE2b. The hash is also in the header of the record, so that
recovery reads no bodies (`last_values.hash_key`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter
from librt.vecs import append, vec
from mypy_extensions import i64

from sluice.queues.compacted.owner_table import (
    CHUNK_SHIFT,
    ENTRY_WORDS,
    FLAGS_WORD,
    HAS_SLOW_PATH,
    NEXT_SEQ_WORD,
    NUMBER_SHIFT,
    ROW_BITS_SHIFT,
    ROWS_WORD,
    UNSAVED,
    OwnerTable,
    hash_client,
)
from sluice.queues.compacted.slab import EMPTY_CHUNK, LEADING_WORDS, Chunk, Slab
from sluice.queues.compacted.value_rows import (
    ADDRESS_WORD,
    KEY_HASH_WORD,
    METADATA_WORD,
    ROW_WORDS,
    find_free_row,
    find_row,
)
from sluice.queues.model import NO_ADDRESS

if TYPE_CHECKING:
    from sluice.queues.compacted.owner_subscriber import OwnerSubscriber

# Bits of a slot: half a million keys of one owner, and free rows.
SLOT_BITS: Final = 20
SLOT_MASK: Final = 0xF_FFFF
# Outdated entries that an order may contain.
MAX_STALE_ORDER_ENTRIES: Final = 8
MIN_ROW_BITS: Final = 2  # as a power of two
NO_ACKS: Final[set[int]] = set()  # shared empty set; never modified


class Owner:
    def __init__(self, client: str, number: i64, first_seq: i64, slab: Slab) -> None:
        self.table: OwnerTable = slab.table
        self.owner_index: i64 = self.table.allocate()  # index in the table of owners
        self.chunk: Chunk = EMPTY_CHUNK  # contains its rows
        self.rows_start: i64 = 0  # the word where they start
        self._subscriber: OwnerSubscriber | None = None
        self._acked_out_of_order: set[int] = NO_ACKS  # acknowledged above `acked`
        self.is_ordered: bool = False
        self.number: i64 = number
        # When the newest removed value was written, or when the owner was created; seconds since
        # 1970.
        self.newest_removed_at: i64 = 0
        self.live_values: i64 = 0
        self.tombstones: i64 = 0  # among the live values
        self.oldest_at: i64 = 0  # lower bound of the values' times, in seconds since 1970
        self.acked: i64 = first_seq - 1  # all values up to here are acknowledged or deleted
        self.acked_at: i64 = 0  # time of the last ack, in milliseconds since 1970; 0: never
        self.epoch: i64 = 0  # number of rewinds since the start
        self.has_new_acks: bool = False  # since the last frame
        self.client: str = client
        self._slab: Slab = slab
        self._row_bits: i64 = -1  # allocated rows, as a power of two; -1: none
        self._used_rows: i64 = 0  # rows that have or had a value
        self._order: vec[i64] = vec[i64]()  # pairs of sequence and slot, in order
        words = self.table.words
        words[self.owner_index * ENTRY_WORDS] = hash_client(
            client.encode("utf-8", "surrogateescape")
        )
        words[self.owner_index * ENTRY_WORDS + NEXT_SEQ_WORD] = first_seq
        words[self.owner_index * ENTRY_WORDS + ROWS_WORD] = 0
        words[self.owner_index * ENTRY_WORDS + FLAGS_WORD] = 0
        self._update_slow_path_flag()

    # ---- its entry in the table, for writes

    @property
    def client_hash(self) -> i64:
        """Return the hash of the client's name, which is valid in this process."""
        return self.table.words[self.owner_index * ENTRY_WORDS]

    @property
    def next_seq(self) -> i64:
        """Return the sequence of the next value."""
        return self.table.words[self.owner_index * ENTRY_WORDS + NEXT_SEQ_WORD]

    @property
    def subscriber(self) -> OwnerSubscriber | None:
        return self._subscriber

    @subscriber.setter
    def subscriber(self, subscriber: OwnerSubscriber | None) -> None:
        self._subscriber = subscriber
        self._update_slow_path_flag()

    @property
    def acked_out_of_order(self) -> set[int]:
        return self._acked_out_of_order

    @acked_out_of_order.setter
    def acked_out_of_order(self, sequences: set[int]) -> None:
        self._acked_out_of_order = sequences
        self._update_slow_path_flag()

    def _update_slow_path_flag(self) -> None:
        """Set the flag that tells writes to use the owner object."""
        has_slow_path = (
            self._subscriber is not None
            or self._acked_out_of_order is not NO_ACKS
            or self.is_ordered
        )
        words = self.table.words
        at = self.owner_index * ENTRY_WORDS + FLAGS_WORD
        words[at] = (
            self.number << NUMBER_SHIFT
            | words[at] & UNSAVED
            | (HAS_SLOW_PATH if has_slow_path else 0)
        )

    @property
    def is_unsaved(self) -> bool:
        """Return whether it must be written into a snapshot before it changes."""
        return self.table.words[self.owner_index * ENTRY_WORDS + FLAGS_WORD] & UNSAVED != 0

    def set_saved(self) -> None:
        self.table.words[self.owner_index * ENTRY_WORDS + FLAGS_WORD] &= ~UNSAVED

    def detach(self) -> None:
        """Leave the table, because the owner is deleted; existing references keep working."""
        next_seq = self.next_seq
        client_hash = self.client_hash
        self.table = OwnerTable()
        self.owner_index = self.table.allocate()
        self.table.words[0] = client_hash
        self.table.words[NEXT_SEQ_WORD] = next_seq
        self._update_slow_path_flag()

    # ---- computed on demand, because counting would slow down each write

    @property
    def stored_bytes(self) -> i64:
        """Return the bytes of all stored values."""
        size: i64 = 0
        slot: i64 = 0
        while slot < self.row_count():
            size += self.size(slot)
            slot += 1
        return size

    @property
    def last_write_at(self) -> i64:
        """Return the time of the last write, in seconds since 1970; 0: never.

        If there was no write, `newest_removed_at` is the time of creation: no value is stored, and
        the owner is at its first sequence without an acknowledgement.
        """
        if self.live_values == 0 and self.acked_at == 0 and self.acked == self.next_seq - 1:
            return 0
        newest = self.newest_removed_at
        slot: i64 = 0
        while slot < self.row_count():
            newest = max(newest, self.time(slot))
            slot += 1
        return newest

    # ---- one value, by its slot

    def seq(self, slot: i64) -> i64:
        return self.chunk.rows[self.rows_start + slot * ROW_WORDS]

    def address(self, slot: i64) -> i64:
        return self.chunk.rows[self.rows_start + slot * ROW_WORDS + ADDRESS_WORD]

    def key_hash(self, slot: i64) -> i64:
        return self.chunk.rows[self.rows_start + slot * ROW_WORDS + KEY_HASH_WORD]

    def size(self, slot: i64) -> i64:
        return (self.metadata(slot) >> 1) & 0x7FFF_FFFF

    def time(self, slot: i64) -> i64:
        """Return when the value was written, in seconds since 1970."""
        return self.metadata(slot) >> 32

    def is_tombstone(self, slot: i64) -> bool:
        return self.metadata(slot) & 1 != 0

    def metadata(self, slot: i64) -> i64:
        return self.chunk.rows[self.rows_start + slot * ROW_WORDS + METADATA_WORD]

    def row_count(self) -> i64:
        """Return the number of rows, including free ones."""
        return 1 << self._row_bits if self._row_bits >= 0 else 0

    def find_slot(self, key_hash: i64) -> i64:
        """Return the slot of a key; -1 if there is none."""
        return (
            find_row(self.chunk.rows, self.rows_start, self._row_bits, key_hash)
            if self._row_bits >= 0
            else -1
        )

    # ---- order of sequences

    def slot_after(self, seq: i64) -> i64:
        """Return the slot of the first value after `seq`; -1 if there is none."""
        at = self._order_position(seq + 1)
        order = self._order
        size: i64 = len(order)
        while at < size:
            slot = order[at + 1]
            if self.chunk.rows[self.rows_start + slot * ROW_WORDS] == order[at]:
                return slot
            at += 2
        return -1

    def slot_of_sequence(self, seq: i64) -> i64:
        """Return the slot of a stored sequence; -1 if it is not stored."""
        at = self._order_position(seq)
        if at < len(self._order) and self._order[at] == seq:
            slot = self._order[at + 1]
            if self.chunk.rows[self.rows_start + slot * ROW_WORDS] == seq:
                return slot
        return -1

    def slot_since(self, seconds: i64) -> i64:
        """Return the slot of the first value of that time or later; -1 if there is none."""
        slot = self.slot_after(0)
        while slot >= 0 and self.time(slot) < seconds:
            slot = self.slot_after(self.seq(slot))
        return slot

    def _order_position(self, seq: i64) -> i64:
        if not self.is_ordered:
            self._build_order()
        order = self._order
        low: i64 = 0
        high: i64 = len(order) >> 1
        while low < high:
            middle: i64 = (low + high) >> 1
            if order[middle << 1] < seq:
                low = middle + 1
            else:
                high = middle
        return low << 1

    def _build_order(self) -> None:
        found: list[int] = []
        slot: i64 = 0
        while slot < self.row_count():
            seq = self.chunk.rows[self.rows_start + slot * ROW_WORDS]
            if seq:
                found.append((int(seq) << SLOT_BITS) | int(slot))
            slot += 1
        found.sort()
        order = vec[i64](capacity=2 * len(found))
        for one in found:
            order = append(order, i64(one >> SLOT_BITS))
            order = append(order, i64(one & SLOT_MASK))
        self._order = order
        self.is_ordered = True
        self._update_slow_path_flag()

    def append_to_order(self, slot: i64) -> None:
        """Append a new value to the order; drop the order if there is no subscriber."""
        if self.subscriber is None:
            self.drop_order()
            return
        if len(self._order) > 4 * self.live_values + 4 * MAX_STALE_ORDER_ENTRIES:
            self._compact_order()
        order = append(self._order, self.chunk.rows[self.rows_start + slot * ROW_WORDS])
        self._order = append(order, slot)

    def _compact_order(self) -> None:
        """Remove deleted values from the order."""
        old_order = self._order
        order = vec[i64](capacity=2 * self.live_values + 2)
        at: i64 = 0
        while at < len(old_order):
            if self.seq(old_order[at + 1]) == old_order[at]:
                order = append(order, old_order[at])
                order = append(order, old_order[at + 1])
            at += 2
        self._order = order

    def drop_order(self) -> None:
        self._order = vec[i64]()
        if self.is_ordered:
            self.is_ordered = False
            self._update_slow_path_flag()

    def count_unacked(self) -> int:
        """Return the number of unacknowledged values."""
        count = 0
        slot: i64 = 0
        while slot < self.row_count():
            seq = self.seq(slot)
            if seq > self.acked and int(seq) not in self.acked_out_of_order:
                count += 1
            slot += 1
        return count

    # ---- adding and removing values

    def replace(
        self, slot: i64, seq: i64, address: i64, seconds: i64, size: i64, is_tombstone: bool
    ) -> None:
        """Replace the value in `slot` by a newer one."""
        rows = self.chunk.rows
        at = self.rows_start + slot * ROW_WORDS
        metadata = rows[at + METADATA_WORD]
        rows[at] = seq
        rows[at + ADDRESS_WORD] = address
        rows[at + METADATA_WORD] = seconds << 32 | size << 1 | (1 if is_tombstone else 0)
        if is_tombstone or metadata & 1:
            self.tombstones += (1 if is_tombstone else 0) - (metadata & 1)
        self.table.words[self.owner_index * ENTRY_WORDS + NEXT_SEQ_WORD] = seq + 1
        if self.is_ordered:
            self.append_to_order(slot)

    def add(
        self, seq: i64, address: i64, key_hash: i64, seconds: i64, size: i64, is_tombstone: bool
    ) -> i64:
        """Add the first value of a key; return its slot."""
        if self._row_bits < 0 or 8 * (self._used_rows + 1) > 7 << self._row_bits:
            self._rehash(row_bits_for(self.live_values + 1))
        slot = find_free_row(self.chunk.rows, self.rows_start, self._row_bits, key_hash)
        if self.address(slot) == 0:
            self._used_rows += 1
        self._set_row(
            slot, seq, address, key_hash, seconds << 32 | size << 1 | (1 if is_tombstone else 0)
        )
        if self.live_values == 0:
            self.oldest_at = seconds
        self.live_values += 1
        if is_tombstone:
            self.tombstones += 1
        self.table.words[self.owner_index * ENTRY_WORDS + NEXT_SEQ_WORD] = seq + 1
        if self.is_ordered:
            self.append_to_order(slot)
        return slot

    def _set_row(self, slot: i64, seq: i64, address: i64, key_hash: i64, metadata: i64) -> None:
        rows = self.chunk.rows
        at = self.rows_start + slot * ROW_WORDS
        rows[at] = seq
        rows[at + ADDRESS_WORD] = address
        rows[at + KEY_HASH_WORD] = key_hash
        rows[at + METADATA_WORD] = metadata

    def _allocate_rows(self, bits: i64) -> None:
        """Allocate free rows. The caller releases the old ones."""
        if bits < 0:
            self.chunk, self.rows_start = EMPTY_CHUNK, 0
        else:
            extent = self._slab.allocate(bits)
            self.chunk, self.rows_start = extent.chunk, LEADING_WORDS + extent.first_row * ROW_WORDS
            rows = self.chunk.rows
            at = self.rows_start
            end = at + (ROW_WORDS << bits)
            while at < end:
                rows[at] = 0
                at += 1
        self._row_bits = bits
        self._used_rows = 0
        base: i64 = (
            self.chunk.index << CHUNK_SHIFT | max(bits, 0) << ROW_BITS_SHIFT | self.rows_start
        )
        self.table.words[self.owner_index * ENTRY_WORDS + ROWS_WORD] = base

    def _rehash(self, bits: i64) -> None:
        """Move the values to other rows. All slots change."""
        self.drop_order()
        old_chunk, old_rows, old_start, old_bits = (
            self.chunk,
            self.chunk.rows,
            self.rows_start,
            self._row_bits,
        )
        self._allocate_rows(bits)
        if old_bits < 0:
            return
        at = old_start
        end = old_start + (ROW_WORDS << old_bits)
        while at < end:
            if old_rows[at]:
                slot = find_free_row(
                    self.chunk.rows, self.rows_start, bits, old_rows[at + KEY_HASH_WORD]
                )
                self._set_row(
                    slot,
                    old_rows[at],
                    old_rows[at + ADDRESS_WORD],
                    old_rows[at + KEY_HASH_WORD],
                    old_rows[at + METADATA_WORD],
                )
                self._used_rows += 1
            at += ROW_WORDS
        self._slab.release(old_chunk, (old_start - LEADING_WORDS) // ROW_WORDS, old_bits)

    def remove(self, slot: i64) -> None:
        """Remove a value."""
        self.live_values -= 1
        self.newest_removed_at = max(self.newest_removed_at, self.time(slot))
        if self.is_tombstone(slot):
            self.tombstones -= 1
        self._set_row(slot, 0, NO_ADDRESS, 0, 0)

    def is_sparse(self) -> bool:
        """Return whether so many rows are free that the others should be moved."""
        if self.live_values == 0:
            return self._row_bits >= 0
        return self._row_bits > MIN_ROW_BITS and self.live_values < 1 << (self._row_bits - 2)

    def shrink(self) -> None:
        """Move the values to as few rows as needed. All slots change."""
        self._rehash(row_bits_for(self.live_values))

    # ---- snapshots

    def encode_sequences(self) -> bytes:
        """Encode the stored sequences as signed differences: one or two bytes each."""
        out = BytesWriter()
        rows = self.chunk.rows
        any_seq: i64 = 0
        at = self.rows_start
        end = at + self.row_count() * ROW_WORDS
        # Without other work in the loop, these memory accesses overlap.
        while at < end:
            any_seq |= rows[at]
            at += ROW_WORDS
        if any_seq == 0:
            return b""
        last: i64 = 0
        at = self.rows_start
        while at < end:
            seq = rows[at]
            if seq:
                step: i64 = (seq - last) << 1
                last = seq
                if step < 0:
                    step = 1 - step
                while step >= 0x80:
                    out.append(int(step & 0x7F | 0x80))
                    step >>= 7
                out.append(int(step))
            at += ROW_WORDS
        return out.getvalue()

    def decode_sequences(self, data: bytes) -> None:
        """Decode sequences; the index rows of the store add the addresses (`restore_row`).

        `finish_rows` counts the values.
        """
        at: i64 = 0
        end: i64 = len(data)
        seq: i64 = 0
        found = vec[i64]()
        while at < end:
            shift: i64 = 0
            step: i64 = 0
            while data[at] >= 0x80:
                step += (i64(data[at]) & 0x7F) << shift
                shift += 7
                at += 1
            step += i64(data[at]) << shift
            at += 1
            if step & 1:
                seq -= step >> 1
            else:
                seq += step >> 1
            found = append(found, seq)
        self._allocate_rows(row_bits_for(len(found)))
        slot: i64 = 0
        while slot < len(found):
            self._set_row(slot, found[slot], NO_ADDRESS, 0, 0)
            slot += 1

    def restore_row(
        self, slot: i64, address: i64, key_hash: i64, seconds: i64, size: i64, is_tombstone: bool
    ) -> None:
        """Set the address and metadata of a value that the snapshot contains."""
        metadata: i64 = seconds << 32 | size << 1 | (1 if is_tombstone else 0)
        self._set_row(slot, self.seq(slot), address, key_hash, metadata)

    def finish_rows(self) -> i64:
        """Count the values after all index rows were loaded; return how many are missing."""
        self.live_values = 0
        self.tombstones = 0
        self.oldest_at = 0
        missing: i64 = 0
        slot: i64 = 0
        size = self.row_count()
        while slot < size:
            if self.seq(slot) == 0:
                pass
            elif self.address(slot) == NO_ADDRESS:
                self.chunk.rows[self.rows_start + slot * ROW_WORDS] = 0
                missing += 1
            else:
                self.live_values += 1
                if self.is_tombstone(slot):
                    self.tombstones += 1
                if self.oldest_at == 0 or self.time(slot) < self.oldest_at:
                    self.oldest_at = self.time(slot)
            slot += 1
        self.shrink()
        return missing


def row_bits_for(rows: i64) -> i64:
    """Return the number of rows for so many live values, as a power of two.

    A quarter of the rows is free, so that searches are short and resizing is rare.
    """
    if rows == 0:
        return -1
    bits: i64 = MIN_ROW_BITS
    while 8 * rows > 6 << bits:
        bits += 1
    return bits
