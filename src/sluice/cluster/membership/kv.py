"""The interface of a coordination KV: entries that all nodes see, some of them under a lease.

`etcd_kv` and `redis_kv` implement it. It does not know what entries mean; `membership` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.cluster.membership.coordinator import CoordinatorError


class CoordinatorUnavailable(CoordinatorError):
    """The coordinator does not answer now."""


@dataclass(frozen=True, slots=True)
class Lease:
    id: str
    seconds: float


Change = tuple[str, bytes | None]  # a key and its value; None: the entry was deleted


class CoordinationKv(Protocol):
    """A key-value store with leases. Keys are text, values bytes.

    Every call raises `CoordinatorUnavailable` if no answer arrives in time; the caller then does
    not know whether a write took effect.
    """

    def watch(
        self,
        on_snapshot: Callable[[dict[str, bytes]], None],
        on_changes: Callable[[Sequence[Change]], None],
    ) -> None:
        """Report all entries, then each change in order.

        `on_snapshot` is called again whenever changes may have been missed.
        """

    async def close(self) -> None: ...

    async def grant(self, seconds: float) -> Lease:
        """Create a lease. When it ends, its entries are deleted.

        It may last longer than `seconds`.
        """

    async def keep_alive(self, lease: Lease) -> bool:
        """Restart the time of a lease; return False if it has ended."""

    async def revoke(self, lease: Lease) -> None: ...

    async def put_with_lease(self, key: str, value: bytes, lease: Lease) -> None: ...

    async def compare_and_swap(
        self, key: str, old: bytes | None, new: bytes | None, guard: str = ""
    ) -> bytes | None:
        """Replace `old` by `new` in one step (None: no entry), if the key `guard` exists too.

        Return the value after the call, even if another node wrote it: so a caller may repeat a
        call whose answer was lost.
        """

    async def revoke_lease_of(self, key: str) -> None:
        """End the lease of an entry."""
