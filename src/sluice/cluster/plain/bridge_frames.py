"""Encoding of the frames that nodes exchange about plain topics.

    length u32 | kind u8 | body

    INTEREST        u32 number, u16 cell, u8 1: full table, JSON {filter: count}
    INTEREST_ACK    u32 number
    PUBLISH         u32 id (0: no answer), u64 dedup id, targets, PUBLISH packet
    PUBLISH_ONCE    u16 cell, u64 session, u64 dedup id there, u64 lowest open dedup id,
                    and then as PUBLISH
    PUBLISH_ACK     u32 id, u32 receivers, targets that are not here, fault
    ACKS_RECEIVED   u32 number of answers received on this stream
    LOOKUP          u32 id, targets, filter
    LOOKUP_RESULT   u32 id, targets that are not here, PUBLISH packets

A target is a cell and those of its shared subscriptions that need one member each. If the first
name is empty (SHARES_ONLY), the message is for these shares only. A message keeps its dedup id
when it is resent.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Final

from librt.strings import BytesWriter

from sluice.errors import ProtocolViolation, SluiceError
from sluice.wire.decode import decode_publish
from sluice.wire.encode import write_publish
from sluice.wire.packets import V5, Publish
from sluice.wire.reader import PacketReader

INTEREST: Final = 1
INTEREST_ACK: Final = 2
PUBLISH: Final = 3
PUBLISH_ACK: Final = 4
LOOKUP: Final = 5
LOOKUP_RESULT: Final = 6
ACKS_RECEIVED: Final = 7
PUBLISH_ONCE: Final = 8

# A PUBLISH has one MQTT packet (256 MiB at most), a LOOKUP_RESULT all retained messages found.
MAX_FRAME_BYTES: Final = 1 << 30

SHARES_ONLY: Final = b""  # as first share: deliver to the following shares only

ANY_CELL: Final = 0xFFFF  # target of shares that have no member in the cell they were sent to

_PUBLISH_TYPE: Final = 3  # MQTT 5.0 section 2.1.2

CellTarget = tuple[int, list[bytes]]


def encode_frame(kind: int, body: bytes) -> bytes:
    return struct.pack(">IB", len(body) + 1, kind) + body


class MalformedFrame(SluiceError):
    """A frame of the other node violates the format."""


class FrameReader:
    """Splits a stream into frames. The pieces of a large frame are joined once, at its end."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._missing_bytes = 0  # until the next frame, or its length field, is complete

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        if self._pieces:
            self._pieces.append(data)
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                return
            data = b"".join(self._pieces)
            self._pieces.clear()
        at = 0
        missing = 4
        while len(data) - at >= 4:
            size = int.from_bytes(data[at : at + 4], "big")
            if size == 0 or size > MAX_FRAME_BYTES:
                raise MalformedFrame(f"a frame has an invalid size of {size} bytes")
            missing = 4 + size
            if len(data) - at < missing:
                break
            yield data[at + 4], data[at + 5 : at + missing]
            at += missing
            missing = 4
        if at < len(data):
            self._pieces.append(data[at:])
            self._missing_bytes = missing - (len(data) - at)


def unpack_fields(form: str, body: bytes, at: int = 0) -> tuple[int, ...]:
    """Read numbers as `struct.unpack_from` does, or raise MalformedFrame."""
    if len(body) - at < struct.calcsize(form):
        raise MalformedFrame("a frame is cut off")
    return struct.unpack_from(form, body, at)


def read_filters(body: bytes, at: int) -> dict[bytes, int]:
    """Read the filters of a cell with their number of subscriptions."""
    try:
        table = json.loads(body[at:])
    except (ValueError, RecursionError):
        raise MalformedFrame("the filters of a cell are not JSON") from None
    if not isinstance(table, dict):
        raise MalformedFrame("the filters of a cell are not an object")
    filters: dict[bytes, int] = {}
    for name, count in table.items():
        if type(count) is not int or not 0 <= count < 1 << 53:
            raise MalformedFrame("a filter has no number of subscriptions")
        try:
            filters[name.encode()] = count
        except UnicodeEncodeError:
            raise MalformedFrame("a filter is not UTF-8") from None
    return filters


def write_targets(targets: list[CellTarget]) -> bytes:
    parts = [struct.pack(">H", len(targets))]
    for cell, shares in targets:
        parts.append(struct.pack(">HH", cell, len(shares)))
        for name in shares:
            parts.append(struct.pack(">H", len(name)) + name)
    return b"".join(parts)


def read_targets(body: bytes, at: int) -> tuple[list[CellTarget], int]:
    targets: list[CellTarget] = []
    (count,) = unpack_fields(">H", body, at)
    at += 2
    for _ in range(count):
        cell, share_count = unpack_fields(">HH", body, at)
        at += 4
        shares = []
        for _ in range(share_count):
            (size,) = unpack_fields(">H", body, at)
            if len(body) - at < 2 + size:
                raise MalformedFrame("a frame is cut off")
            shares.append(body[at + 2 : at + 2 + size])
            at += 2 + size
        targets.append((cell, shares))
    return targets, at


def write_message(message: Publish, now: float) -> bytes:
    """Encode a message with its remaining time to live."""
    out = BytesWriter()
    extra = b""
    if message.expires_at:
        left = max(0, int(message.expires_at - now + 0.999))
        extra = b"\x02" + left.to_bytes(4, "big")
    write_publish(out, message, message.topic, message.qos, message.retain, False, 1, extra, V5)
    return out.getvalue()


def read_message(body: bytes, at: int, now: float) -> Publish:
    """Read the only message of a frame."""
    found = read_messages(body, at, now)
    if len(found) != 1:
        raise MalformedFrame(f"a frame for one message has {len(found)}")
    return found[0]


def read_messages(body: bytes, at: int, now: float) -> list[Publish]:
    found = []
    reader = PacketReader()
    reader.begin(body, at)
    try:
        while reader.advance():
            if reader.head >> 4 != _PUBLISH_TYPE:
                raise MalformedFrame("a message is not a PUBLISH")
            message = decode_publish(body, reader.head & 15, reader.body, reader.end, V5)
            if message.expiry_seconds >= 0:
                message.expires_at = now + float(message.expiry_seconds)
            found.append(message)
    except ProtocolViolation as fault:
        raise MalformedFrame(f"a message cannot be read: {fault}") from None
    if reader.buffered_bytes == 1:
        raise MalformedFrame("a message is not a PUBLISH")  # it has not even a length
    if reader.buffered_bytes:
        raise MalformedFrame("a message is cut off")
    return found
