"""A line within one process: what one end writes, the other reads in the next turn of the loop.

Cells of one node talk over such lines, and so do whole nodes in tests. All that is written in one turn is read in one
piece. A reader that has paused makes the writer pause, as with a socket.
"""

from __future__ import annotations

import asyncio
from typing import Final

from sluice.cluster.transport.streams import LineLost, LineProtocol

HIGH: Final = 1_048_576  # bytes unread before the writer is asked to wait


class LocalEnd:
    """One end, as the transport of the protocol that sits there."""

    def __init__(self, protocol: LineProtocol, facts: dict[str, object]) -> None:
        self.peer: LocalEnd = self
        self._protocol = protocol
        self._facts = facts
        self._unread: list[bytes] = []
        self._size = 0
        self._high = HIGH
        self._reading = True
        self._scheduled = False
        self._paused = False  # our protocol was asked not to write
        self._closing = False
        self._ended = False  # the other end has closed: nothing more comes
        self._lost = False
        self._fault: Exception | None = None

    # ---- for the protocol

    def write(self, data: bytes) -> None:
        peer = self.peer
        if self._closing or not data:
            return
        peer._unread.append(data)
        peer._size += len(data)
        peer._schedule()
        if peer._size > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        """What was written still arrives."""
        if not self._closing:
            self._closing = True
            self.peer._ended = True
            self.peer._schedule()
            asyncio.get_running_loop().call_soon(self._lose, None)

    def abort(self) -> None:
        self.cut(None)

    def set_protocol(self, protocol: LineProtocol) -> None:
        self._protocol = protocol

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._schedule()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is not None:
            self._high = high

    def get_write_buffer_size(self) -> int:
        return self.peer._size

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._facts.get(name, default)

    # ---- what happens to it

    def cut(self, fault: Exception | None) -> None:
        """The line breaks: what was not read is lost."""
        loop = asyncio.get_running_loop()
        for end in (self, self.peer):
            end._closing = True
            end._unread.clear()
            end._size = 0
            loop.call_soon(end._lose, fault if end is self else fault or LineLost("the line was cut"))

    def _schedule(self) -> None:
        if not self._scheduled and self._reading:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        self._scheduled = False
        if self._lost or not self._reading:
            return
        if self._unread:
            data = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
            self._unread.clear()
            self._size = 0
            self._protocol.data_received(data)
            writer = self.peer
            if writer._paused and not writer._lost:
                writer._paused = False
                writer._protocol.resume_writing()
        if self._ended and not self._unread and not self._lost:
            self._closing = True
            self._lose(None)

    def _lose(self, fault: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._protocol.connection_lost(fault)


def join(near: LineProtocol, far: LineProtocol, facts: dict[str, object] | None = None) -> LocalEnd:
    """A line between two protocols; the near end. `facts` are what the far one is told by `get_extra_info`."""
    first, second = LocalEnd(near, {}), LocalEnd(far, facts or {})
    first.peer, second.peer = second, first
    far.connection_made(second)
    near.connection_made(first)
    return first
