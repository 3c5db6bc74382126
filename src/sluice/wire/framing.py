"""Find packet boundaries in a stream of bytes.

The length is checked as soon as it is known, before the body arrives. Otherwise a five-byte header
could make us buffer 256 MB for a peer that has not authenticated yet.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.errors import MalformedPacket, PacketTooLarge
from sluice.wire.decode import decode
from sluice.wire.packets import Packet

MIN_PIECE_BYTES: Final = 1024


def find_body(data: bytes, at: i64, size: i64) -> i64:
    """Return where the body of the packet at `at` begins, or 0 if its header is incomplete."""
    past: i64 = at + 1
    while past < size:
        if data[past] < 0x80:
            return past + 1
        past += 1
        if past - at > 4:
            raise MalformedPacket("the remaining length runs past its fourth byte")
    return 0


def read_remaining_length(data: bytes, at: i64, body: i64) -> i64:
    """Return the remaining length of the packet at `at` whose body begins at `body`."""
    length: i64 = 0
    shift: i64 = 0
    past: i64 = at + 1
    while past < body:
        byte: i64 = data[past]
        length |= (byte & 0x7F) << shift
        shift += 7
        past += 1
    if shift > 7 and data[body - 1] == 0:
        raise MalformedPacket("the remaining length is not in its shortest form")  # [MQTT-1.5.5-1]
    return length


class Framer:
    """Cut a stream of bytes, which arrives in any pieces, into complete packets.

    A packet larger than one read is collected in a list and joined once: concatenating each piece
    would copy a large packet once for every piece. Small pieces are merged, so that two neighbors
    hold at least `MIN_PIECE_BYTES`: otherwise a peer that sends two bytes at a time makes us hold
    thirty times what it sent.
    """

    def __init__(self, limit: int) -> None:
        self.limit: i64 = limit
        self._tail: bytes = b""
        self._pieces: list[bytes] | None = None
        self._held_bytes: i64 = 0
        self._needed_bytes: i64 = 0

    def join(self, data: bytes) -> bytes:
        """Return the buffered bytes and `data`, or nothing if a packet is still incomplete."""
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
        """Buffer `data[at:]` for the next read.

        `needed` is the size of the packet that begins there, or 0 if unknown.
        """
        rest = data[at:]
        if needed:
            self._pieces = [rest]
            self._held_bytes = len(rest)
            self._needed_bytes = needed
        else:
            self._tail = rest

    @property
    def buffered_bytes(self) -> int:
        """Return the number of buffered bytes of an incomplete packet."""
        return int(self._held_bytes) if self._pieces is not None else len(self._tail)

    def feed(self, data: bytes, version: int) -> list[Packet]:
        """Return all complete packets so far, decoded.

        The broker's connection scans the buffer itself.
        """
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
