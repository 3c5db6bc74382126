"""Lines that end in a cell: a client that came in at another node, or the leg of a session of another cell.

To the cell both are connections like any other. Where a client comes from is told in the greeting of its line.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sluice.broker.net.connection import Connection
from sluice.cluster.transport.streams import LineLost, LineTransport

CLIENT: Final = b"client "
LEG: Final = b"leg"


def greeting_of(transport: Any) -> bytes:
    """What a cell is told of a client whose bytes are passed on to it."""
    peer = transport.get_extra_info("peername")
    certificate = transport.get_extra_info("peercert")
    told = {"peername": list(peer) if isinstance(peer, tuple) else None, "peercert": certificate or None}
    return CLIENT + json.dumps(told).encode()


def is_known(greeting: bytes) -> bool:
    return greeting == LEG or greeting.startswith(CLIENT)


def guest(connection: Connection, greeting: bytes) -> Guest:
    """The protocol of a line that was opened with `greeting`: to a connection of the cell."""
    if greeting == LEG:
        connection.trusted = True
        return Guest(connection, {})
    return Guest(connection, _facts_in(greeting[len(CLIENT) :]))


def _facts_in(told: bytes) -> dict[str, Any]:
    """Where a client comes from; LineLost when it is not told as agreed."""
    try:
        facts = json.loads(told)
    except (ValueError, RecursionError):
        raise LineLost("the greeting of a client is not JSON") from None
    if not isinstance(facts, dict):
        raise LineLost("the greeting of a client is no object")
    address, certificate = facts.get("peername"), facts.get("peercert")
    if address is not None:
        if not isinstance(address, list) or [type(one) for one in address[:2]] != [str, int]:
            raise LineLost("the greeting of a client has no address")
        address = tuple(address)
    if certificate is not None:
        if not isinstance(certificate, dict):
            raise LineLost("the greeting of a client has no certificate")
        certificate = _certificate(certificate)
    return {"peername": address, "peercert": certificate}


def _certificate(told: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples, and the names in a certificate are tuples of tuples of tuples."""
    return {name: _tuples(value) if isinstance(value, list) else value for name, value in told.items()}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


class Guest:
    """Stands between a line and a connection only when the line begins; then the connection is called itself."""

    def __init__(self, connection: Connection, facts: dict[str, Any]) -> None:
        self._connection = connection
        self._facts = facts
        self.data_received = connection.data_received
        self.eof_received = connection.eof_received
        self.connection_lost = connection.connection_lost
        self.pause_writing = connection.pause_writing
        self.resume_writing = connection.resume_writing

    def connection_made(self, transport: LineTransport) -> None:
        self._connection.connection_made(Told(transport, self._facts))


class Told:
    """A line that knows where its client comes from."""

    def __init__(self, transport: LineTransport, facts: dict[str, Any]) -> None:
        self._facts = facts
        self.write = transport.write
        self.close = transport.close
        self.abort = transport.abort
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.set_write_buffer_limits = transport.set_write_buffer_limits
        self.get_write_buffer_size = transport.get_write_buffer_size

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self._facts.get(name, default)

    def can_write_eof(self) -> bool:
        return False
