"""What a write needs to know of an owner: four native integers, side by side for all owners.

The owner itself is an object of four lines of the cache somewhere in memory, to which a list of pointers leads. Writes
go to one of a hundred thousand each time, and what they need of it fits into half a line. Here that is three megabytes
for all of them, most of it in some cache.

    hash    of the client's name, secret to this process: by it the head of an owner is found (`finder`)
    next    the sequence of the next value
    base    where the owner's rows are: the number of a piece (`space`) << 40 | how many there are, as a power of two
            << 32 | the word of the piece where they begin
    facts   the number under which its records are kept << 1 | whether a write has to look at the owner itself
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
PIECE_AT: Final = 40  # in `base`
BITS_AT: Final = 32
BITS_MASK: Final = 0xFF
WORD_MASK: Final = 0xFFFF_FFFF

# The hash of a name: see `name_hash`.
WORD: Final = 8
SEVEN_BYTES: Final = 0xFF_FFFF_FFFF_FFFF
LONGEST: Final = 32  # bytes of a name for which it is quicker
PRIME: Final = 0x7FFF_FFFF
FRONT: Final = b"$ECQ/w/"  # what stands before the name where it is hashed most often

_FIRST: Final[i64] = hash(b"one secret number") & 0x3FFF_FFFF | 0x100
_SECOND: Final[i64] = hash(b"another secret number") & 0x3FFF_FFFF | 0x100


def name_hash(data: bytes, start: i64, end: i64) -> i64:
    """Of the name that stands there, behind `FRONT` or as many other bytes. It is the value of two polynomials, whose
    coefficients are the bytes of the name, at two points that nobody outside knows: 62 bits, of which two names of up
    to `LONGEST` bytes have the same with a chance of one in 2^52, whoever chose them. Nobody gets to see any of it."""
    size = end - start
    if size > LONGEST:
        return hash(data[start:end])
    first = size
    second = size
    at = start
    while at + WORD <= end:
        word = read_i64_le(data, at)
        first = _fold(first, word, _FIRST)
        second = _fold(second, word, _SECOND)
        at += WORD
    if at < end:
        word = last_bytes(data, end, end - at)
        first = _fold(first, word, _FIRST)
        second = _fold(second, word, _SECOND)
    return _rest(first) << 31 | _rest(second)


def last_bytes(data: bytes, end: i64, size: i64) -> i64:
    """Fewer than eight bytes that end there, as one number; before them there are enough others to make it eight."""
    mask: i64 = SEVEN_BYTES >> ((7 - size) << 3)  # and not 1 << ..., which compiled is a C int of 32 bits
    return (read_i64_le(data, end - WORD) >> ((WORD - size) << 3)) & mask


def _fold(sum: i64, word: i64, point: i64) -> i64:
    """Three more coefficients, from eight bytes. What comes out is below 2^32, and the same modulo `PRIME`."""
    sum = sum * point + (word & 0x3F_FFFF)
    sum = (sum & PRIME) + (sum >> 31)
    sum = sum * point + ((word >> 22) & 0x1F_FFFF)
    sum = (sum & PRIME) + (sum >> 31)
    sum = sum * point + ((word >> 43) & 0x1F_FFFF)
    return (sum & PRIME) + (sum >> 31)


def _rest(sum: i64) -> i64:
    """Modulo `PRIME`, of what is below 2^32: a division would take longer than all the rest."""
    sum = (sum & PRIME) + (sum >> 31)
    return sum if sum < PRIME else sum - PRIME


def hash_of(client: bytes) -> i64:
    """The same for a name by itself."""
    data = FRONT + client
    return name_hash(data, len(FRONT), len(data))


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
