"""Index of a shared compacted queue: key hash to the location of the key's last message.

One dict would be simpler. With ten million keys it would block the broker for half a second while
it grows, and as long again while a snapshot copies it. So a large index is split into shards by the
key hash: each grows on its own, and a snapshot copies one at a time. A shard that changes before
its turn is copied first, so that the snapshot shows the state when it began. A removed message
leaves its key here; `KeyCompaction` ignores it and drops it later.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from librt.strings import read_i64_le
from mypy_extensions import i64

MAX_CACHED_KEYS: Final = 16_384
MAX_CACHED_KEY_LENGTH: Final = 128
MAX_UNSHARDED_KEYS: Final = 65_536  # up to so many keys, there is one shard
SHARD_COUNT: Final = 64  # beyond that

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


class LastValues:
    def __init__(self) -> None:
        self.shards: list[dict[int, int]] = [{}]
        self._snapshot_shards: int = 0  # shards when the snapshot began
        self._shards_written: int = 0  # shards that the snapshot has
        # Shards that have changed since, as they were.
        self._shard_copies: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return sum([len(shard) for shard in self.shards])

    def shard_index(self, key_hash: int) -> int:
        """Return the shard of a key."""
        return key_hash & (len(self.shards) - 1)

    def get(self, key_hash: int) -> int:
        """Return the location of a key's last message; -1 if there is none."""
        return self.shards[self.shard_index(key_hash)].get(key_hash, -1)

    def put(self, key_hash: int, location: int) -> None:
        index = self.shard_index(key_hash)
        if self._snapshot_shards:
            self._copy_before_change(index)
        shard = self.shards[index]
        shard[key_hash] = location
        if len(self.shards) == 1 and len(shard) > MAX_UNSHARDED_KEYS:
            self._split()

    def replace_shard(self, index: int, shard: dict[int, int]) -> None:
        """Replace a shard by its remaining keys."""
        if self._snapshot_shards:
            self._copy_before_change(index)
        self.shards[index] = shard

    def _split(self) -> None:
        whole = self.shards[0]
        self.shards = [{} for _ in range(SHARD_COUNT)]
        for key_hash, location in whole.items():
            self.shards[key_hash & (SHARD_COUNT - 1)][key_hash] = location

    # ---- snapshots

    def begin_snapshot(self) -> None:
        """Begin a snapshot of the current state."""
        self._snapshot_shards = len(self.shards)
        self._shards_written = 0
        self._shard_copies = {}

    def _copy_before_change(self, index: int) -> None:
        """Copy a shard for the snapshot before it changes."""
        # If there was one shard when the snapshot began, all later shards come from it.
        index &= self._snapshot_shards - 1
        if index >= self._shards_written and index not in self._shard_copies:
            self._shard_copies[index] = dict(self.shards[index])

    def next_snapshot_shard(self) -> dict[int, int] | None:
        """Return the next shard as it was, for the caller to keep; None after the last."""
        if self._shards_written >= self._snapshot_shards:
            self._snapshot_shards = 0
            return None
        self._copy_before_change(self._shards_written)
        shard = self._shard_copies.pop(self._shards_written)
        self._shards_written += 1
        return shard
