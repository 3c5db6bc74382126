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

ENTRY_WORDS: Final = 4  # words of a head
NEXT_SEQ_WORD: Final = 1
ROWS_WORD: Final = 2
FLAGS_WORD: Final = 3
HAS_SLOW_PATH: Final = 1  # in `facts`
UNSAVED: Final = 2
NUMBER_SHIFT: Final = 2
CHUNK_SHIFT: Final = 40  # in `base`
ROW_BITS_SHIFT: Final = 32
ROW_BITS_MASK: Final = 0xFF
OFFSET_MASK: Final = 0xFFFF_FFFF

# The hash of a name: see `name_hash`.
WORD_BYTES: Final = 8
SEVEN_BYTES_MASK: Final = 0xFF_FFFF_FFFF_FFFF
MIX_MULTIPLIER: Final = 0x1C8E_4F7B_3A59_D62D  # odd
MASK_62_BITS: Final = 0x3FFF_FFFF_FFFF_FFFF
MASK_32_BITS: Final = 0xFFFF_FFFF
MASK_31_BITS: Final = 0x7FFF_FFFF
MAX_FAST_NAME_BYTES: Final = 32  # bytes of a name for which it is quicker
TOPIC_PREFIX: Final = b"$ECQ/w/"  # what stands before the name where it is hashed most often


def _secret_numbers(name: bytes) -> vec[i64]:
    """Numbers of 64 bits that nobody outside this process knows: one for the size, two for each word of a name."""
    found = vec[i64]()
    for nth in range(1 + 2 * MAX_FAST_NAME_BYTES // WORD_BYTES):
        found = append(found, i64(hash(b"%s %d" % (name, nth))))
    return found


_FIRST_SECRETS: Final[vec[i64]] = _secret_numbers(b"one")
_SECOND_SECRETS: Final[vec[i64]] = _secret_numbers(b"another")


def hash_name(data: bytes, start: i64, end: i64) -> i64:
    """Of the name that stands there, behind `FRONT` or as many other bytes: 62 bits, of which two names of up to
    `LONGEST` bytes have the same with a chance of one in 2^62, whoever chose them. Nobody gets to see any of it.

    It is multilinear: the halves of its words, each times a secret number of 64 bits, are added modulo 2^64, and the
    highest bits of the sum count. There are two such sums. (Interpreted, nothing is modulo: those bits are the same.)
    Sums of numbered names go up in even steps, and would stand side by side in the table: so they are stirred at the
    end, which takes each of 2^62 numbers to another one."""
    size = end - start
    if size > MAX_FAST_NAME_BYTES:
        return hash(data[start:end])
    first_secrets = _FIRST_SECRETS
    second_secrets = _SECOND_SECRETS
    first = size * first_secrets[0]
    second = size * second_secrets[0]
    at = start
    nth: i64 = 1
    while at < end:
        word = read_i64_le(data, at) if at + WORD_BYTES <= end else read_tail(data, end, end - at)
        low = word & MASK_32_BITS
        high = (word >> 32) & MASK_32_BITS
        first += low * first_secrets[nth] + high * first_secrets[nth + 1]
        second += low * second_secrets[nth] + high * second_secrets[nth + 1]
        nth += 2
        at += WORD_BYTES
    mixed = ((first >> 33) & MASK_31_BITS) << 31 | ((second >> 33) & MASK_31_BITS)
    mixed = ((mixed ^ mixed >> 29) * MIX_MULTIPLIER) & MASK_62_BITS
    return mixed ^ mixed >> 32


def read_tail(data: bytes, end: i64, size: i64) -> i64:
    """Fewer than eight bytes that end there, as one number; before them there are enough others to make it eight."""
    mask: i64 = SEVEN_BYTES_MASK >> (
        (7 - size) << 3
    )  # and not 1 << ..., which compiled is a C int of 32 bits
    return (read_i64_le(data, end - WORD_BYTES) >> ((WORD_BYTES - size) << 3)) & mask


def hash_client(client: bytes) -> i64:
    """The same for a name by itself."""
    data = TOPIC_PREFIX + client
    return hash_name(data, len(TOPIC_PREFIX), len(data))


def zeros(size: i64) -> vec[i64]:
    """Room for so many."""
    found = vec[i64](capacity=size)
    while len(found) < size:
        found = append(found, i64(0))
    return found


class OwnerTable:
    def __init__(self) -> None:
        self.words: vec[i64] = vec[i64]()
        self._free_indexes: list[int] = []  # places of owners that are gone

    def allocate(self) -> i64:
        """A place for a new owner."""
        if self._free_indexes:
            return self._free_indexes.pop()
        words = self.words
        owner_index: i64 = len(words) // ENTRY_WORDS
        for _ in range(ENTRY_WORDS):
            words = append(words, i64(0))
        self.words = words
        return owner_index

    def release(self, owner_index: i64) -> None:
        self._free_indexes.append(int(owner_index))

    def mark_all_unsaved(self) -> None:
        """A snapshot is begun, which is to have every owner as it is now."""
        words = self.words
        at: i64 = FLAGS_WORD
        while at < len(words):
            words[at] |= UNSAVED
            at += ENTRY_WORDS
