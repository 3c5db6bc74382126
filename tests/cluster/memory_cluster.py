"""A cluster in one process: real nodes, cells and brokers, connected and stored in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from sluice.broker.acl import AnonymousAccess
from sluice.broker.limits import Limits
from sluice.broker.net.connection_limits import ConnectionLimits
from sluice.broker.net.memory_transport import MemoryTransport, connect_in_memory
from sluice.broker_host import BrokerHost
from sluice.client import Backoff, Client
from sluice.cluster.cell import Cell
from sluice.cluster.client_ingress import ClientIngress
from sluice.cluster.node import Node
from sluice.cluster.plain.bridge_frames import FrameReader, encode_frame
from sluice.cluster.transport.streams import NoOwner, StreamLost, StreamProtocol, StreamTransport
from sluice.config.settings import Settings
from sluice.placement import cell_of, cell_of_queue
from sluice.queues.engine import Engine
from sluice.store.memory import MemoryStore
from sluice.store_opener import CellStore

CELLS = 6


def log_event(event: str, facts: dict[str, object]) -> None:
    print(event, facts)


class NetStreams:
    """Dials the other nodes of a memory cluster."""

    def __init__(self, net: MemoryCluster, name: str) -> None:
        self._net = net
        self._name = name

    def dial(self, cell: int, greeting: bytes, protocol: StreamProtocol) -> None:
        self._net.join(self._name, self._net.owners[cell], cell, greeting, protocol)

    def dial_node(self, node: str, greeting: bytes, protocol: StreamProtocol) -> None:
        self._net.join(self._name, node, -1, greeting, protocol)


class TappedTransport:
    """One end of a bridge. The cluster sees each frame before it is written, and may drop it."""

    def __init__(self, net: MemoryCluster, transport: StreamTransport) -> None:
        self._net = net
        self._transport = transport

    def write(self, data: bytes) -> None:
        frames = [
            encode_frame(kind, body)
            for kind, body in FrameReader().feed(data)
            if self._net.passes(kind, body)
        ]
        self._transport.write(b"".join(frames))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class TappedProtocol:
    """Gives `protocol` a tapped transport.

    Native classes cannot be patched, so tests hook in here.
    """

    def __init__(self, net: MemoryCluster, protocol: StreamProtocol) -> None:
        self._net = net
        self._protocol = protocol

    def connection_made(self, transport: StreamTransport) -> None:
        self._protocol.connection_made(
            cast("StreamTransport", TappedTransport(self._net, transport))
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)


class MemoryNode:
    def __init__(self, net: MemoryCluster, name: str) -> None:
        self.name = name
        self.node = Node(CELLS, lambda cell: net.owners[cell], NetStreams(net, name))
        self.hosts: dict[int, BrokerHost] = {}
        self.clients: list[MemoryTransport] = []
        self._net = net
        self._connection_limits = ConnectionLimits(net.limits)

    async def open(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        store = self._net.stores.get(number)
        if store is None:
            store = self._net.stores[number] = MemoryStore(loop.call_soon_threadsafe)
        host = BrokerHost(
            self._net.settings,
            self._net.limits,
            AnonymousAccess(True),
            lambda: None,
            CellStore(number),
            store,
            connection_limits=self._connection_limits,
            log=self._net.log_event,
        )
        cell = Cell(self.node, number, host.broker)
        await host.open()
        self.hosts[number] = host
        self._net.owners[number] = self.name
        self.node.on_cell_opened(cell)

    async def close(self, number: int) -> None:
        """Hand a cell over in order."""
        cell = self.node.local_cells[number]
        self.node.on_cell_closed(number)
        self._net.owners[number] = None
        for connection in list(cell.broker.connections):
            connection.throttle()
        await cell.wait_answered(0.5)
        await self.hosts[number].flush()
        cell.mark_lost()
        cell.broker.stop(lambda: None)
        await asyncio.sleep(0)
        cell.broker.close()
        await self.hosts.pop(number).close()
        self._net.stores[number] = self._net.stores[number].crash()

    def drop(self, number: int) -> None:
        """Lose a cell at once."""
        self._lose(number, self.node.local_cells[number])

    def _lose(self, number: int, cell: Cell) -> None:
        self._net.owners[number] = None
        self._net.stores[number] = self._net.stores[number].crash()
        self.node.on_cell_closed(number)
        cell.mark_lost()
        cell.broker.close()
        self.hosts.pop(number)

    async def reopen_after(self, number: int, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` while this node has closed a cell and the other nodes have not noticed."""
        cell = self.node.local_cells[number]
        self.node.on_cell_closed(number)
        await work()
        self._lose(number, cell)
        await self.open(number)

    def engine(self, number: int) -> Engine:
        return self.hosts[number].engine

    async def dial(self, protocol: asyncio.Protocol) -> None:
        """Connect a client to this node."""
        ingress = ClientIngress(self.node, 2_097_152, 10.0)
        call_soon = asyncio.get_running_loop().call_soon
        peer: dict[str, object] = {"peername": ("127.0.0.1", 1)}
        self.clients.append(connect_in_memory(protocol, ingress, call_soon, peer))

    def cut_clients(self) -> None:
        """Break every client connection without a DISCONNECT."""
        clients, self.clients = self.clients, []
        for end in clients:
            end.break_connection(ConnectionResetError("the test cut the connection"))

    def client(self, client_id: str = "", **options: Any) -> Client:
        chosen = {
            "dial": self.dial,
            "keep_alive": 0,
            "client_id": client_id,
            "backoff": Backoff(0.01, 0.1),
        }
        return Client(**{**chosen, **options})


