"""Data of owners that each write needs: four native integers per owner in one array.

An owner object takes four cache lines somewhere in memory, found through a list of pointers. Each
write goes to another one of a hundred thousand owners, and needs half a cache line of data. Here
that is three megabytes for all of them, most of it in a CPU cache.

    hash      of the client's name, secret to this process: the key of `owner_lookup`
    next seq  the sequence of the next value
    rows      location of the owner's rows: index of a chunk (`slab`) << 40
              | number of rows as a power of two << 32 | first word in the chunk
    flags     number of its records << 2 | not yet in the running snapshot << 1
              | writes must use the owner object
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i64_le
from librt.vecs import append, vec
from mypy_extensions import i64

ENTRY_WORDS: Final = 4  # words per owner
NEXT_SEQ_WORD: Final = 1
ROWS_WORD: Final = 2
FLAGS_WORD: Final = 3
HAS_SLOW_PATH: Final = 1  # in the flags
UNSAVED: Final = 2
NUMBER_SHIFT: Final = 2
CHUNK_SHIFT: Final = 40  # in the rows word
ROW_BITS_SHIFT: Final = 32
ROW_BITS_MASK: Final = 0xFF
OFFSET_MASK: Final = 0xFFFF_FFFF

# Constants of `hash_name`.
WORD_BYTES: Final = 8
SEVEN_BYTES_MASK: Final = 0xFF_FFFF_FFFF_FFFF
MIX_MULTIPLIER: Final = 0x1C8E_4F7B_3A59_D62D  # odd
MASK_62_BITS: Final = 0x3FFF_FFFF_FFFF_FFFF
MASK_32_BITS: Final = 0xFFFF_FFFF
MASK_31_BITS: Final = 0x7FFF_FFFF
MAX_FAST_NAME_BYTES: Final = 32  # longer names use Python's hash
TOPIC_PREFIX: Final = b"$ECQ/w/"  # precedes the name where it is hashed most often


def _secret_numbers(name: bytes) -> vec[i64]:
    """Return secret 64-bit numbers: one for the size, two for each word of a name."""
    found = vec[i64]()
    for nth in range(1 + 2 * MAX_FAST_NAME_BYTES // WORD_BYTES):
        found = append(found, i64(hash(b"%s %d" % (name, nth))))
    return found


_FIRST_SECRETS: Final[vec[i64]] = _secret_numbers(b"one")
_SECOND_SECRETS: Final[vec[i64]] = _secret_numbers(b"another")


def hash_name(data: bytes, start: i64, end: i64) -> i64:
    """Return a 62-bit hash of the name between `start` and `end`.

    TOPIC_PREFIX or as many other bytes must precede the name. Two names of up to
    MAX_FAST_NAME_BYTES bytes have the same hash with a probability of 2^-62, even if an attacker
    chose them. The hash never leaves the process.

    It is multilinear: the halves of its words, each multiplied by a secret 64-bit number, are added
    modulo 2^64, and the highest bits of the sum count. There are two such sums. (Interpreted,
    nothing is reduced modulo 2^64: those bits are the same.) The sums of numbered names increase in
    even steps and would be neighbors in the table, so a bijection of 2^62 numbers mixes them at the
    end.
    """
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
    """Read fewer than eight bytes that end at `end`; enough other bytes must precede them."""
    # Not 1 << ..., which compiled is a C int of 32 bits.
    mask: i64 = SEVEN_BYTES_MASK >> ((7 - size) << 3)
    return (read_i64_le(data, end - WORD_BYTES) >> ((WORD_BYTES - size) << 3)) & mask


def hash_client(client: bytes) -> i64:
    """Return the hash of a client name by itself."""
    data = TOPIC_PREFIX + client
    return hash_name(data, len(TOPIC_PREFIX), len(data))


def zeros(size: i64) -> vec[i64]:
    """Return an array of `size` zeros."""
    found = vec[i64](capacity=size)
    while len(found) < size:
        found = append(found, i64(0))
    return found


class OwnerTable:
    def __init__(self) -> None:
        self.words: vec[i64] = vec[i64]()
        self._free_indexes: list[int] = []  # indexes of deleted owners

    def allocate(self) -> i64:
        """Return a free index for a new owner."""
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
        """Mark all owners as missing in the snapshot that begins now."""
        words = self.words
        at: i64 = FLAGS_WORD
        while at < len(words):
            words[at] |= UNSAVED
            at += ENTRY_WORDS
