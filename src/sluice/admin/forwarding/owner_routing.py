"""To which node a request about a cell goes: to its owner. REST and gRPC wait for it alike."""

from __future__ import annotations

import asyncio
from typing import Final

from sluice.cluster.membership import Directory, NodeInfo
from sluice.errors import StoreError

OWNER_WAIT_SECONDS: Final = 5.0  # for a cell that moves
RETRY_PAUSE_SECONDS: Final = 0.1
GATHER_TIMEOUT_SECONDS: Final = 5.0  # for the lists of other nodes


class CellUnreachable(StoreError):
    """No node answers for a part of the cluster."""

    def __init__(self, owner: NodeInfo | None) -> None:
        super().__init__(
            "this part of the cluster is not reachable: "
            + (
                "no node owns it now"
                if owner is None
                else f"node {owner.name} owns it and does not answer"
            ),
            "Try again in a moment",
        )


class OwnerAttempts:
    """Attempts to reach the owner of a cell.

    While a cell moves, it has no owner, or one that does not answer: the caller tries the next one.
    """

    def __init__(self, directory: Directory, cell: int) -> None:
        self._directory = directory
        self._cell = cell
        self._deadline = asyncio.get_running_loop().time() + OWNER_WAIT_SECONDS
        self._owner: NodeInfo | None = None  # of the last attempt

    async def next_owner(self) -> NodeInfo:
        """Return the owner at the next attempt; raise `CellUnreachable` when time is over."""
        if self._owner is not None:
            await self._pause()
        while (owner := self._directory.owner_of(self._cell)) is None:
            self._owner = None
            await self._pause()
        self._owner = owner
        return owner

    async def _pause(self) -> None:
        if asyncio.get_running_loop().time() > self._deadline:
            raise CellUnreachable(self._owner)
        await asyncio.sleep(RETRY_PAUSE_SECONDS)
