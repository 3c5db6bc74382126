"""Hashes of keys, and the location of each key's last message in a shared compacted queue."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from librt.strings import read_i64_le
from mypy_extensions import i64

from sluice.queues.model.cursor import SEQUENCE_BITS, SEQUENCE_MASK
from sluice.queues.model.last_values import LastValues
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue

if TYPE_CHECKING:
    from sluice.queues.engine import Engine

MAX_CACHED_KEYS: Final = 16_384
MAX_CACHED_KEY_LENGTH: Final = 128

# Recently used keys: most owners have keys of the same names.
_KEY_HASHES: Final[dict[bytes, int]] = {}


def hash_key(key: bytes) -> i64:
    """Return 64 bits of BLAKE2b, which identify a key in memory and in the header of a record.

    Among a million keys, two have the same hash with a probability of one in thirty million. No
    client can find a second key for a given hash to overwrite a value of another client.
    """
    cached = _KEY_HASHES.get(key)
    if cached is not None:
        return cached
    key_hash = read_i64_le(blake2b(key, digest_size=8).digest(), 0)
    if len(key) <= MAX_CACHED_KEY_LENGTH:
        if len(_KEY_HASHES) >= MAX_CACHED_KEYS:
            _KEY_HASHES.clear()
        _KEY_HASHES[key] = int(key_hash)
    return key_hash


def find_last_message(engine: Engine, queue: Queue, key: bytes) -> tuple[Partition, int] | None:
    """Return partition and sequence of a key's last message, or None.

    After a change of the partition count it may be in any partition.
    """
    location = queue.last_values.get(int(hash_key(key))) if key else -1
    if location < 0:
        return None
    partition = engine.partitions.get(location >> SEQUENCE_BITS)
    seq = location & SEQUENCE_MASK
    return (partition, seq) if partition is not None and partition.holds(seq) else None


def set_last_message(
    engine: Engine, queue: Queue, partition: Partition, seq: i64, key: bytes
) -> None:
    """Record this message as the last one of its key."""
    if not key:
        return
    last_values = queue.last_values
    key_hash = int(hash_key(key))
    nth = last_values.shard_index(key_hash)
    if len(last_values.shards[nth]) > 2 * queue.depth // len(last_values.shards) + 64:
        drop_deleted_keys(engine, last_values, nth)
    last_values.put(key_hash, (int(partition.pid) << SEQUENCE_BITS) | int(seq))


def drop_deleted_keys(engine: Engine, last_values: LastValues, nth: int) -> None:
    """Drop keys whose last message has expired or was purged: removals do not update the index."""
    live: dict[int, int] = {}
    for key_hash, location in last_values.shards[nth].items():
        partition = engine.partitions.get(location >> SEQUENCE_BITS)
        if partition is not None and partition.holds(location & SEQUENCE_MASK):
            live[key_hash] = location
    last_values.replace_shard(nth, live)
