"""A cluster in one process: real nodes, cells and brokers, joined by lines that are no sockets, on stores in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from sluice.broker.acl.access import Anonymous
from sluice.broker.broker import Broker
from sluice.broker.net.connection_limits import Crowd
from sluice.broker.limits import Limits
from sluice.client import Backoff, Client
from sluice.cluster.cell import Cell
from sluice.cluster.plain.bridge_frames import Frames, frame
from sluice.cluster.ingress.client_ingress import Front
from sluice.cluster.transport.streams import LineLost, LineProtocol, LineTransport, NoOwner
from sluice.cluster.transport.local_stream import LocalEnd, join
from sluice.cluster.node import Node
from sluice.cluster.membership.placement import cell_of, cell_of_queue
from sluice.config.settings import Settings
from sluice.broker_core import House, Place
from sluice.queues.engine import Engine
from sluice.store.memory import MemoryStore

CELLS = 6


def say(event: str, facts: dict[str, object]) -> None:
    print(event, facts)


class NetLines:
    """The way from one node to the others."""

    def __init__(self, net: Net, name: str) -> None:
        self._net = net
        self._name = name

    def dial(self, cell: int, greeting: bytes, protocol: LineProtocol) -> None:
        self._net.join(self._name, self._net.owners[cell], cell, greeting, protocol)

    def dial_node(self, node: str, greeting: bytes, protocol: LineProtocol) -> None:
        self._net.join(self._name, node, -1, greeting, protocol)


class TappedTransport:
    """One end of a link between nodes. The net sees each frame before it is written, and may lose it."""

    def __init__(self, net: Net, transport: LineTransport) -> None:
        self._net = net
        self._transport = transport

    def write(self, data: bytes) -> None:
        kept = [frame(kind, body) for kind, body in Frames().feed(data) if self._net.passes(kind, body)]
        self._transport.write(b"".join(kept))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class TappedProtocol:
    """Gives `protocol` a tapped transport. Native classes cannot be patched, so tests interfere here."""

    def __init__(self, net: Net, protocol: LineProtocol) -> None:
        self._net = net
        self._protocol = protocol

    def connection_made(self, transport: LineTransport) -> None:
        self._protocol.connection_made(cast("LineTransport", TappedTransport(self._net, transport)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)


class MemoryNode:
    def __init__(self, net: Net, name: str) -> None:
        self.name = name
        self.node = Node(CELLS, lambda cell: net.owners[cell], NetLines(net, name))
        self.houses: dict[int, House] = {}
        self.clients: list[LocalEnd] = []
        self._net = net
        self._crowd = Crowd(net.limits)

    async def open(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        broker = Broker(loop, self._net.limits, Anonymous(True), self._net.say, crowd=self._crowd)
        cell = Cell(self.node, number, broker)
        store = self._net.stores.get(number)
        if store is None:
            store = self._net.stores[number] = MemoryStore(loop.call_soon_threadsafe)
        house = House(self._net.settings, broker, lambda: None, Place(number), store)
        house.furnish = cell.furnish
        await house.open()
        self.houses[number] = house
        self._net.owners[number] = self.name
        self.node.opened(cell)

    async def close(self, number: int) -> None:
        """Give a cell up in good order."""
        cell = self.node.local[number]
        self.node.closed(number)
        self._net.owners[number] = None
        for connection in list(cell.broker.connections):
            connection.hold()
        await cell.answer_all(0.5)
        await self.houses[number].flush()
        cell.lose()
        cell.broker.stop(lambda: None)
        await asyncio.sleep(0)
        cell.broker.close()
        await self.houses.pop(number).close()
        self._net.stores[number] = self._net.stores[number].crash()

    def drop(self, number: int) -> None:
        """Lose a cell at once."""
        self._lose(number, self.node.local[number])

    def _lose(self, number: int, cell: Cell) -> None:
        self._net.owners[number] = None
        self._net.stores[number] = self._net.stores[number].crash()
        self.node.closed(number)
        cell.lose()
        cell.broker.close()
        self.houses.pop(number)

    async def reopen_after(self, number: int, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` while this node has closed a cell and the others think that it is still here."""
        cell = self.node.local[number]
        self.node.closed(number)
        await work()
        self._lose(number, cell)
        await self.open(number)

    def engine(self, number: int) -> Engine:
        door = self.node.local[number].broker.router.door
        assert door is not None
        return door.engine

    async def dial(self, protocol: asyncio.Protocol) -> None:
        """How a client comes to this node."""
        front = Front(self.node, 2_097_152, 10.0)
        self.clients.append(join(protocol, front, {"peername": ("127.0.0.1", 1)}))  # type: ignore[arg-type]

    def cut_clients(self) -> None:
        """Break every line from a client, without a word."""
        clients, self.clients = self.clients, []
        for line in clients:
            line.cut(ConnectionResetError("the test cut the line"))

    def client(self, client_id: str = "", **options: Any) -> Client:
        chosen = {"dial": self.dial, "keep_alive": 0, "client_id": client_id, "backoff": Backoff(0.01, 0.1)}
        return Client(**{**chosen, **options})


