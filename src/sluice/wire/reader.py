"""Find the packets in a stream of bytes, for broker, session proxies, client and load generator.

`PacketReader` knows no socket. It moves from packet to packet over one `bytes` object and copies
nothing; its caller decodes the packet in place. The length of a packet is checked as soon as it is
known, before the body arrives. Otherwise a five-byte header could make us buffer 256 MB for a peer
that has not authenticated yet.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64, mypyc_attr

from sluice.errors import MalformedPacket, PacketTooLarge
from sluice.wire.decode import decode
from sluice.wire.packets import Packet

MAX_PACKET_BYTES: Final = 268_435_460  # the largest packet that MQTT can express
MIN_PIECE_BYTES: Final = 1024


@mypyc_attr(acyclic=True, free_list_len=1)  # a connection needs one for each read
class PacketReader:
    """A position in a stream of packets.

        if reader.begin(data):
            while reader.advance():
                decode(reader.data, reader.head, reader.body, reader.end, version)

    A packet larger than one read is collected in a list and joined once: concatenating each piece
    would copy a large packet once for every piece. Small pieces are merged, so that two neighbors
    hold at least `MIN_PIECE_BYTES`: otherwise a peer that sends two bytes at a time makes us hold
    thirty times what it sent.
    """

    def __init__(self, limit: i64 = MAX_PACKET_BYTES) -> None:
        self.limit: i64 = limit
        self.data: bytes = b""  # the bytes of this read, after those of an incomplete packet
        # Of the current packet in `data`: its first byte, and where its body begins and ends.
        self.head: i64 = 0
        self.body: i64 = 0
        self.end: i64 = 0
        self._pieces: list[bytes] | None = None  # of an incomplete packet
        self._held_bytes: i64 = 0
        self._needed_bytes: i64 = 0  # the size of the incomplete packet; 0: not known yet

    def begin(self, data: bytes, at: i64 = 0) -> bool:
        """Begin to read `data[at:]`; return False if these bytes do not complete a packet."""
        pieces = self._pieces
        if pieces is not None:
            last = pieces[-1]
            if len(last) + len(data) < MIN_PIECE_BYTES:
                pieces[-1] = last + data
            else:
                pieces.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._needed_bytes:
                return False
            data = b"".join(pieces)
            self._pieces = None
        self.data = data
        self.end = at
        return True

    def advance(self) -> bool:
        """Move to the next complete packet; if there is none, buffer the rest and return False."""
        data = self.data
        at: i64 = self.end
        size: i64 = len(data)
        needed: i64 = 0
        length: i64 = 0
        shift: i64 = 0
        past: i64 = at + 1
        while past < size:
            byte: i64 = data[past]
            past += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift > 0:  # [MQTT-1.5.5-1]
                    raise MalformedPacket("the remaining length is not in its shortest form")
                needed = past - at + length
                if needed > self.limit:
                    raise PacketTooLarge(int(needed), int(self.limit))
                if at + needed > size:
                    break
                self.head = data[at]
                self.body = past
                self.end = at + needed
                return True
            shift += 7
            if shift == 28:
                raise MalformedPacket("the remaining length is longer than four bytes")
        self.data = b""
        self.end = 0
        if at < size:
            self._pieces = [data[at:]]
            self._held_bytes = size - at
            self._needed_bytes = needed
        return False

    @property
    def buffered_bytes(self) -> int:
        """Return the number of buffered bytes of an incomplete packet."""
        return int(self._held_bytes) if self._pieces is not None else 0

    def feed(self, data: bytes, version: int) -> list[Packet]:
        """Return all complete packets so far, decoded."""
        packets: list[Packet] = []
        if self.begin(data):
            while self.advance():
                packets.append(decode(self.data, self.head, self.body, self.end, version))
        return packets
