"""Lookup of owners and values: from a topic or a record to a row.

With ten million keys, nothing that a write looks up is in the CPU cache. A dict of owners, each
with a dict of keys, takes ten dependent memory accesses. Here the hash of the client's name leads
to the index of its owner, through a table of native integers that is small enough for a CPU cache,
as are the entries of all owners (`owner_table`). From the entry it is one step to the row, because
the rows of an owner are a hash table themselves (`value_rows`): only the row is uncached.

The table uses open addressing and is split into shards by the hash, so that a write waits for the
growth of one shard at most. An entry contains the owner's index and seven bits of the hash; the
owner table has the complete hash. A second table finds owners by the number of their records, for
compaction, which looks up the owner of each record of a segment.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from sluice.queues.compacted.owner import SLOT_BITS, SLOT_MASK, Owner
from sluice.queues.compacted.owner_table import (
    CHUNK_SHIFT,
    ENTRY_WORDS,
    FLAGS_WORD,
    HAS_SLOW_PATH,
    NUMBER_SHIFT,
    OFFSET_MASK,
    ROW_BITS_MASK,
    ROW_BITS_SHIFT,
    ROWS_WORD,
    OwnerTable,
)
from sluice.queues.compacted.slab import Slab
from sluice.queues.compacted.value_rows import ADDRESS_WORD, ROW_WORDS, find_row, first_slot

SHARDS: Final = 64  # few, so that they stay in the CPU cache
SHARD_BITS: Final = 6
# The bits of a hash that are the tag; they do not affect the position of an entry.
TAG_HASH_SHIFT: Final = 48
TAG_MASK: Final = 0x7F
TAG_ENTRY_SHIFT: Final = 24  # bits of an entry: 7 of tag, 24 of owner index
INDEX_MASK: Final = 0xFF_FFFF
MIN_ENTRIES: Final = 8
EMPTY: Final = -1


class LookupShard:
    """Owners by a word of their table entry, shifted by `key_shift`."""

    def __init__(self, table: OwnerTable, key_word: i64, key_shift: i64) -> None:
        self._table: OwnerTable = table
        self._key_word: i64 = key_word
        self._key_shift: i64 = key_shift
        self.entries: vec[i32] = vec[i32]()
        self.mask: i64 = 0  # of a position
        self.used: i64 = 0
        self.resize(MIN_ENTRIES)

    def _home_position(self, entry: i32) -> i64:
        """Return the position of an entry without collisions."""
        return (
            self._table.words[(i64(entry) & INDEX_MASK) * ENTRY_WORDS + self._key_word]
            >> self._key_shift
        ) & self.mask

    def add(self, entry: i32) -> None:
        size: i64 = len(self.entries)
        if 4 * (self.used + 1) > 3 * size:
            self.resize(2 * size)
        self._insert(entry)
        self.used += 1

    def _insert(self, entry: i32) -> None:
        entries = self.entries
        at = self._home_position(entry)
        while entries[at] != EMPTY:
            at = (at + 1) & self.mask
        entries[at] = entry

    def remove(self, removed: i32) -> None:
        """Remove an entry and move up entries that were displaced by it."""
        entries = self.entries
        mask = self.mask
        gap = self._home_position(removed)
        while entries[gap] != removed:
            if entries[gap] == EMPTY:
                return
            gap = (gap + 1) & mask
        at = gap
        while True:
            at = (at + 1) & mask
            entry = entries[at]
            if entry == EMPTY:
                break
            if (at - self._home_position(entry)) & mask >= (at - gap) & mask:
                entries[gap] = entry
                gap = at
        entries[gap] = EMPTY
        self.used -= 1
        if mask >= MIN_ENTRIES and 8 * self.used < mask:
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
                self._insert(old[at])
            at += 1


class OwnerLookup:
    """Finds owners and values. A location is `owner_index << SLOT_BITS | slot`."""

    def __init__(self, slab: Slab) -> None:
        self.owners: list[Owner] = []  # by owner index
        self._slab: Slab = slab
        self._table: OwnerTable = slab.table
        self._shards_by_hash: list[LookupShard] = [
            LookupShard(slab.table, 0, SHARD_BITS) for _ in range(SHARDS)
        ]
        self._shards_by_number: list[LookupShard] = [
            LookupShard(slab.table, FLAGS_WORD, NUMBER_SHIFT + SHARD_BITS) for _ in range(SHARDS)
        ]
        self._no_owner: Owner = Owner("", 0, 1, Slab())
        # For `warm_rows`: chunk and word of each row.
        self._first_offsets: vec[i64] = vec[i64]()
        self._second_offsets: vec[i64] = vec[i64]()  # another word of the same chunk
        # Never used; storing a result keeps the compiler from removing the memory accesses.
        self._warm_sink: i64 = 0

    # ---- owners

    def admit(self, owner: Owner) -> None:
        while len(self.owners) <= owner.owner_index:
            self.owners.append(self._no_owner)
        self.owners[owner.owner_index] = owner
        self._shards_by_hash[owner.client_hash & (SHARDS - 1)].add(encode_entry(owner))
        self._shards_by_number[owner.number & (SHARDS - 1)].add(i32(owner.owner_index))

    def remove(self, owner: Owner) -> None:
        """Remove an owner without values."""
        owner_index = owner.owner_index
        self._shards_by_hash[owner.client_hash & (SHARDS - 1)].remove(encode_entry(owner))
        self._shards_by_number[owner.number & (SHARDS - 1)].remove(i32(owner_index))
        self.owners[owner_index] = self._no_owner
        owner.detach()
        self._table.release(owner_index)

    def find_owner(self, client_hash: i64) -> i64:
        """Return the index of an owner by the hash of its client's name; -1 if there is none."""
        shard = self._shards_by_hash[client_hash & (SHARDS - 1)]
        entries = shard.entries
        words = self._table.words
        mask = shard.mask
        tag = (client_hash >> TAG_HASH_SHIFT) & TAG_MASK
        at = (client_hash >> SHARD_BITS) & mask
        entry = i64(entries[at])
        while entry != EMPTY:
            if entry >> TAG_ENTRY_SHIFT == tag:
                owner_index = entry & INDEX_MASK
                if words[owner_index * ENTRY_WORDS] == client_hash:
                    return owner_index
            at = (at + 1) & mask
            entry = i64(entries[at])
        return -1

    def owner_of_number(self, number: i64) -> Owner | None:
        """Return the owner whose records have that number, or None."""
        owner_index = self.find_owner_number(number)
        return self.owners[owner_index] if owner_index >= 0 else None

    def find_owner_number(self, number: i64) -> i64:
        """Return the index of that owner; -1 if there is none.

        Numbers are assigned consecutively, so they are at consecutive positions and rarely collide.
        """
        shard = self._shards_by_number[number & (SHARDS - 1)]
        entries = shard.entries
        words = self._table.words
        mask = shard.mask
        at = (number >> SHARD_BITS) & mask
        owner_index = i64(entries[at])
        while owner_index != EMPTY:
            if words[owner_index * ENTRY_WORDS + FLAGS_WORD] >> NUMBER_SHIFT == number:
                return owner_index
            at = (at + 1) & mask
            owner_index = i64(entries[at])
        return -1

    # ---- values

    def find_value(self, client_hash: i64, key_hash: i64) -> i64:
        """Return the location of a key's value by the hashes of client and key, or -1."""
        owner_index = self.find_owner(client_hash)
        return owner_index if owner_index < 0 else self._find_value_of(owner_index, key_hash)

    def _find_value_of(self, owner_index: i64, key_hash: i64) -> i64:
        base = self._table.words[owner_index * ENTRY_WORDS + ROWS_WORD]
        rows = self._slab.chunks[base >> CHUNK_SHIFT].rows
        slot = find_row(
            rows, base & OFFSET_MASK, (base >> ROW_BITS_SHIFT) & ROW_BITS_MASK, key_hash
        )
        return slot if slot < 0 else owner_index << SLOT_BITS | slot

    def find_value_of_number(self, number: i64, key_hash: i64) -> i64:
        """Return the location of a key's value, by the number of the owner; -1 if there is none."""
        owner_index = self.find_owner_number(number)
        return owner_index if owner_index < 0 else self._find_value_of(owner_index, key_hash)

    def seq(self, location: i64) -> i64:
        """Return the sequence of the value at a location."""
        at = self._row_offset(location)
        return self._slab.chunks[at >> CHUNK_SHIFT].rows[at & OFFSET_MASK]

    def address(self, location: i64) -> i64:
        at = self._row_offset(location)
        return self._slab.chunks[at >> CHUNK_SHIFT].rows[(at & OFFSET_MASK) + ADDRESS_WORD]

    def set_address(self, location: i64, address: i64) -> None:
        at = self._row_offset(location)
        rows = self._slab.chunks[at >> CHUNK_SHIFT].rows
        rows[(at & OFFSET_MASK) + ADDRESS_WORD] = address

    def has_slow_path(self, location: i64) -> bool:
        """Return whether writes to the location must use the owner object."""
        return (
            self._table.words[(location >> SLOT_BITS) * ENTRY_WORDS + FLAGS_WORD] & HAS_SLOW_PATH
            != 0
        )

    def _row_offset(self, location: i64) -> i64:
        """Return the chunk and the word where the row starts."""
        return (
            self._table.words[(location >> SLOT_BITS) * ENTRY_WORDS + ROWS_WORD]
            + (location & SLOT_MASK) * ROW_WORDS
        )

    def find_values(
        self, client_hashes: vec[i64], key_hashes: vec[i64], locations: vec[i64], size: i64
    ) -> None:
        """Find the values of several keys, and load the memory that writes to them need.

        An access to uncached memory takes as long as hundreds of instructions. The accesses of one
        lookup depend on one another. Those of different keys do not, and the CPU overlaps as many
        of them as it sees ahead, which is some three hundred instructions. So accesses to uncached
        memory have loops of their own with hardly any other work, the loops between them compute
        the next addresses, and only the last loop verifies what it finds.
        """
        words = self._table.words
        shards = self._shards_by_hash
        sink: i64 = 0
        nth: i64 = 0
        while nth < size:
            client_hash = client_hashes[nth]
            shard = shards[client_hash & (SHARDS - 1)]
            sink |= i64(shard.entries[(client_hash >> SHARD_BITS) & shard.mask])
            nth += 1
        nth = 0
        while nth < size:
            locations[nth] = self._first_candidate(client_hashes[nth])
            nth += 1
        self._warm_sink = sink
        self.warm_rows(locations, key_hashes, size)
        nth = 0
        while nth < size:
            owner_index = locations[nth]
            if owner_index >= 0:
                if words[owner_index * ENTRY_WORDS] == client_hashes[nth]:
                    locations[nth] = self._find_value_of(owner_index, key_hashes[nth])
                else:
                    locations[nth] = self.find_value(client_hashes[nth], key_hashes[nth])
            nth += 1

    def warm_rows(self, owner_indexes: vec[i64], key_hashes: vec[i64], size: i64) -> None:
        """Load the rows of these keys and owners into the CPU cache for the next access.

        An owner index of -1 is skipped.
        """
        words = self._table.words
        chunks = self._slab.chunks
        while len(self._first_offsets) < size:
            self._first_offsets = append(self._first_offsets, i64(0))
            self._second_offsets = append(self._second_offsets, i64(0))
        first_offsets = self._first_offsets
        second_offsets = self._second_offsets
        sink: i64 = 0
        nth: i64 = 0
        while nth < size:
            if owner_indexes[nth] >= 0:
                sink |= (
                    words[owner_indexes[nth] * ENTRY_WORDS]
                    | words[owner_indexes[nth] * ENTRY_WORDS + ENTRY_WORDS - 1]
                )
            nth += 1
        nth = 0
        while nth < size:
            base = (
                words[owner_indexes[nth] * ENTRY_WORDS + ROWS_WORD]
                if owner_indexes[nth] >= 0
                else i64(0)
            )
            bits = (base >> ROW_BITS_SHIFT) & ROW_BITS_MASK
            slot = first_slot(key_hashes[nth], bits)
            first_offsets[nth] = base + slot * ROW_WORDS
            # The next cache line, which contains every key that is not in the first.
            second_offsets[nth] = (base & OFFSET_MASK) + (
                (slot + 2) & ((1 << bits) - 1)
            ) * ROW_WORDS
            nth += 1
        nth = 0
        while nth < size:
            rows = chunks[first_offsets[nth] >> CHUNK_SHIFT].rows
            sink |= rows[first_offsets[nth] & OFFSET_MASK] | rows[second_offsets[nth]]
            nth += 1
        self._warm_sink = sink

    def _first_candidate(self, client_hash: i64) -> i64:
        """Return the index of the first owner with the same tag; -1 if there is none."""
        shard = self._shards_by_hash[client_hash & (SHARDS - 1)]
        entries = shard.entries
        mask = shard.mask
        tag = (client_hash >> TAG_HASH_SHIFT) & TAG_MASK
        at = (client_hash >> SHARD_BITS) & mask
        entry = i64(entries[at])
        while entry >> TAG_ENTRY_SHIFT != tag:
            if entry == EMPTY:
                return -1
            at = (at + 1) & mask
            entry = i64(entries[at])
        return entry & INDEX_MASK


def encode_entry(owner: Owner) -> i32:
    return i32(
        ((owner.client_hash >> TAG_HASH_SHIFT) & TAG_MASK) << TAG_ENTRY_SHIFT | owner.owner_index
    )
