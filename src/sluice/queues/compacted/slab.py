"""Room for rows of native integers: runs of a power of two of them, cut from a few large pieces.

Whoever looks at an array touches two places, what is looked for and the head of the array. With an array for each of a
hundred thousand owners both are far away each time; the heads of a hundred pieces are always near. A run that is given
back is put together with its other half if that is free too, so that owners who grow leave room for others who do.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

from sluice.queues.compacted.owner_table import Heads
from sluice.queues.compacted.value_rows import ROW

PIECE_BITS: Final = 17  # rows of a piece at most, as a power of two; who needs more has one of its own
LEAD: Final = 3  # words before the first row: with them no row of a large array crosses a line of the cache
FIRST_BITS: Final = 10  # of the first, and each is twice the one before: most brokers have few owners


class Piece:
    def __init__(self, bits: i64) -> None:
        self.bits: i64 = bits
        self.number: i64 = 0  # among all pieces: see `Space.at`
        words: i64 = LEAD + (ROW << bits)
        rows = vec[i64](capacity=words)
        while len(rows) < words:
            rows = append(rows, i64(0))
        self.rows: vec[i64] = rows
        self.free: list[set[int]] = [set() for _ in range(bits + 1)]  # by size, the first rows of free runs
        self.free[bits].add(0)

    def take(self, bits: i64) -> i64:
        """The first row of a run; -1 when there is none of that size."""
        size = bits
        while size <= self.bits and not self.free[size]:
            size += 1
        if size > self.bits:
            return -1
        first: i64 = self.free[size].pop()
        while size > bits:
            size -= 1
            self.free[size].add(int(first + (1 << size)))
        return first

    def give(self, first: i64, bits: i64) -> None:
        while bits < self.bits and int(first ^ (1 << bits)) in self.free[bits]:
            self.free[bits].remove(int(first ^ (1 << bits)))
            first &= ~(1 << bits)
            bits += 1
        self.free[bits].add(int(first))

    def is_empty(self) -> bool:
        return len(self.free[self.bits]) > 0


class Run:
    """Where somebody's rows are to be."""

    def __init__(self, piece: Piece, first: i64, bits: i64) -> None:
        self.piece: Piece = piece
        self.first: i64 = first
        self.bits: i64 = bits


NOWHERE: Final = Piece(0)  # the rows of who has none


class Space:
    def __init__(self) -> None:
        self.heads: Heads = Heads()  # of those whose rows these are
        self.at: list[Piece] = [NOWHERE]  # pieces by their number
        self._unused: list[int] = []  # numbers of those that are gone
        self._pieces: list[Piece] = []  # those with room come last
        self._next_bits: i64 = FIRST_BITS

    def take(self, bits: i64) -> Run:
        """A run of `1 << bits` rows."""
        nth: i64 = i64(len(self._pieces)) - 1
        looked: i64 = 0
        while nth >= 0 and looked < 8:
            piece = self._pieces[nth]
            if piece.bits >= bits:
                first = piece.take(bits)
                if first >= 0:
                    return Run(piece, first, bits)
            nth -= 1
            looked += 1
        piece = Piece(max(bits, self._next_bits))
        self._next_bits = min(self._next_bits + 1, i64(PIECE_BITS))
        self._pieces.append(piece)
        if self._unused:
            piece.number = self._unused.pop()
            self.at[piece.number] = piece
        else:
            piece.number = len(self.at)
            self.at.append(piece)
        return Run(piece, piece.take(bits), bits)

    def give(self, piece: Piece, first: i64, bits: i64) -> None:
        piece.give(first, bits)
        if piece is self._pieces[-1]:
            return
        self._pieces.remove(piece)
        if not piece.is_empty():
            self._pieces.append(piece)
            return
        self.at[piece.number] = NOWHERE
        self._unused.append(int(piece.number))
