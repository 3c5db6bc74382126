"""The format of frames: how one group commit is stored, and how to check that it is complete.

    frame    28 bytes and a body, little endian
      u32 magic "SLF1"                 u32 length of the body
      u32 count of records in it       u32 unsynced: frames right before this one not yet synced
      u64 lsn, one more than the frame before, from 1
      u32 crc32c of the 24 bytes before it, starting from the salt of this store
      body: `count` records, each with a crc of its own (store/protocol.py)

A frame is complete if its header and every one of its records are valid. The crcs of the records
cover the whole body, so a second crc over it would only cost time. The salt is random, one per
directory. Without it a client could send a payload that looks like a frame, and a torn write of
that payload would look like damage.

`unsynced` tells recovery what was promised: a frame proves that all frames more than `unsynced`
before it had been synced when it was written. If one of those is broken, it is damage; if a later
one is broken, it is a torn write.
"""

from __future__ import annotations

from typing import Final

from google_crc32c import extend as crc32c_extend
from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.store.protocol import HEADER_BYTES, MESSAGE, Record, copy_row, read_record

FRAME_HEADER_BYTES: Final = 28
MAGIC_BYTES: Final = b"SLF1"
_MAGIC: Final = 0x31464C53  # MAGIC_BYTES as an integer
MAX_U32: Final = 0xFFFF_FFFF  # lengths, counts and offsets are u32


class FrameHeader:
    """The header of a valid frame."""

    def __init__(self, length: i64, count: i64, unsynced: i64, lsn: i64) -> None:
        self.length: i64 = length
        self.count: i64 = count
        self.unsynced: i64 = unsynced
        self.lsn: i64 = lsn


def _to_signed(value: i64) -> i32:
    return i32(value if value < 0x8000_0000 else value - 0x1_0000_0000)


def encode_frame_header(length: i64, count: i64, unsynced: i64, lsn: i64, salt: i64) -> bytes:
    """Return the 28 bytes that precede a body."""
    writer = BytesWriter()
    write_i32_le(writer, _to_signed(_MAGIC))
    write_i32_le(writer, _to_signed(length))
    write_i32_le(writer, _to_signed(count))
    write_i32_le(writer, _to_signed(unsynced))
    write_i64_le(writer, lsn)
    crc: int = crc32c_extend(int(salt), writer.getvalue())
    write_i32_le(writer, _to_signed(crc))
    return writer.getvalue()


def read_frame_header(data: bytes, at: i64, salt: i64) -> FrameHeader | None:
    """Return the header at `data[at:]`, or None if the bytes are not a valid header."""
    if at + FRAME_HEADER_BYTES > len(data):
        return None
    if i64(read_i32_le(data, at)) != _MAGIC:
        return None
    crc: int = crc32c_extend(int(salt), data[at : at + 24])
    if i64(read_i32_le(data, at + 24)) & MAX_U32 != crc:
        return None
    return FrameHeader(
        i64(read_i32_le(data, at + 4)) & MAX_U32,
        i64(read_i32_le(data, at + 8)) & MAX_U32,
        i64(read_i32_le(data, at + 12)) & MAX_U32,
        read_i64_le(data, at + 16),
    )


def read_frame_records(
    data: bytes, at: i64, header: FrameHeader, address: i64
) -> list[Record] | None:
    """Return all records of the body at `data[at:]`, or None unless each of them is valid.

    The first record has the address `address`.
    """
    end = at + header.length
    if end > len(data):
        return None
    start = at
    records: list[Record] = []
    while at < end:
        record = read_record(data, at, end, address + (at - start))
        if record is None:
            return None
        records.append(record)
        at += record.size
    return records if len(records) == header.count else None


def collect_index_rows(rows: BytesWriter, body: bytes, count: i64, address: i64) -> bool:
    """Add an index row for each message of a body, reading only headers.

    Return False if the body is not exactly `count` records long. Recovery would discard such a
    frame, so it must never be acknowledged.
    """
    at: i64 = 0
    end: i64 = len(body)
    found: i64 = 0
    while at < end:
        if at + HEADER_BYTES > end:
            return False
        size: i64 = i64(read_i32_le(body, at + 4)) & MAX_U32
        if size < HEADER_BYTES or at + size > end:
            return False
        if body[at + 8] == MESSAGE:
            copy_row(rows, body, at, address + at)
        found += 1
        at += size
    return found == count


def collect_lost_messages(data: bytes, at: i64, end: i64, lost: list[tuple[int, int]]) -> None:
    """Collect the messages of a damaged part, as far as the sizes in its headers are plausible."""
    while at + HEADER_BYTES <= end:
        size: i64 = i64(read_i32_le(data, at + 4)) & MAX_U32
        if size < HEADER_BYTES or at + size > end:
            return
        if data[at + 8] == MESSAGE:
            lost.append(
                (int(i64(read_i32_le(data, at + 12)) & MAX_U32), int(read_i64_le(data, at + 16)))
            )
        at += size
