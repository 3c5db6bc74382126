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

from sluice.cluster.membership.coordinator import NodeInfo
from sluice.cluster.transport.link_authentication import (
    LinkAuthenticationError,
    LinkCall,
    LinkKey,
    certificate_matches_host,
    check_caller,
    prove_as_caller,
)
from sluice.cluster.transport.link_stream import (
    GRPC_OPTIONS,
    STREAM_ENDED_ERRORS,
    LinkOptions,
    LinkStream,
    bind_port,
    open_channel,
)
from sluice.cluster.transport.mux import Mux
from sluice.cluster.transport.streams import (
    NODE_TARGET,
    AcceptStream,
    NoOwner,
    StreamLost,
    StreamProtocol,
)
from sluice.units import Address, parse_address

log = logging.getLogger(__name__)

STREAM_METHOD: Final = "/sluice.Link/Talk"
PING_METHOD: Final = "/sluice.Link/Ping"
PROBE_SECONDS: Final = 1.0
RETRY_SECONDS: Final = (0.05, 1.0)  # between attempts: the first, and the longest
HANDSHAKE_SECONDS: Final = 5.0  # for both proofs
REGISTRATION_WAIT_SECONDS: Final = (
    1.0  # the registration of a proven caller may arrive after its call
)
STALE_SILENCES: Final = (
    3.0  # silences after which a stream is made anew, because a line may die without a word
)


def _ignore_heard(node_id: str) -> None:
    """It was heard on a stream that says nothing of ours."""


class LinkRefused(Exception):
    """A call that is not taken, and what the caller and the log are told."""

    def __init__(self, reason: str, code: grpc.StatusCode, level: int = logging.WARNING) -> None:
        super().__init__(reason)
        self.code = code
        self.level = level


def refuse_stream(cell: int, greeting: bytes, node_id: str) -> StreamProtocol | None:
    return None


