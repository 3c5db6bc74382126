"""What a write needs to know of an owner: four native integers, side by side for all owners.

The owner itself is an object of four lines of the cache somewhere in memory, to which a list of pointers leads. Writes
go to one of a hundred thousand each time, and what they need of it fits into half a line. Here that is three megabytes
for all of them, most of it in some cache.

    hash    of the client's name, secret to this process: with it the table of all keys knows whose a key is
    next    the sequence of the next value
    base    where the owner's rows begin: the number of a piece << 32 | a word in it (`space`)
    facts   the number under which its records are kept << 1 | whether a write has to look at the owner itself
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

HEAD: Final = 4  # words of a head
NEXT: Final = 1
BASE: Final = 2
FACTS: Final = 3
WORD_MASK: Final = 0xFFFF_FFFF


class Heads:
    def __init__(self) -> None:
        self.words: vec[i64] = vec[i64]()
        self._vacant: list[int] = []  # places of owners that are gone

    def take(self) -> i64:
        """A place for a new owner."""
        if self._vacant:
            return self._vacant.pop()
        words = self.words
        place: i64 = len(words) // HEAD
        for _ in range(HEAD):
            words = append(words, i64(0))
        self.words = words
        return place

    def give(self, place: i64) -> None:
        self._vacant.append(int(place))
