"""Keys that were written lately, found by their bytes where they stand in a topic.

Most owners have keys of the same names. Such a key is neither cut out of its topic nor hashed again: eight bytes at a
time it is compared with the one that stands at its spot here. Who chooses keys that meet at one spot gains nothing and
has them hashed, as every key is that was not used lately.
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i64_le
from librt.vecs import append, vec
from mypy_extensions import i64

from sluice.queues.compacted.owner_table import WORD, last_bytes
from sluice.queues.compacted.key_index import LONGEST_KNOWN, mark_of

SPOTS: Final = 16_384


class KnownKeys:
    """`at` finds the spot of a key, whose bytes and mark are then in `keys` and `marks`."""

    def __init__(self) -> None:
        self.keys: list[bytes] = [b""] * SPOTS
        marks = vec[i64](capacity=SPOTS)
        while len(marks) < SPOTS:
            marks = append(marks, i64(0))
        self.marks: vec[i64] = marks
        self._tails: vec[i64] = marks[:]  # the last eight bytes of each, or all of a shorter one

    def at(self, topic: bytes, start: i64) -> i64:
        """The spot of the key that is the rest of a topic. In front of it there are eight bytes or more."""
        end: i64 = len(topic)
        size = end - start
        tail = last_bytes(topic, end, size) if size < WORD else read_i64_le(topic, end - WORD)
        mixed = _mix(size, tail)
        at = start
        last = end - WORD
        while at < last:
            mixed = _mix(mixed, read_i64_le(topic, at))
            at += WORD
        spot = (mixed ^ mixed >> 15) & (SPOTS - 1)
        if self._tails[spot] != tail or not _begins(topic, start, self.keys[spot], size):
            key = topic[start:]
            mark = mark_of(key)
            if size > LONGEST_KNOWN:
                spot = 0  # not worth the memory: the next one that stands here takes its place
            self.keys[spot] = key
            self.marks[spot] = mark
            self._tails[spot] = tail
        return spot


def _mix(mixed: i64, word: i64) -> i64:
    """31 bits of both, so that it is the same number wherever it is counted."""
    return ((mixed ^ word & 0x7FFF_FFFF) * 0x2C1B_3C6D ^ (word >> 31) * 0x297A_2D39) & 0x7FFF_FFFF


def _begins(topic: bytes, start: i64, key: bytes, size: i64) -> bool:
    """Whether `key` is what stands there, but for its last eight bytes, which are known to be the same."""
    if len(key) != size:
        return False
    at: i64 = 0
    while at < size - WORD:
        if read_i64_le(topic, start + at) != read_i64_le(key, at):
            return False
        at += WORD
    return True
