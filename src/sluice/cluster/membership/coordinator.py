"""What a node must know of the others, and the one place where it is agreed: etcd, or Redis.

A coordinator keeps two kinds of facts. A registration says that a node lives; it hangs on a lease that the node keeps
alive, and is gone a while after the node is. A claim says which incarnation of a node holds a cell; it stays behind
when the node dies, so that whoever takes the cell knows that it takes it from a dead one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from sluice.errors import SluiceError

LINK_PROTOCOL_VERSION: Final = (
    3  # the version of what nodes say to one another: handshake, trunk, frames and greetings
)


class CoordinatorError(SluiceError):
    """The coordinator cannot be used as it is, or refuses us."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node as it tells of itself. Addresses are HOST:PORT as the others reach them; empty: that door is not open."""

    id: str  # of this incarnation: a node that comes back has the same name and another id
    name: str
    link: str
    mqtt: str = ""
    http: str = ""
    grpc: str = ""
    started_at: float = 0.0  # Unix time
    speaks: int = LINK_PROTOCOL_VERSION
    key: str = ""  # the fingerprint of its link key: nodes with different ones could not talk

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def decode_node(data: bytes) -> NodeInfo | None:
    """None: written by a version that we cannot read. It is not ours to fail over."""
    try:
        fields = {"speaks": 0, **json.loads(data)}
        return NodeInfo(**{name: fields[name] for name in NodeInfo.__slots__ if name in fields})
    except (ValueError, TypeError):
        return None


class Coordinator(Protocol):
    """All of it belongs to one event loop. The dictionaries are what was last heard; read them, do not change them."""

    nodes: dict[str, NodeInfo]  # those that live by their id, this one included
    claims: dict[int, str]  # the id of the node that holds each cell, dead or alive
    suspicions: dict[str, set[str]]  # by the id of a node, the ids of those who do not hear it
    on_change: Callable[[], None]  # one of them has changed
    on_lost: Callable[
        [], None
    ]  # I was put out, or may have been: I own nothing from this moment on

    @property
    def may_own(self) -> bool:
        """Whether I am registered, and heard so recently enough that nobody may have replaced me."""

    async def shared_secret(self) -> str:
        """Return the secret that the coordinator holds for this cluster. The first node makes it."""

    async def start(self, this_node: NodeInfo) -> None:
        """Register, and return once `nodes` and `claims` are known. Called again, with a new id, after `on_lost`."""

    async def stop(self) -> None:
        """Drop the registration and all that goes with it, so that nobody has to wait for the lease to lapse."""

    async def claim(self, cell: int, previous: str | None) -> bool:
        """Take a cell that `previous` held (None: nobody). False: somebody was quicker, or I may not own."""

    async def release(self, cell: int) -> None:
        """Give up a cell that I hold; nothing happens if I do not."""

    async def evict(self, node_id: str) -> None:
        """End another node's registration: it is dead, whatever its lease says. Its claims stay, for those who take
        over."""

    async def suspect(self, node_id: str, is_silent: bool) -> None:
        """Tell the others that I do not hear a node, or hear it again. Gone with my own registration."""
