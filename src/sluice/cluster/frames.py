"""What nodes say to each other about plain topics, as bytes.

    length u32 | kind u8 | body

    INTEREST   u32 number, u16 cell, u8 1: all of it, JSON {filter: count}
    KNOWN      u32 number
    PUBLISH    u32 id (0: no answer), u64 mark, goals, PUBLISH packet
    ONCE       u16 cell, u64 session, u64 mark there, u64 its lowest open mark, and then as PUBLISH
    ANSWER     u32 id, u32 taken, goals that are not here, why
    HEARD      u32 how many answers of this line have been heard
    LOOKUP     u32 id, goals, filter
    FOUND      u32 id, goals that are not here, PUBLISH packets

A goal is a cell and the shared subscriptions of it that one member each is to be chosen for. Where the first of them
has no name, the message is for the others alone. The mark of a message is the same each time it is said.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from librt.strings import BytesWriter

from sluice.wire.decode import decode_publish
from sluice.wire.encode import write_publish
from sluice.wire.framing import body_of, length_of
from sluice.wire.packets import V5, Publish

INTEREST: Final = 1
KNOWN: Final = 2
PUBLISH: Final = 3
ANSWER: Final = 4
LOOKUP: Final = 5
FOUND: Final = 6
HEARD: Final = 7
ONCE: Final = 8

ALONE: Final = b""  # instead of a first share: nobody but the shares that follow is to have it

ANY_CELL: Final = 0xFFFF  # of shared subscriptions that have no member where they were sent

Goal = tuple[int, list[bytes]]


def frame(kind: int, body: bytes) -> bytes:
    return struct.pack(">IB", len(body) + 1, kind) + body


class Frames:
    """Cuts a stream into frames."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        data = self._held + data
        at = 0
        while len(data) - at >= 4:
            size = int.from_bytes(data[at : at + 4], "big")
            if len(data) - at < 4 + size:
                break
            yield data[at + 4], data[at + 5 : at + 4 + size]
            at += 4 + size
        self._held = data[at:]


def write_goals(goals: list[Goal]) -> bytes:
    parts = [struct.pack(">H", len(goals))]
    for cell, shares in goals:
        parts.append(struct.pack(">HH", cell, len(shares)))
        for name in shares:
            parts.append(struct.pack(">H", len(name)) + name)
    return b"".join(parts)


def read_goals(body: bytes, at: int) -> tuple[list[Goal], int]:
    goals: list[Goal] = []
    (count,) = struct.unpack_from(">H", body, at)
    at += 2
    for _ in range(count):
        cell, many = struct.unpack_from(">HH", body, at)
        at += 4
        shares = []
        for _ in range(many):
            (size,) = struct.unpack_from(">H", body, at)
            shares.append(body[at + 2 : at + 2 + size])
            at += 2 + size
        goals.append((cell, shares))
    return goals, at


def write_message(message: Publish, now: float) -> bytes:
    """A message on its way to another node: with the time that is left to it."""
    out = BytesWriter()
    extra = b""
    if message.expires_at:
        left = max(0, int(message.expires_at - now + 0.999))
        extra = b"\x02" + left.to_bytes(4, "big")
    write_publish(out, message, message.topic, message.qos, message.retain, False, 1, extra, V5)
    return out.getvalue()


def read_messages(body: bytes, at: int, now: float) -> list[Publish]:
    found = []
    size = len(body)
    while at < size:
        start = int(body_of(body, at, size))
        end = start + int(length_of(body, at, start))
        message = decode_publish(body, body[at] & 15, start, end, V5)
        if message.expiry >= 0:
            message.expires_at = now + float(message.expiry)
        found.append(message)
        at = end
    return found
