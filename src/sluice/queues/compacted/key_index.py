"""What a key is known by, and where its last message stands in a compacted queue."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from librt.strings import read_i64_le
from mypy_extensions import i64

from sluice.queues.model.cursor import SEQUENCE_BITS, SEQUENCE_MASK
from sluice.queues.compacted.last_values import Latest
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue

if TYPE_CHECKING:
    from sluice.queues.engine import Engine

MOST_KNOWN: Final = 16_384
LONGEST_KNOWN: Final = 128

_MARKS: Final[dict[bytes, int]] = {}  # of keys that were used lately: most owners have keys of the same names


def mark_of(key: bytes) -> i64:
    """64 bits of BLAKE2b, so that a key is a number in memory and in the header of a record. Of a million keys two have
    the same mark with a chance of one in thirty million; and nobody can find another key for a given mark, to overwrite
    what is not his."""
    known = _MARKS.get(key)
    if known is not None:
        return known
    mark = read_i64_le(blake2b(key, digest_size=8).digest(), 0)
    if len(key) <= LONGEST_KNOWN:
        if len(_MARKS) >= MOST_KNOWN:
            _MARKS.clear()
        _MARKS[key] = int(mark)
    return mark


def place_of(engine: Engine, queue: Queue, key: bytes) -> tuple[Partition, int] | None:
    """Where the last message of a key stands: after a change of the number of partitions it may be any of them."""
    place = queue.latest.get(int(mark_of(key))) if key else -1
    if place < 0:
        return None
    partition = engine.partitions.get(place >> SEQUENCE_BITS)
    seq = place & SEQUENCE_MASK
    return (partition, seq) if partition is not None and partition.holds(seq) else None


def remember(engine: Engine, queue: Queue, partition: Partition, seq: i64, key: bytes) -> None:
    """This message is the last of its key."""
    if not key:
        return
    latest = queue.latest
    mark = int(mark_of(key))
    nth = latest.nth(mark)
    if len(latest.parts[nth]) > 2 * queue.depth // len(latest.parts) + 64:
        forget_gone(engine, latest, nth)
    latest.put(mark, (int(partition.pid) << SEQUENCE_BITS) | int(seq))


def forget_gone(engine: Engine, latest: Latest, nth: int) -> None:
    """Keys whose last message has expired or was purged: nobody says so when it happens."""
    living: dict[int, int] = {}
    for mark, place in latest.parts[nth].items():
        partition = engine.partitions.get(place >> SEQUENCE_BITS)
        if partition is not None and partition.holds(place & SEQUENCE_MASK):
            living[mark] = place
    latest.replace(nth, living)
