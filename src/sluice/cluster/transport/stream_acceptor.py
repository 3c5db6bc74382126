"""Accepts streams to a cell: from clients that connected at another node, and from session proxies.

To the cell both are ordinary connections. The greeting of a client's stream states the client's
address and certificate.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sluice.broker.net import Connection
from sluice.cluster.transport.streams import StreamLost, StreamTransport

CLIENT_GREETING: Final = b"client "
PROXY_GREETING: Final = b"leg"  # part of the protocol between nodes; words: allowed


def make_greeting(transport: Any) -> bytes:
    """Return the greeting for a client: its address and certificate."""
    peer = transport.get_extra_info("peername")
    certificate = transport.get_extra_info("peercert")
    peer_info = {
        "peername": list(peer) if isinstance(peer, tuple) else None,
        "peercert": certificate or None,
    }
    return CLIENT_GREETING + json.dumps(peer_info).encode()


def is_known_greeting(greeting: bytes) -> bool:
    return greeting == PROXY_GREETING or greeting.startswith(CLIENT_GREETING)


def accept_stream(connection: Connection, greeting: bytes) -> AcceptedStream:
    """Return the protocol of a stream that was opened with `greeting`."""
    if greeting == PROXY_GREETING:
        connection.is_from_cluster = True
        return AcceptedStream(connection, {})
    return AcceptedStream(connection, _parse_peer_info(greeting[len(CLIENT_GREETING) :]))


def _parse_peer_info(data: bytes) -> dict[str, Any]:
    """Decode a client's address and certificate; raise StreamLost if they are malformed."""
    try:
        peer_info = json.loads(data)
    except (ValueError, RecursionError):
        raise StreamLost("the greeting of a client is not JSON") from None
    if not isinstance(peer_info, dict):
        raise StreamLost("the greeting of a client is not a JSON object")
    address, certificate = peer_info.get("peername"), peer_info.get("peercert")
    if address is not None:
        if not isinstance(address, list) or [type(one) for one in address[:2]] != [str, int]:
            raise StreamLost("the greeting of a client has no address")
        address = tuple(address)
    if certificate is not None:
        if not isinstance(certificate, dict):
            raise StreamLost("the greeting of a client has no certificate")
        certificate = _restore_certificate(certificate)
    return {"peername": address, "peercert": certificate}


def _restore_certificate(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn lists into tuples: JSON has none, and names in a certificate are nested tuples."""
    return {
        name: _to_tuples(value) if isinstance(value, list) else value
        for name, value in fields.items()
    }


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(one) for one in value) if isinstance(value, list) else value


class AcceptedStream:
    """Calls `connection_made` with a ProxiedTransport; all other calls go to the connection."""

    def __init__(self, connection: Connection, peer_info: dict[str, Any]) -> None:
        self._connection = connection
        self._peer_info = peer_info
        self.data_received = connection.data_received
        self.eof_received = connection.eof_received
        self.connection_lost = connection.connection_lost
        self.pause_writing = connection.pause_writing
        self.resume_writing = connection.resume_writing

    def connection_made(self, transport: StreamTransport) -> None:
        self._connection.connection_made(ProxiedTransport(transport, self._peer_info))


class ProxiedTransport:
    """A stream transport that reports the address and certificate of the client."""

    def __init__(self, transport: StreamTransport, peer_info: dict[str, Any]) -> None:
        self._peer_info = peer_info
        self.write = transport.write
        self.close = transport.close
        self.abort = transport.abort
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.set_write_buffer_limits = transport.set_write_buffer_limits
        self.get_write_buffer_size = transport.get_write_buffer_size

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self._peer_info.get(name, default)

    def can_write_eof(self) -> bool:
        return False
