"""Byte streams between cells, with the semantics of asyncio transports and protocols.

A caller dials a cell, states the purpose in a greeting, and then both ends talk as over a socket.
Only `peer_links` knows that a cell may be in another process, and only `Node.dial` that it may be
in this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from sluice.errors import SluiceError


class StreamLost(SluiceError, ConnectionError):
    """A stream ended because of a failure between its ends: the last bytes may not have arrived."""


class NoOwner(StreamLost):
    """The cell has no reachable owner now. It will get one: dial again."""

    def __init__(self, cell: int, reason: str = "it has no owner") -> None:
        super().__init__(f"cell {cell} cannot be reached: {reason}")
        self.cell = cell


class StreamTransport(Protocol):
    """The transport of a stream: the part of asyncio.Transport that Sluice uses."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None:
        """Close the stream after delivering all written bytes."""

    def abort(self) -> None: ...
    def is_closing(self) -> bool: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    def get_extra_info(self, name: str, default: object = None) -> object: ...
    def set_protocol(self, protocol: StreamProtocol) -> None: ...


class StreamProtocol(Protocol):
    """One end of a stream.

    Calls come as from a socket: one `connection_made`, one `connection_lost`, and nothing after it.
    """

    def connection_made(self, transport: StreamTransport) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool | None: ...
    def connection_lost(self, fault: Exception | None) -> None:
        """Handle the end of the stream; `fault` is None if either end closed it in order."""

    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


NODE_TARGET: Final = -1  # in place of a cell: the stream is for the node as a whole

# Takes a cell, a greeting and the id of the dialing node; returns None if the cell is not here.
AcceptStream = Callable[[int, bytes, str], StreamProtocol | None]


class StreamDialer(Protocol):
    """Opens streams to every cell."""

    accept: AcceptStream  # called for each stream that another node opens to this one

    def dial(self, cell: int, greeting: bytes, protocol: StreamProtocol) -> None:
        """Open a stream to the owner of a cell.

        Call `connection_made` when the owner has accepted. If that is impossible, call only
        `connection_lost`, with a StreamLost.
        """

    def dial_node(self, node_id: str, greeting: bytes, protocol: StreamProtocol) -> None:
        """Open a stream to a node; the node's `accept` gets NODE_TARGET as the cell."""
