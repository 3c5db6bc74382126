"""Sockets: listeners, connections with their limits, CONNECT."""

from sluice.broker.net.connection import Connection, ConnectionTimeout
from sluice.broker.net.connection_limits import ConnectionLimits
from sluice.broker.net.handshake import Handshake
from sluice.broker.net.listener import Listener, ListenerError, open_listener
from sluice.broker.net.memory_transport import MemoryTransport, connect_in_memory
from sluice.broker.net.origins import AllowedOrigins, origin_error

__all__ = [
    "AllowedOrigins",
    "Connection",
    "ConnectionLimits",
    "ConnectionTimeout",
    "Handshake",
    "Listener",
    "ListenerError",
    "MemoryTransport",
    "connect_in_memory",
    "open_listener",
    "origin_error",
]
