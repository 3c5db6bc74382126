"""Helpers of the cluster tests: recording protocols, links on loopback, waiting for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sluice.cluster.membership.coordinator import NodeInfo
from sluice.cluster.transport.link_authentication import LinkCall, LinkKey
from sluice.cluster.transport.link_handshake import CONTINUE, LINK, LinkRefused, encode_greeting
from sluice.cluster.transport.link_sockets import LinkOptions, LinkTls
from sluice.cluster.transport.peer_links import PeerLinks
from sluice.cluster.transport.streams import NODE_TARGET, StreamTransport
from sluice.units import Address

TIMEOUT_SECONDS = 30.0
SECRET = "the secret of the tests"


async def until(condition: Callable[[], Any], what: str = "") -> None:
    """Wait until the condition holds; the machine may be busy."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110 (polls another process or thread)
            await asyncio.sleep(0.005)


class LinkEnd:
    """One end of a stream that records what it receives; with `echo` it sends the data back."""

    def __init__(self, echo: bool = False) -> None:
        self.transport: StreamTransport | None = None
        self.data = bytearray()
        self.lost: list[Exception | None] = []
        self.is_paused = False
        self._echo = echo

    @property
    def stream(self) -> StreamTransport:
        assert self.transport is not None
        return self.transport

    def connection_made(self, transport: StreamTransport) -> None:
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
    """A node that consists of its links only. It accepts streams to the cells in `cells`."""

    def __init__(
        self,
        name: str,
        nodes: dict[int, NodeInfo],
        tls: LinkTls | None = None,
        secret: str = SECRET,
        path: Path | None = None,
    ) -> None:
        self.name = name
        self.secret = secret
        self.id = f"{name}-1"
        self.answering: list[LinkEnd] = []  # the ends of streams that other nodes have dialed
        self.greetings: list[tuple[int, bytes]] = []
        self.callers: list[str] = []
        self.gone: list[str] = []
        self.cells: set[int] = set()
        self.make_link_end: Callable[[], LinkEnd] = LinkEnd
        options = LinkOptions(
            Address("127.0.0.1", 0), heartbeat=0.05, silence=1.0, tls=tls, path=path
        )
        self.streams = PeerLinks(options, nodes.get)
        self.streams.accept = self._accept
        self.streams.on_peer_gone = self.gone.append

    def _accept(self, cell: int, greeting: bytes, node_id: str) -> LinkEnd | None:
        self.greetings.append((cell, greeting))
        self.callers.append(node_id)
        if cell not in self.cells and cell != NODE_TARGET:
            return None
        self.answering.append(self.make_link_end())
        return self.answering[-1]

    async def open(self) -> LinkedNode:
        await self.streams.open()
        self.join(self.id)
        return self

    def join(self, node_id: str) -> None:
        self.streams.join(node_id, LinkKey(self.secret, self.streams.options.cluster))

    def info(self, port: int = 0) -> NodeInfo:
        return NodeInfo(
            self.id, self.name, str(Address("127.0.0.1", port or self.streams.address.port))
        )


class RawCaller:
    """A program at the port of a link that writes and reads messages of the handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def write(self, message: bytes) -> None:
        self.writer.write(len(message).to_bytes(2, "big") + message)

    async def read(self) -> bytes:
        """Return the content of the acceptor's next message; raise LinkRefused if it refuses."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            size = int.from_bytes(await self.reader.readexactly(2), "big")
            message = await self.reader.readexactly(size)
        if message[0] != CONTINUE:
            raise LinkRefused(message[1:].decode(), message[0])
        return message[1:]

    async def is_closed(self) -> bool:
        """Wait for the end of the connection; return whether nothing came before it."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await self.reader.read() == b""


@asynccontextmanager
async def call_link(address: Address, call: LinkCall | None = None) -> AsyncIterator[RawCaller]:
    """Connect to the port of a link, and send the greeting of a call if there is one."""
    caller = RawCaller(*await asyncio.open_connection(address.host, address.port))
    try:
        if call is not None:
            await caller.write(encode_greeting(LINK, call))
        yield caller
    finally:
        caller.writer.transport.abort()
