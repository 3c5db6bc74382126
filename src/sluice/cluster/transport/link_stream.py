"""One gRPC stream between two nodes, whichever of them has called, and what both need to speak over it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio

from sluice.broker.net.listener import ListenerError
from sluice.cluster.transport.mux import HEARTBEAT, Mux
from sluice.cluster.transport.streams import AcceptStream, StreamLost
from sluice.errors import ConfigError
from sluice.units import Address

log = logging.getLogger(__name__)

GRPC_OPTIONS: Final = (
    (
        "grpc.max_receive_message_length",
        16 << 20,
    ),  # a trunk sends messages of 1 MiB and one frame at most
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a stream that is made anew has a connection of its own
    ("grpc.http2.max_pings_without_data", 0),
)

# A message costs gRPC some 100 us at both ends together, whatever is in it. So a busy stream says what it has to say
# once in GATHER_SECONDS; one that was quiet has some messages to spend before that, so nobody waits who speaks in turn.
COALESCE_SECONDS: Final = 0.001
BURST_MESSAGES: Final = 4
FLUSH_BYTES: Final = 65_536  # so much leaves at once

# How gRPC says that a stream is over: by a status, and to one who writes to a finished one by a state.
STREAM_ENDED_ERRORS: Final = (
    grpc.aio.AioRpcError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    ConnectionError,
)


@dataclass(frozen=True)
class LinkTls:
    """PEM, as read from files. Both sides show a certificate, and `authority` has signed both."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes


@dataclass(frozen=True)
class LinkOptions:
    listen: Address
    cluster: str = "sluice"
    heartbeat: float = 0.5
    silence: float = 2.0
    tls: LinkTls | None = None


class LinkStream:
    """A trunk and the stream it runs over: what comes is read, what the trunk has to say is written, and a beat from
    time to time."""

    def __init__(
        self,
        peer: str,
        accept: AcceptStream | None,
        heartbeat: float,
        on_heard: Callable[[str], None],
    ) -> None:
        self._heartbeat = heartbeat
        self._on_heard = on_heard
        self._output_ready = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._end_reason = ""
        self.peer = peer
        self.mux = Mux(self._output_ready.set, accept, asyncio.get_running_loop().call_soon, peer)

    def end(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        if self._reader is not None:
            self._reader.cancel()

    def fail_streams(self) -> None:
        """No line outlives the stream."""
        self.mux.fail(StreamLost(self._end_reason or f"the link to node {self.peer} is broken"))

    async def run(self, read: Callable[[], Any], write: Callable[[bytes], Any]) -> None:
        """Until the stream ends, from whichever side."""
        if self._end_reason:
            return
        self._reader = asyncio.create_task(self._read_loop(read))
        tasks = (
            self._reader,
            asyncio.create_task(self._write_loop(write)),
            asyncio.create_task(self._heartbeat_loop()),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, STREAM_ENDED_ERRORS):
                    log.error("a link has failed", extra={"node": self.peer}, exc_info=outcome)

    async def _read_loop(self, read: Callable[[], Any]) -> None:
        while (message := await read()) is not grpc.aio.EOF:
            self._on_heard(self.peer)
            self.mux.receive(message)

    async def _write_loop(self, write: Callable[[bytes], Any]) -> None:
        """One message for all that was said in a turn, while the one before was on its way, or since it was due."""
        mux = self.mux
        clock = asyncio.get_running_loop().time
        due = 0.0
        while True:
            await self._output_ready.wait()
            self._output_ready.clear()
            wait_seconds = due - clock()
            if wait_seconds > 0.0 and mux.pending_bytes < FLUSH_BYTES:
                await asyncio.sleep(wait_seconds)
            message = mux.take_message()
            if message:
                await write(message)
                now = clock()
                due = min(max(due, now - BURST_MESSAGES * COALESCE_SECONDS), now) + COALESCE_SECONDS
            if mux.pending_bytes:
                self._output_ready.set()

    async def _heartbeat_loop(self) -> None:
        while True:
            self.mux.send(HEARTBEAT, 0)
            await asyncio.sleep(self._heartbeat)


def open_channel(target: str, options: LinkOptions) -> Any:
    tls = options.tls
    if tls is None:
        return grpc.aio.insecure_channel(target, GRPC_OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
    return grpc.aio.secure_channel(target, credentials, GRPC_OPTIONS)


def bind_port(server: Any, options: LinkOptions) -> int:
    """Listen, and say at which port."""
    _probe_port(options.listen)
    tls = options.tls
    try:
        if tls is None:
            port: int = server.add_insecure_port(str(options.listen))
        else:
            pair = ((tls.key, tls.certificate),)
            credentials = grpc.ssl_server_credentials(pair, tls.authority, require_client_auth=True)
            port = server.add_secure_port(str(options.listen), credentials)
    except RuntimeError:
        port = 0
    if port:
        return port
    if tls is not None:
        raise ConfigError(
            "the link between the nodes cannot use its TLS files",
            "Give PEM files in cluster.tls_cert, cluster.tls_key (without a pass phrase) and cluster.tls_ca",
        )
    raise ListenerError(
        "cluster", options.listen.host, options.listen.port, OSError("the port cannot be bound")
    )


def _probe_port(address: Address) -> None:
    """gRPC does not say why a port cannot be had; the system does."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as fault:
        raise ListenerError("cluster", address.host, address.port, fault) from fault
