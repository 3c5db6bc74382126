"""What a coordinator stands on: a board that all nodes see, where facts are pinned, some of them under a lease.

etcd is such a board, and Redis can be made one. What the facts mean is `membership`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.cluster.membership.coordinator import CoordinatorError


class CoordinatorUnavailable(CoordinatorError):
    """Nobody answers there now."""


@dataclass(frozen=True, slots=True)
class Lease:
    id: str
    seconds: float


Change = tuple[str, bytes | None]  # a key and what it is now; None: it is gone


class CoordinationKv(Protocol):
    """Keys are text, values bytes. Every call raises `BoardUnavailable` when no answer comes in time; whether a write
    was done is not known then."""

    def watch(
        self,
        on_snapshot: Callable[[dict[str, bytes]], None],
        on_changes: Callable[[Sequence[Change]], None],
    ) -> None:
        """From now on: first everything that is pinned, then each change in its order. Everything again whenever
        changes may have been missed."""

    async def close(self) -> None: ...

    async def grant(self, seconds: float) -> Lease:
        """A lease that ends unless it is kept, and with it all that hangs on it. It may last longer than asked for."""

    async def keep_alive(self, lease: Lease) -> bool:
        """Start its time anew; False: it has ended."""

    async def revoke(self, lease: Lease) -> None: ...

    async def put_with_lease(self, key: str, value: bytes, lease: Lease) -> None: ...

    async def compare_and_swap(
        self, key: str, old: bytes | None, new: bytes | None, guard: str = ""
    ) -> bytes | None:
        """Make `old` into `new` in one step (None: nothing there), if the key `guard` is there too. What is there after
        that is returned, whoever pinned it: so an answer that was lost may be asked for again."""

    async def revoke_lease_of(self, key: str) -> None:
        """End the lease that a key hangs on."""
