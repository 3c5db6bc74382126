"""Lines: connections of bytes between cells, with the manners of asyncio's transports and protocols.

Whoever wants something of a cell dials it, says in a greeting what for, and then both ends talk as over a socket. That
the cell may be in another process is known to `link` alone, that it may be in this one to `local_line`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from sluice.errors import SluiceError


class StreamLost(SluiceError, ConnectionError):
    """A line has ended because of what lies between its ends: what was said last may not have arrived."""


class NoOwner(StreamLost):
    """Nobody answers for the cell now. Somebody will: dial again."""

    def __init__(self, cell: int, reason: str = "nobody holds it") -> None:
        super().__init__(f"cell {cell} cannot be reached: {reason}")
        self.cell = cell


class StreamTransport(Protocol):
    """What a protocol may ask of its line: the part of asyncio.Transport that Sluice uses."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None:
        """What was written still arrives."""

    def abort(self) -> None: ...
    def is_closing(self) -> bool: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    def get_extra_info(self, name: str, default: object = None) -> object: ...


class StreamProtocol(Protocol):
    """Who sits at an end. Calls come as from a socket: made once, lost once, nothing after that."""

    def connection_made(self, transport: StreamTransport) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool | None: ...
    def connection_lost(self, fault: Exception | None) -> None:
        """None: this end closed it, or the other did so in good order."""

    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


NODE_TARGET: Final = -1  # instead of a cell, for what is the business of a node as a whole

AcceptStream = Callable[
    [int, bytes, str], StreamProtocol | None
]  # a cell, a greeting, the id of who dials; None: not here


class StreamDialer(Protocol):
    """The way to every cell."""

    accept: AcceptStream  # asked for each line that is opened to a cell of this node

    def dial(self, cell: int, greeting: bytes, protocol: StreamProtocol) -> None:
        """Open a line to the owner of a cell. `connection_made` comes when the owner has accepted; `connection_lost`
        without it, and with a LineLost, when it cannot be."""

    def dial_node(self, node_id: str, greeting: bytes, protocol: StreamProtocol) -> None:
        """The same to a node, whatever cells it has: there it is asked to accept a line to `THE_NODE`."""
