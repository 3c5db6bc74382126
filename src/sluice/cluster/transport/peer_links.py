"""Streams to the cells of other nodes: one link to each node, and one from each.

A node calls every other node and keeps that link up. The streams that it dials use its own link;
the streams that the peer dials use the peer's. Heartbeats in both directions reveal silence. After
a broken link, a probe of the peer's port shows whether the process is gone: a host that refuses the
connection has no listener.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sluice.cluster.membership import NodeInfo
from sluice.cluster.transport.known_nodes import KnownNodes
from sluice.cluster.transport.link_acceptor import LinkAcceptor
from sluice.cluster.transport.link_authentication import LinkKey
from sluice.cluster.transport.link_connection import LinkConnection
from sluice.cluster.transport.link_sockets import UNIX_PREFIX, LinkOptions, LinkSockets
from sluice.cluster.transport.outgoing_link import OutgoingLink, ping
from sluice.cluster.transport.refusal_log import RefusalLog
from sluice.cluster.transport.streams import (
    NODE_TARGET,
    AcceptStream,
    NoOwner,
    StreamLost,
    StreamProtocol,
)
from sluice.units import Address


def _ignore_received(node_id: str) -> None:
    """Ignore data of an incoming link: it does not show that we can reach the node."""


def refuse_stream(cell: int, greeting: bytes, node_id: str) -> StreamProtocol | None:
    return None


class PeerLinks:
    """The links to all other nodes. `owner_of` returns the node that owns a cell now."""

    def __init__(self, options: LinkOptions, owner_of: Callable[[int], NodeInfo | None]) -> None:
        self.accept: AcceptStream = refuse_stream
        # Called with the id of a node whose address has no listener any more.
        self.on_peer_gone: Callable[[str], None] = lambda node_id: None
        self.address = options.listen  # with the actual port, once it is open
        self.options = options
        # By node id: the time of the last received message, by the loop's clock.
        self.last_received_at: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()
        self._owner_of = owner_of
        self._known = KnownNodes(options.cluster)
        self._sockets = LinkSockets(options)
        self._acceptor = LinkAcceptor(self._sockets, self._known, self._new_incoming)
        self._outgoing: dict[str, OutgoingLink] = {}
        self._closing: set[asyncio.Task[None]] = set()  # of outgoing links
        self._refusals = RefusalLog("link not established", self._loop.time)

    @property
    def link(self) -> str:
        """Return the link address under which other processes of this machine reach this node."""
        path = self.options.path
        return str(self.address) if path is None else f"{UNIX_PREFIX}{path}"

    async def open(self) -> None:
        """Listen for other nodes. Call it before registering, so that they can connect at once."""
        self.address = Address(self.options.listen.host, self._acceptor.open())

    async def close(self) -> None:
        """End every stream and stop listening."""
        self.leave()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._acceptor.close()

    def join(self, node_id: str, key: LinkKey) -> None:
        """Act as this incarnation from now on. Call it before registering: peers call at once."""
        self.leave()
        self._known.join(node_id, key)

    def leave(self) -> None:
        """Close outgoing and incoming links: this incarnation is over."""
        self._known.leave()
        for node_id in list(self._outgoing):
            self._close_link(node_id, "this node has left the cluster")
        for link in list(self._acceptor.links):
            link.end("this node has left the cluster")

    def update_nodes(self, nodes: dict[str, NodeInfo]) -> None:
        """Set the live nodes: connect to new ones and close the links to others."""
        known = self._known
        if not known.node_id:
            return
        known.update(nodes)
        for node_id in [one for one in self._outgoing if one not in nodes]:
            known.departed_ids.add(node_id)
            self._close_link(node_id, f"node {node_id} has left or was evicted")
        for link in list(self._acceptor.links):
            if link.peer not in nodes:
                link.end(f"node {link.peer} has left or was evicted")
        for node_id, node in nodes.items():
            if node_id != known.node_id and node_id not in self._outgoing:
                self.last_received_at[node_id] = self._loop.time()
                self._outgoing[node_id] = OutgoingLink(
                    node,
                    self._sockets,
                    known,
                    self._new_outgoing,
                    self._report_peer_gone,
                    self._refusals,
                )

    async def is_reachable(self, link: str, others: list[NodeInfo]) -> bool:
        """Return whether a node with this link address should join.

        It must be reachable itself and must reach at least half of the live nodes. An evicted node
        that comes back too early would only move cells to a place that no client reaches.
        """
        found = await asyncio.gather(
            ping(self._sockets, link), *(ping(self._sockets, one.link) for one in others)
        )
        # Without the nodes that are gone.
        reachable = [one for one in found[1:] if one is not None]
        return bool(found[0]) and 2 * sum(reachable) >= len(reachable)

    def _close_link(self, node_id: str, reason: str) -> None:
        self.last_received_at.pop(node_id, None)
        task = self._outgoing.pop(node_id).close(reason)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _report_peer_gone(self, node_id: str) -> None:
        self.on_peer_gone(node_id)

    # ---- streams

    def dial(self, cell: int, greeting: bytes, protocol: StreamProtocol) -> None:
        node = self._owner_of(cell)
        link = self._outgoing.get(node.id) if node is not None else None
        if link is None:
            self._loop.call_soon(protocol.connection_lost, NoOwner(cell))
        else:
            link.mux.dial(cell, greeting, protocol)

    def dial_node(self, node_id: str, greeting: bytes, protocol: StreamProtocol) -> None:
        link = self._outgoing.get(node_id)
        if link is None:
            self._loop.call_soon(
                protocol.connection_lost, StreamLost(f"node {node_id} is not in the cluster")
            )
        else:
            link.mux.dial(NODE_TARGET, greeting, protocol)

    def _new_incoming(self, node_id: str) -> LinkConnection:
        return self._new_link(node_id, self.accept, _ignore_received)

    def _new_outgoing(self, node_id: str) -> LinkConnection:
        """Return a link that we dial: only what it receives shows that we reach the node."""
        return self._new_link(node_id, None, self._record_received)

    def _new_link(
        self, node_id: str, accept: AcceptStream | None, on_received: Callable[[str], None]
    ) -> LinkConnection:
        options = self.options
        return LinkConnection(node_id, accept, options.heartbeat, options.silence, on_received)

    # ---- silence

    def _record_received(self, node_id: str) -> None:
        if node_id in self.last_received_at:
            self.last_received_at[node_id] = self._loop.time()

    def reset_silence(self) -> None:
        """Restart the measurement of every node's silence."""
        now = self._loop.time()
        self.last_received_at = dict.fromkeys(self.last_received_at, now)

    def silence_seconds(self, node_id: str) -> float:
        """Return how long a linked node has sent nothing; 0 for an unknown node."""
        received_at = self.last_received_at.get(node_id)
        return 0.0 if received_at is None else self._loop.time() - received_at
