"""Lines to the cells of other nodes: a gRPC stream to each of them, and one from each.

A node calls every other one it knows and keeps the stream up; the lines that it dials run over it, those that the other
dials over the other's. Signs of life go both ways, so that silence is noticed; whether a broken stream means that the
process is gone is found out by knocking at its port, since a host that refuses has nobody who listens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio

from sluice.cluster.coordinator import NodeInfo
from sluice.cluster.lines import THE_NODE, Accept, LineLost, LineProtocol, NoOwner
from sluice.cluster.stream import OPTIONS, LinkOptions, Stream, bind_port, open_channel
from sluice.cluster.trunk import Trunk
from sluice.notation import Address, parse_address

METHOD: Final = "/sluice.Link/Talk"
PING: Final = "/sluice.Link/Ping"
KNOCK_SECONDS: Final = 1.0
RETRY_SECONDS: Final = (0.05, 1.0)  # between attempts: the first, and the longest
STALE: Final = 3.0  # silences after which a stream is made anew, because a line may die without a word


def _not_counted(node_id: str) -> None:
    """It was heard on a stream that says nothing of ours."""


def refuse_line(cell: int, greeting: bytes, node_id: str) -> LineProtocol | None:
    return None


class RemoteLines:
    """The way to the cells of other nodes. `owner_of` says which node holds a cell now."""

    def __init__(self, options: LinkOptions, owner_of: Callable[[int], NodeInfo | None]) -> None:
        self.accept: Accept = refuse_line
        self.on_gone: Callable[[str], None] = lambda node_id: None  # nobody listens any more where it was
        self.address = options.listen  # with the port that was taken, once it is open
        self.options = options
        self.me = ""  # the id of this incarnation; nobody is called, and no call is taken, without it
        self.heard_at: dict[
            str, float
        ] = {}  # by the id of a node, when it last said anything, by the loop's clock
        self._owner_of = owner_of
        self._server: Any = None
        self._calls: dict[str, _Call] = {}
        self._taken: set[Stream] = set()
        self._gone: set[str] = set()  # ids that will not come back: a new incarnation has a new one

    async def open(self) -> None:
        """Listen for the others. Before this node is registered, so that whoever knows it can call it."""
        options = self.options
        server = grpc.aio.server(options=OPTIONS)
        handlers = {
            METHOD.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(self._take_call),
            PING.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(_answer_ping),
        }
        service = METHOD[1:].partition("/")[0]
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = bind_port(server, options)
        await server.start()
        self._server = server
        self.address = Address(options.listen.host, port)

    async def close(self) -> None:
        """Every line ends here, and nobody listens any more."""
        self.leave()
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def join(self, me: str) -> None:
        """From now on this node is the one of this id. Before it is registered: who hears of it calls it."""
        self.leave()
        self.me = me

    def leave(self) -> None:
        """Hang up, on both kinds of streams: this incarnation is over."""
        self.me = ""
        for node_id in list(self._calls):
            self._hang_up(node_id, "this node has left the cluster")
        for stream in list(self._taken):
            stream.end("this node has left the cluster")

    def meet(self, nodes: dict[str, NodeInfo]) -> None:
        """These are the nodes that live. Who is new is called, who is no more among them is hung up on."""
        if not self.me:
            return
        for node_id in [one for one in self._calls if one not in nodes]:
            self._gone.add(node_id)
            self._hang_up(node_id, f"node {node_id} has left, or was put out")
        for stream in list(self._taken):
            if stream.peer in self._gone:
                stream.end(f"node {stream.peer} has left, or was put out")
        for node_id, node in nodes.items():
            if node_id != self.me and node_id not in self._calls:
                self.heard_at[node_id] = asyncio.get_running_loop().time()
                self._calls[node_id] = _Call(self, node)

    async def is_reachable(self, link: str, others: list[NodeInfo]) -> bool:
        """Whether a node with this link has its place among the others: it can be called, and can call most of those
        that live. One that was put out and comes back too early only moves cells to where nobody reaches them."""
        found = await asyncio.gather(self._ping(link), *(self._ping(one.link) for one in others))
        heard = [one for one in found[1:] if one is not None]  # of the others, those that are not gone
        return bool(found[0]) and 2 * sum(heard) >= len(heard)

    async def _ping(self, link: str) -> bool | None:
        """None: nobody listens there any more."""
        if await _is_gone(link):
            return None
        channel = open_channel(link, self.options)
        try:
            await channel.unary_unary(PING)(b"", timeout=KNOCK_SECONDS)
            return True
        except grpc.aio.AioRpcError:
            return False
        finally:
            await channel.close()

    def _hang_up(self, node_id: str, why: str) -> None:
        self.heard_at.pop(node_id, None)
        self._calls.pop(node_id).hang_up(why)

    def dial(self, cell: int, greeting: bytes, protocol: LineProtocol) -> None:
        node = self._owner_of(cell)
        call = self._calls.get(node.id) if node is not None else None
        if call is None:
            loop = asyncio.get_running_loop()
            loop.call_soon(protocol.connection_lost, NoOwner(cell))
        else:
            call.trunk.dial(cell, greeting, protocol)

    def dial_node(self, node_id: str, greeting: bytes, protocol: LineProtocol) -> None:
        call = self._calls.get(node_id)
        if call is None:
            loop = asyncio.get_running_loop()
            loop.call_soon(protocol.connection_lost, LineLost(f"node {node_id} is not in the cluster"))
        else:
            call.trunk.dial(THE_NODE, greeting, protocol)

    def new_stream(self, node_id: str, accept: Accept | None) -> Stream:
        """Only a call of our own tells whether a node can be reached: that it reaches us is another matter."""
        heard = self._heard if accept is None else _not_counted
        return Stream(node_id, accept, self.options.heartbeat, heard)

    def _heard(self, node_id: str) -> None:
        if node_id in self.heard_at:
            self.heard_at[node_id] = asyncio.get_running_loop().time()

    def hear_anew(self) -> None:
        """Count every node's silence from now."""
        now = asyncio.get_running_loop().time()
        self.heard_at = dict.fromkeys(self.heard_at, now)

    def silent_for(self, node_id: str) -> float:
        """How long nothing was heard of a node that we should hear."""
        heard = self.heard_at.get(node_id)
        return 0.0 if heard is None else asyncio.get_running_loop().time() - heard

    async def _take_call(self, requests: object, context: Any) -> None:
        """Another node calls: its lines run over this stream until one of us hangs up."""
        told = dict(context.invocation_metadata())
        caller = str(told.get("sluice-from", ""))
        if told.get("sluice-cluster") != self.options.cluster:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this is another cluster")
        if not self.me or caller in self._gone:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "one of us is not in the cluster now")
        if told.get("sluice-to") != self.me:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this is another incarnation")
        stream = self.new_stream(caller, self.accept)
        self._taken.add(stream)
        try:
            await stream.talk(context.read, context.write)
        finally:
            self._taken.discard(stream)
            stream.lose()


