"""The interface to the coordinator: what a node knows of the others, agreed in etcd or Redis.

A coordinator stores two kinds of facts above all. A registration states that a node is alive; it
has a lease that the node renews, so it disappears some time after the node does. A claim states
which incarnation of a node owns a cell; it survives the node, so that the next owner knows that it
takes the cell over from a dead one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from sluice.errors import SluiceError

# The version of the protocol between nodes: handshake, mux, frames and greetings.
LINK_PROTOCOL_VERSION: Final = 4


class CoordinatorError(SluiceError):
    """The coordinator refused a request or cannot be used with these settings."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node's description of itself.

    Addresses are HOST:PORT as other nodes reach them; empty: that listener is off.
    """

    id: str  # of this incarnation: after a restart a node has the same name and another id
    name: str
    link: str
    mqtt: str = ""
    http: str = ""
    grpc: str = ""
    started_at: float = 0.0  # Unix time
    speaks: int = LINK_PROTOCOL_VERSION
    key: str = ""  # fingerprint of its link key: nodes with different keys cannot connect

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def decode_node(data: bytes) -> NodeInfo | None:
    """Decode a registration; return None if another version wrote it in an unknown format.

    This node ignores such a node and does not take over its cells.
    """
    try:
        fields = {"speaks": 0, **json.loads(data)}
        return NodeInfo(**{name: fields[name] for name in NodeInfo.__slots__ if name in fields})
    except (ValueError, TypeError):
        return None


def names_avoiding(
    nodes: Mapping[str, NodeInfo], avoided: Mapping[int, Collection[str]]
) -> dict[int, list[str]]:
    """Return the names of the live nodes that avoid each cell, without cells that none avoids."""
    found = {
        cell: sorted(nodes[one].name for one in node_ids if one in nodes)
        for cell, node_ids in avoided.items()
    }
    return {cell: names for cell, names in found.items() if names}


def names_with_cells(coordinator: Coordinator) -> tuple[str, ...]:
    """Return the names of the nodes that cells are placed on: the expected ones, or the live."""
    live = {node.name for node in dict(coordinator.nodes).values()}
    return coordinator.expected_names or tuple(sorted(live))


class Coordinator(Protocol):
    """Membership as this node sees it. All of it belongs to one event loop.

    The dictionaries hold the last received state; callers read and never change them.
    """

    nodes: dict[str, NodeInfo]  # live nodes by id, including this one
    claims: dict[int, str]  # by cell, the id of the node that owns it, dead or alive
    suspicions: dict[str, set[str]]  # by node id, the ids of the nodes that suspect it
    avoided: dict[int, set[str]]  # by cell, the ids of the nodes that could not load it in time
    # Nodes that keep their cells while they are restarted; empty: cells of a dead node move.
    expected_names: tuple[str, ...]
    on_change: Callable[[], None]  # one of the dictionaries has changed
    # This node was evicted, or may have been: it owns nothing from this moment on.
    on_lost: Callable[[], None]

    @property
    def may_own(self) -> bool:
        """Return whether this node is registered, and no other node can have replaced it yet."""

    async def shared_secret(self) -> str:
        """Return the secret that the coordinator stores for this cluster; create it if needed."""

    async def start(self, this_node: NodeInfo) -> None:
        """Register, and return once `nodes` and `claims` are known.

        After `on_lost` the caller calls it again with a new id.
        """

    async def stop(self) -> None:
        """Delete the registration and its entries, so that no node waits for the lease to end."""

    async def claim(self, cell: int, previous: str | None) -> bool:
        """Claim a cell that `previous` owned (None: no node did).

        Return False if another node was quicker or this node may not own cells.
        """

    async def release(self, cell: int) -> None:
        """Release a cell; do nothing if this node does not own it."""

    async def evict(self, node_id: str) -> None:
        """End another node's registration before its lease ends.

        Its claims stay for the new owners.
        """

    async def suspect(self, node_id: str, is_silent: bool) -> None:
        """Report a node as silent, or withdraw that report.

        The report disappears with this node's own registration.
        """

    async def avoid(self, cell: int) -> None:
        """Report that this node could not load a cell in time, so that another node gets it.

        The report disappears with this node's own registration.
        """
