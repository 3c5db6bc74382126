"""Maps partitions to their keys, which contain the queue's name.

A name is assigned when a partition first occurs, and stored with the frame that creates it. A
partition without a known queue uses its number as name.
"""

from __future__ import annotations

from sluice.store.redis.keys import RedisKeys, partition_name


class PartitionKeys:
    def __init__(self, keys: RedisKeys) -> None:
        self._keys = keys
        self._bases: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._unsaved: list[int] = []  # not stored in Redis yet

    def assign_name(self, pid: int, partition: tuple[str, int] | None) -> None:
        """Assign a name; `partition` is queue and partition number, if they are known."""
        self.restore_name(
            pid, str(pid) if partition is None else partition_name(partition[0], partition[1])
        )
        self._unsaved.append(pid)

    def restore_name(self, pid: int, name: str) -> None:
        """Restore a stored name."""
        self._names[pid] = name
        self._bases[pid] = self._keys.base_key(name, pid)

    def take_unsaved(self) -> list[int]:
        """Return, and forget, the partitions whose names the current frame must store."""
        new, self._unsaved = self._unsaved, []
        return new

    def has_name(self, pid: int) -> bool:
        return pid in self._names

    def base_key(self, pid: int) -> str:
        """Return the base of a partition's keys, also if they are deleted."""
        return self._bases.get(pid) or self._keys.base_key(str(pid), pid)

    def partition_name(self, pid: int) -> str:
        return self._names[pid]

    def forget(self, pid: int) -> None:
        self._names.pop(pid, None)
        self._bases.pop(pid, None)

    def all_base_keys(self) -> list[tuple[int, str]]:
        return list(self._bases.items())
