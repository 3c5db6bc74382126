"""What the tests of the cluster share: protocols that remember, links on loopback, and waiting for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sluice.cluster.transport.link_authentication import LinkKey
from sluice.cluster.membership.coordinator import NodeInfo
from sluice.cluster.transport.streams import THE_NODE, LineTransport
from sluice.cluster.transport.peer_links import RemoteLines
from sluice.cluster.transport.link_stream import LinkOptions, LinkTls
from sluice.units import Address

PATIENCE_SECONDS = 30.0
SECRET = "the secret of the tests"


async def until(condition: Callable[[], Any], what: str = "") -> None:
    """Wait until it is so; the machine may be busy."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  whatever it is
            await asyncio.sleep(0.005)


class End:
    """Sits at an end of a line and remembers; `echo` sends back what comes."""

    def __init__(self, echo: bool = False) -> None:
        self.transport: LineTransport | None = None
        self.data = bytearray()
        self.lost: list[Exception | None] = []
        self.is_paused = False
        self._echo = echo

    @property
    def line(self) -> LineTransport:
        assert self.transport is not None
        return self.transport

    def connection_made(self, transport: LineTransport) -> None:
        assert self.transport is None
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None and not self.lost
        if self._echo:
            self.transport.write(data)
        else:
            self.data += data

    def eof_received(self) -> bool | None:
        return None

    def connection_lost(self, fault: Exception | None) -> None:
        self.lost.append(fault)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False


class LinkedNode:
    """A node that has nothing but its link; cells are with it whose number it is told."""

    def __init__(
        self, name: str, nodes: dict[int, NodeInfo], tls: LinkTls | None = None, secret: str = SECRET
    ) -> None:
        self.name = name
        self.secret = secret
        self.id = f"{name}-1"
        self.answering: list[End] = []  # the ends of lines that others have dialled
        self.greetings: list[tuple[int, bytes]] = []
        self.callers: list[str] = []
        self.gone: list[str] = []
        self.cells: set[int] = set()
        self.make_end: Callable[[], End] = End
        options = LinkOptions(Address("127.0.0.1", 0), heartbeat=0.05, silence=1.0, tls=tls)
        self.lines = RemoteLines(options, nodes.get)
        self.lines.accept = self._accept
        self.lines.on_gone = self.gone.append

    def _accept(self, cell: int, greeting: bytes, node_id: str) -> End | None:
        self.greetings.append((cell, greeting))
        self.callers.append(node_id)
        if cell not in self.cells and cell != THE_NODE:
            return None
        self.answering.append(self.make_end())
        return self.answering[-1]

    async def open(self) -> LinkedNode:
        await self.lines.open()
        self.join(self.id)
        return self

    def join(self, node_id: str) -> None:
        self.lines.join(node_id, LinkKey(self.secret, self.lines.options.cluster))

    def info(self, port: int = 0) -> NodeInfo:
        return NodeInfo(self.id, self.name, str(Address("127.0.0.1", port or self.lines.address.port)))
