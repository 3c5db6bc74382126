"""Many streams over one link between two nodes: frames, credit and order, without any I/O.

A mux is one end of a link. It collects outgoing frames; the owner of the link takes all of them
at once, so that the output of one turn leaves in one write. Incoming bytes may be cut anywhere and
are processed frame by frame. Invariants: a stream never has more bytes in flight than its receiver
gave credit for, so a paused reader costs at most WINDOW_BYTES; an incomplete frame costs at most
MAX_BODY_BYTES.

      u8 kind   u32 stream   u32 size   body
      OPEN        cell (i32) and greeting    sent by the end that dials
      OPENED      -                          the other end has accepted
      DATA        bytes                      never more than the credit of the receiver
      CREDIT      u32                        this many more bytes may be sent
      CLOSE       u8 how, text               the stream has ended; no frame follows
      HEARTBEAT   -                          stream 0: the sender is alive
      GOODBYE     text                       stream 0: the sender ends the link, and why
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.cluster.transport.streams import AcceptStream, NoOwner, StreamLost, StreamProtocol
from sluice.errors import SluiceError
from sluice.wire.primitives import read_u32, write_u32

log = logging.getLogger(__name__)

OPEN: Final = 1
OPENED: Final = 2
DATA: Final = 3
CREDIT: Final = 4
CLOSE: Final = 5
HEARTBEAT: Final = 6
GOODBYE: Final = 7

CLOSED_NORMALLY: Final = b"\0"
CELL_NOT_HERE: Final = b"\1"
CLOSED_WITH_ERROR: Final = b"\2"

WINDOW_BYTES: Final = 262_144  # bytes of one stream in flight or unread
CREDIT_THRESHOLD: Final = WINDOW_BYTES // 4  # bytes read before a CREDIT frame is worth sending
MAX_DATA_BYTES: Final = 65_536  # of one frame, so that no stream delays the others
MAX_BODY_BYTES: Final = 2 * MAX_DATA_BYTES  # of any frame; greetings are the largest
MAX_REASON_BYTES: Final = 1024  # of a CLOSE or a GOODBYE
MAX_PENDING_BYTES: Final = 4 << 20  # frames not taken yet; beyond it, streams buffer their output
# With more streams, memory for a link would have no limit: each has a window.
MAX_STREAMS: Final = 1 << 20
WRITE_HIGH_WATER: Final = 65_536  # unsent bytes of a stream from which on its writer is paused
POOLED_BYTES: Final = 1 << 20  # a larger output buffer is not used again

HEADER_BYTES: Final = 9
_CELL_BYTES: Final = 4


class MuxProtocolError(SluiceError):
    """The other end violates the mux protocol."""


class LinkEndedByPeer(SluiceError):
    """The other end has announced that it ends the link, with its reason."""


class Mux:
    """One end of a link. `wake` is called when there is output; the dialing end has no `accept`."""

    def __init__(
        self,
        wake: Callable[[], None],
        accept: AcceptStream | None,
        call_soon: Callable[..., object],
        peer: str,
    ) -> None:
        self.peer = peer
        self.streams: dict[int, MuxStream] = {}
        self.is_broken = False
        self._wake = wake
        self._accept = accept
        self._call_soon = call_soon
        self._out = BytesWriter()
        self._incomplete = b""  # the beginning of a frame whose end has not arrived
        self._last_stream_number = 0

    # ---- output

    @property
    def is_full(self) -> bool:
        return len(self._out) >= MAX_PENDING_BYTES

    @property
    def pending_bytes(self) -> int:
        """Return the size of the frames that are not taken yet."""
        return len(self._out)

    def dial(self, cell: int, greeting: bytes, protocol: StreamProtocol) -> None:
        if len(greeting) > MAX_BODY_BYTES - _CELL_BYTES:
            fault = StreamLost(f"a greeting of {len(greeting)} bytes is too large for a link")
            self._call_soon(protocol.connection_lost, fault)
            return
        self._last_stream_number += 1
        stream = MuxStream(self, self._last_stream_number, protocol)
        self.streams[stream.number] = stream
        self.send(OPEN, stream.number, _encode_cell(cell) + greeting)

    def send(self, kind: i64, stream_number: i64, body: bytes = b"") -> None:
        out = self._out
        if not len(out):
            self._wake()
        out.append(int(kind))
        write_u32(out, stream_number)
        write_u32(out, len(body))
        if body:
            out.write(body)

    def take_output(self) -> bytes:
        """Return the pending frames; empty if there are none."""
        out = self._out
        data = out.getvalue()
        if len(data) > POOLED_BYTES:
            self._out = BytesWriter()
        else:
            out.truncate(0)
        if len(data) >= MAX_PENDING_BYTES:
            for stream in list(self.streams.values()):
                stream.send_pending()
        return data

    # ---- input

    def receive(self, data: bytes) -> None:
        """Process all complete frames; the beginning of an incomplete one waits for its end.

        The size of a frame is checked as soon as it is known, before its body arrives.
        """
        if self._incomplete:
            data = self._incomplete + data
            self._incomplete = b""
        at: i64 = 0
        size: i64 = len(data)
        while size - at >= HEADER_BYTES and not self.is_broken:
            kind: i64 = data[at]
            number: i64 = read_u32(data, at + 1, size)
            length: i64 = read_u32(data, at + 5, size)
            if kind < OPEN or kind > GOODBYE:
                raise MuxProtocolError(f"unknown frame kind {kind}")
            if length > MAX_BODY_BYTES:
                raise MuxProtocolError(
                    f"a frame of {length} bytes exceeds the limit of {MAX_BODY_BYTES}"
                )
            if size - at - HEADER_BYTES < length:
                break
            at += HEADER_BYTES
            body = data[at : at + length]
            at += length
            self._handle_frame(kind, number, body)
        if at < size and not self.is_broken:
            self._incomplete = data[at:]

    def _handle_frame(self, kind: i64, number: i64, body: bytes) -> None:
        if kind == OPEN:
            self._accept_stream(int(number), body)
        elif kind == GOODBYE:
            raise LinkEndedByPeer(body.decode(errors="replace"))
        elif kind != HEARTBEAT:
            stream = self.streams.get(int(number))
            if stream is not None:  # None: closed here, and the peer does not know yet
                stream.handle_frame(kind, body)

    def _accept_stream(self, number: int, body: bytes) -> None:
        if self._accept is None or len(body) < _CELL_BYTES:
            raise MuxProtocolError("an OPEN comes from the wrong end or has no cell")
        if number in self.streams:
            raise MuxProtocolError(f"stream {number} is opened twice")
        if len(self.streams) >= MAX_STREAMS:
            raise MuxProtocolError(f"more than {MAX_STREAMS} streams are open")
        cell = _decode_cell(body, 0)
        try:
            protocol = self._accept(cell, body[_CELL_BYTES:], self.peer)
        except StreamLost as fault:
            reason = str(fault).encode()[:MAX_REASON_BYTES]
            self.send(CLOSE, number, CLOSED_WITH_ERROR + reason)
            return
        if protocol is None:
            self.send(CLOSE, number, CELL_NOT_HERE + _encode_cell(cell))
            return
        stream = MuxStream(self, number, protocol)
        self.streams[number] = stream
        self.send(OPENED, number)
        stream.on_opened()

    def fail(self, fault: Exception) -> None:
        """End every stream, because the link is gone."""
        self.is_broken = True
        self._out = BytesWriter()
        self._incomplete = b""
        for stream in list(self.streams.values()):
            stream.fail(fault)

    def remove(self, stream: MuxStream) -> None:
        if self.streams.get(stream.number) is stream:
            del self.streams[stream.number]

    def call_soon(self, call: Callable[..., object], *arguments: object) -> None:
        self._call_soon(call, *arguments)


class MuxStream:
    """One end of a stream: the transport of its protocol."""

    def __init__(self, mux: Mux, number: int, protocol: StreamProtocol) -> None:
        self.number = number
        self._mux = mux
        self._protocol = protocol
        self._is_open = False  # `connection_made` was called
        self._is_closing = False
        self._is_lost = False
        self._unsent = bytearray()
        self._credit: i64 = WINDOW_BYTES
        self._is_write_paused = False
        self._high_water = WRITE_HIGH_WATER
        self._low_water = WRITE_HIGH_WATER // 4
        self._is_read_paused = False
        self._unread: list[bytes] = []
        self._unread_bytes: i64 = 0
        self._uncredited_bytes: i64 = 0  # bytes read and not yet covered by a CREDIT frame
        # The fault of a CLOSE by the peer, in a tuple; processed when all data is read.
        self._close_result: tuple[Exception | None] | None = None

    # ---- transport interface

    def write(self, data: bytes) -> None:
        size: i64 = len(data)
        if self._is_closing or self._is_lost:
            return
        if (
            not self._unsent
            and size <= self._credit
            and size <= MAX_DATA_BYTES
            and not self._mux.is_full
        ):
            self._mux.send(DATA, self.number, data)  # the common case: without a copy
            self._credit -= size
        else:
            self._unsent += data
            self.send_pending()

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        if not self._is_closing and not self._is_lost:
            self._is_closing = True
            self.send_pending()

    def abort(self) -> None:
        if not self._is_lost:
            self._unsent.clear()
            self._is_closing = True
            self.send_pending()

    def is_closing(self) -> bool:
        return self._is_closing or self._is_lost

    def pause_reading(self) -> None:
        self._is_read_paused = True

    def resume_reading(self) -> None:
        if self._is_read_paused:
            self._is_read_paused = False
            self._mux.call_soon(self._deliver_unread)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_water = WRITE_HIGH_WATER if high is None else high
        self._low_water = self._high_water // 4 if low is None else low
        self._update_write_pause()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._mux.peer if name == "sluice_peer" else default

    def get_protocol(self) -> StreamProtocol:
        return self._protocol

    def set_protocol(self, protocol: StreamProtocol) -> None:
        self._protocol = protocol

    # ---- frames from the mux

    def on_opened(self) -> None:
        self._is_open = True
        self._protocol.connection_made(self)

    def handle_frame(self, kind: i64, body: bytes) -> None:
        if kind == DATA:
            self._check(self._is_open, "DATA before the stream is open")
            if body and not self._is_closing:
                waiting: i64 = self._unread_bytes + len(body)
                # A peer that ignores its credit could fill our memory while the reader is paused.
                self._check(
                    waiting + self._uncredited_bytes <= WINDOW_BYTES,
                    "more bytes than the credit allows",
                )
                self._unread_bytes = waiting
                self._unread.append(body)
                self._deliver_unread()
        elif kind == CREDIT:
            self._check(len(body) == 4, "a credit is not a number")
            self._credit += read_u32(body, 0, 4)
            self._check(self._credit <= WINDOW_BYTES, "more credit than bytes were sent")
            self.send_pending()
        elif kind == OPENED:
            self._check(not self._is_open, "the stream is opened twice")
            self.on_opened()
        elif kind == CLOSE:
            fault = _decode_close(body)
            self._mux.remove(self)
            self._close_result = (fault,)
            self._deliver_unread()

    def _check(self, is_valid: bool, fault: str) -> None:
        if not is_valid:
            raise MuxProtocolError(f"stream {self.number}: {fault}")

    def send_pending(self) -> None:
        """Send as many bytes as credit and mux allow, then CLOSE if the stream is closing."""
        if self._is_lost:
            return
        unsent = self._unsent
        mux = self._mux
        while unsent and self._credit and not mux.is_full:
            size = min(len(unsent), int(self._credit), MAX_DATA_BYTES)
            mux.send(DATA, self.number, bytes(unsent[:size]))
            del unsent[:size]
            self._credit -= size
        if self._is_closing and not unsent:
            if self._close_result is None:
                mux.send(CLOSE, self.number, CLOSED_NORMALLY)
            mux.remove(self)
            self._is_lost = True
            mux.call_soon(self._notify_lost, None)
        else:
            self._update_write_pause()

    def _update_write_pause(self) -> None:
        if not self._is_open:
            return
        if not self._is_write_paused and len(self._unsent) > self._high_water:
            self._is_write_paused = True
            self._protocol.pause_writing()
        elif self._is_write_paused and len(self._unsent) <= self._low_water:
            self._is_write_paused = False
            self._protocol.resume_writing()

    def _deliver_unread(self) -> None:
        """Pass received data to the protocol unless it has paused; then send credit or finish."""
        while self._unread and not self._is_read_paused and not self._is_lost:
            data = self._unread.pop(0)
            self._unread_bytes -= len(data)
            self._uncredited_bytes += len(data)
            try:
                self._protocol.data_received(data)
            except Exception:
                log.exception("stream failed", extra={"peer": self._mux.peer})
                self.abort()  # only this stream, as a socket would
        if self._is_lost:
            return
        if self._close_result is not None:
            if not self._unread or self._is_closing:
                self._finish(self._close_result[0])
        elif self._uncredited_bytes >= CREDIT_THRESHOLD:
            credit = int(self._uncredited_bytes)
            self._mux.send(CREDIT, self.number, credit.to_bytes(4, "big"))
            self._uncredited_bytes = 0

    def fail(self, fault: Exception) -> None:
        """End the stream at once, with unread data: the peer cannot know what we processed."""
        if not self._is_lost:
            self._finish(fault)

    def _finish(self, fault: Exception | None) -> None:
        self._mux.remove(self)
        self._is_lost = True
        self._unsent.clear()
        self._unread.clear()
        self._mux.call_soon(self._notify_lost, fault)

    def _notify_lost(self, fault: Exception | None) -> None:
        self._protocol.connection_lost(fault)


def _decode_close(body: bytes) -> Exception | None:
    how = body[:1]
    if how == CLOSED_NORMALLY:
        return None
    if how == CELL_NOT_HERE:
        if len(body) != 1 + _CELL_BYTES:
            raise MuxProtocolError("a CLOSE has no cell")
        return NoOwner(_decode_cell(body, 1), "that node does not own it")
    return StreamLost(body[1:].decode(errors="replace"))


def _encode_cell(cell: int) -> bytes:
    return cell.to_bytes(_CELL_BYTES, "big", signed=True)


def _decode_cell(body: bytes, at: int) -> int:
    return int.from_bytes(body[at : at + _CELL_BYTES], "big", signed=True)
