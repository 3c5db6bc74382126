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
from sluice.cluster.transport.streams import Accept, LineLost
from sluice.cluster.transport.mux import BEAT, Trunk
from sluice.errors import ConfigError
from sluice.units import Address

log = logging.getLogger(__name__)

OPTIONS: Final = (
    ("grpc.max_receive_message_length", 16 << 20),  # a trunk sends messages of 1 MiB and one frame at most
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a stream that is made anew has a connection of its own
    ("grpc.http2.max_pings_without_data", 0),
)

# A message costs gRPC some 100 us at both ends together, whatever is in it. So a busy stream says what it has to say
# once in GATHER_SECONDS; one that was quiet has some messages to spend before that, so nobody waits who speaks in turn.
GATHER_SECONDS: Final = 0.001
UNGATHERED: Final = 4
ENOUGH_BYTES: Final = 65_536  # so much leaves at once

# How gRPC says that a stream is over: by a status, and to one who writes to a finished one by a state.
STREAM_ENDS: Final = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, ConnectionError)


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


class Stream:
    """A trunk and the stream it runs over: what comes is read, what the trunk has to say is written, and a beat from
    time to time."""

    def __init__(
        self, peer: str, accept: Accept | None, heartbeat: float, heard: Callable[[str], None]
    ) -> None:
        self._heartbeat = heartbeat
        self._heard = heard
        self._awake = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._why = ""
        self.peer = peer
        self.trunk = Trunk(self._awake.set, accept, asyncio.get_running_loop().call_soon, peer)

    def end(self, why: str) -> None:
        self._why = self._why or why
        if self._listening is not None:
            self._listening.cancel()

    def lose(self) -> None:
        """No line outlives the stream."""
        self.trunk.lose(LineLost(self._why or f"the link to node {self.peer} is broken"))

    async def talk(self, read: Callable[[], Any], write: Callable[[bytes], Any]) -> None:
        """Until the stream ends, from whichever side."""
        if self._why:
            return
        self._listening = asyncio.create_task(self._listen(read))
        tasks = (
            self._listening,
            asyncio.create_task(self._speak(write)),
            asyncio.create_task(self._beat()),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, STREAM_ENDS):
                    log.error("a link has failed", extra={"node": self.peer}, exc_info=outcome)

    async def _listen(self, read: Callable[[], Any]) -> None:
        while (message := await read()) is not grpc.aio.EOF:
            self._heard(self.peer)
            self.trunk.receive(message)

    async def _speak(self, write: Callable[[bytes], Any]) -> None:
        """One message for all that was said in a turn, while the one before was on its way, or since it was due."""
        trunk = self.trunk
        clock = asyncio.get_running_loop().time
        due = 0.0
        while True:
            await self._awake.wait()
            self._awake.clear()
            early = due - clock()
            if early > 0.0 and trunk.waiting < ENOUGH_BYTES:
                await asyncio.sleep(early)
            message = trunk.take()
            if message:
                await write(message)
                now = clock()
                due = min(max(due, now - UNGATHERED * GATHER_SECONDS), now) + GATHER_SECONDS
            if trunk.waiting:
                self._awake.set()

    async def _beat(self) -> None:
        while True:
            self.trunk.send(BEAT, 0)
            await asyncio.sleep(self._heartbeat)


def open_channel(target: str, options: LinkOptions) -> Any:
    tls = options.tls
    if tls is None:
        return grpc.aio.insecure_channel(target, OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
    return grpc.aio.secure_channel(target, credentials, OPTIONS)


def bind_port(server: Any, options: LinkOptions) -> int:
    """Listen, and say at which port."""
    _try_port(options.listen)
    tls = options.tls
    try:
        if tls is None:
            taken: int = server.add_insecure_port(str(options.listen))
        else:
            pair = ((tls.key, tls.certificate),)
            credentials = grpc.ssl_server_credentials(pair, tls.authority, require_client_auth=True)
            taken = server.add_secure_port(str(options.listen), credentials)
    except RuntimeError:
        taken = 0
    if taken:
        return taken
    if tls is not None:
        raise ConfigError(
            "the link between the nodes cannot use its TLS files",
            "Give PEM files in cluster.tls_cert, cluster.tls_key (without a pass phrase) and cluster.tls_ca",
        )
    raise ListenerError(
        "cluster", options.listen.host, options.listen.port, OSError("the port cannot be bound")
    )


def _try_port(address: Address) -> None:
    """gRPC does not say why a port cannot be had; the system does."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as fault:
        raise ListenerError("cluster", address.host, address.port, fault) from fault
