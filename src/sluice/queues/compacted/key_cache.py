"""Cache of recently used keys, looked up by their bytes in a topic.

Most owners have keys of the same names. Such a key is neither cut out of its topic nor hashed
again: it is compared with the key in its cache slot, eight bytes at a time. A client that chooses
colliding keys gains nothing: they are hashed, like every key that was not used recently.
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i64_le
from librt.vecs import append, vec
from mypy_extensions import i64

from sluice.queues.compacted.owner_table import WORD_BYTES, read_tail
from sluice.queues.model import MAX_CACHED_KEY_LENGTH, hash_key

CACHE_SLOTS: Final = 16_384


class KeyCache:
    """`find_slot` returns the slot of a key; its bytes and hash are in `keys` and `key_hashes`."""

    def __init__(self) -> None:
        self.keys: list[bytes] = [b""] * CACHE_SLOTS
        key_hashes = vec[i64](capacity=CACHE_SLOTS)
        while len(key_hashes) < CACHE_SLOTS:
            key_hashes = append(key_hashes, i64(0))
        self.key_hashes: vec[i64] = key_hashes
        # The last eight bytes of each key, or all of a shorter one.
        self._tails: vec[i64] = key_hashes[:]

    def find_slot(self, topic: bytes, start: i64) -> i64:
        """Return the slot of the key at the end of a topic, after at least eight other bytes."""
        end: i64 = len(topic)
        size = end - start
        tail = (
            read_tail(topic, end, size)
            if size < WORD_BYTES
            else read_i64_le(topic, end - WORD_BYTES)
        )
        mixed = _mix(size, tail)
        at = start
        last = end - WORD_BYTES
        while at < last:
            mixed = _mix(mixed, read_i64_le(topic, at))
            at += WORD_BYTES
        slot = (mixed ^ mixed >> 15) & (CACHE_SLOTS - 1)
        if self._tails[slot] != tail or not _starts_with_key(topic, start, self.keys[slot], size):
            key = topic[start:]
            key_hash = hash_key(key)
            if size > MAX_CACHED_KEY_LENGTH:
                # Not worth the memory: the next key in slot 0 replaces it.
                slot = 0
            self.keys[slot] = key
            self.key_hashes[slot] = key_hash
            self._tails[slot] = tail
        return slot


def _mix(mixed: i64, word: i64) -> i64:
    """Mix both into 31 bits, with the same result compiled and interpreted."""
    return ((mixed ^ word & 0x7FFF_FFFF) * 0x2C1B_3C6D ^ (word >> 31) * 0x297A_2D39) & 0x7FFF_FFFF


def _starts_with_key(topic: bytes, start: i64, key: bytes, size: i64) -> bool:
    """Return whether `key` is at `start`. Its last eight bytes are already known to be equal."""
    if len(key) != size:
        return False
    at: i64 = 0
    while at < size - WORD_BYTES:
        if read_i64_le(topic, start + at) != read_i64_le(key, at):
            return False
        at += WORD_BYTES
    return True
