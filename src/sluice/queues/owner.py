"""The queue of one owner: for each key the place of its last value, in the order of their sequences.

There may be a hundred thousand owners with a hundred keys each, so a value is 32 bytes in four columns of native
integers, and nothing of an owner is an object but the owner. A value that is replaced leaves a gap; gaps are closed
when a fifth of the columns are gaps, so memory goes by what lives. A key is looked for from the young end; an owner
with many keys gets a dict for it.

A key is known by its mark, 64 bits of BLAKE2b. The mark stands in the header of its record too, so that a start needs
to read no body (`keys.mark_of`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter
from librt.vecs import append, vec
from mypy_extensions import i64

from sluice.queues.partition import GONE

if TYPE_CHECKING:
    from sluice.queues.ports import Reader

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
        self._seqs: vec[i64] = vec[i64]()
        self._addresses: vec[i64] = vec[i64]()
        self._marks: vec[i64] = vec[i64]()
        self._facts: vec[i64] = vec[i64]()  # time in seconds << 32 | size << 1 | whether it is a tombstone
        self._slots: dict[int, int] | None = None

    # ---- one value, by its slot

    def seq(self, slot: i64) -> i64:
        return self._seqs[slot]

    def address(self, slot: i64) -> i64:
        return self._addresses[slot]

    def size(self, slot: i64) -> i64:
        return (self._facts[slot] >> 1) & 0x7FFF_FFFF

    def time(self, slot: i64) -> i64:
        """When it was written, in seconds since 1970."""
        return self._facts[slot] >> 32

    def is_tombstone(self, slot: i64) -> bool:
        return self._facts[slot] & 1 != 0

    # ---- looking for one

    def find(self, mark: i64) -> i64:
        """The slot of a key; -1 when there is none."""
        if self._slots is not None:
            return i64(self._slots.get(int(mark), -1))
        marks = self._marks
        slot: i64 = len(marks) - 1
        while slot >= 0:
            if marks[slot] == mark and self._addresses[slot] != GONE:
                return slot
            slot -= 1
        return -1

    def slot_of(self, seq: i64) -> i64:
        """The slot of a sequence that is kept; -1 when it is not."""
        slot = self._at_or_behind(seq)
        if slot < len(self._seqs) and self._seqs[slot] == seq and self._addresses[slot] != GONE:
            return slot
        return -1

    def after(self, seq: i64) -> i64:
        """The slot of the first value behind `seq`; -1 when there is none."""
        slot = self._at_or_behind(seq + 1)
        size: i64 = len(self._seqs)
        while slot < size:
            if self._addresses[slot] != GONE:
                return slot
            slot += 1
        return -1

    def since(self, seconds: i64) -> i64:
        """The slot of the first value of that time or later; -1 when there is none."""
        slot = self.after(0)
        while slot >= 0 and self.time(slot) < seconds:
            slot = self.after(self._seqs[slot])
        return slot

    def _at_or_behind(self, seq: i64) -> i64:
        low: i64 = 0
        high: i64 = len(self._seqs)
        while low < high:
            middle: i64 = (low + high) >> 1
            if self._seqs[middle] < seq:
                low = middle + 1
            else:
                high = middle
        return low

    def depth(self) -> int:
        """Values that its owner has still to acknowledge."""
        count = 0
        slot = self.after(self.acked)
        size: i64 = len(self._seqs)
        while 0 <= slot < size:
            if self._addresses[slot] != GONE and int(self._seqs[slot]) not in self.done:
                count += 1
            slot += 1
        return count

    # ---- coming and going

    def add(self, seq: i64, address: i64, mark: i64, seconds: i64, size: i64, tombstone: bool) -> None:
        """Take in a value behind all others."""
        if len(self._seqs) - self.live > (self.live >> 2) + FEW_GAPS:
            self._close_gaps()
        slot: i64 = len(self._seqs)
        self._seqs = append(self._seqs, seq)
        self._addresses = append(self._addresses, address)
        self._marks = append(self._marks, mark)
        self._facts = append(self._facts, seconds << 32 | size << 1 | (1 if tombstone else 0))
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

    def place(self, slot: i64, address: i64, mark: i64, seconds: i64, size: i64, tombstone: bool) -> None:
        """Where a value stands that a snapshot has named: found while the store is read."""
        self._addresses[slot] = address
        self._marks[slot] = mark
        self._facts[slot] = seconds << 32 | size << 1 | (1 if tombstone else 0)

    def move(self, slot: i64, address: i64) -> None:
        self._addresses[slot] = address

    def remove(self, slot: i64) -> None:
        """Forget a value; the columns keep a gap for now."""
        size = self.size(slot)
        self._addresses[slot] = GONE
        self.live -= 1
        self.bytes -= size
        if self.is_tombstone(slot):
            self.tombstones -= 1
        if self._slots is not None:
            mark = int(self._marks[slot])
            if self._slots.get(mark, -1) == slot:
                del self._slots[mark]
        if self.live == 0:
            self._close_gaps()

    def _close_gaps(self) -> None:
        seqs = vec[i64]()
        addresses = vec[i64]()
        marks = vec[i64]()
        facts = vec[i64]()
        slot: i64 = 0
        size: i64 = len(self._seqs)
        while slot < size:
            if self._addresses[slot] != GONE:
                seqs = append(seqs, self._seqs[slot])
                addresses = append(addresses, self._addresses[slot])
                marks = append(marks, self._marks[slot])
                facts = append(facts, self._facts[slot])
            slot += 1
        self._seqs = seqs
        self._addresses = addresses
        self._marks = marks
        self._facts = facts
        if self._slots is not None:
            self._make_slots()

    def _make_slots(self) -> None:
        if self.live < MANY // 2:
            self._slots = None
            return
        slots: dict[int, int] = {}
        slot: i64 = 0
        while slot < len(self._marks):
            if self._addresses[slot] != GONE:
                slots[int(self._marks[slot])] = int(slot)
            slot += 1
        self._slots = slots

    # ---- in a snapshot

    def write_sequences(self) -> bytes:
        """What is kept, as steps from one sequence to the next: about a byte for each."""
        out = BytesWriter()
        last: i64 = 0
        slot: i64 = 0
        size: i64 = len(self._seqs)
        while slot < size:
            if self._addresses[slot] != GONE:
                step: i64 = self._seqs[slot] - last
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
            self._seqs = append(self._seqs, seq)
            self._addresses = append(self._addresses, GONE)
            self._marks = append(self._marks, i64(0))
            self._facts = append(self._facts, i64(0))

    def named(self, seq: i64) -> i64:
        """The slot of a sequence that a snapshot has named, whether it was found or not; -1 when it has not."""
        slot = self._at_or_behind(seq)
        return slot if slot < len(self._seqs) and self._seqs[slot] == seq else -1

    def settle(self) -> i64:
        """All rows are read: count what was found; how many were not."""
        self.live = 0
        self.bytes = 0
        self.tombstones = 0
        slot: i64 = 0
        size: i64 = len(self._seqs)
        while slot < size:
            if self._addresses[slot] != GONE:
                self.live += 1
                self.bytes += self.size(slot)
                if self.is_tombstone(slot):
                    self.tombstones += 1
            slot += 1
        lost: i64 = size - self.live
        self._close_gaps()
        self._make_slots()
        return lost