class Net:
    def __init__(
        self,
        settings: Settings | None = None,
        limits: Limits | None = None,
        say: Callable[[str, dict[str, object]], None] = say,
    ) -> None:
        self.say = say
        self.settings = settings or Settings(store="memory")
        self.limits = limits or Limits()
        self.owners: list[str | None] = [None] * CELLS
        self.stores: dict[int, MemoryStore] = {}
        self.nodes: dict[str, MemoryNode] = {}
        self._lines: list[tuple[str, str, LocalEnd]] = []
        self.unreachable: set[str] = set()  # nodes that no other reaches, and that reach no other
        self.lost_frames: set[int] = set()  # kinds of frames that are lost between nodes
        self.watch_frame: Callable[[int, bytes], None] = lambda kind, body: None

    def passes(self, kind: int, body: bytes) -> bool:
        """Return whether a frame about plain topics reaches the other node."""
        self.watch_frame(kind, body)
        return kind not in self.lost_frames

    def tap(self, protocol: LineProtocol) -> LineProtocol:
        return cast("LineProtocol", TappedProtocol(self, protocol))

    def cut_off(self, name: str) -> None:
        """A network partition: the node neither reaches others nor is reached."""
        self.unreachable.add(name)
        self.cut_lines()

    def join(self, near: str, far: str | None, cell: int, greeting: bytes, protocol: LineProtocol) -> None:
        node = self.nodes.get(far or "")
        if {near, far} & self.unreachable:
            node = None
        other = node.node.accept(cell, greeting, near) if node is not None else None
        if other is None:
            asyncio.get_running_loop().call_soon(protocol.connection_lost, NoOwner(cell))
        else:
            if cell == -1:
                protocol, other = self.tap(protocol), self.tap(other)
            self._lines.append((near, far or "", join(protocol, other)))

    def add(self, name: str) -> MemoryNode:
        self.nodes[name] = MemoryNode(self, name)
        self.meet()
        return self.nodes[name]

    def meet(self) -> None:
        for name, node in self.nodes.items():
            node.node.peers_changed([other for other in self.nodes if other != name])

    def cut_lines(self) -> None:
        """Break every line between nodes; what is under way in them is lost."""
        lines, self._lines = self._lines, []
        for _, _, line in lines:
            line.cut(LineLost("the test cut the line"))

    async def move(self, cell: int, to: str) -> None:
        await self.nodes[self.owners[cell] or ""].close(cell)
        await self.nodes[to].open(cell)

    def kill(self, name: str, kept: bool = False) -> list[int]:
        """A node vanishes; the cells that nobody has now. `kept`: its stores have all that they were given, and nobody
        has heard so."""
        node = self.nodes.pop(name)
        for near, far, line in self._lines:
            if name in (near, far):
                line.cut(LineLost("the node is gone"))
        cells = list(node.node.local)
        node.node.peers_changed([])
        for number in cells:
            self.owners[number] = None
            cell = node.node.local[number]
            store = self.stores[number]
            self.stores[number] = store.crash(store.unsynced() if kept else 0)
            node.node.closed(number)
            cell.lose()
            cell.broker.close()
        self.meet()
        return cells


@asynccontextmanager
async def two_nodes(settings: Settings | None = None, limits: Limits | None = None) -> AsyncIterator[Net]:
    """Cells 0, 2, 4 at `a`; 1, 3, 5 at `b`."""
    net = Net(settings, limits)
    for name in "ab":
        net.add(name)
    for cell in range(CELLS):
        await net.nodes["ab"[cell % 2]].open(cell)
    try:
        yield net
    finally:
        for node in net.nodes.values():
            node.node.peers_changed([])
            for number in list(node.node.local):
                await node.close(number)


def client_in(cell: int, start: str = "client") -> str:
    """A client id whose session lies in this cell."""
    return next(name for n in range(1000) if cell_of(name := f"{start}{n}x", CELLS) == cell)


def queue_in(cell: int, start: str = "queue") -> str:
    return next(name for n in range(1000) if cell_of_queue(name := f"{start}{n}x", CELLS) == cell)


def topic_in(cell: int, start: str = "topic") -> str:
    return next(name for n in range(1000) if cell_of(name := f"{start}{n}x", CELLS) == cell)
