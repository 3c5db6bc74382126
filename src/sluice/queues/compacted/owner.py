"""The queue of one owner: for each key the place of its last value.

There may be a hundred thousand owners with a hundred keys each, so a value is a row of four native integers, and
nothing of an owner is an object but the owner. Whoever writes goes from owner to owner, and each look at memory that
was not looked at lately costs more than a hundred comparisons. So a write touches three places: the table that knows
the owner of a client (`finder`), the owner's head (`heads`), and the row (`rows`), which the new value takes over from
the old one. The owner itself is looked at only when its head says so: when it has a reader, has
acknowledged something out of turn, or is in order.

Rows therefore stand in no order. Who reads wants the order of sequences: it is made when first asked for, grows with
what is written while there is a reader, and is forgotten with the first write when there is none. What it names may be
gone since: a row tells by its sequence.

A key is known by its mark, 64 bits of BLAKE2b. The mark stands in the header of its record too, so that a start needs
to read no body (`keys.mark_of`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter
from librt.vecs import append, vec
from mypy_extensions import i64

from sluice.queues.compacted.owner_table import (
    CHUNK_SHIFT,
    ENTRY_WORDS,
    HAS_SLOW_PATH,
    NEXT_SEQ_WORD,
    NUMBER_SHIFT,
    ROW_BITS_SHIFT,
    ROWS_WORD,
    UNSAVED,
    OwnerTable,
    hash_client,
)
from sluice.queues.compacted.owner_table import FLAGS_WORD as HEAD_FACTS
from sluice.queues.compacted.slab import EMPTY_CHUNK, LEADING_WORDS, Chunk, Slab
from sluice.queues.compacted.value_rows import (
    ADDRESS_WORD,
    KEY_HASH_WORD,
    METADATA_WORD,
    ROW_WORDS,
    find_free_row,
    find_row,
)
from sluice.queues.model.message_columns import NO_ADDRESS

if TYPE_CHECKING:
    from sluice.queues.ports import OwnerSubscriber

SLOT_BITS: Final = (
    20  # a slot is a number of so many bits: half a million keys of one owner, and free rows
)
SLOT_MASK: Final = 0xF_FFFF
MAX_STALE_ORDER_ENTRIES: Final = 8  # entries of an order that may be of no use any more
MIN_ROW_BITS: Final = 2  # rows that an owner has room for at least, as a power of two
NO_ACKS: Final[set[int]] = set()  # stands for every empty one; nothing is ever put into it


class Owner:
    def __init__(self, client: str, number: i64, first_seq: i64, slab: Slab) -> None:
        self.table: OwnerTable = slab.table
        self.owner_index: i64 = self.table.allocate()  # among all owners
        self.chunk: Chunk = EMPTY_CHUNK  # where its rows are,
        self.rows_start: i64 = 0  # and where they begin there
        self._subscriber: OwnerSubscriber | None = None
        self._acked_out_of_order: set[int] = NO_ACKS  # acknowledged out of turn, above `acked`
        self.is_ordered: bool = False
        self.number: i64 = number
        # When the youngest of what is gone was written, or when the owner was made; in seconds since 1970.
        self.newest_removed_at: i64 = 0
        self.live_values: i64 = 0
        self.tombstones: i64 = 0  # of the living
        self.oldest_at: i64 = 0  # no value is older than this, in seconds since 1970
        self.acked: i64 = first_seq - 1  # all up to here is acknowledged, or gone
        self.acked_at: i64 = 0  # when that was, in milliseconds since 1970; 0: never
        self.epoch: i64 = 0  # counts rewinds, since the start
        self.has_new_acks: bool = False  # has acknowledged something since the last frame
        self.client: str = client
        self._slab: Slab = slab
        self._row_bits: i64 = -1  # there is room for so many rows, as a power of two; -1: for none
        self._used_rows: i64 = 0  # rows that have a value, or had one
        self._order: vec[i64] = vec[i64]()  # sequences in order, and the slot of each
        words = self.table.words
        words[self.owner_index * ENTRY_WORDS] = hash_client(
            client.encode("utf-8", "surrogateescape")
        )
        words[self.owner_index * ENTRY_WORDS + NEXT_SEQ_WORD] = first_seq
        words[self.owner_index * ENTRY_WORDS + ROWS_WORD] = 0
        words[self.owner_index * ENTRY_WORDS + HEAD_FACTS] = 0
        self._update_slow_path_flag()

    # ---- its head, and what a write looks there

    @property
    def client_hash(self) -> i64:
        """Of its client's name, in this process."""
        return self.table.words[self.owner_index * ENTRY_WORDS]

    @property
    def next_seq(self) -> i64:
        """The sequence of the next value."""
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
        """Let its head say whether a write has to look at more than that."""
        has_slow_path = (
            self._subscriber is not None
            or self._acked_out_of_order is not NO_ACKS
            or self.is_ordered
        )
        words = self.table.words
        at = self.owner_index * ENTRY_WORDS + HEAD_FACTS
        words[at] = (
            self.number << NUMBER_SHIFT
            | words[at] & UNSAVED
            | (HAS_SLOW_PATH if has_slow_path else 0)
        )

    @property
    def is_unsaved(self) -> bool:
        """Whether it has to be written into a snapshot before it changes."""
        return self.table.words[self.owner_index * ENTRY_WORDS + HEAD_FACTS] & UNSAVED != 0

    def set_saved(self) -> None:
        self.table.words[self.owner_index * ENTRY_WORDS + HEAD_FACTS] &= ~UNSAVED

    def detach(self) -> None:
        """It is gone, and its place is for another; who still holds on to it sees what it was."""
        next_seq = self.next_seq
        client_hash = self.client_hash
        self.table = OwnerTable()
        self.owner_index = self.table.allocate()
        self.table.words[0] = client_hash
        self.table.words[NEXT_SEQ_WORD] = next_seq
        self._update_slow_path_flag()

    # ---- what nobody counts, because it would be counted with each write

    @property
    def stored_bytes(self) -> i64:
        """Of all values that are kept."""
        size: i64 = 0
        slot: i64 = 0
        while slot < self.row_count():
            size += self.size(slot)
            slot += 1
        return size

    @property
    def last_write_at(self) -> i64:
        """When it was last written to, in seconds since 1970; 0: never. Then `gone_at` is when it was made: nothing is
        kept, and it stands at its first sequence without having acknowledged anything."""
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
        """When it was written, in seconds since 1970."""
        return self.metadata(slot) >> 32

    def is_tombstone(self, slot: i64) -> bool:
        return self.metadata(slot) & 1 != 0

    def metadata(self, slot: i64) -> i64:
        return self.chunk.rows[self.rows_start + slot * ROW_WORDS + METADATA_WORD]

    def row_count(self) -> i64:
        """How many rows there are, free ones among them."""
        return 1 << self._row_bits if self._row_bits >= 0 else 0

    def find_slot(self, key_hash: i64) -> i64:
        """The slot of a key; -1 when there is none."""
        return (
            find_row(self.chunk.rows, self.rows_start, self._row_bits, key_hash)
            if self._row_bits >= 0
            else -1
        )

    # ---- in order

    def slot_after(self, seq: i64) -> i64:
        """The slot of the first value behind `seq`; -1 when there is none."""
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
        """The slot of a sequence that is kept; -1 when it is not."""
        at = self._order_position(seq)
        if at < len(self._order) and self._order[at] == seq:
            slot = self._order[at + 1]
            if self.chunk.rows[self.rows_start + slot * ROW_WORDS] == seq:
                return slot
        return -1

    def slot_since(self, seconds: i64) -> i64:
        """The slot of the first value of that time or later; -1 when there is none."""
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
        """A value was written. Its place in the order is the last, and nobody but a reader needs one."""
        if self.subscriber is None:
            self.drop_order()
            return
        if len(self._order) > 4 * self.live_values + 4 * MAX_STALE_ORDER_ENTRIES:
            self._compact_order()
        order = append(self._order, self.chunk.rows[self.rows_start + slot * ROW_WORDS])
        self._order = append(order, slot)

    def _compact_order(self) -> None:
        """Leave out what is gone since."""
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
        """Values that its owner has still to acknowledge."""
        count = 0
        slot: i64 = 0
        while slot < self.row_count():
            seq = self.seq(slot)
            if seq > self.acked and int(seq) not in self.acked_out_of_order:
                count += 1
            slot += 1
        return count

    # ---- coming and going

    def replace(
        self, slot: i64, seq: i64, address: i64, seconds: i64, size: i64, is_tombstone: bool
    ) -> None:
        """A younger value in the place of the one that is there."""
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
        """The first value of a key; its slot."""
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
        """Another run of rows, all of them free. The old one is still there, for who remembers where it was."""
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
        """Go to another number of rows, or to as many of which none was used before. All slots are others then."""
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
        """Forget a value."""
        self.live_values -= 1
        self.newest_removed_at = max(self.newest_removed_at, self.time(slot))
        if self.is_tombstone(slot):
            self.tombstones -= 1
        self._set_row(slot, 0, NO_ADDRESS, 0, 0)

    def is_sparse(self) -> bool:
        """Whether so many rows are free that the rest should move together: memory goes by what lives."""
        if self.live_values == 0:
            return self._row_bits >= 0
        return self._row_bits > MIN_ROW_BITS and self.live_values < 1 << (self._row_bits - 2)

    def shrink(self) -> None:
        """Leave out the free rows. All slots are others now."""
        self._rehash(row_bits_for(self.live_values))

    # ---- in a snapshot

    def encode_sequences(self) -> bytes:
        """What is kept, as steps from one sequence to the next, back or forth: one or two bytes for each."""
        out = BytesWriter()
        rows = self.chunk.rows
        any_seq: i64 = 0
        at = self.rows_start
        end = at + self.row_count() * ROW_WORDS
        while (
            at < end
        ):  # without anything between them, these looks at memory do not wait for one another
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

    def decode_sequences(self, data: bytes, has_negative_steps: bool) -> None:
        """The same back; where each of them stands is told by the store's rows (`place`), and counted at `settle`.
        Not `both_ways`: from before there were steps back."""
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
            if not has_negative_steps:
                seq += step
            elif step & 1:
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
        """Where a value stands that a snapshot has named."""
        metadata: i64 = seconds << 32 | size << 1 | (1 if is_tombstone else 0)
        self._set_row(slot, self.seq(slot), address, key_hash, metadata)

    def finish_rows(self) -> i64:
        """All rows of the store are read: count what was found; how many were not."""
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
    """How many rows to have for so many that live, as a power of two: a quarter of them are free, so that looking for a
    key is short, and it takes a while until there are too few, or too many."""
    if rows == 0:
        return -1
    bits: i64 = MIN_ROW_BITS
    while 8 * rows > 6 << bits:
        bits += 1
    return bits
