"""Lines to the cells of other nodes: a gRPC stream to each of them, and one from each.

A node calls every other one it knows and keeps the stream up; the lines that it dials run over it, those that the other
dials over the other's. What comes over a stream is believed, so none begins before both ends have proved that they
belong to the cluster (`authentication`), and calls are taken from registered nodes alone. Signs of life go both ways,
so that silence is noticed; whether a broken stream means that the process is gone is found out by knocking at its port,
since a host that refuses has nobody who listens. `Ping` answers anybody: it only shows that this port is served.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio

from sluice.cluster.transport.link_authentication import (
    LinkCall,
    LinkKey,
    NotProved,
    check_caller,
    names_host,
    prove_as_caller,
)
from sluice.cluster.membership.coordinator import NodeInfo
from sluice.cluster.transport.streams import THE_NODE, Accept, LineLost, LineProtocol, NoOwner
from sluice.cluster.transport.link_stream import OPTIONS, STREAM_ENDS, LinkOptions, Stream, bind_port, open_channel
from sluice.cluster.transport.mux import Trunk
from sluice.units import Address, parse_address

log = logging.getLogger(__name__)

METHOD: Final = "/sluice.Link/Talk"
PING: Final = "/sluice.Link/Ping"
KNOCK_SECONDS: Final = 1.0
RETRY_SECONDS: Final = (0.05, 1.0)  # between attempts: the first, and the longest
HANDSHAKE_SECONDS: Final = 5.0  # for both proofs
REGISTERED_SECONDS: Final = 1.0  # the registration of a proven caller may arrive after its call
STALE: Final = 3.0  # silences after which a stream is made anew, because a line may die without a word


def _not_counted(node_id: str) -> None:
    """It was heard on a stream that says nothing of ours."""


class LinkRefused(Exception):
    """A call that is not taken, and what the caller and the log are told."""

    def __init__(self, reason: str, code: grpc.StatusCode, level: int = logging.WARNING) -> None:
        super().__init__(reason)
        self.code = code
        self.level = level


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
        self.key: LinkKey | None = None  # what nodes prove to each other
        self.heard_at: dict[
            str, float
        ] = {}  # by the id of a node, when it last said anything, by the loop's clock
        self._owner_of = owner_of
        self._server: Any = None
        self._calls: dict[str, _Call] = {}
        self._taken: set[Stream] = set()
        self._nodes: dict[str, NodeInfo] = {}  # registered, as last heard
        self._met = asyncio.Event()
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

    def join(self, me: str, key: LinkKey) -> None:
        """From now on this node is the one of this id. Before it is registered: who hears of it calls it."""
        self.leave()
        self.key = key
        self.me = me

    def leave(self) -> None:
        """Hang up, on both kinds of streams: this incarnation is over."""
        self.me = ""
        self._nodes = {}
        for node_id in list(self._calls):
            self._hang_up(node_id, "this node has left the cluster")
        for stream in list(self._taken):
            stream.end("this node has left the cluster")

    def meet(self, nodes: dict[str, NodeInfo]) -> None:
        """These are the nodes that live. Who is new is called, who is no more among them is hung up on."""
        if not self.me:
            return
        self._nodes = dict(nodes)
        self._met.set()
        for node_id in [one for one in self._calls if one not in nodes]:
            self._gone.add(node_id)
            self._hang_up(node_id, f"node {node_id} has left, or was put out")
        for stream in list(self._taken):
            if stream.peer not in nodes:
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
        facts = {"node": caller[:200], "address": context.peer()}
        try:
            await self._admit(told, caller, context)
        except LinkRefused as refusal:
            log.log(refusal.level, "link refused", extra={**facts, "reason": str(refusal)})
            await context.abort(refusal.code, str(refusal))
        log.info("link accepted", extra=facts)
        stream = self.new_stream(caller, self.accept)
        self._taken.add(stream)
        try:
            await stream.talk(context.read, context.write)
        finally:
            self._taken.discard(stream)
            stream.lose()

    async def _admit(self, told: dict[str, Any], caller: str, context: Any) -> None:
        """Return when the caller has proved to be a registered node that means this one."""
        if told.get("sluice-cluster") != self.options.cluster:
            raise LinkRefused("this is another cluster", grpc.StatusCode.PERMISSION_DENIED)
        key = self.key
        if key is None:
            raise LinkRefused(
                "this node is not in the cluster now", grpc.StatusCode.UNAVAILABLE, logging.INFO
            )
        call = LinkCall(self.options.cluster, caller, str(told.get("sluice-to", "")))
        self._check_ids(call)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await check_caller(key, call, context.read, context.write)
        except NotProved as fault:
            raise LinkRefused(str(fault), grpc.StatusCode.PERMISSION_DENIED) from None
        except STREAM_ENDS:
            raise LinkRefused("the caller hung up", grpc.StatusCode.CANCELLED, logging.INFO) from None
        except TimeoutError:
            raise LinkRefused("the handshake takes too long", grpc.StatusCode.DEADLINE_EXCEEDED) from None
        node = await self._registered(caller)
        self._check_ids(call)
        host = parse_address(node.link).host
        if self.options.tls is not None and not names_host(_names_of(context), host):
            raise LinkRefused(
                f"the certificate of the caller has no subject alternative name {host}, the host that "
                f"node {node.name} has registered",
                grpc.StatusCode.PERMISSION_DENIED,
            )

    def _check_ids(self, call: LinkCall) -> None:
        if not self.me or call.caller in self._gone:
            raise LinkRefused(
                "one of us is not in the cluster now", grpc.StatusCode.UNAVAILABLE, logging.INFO
            )
        if call.acceptor != self.me:
            raise LinkRefused(
                "this is another incarnation", grpc.StatusCode.FAILED_PRECONDITION, logging.INFO
            )

    async def _registered(self, caller: str) -> NodeInfo:
        try:
            async with asyncio.timeout(REGISTERED_SECONDS):
                while caller not in self._nodes:
                    self._met.clear()
                    await self._met.wait()
        except TimeoutError:
            raise LinkRefused("the caller is not a registered node", grpc.StatusCode.UNAVAILABLE) from None
        return self._nodes[caller]


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
            if await self._prove(call):
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

    async def _prove(self, call: Any) -> bool:
        """Whether both ends have proved that they know the secret of the cluster."""
        lines, node = self._lines, self._node
        if lines.key is None:
            return False
        names = LinkCall(lines.options.cluster, lines.me, node.id)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await prove_as_caller(lines.key, names, call.read, call.write)
            return True
        except grpc.aio.AioRpcError as fault:
            if fault.code() is grpc.StatusCode.PERMISSION_DENIED:
                self._log_failure(fault.details() or "")
        except NotProved as fault:
            self._log_failure(str(fault))
        except (*STREAM_ENDS, TimeoutError):
            pass  # nobody listens, or not in time: it is called again
        return False

    def _log_failure(self, reason: str) -> None:
        facts = {"node": self._node.id, "address": self._node.link, "reason": reason}
        log.warning("link not established", extra=facts)

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


def _names_of(context: Any) -> list[str]:
    """The subject alternative names in the caller's certificate, which gRPC has verified."""
    found = context.auth_context().get("x509_subject_alternative_name", ())
    return [name.decode(errors="replace") for name in found]


async def _answer_ping(request: bytes, context: object) -> bytes:
    return b""
