"""Which incarnation of a node this is, and which other nodes are registered: who may be linked."""

from __future__ import annotations

import asyncio

from sluice.cluster.membership import NodeInfo
from sluice.cluster.transport.link_authentication import LinkKey


class KnownNodes:
    """Shared by the acceptor and the callers of links. `peer_links` changes it."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        # The id of this incarnation. While it is empty, this node neither calls nor accepts calls.
        self.node_id = ""
        self.key: LinkKey | None = None  # for authentication
        self.nodes: dict[str, NodeInfo] = {}  # registered nodes, as last reported
        # Ids that never come back: a new incarnation has a new id.
        self.departed_ids: set[str] = set()
        self._changed = asyncio.Event()

    def join(self, node_id: str, key: LinkKey) -> None:
        self.key = key
        self.node_id = node_id

    def leave(self) -> None:
        self.node_id = ""
        self.nodes = {}

    def update(self, nodes: dict[str, NodeInfo]) -> None:
        self.nodes = dict(nodes)
        self._changed.set()

    async def wait_registered(self, node_id: str, timeout_seconds: float) -> NodeInfo | None:
        """Return a node once it is registered, or None if that takes too long."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while node_id not in self.nodes:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self.nodes[node_id]
