"""A connection within one process: one end reads in the next turn what the other end has written.

The cells of one node are connected this way, and the clients and nodes of tests. All bytes that are
written in one turn are read in one piece. A paused reader pauses the writer, as with a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

CallSoon = Callable[..., object]  # as `call_soon` of an event loop

WRITE_HIGH_WATER: Final = 1_048_576  # unread bytes from which on the writer is paused


class MemoryTransport:
    """One end of the connection: the transport of its protocol, an asyncio protocol."""

    def __init__(self, protocol: Any, call_soon: CallSoon, extra_info: dict[str, object]) -> None:
        self.peer: MemoryTransport = self
        self._protocol = protocol
        self._call_soon = call_soon
        self._extra_info = extra_info
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._high_water = WRITE_HIGH_WATER
        self._is_reading = True
        self._is_read_scheduled = False
        self._is_write_paused = False  # our protocol is paused
        self._is_closing = False
        self._is_peer_closed = False  # the other end has closed: no more data arrives
        self._is_lost = False

    # ---- transport interface

    def write(self, data: bytes) -> None:
        peer = self.peer
        if self._is_closing or not data:
            return
        peer._unread.append(data)
        peer._unread_bytes += len(data)
        peer._schedule_read()
        if peer._unread_bytes > self._high_water and not self._is_write_paused:
            self._is_write_paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        """Close the connection after delivering all written bytes."""
        if not self._is_closing:
            self._is_closing = True
            self.peer._is_peer_closed = True
            self.peer._schedule_read()
            self._call_soon(self._notify_lost, None)

    def abort(self) -> None:
        self.break_connection(None)

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self._schedule_read()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is not None:
            self._high_water = high

    def get_write_buffer_size(self) -> int:
        return self.peer._unread_bytes

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._extra_info.get(name, default)

    # ---- events

    def break_connection(self, fault: Exception | None) -> None:
        """Break the connection: unread bytes are lost."""
        for end in (self, self.peer):
            end._is_closing = True
            end._unread.clear()
            end._unread_bytes = 0
            self._call_soon(
                end._notify_lost,
                fault if end is self else fault or ConnectionResetError("the other end aborted"),
            )

    def _schedule_read(self) -> None:
        if not self._is_read_scheduled and self._is_reading:
            self._is_read_scheduled = True
            self._call_soon(self._read)

    def _read(self) -> None:
        self._is_read_scheduled = False
        if self._is_lost or not self._is_reading:
            return
        if self._unread:
            data = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
            self._unread.clear()
            self._unread_bytes = 0
            self._protocol.data_received(data)
            writer = self.peer
            if writer._is_write_paused and not writer._is_lost:
                writer._is_write_paused = False
                writer._protocol.resume_writing()
        if self._is_peer_closed and not self._unread and not self._is_lost:
            self._is_closing = True
            self._notify_lost(None)

    def _notify_lost(self, fault: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._protocol.connection_lost(fault)


def connect_in_memory(
    dialer: Any, acceptor: Any, call_soon: CallSoon, extra_info: dict[str, object] | None = None
) -> MemoryTransport:
    """Connect two protocols; return the dialer's end. The acceptor's transport has `extra_info`."""
    dialing = MemoryTransport(dialer, call_soon, {})
    accepting = MemoryTransport(acceptor, call_soon, extra_info or {})
    dialing.peer, accepting.peer = accepting, dialing
    acceptor.connection_made(accepting)
    dialer.connection_made(dialing)
    return dialing
