"""Which keys a partition has: by its number, from its queue's name.

Names come from `Meaning`, the side that knows what records are about. A partition it knows nothing of has its number
for a name. What was once given stays: it is written down with the first frame that uses it.
"""

from __future__ import annotations

from sluice.store.redis.keys import Keys, partition_name


class Places:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._bases: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self.kept: set[int] = set()  # those that Redis has written down

    def name(self, pid: int, queue: str, number: int) -> None:
        if pid not in self._names:
            self._load(pid, partition_name(queue, number))

    def _load(self, pid: int, name: str) -> None:
        self._names[pid] = name
        self._bases[pid] = self._keys.base(name, pid)

    def load(self, pid: int, name: str) -> None:
        """From what was written down."""
        self._load(pid, name)
        self.kept.add(pid)

    def knows(self, pid: int) -> bool:
        return pid in self._names

    def base(self, pid: int) -> str:
        base = self._bases.get(pid)
        if base is None:
            self._load(pid, str(pid))
            base = self._bases[pid]
        return base

    def name_of(self, pid: int) -> str:
        self.base(pid)
        return self._names[pid]

    def forget(self, pid: int) -> None:
        self._names.pop(pid, None)
        self._bases.pop(pid, None)
        self.kept.discard(pid)

    def all(self) -> list[tuple[int, str]]:
        return list(self._bases.items())
