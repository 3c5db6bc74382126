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

LARGE: Final = 1 << 16  # bytes of a body
MOST_ROOMS: Final = 4  # a batch that is made, the one before it, and some that are being let go
LARGEST_ROOM: Final = 16 << 20  # what is larger is rare, and not kept
WAKE_BYTES: Final = 1 << 18  # of a large body: less is not worth a change of process
END: Final = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream


class Rooms:
    """Memory that bodies are read into, used again as soon as nobody has the batch any more: new memory costs the
    system a fault for each of its pages. For all tasks of a process, which come one after the other."""

    def __init__(self) -> None:
        self._rooms: list[bytearray] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        with self._lock:
            return memoryview(self._free(size))[:size]

    def kept(self) -> int:
        """How many there are."""
        return len(self._rooms)

    def _free(self, size: int) -> bytearray:
        for nth, room in enumerate(self._rooms):
            try:
                room.append(room.pop())  # refused while somebody looks at it
            except BufferError:
                continue
            if len(room) >= size:
                return room
            del self._rooms[nth]
            break
        room = bytearray(size + size // 8)  # the next is rarely just as long
        if len(self._rooms) < MOST_ROOMS and len(room) <= LARGEST_ROOM:
            self._rooms.append(room)
        return room


ROOMS: Final = Rooms()


class Body:
    """The body of an answer as Arrow reads it."""

    closed = False

    def __init__(self, answer: http.client.HTTPResponse, line: socket.socket | None) -> None:
        self._answer = answer
        # Behind TLS the system does not know how much of the body is still to come.
        self._line = None if isinstance(line, ssl.SSLSocket) else line
        self._last = b""

    def has_ended(self) -> bool:
        """Whether what was read last is the end of a stream, and not that of a connection: a proxy may take away what
        else tells one from the other."""
        return self._last == END

    def read(self, size: int) -> bytes | memoryview:
        if size < LARGE:
            data = self._answer.read(size)
            # What lies before the end of a connection is that of some rows, whatever it looks like.
            self._last = (self._last + data[-len(END) :])[-len(END) :] if data else b""
            return data
        self._last = b""
        room = ROOMS.take(size)
        done = 0
        if self._line is not None and size > WAKE_BYTES:
            # Woken for every piece that the other side writes, this process would take the core from it each time.
            # It never waits for more than there is to come: the last of the body is read without.
            self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, WAKE_BYTES)
            done = self._fill(room[: size - WAKE_BYTES])
            self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        done += self._fill(room[done:])
        return room[:done]

    def _fill(self, room: memoryview) -> int:
        done = 0
        while done < len(room):
            count = self._answer.readinto(room[done:])
            if not count:
                break
            done += count
        return done