class PeerLinks:
    """The way to the cells of other nodes. `owner_of` says which node holds a cell now."""

    def __init__(self, options: LinkOptions, owner_of: Callable[[int], NodeInfo | None]) -> None:
        self.accept: AcceptStream = refuse_stream
        self.on_peer_gone: Callable[[str], None] = lambda node_id: (
            None
        )  # nobody listens any more where it was
        self.address = options.listen  # with the port that was taken, once it is open
        self.options = options
        self.node_id = (
            ""  # the id of this incarnation; nobody is called, and no call is taken, without it
        )
        self.key: LinkKey | None = None  # what nodes prove to each other
        self.heard_at: dict[
            str, float
        ] = {}  # by the id of a node, when it last said anything, by the loop's clock
        self._owner_of = owner_of
        self._server: Any = None
        self._outgoing: dict[str, _OutgoingLink] = {}
        self._accepted: set[LinkStream] = set()
        self._nodes: dict[str, NodeInfo] = {}  # registered, as last heard
        self._nodes_changed = asyncio.Event()
        self._departed_ids: set[str] = (
            set()
        )  # ids that will not come back: a new incarnation has a new one

    async def open(self) -> None:
        """Listen for the others. Before this node is registered, so that whoever knows it can call it."""
        options = self.options
        server = grpc.aio.server(options=GRPC_OPTIONS)
        handlers = {
            STREAM_METHOD.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(
                self._accept_call
            ),
            PING_METHOD.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(_answer_ping),
        }
        service = STREAM_METHOD[1:].partition("/")[0]
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

    def join(self, node_id: str, key: LinkKey) -> None:
        """From now on this node is the one of this id. Before it is registered: who hears of it calls it."""
        self.leave()
        self.key = key
        self.node_id = node_id

    def leave(self) -> None:
        """Hang up, on both kinds of streams: this incarnation is over."""
        self.node_id = ""
        self._nodes = {}
        for node_id in list(self._outgoing):
            self._close_link(node_id, "this node has left the cluster")
        for stream in list(self._accepted):
            stream.end("this node has left the cluster")

    def update_nodes(self, nodes: dict[str, NodeInfo]) -> None:
        """These are the nodes that live. Who is new is called, who is no more among them is hung up on."""
        if not self.node_id:
            return
        self._nodes = dict(nodes)
        self._nodes_changed.set()
        for node_id in [one for one in self._outgoing if one not in nodes]:
            self._departed_ids.add(node_id)
            self._close_link(node_id, f"node {node_id} has left, or was put out")
        for stream in list(self._accepted):
            if stream.peer not in nodes:
                stream.end(f"node {stream.peer} has left, or was put out")
        for node_id, node in nodes.items():
            if node_id != self.node_id and node_id not in self._outgoing:
                self.heard_at[node_id] = asyncio.get_running_loop().time()
                self._outgoing[node_id] = _OutgoingLink(self, node)

    async def is_reachable(self, link: str, others: list[NodeInfo]) -> bool:
        """Whether a node with this link has its place among the others: it can be called, and can call most of those
        that live. One that was put out and comes back too early only moves cells to where nobody reaches them."""
        found = await asyncio.gather(self._ping(link), *(self._ping(one.link) for one in others))
        reachable = [
            one for one in found[1:] if one is not None
        ]  # of the others, those that are not gone
        return bool(found[0]) and 2 * sum(reachable) >= len(reachable)

    async def _ping(self, link: str) -> bool | None:
        """None: nobody listens there any more."""
        if await _is_port_refused(link):
            return None
        channel = open_channel(link, self.options)
        try:
            await channel.unary_unary(PING_METHOD)(b"", timeout=PROBE_SECONDS)
            return True
        except grpc.aio.AioRpcError:
            return False
        finally:
            await channel.close()

    def _close_link(self, node_id: str, reason: str) -> None:
        self.heard_at.pop(node_id, None)
        self._outgoing.pop(node_id).close(reason)

    def dial(self, cell: int, greeting: bytes, protocol: StreamProtocol) -> None:
        node = self._owner_of(cell)
        link = self._outgoing.get(node.id) if node is not None else None
        if link is None:
            loop = asyncio.get_running_loop()
            loop.call_soon(protocol.connection_lost, NoOwner(cell))
        else:
            link.mux.dial(cell, greeting, protocol)

    def dial_node(self, node_id: str, greeting: bytes, protocol: StreamProtocol) -> None:
        link = self._outgoing.get(node_id)
        if link is None:
            loop = asyncio.get_running_loop()
            loop.call_soon(
                protocol.connection_lost, StreamLost(f"node {node_id} is not in the cluster")
            )
        else:
            link.mux.dial(NODE_TARGET, greeting, protocol)

    def new_stream(self, node_id: str, accept: AcceptStream | None) -> LinkStream:
        """Only a call of our own tells whether a node can be reached: that it reaches us is another matter."""
        heard = self._record_heard if accept is None else _ignore_heard
        return LinkStream(node_id, accept, self.options.heartbeat, heard)

    def _record_heard(self, node_id: str) -> None:
        if node_id in self.heard_at:
            self.heard_at[node_id] = asyncio.get_running_loop().time()

    def reset_silence(self) -> None:
        """Count every node's silence from now."""
        now = asyncio.get_running_loop().time()
        self.heard_at = dict.fromkeys(self.heard_at, now)

    def silence_seconds(self, node_id: str) -> float:
        """How long nothing was heard of a node that we should hear."""
        heard = self.heard_at.get(node_id)
        return 0.0 if heard is None else asyncio.get_running_loop().time() - heard

    async def _accept_call(self, requests: object, context: Any) -> None:
        """Another node calls: its lines run over this stream until one of us hangs up."""
        metadata = dict(context.invocation_metadata())
        caller = str(metadata.get("sluice-from", ""))
        log_fields = {"node": caller[:200], "address": context.peer()}
        try:
            await self._authenticate(metadata, caller, context)
        except LinkRefused as refusal:
            log.log(refusal.level, "link refused", extra={**log_fields, "reason": str(refusal)})
            await context.abort(refusal.code, str(refusal))
        log.info("link accepted", extra=log_fields)
        stream = self.new_stream(caller, self.accept)
        self._accepted.add(stream)
        try:
            await stream.run(context.read, context.write)
        finally:
            self._accepted.discard(stream)
            stream.fail_streams()

    async def _authenticate(self, metadata: dict[str, Any], caller: str, context: Any) -> None:
        """Return when the caller has proved to be a registered node that means this one."""
        if metadata.get("sluice-cluster") != self.options.cluster:
            raise LinkRefused("this is another cluster", grpc.StatusCode.PERMISSION_DENIED)
        key = self.key
        if key is None:
            raise LinkRefused(
                "this node is not in the cluster now", grpc.StatusCode.UNAVAILABLE, logging.INFO
            )
        call = LinkCall(self.options.cluster, caller, str(metadata.get("sluice-to", "")))
        self._check_ids(call)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await check_caller(key, call, context.read, context.write)
        except LinkAuthenticationError as fault:
            raise LinkRefused(str(fault), grpc.StatusCode.PERMISSION_DENIED) from None
        except STREAM_ENDED_ERRORS:
            raise LinkRefused(
                "the caller hung up", grpc.StatusCode.CANCELLED, logging.INFO
            ) from None
        except TimeoutError:
            raise LinkRefused(
                "the handshake takes too long", grpc.StatusCode.DEADLINE_EXCEEDED
            ) from None
        node = await self._wait_registered(caller)
        self._check_ids(call)
        host = parse_address(node.link).host
        if self.options.tls is not None and not certificate_matches_host(
            _certificate_names(context), host
        ):
            raise LinkRefused(
                f"the certificate of the caller has no subject alternative name {host}, the host that "
                f"node {node.name} has registered",
                grpc.StatusCode.PERMISSION_DENIED,
            )

    def _check_ids(self, call: LinkCall) -> None:
        if not self.node_id or call.caller in self._departed_ids:
            raise LinkRefused(
                "one of us is not in the cluster now", grpc.StatusCode.UNAVAILABLE, logging.INFO
            )
        if call.acceptor != self.node_id:
            raise LinkRefused(
                "this is another incarnation", grpc.StatusCode.FAILED_PRECONDITION, logging.INFO
            )

    async def _wait_registered(self, caller: str) -> NodeInfo:
        try:
            async with asyncio.timeout(REGISTRATION_WAIT_SECONDS):
                while caller not in self._nodes:
                    self._nodes_changed.clear()
                    await self._nodes_changed.wait()
        except TimeoutError:
            raise LinkRefused(
                "the caller is not a registered node", grpc.StatusCode.UNAVAILABLE
            ) from None
        return self._nodes[caller]


