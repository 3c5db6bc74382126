"""Where one packet ends and the next begins.

The length is judged as soon as it is known, before its bytes arrive: otherwise a five-byte header would make us hold
256 MB for a peer that has not yet said who it is.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.errors import MalformedPacket, PacketTooLarge
from sluice.wire.decode import decode
from sluice.wire.packets import Packet

MIN_PIECE_BYTES: Final = 1024


def find_body(data: bytes, at: i64, size: i64) -> i64:
    """Where the body of the packet that begins at `at` starts; 0 means "not all of the header is here yet"."""
    past: i64 = at + 1
    while past < size:
        if data[past] < 0x80:
            return past + 1
        past += 1
        if past - at > 4:
            raise MalformedPacket("the remaining length runs past its fourth byte")
    return 0


def read_remaining_length(data: bytes, at: i64, body: i64) -> i64:
    """The remaining length of the packet that begins at `at` and whose body starts at `body`."""
    length: i64 = 0
    shift: i64 = 0
    past: i64 = at + 1
    while past < body:
        byte: i64 = data[past]
        length |= (byte & 0x7F) << shift
        shift += 7
        past += 1
    if shift > 7 and data[body - 1] == 0:
        raise MalformedPacket("the remaining length is longer than it need be")  # [MQTT-1.5.5-1]
    return length


class Framer:
    """Cuts a stream of bytes into the bytes of whole packets, whatever pieces it arrives in.

    A packet larger than one read is gathered in a list and joined once: adding each piece to the last would copy a
    large packet once for every piece of it. Small pieces are added together, so that two neighbours hold at least
    `SMALL_PIECE`: otherwise a peer that sends two bytes at a time makes us hold thirty times what it sent.
    """

    def __init__(self, limit: int) -> None:
        self.limit: i64 = limit
        self._tail: bytes = b""
        self._pieces: list[bytes] | None = None
        self._held_bytes: i64 = 0
        self._needed_bytes: i64 = 0

    def join(self, data: bytes) -> bytes:
        """What can be read now: `data` behind what was kept. Empty while a known packet is still incomplete."""
        if self._pieces is not None:
            last = self._pieces[-1]
            if len(last) + len(data) < MIN_PIECE_BYTES:
                self._pieces[-1] = last + data
            else:
                self._pieces.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._needed_bytes:
                return b""
            data = b"".join(self._pieces)
            self._pieces = None
            return data
        if self._tail:
            data = self._tail + data
            self._tail = b""
        return data

    def buffer_rest(self, data: bytes, at: i64, needed: i64) -> None:
        """Keep `data[at:]` for the next read; `needed` is the size of the packet it begins, 0 if not known yet."""
        rest = data[at:]
        if needed:
            self._pieces = [rest]
            self._held_bytes = len(rest)
            self._needed_bytes = needed
        else:
            self._tail = rest

    @property
    def buffered_bytes(self) -> int:
        """How many bytes of an incomplete packet are held."""
        return int(self._held_bytes) if self._pieces is not None else len(self._tail)

    def feed(self, data: bytes, version: int) -> list[Packet]:
        """All whole packets of the stream so far, decoded. The broker's connection walks the buffer itself."""
        packets: list[Packet] = []
        data = self.join(data)
        size: i64 = len(data)
        at: i64 = 0
        needed: i64 = 0
        while at < size:
            body = find_body(data, at, size)
            if body == 0:
                break
            length = read_remaining_length(data, at, body)
            if body - at + length > self.limit:
                raise PacketTooLarge(int(body - at + length), int(self.limit))
            if body + length > size:
                needed = body - at + length
                break
            packets.append(decode(data, data[at], body, body + length, version))
            at = body + length
        if at < size:
            self.buffer_rest(data, at, needed)
        return packets
