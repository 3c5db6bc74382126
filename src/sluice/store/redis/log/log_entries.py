"""A frame taken apart: bodies of messages for the streams, everything else for the log.

In the log a frame is its records as they are, but for messages, of which only the beginning is left: the header, and of
the body as much as a replay needs when the message itself is long settled and gone (when it came, the id of its
publisher, which the dedup window still wants, and its key, by which a younger one replaced it in a compacted queue).
The header keeps the size of the whole, so addresses can be counted. A message whose beginning is too long for a u16
is in the log as a whole, besides its place in a stream.

    log entry     records one behind the other; a MESSAGE is   u16 bytes kept of its body, header (40), those bytes
                                                anything else  u16 0xFFFF, the record as it was written
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, read_i16_le, read_i32_le, read_i64_le, write_i16_le
from mypy_extensions import i16, i64

from sluice.errors import StoreError
from sluice.store.protocol import HEADER_BYTES, MESSAGE, Record, take_apart

_WHOLE: Final = -1  # 0xFFFF
_START_BYTES: Final = 28  # of a message's body, before its id (`sluice.message`)
_LONGEST_START: Final = 32_000


class Piece:
    """One message of a frame: where it goes and what it is."""

    def __init__(self, pid: int, seq: int, offset: int, record: bytes, has_headers: bool) -> None:
        self.pid = pid
        self.seq = seq
        self.offset = offset  # from the first record of the frame
        self.record = record
        self.has_headers = (
            has_headers  # if it is a queue's message: most have none, and a dead letter has some
        )


class Parts:
    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.counts: dict[int, int] = {}  # messages by partition
        self.notes: list[bytes] = []  # bodies, in order
        self.log: bytes = b""


def take_frame_apart(frame: bytes, count: i64) -> Parts:
    parts = Parts()
    log = BytesWriter()
    at: i64 = 0
    end: i64 = len(frame)
    while at < end:
        size: i64 = i64(read_i32_le(frame, at + 4)) & 0xFFFF_FFFF if at + HEADER_BYTES <= end else 0
        if size < HEADER_BYTES or at + size > end:
            raise StoreError("a frame was committed that does not hold whole records")
        if frame[at + 8] == MESSAGE:
            kept = _start_of(frame, at, size)
            write_i16_le(log, i16(kept))
            log.write(frame[at : at + (size if kept == _WHOLE else HEADER_BYTES + kept)])
            pid = int(i64(read_i32_le(frame, at + 12)) & 0xFFFF_FFFF)
            parts.counts[pid] = parts.counts.get(pid, 0) + 1
            parts.pieces.append(
                Piece(
                    pid,
                    int(read_i64_le(frame, at + 16)),
                    int(at),
                    frame[at : at + size],
                    size >= HEADER_BYTES + _START_BYTES and read_i32_le(frame, at + HEADER_BYTES + 24) > 0,
                )
            )
        else:
            write_i16_le(log, i16(_WHOLE))
            log.write(frame[at : at + size])
            parts.notes.append(frame[at + HEADER_BYTES : at + size])
        count -= 1
        at += size
    if count != 0:
        raise StoreError("a frame was committed with another number of records than it holds")
    parts.log = log.getvalue()
    return parts


def _start_of(frame: bytes, at: i64, size: i64) -> i64:
    """How much of a message's body the log keeps; _WHOLE for all of it. What is no message of a queue has other bytes
    where lengths are looked for: any answer does for it."""
    body: i64 = size - HEADER_BYTES
    if body <= _START_BYTES:
        return body
    own_id: i64 = i64(read_i32_le(frame, at + HEADER_BYTES + 8))
    key: i64 = i64(read_i32_le(frame, at + HEADER_BYTES + 12))
    start: i64 = _START_BYTES + own_id + key
    if own_id < 0 or key < 0 or start > body:
        return _START_BYTES
    return start if start <= _LONGEST_START else _WHOLE


def read_log(log: bytes, address: i64) -> list[Record]:
    """The records of a frame whose first one has this address; of messages only the beginning."""
    found: list[Record] = []
    at: i64 = 0
    end: i64 = len(log)
    while at < end:
        kept: i64 = i64(read_i16_le(log, at))
        at += 2
        size: i64 = i64(read_i32_le(log, at + 4)) & 0xFFFF_FFFF
        if kept == _WHOLE:
            found.append(take_apart(log, at, size, address))
            at += size
        else:
            record = take_apart(log, at, HEADER_BYTES + kept, address)
            record.size = size
            found.append(record)
            at += HEADER_BYTES + kept
        address += size
    return found
