"""One gRPC stream between two nodes, in either direction, and the gRPC setup of both ends."""

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
    # A mux sends messages of 1 MiB plus one frame at most.
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new stream gets a new connection
    ("grpc.http2.max_pings_without_data", 0),
)

# A gRPC message costs about 100 us at both ends together, of any size. So a busy stream
# sends once per COALESCE_SECONDS. An idle stream may first send BURST_MESSAGES without delay, so
# that request and answer in turn are not delayed.
COALESCE_SECONDS: Final = 0.001
BURST_MESSAGES: Final = 4
FLUSH_BYTES: Final = 65_536  # this much output is sent at once

# How gRPC reports the end of a stream: by a status, or by a state error to a late writer.
STREAM_ENDED_ERRORS: Final = (
    grpc.aio.AioRpcError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    ConnectionError,
)


@dataclass(frozen=True)
class LinkTls:
    """PEM data. Both sides present a certificate, and `authority` has signed both."""

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
    """A mux and its gRPC stream: reads messages, writes the mux's output, sends heartbeats."""

    def __init__(
        self,
        peer: str,
        accept: AcceptStream | None,
        heartbeat: float,
        on_received: Callable[[str], None],
    ) -> None:
        self._heartbeat = heartbeat
        self._on_received = on_received
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
        """End the mux and its streams with the gRPC stream."""
        self.mux.fail(StreamLost(self._end_reason or f"the link to node {self.peer} is broken"))

    async def run(self, read: Callable[[], Any], write: Callable[[bytes], Any]) -> None:
        """Run until either side ends the stream."""
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
                    log.error("link failed", extra={"node": self.peer}, exc_info=outcome)

    async def _read_loop(self, read: Callable[[], Any]) -> None:
        while (message := await read()) is not grpc.aio.EOF:
            self._on_received(self.peer)
            self.mux.receive(message)

    async def _write_loop(self, write: Callable[[bytes], Any]) -> None:
        """Write pending output, one message at a time, coalesced while the stream is busy."""
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
    """Start to listen and return the port."""
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
            "Give PEM files in cluster.tls_cert, cluster.tls_key (without a pass phrase) "
            "and cluster.tls_ca",
        )
    raise ListenerError(
        "cluster", options.listen.host, options.listen.port, OSError("the port cannot be bound")
    )


def _probe_port(address: Address) -> None:
    """Bind the port once for the error of the system: gRPC does not report why it failed."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as fault:
        raise ListenerError("cluster", address.host, address.port, fault) from fault
