"""The rows of one owner: a run of a power of two of them, which is a table by the mark of the key.

    row     sequence, address, mark of the key, and time in seconds << 32 | size << 1 | whether it is a tombstone

A row that is free has the sequence 0. Its address says whether who looks for a key has to go on behind it: it is `GONE`
if there was a value, and 0 if there never was one. Some rows are always of the second kind.

Where a key is looked for first depends on numbers that are secret to this process. Marks are no secret, and somebody
could choose keys for them: with keys that all meet in one row, each look would be a walk through all of them.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

ROW_WORDS: Final = 4  # words of a row
ADDRESS_WORD: Final = 1
KEY_HASH_WORD: Final = 2
METADATA_WORD: Final = 3

_LOW_MULTIPLIER: Final[i64] = hash(b"the low half of a mark") & 0x1FFF_FFFF | 1
_HIGH_MULTIPLIER: Final[i64] = hash(b"the high half of a mark") & 0x1FFF_FFFF | 1


def first_slot(key_hash: i64, bits: i64) -> i64:
    """Where a key is looked for first, among `1 << bits` rows: where a line of the cache begins, which has two."""
    mixed: i64 = (key_hash & 0x7FFF_FFFF) * _LOW_MULTIPLIER + (
        (key_hash >> 31) & 0x1_FFFF_FFFF
    ) * _HIGH_MULTIPLIER
    return (mixed >> 24) & ((1 << bits) - 1) & ~1


def find_row(rows: vec[i64], start: i64, bits: i64, key_hash: i64) -> i64:
    """The slot of a key in the run that begins at `start`; -1 when there is none."""
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
    """The slot for a key that is not there."""
    mask: i64 = (1 << bits) - 1
    slot = first_slot(key_hash, bits)
    while rows[start + slot * ROW_WORDS] != 0:
        slot = (slot + 1) & mask
    return slot
