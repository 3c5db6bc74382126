"""Whose a key is, and where its last value stands: the way from a topic to a row.

With ten million keys nothing that a write looks for is in the processor's cache. A dict of owners, each with a dict of
keys, is ten looks at memory one after the other. Here the hash of the client's name leads to the place of its owner,
through a table of native integers which is small enough for some cache, as the heads of all owners are (`heads`). From
the head it is one step to the row, because an owner's rows are a table themselves (`rows`): of all that a write looks
at, the row alone is far away.

The table has open addressing, and is cut into parts by the hash, so that no write waits until more than one part is
made larger. An entry says the owner's place and seven bits of the hash; the head has all of it. Another such table goes
by the number under which an owner's records are kept: for compaction, which asks whose each record of a segment is.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from sluice.queues.compacted.owner_table import (
    BASE,
    BITS_AT,
    BITS_MASK,
    FACTS,
    HEAD,
    MINDS,
    NUMBER_AT,
    PIECE_AT,
    WORD_MASK,
    Heads,
)
from sluice.queues.compacted.owner import SLOT_BITS, SLOT_MASK, Owner
from sluice.queues.compacted.value_rows import ADDRESS, ROW, find_row, first_slot
from sluice.queues.compacted.slab import Space

PARTS: Final = 64  # few, so that they are always near
PART_BITS: Final = 6
TAG_FROM: Final = 48  # the bits of a hash that are the tag: none of those that say where an entry stands
TAG_MASK: Final = 0x7F
TAG_AT: Final = 24  # the bits of an entry: 7 of tag, 24 of place
PLACE_MASK: Final = 0xFF_FFFF
SMALLEST: Final = 8
EMPTY: Final = -1


class Part:
    """Owners by what a word of their head says, from its bit `shift` on."""

    def __init__(self, heads: Heads, word: i64, shift: i64) -> None:
        self._heads: Heads = heads
        self._word: i64 = word
        self._shift: i64 = shift
        self.entries: vec[i32] = vec[i32]()
        self.mask: i64 = 0  # of a place among them
        self.used: i64 = 0
        self.resize(SMALLEST)

    def _home(self, entry: i32) -> i64:
        """Where it stands if nobody else does."""
        return (self._heads.words[(i64(entry) & PLACE_MASK) * HEAD + self._word] >> self._shift) & self.mask

    def add(self, entry: i32) -> None:
        size: i64 = len(self.entries)
        if 4 * (self.used + 1) > 3 * size:
            self.resize(2 * size)
        self._put(entry)
        self.used += 1

    def _put(self, entry: i32) -> None:
        entries = self.entries
        at = self._home(entry)
        while entries[at] != EMPTY:
            at = (at + 1) & self.mask
        entries[at] = entry

    def remove(self, wanted: i32) -> None:
        """What stood behind it because its own place was taken moves up."""
        entries = self.entries
        mask = self.mask
        gap = self._home(wanted)
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
            if (at - self._home(entry)) & mask >= (at - gap) & mask:
                entries[gap] = entry
                gap = at
        entries[gap] = EMPTY
        self.used -= 1
        if mask >= SMALLEST and 8 * self.used < mask:
            self.resize((mask + 1) >> 1)

    def resize(self, size: i64) -> None:
        old = self.entries
        entries = vec[i32](capacity=size)
        while len(entries) < size:
            entries = append(entries, i32(EMPTY))
        self.entries = entries
        self.mask = size - 1
        at: i64 = 0
        while at < len(old):
            if old[at] != EMPTY:
                self._put(old[at])
            at += 1


class Finder:
    """A value is named by its owner's place and its slot there, `place << SLOT_BITS | slot`."""

    def __init__(self, space: Space) -> None:
        self.at: list[Owner] = []  # owners, by their place
        self._space: Space = space
        self._heads: Heads = space.heads
        self._parts: list[Part] = [Part(space.heads, 0, PART_BITS) for _ in range(PARTS)]
        self._numbered: list[Part] = [Part(space.heads, FACTS, NUMBER_AT + PART_BITS) for _ in range(PARTS)]
        self._nobody: Owner = Owner("", 0, 1, Space())
        self._first: vec[i64] = vec[
            i64
        ]()  # where `find_all` is about to look for each: a piece and a word of it,
        self._second: vec[i64] = vec[i64]()  # and another word of it
        self._seen: i64 = 0  # of no use to anybody; looks at memory whose result is kept are not left out

    # ---- owners

    def admit(self, owner: Owner) -> None:
        while len(self.at) <= owner.place:
            self.at.append(self._nobody)
        self.at[owner.place] = owner
        self._parts[owner.hash & (PARTS - 1)].add(entry_of(owner))
        self._numbered[owner.number & (PARTS - 1)].add(i32(owner.place))

    def dismiss(self, owner: Owner) -> None:
        """An owner goes of whom no value is left."""
        place = owner.place
        self._parts[owner.hash & (PARTS - 1)].remove(entry_of(owner))
        self._numbered[owner.number & (PARTS - 1)].remove(i32(place))
        self.at[place] = self._nobody
        owner.step_aside()
        self._heads.give(place)

    def place_of(self, client: i64) -> i64:
        """The place of an owner, by the hash of its client's name; -1 when there is none."""
        part = self._parts[client & (PARTS - 1)]
        entries = part.entries
        words = self._heads.words
        mask = part.mask
        tag = (client >> TAG_FROM) & TAG_MASK
        at = (client >> PART_BITS) & mask
        entry = i64(entries[at])
        while entry != EMPTY:
            if entry >> TAG_AT == tag:
                place = entry & PLACE_MASK
                if words[place * HEAD] == client:
                    return place
            at = (at + 1) & mask
            entry = i64(entries[at])
        return -1

    def numbered(self, number: i64) -> Owner | None:
        """The owner whose records are kept under that number."""
        place = self.place_numbered(number)
        return self.at[place] if place >= 0 else None

    def place_numbered(self, number: i64) -> i64:
        """The place of that owner; -1 when there is none. Numbers are given out one behind the other, so that they
        stand one behind the other here, and hardly ever meet."""
        part = self._numbered[number & (PARTS - 1)]
        entries = part.entries
        words = self._heads.words
        mask = part.mask
        at = (number >> PART_BITS) & mask
        place = i64(entries[at])
        while place != EMPTY:
            if words[place * HEAD + FACTS] >> NUMBER_AT == number:
                return place
            at = (at + 1) & mask
            place = i64(entries[at])
        return -1

    # ---- values

    def find(self, client: i64, mark: i64) -> i64:
        """The value of a key, by the hash of its owner's name and its mark; -1 when there is none."""
        place = self.place_of(client)
        return place if place < 0 else self._find_of(place, mark)

    def _find_of(self, place: i64, mark: i64) -> i64:
        base = self._heads.words[place * HEAD + BASE]
        rows = self._space.at[base >> PIECE_AT].rows
        slot = find_row(rows, base & WORD_MASK, (base >> BITS_AT) & BITS_MASK, mark)
        return slot if slot < 0 else place << SLOT_BITS | slot

    def find_numbered(self, number: i64, mark: i64) -> i64:
        """The same by the number of its owner."""
        place = self.place_numbered(number)
        return place if place < 0 else self._find_of(place, mark)

    def seq(self, found: i64) -> i64:
        """Of the value that stands there, as do those below."""
        at = self._at(found)
        return self._space.at[at >> PIECE_AT].rows[at & WORD_MASK]

    def address(self, found: i64) -> i64:
        at = self._at(found)
        return self._space.at[at >> PIECE_AT].rows[(at & WORD_MASK) + ADDRESS]

    def move(self, found: i64, address: i64) -> None:
        at = self._at(found)
        rows = self._space.at[at >> PIECE_AT].rows
        rows[(at & WORD_MASK) + ADDRESS] = address

    def minds(self, found: i64) -> bool:
        """Whether its owner has to know what becomes of it."""
        return self._heads.words[(found >> SLOT_BITS) * HEAD + FACTS] & MINDS != 0

    def _at(self, found: i64) -> i64:
        """The piece and the word of it where its row begins."""
        return self._heads.words[(found >> SLOT_BITS) * HEAD + BASE] + (found & SLOT_MASK) * ROW

    def find_all(self, clients: vec[i64], marks: vec[i64], found: vec[i64], size: i64) -> None:
        """Find the values of several keys, and have all that a write needs of them near.

        A look at memory that is in no cache takes as long as hundreds of instructions. Those of one `find` wait for
        one another. Those of different keys do not, and the processor has as many under way as it sees ahead, which is
        some three hundred instructions. So far looks have loops of their own in which hardly anything else is done,
        what follows from them is worked out in the loops between, and only the last is sure of what it sees."""
        words = self._heads.words
        parts = self._parts
        seen: i64 = 0
        nth: i64 = 0
        while nth < size:
            client = clients[nth]
            part = parts[client & (PARTS - 1)]
            seen |= i64(part.entries[(client >> PART_BITS) & part.mask])
            nth += 1
        nth = 0
        while nth < size:
            found[nth] = self._candidate(clients[nth])
            nth += 1
        self._seen = seen
        self.bring_near(found, marks, size)
        nth = 0
        while nth < size:
            place = found[nth]
            if place >= 0:
                if words[place * HEAD] == clients[nth]:
                    found[nth] = self._find_of(place, marks[nth])
                else:
                    found[nth] = self.find(clients[nth], marks[nth])
            nth += 1

    def bring_near(self, places: vec[i64], marks: vec[i64], size: i64) -> None:
        """Look at the rows where keys of these owners may stand, and at all that leads there, so that it is in some
        cache for whoever looks next. A place of -1 is nobody's."""
        words = self._heads.words
        pieces = self._space.at
        while len(self._first) < size:
            self._first = append(self._first, i64(0))
            self._second = append(self._second, i64(0))
        first = self._first
        second = self._second
        seen: i64 = 0
        nth: i64 = 0
        while nth < size:
            if places[nth] >= 0:
                seen |= words[places[nth] * HEAD] | words[places[nth] * HEAD + HEAD - 1]
            nth += 1
        nth = 0
        while nth < size:
            base = words[places[nth] * HEAD + BASE] if places[nth] >= 0 else i64(0)
            bits = (base >> BITS_AT) & BITS_MASK
            slot = first_slot(marks[nth], bits)
            first[nth] = base + slot * ROW
            # Where the line of the cache behind it is, in which every other key stands that is not in the first.
            second[nth] = (base & WORD_MASK) + ((slot + 2) & ((1 << bits) - 1)) * ROW
            nth += 1
        nth = 0
        while nth < size:
            rows = pieces[first[nth] >> PIECE_AT].rows
            seen |= rows[first[nth] & WORD_MASK] | rows[second[nth]]
            nth += 1
        self._seen = seen

    def _candidate(self, client: i64) -> i64:
        """The place of the first owner that may be the one, by what the table knows; -1 when there is none."""
        part = self._parts[client & (PARTS - 1)]
        entries = part.entries
        mask = part.mask
        tag = (client >> TAG_FROM) & TAG_MASK
        at = (client >> PART_BITS) & mask
        entry = i64(entries[at])
        while entry >> TAG_AT != tag:
            if entry == EMPTY:
                return -1
            at = (at + 1) & mask
            entry = i64(entries[at])
        return entry & PLACE_MASK


def entry_of(owner: Owner) -> i32:
    return i32(((owner.hash >> TAG_FROM) & TAG_MASK) << TAG_AT | owner.place)
