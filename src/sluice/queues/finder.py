"""Where the last value of each key of each owner stands: one table for all of them.

With ten million keys nothing that a write looks for is in the processor's cache. A dict of owners, each with a dict of
keys, is ten looks at memory one after the other; this is one. The table is native integers with open addressing, so a
key costs some thirteen bytes in it, and it is cut into parts by the key's hash, so that no write waits until more than
one part is made larger.

An entry says the owner's place, the slot of the value there, and 20 bits of the hash: enough to find its own place
again when a part grows, and to pass over others without a look at them. What it names is looked at to be sure: the row
has the whole mark of the key, and the head of the owner the whole hash of its client's name.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

from sluice.queues.heads import BASE, HEAD, WORD_MASK, Heads
from sluice.queues.owner import FACTS, MARK, SLOT_BITS, SLOT_MASK, Owner
from sluice.queues.space import ROW, Space

PARTS: Final = 64  # few, so that they are always near
PART_BITS: Final = 6
TAG_MASK: Final = 0xF_FFFF
TAG_AT: Final = 43  # the bits of an entry: 20 of tag, 24 of place, 19 of slot
REST_MASK: Final = 0x7FF_FFFF_FFFF
SMALLEST: Final = 8
EMPTY: Final = -1


class Part:
    def __init__(self) -> None:
        self.entries: vec[i64] = vec[i64]()
        self.mask: i64 = -1  # how many there are, less one
        self.used: i64 = 0


class Finder:
    """A value is named by its owner's place and its slot there, `place << SLOT_BITS | slot`."""

    def __init__(self, space: Space) -> None:
        self.at: list[Owner] = []  # owners, by their place
        self._space: Space = space
        self._heads: Heads = space.heads
        self._parts: list[Part] = [Part() for _ in range(PARTS)]
        self._nobody: Owner = Owner("", 0, 1, Space())

    # ---- owners

    def admit(self, owner: Owner) -> None:
        while len(self.at) <= owner.place:
            self.at.append(self._nobody)
        self.at[owner.place] = owner

    def dismiss(self, owner: Owner) -> None:
        """An owner goes of whom no value is left."""
        place = owner.place
        self.at[place] = self._nobody
        owner.step_aside()
        self._heads.give(place)

    # ---- values

    def find(self, client: i64, mark: i64) -> i64:
        """The value of a key, by the hash of its owner's name and its mark; -1 when there is none."""
        whole = client ^ mark
        part = self._parts[whole & (PARTS - 1)]
        entries = part.entries
        mask = part.mask
        if mask < 0:
            return -1
        tag: i64 = (whole >> PART_BITS) & TAG_MASK
        at = tag & mask
        entry = entries[at]
        while entry != EMPTY:
            if entry >> TAG_AT == tag:
                value = entry & REST_MASK
                if self._is(value, client, mark):
                    return value
            at = (at + 1) & mask
            entry = entries[at]
        return -1

    def _is(self, value: i64, client: i64, mark: i64) -> bool:
        """Whether this is the value of that key: its owner's head knows whose, and its row of which key."""
        words = self._heads.words
        head = (value >> SLOT_BITS) * HEAD
        base = words[head + BASE]
        at = (base & WORD_MASK) + (value & SLOT_MASK) * ROW
        return words[head] == client and self._space.at[base >> 32].rows[at + MARK] == mark

    def find_all(self, clients: vec[i64], marks: vec[i64], found: vec[i64], size: i64) -> None:
        """Find the values of several keys, and have all that a write needs of them near.

        A look at memory that is in no cache takes as long as hundreds of instructions. Those of one `find` wait for
        one another. Those of different keys do not, and the processor has several under way at a time if little else
        stands between them: so each loop has one kind of look."""
        nth: i64 = 0
        while nth < size:
            whole = clients[nth] ^ marks[nth]
            part = self._parts[whole & (PARTS - 1)]
            if part.mask >= 0:
                found[nth] = part.entries[(whole >> PART_BITS) & TAG_MASK & part.mask]
            else:
                found[nth] = EMPTY
            nth += 1
        nth = 0
        while nth < size:
            if found[nth] != EMPTY:
                found[nth] = self._candidate(clients[nth] ^ marks[nth])
            nth += 1
        words = self._heads.words
        pieces = self._space.at
        nth = 0
        while nth < size:
            value = found[nth]
            if value >= 0:
                head = (value >> SLOT_BITS) * HEAD
                base = words[head + BASE]
                rows = pieces[base >> 32].rows
                at = (base & WORD_MASK) + (value & SLOT_MASK) * ROW
                # The last word of a row, which is never below zero, may stand in another line of the cache.
                if words[head] != clients[nth] or rows[at + MARK] != marks[nth] or rows[at + FACTS] < 0:
                    found[nth] = self.find(clients[nth], marks[nth])
            nth += 1

    def _candidate(self, whole: i64) -> i64:
        """The first value that may be the one, by what the table knows; -1 when there is none."""
        part = self._parts[whole & (PARTS - 1)]
        mask = part.mask
        if mask < 0:
            return -1
        entries = part.entries
        tag: i64 = (whole >> PART_BITS) & TAG_MASK
        at = tag & mask
        entry = entries[at]
        while entry != EMPTY:
            if entry >> TAG_AT == tag:
                return entry & REST_MASK
            at = (at + 1) & mask
            entry = entries[at]
        return -1

    def add(self, owner: Owner, slot: i64, mark: i64) -> None:
        """A key that has not been there."""
        whole = owner.hash ^ mark
        part = self._parts[whole & (PARTS - 1)]
        if 4 * (part.used + 1) > 3 * (part.mask + 1):
            self._resize(part, max(SMALLEST, 2 * (part.mask + 1)))
        tag: i64 = (whole >> PART_BITS) & TAG_MASK
        self._put(part, tag << TAG_AT | owner.place << SLOT_BITS | slot)
        part.used += 1

    def _put(self, part: Part, entry: i64) -> None:
        entries = part.entries
        mask = part.mask
        at = (entry >> TAG_AT) & mask
        while entries[at] != EMPTY:
            at = (at + 1) & mask
        entries[at] = entry

    def remove(self, owner: Owner, slot: i64, mark: i64) -> None:
        """A key whose value goes. What stood behind it because its own place was taken moves up."""
        whole = owner.hash ^ mark
        part = self._parts[whole & (PARTS - 1)]
        entries = part.entries
        mask = part.mask
        tag: i64 = (whole >> PART_BITS) & TAG_MASK
        wanted: i64 = tag << TAG_AT | owner.place << SLOT_BITS | slot
        gap = tag & mask
        while entries[gap] != wanted:
            if entries[gap] == EMPTY:
                return
            gap = (gap + 1) & mask
        at = gap
        while True:
            at = (at + 1) & mask
            entry = entries[at]
            if entry == EMPTY:
                break
            home = (entry >> TAG_AT) & mask
            if (at - home) & mask >= (at - gap) & mask:
                entries[gap] = entry
                gap = at
        entries[gap] = EMPTY
        part.used -= 1
        if part.mask >= SMALLEST and 8 * part.used < part.mask:
            self._resize(part, (part.mask + 1) >> 1)

    def _resize(self, part: Part, size: i64) -> None:
        old = part.entries
        entries = vec[i64](capacity=size)
        while len(entries) < size:
            entries = append(entries, i64(EMPTY))
        part.entries = entries
        part.mask = size - 1
        at: i64 = 0
        while at < len(old):
            if old[at] != EMPTY:
                self._put(part, old[at])
            at += 1
