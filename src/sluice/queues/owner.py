"""The queue of one owner: for each key the place of its last value, in the order of their sequences.

There may be a hundred thousand owners with a hundred keys each, so a value is a row of four native integers, and
nothing of an owner is an object but the owner. A value that is replaced leaves a gap; gaps are closed when a fifth of
the rows are gaps, so memory goes by what lives. Whoever writes goes from owner to owner, and each look at memory that
was not looked at lately costs more than a hundred comparisons: all of a value stands in one place, and a key is looked
for in a column of one byte for each, from the young end. An owner with many keys gets a dict for it.

A key is known by its mark, 64 bits of BLAKE2b. The mark stands in the header of its record too, so that a start needs
to read no body (`keys.mark_of`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter
from librt.vecs import append, vec
from mypy_extensions import i64, u8

from sluice.queues.partition import GONE

if TYPE_CHECKING:
    from sluice.queues.ports import Reader

# A row: sequence, address, mark of the key, and time in seconds << 32 | size << 1 | whether it is a tombstone.
ROW: Final = 4
ADDRESS: Final = 1
MARK: Final = 2
FACTS: Final = 3

MANY: Final = 256  # keys from which on a dict finds them
FEW_GAPS: Final = 8
NOTHING_DONE: Final[set[int]] = set()  # stands for every empty one; nothing is ever put into it


class Owner:
    def __init__(self, client: str, number: i64, first: i64) -> None:
        self.client: str = client
        self.number: i64 = number
        self.next: i64 = first  # the sequence of the next value
        self.acked: i64 = first - 1  # all up to here is acknowledged, or gone
        self.acked_at: i64 = 0  # when that was, in milliseconds since 1970; 0: never
        self.done: set[int] = NOTHING_DONE  # acknowledged out of turn, above `acked`
        self.heard_at: i64 = 0  # when it was last written to, in seconds since 1970
        self.live: i64 = 0
        self.bytes: i64 = 0
        self.tombstones: i64 = 0  # of the living
        self.reader: Reader | None = None
        self.is_dirty: bool = False  # has acknowledged something since the last frame
        self._rows: vec[i64] = vec[i64]()
        self._tags: vec[u8] = vec[u8]()  # the last byte of each mark
        self._slots: dict[int, int] | None = None

    # ---- one value, by its slot

    def seq(self, slot: i64) -> i64:
        return self._rows[slot * ROW]

    def address(self, slot: i64) -> i64:
        return self._rows[slot * ROW + ADDRESS]

    def size(self, slot: i64) -> i64:
        return (self._rows[slot * ROW + FACTS] >> 1) & 0x7FFF_FFFF

    def time(self, slot: i64) -> i64:
        """When it was written, in seconds since 1970."""
        return self._rows[slot * ROW + FACTS] >> 32

    def is_tombstone(self, slot: i64) -> bool:
        return self._rows[slot * ROW + FACTS] & 1 != 0

    # ---- looking for one

    def find(self, mark: i64) -> i64:
        """The slot of a key; -1 when there is none."""
        if self._slots is not None:
            return i64(self._slots.get(int(mark), -1))
        tags = self._tags
        tag: i64 = mark & 0xFF
        slot: i64 = len(tags) - 1
        while slot >= 0:
            if (
                i64(tags[slot]) == tag
                and self._rows[slot * ROW + MARK] == mark
                and self.address(slot) != GONE
            ):
                return slot
            slot -= 1
        return -1

    def slot_of(self, seq: i64) -> i64:
        """The slot of a sequence that is kept; -1 when it is not."""
        slot = self._at_or_behind(seq)
        if slot < len(self._tags) and self.seq(slot) == seq and self.address(slot) != GONE:
            return slot
        return -1

    def after(self, seq: i64) -> i64:
        """The slot of the first value behind `seq`; -1 when there is none."""
        slot = self._at_or_behind(seq + 1)
        size: i64 = len(self._tags)
        while slot < size:
            if self.address(slot) != GONE:
                return slot
            slot += 1
        return -1

    def since(self, seconds: i64) -> i64:
        """The slot of the first value of that time or later; -1 when there is none."""
        slot = self.after(0)
        while slot >= 0 and self.time(slot) < seconds:
            slot = self.after(self.seq(slot))
        return slot

    def _at_or_behind(self, seq: i64) -> i64:
        low: i64 = 0
        high: i64 = len(self._tags)
        while low < high:
            middle: i64 = (low + high) >> 1
            if self._rows[middle * ROW] < seq:
                low = middle + 1
            else:
                high = middle
        return low

    def depth(self) -> int:
        """Values that its owner has still to acknowledge."""
        count = 0
        slot = self.after(self.acked)
        size: i64 = len(self._tags)
        while 0 <= slot < size:
            if self.address(slot) != GONE and int(self.seq(slot)) not in self.done:
                count += 1
            slot += 1
        return count

    # ---- coming and going

    def add(self, seq: i64, address: i64, mark: i64, seconds: i64, size: i64, tombstone: bool) -> None:
        """Take in a value behind all others."""
        slot: i64 = len(self._tags)
        self._append(seq, address, mark, seconds << 32 | size << 1 | (1 if tombstone else 0))
        if self._slots is not None:
            self._slots[int(mark)] = int(slot)
        elif slot >= MANY:
            self._make_slots()
        self.live += 1
        self.bytes += size
        if tombstone:
            self.tombstones += 1
        if seq >= self.next:
            self.next = seq + 1

    def _append(self, seq: i64, address: i64, mark: i64, facts: i64) -> None:
        rows = append(self._rows, seq)
        rows = append(rows, address)
        rows = append(rows, mark)
        self._rows = append(rows, facts)
        self._tags = append(self._tags, u8(mark & 0xFF))

    def place(self, slot: i64, address: i64, mark: i64, seconds: i64, size: i64, tombstone: bool) -> None:
        """Where a value stands that a snapshot has named: found while the store is read."""
        self._rows[slot * ROW + ADDRESS] = address
        self._rows[slot * ROW + MARK] = mark
        self._rows[slot * ROW + FACTS] = seconds << 32 | size << 1 | (1 if tombstone else 0)
        self._tags[slot] = u8(mark & 0xFF)

    def move(self, slot: i64, address: i64) -> None:
        self._rows[slot * ROW + ADDRESS] = address

    def remove(self, slot: i64) -> None:
        """Forget a value. What was found before this has another slot now, if gaps were closed."""
        size = self.size(slot)
        self._rows[slot * ROW + ADDRESS] = GONE
        self.live -= 1
        self.bytes -= size
        if self.is_tombstone(slot):
            self.tombstones -= 1
        if self._slots is not None:
            mark = int(self._rows[slot * ROW + MARK])
            if self._slots.get(mark, -1) == slot:
                del self._slots[mark]
        if self.live == 0 or len(self._tags) - self.live > (self.live >> 2) + FEW_GAPS:
            self._close_gaps()

    def _close_gaps(self) -> None:
        rows = self._rows
        size: i64 = len(self._tags)
        self._rows = vec[i64]()
        self._tags = vec[u8]()
        at: i64 = 0
        while at < size * ROW:
            if rows[at + ADDRESS] != GONE:
                self._append(rows[at], rows[at + ADDRESS], rows[at + MARK], rows[at + FACTS])
            at += ROW
        if self._slots is not None:
            self._make_slots()

    def _make_slots(self) -> None:
        if self.live < MANY // 2:
            self._slots = None
            return
        slots: dict[int, int] = {}
        slot: i64 = 0
        while slot < len(self._tags):
            if self.address(slot) != GONE:
                slots[int(self._rows[slot * ROW + MARK])] = int(slot)
            slot += 1
        self._slots = slots

    # ---- in a snapshot

    def write_sequences(self) -> bytes:
        """What is kept, as steps from one sequence to the next: about a byte for each."""
        out = BytesWriter()
        last: i64 = 0
        slot: i64 = 0
        size: i64 = len(self._tags)
        while slot < size:
            if self.address(slot) != GONE:
                step: i64 = self.seq(slot) - last
                last += step
                while step >= 0x80:
                    out.append(int(step & 0x7F | 0x80))
                    step >>= 7
                out.append(int(step))
            slot += 1
        return out.getvalue()

    def read_sequences(self, data: bytes) -> None:
        """The same back; where each of them stands is told by the store's rows (`place`), and counted at `settle`."""
        at: i64 = 0
        end: i64 = len(data)
        seq: i64 = 0
        while at < end:
            shift: i64 = 0
            while data[at] >= 0x80:
                seq += (i64(data[at]) & 0x7F) << shift
                shift += 7
                at += 1
            seq += i64(data[at]) << shift
            at += 1
            self._append(seq, GONE, 0, 0)

    def named(self, seq: i64) -> i64:
        """The slot of a sequence that a snapshot has named, whether it was found or not; -1 when it has not."""
        slot = self._at_or_behind(seq)
        return slot if slot < len(self._tags) and self.seq(slot) == seq else -1

    def settle(self) -> i64:
        """All rows are read: count what was found; how many were not."""
        self.live = 0
        self.bytes = 0
        self.tombstones = 0
        slot: i64 = 0
        size: i64 = len(self._tags)
        while slot < size:
            if self.address(slot) != GONE:
                self.live += 1
                self.bytes += self.size(slot)
                if self.is_tombstone(slot):
                    self.tombstones += 1
            slot += 1
        lost: i64 = size - self.live
        self._close_gaps()
        self._make_slots()
        return lost
