"""Many lines in one stream between two nodes: frames, credit and order, without any I/O.

A trunk is one end. What it has to say collects as frames; whoever has the stream takes them all at once, so that all
lines of a turn leave in one message. What comes is worked off frame by frame.

      u8 kind   u32 line   u32 size   body
      OPEN      cell (i32) and greeting        from the end that dials
      OPENED    -                              the other has accepted
      DATA      bytes                          never more than the other end has given credit for
      CREDIT    u32                            so many bytes more may be sent
      CLOSE     u8 how, text                   the line is no more; nothing is said on it after that
      BEAT      -                              line 0: I am here
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from struct import Struct
from typing import Final

from sluice.cluster.transport.streams import Accept, LineLost, LineProtocol, NoOwner
from sluice.errors import SluiceError

log = logging.getLogger(__name__)

OPEN: Final = 1
OPENED: Final = 2
DATA: Final = 3
CREDIT: Final = 4
CLOSE: Final = 5
BEAT: Final = 6

IN_ORDER: Final = b"\0"
NOT_HERE: Final = b"\1"
BROKEN: Final = b"\2"

WINDOW: Final = 262_144  # bytes of one line that may be on their way, or wait for a reader that pauses
GIVE_BACK: Final = WINDOW // 4  # read so much, and credit is worth a frame
LARGEST_DATA: Final = 65_536  # of one frame, so that no line keeps the others waiting
LARGEST_MESSAGE: Final = 1 << 20
FULL: Final = 4 << 20  # bytes that the stream has not taken: lines keep the rest
WRITE_HIGH: Final = 65_536  # unsent bytes of a line from which on its writer is asked to wait

_HEAD: Final = Struct(">BII")
_U32: Final = Struct(">I")
_CELL: Final = Struct(">i")


class TrunkBroken(SluiceError):
    """The other end does not speak as agreed."""


class Trunk:
    """One end of a stream. `wake` is called when there is something to take; `accept` is None at the end that dials."""

    def __init__(
        self, wake: Callable[[], None], accept: Accept | None, soon: Callable[..., object], peer: str
    ) -> None:
        self.peer = peer
        self.lines: dict[int, Line] = {}
        self.is_broken = False
        self._wake = wake
        self._accept = accept
        self._soon = soon
        self._frames: list[bytes] = []
        self._size = 0
        self._last_line = 0

    # ---- what goes out

    @property
    def is_full(self) -> bool:
        return self._size >= FULL

    @property
    def waiting(self) -> int:
        """Bytes that are to be taken."""
        return self._size

    def dial(self, cell: int, greeting: bytes, protocol: LineProtocol) -> None:
        self._last_line += 1
        line = Line(self, self._last_line, protocol)
        self.lines[line.number] = line
        self.send(OPEN, line.number, _CELL.pack(cell) + greeting)

    def send(self, kind: int, line: int, body: bytes = b"") -> None:
        if not self._frames:
            self._wake()
        self._frames += (_HEAD.pack(kind, line, len(body)), body)
        self._size += _HEAD.size + len(body)

    def take(self) -> bytes:
        """All there is to say, or as much as one message should hold; empty: nothing."""
        frames = self._frames
        if self._size <= LARGEST_MESSAGE:
            message = b"".join(frames)
            frames.clear()
        else:
            upto = size = 0
            while size < LARGEST_MESSAGE:
                size += len(frames[upto])
                upto += 1
            upto += upto % 2  # a head stays with its body
            message = b"".join(frames[:upto])
            del frames[:upto]
        was_full = self.is_full
        self._size -= len(message)
        if was_full and not self.is_full:
            for line in list(self.lines.values()):
                line.push()
        return message

    # ---- what comes in

    def receive(self, message: bytes) -> None:
        at, size = 0, len(message)
        while at < size and not self.is_broken:
            if size - at < _HEAD.size:
                raise TrunkBroken("a frame is cut off")
            kind, number, length = _HEAD.unpack_from(message, at)
            at += _HEAD.size
            body = message[at : at + length]
            at += length
            if len(body) != length:
                raise TrunkBroken("a frame is cut off")
            if kind == OPEN:
                self._opened_by_peer(number, body)
            elif kind > BEAT or kind < OPEN:
                raise TrunkBroken(f"a frame is of kind {kind}, which there is not")
            elif kind != BEAT:
                line = self.lines.get(number)
                if line is not None:  # else it was given up here, and the peer does not know yet
                    line.receive(kind, body)

    def _opened_by_peer(self, number: int, body: bytes) -> None:
        if self._accept is None or len(body) < _CELL.size:
            raise TrunkBroken("a line is opened from the wrong end")
        if number in self.lines:
            raise TrunkBroken(f"line {number} is opened twice")
        cell = int(_CELL.unpack_from(body)[0])
        try:
            protocol = self._accept(cell, body[_CELL.size :], self.peer)
        except LineLost as fault:
            self.send(CLOSE, number, BROKEN + str(fault).encode())
            return
        if protocol is None:
            self.send(CLOSE, number, NOT_HERE + _CELL.pack(cell))
            return
        line = Line(self, number, protocol)
        self.lines[number] = line
        self.send(OPENED, number)
        line.opened()

    def lose(self, fault: Exception) -> None:
        """The stream is gone, and every line with it."""
        self.is_broken = True
        self._frames.clear()
        self._size = 0
        for line in list(self.lines.values()):
            line.lose(fault)

    def forget(self, line: Line) -> None:
        if self.lines.get(line.number) is line:
            del self.lines[line.number]

    def later(self, call: Callable[..., object], *arguments: object) -> None:
        self._soon(call, *arguments)


class Line:
    """One end of a line, as the transport of the protocol that sits there."""

    def __init__(self, trunk: Trunk, number: int, protocol: LineProtocol) -> None:
        self.number = number
        self._trunk = trunk
        self._protocol = protocol
        self._is_open = False  # the protocol knows its transport
        self._closing = False
        self._lost = False
        self._unsent = bytearray()
        self._credit = WINDOW
        self._choked = False
        self._high = WRITE_HIGH
        self._low = WRITE_HIGH // 4
        self._paused = False
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._owed = 0  # bytes read that no credit was given for yet
        self._end: tuple[Exception | None] | None = None  # closed by the peer; waits for what is unread

    # ---- what the protocol asks for

    def write(self, data: bytes) -> None:
        size = len(data)
        if self._closing or self._lost:
            return
        if not self._unsent and size <= self._credit and size <= LARGEST_DATA and not self._trunk.is_full:
            self._trunk.send(DATA, self.number, data)  # nearly always: as it is, without a copy
            self._credit -= size
        else:
            self._unsent += data
            self.push()

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        if not self._closing and not self._lost:
            self._closing = True
            self.push()

    def abort(self) -> None:
        if not self._lost:
            self._unsent.clear()
            self._closing = True
            self.push()

    def is_closing(self) -> bool:
        return self._closing or self._lost

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._trunk.later(self._read)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = WRITE_HIGH if high is None else high
        self._low = self._high // 4 if low is None else low
        self._tell_writer()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._trunk.peer if name == "sluice_peer" else default

    def get_protocol(self) -> LineProtocol:
        return self._protocol

    def set_protocol(self, protocol: LineProtocol) -> None:
        self._protocol = protocol

    # ---- what the trunk brings

    def opened(self) -> None:
        self._is_open = True
        self._protocol.connection_made(self)

    def receive(self, kind: int, body: bytes) -> None:
        if kind == DATA:
            self._check(self._is_open, "bytes come before the line is open")
            if body and not self._closing:
                waiting = self._unread_bytes + len(body)
                # A peer that ignores its credit could fill our memory while the reader pauses.
                self._check(waiting + self._owed <= WINDOW, "more bytes come than were asked for")
                self._unread_bytes = waiting
                self._unread.append(body)
                self._read()
        elif kind == CREDIT:
            self._check(len(body) == _U32.size, "a credit is no number")
            self._credit += int(_U32.unpack(body)[0])
            self._check(self._credit <= WINDOW, "more credit comes than bytes were sent")
            self.push()
        elif kind == OPENED:
            self._check(not self._is_open, "the line is opened twice")
            self.opened()
        elif kind == CLOSE:
            fault = _fault_of(body)
            self._trunk.forget(self)
            self._end = (fault,)
            self._read()

    def _check(self, is_right: bool, fault: str) -> None:
        if not is_right:
            raise TrunkBroken(f"line {self.number}: {fault}")

    def push(self) -> None:
        """Send what credit and stream allow, then the end if that is all."""
        if self._lost:
            return
        unsent = self._unsent
        trunk = self._trunk
        while unsent and self._credit and not trunk.is_full:
            size = min(len(unsent), self._credit, LARGEST_DATA)
            trunk.send(DATA, self.number, bytes(unsent[:size]))
            del unsent[:size]
            self._credit -= size
        if self._closing and not unsent:
            if self._end is None:
                trunk.send(CLOSE, self.number, IN_ORDER)
            trunk.forget(self)
            self._lost = True
            trunk.later(self._tell_lost, None)
        else:
            self._tell_writer()

    def _tell_writer(self) -> None:
        if not self._is_open:
            return
        if not self._choked and len(self._unsent) > self._high:
            self._choked = True
            self._protocol.pause_writing()
        elif self._choked and len(self._unsent) <= self._low:
            self._choked = False
            self._protocol.resume_writing()

    def _read(self) -> None:
        """Hand over what has come, unless the reader pauses; then credit for it, or the end."""
        while self._unread and not self._paused and not self._lost:
            data = self._unread.pop(0)
            self._unread_bytes -= len(data)
            self._owed += len(data)
            try:
                self._protocol.data_received(data)
            except Exception:
                log.exception("a line has failed", extra={"peer": self._trunk.peer})
                self.abort()  # this one alone, as a socket would
        if self._lost:
            return
        if self._end is not None:
            if not self._unread or self._closing:
                self._finish(self._end[0])
        elif self._owed >= GIVE_BACK:
            self._trunk.send(CREDIT, self.number, _U32.pack(self._owed))
            self._owed = 0

    def lose(self, fault: Exception) -> None:
        """At once, whatever is unread: the peer does not know how much of it we have worked off."""
        if not self._lost:
            self._finish(fault)

    def _finish(self, fault: Exception | None) -> None:
        self._trunk.forget(self)
        self._lost = True
        self._unsent.clear()
        self._unread.clear()
        self._trunk.later(self._tell_lost, fault)

    def _tell_lost(self, fault: Exception | None) -> None:
        self._protocol.connection_lost(fault)


def _fault_of(body: bytes) -> Exception | None:
    how = body[:1]
    if how == IN_ORDER:
        return None
    if how == NOT_HERE:
        if len(body) != 1 + _CELL.size:
            raise TrunkBroken("a line is closed without the number of its cell")
        return NoOwner(int(_CELL.unpack(body[1:5])[0]), "it is not with that node")
    return LineLost(body[1:].decode(errors="replace"))
