"""Listeners for TCP, TLS, WebSocket and secure WebSocket.

Each listener has one port. All of them create the same `Connection`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from sluice.broker.net.origins import ANY_ORIGIN, AllowedOrigins
from sluice.errors import SluiceError

BACKLOG = 4096  # a restart brings every client back in the same second
# A WebSocket frame may carry many packets [MQTT-6.0.0-2], so it may exceed the packet limit.
MIN_FRAME_LIMIT = 65_536


@dataclass(frozen=True)
class Listener:
    """One open listener, under the name that flags and the ready line use."""

    name: str
    server: asyncio.Server

    @property
    def address(self) -> str:
        bound: socket.socket = self.server.sockets[0]
        host, port = bound.getsockname()[:2]
        return f"[{host}]:{port}" if bound.family == socket.AF_INET6 else f"{host}:{port}"


class ListenerError(SluiceError):
    def __init__(self, name: str, host: str, port: int, error: OSError) -> None:
        super().__init__(
            f"the {name} listener cannot use {host}:{port}: {error.strerror or error}",
            f"Free the port, or choose another one with --{name} HOST:PORT "
            "(port 0 takes any free one)",
        )


async def open_listener(
    name: str,
    host: str,
    port: int,
    protocol_factory: Callable[[], object],
    tls: ssl.SSLContext | None,
    max_packet_size: int,
    handshake_timeout: float,
    origins: AllowedOrigins = ANY_ORIGIN,
    is_port_shared: bool = False,
) -> Listener:
    """Open the listener `name`: mqtt, mqtts, ws or wss.

    `origins` are the web pages that may open a WebSocket. `is_port_shared`: other processes listen
    at the same port, and the kernel chooses one for each connection.
    """
    try:
        if name in ("ws", "wss"):
            # Imported here: libraries of 5 MB that few brokers need.
            from sluice.broker.net.websocket import serve_websocket

            server = await serve_websocket(
                cast(Any, protocol_factory),
                host,
                port,
                ssl=tls,
                max_frame=max(max_packet_size, MIN_FRAME_LIMIT),
                handshake_timeout=handshake_timeout,
                origins=origins,
                is_port_shared=is_port_shared,
            )
        else:
            server = await asyncio.get_running_loop().create_server(
                cast(Any, protocol_factory),
                host,
                port,
                ssl=tls,
                backlog=BACKLOG,
                reuse_address=True,
                reuse_port=is_port_shared,
                ssl_handshake_timeout=handshake_timeout if tls else None,
            )
    except OSError as fault:
        raise ListenerError(name, host, port, fault) from fault
    return Listener(name, server)