class _Call:
    """Our stream to another node, made anew as often as it breaks, until we hang up."""

    def __init__(self, lines: RemoteLines, node: NodeInfo) -> None:
        self._lines = lines
        self._node = node
        self._stream = lines.new_stream(node.id, None)
        self._keeping = asyncio.create_task(self._keep_up())

    @property
    def trunk(self) -> Trunk:
        return self._stream.trunk

    def hang_up(self, why: str) -> None:
        self._stream.end(why)
        self._keeping.cancel()

    async def _keep_up(self) -> None:
        delay, longest = RETRY_SECONDS
        try:
            while True:
                if await self._talk():
                    delay = RETRY_SECONDS[0]
                if await _is_gone(self._node.link):
                    self._lines.on_gone(self._node.id)
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, longest)
        finally:
            self._stream.lose()

    async def _talk(self) -> bool:
        """One stream, from its beginning to its end; whether anything was heard over it."""
        lines, node, stream = self._lines, self._node, self._stream
        began = asyncio.get_running_loop().time()
        channel = open_channel(node.link, lines.options)
        watching = asyncio.create_task(self._watch(stream))
        try:
            call = channel.stream_stream(METHOD)(
                metadata=(
                    ("sluice-cluster", lines.options.cluster),
                    ("sluice-from", lines.me),
                    ("sluice-to", node.id),
                )
            )
            await stream.talk(call.read, call.write)
            if call.done() and await call.code() is grpc.StatusCode.FAILED_PRECONDITION:
                lines.on_gone(node.id)  # somebody else listens there now
        finally:
            watching.cancel()
            self._stream = lines.new_stream(node.id, None)  # before anybody hears of the end, and dials again
            stream.lose()
            with suppress(asyncio.CancelledError):
                await channel.close()
        return lines.heard_at.get(node.id, 0.0) > began

    async def _watch(self, stream: Stream) -> None:
        """A stream over which nothing comes is given up some time: whatever swallows it may let a new one through."""
        longest = STALE * self._lines.options.silence
        began = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(longest / 4)
            alive = asyncio.get_running_loop().time() - began
            if min(self._lines.silent_for(self._node.id), alive) > longest:
                stream.end(f"node {self._node.id} is silent")
                return


async def _is_gone(link: str) -> bool:
    """Whether a host refuses: then nobody listens there, and what did is gone."""
    address = parse_address(link)
    try:
        async with asyncio.timeout(KNOCK_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


async def _answer_ping(request: bytes, context: object) -> bytes:
    return b""
