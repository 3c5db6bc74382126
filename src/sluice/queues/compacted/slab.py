"""Room for rows of native integers: runs of a power of two of them, cut from a few large pieces.

Whoever looks at an array touches two places, what is looked for and the head of the array. With an array for each of a
hundred thousand owners both are far away each time; the heads of a hundred pieces are always near. A run that is given
back is put together with its other half if that is free too, so that owners who grow leave room for others who do.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

from sluice.queues.compacted.owner_table import OwnerTable
from sluice.queues.compacted.value_rows import ROW_WORDS

MAX_CHUNK_BITS: Final = (
    17  # rows of a piece at most, as a power of two; who needs more has one of its own
)
LEADING_WORDS: Final = (
    3  # words before the first row: with them no row of a large array crosses a line of the cache
)
FIRST_CHUNK_BITS: Final = (
    10  # of the first, and each is twice the one before: most brokers have few owners
)


class Chunk:
    def __init__(self, bits: i64) -> None:
        self.bits: i64 = bits
        self.index: i64 = 0  # among all pieces: see `Space.at`
        words: i64 = LEADING_WORDS + (ROW_WORDS << bits)
        rows = vec[i64](capacity=words)
        while len(rows) < words:
            rows = append(rows, i64(0))
        self.rows: vec[i64] = rows
        self.free_extents: list[set[int]] = [
            set() for _ in range(bits + 1)
        ]  # by size, the first rows of free runs
        self.free_extents[bits].add(0)

    def allocate(self, bits: i64) -> i64:
        """The first row of a run; -1 when there is none of that size."""
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
    """Where somebody's rows are to be."""

    def __init__(self, chunk: Chunk, first_row: i64, bits: i64) -> None:
        self.chunk: Chunk = chunk
        self.first_row: i64 = first_row
        self.bits: i64 = bits


EMPTY_CHUNK: Final = Chunk(0)  # the rows of who has none


class Slab:
    def __init__(self) -> None:
        self.table: OwnerTable = OwnerTable()  # of those whose rows these are
        self.chunks: list[Chunk] = [EMPTY_CHUNK]  # pieces by their number
        self._free_indexes: list[int] = []  # numbers of those that are gone
        self._chunks_by_room: list[Chunk] = []  # those with room come last
        self._next_bits: i64 = FIRST_CHUNK_BITS

    def allocate(self, bits: i64) -> Extent:
        """A run of `1 << bits` rows."""
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