class _OutgoingLink:
    """Our stream to another node, made anew as often as it breaks, until we hang up."""

    def __init__(self, peer_links: PeerLinks, node: NodeInfo) -> None:
        self._peer_links = peer_links
        self._node = node
        self._stream = peer_links.new_stream(node.id, None)
        self._task = asyncio.create_task(self._run())

    @property
    def mux(self) -> Mux:
        return self._stream.mux

    def close(self, reason: str) -> None:
        self._stream.end(reason)
        self._task.cancel()

    async def _run(self) -> None:
        delay, longest = RETRY_SECONDS
        try:
            while True:
                if await self._run_stream():
                    delay = RETRY_SECONDS[0]
                if await _is_port_refused(self._node.link):
                    self._peer_links.on_peer_gone(self._node.id)
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, longest)
        finally:
            self._stream.fail_streams()

    async def _run_stream(self) -> bool:
        """One stream, from its beginning to its end; whether anything was heard over it."""
        peer_links, node, stream = self._peer_links, self._node, self._stream
        began = asyncio.get_running_loop().time()
        channel = open_channel(node.link, peer_links.options)
        watching = asyncio.create_task(self._watch_silence(stream))
        try:
            call = channel.stream_stream(STREAM_METHOD)(
                metadata=(
                    ("sluice-cluster", peer_links.options.cluster),
                    ("sluice-from", peer_links.node_id),
                    ("sluice-to", node.id),
                )
            )
            if await self._authenticate(call):
                await stream.run(call.read, call.write)
            if call.done() and await call.code() is grpc.StatusCode.FAILED_PRECONDITION:
                peer_links.on_peer_gone(node.id)  # somebody else listens there now
        finally:
            watching.cancel()
            self._stream = peer_links.new_stream(
                node.id, None
            )  # before anybody hears of the end, and dials again
            stream.fail_streams()
            with suppress(asyncio.CancelledError):
                await channel.close()
        return peer_links.heard_at.get(node.id, 0.0) > began

    async def _authenticate(self, call: Any) -> bool:
        """Whether both ends have proved that they know the secret of the cluster."""
        peer_links, node = self._peer_links, self._node
        if peer_links.key is None:
            return False
        link_call = LinkCall(peer_links.options.cluster, peer_links.node_id, node.id)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await prove_as_caller(peer_links.key, link_call, call.read, call.write)
            return True
        except grpc.aio.AioRpcError as fault:
            if fault.code() is grpc.StatusCode.PERMISSION_DENIED:
                self._log_failure(fault.details() or "")
        except LinkAuthenticationError as fault:
            self._log_failure(str(fault))
        except (*STREAM_ENDED_ERRORS, TimeoutError):
            pass  # nobody listens, or not in time: it is called again
        return False

    def _log_failure(self, reason: str) -> None:
        log_fields = {"node": self._node.id, "address": self._node.link, "reason": reason}
        log.warning("link not established", extra=log_fields)

    async def _watch_silence(self, stream: LinkStream) -> None:
        """A stream over which nothing comes is given up some time: whatever swallows it may let a new one through."""
        max_silence = STALE_SILENCES * self._peer_links.options.silence
        began = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(max_silence / 4)
            alive = asyncio.get_running_loop().time() - began
            if min(self._peer_links.silence_seconds(self._node.id), alive) > max_silence:
                stream.end(f"node {self._node.id} is silent")
                return


async def _is_port_refused(link: str) -> bool:
    """Whether a host refuses: then nobody listens there, and what did is gone."""
    address = parse_address(link)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


def _certificate_names(context: Any) -> list[str]:
    """The subject alternative names in the caller's certificate, which gRPC has verified."""
    found = context.auth_context().get("x509_subject_alternative_name", ())
    return [name.decode(errors="replace") for name in found]


async def _answer_ping(request: bytes, context: object) -> bytes:
    return b""
