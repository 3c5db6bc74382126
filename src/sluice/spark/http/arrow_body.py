"""Read large response bodies with few page faults and few context switches.

A task reads hundreds of megabytes through one connection. Besides the copy, that costs a page fault
for each page of new memory, and a context switch for each chunk that arrives. So this module reuses
memory, and lets the process sleep until a large chunk is available.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from typing import Final

LARGE_READ_BYTES: Final = 1 << 16  # of a body
MAX_BUFFERS: Final = 4  # the current batch, the one before it, and some that are being released
MAX_BUFFER_BYTES: Final = 16 << 20  # larger buffers are rare, and not pooled
RECEIVE_LOW_WATER_BYTES: Final = 1 << 18  # of a large body: less is not worth a context switch
END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream


class BufferPool:
    """Buffers for bodies, reused as soon as no batch refers to them.

    New memory costs a page fault for each page. All tasks of a process share the pool; they run one
    after the other.
    """

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []
        self._lock = threading.Lock()

    def acquire(self, size: int) -> memoryview:
        with self._lock:
            return memoryview(self._free_buffer(size))[:size]

    def buffer_count(self) -> int:
        """Return the number of pooled buffers."""
        return len(self._buffers)

    def _free_buffer(self, size: int) -> bytearray:
        for nth, buffer in enumerate(self._buffers):
            try:
                buffer.append(buffer.pop())  # fails while a memoryview of the buffer exists
            except BufferError:
                continue
            if len(buffer) >= size:
                return buffer
            del self._buffers[nth]
            break
        buffer = bytearray(size + size // 8)  # the next body is rarely of exactly this size
        if len(self._buffers) < MAX_BUFFERS and len(buffer) <= MAX_BUFFER_BYTES:
            self._buffers.append(buffer)
        return buffer


BUFFER_POOL: Final = BufferPool()


class ArrowBody:
    """The body of a response, as a file object for Arrow."""

    closed = False

    def __init__(self, response: http.client.HTTPResponse, sock: socket.socket | None) -> None:
        self._response = response
        # With TLS the kernel does not know how many bytes of the body remain.
        self._socket = None if isinstance(sock, ssl.SSLSocket) else sock
        self._tail = b""

    def has_ended(self) -> bool:
        """Return whether the last bytes were Arrow's end-of-stream marker.

        A connection that ended early may look the same otherwise: a proxy can remove the header
        that tells the two cases apart.
        """
        return self._tail == END_OF_STREAM

    def read(self, size: int) -> bytes | memoryview:
        if size < LARGE_READ_BYTES:
            data = self._response.read(size)
            # Bytes before the end of a connection belong to rows, even if they look like the
            # marker.
            self._tail = (
                (self._tail + data[-len(END_OF_STREAM) :])[-len(END_OF_STREAM) :] if data else b""
            )
            return data
        self._tail = b""
        buffer = BUFFER_POOL.acquire(size)
        done = 0
        if self._socket is not None and size > RECEIVE_LOW_WATER_BYTES:
            # Without the low-water mark, each chunk that the sender writes would wake this process
            # and take the core from the sender. The last RECEIVE_LOW_WATER_BYTES are read without
            # the mark, so that this process never waits for more bytes than will come.
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
