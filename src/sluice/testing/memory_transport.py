"""A transport without a socket: data written at one end is read at the other in the next step."""

from __future__ import annotations

from typing import Any

from sluice.testing.virtual_time import VirtualTime


class MemoryTransport:
    """One end of a connection, as the transport of its protocol."""

    def __init__(self, time: VirtualTime, protocol: Any) -> None:
        self.protocol = protocol
        self.peer: MemoryTransport = self
        self._time = time
        self._unread = bytearray()
        self._reading = True
        self._closing = False
        self._lost = False
        self._eof = False

    # The asyncio transport interface

    def write(self, data: bytes) -> None:
        if not self._closing:
            self.peer._receive(bytes(data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._time.call_soon(self._notify_lost, None)
            self._time.call_soon(self.peer._close_after_read)

    def abort(self) -> None:
        self.close()

    def write_eof(self) -> None:
        self._time.call_soon(self.peer._receive_eof)

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._time.call_soon(self._read)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: the other end is in the same process and never slow."""

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 0) if name == "peername" else default

    # Events

    def break_connection(self) -> None:
        """Break the connection without DISCONNECT."""
        for end in (self, self.peer):
            end._closing = True
            end._unread.clear()
            self._time.call_soon(
                end._notify_lost, ConnectionResetError("the test cut the connection")
            )

    def _receive(self, data: bytes) -> None:
        self._unread += data
        self._time.call_soon(self._read)

    def _read(self) -> None:
        if self._reading and self._unread and not self._lost:
            data = bytes(self._unread)
            self._unread.clear()
            self.protocol.data_received(data)
        if self._eof and not self._unread:
            self._eof = False
            if not self.protocol.eof_received():
                self.close()

    def _receive_eof(self) -> None:
        self._eof = True
        self._read()

    def _close_after_read(self) -> None:
        """Read the rest after the other end has closed, then close as well."""
        self._read()
        self.close()

    def _notify_lost(self, cause: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self.protocol.connection_lost(cause)


def connect_pair(time: VirtualTime, client: Any, server: Any) -> MemoryTransport:
    """Connect two protocols and return the client's end."""
    client_end, server_end = MemoryTransport(time, client), MemoryTransport(time, server)
    client_end.peer, server_end.peer = server_end, client_end
    server.connection_made(server_end)
    client.connection_made(client_end)
    return client_end
