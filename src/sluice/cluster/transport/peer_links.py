"""Streams to the cells of other nodes: one gRPC stream to each node, and one from each.

A node calls every other node and keeps that link up. The streams that it dials use its own link;
the streams that the peer dials use the peer's. A node trusts what arrives over a link, so no link
starts before both ends have authenticated (`link_authentication`), and only registered nodes may
call. Heartbeats in both directions reveal silence. After a broken link, a probe of the peer's port
shows whether the process is gone: a host that refuses the connection has no listener. `Ping`
answers every caller: it only shows that this port is served.
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
RETRY_SECONDS: Final = (0.05, 1.0)  # first and longest delay between attempts
HANDSHAKE_SECONDS: Final = 5.0  # for both proofs
# The registration of an authenticated caller may arrive after its call.
REGISTRATION_WAIT_SECONDS: Final = 1.0
# Reconnect after this many times `silence`: a connection may break without an error.
STALE_SILENCES: Final = 3.0


def _ignore_received(node_id: str) -> None:
    """Ignore data of an incoming link: it does not show that we can reach the node."""


class LinkRefused(Exception):
    """A call was refused. The text goes to the caller and into the log."""

    def __init__(self, reason: str, code: grpc.StatusCode, level: int = logging.WARNING) -> None:
        super().__init__(reason)
        self.code = code
        self.level = level


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
        # The id of this incarnation. While it is empty, this node neither calls nor accepts calls.
        self.node_id = ""
        self.key: LinkKey | None = None  # for authentication
        # By node id: the time of the last received message, by the loop's clock.
        self.last_received_at: dict[str, float] = {}
        self._owner_of = owner_of
        self._server: Any = None
        self._outgoing: dict[str, _OutgoingLink] = {}
        self._accepted: set[LinkStream] = set()
        self._nodes: dict[str, NodeInfo] = {}  # registered nodes, as last reported
        self._nodes_changed = asyncio.Event()
        # Ids that never come back: a new incarnation has a new id.
        self._departed_ids: set[str] = set()

    async def open(self) -> None:
        """Listen for other nodes. Call it before registering, so that they can connect at once."""
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
        """End every stream and stop listening."""
        self.leave()
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def join(self, node_id: str, key: LinkKey) -> None:
        """Act as this incarnation from now on. Call it before registering: peers call at once."""
        self.leave()
        self.key = key
        self.node_id = node_id

    def leave(self) -> None:
        """Close outgoing and incoming links: this incarnation is over."""
        self.node_id = ""
        self._nodes = {}
        for node_id in list(self._outgoing):
            self._close_link(node_id, "this node has left the cluster")
        for stream in list(self._accepted):
            stream.end("this node has left the cluster")

    def update_nodes(self, nodes: dict[str, NodeInfo]) -> None:
        """Set the live nodes: connect to new ones and close the links to others."""
        if not self.node_id:
            return
        self._nodes = dict(nodes)
        self._nodes_changed.set()
        for node_id in [one for one in self._outgoing if one not in nodes]:
            self._departed_ids.add(node_id)
            self._close_link(node_id, f"node {node_id} has left or was evicted")
        for stream in list(self._accepted):
            if stream.peer not in nodes:
                stream.end(f"node {stream.peer} has left or was evicted")
        for node_id, node in nodes.items():
            if node_id != self.node_id and node_id not in self._outgoing:
                self.last_received_at[node_id] = asyncio.get_running_loop().time()
                self._outgoing[node_id] = _OutgoingLink(self, node)

    async def is_reachable(self, link: str, others: list[NodeInfo]) -> bool:
        """Return whether a node with this link address should join.

        It must be reachable itself and must reach at least half of the live nodes. An evicted node
        that comes back too early would only move cells to a place that no client reaches.
        """
        found = await asyncio.gather(self._ping(link), *(self._ping(one.link) for one in others))
        # Without the nodes that are gone.
        reachable = [one for one in found[1:] if one is not None]
        return bool(found[0]) and 2 * sum(reachable) >= len(reachable)

    async def _ping(self, link: str) -> bool | None:
        """Ping a node; return None if its address has no listener any more."""
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
        self.last_received_at.pop(node_id, None)
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
        """Create a stream. Only an outgoing one shows that we can reach the node."""
        on_received = self._record_received if accept is None else _ignore_received
        return LinkStream(node_id, accept, self.options.heartbeat, on_received)

    def _record_received(self, node_id: str) -> None:
        if node_id in self.last_received_at:
            self.last_received_at[node_id] = asyncio.get_running_loop().time()

    def reset_silence(self) -> None:
        """Restart the measurement of every node's silence."""
        now = asyncio.get_running_loop().time()
        self.last_received_at = dict.fromkeys(self.last_received_at, now)

    def silence_seconds(self, node_id: str) -> float:
        """Return how long a linked node has sent nothing; 0 for an unknown node."""
        received_at = self.last_received_at.get(node_id)
        return 0.0 if received_at is None else asyncio.get_running_loop().time() - received_at

    async def _accept_call(self, requests: object, context: Any) -> None:
        """Serve the call of another node until either side ends it."""
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
        """Return if the caller is a registered node that calls this incarnation; else raise."""
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
                "the caller has disconnected", grpc.StatusCode.CANCELLED, logging.INFO
            ) from None
        except TimeoutError:
            raise LinkRefused(
                "the handshake took too long", grpc.StatusCode.DEADLINE_EXCEEDED
            ) from None
        node = await self._wait_registered(caller)
        self._check_ids(call)
        host = parse_address(node.link).host
        if self.options.tls is not None and not certificate_matches_host(
            _certificate_names(context), host
        ):
            raise LinkRefused(
                "the certificate of the caller has no subject alternative name "
                f"{host}, the host that node {node.name} has registered",
                grpc.StatusCode.PERMISSION_DENIED,
            )

    def _check_ids(self, call: LinkCall) -> None:
        if not self.node_id or call.caller in self._departed_ids:
            raise LinkRefused(
                "caller or acceptor is not in the cluster now",
                grpc.StatusCode.UNAVAILABLE,
                logging.INFO,
            )
        if call.acceptor != self.node_id:
            raise LinkRefused(
                "this node has another incarnation now",
                grpc.StatusCode.FAILED_PRECONDITION,
                logging.INFO,
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
    """Our link to another node: reconnects after each failure until it is closed."""

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
        """Run one stream from start to end; return whether anything was received over it."""
        peer_links, node, stream = self._peer_links, self._node, self._stream
        started_at = asyncio.get_running_loop().time()
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
                peer_links.on_peer_gone(node.id)  # another incarnation listens there now
        finally:
            watching.cancel()
            # Before the streams end, because their protocols dial again at once.
            self._stream = peer_links.new_stream(node.id, None)
            stream.fail_streams()
            with suppress(asyncio.CancelledError):
                await channel.close()
        return peer_links.last_received_at.get(node.id, 0.0) > started_at

    async def _authenticate(self, call: Any) -> bool:
        """Return whether both ends have proved that they know the cluster secret."""
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
            pass  # no listener, or too slow: the caller retries
        return False

    def _log_failure(self, reason: str) -> None:
        log_fields = {"node": self._node.id, "address": self._node.link, "reason": reason}
        log.warning("link not established", extra=log_fields)

    async def _watch_silence(self, stream: LinkStream) -> None:
        """End a stream that receives nothing for long: a new connection may get through."""
        max_silence = STALE_SILENCES * self._peer_links.options.silence
        started_at = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(max_silence / 4)
            alive = asyncio.get_running_loop().time() - started_at
            if min(self._peer_links.silence_seconds(self._node.id), alive) > max_silence:
                stream.end(f"node {self._node.id} is silent")
                return


async def _is_port_refused(link: str) -> bool:
    """Return whether a host refuses the connection: then no process listens there any more."""
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
    """Return the subject alternative names of the caller's certificate; gRPC has verified it."""
    found = context.auth_context().get("x509_subject_alternative_name", ())
    return [name.decode(errors="replace") for name in found]


async def _answer_ping(request: bytes, context: object) -> bytes:
    return b""
