"""Which keys a partition has: by its number, from its queue's name.

A name is given when a partition is first heard of, and written down with the frame that brings it. A partition of which
nobody knows anything has its number for a name.
"""

from __future__ import annotations

from sluice.store.redis.keys import Keys, partition_name


class Places:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._bases: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._new: list[int] = []  # not written down in Redis yet

    def name(self, pid: int, place: tuple[str, int] | None) -> None:
        """`place` is its queue and its number in it, if they are known."""
        self.load(pid, str(pid) if place is None else partition_name(place[0], place[1]))
        self._new.append(pid)

    def load(self, pid: int, name: str) -> None:
        """From what was written down."""
        self._names[pid] = name
        self._bases[pid] = self._keys.base(name, pid)

    def take_new(self) -> list[int]:
        """Those that must be written down with the frame that is committed now."""
        new, self._new = self._new, []
        return new

    def knows(self, pid: int) -> bool:
        return pid in self._names

    def base(self, pid: int) -> str:
        """The base of its keys, whatever has become of them."""
        return self._bases.get(pid) or self._keys.base(str(pid), pid)

    def name_of(self, pid: int) -> str:
        return self._names[pid]

    def forget(self, pid: int) -> None:
        self._names.pop(pid, None)
        self._bases.pop(pid, None)

    def all(self) -> list[tuple[int, str]]:
        return list(self._bases.items())
