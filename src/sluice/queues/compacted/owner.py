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

from sluice.queues.model.message_columns import GONE
from sluice.queues.compacted.owner_table import (
    BASE,
    BITS_AT,
    HEAD,
    MINDS,
    NEXT,
    NUMBER_AT,
    PIECE_AT,
    UNSAVED,
    Heads,
    hash_of,
)
from sluice.queues.compacted.owner_table import FACTS as HEAD_FACTS
from sluice.queues.compacted.value_rows import ADDRESS, FACTS, MARK, ROW, find_row, free_row
from sluice.queues.compacted.slab import LEAD, NOWHERE, Piece, Space

if TYPE_CHECKING:
    from sluice.queues.ports import Reader

SLOT_BITS: Final = 20  # a slot is a number of so many bits: half a million keys of one owner, and free rows
SLOT_MASK: Final = 0xF_FFFF
FEW: Final = 8  # entries of an order that may be of no use any more
FEW_BITS: Final = 2  # rows that an owner has room for at least, as a power of two
NOTHING_DONE: Final[set[int]] = set()  # stands for every empty one; nothing is ever put into it


class Owner:
    def __init__(self, client: str, number: i64, first: i64, space: Space) -> None:
        self.heads: Heads = space.heads
        self.place: i64 = self.heads.take()  # among all owners
        self.piece: Piece = NOWHERE  # where its rows are,
        self.start: i64 = 0  # and where they begin there
        self._reader: Reader | None = None
        self._done: set[int] = NOTHING_DONE  # acknowledged out of turn, above `acked`
        self.is_ordered: bool = False
        self.number: i64 = number
        # When the youngest of what is gone was written, or when the owner was made; in seconds since 1970.
        self.gone_at: i64 = 0
        self.live: i64 = 0
        self.tombstones: i64 = 0  # of the living
        self.oldest: i64 = 0  # no value is older than this, in seconds since 1970
        self.acked: i64 = first - 1  # all up to here is acknowledged, or gone
        self.acked_at: i64 = 0  # when that was, in milliseconds since 1970; 0: never
        self.epoch: i64 = 0  # counts rewinds, since the start
        self.is_dirty: bool = False  # has acknowledged something since the last frame
        self.client: str = client
        self._space: Space = space
        self._bits: i64 = -1  # there is room for so many rows, as a power of two; -1: for none
        self._used: i64 = 0  # rows that have a value, or had one
        self._order: vec[i64] = vec[i64]()  # sequences in order, and the slot of each
        words = self.heads.words
        words[self.place * HEAD] = hash_of(client.encode("utf-8", "surrogateescape"))
        words[self.place * HEAD + NEXT] = first
        words[self.place * HEAD + BASE] = 0
        words[self.place * HEAD + HEAD_FACTS] = 0
        self._mind()

    # ---- its head, and what a write looks there

    @property
    def hash(self) -> i64:
        """Of its client's name, in this process."""
        return self.heads.words[self.place * HEAD]

    @property
    def next(self) -> i64:
        """The sequence of the next value."""
        return self.heads.words[self.place * HEAD + NEXT]

    @property
    def reader(self) -> Reader | None:
        return self._reader

    @reader.setter
    def reader(self, reader: Reader | None) -> None:
        self._reader = reader
        self._mind()

    @property
    def done(self) -> set[int]:
        return self._done

    @done.setter
    def done(self, done: set[int]) -> None:
        self._done = done
        self._mind()

    def _mind(self) -> None:
        """Let its head say whether a write has to look at more than that."""
        minds = self._reader is not None or self._done is not NOTHING_DONE or self.is_ordered
        words = self.heads.words
        at = self.place * HEAD + HEAD_FACTS
        words[at] = self.number << NUMBER_AT | words[at] & UNSAVED | (MINDS if minds else 0)

    @property
    def is_unsaved(self) -> bool:
        """Whether it has to be written into a snapshot before it changes."""
        return self.heads.words[self.place * HEAD + HEAD_FACTS] & UNSAVED != 0

    def set_saved(self) -> None:
        self.heads.words[self.place * HEAD + HEAD_FACTS] &= ~UNSAVED

    def step_aside(self) -> None:
        """It is gone, and its place is for another; who still holds on to it sees what it was."""
        first = self.next
        name_hash = self.hash
        self.heads = Heads()
        self.place = self.heads.take()
        self.heads.words[0] = name_hash
        self.heads.words[NEXT] = first
        self._mind()

    # ---- what nobody counts, because it would be counted with each write

    @property
    def kept_bytes(self) -> i64:
        """Of all values that are kept."""
        size: i64 = 0
        slot: i64 = 0
        while slot < self.slots():
            size += self.size(slot)
            slot += 1
        return size

    @property
    def heard_at(self) -> i64:
        """When it was last written to, in seconds since 1970; 0: never. Then `gone_at` is when it was made: nothing is
        kept, and it stands at its first sequence without having acknowledged anything."""
        if self.live == 0 and self.acked_at == 0 and self.acked == self.next - 1:
            return 0
        latest = self.gone_at
        slot: i64 = 0
        while slot < self.slots():
            latest = max(latest, self.time(slot))
            slot += 1
        return latest

    # ---- one value, by its slot

    def seq(self, slot: i64) -> i64:
        return self.piece.rows[self.start + slot * ROW]

    def address(self, slot: i64) -> i64:
        return self.piece.rows[self.start + slot * ROW + ADDRESS]

    def mark(self, slot: i64) -> i64:
        return self.piece.rows[self.start + slot * ROW + MARK]

    def size(self, slot: i64) -> i64:
        return (self.facts(slot) >> 1) & 0x7FFF_FFFF

    def time(self, slot: i64) -> i64:
        """When it was written, in seconds since 1970."""
        return self.facts(slot) >> 32

    def is_tombstone(self, slot: i64) -> bool:
        return self.facts(slot) & 1 != 0

    def facts(self, slot: i64) -> i64:
        return self.piece.rows[self.start + slot * ROW + FACTS]

    def slots(self) -> i64:
        """How many rows there are, free ones among them."""
        return 1 << self._bits if self._bits >= 0 else 0

    def find(self, mark: i64) -> i64:
        """The slot of a key; -1 when there is none."""
        return find_row(self.piece.rows, self.start, self._bits, mark) if self._bits >= 0 else -1

    # ---- in order

    def after(self, seq: i64) -> i64:
        """The slot of the first value behind `seq`; -1 when there is none."""
        at = self._at_or_behind(seq + 1)
        order = self._order
        size: i64 = len(order)
        while at < size:
            slot = order[at + 1]
            if self.piece.rows[self.start + slot * ROW] == order[at]:
                return slot
            at += 2
        return -1

    def slot_of(self, seq: i64) -> i64:
        """The slot of a sequence that is kept; -1 when it is not."""
        at = self._at_or_behind(seq)
        if at < len(self._order) and self._order[at] == seq:
            slot = self._order[at + 1]
            if self.piece.rows[self.start + slot * ROW] == seq:
                return slot
        return -1

    def since(self, seconds: i64) -> i64:
        """The slot of the first value of that time or later; -1 when there is none."""
        slot = self.after(0)
        while slot >= 0 and self.time(slot) < seconds:
            slot = self.after(self.seq(slot))
        return slot

    def _at_or_behind(self, seq: i64) -> i64:
        if not self.is_ordered:
            self._put_in_order()
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

    def _put_in_order(self) -> None:
        found: list[int] = []
        slot: i64 = 0
        while slot < self.slots():
            seq = self.piece.rows[self.start + slot * ROW]
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
        self._mind()

    def come_last(self, slot: i64) -> None:
        """A value was written. Its place in the order is the last, and nobody but a reader needs one."""
        if self.reader is None:
            self.forget_order()
            return
        if len(self._order) > 4 * self.live + 4 * FEW:
            self._thin_order()
        order = append(self._order, self.piece.rows[self.start + slot * ROW])
        self._order = append(order, slot)

    def _thin_order(self) -> None:
        """Leave out what is gone since."""
        old = self._order
        order = vec[i64](capacity=2 * self.live + 2)
        at: i64 = 0
        while at < len(old):
            if self.seq(old[at + 1]) == old[at]:
                order = append(order, old[at])
                order = append(order, old[at + 1])
            at += 2
        self._order = order

    def forget_order(self) -> None:
        self._order = vec[i64]()
        if self.is_ordered:
            self.is_ordered = False
            self._mind()

    def depth(self) -> int:
        """Values that its owner has still to acknowledge."""
        count = 0
        slot: i64 = 0
        while slot < self.slots():
            seq = self.seq(slot)
            if seq > self.acked and int(seq) not in self.done:
                count += 1
            slot += 1
        return count

    # ---- coming and going

    def put(self, slot: i64, seq: i64, address: i64, seconds: i64, size: i64, tombstone: bool) -> None:
        """A younger value in the place of the one that is there."""
        rows = self.piece.rows
        at = self.start + slot * ROW
        facts = rows[at + FACTS]
        rows[at] = seq
        rows[at + ADDRESS] = address
        rows[at + FACTS] = seconds << 32 | size << 1 | (1 if tombstone else 0)
        if tombstone or facts & 1:
            self.tombstones += (1 if tombstone else 0) - (facts & 1)
        self.heads.words[self.place * HEAD + NEXT] = seq + 1
        if self.is_ordered:
            self.come_last(slot)

    def add(self, seq: i64, address: i64, mark: i64, seconds: i64, size: i64, tombstone: bool) -> i64:
        """The first value of a key; its slot."""
        if self._bits < 0 or 8 * (self._used + 1) > 7 << self._bits:
            self._rehash(bits_for(self.live + 1))
        slot = free_row(self.piece.rows, self.start, self._bits, mark)
        if self.address(slot) == 0:
            self._used += 1
        self._set(slot, seq, address, mark, seconds << 32 | size << 1 | (1 if tombstone else 0))
        if self.live == 0:
            self.oldest = seconds
        self.live += 1
        if tombstone:
            self.tombstones += 1
        self.heads.words[self.place * HEAD + NEXT] = seq + 1
        if self.is_ordered:
            self.come_last(slot)
        return slot

    def _set(self, slot: i64, seq: i64, address: i64, mark: i64, facts: i64) -> None:
        rows = self.piece.rows
        at = self.start + slot * ROW
        rows[at] = seq
        rows[at + ADDRESS] = address
        rows[at + MARK] = mark
        rows[at + FACTS] = facts

    def _take_run(self, bits: i64) -> None:
        """Another run of rows, all of them free. The old one is still there, for who remembers where it was."""
        if bits < 0:
            self.piece, self.start = NOWHERE, 0
        else:
            run = self._space.take(bits)
            self.piece, self.start = run.piece, LEAD + run.first * ROW
            rows = self.piece.rows
            at = self.start
            end = at + (ROW << bits)
            while at < end:
                rows[at] = 0
                at += 1
        self._bits = bits
        self._used = 0
        base: i64 = self.piece.number << PIECE_AT | max(bits, 0) << BITS_AT | self.start
        self.heads.words[self.place * HEAD + BASE] = base

    def _rehash(self, bits: i64) -> None:
        """Go to another number of rows, or to as many of which none was used before. All slots are others then."""
        self.forget_order()
        piece, old, was, old_bits = self.piece, self.piece.rows, self.start, self._bits
        self._take_run(bits)
        if old_bits < 0:
            return
        at = was
        end = was + (ROW << old_bits)
        while at < end:
            if old[at]:
                slot = free_row(self.piece.rows, self.start, bits, old[at + MARK])
                self._set(slot, old[at], old[at + ADDRESS], old[at + MARK], old[at + FACTS])
                self._used += 1
            at += ROW
        self._space.give(piece, (was - LEAD) // ROW, old_bits)

    def remove(self, slot: i64) -> None:
        """Forget a value."""
        self.live -= 1
        self.gone_at = max(self.gone_at, self.time(slot))
        if self.is_tombstone(slot):
            self.tombstones -= 1
        self._set(slot, 0, GONE, 0, 0)

    def is_sparse(self) -> bool:
        """Whether so many rows are free that the rest should move together: memory goes by what lives."""
        if self.live == 0:
            return self._bits >= 0
        return self._bits > FEW_BITS and self.live < 1 << (self._bits - 2)

    def pack(self) -> None:
        """Leave out the free rows. All slots are others now."""
        self._rehash(bits_for(self.live))

    # ---- in a snapshot

    def write_sequences(self) -> bytes:
        """What is kept, as steps from one sequence to the next, back or forth: one or two bytes for each."""
        out = BytesWriter()
        rows = self.piece.rows
        seen: i64 = 0
        at = self.start
        end = at + self.slots() * ROW
        while at < end:  # without anything between them, these looks at memory do not wait for one another
            seen |= rows[at]
            at += ROW
        if seen == 0:
            return b""
        last: i64 = 0
        at = self.start
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
            at += ROW
        return out.getvalue()

    def read_sequences(self, data: bytes, both_ways: bool) -> None:
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
            if not both_ways:
                seq += step
            elif step & 1:
                seq -= step >> 1
            else:
                seq += step >> 1
            found = append(found, seq)
        self._take_run(bits_for(len(found)))
        slot: i64 = 0
        while slot < len(found):
            self._set(slot, found[slot], GONE, 0, 0)
            slot += 1

    def found(self, slot: i64, address: i64, mark: i64, seconds: i64, size: i64, tombstone: bool) -> None:
        """Where a value stands that a snapshot has named."""
        facts: i64 = seconds << 32 | size << 1 | (1 if tombstone else 0)
        self._set(slot, self.seq(slot), address, mark, facts)

    def settle(self) -> i64:
        """All rows of the store are read: count what was found; how many were not."""
        self.live = 0
        self.tombstones = 0
        self.oldest = 0
        missing: i64 = 0
        slot: i64 = 0
        size = self.slots()
        while slot < size:
            if self.seq(slot) == 0:
                pass
            elif self.address(slot) == GONE:
                self.piece.rows[self.start + slot * ROW] = 0
                missing += 1
            else:
                self.live += 1
                if self.is_tombstone(slot):
                    self.tombstones += 1
                if self.oldest == 0 or self.time(slot) < self.oldest:
                    self.oldest = self.time(slot)
            slot += 1
        self.pack()
        return missing


def bits_for(rows: i64) -> i64:
    """How many rows to have for so many that live, as a power of two: a quarter of them are free, so that looking for a
    key is short, and it takes a while until there are too few, or too many."""
    if rows == 0:
        return -1
    bits: i64 = FEW_BITS
    while 8 * rows > 6 << bits:
        bits += 1
    return bits
