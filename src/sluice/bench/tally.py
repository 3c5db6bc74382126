"""Count what arrived: which messages, how often, in which order, how late.

Compiled, because it runs once for each message. Every payload begins with a header; the rest is
padding.

    at  0   4 bytes   the run: messages of another run are not counted
    at  4   4 bytes   the publisher
    at  8   8 bytes   its sequence, from 0
    at 16   8 bytes   when it was sent, or due: nanoseconds of the monotonic clock

The messages of a publisher rotate among `slots` (keys, queues or owners). Order is guaranteed
within a slot alone.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter
from librt.vecs import append, vec
from mypy_extensions import i64, u8

HEADER_BYTES: Final = 24
# A prime: neighbors in time are far apart in slots, and every slot gets its turn.
STRIDE: Final = 7919
STEPS_PER_DOUBLING: Final = 32  # per doubling: a figure is at most 3 % too high
BUCKETS: Final = 41 * STEPS_PER_DOUBLING  # up to some hours


def slot_of(sequence: i64, slots: i64) -> i64:
    return sequence * STRIDE % slots


class Histogram:
    """Counts of nanoseconds, in steps that grow with the value."""

    def __init__(self) -> None:
        self.counts: list[int] = [0] * BUCKETS

    def add(self, nanoseconds: i64) -> None:
        value = nanoseconds if nanoseconds > 0 else 0
        shift: i64 = 0
        while value >= 2 * STEPS_PER_DOUBLING:
            value >>= 1
            shift += 1
        bucket: i64 = shift * STEPS_PER_DOUBLING + value
        if bucket >= BUCKETS:
            bucket = BUCKETS - 1
        self.counts[bucket] += 1


class Stream:
    """One publisher's messages at one reader, or at one group of readers."""

    def __init__(self, slots: i64) -> None:
        self.doubled: i64 = 0
        self.disordered: i64 = 0
        self._slots: i64 = slots
        self._seen: vec[u8] = vec[u8]()  # a bit for each sequence
        self._last: vec[i64] = vec[i64]()  # by slot: the highest sequence so far
        while i64(len(self._last)) < slots:
            self._last = append(self._last, -1)

    def record(self, sequence: i64) -> None:
        byte_index: i64 = sequence >> 3
        while i64(len(self._seen)) <= byte_index:
            self._seen = append(self._seen, u8(0))
        bit: i64 = 1
        bit <<= sequence & 7
        byte: i64 = i64(self._seen[byte_index])
        if byte & bit:
            self.doubled += 1
            return
        self._seen[byte_index] = u8(byte | bit)
        slot = slot_of(sequence, self._slots)
        if sequence < self._last[slot]:
            self.disordered += 1
        else:
            self._last[slot] = sequence

    def seen(self) -> bytes:
        """Return the bits, lowest sequence first."""
        out = BytesWriter()
        at: i64 = 0
        while at < i64(len(self._seen)):
            out.append(self._seen[at])
            at += 1
        return out.getvalue()


class Tally:
    """What one generator process has received. Readers that share messages share a lane."""

    def __init__(self, run: i64, publishers: i64, slots: i64) -> None:
        self.run: i64 = run
        self.measuring: bool = False
        self.delivered: i64 = 0
        self.foreign: i64 = 0  # of another run, or not ours
        self.last_at: i64 = 0
        self.latency: Histogram = Histogram()
        # Of the generator itself, when it sends at a fixed rate.
        self.lateness: Histogram = Histogram()
        self.streams: dict[int, list[Stream]] = {}
        self._publishers: i64 = publishers
        self._slots: i64 = slots

    def lane(self, number: int) -> list[Stream]:
        """Return the streams of one lane, by publisher."""
        found = self.streams.get(number)
        if found is None:
            found = [Stream(self._slots) for _ in range(int(self._publishers))]
            self.streams[number] = found
        return found