class MemoryCluster:
    def __init__(
        self,
        settings: Settings | None = None,
        limits: Limits | None = None,
        log_event: Callable[[str, dict[str, object]], None] = log_event,
    ) -> None:
        self.log_event = log_event
        self.settings = settings or Settings.model_validate(
            {"store": "memory", "cluster": {"cells": CELLS}}
        )
        self.limits = limits or Limits()
        self.owners: list[str | None] = [None] * CELLS
        self.stores: dict[int, MemoryStore] = {}
        self.nodes: dict[str, MemoryNode] = {}
        self._streams: list[tuple[str, str, MemoryTransport]] = []
        self.unreachable: set[str] = set()  # nodes that are cut off from all others
        self.lost_frames: set[int] = set()  # kinds of frames that are lost between nodes
        self.watch_frame: Callable[[int, bytes], None] = lambda kind, body: None

    def passes(self, kind: int, body: bytes) -> bool:
        """Return whether a frame about plain topics reaches the other node."""
        self.watch_frame(kind, body)
        return kind not in self.lost_frames

    def tap(self, protocol: StreamProtocol) -> StreamProtocol:
        return cast("StreamProtocol", TappedProtocol(self, protocol))

    def cut_off(self, name: str) -> None:
        """Partition the network: the node neither reaches others nor is reached."""
        self.unreachable.add(name)
        self.cut_streams()

    def join(
        self, local: str, remote: str | None, cell: int, greeting: bytes, protocol: StreamProtocol
    ) -> None:
        node = self.nodes.get(remote or "")
        if {local, remote} & self.unreachable:
            node = None
        other = node.node.accept(cell, greeting, local) if node is not None else None
        if other is None:
            asyncio.get_running_loop().call_soon(protocol.connection_lost, NoOwner(cell))
        else:
            if cell == -1:
                protocol, other = self.tap(protocol), self.tap(other)
            stream = connect_in_memory(protocol, other, asyncio.get_running_loop().call_soon)
            self._streams.append((local, remote or "", stream))

    def add(self, name: str) -> MemoryNode:
        self.nodes[name] = MemoryNode(self, name)
        self.meet()
        return self.nodes[name]

    def meet(self) -> None:
        for name, node in self.nodes.items():
            node.node.set_peers([other for other in self.nodes if other != name])

    def cut_streams(self) -> None:
        """Break every stream between nodes; bytes in flight are lost."""
        streams, self._streams = self._streams, []
        for _, _, end in streams:
            end.break_connection(StreamLost("the test cut the stream"))

    async def move(self, cell: int, to: str) -> None:
        await self.nodes[self.owners[cell] or ""].close(cell)
        await self.nodes[to].open(cell)

    def kill(self, name: str, stored: bool = False) -> list[int]:
        """Kill a node and return the cells that have no owner now.

        With `stored`, its stores have committed all frames but have not confirmed them.
        """
        node = self.nodes.pop(name)
        for local, remote, end in self._streams:
            if name in (local, remote):
                end.break_connection(StreamLost("the node is gone"))
        cells = list(node.node.local_cells)
        node.node.set_peers([])
        for number in cells:
            self.owners[number] = None
            cell = node.node.local_cells[number]
            store = self.stores[number]
            self.stores[number] = store.crash(store.count_unsynced() if stored else 0)
            node.node.on_cell_closed(number)
            cell.mark_lost()
            cell.broker.close()
        self.meet()
        return cells


@asynccontextmanager
async def two_nodes(
    settings: Settings | None = None, limits: Limits | None = None
) -> AsyncIterator[MemoryCluster]:
    """Two nodes: cells 0, 2, 4 at `a`; 1, 3, 5 at `b`."""
    net = MemoryCluster(settings, limits)
    for name in "ab":
        net.add(name)
    for cell in range(CELLS):
        await net.nodes["ab"[cell % 2]].open(cell)
    try:
        yield net
    finally:
        for node in net.nodes.values():
            node.node.set_peers([])
            for number in list(node.node.local_cells):
                await node.close(number)


def client_in(cell: int, start: str = "client") -> str:
    """Return a client id whose session is in this cell."""
    return next(name for n in range(1000) if cell_of(name := f"{start}{n}x", CELLS) == cell)


def queue_in(cell: int, start: str = "queue") -> str:
    return next(name for n in range(1000) if cell_of_queue(name := f"{start}{n}x", CELLS) == cell)


def topic_in(cell: int, start: str = "topic") -> str:
    return next(name for n in range(1000) if cell_of(name := f"{start}{n}x", CELLS) == cell)
