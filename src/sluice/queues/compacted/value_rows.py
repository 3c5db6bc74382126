"""The rows of one owner: a hash table with a power of two of rows, by the hash of the key.

    row     sequence, address, key hash, and time in seconds << 32 | size << 1 | is tombstone

A free row has the sequence 0. Its address tells whether a search must continue after it: NO_ADDRESS
if the row had a value, and 0 if it never had one. Some rows are always of the second kind.

The first slot of a key depends on numbers that are secret to this process. Key hashes are no
secret, and an attacker could choose keys for them: with keys that all collide in one row, each
lookup would scan all of them.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

ROW_WORDS: Final = 4  # words per row
ADDRESS_WORD: Final = 1
KEY_HASH_WORD: Final = 2
METADATA_WORD: Final = 3

_LOW_MULTIPLIER: Final[i64] = hash(b"low half of a key hash") & 0x1FFF_FFFF | 1
_HIGH_MULTIPLIER: Final[i64] = hash(b"high half of a key hash") & 0x1FFF_FFFF | 1


def first_slot(key_hash: i64, bits: i64) -> i64:
    """Return the first slot of a key among `1 << bits` rows.

    It is the start of a cache line of two rows.
    """
    mixed: i64 = (key_hash & 0x7FFF_FFFF) * _LOW_MULTIPLIER + (
        (key_hash >> 31) & 0x1_FFFF_FFFF
    ) * _HIGH_MULTIPLIER
    return (mixed >> 24) & ((1 << bits) - 1) & ~1


def find_row(rows: vec[i64], start: i64, bits: i64, key_hash: i64) -> i64:
    """Return the slot of a key in the rows that begin at `start`; -1 if there is none."""
    mask: i64 = (1 << bits) - 1
    slot = first_slot(key_hash, bits)
    at = start + slot * ROW_WORDS
    while rows[at + KEY_HASH_WORD] != key_hash or rows[at] == 0:
        if rows[at + ADDRESS_WORD] == 0:
            return -1
        slot = (slot + 1) & mask
        at = start + slot * ROW_WORDS
    return slot


def find_free_row(rows: vec[i64], start: i64, bits: i64, key_hash: i64) -> i64:
    """Return the slot for a key that is not stored."""
    mask: i64 = (1 << bits) - 1
    slot = first_slot(key_hash, bits)
    while rows[start + slot * ROW_WORDS] != 0:
        slot = (slot + 1) & mask
    return slot
