"""Splits a frame into bodies for the streams and an entry for the log.

A log entry contains the records of a frame unchanged, except for messages. Of a message it has the
header and the beginning of the body: the part that a replay needs after the message is settled and
deleted (time, publisher's id for the deduplication window, and key, which tells what it replaced in
a compacted queue). The header keeps the size of the whole record, so that addresses can be
computed. A message whose beginning is too long for a u16 is in the log as a whole, and in its
stream.

    log entry     adjacent records; a MESSAGE is   u16 bytes of its body, header (40), those bytes
                  any other record is              u16 0xFFFF, the record as it was written
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, read_i16_le, read_i32_le, read_i64_le, write_i16_le
from mypy_extensions import i16, i64

from sluice.errors import StoreError
from sluice.store.protocol import HEADER_BYTES, MESSAGE, Record, decode_record

_WHOLE_RECORD: Final = -1  # 0xFFFF
_BODY_FIELDS_BYTES: Final = 28  # bytes of a message's body before its id (`sluice.message`)
_MAX_LOGGED_BODY_BYTES: Final = 32_000


class FrameMessage:
    """One message of a frame and its position."""

    def __init__(self, pid: int, seq: int, offset: int, record: bytes, has_headers: bool) -> None:
        self.pid = pid
        self.seq = seq
        self.offset = offset  # relative to the first record of the frame
        self.record = record
        # Valid for messages of queues. Most have no headers; dead letters have some.
        self.has_headers = has_headers


class SplitFrame:
    def __init__(self) -> None:
        self.messages: list[FrameMessage] = []
        self.messages_by_partition: dict[int, int] = {}
        self.notes: list[bytes] = []  # bodies, in order
        self.log_entry: bytes = b""


def split_frame(frame: bytes, count: i64) -> SplitFrame:
    split = SplitFrame()
    log_entry = BytesWriter()
    at: i64 = 0
    end: i64 = len(frame)
    while at < end:
        size: i64 = i64(read_i32_le(frame, at + 4)) & 0xFFFF_FFFF if at + HEADER_BYTES <= end else 0
        if size < HEADER_BYTES or at + size > end:
            raise StoreError("a frame was committed that does not contain whole records")
        if frame[at + 8] == MESSAGE:
            logged_bytes = _logged_body_bytes(frame, at, size)
            write_i16_le(log_entry, i16(logged_bytes))
            log_entry.write(
                frame[
                    at : at
                    + (size if logged_bytes == _WHOLE_RECORD else HEADER_BYTES + logged_bytes)
                ]
            )
            pid = int(i64(read_i32_le(frame, at + 12)) & 0xFFFF_FFFF)
            split.messages_by_partition[pid] = split.messages_by_partition.get(pid, 0) + 1
            split.messages.append(
                FrameMessage(
                    pid,
                    int(read_i64_le(frame, at + 16)),
                    int(at),
                    frame[at : at + size],
                    size >= HEADER_BYTES + _BODY_FIELDS_BYTES
                    and read_i32_le(frame, at + HEADER_BYTES + 24) > 0,
                )
            )
        else:
            write_i16_le(log_entry, i16(_WHOLE_RECORD))
            log_entry.write(frame[at : at + size])
            split.notes.append(frame[at + HEADER_BYTES : at + size])
        count -= 1
        at += size
    if count != 0:
        raise StoreError("a frame was committed with a wrong number of records")
    split.log_entry = log_entry.getvalue()
    return split


def _logged_body_bytes(frame: bytes, at: i64, size: i64) -> i64:
    """Return the number of bytes of a message's body for the log, or _WHOLE_RECORD.

    A message that is not of a queue has other bytes at these offsets: any result is right for it.
    """
    body_bytes: i64 = size - HEADER_BYTES
    if body_bytes <= _BODY_FIELDS_BYTES:
        return body_bytes
    id_bytes: i64 = i64(read_i32_le(frame, at + HEADER_BYTES + 8))
    key_bytes: i64 = i64(read_i32_le(frame, at + HEADER_BYTES + 12))
    logged_bytes: i64 = _BODY_FIELDS_BYTES + id_bytes + key_bytes
    if id_bytes < 0 or key_bytes < 0 or logged_bytes > body_bytes:
        return _BODY_FIELDS_BYTES
    return logged_bytes if logged_bytes <= _MAX_LOGGED_BODY_BYTES else _WHOLE_RECORD


def read_log_entry(log_entry: bytes, address: i64) -> list[Record]:
    """Return the records of a frame, of messages only the beginning; `address` is of the first."""
    records: list[Record] = []
    at: i64 = 0
    end: i64 = len(log_entry)
    while at < end:
        logged_bytes: i64 = i64(read_i16_le(log_entry, at))
        at += 2
        size: i64 = i64(read_i32_le(log_entry, at + 4)) & 0xFFFF_FFFF
        if logged_bytes == _WHOLE_RECORD:
            records.append(decode_record(log_entry, at, size, address))
            at += size
        else:
            record = decode_record(log_entry, at, HEADER_BYTES + logged_bytes, address)
            record.size = size
            records.append(record)
            at += HEADER_BYTES + logged_bytes
        address += size
    return records
