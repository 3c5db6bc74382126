"""The entries that the processes share: the coordination KV of one machine, kept by the supervisor.

`cluster.membership.kv` says what the operations mean. A lease belongs to one process and ends with
it; the supervisor knows when that is, so a lease has no time. For the same reason the claims of a
process end with it too: no node has to find out whether their owner is alive. This module does no
I/O.
"""

from __future__ import annotations

from typing import Final

Change = tuple[str, str | None]  # a key and its value; None: the entry was deleted

NODE_PREFIX: Final = "nodes/"  # the rest of the key is the id of a node, which claims have as value
CLAIM_PREFIX: Final = "claims/"


class SharedEntries:
    """All entries. `take_changes` returns what has changed since its last call, in order."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self._leases: dict[str, str] = {}  # by key
        self._processes: dict[str, int] = {}  # by lease, the number of its process
        self._last_lease = 0
        self._changes: list[Change] = []

    def take_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def grant(self, process: int) -> str:
        self._last_lease += 1
        lease = str(self._last_lease)
        self._processes[lease] = process
        return lease

    def is_alive(self, lease: str) -> bool:
        return lease in self._processes

    def put(self, key: str, value: str, lease: str) -> bool:
        """Write an entry under a lease; return False if the lease has ended."""
        if lease not in self._processes:
            return False
        self._leases[key] = lease
        self._set(key, value)
        return True

    def swap(self, key: str, old: str | None, new: str | None, guard: str) -> str | None:
        """Replace `old` by `new`, if the key `guard` exists too; return the value afterwards."""
        if self.entries.get(key) == old and (not guard or guard in self.entries):
            self._leases.pop(key, None)
            self._set(key, new)
        return self.entries.get(key)

    def process_of(self, key: str) -> int | None:
        """Return the process whose lease an entry has, or None."""
        return self._processes.get(self._leases.get(key, ""))

    def end_lease(self, lease: str) -> None:
        if self._processes.pop(lease, None) is not None:
            for key in [one for one, its_lease in self._leases.items() if its_lease == lease]:
                del self._leases[key]
                self._set(key, None)

    def end_process(self, process: int) -> None:
        """Delete the leases of a process that has ended, and the claims of its nodes."""
        leases = {lease for lease, owner in self._processes.items() if owner == process}
        nodes = {
            key.removeprefix(NODE_PREFIX)
            for key, lease in self._leases.items()
            if lease in leases and key.startswith(NODE_PREFIX)
        }
        for lease in leases:
            self.end_lease(lease)
        for key, value in list(self.entries.items()):
            if key.startswith(CLAIM_PREFIX) and value in nodes:
                self._set(key, None)

    def _set(self, key: str, value: str | None) -> None:
        if self.entries.get(key) == value:
            return
        if value is None:
            del self.entries[key]
        else:
            self.entries[key] = value
        self._changes.append((key, value))
