"""What a write needs to know of an owner: four native integers, side by side for all owners.

The owner itself is an object of four lines of the cache somewhere in memory, to which a list of pointers leads. Writes
go to one of a hundred thousand each time, and what they need of it fits into half a line. Here that is three megabytes
for all of them, most of it in some cache.

    hash    of the client's name, secret to this process: by it the head of an owner is found (`finder`)
    next    the sequence of the next value
    base    where the owner's rows are: the number of a piece (`space`) << 40 | how many there are, as a power of two
            << 32 | the word of the piece where they begin
    facts   the number under which its records are kept << 2 | whether the snapshot that is being written has yet to
            have it << 1 | whether a write has to look at the owner itself
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i64_le
from librt.vecs import append, vec
from mypy_extensions import i64

HEAD: Final = 4  # words of a head
NEXT: Final = 1
BASE: Final = 2
FACTS: Final = 3
MINDS: Final = 1  # in `facts`
UNSAVED: Final = 2
NUMBER_AT: Final = 2
PIECE_AT: Final = 40  # in `base`
BITS_AT: Final = 32
BITS_MASK: Final = 0xFF
WORD_MASK: Final = 0xFFFF_FFFF

# The hash of a name: see `name_hash`.
WORD: Final = 8
SEVEN_BYTES: Final = 0xFF_FFFF_FFFF_FFFF
STIRRED: Final = 0x1C8E_4F7B_3A59_D62D  # odd
ALL: Final = 0x3FFF_FFFF_FFFF_FFFF
HALF: Final = 0xFFFF_FFFF
TOP: Final = 0x7FFF_FFFF
LONGEST: Final = 32  # bytes of a name for which it is quicker
FRONT: Final = b"$ECQ/w/"  # what stands before the name where it is hashed most often


def _secrets(name: bytes) -> vec[i64]:
    """Numbers of 64 bits that nobody outside this process knows: one for the size, two for each word of a name."""
    found = vec[i64]()
    for nth in range(1 + 2 * LONGEST // WORD):
        found = append(found, i64(hash(b"%s %d" % (name, nth))))
    return found


_FIRST: Final[vec[i64]] = _secrets(b"one")
_SECOND: Final[vec[i64]] = _secrets(b"another")


def name_hash(data: bytes, start: i64, end: i64) -> i64:
    """Of the name that stands there, behind `FRONT` or as many other bytes: 62 bits, of which two names of up to
    `LONGEST` bytes have the same with a chance of one in 2^62, whoever chose them. Nobody gets to see any of it.

    It is multilinear: the halves of its words, each times a secret number of 64 bits, are added modulo 2^64, and the
    highest bits of the sum count. There are two such sums. (Interpreted, nothing is modulo: those bits are the same.)
    Sums of numbered names go up in even steps, and would stand side by side in the table: so they are stirred at the
    end, which takes each of 2^62 numbers to another one."""
    size = end - start
    if size > LONGEST:
        return hash(data[start:end])
    ones = _FIRST
    others = _SECOND
    first = size * ones[0]
    second = size * others[0]
    at = start
    nth: i64 = 1
    while at < end:
        word = read_i64_le(data, at) if at + WORD <= end else last_bytes(data, end, end - at)
        low = word & HALF
        high = (word >> 32) & HALF
        first += low * ones[nth] + high * ones[nth + 1]
        second += low * others[nth] + high * others[nth + 1]
        nth += 2
        at += WORD
    both = ((first >> 33) & TOP) << 31 | ((second >> 33) & TOP)
    both = ((both ^ both >> 29) * STIRRED) & ALL
    return both ^ both >> 32


def last_bytes(data: bytes, end: i64, size: i64) -> i64:
    """Fewer than eight bytes that end there, as one number; before them there are enough others to make it eight."""
    mask: i64 = SEVEN_BYTES >> ((7 - size) << 3)  # and not 1 << ..., which compiled is a C int of 32 bits
    return (read_i64_le(data, end - WORD) >> ((WORD - size) << 3)) & mask


def hash_of(client: bytes) -> i64:
    """The same for a name by itself."""
    data = FRONT + client
    return name_hash(data, len(FRONT), len(data))


def numbers(size: i64) -> vec[i64]:
    """Room for so many."""
    found = vec[i64](capacity=size)
    while len(found) < size:
        found = append(found, i64(0))
    return found


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

    def all_unsaved(self) -> None:
        """A snapshot is begun, which is to have every owner as it is now."""
        words = self.words
        at: i64 = FACTS
        while at < len(words):
            words[at] |= UNSAVED
            at += HEAD
