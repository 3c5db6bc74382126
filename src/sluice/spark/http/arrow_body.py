"""The body of a large answer, read with as few pages and as few changes of process as can be.

A task reads hundreds of megabytes through one connection. What that costs besides the copy is the system's: a fault for
each page of new memory, and a change to this process and back for each piece that arrives. So memory is used again, and
this process sleeps until there is something worth waking for.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from typing import Final

LARGE_READ_BYTES: Final = 1 << 16  # bytes of a body
MAX_BUFFERS: Final = 4  # a batch that is made, the one before it, and some that are being let go
MAX_BUFFER_BYTES: Final = 16 << 20  # what is larger is rare, and not kept
RECEIVE_LOW_WATER_BYTES: Final = 1 << 18  # of a large body: less is not worth a change of process
END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream


class BufferPool:
    """Memory that bodies are read into, used again as soon as nobody has the batch any more: new memory costs the
    system a fault for each of its pages. For all tasks of a process, which come one after the other."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []
        self._lock = threading.Lock()

    def acquire(self, size: int) -> memoryview:
        with self._lock:
            return memoryview(self._free_buffer(size))[:size]

    def buffer_count(self) -> int:
        """How many there are."""
        return len(self._buffers)

    def _free_buffer(self, size: int) -> bytearray:
        for nth, buffer in enumerate(self._buffers):
            try:
                buffer.append(buffer.pop())  # refused while somebody looks at it
            except BufferError:
                continue
            if len(buffer) >= size:
                return buffer
            del self._buffers[nth]
            break
        buffer = bytearray(size + size // 8)  # the next is rarely just as long
        if len(self._buffers) < MAX_BUFFERS and len(buffer) <= MAX_BUFFER_BYTES:
            self._buffers.append(buffer)
        return buffer


BUFFER_POOL: Final = BufferPool()


class ArrowBody:
    """The body of an answer as Arrow reads it."""

    closed = False

    def __init__(self, response: http.client.HTTPResponse, sock: socket.socket | None) -> None:
        self._response = response
        # Behind TLS the system does not know how much of the body is still to come.
        self._socket = None if isinstance(sock, ssl.SSLSocket) else sock
        self._tail = b""

    def has_ended(self) -> bool:
        """Whether what was read last is the end of a stream, and not that of a connection: a proxy may take away what
        else tells one from the other."""
        return self._tail == END_OF_STREAM

    def read(self, size: int) -> bytes | memoryview:
        if size < LARGE_READ_BYTES:
            data = self._response.read(size)
            # What lies before the end of a connection is that of some rows, whatever it looks like.
            self._tail = (
                (self._tail + data[-len(END_OF_STREAM) :])[-len(END_OF_STREAM) :] if data else b""
            )
            return data
        self._tail = b""
        buffer = BUFFER_POOL.acquire(size)
        done = 0
        if self._socket is not None and size > RECEIVE_LOW_WATER_BYTES:
            # Woken for every piece that the other side writes, this process would take the core from it each time.
            # It never waits for more than there is to come: the last of the body is read without.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, RECEIVE_LOW_WATER_BYTES)
            done = self._fill(buffer[: size - RECEIVE_LOW_WATER_BYTES])
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        done += self._fill(buffer[done:])
        return buffer[:done]

    def _fill(self, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            count = self._response.readinto(buffer[done:])
            if not count:
                break
            done += count
        return done
