"""Allocator for rows of native integers: extents of a power of two, cut from a few large chunks.

An array access touches two locations, the element and the header of the array. With an array for
each of a hundred thousand owners, both are uncached each time; the headers of a hundred chunks stay
in the CPU cache. A released extent is merged with its buddy if that is free too, so that growing
owners leave space for others.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

from sluice.queues.compacted.owner_table import OwnerTable
from sluice.queues.compacted.value_rows import ROW_WORDS

# Maximum rows of a chunk, as a power of two; a larger extent has a chunk of its own.
MAX_CHUNK_BITS: Final = 17
# Words before the first row: with them, no row of a large array crosses a cache line.
LEADING_WORDS: Final = 3
# Of the first chunk; each one has twice the rows of the previous: most brokers have few owners.
FIRST_CHUNK_BITS: Final = 10


class Chunk:
    def __init__(self, bits: i64) -> None:
        self.bits: i64 = bits
        self.index: i64 = 0  # index in `Slab.chunks`
        words: i64 = LEADING_WORDS + (ROW_WORDS << bits)
        rows = vec[i64](capacity=words)
        while len(rows) < words:
            rows = append(rows, i64(0))
        self.rows: vec[i64] = rows
        # First rows of free extents, by size.
        self.free_extents: list[set[int]] = [set() for _ in range(bits + 1)]
        self.free_extents[bits].add(0)

    def allocate(self, bits: i64) -> i64:
        """Return the first row of an extent; -1 if there is none of that size."""
        size = bits
        while size <= self.bits and not self.free_extents[size]:
            size += 1
        if size > self.bits:
            return -1
        first_row: i64 = self.free_extents[size].pop()
        while size > bits:
            size -= 1
            self.free_extents[size].add(int(first_row + (1 << size)))
        return first_row

    def release(self, first_row: i64, bits: i64) -> None:
        while bits < self.bits and int(first_row ^ (1 << bits)) in self.free_extents[bits]:
            self.free_extents[bits].remove(int(first_row ^ (1 << bits)))
            first_row &= ~(1 << bits)
            bits += 1
        self.free_extents[bits].add(int(first_row))

    def is_empty(self) -> bool:
        return len(self.free_extents[self.bits]) > 0


class Extent:
    """A run of allocated rows."""

    def __init__(self, chunk: Chunk, first_row: i64, bits: i64) -> None:
        self.chunk: Chunk = chunk
        self.first_row: i64 = first_row
        self.bits: i64 = bits


EMPTY_CHUNK: Final = Chunk(0)  # the rows of an owner without any


class Slab:
    def __init__(self) -> None:
        self.table: OwnerTable = OwnerTable()  # of the owners of these rows
        self.chunks: list[Chunk] = [EMPTY_CHUNK]  # by index
        self._free_indexes: list[int] = []  # indexes of deleted chunks
        self._chunks_by_room: list[Chunk] = []  # chunks with free space are last
        self._next_bits: i64 = FIRST_CHUNK_BITS

    def allocate(self, bits: i64) -> Extent:
        """Allocate an extent of `1 << bits` rows."""
        nth: i64 = i64(len(self._chunks_by_room)) - 1
        tried: i64 = 0
        while nth >= 0 and tried < 8:
            chunk = self._chunks_by_room[nth]
            if chunk.bits >= bits:
                first_row = chunk.allocate(bits)
                if first_row >= 0:
                    return Extent(chunk, first_row, bits)
            nth -= 1
            tried += 1
        chunk = Chunk(max(bits, self._next_bits))
        self._next_bits = min(self._next_bits + 1, i64(MAX_CHUNK_BITS))
        self._chunks_by_room.append(chunk)
        if self._free_indexes:
            chunk.index = self._free_indexes.pop()
            self.chunks[chunk.index] = chunk
        else:
            chunk.index = len(self.chunks)
            self.chunks.append(chunk)
        return Extent(chunk, chunk.allocate(bits), bits)

    def release(self, chunk: Chunk, first_row: i64, bits: i64) -> None:
        chunk.release(first_row, bits)
        if chunk is self._chunks_by_room[-1]:
            return
        self._chunks_by_room.remove(chunk)
        if not chunk.is_empty():
            self._chunks_by_room.append(chunk)
            return
        self.chunks[chunk.index] = EMPTY_CHUNK
        self._free_indexes.append(int(chunk.index))
