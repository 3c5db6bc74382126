"""Where the last message of each key of a shared compacted queue stands, by the key's mark.

One dict would be simpler. With ten million keys nobody is served for half a second while it grows, and for as long
again while a snapshot makes its copy. So it is cut into parts, by the mark, as soon as it is large: each grows by
itself, and a snapshot copies one at a time. A part that changes before its turn has come is copied first, so that the
snapshot still says how things stood when it was begun.
"""

from __future__ import annotations

from typing import Final

MAX_UNSHARDED_KEYS: Final = 65_536  # keys that need no parts
SHARD_COUNT: Final = 64  # of more than those


class LastValues:
    def __init__(self) -> None:
        self.shards: list[dict[int, int]] = [{}]
        self._snapshot_shards: int = 0  # parts that there were when the snapshot was begun,
        self._shards_written: int = 0  # how many of them it has
        self._shard_copies: dict[
            int, dict[int, int]
        ] = {}  # and those that have changed since, as they were

    def __len__(self) -> int:
        return sum([len(shard) for shard in self.shards])

    def shard_index(self, key_hash: int) -> int:
        """Which part a key belongs to."""
        return key_hash & (len(self.shards) - 1)

    def get(self, key_hash: int) -> int:
        """The place of a key's last message; -1 when there is none."""
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
        """What is left of a part."""
        if self._snapshot_shards:
            self._copy_before_change(index)
        self.shards[index] = shard

    def _split(self) -> None:
        whole = self.shards[0]
        self.shards = [{} for _ in range(SHARD_COUNT)]
        for key_hash, location in whole.items():
            self.shards[key_hash & (SHARD_COUNT - 1)][key_hash] = location

    # ---- in a snapshot

    def begin_snapshot(self) -> None:
        """A snapshot is begun, which is to say how things stand now."""
        self._snapshot_shards = len(self.shards)
        self._shards_written = 0
        self._shard_copies = {}

    def _copy_before_change(self, index: int) -> None:
        """A part is about to change."""
        index &= (
            self._snapshot_shards - 1
        )  # while there was one part, all that are cut from it are that one
        if index >= self._shards_written and index not in self._shard_copies:
            self._shard_copies[index] = dict(self.shards[index])

    def next_snapshot_shard(self) -> dict[int, int] | None:
        """The next part as it was, which is the caller's own; None when it has all."""
        if self._shards_written >= self._snapshot_shards:
            self._snapshot_shards = 0
            return None
        self._copy_before_change(self._shards_written)
        shard = self._shard_copies.pop(self._shards_written)
        self._shards_written += 1
        return shard
