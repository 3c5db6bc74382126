"""Frames: what one group commit looks like on disk, and how to tell that all of it is there.

    frame    28 bytes and a body, little endian
      u32 magic "SLF1"                 u32 length of the body
      u32 count of records in it       u32 unsynced: frames right before this one that no sync had covered yet
      u64 lsn, one more than the frame before, from 1
      u32 crc32c of the 24 bytes before it, begun from the salt of this store
      body: `count` records, each with a crc of its own (store/protocol.py)

A frame is there if its header is and every one of its records is: the records' crcs cover the whole body, so a second
crc over it would only cost time. The salt is drawn once per directory. Without it a client could send a payload that
looks like a frame, and a crash in the middle of writing it would look like damage.

`unsynced` tells recovery what was promised: a frame proves that all frames more than `unsynced` before it had been
synced when it was written. A broken frame among those is damage; a broken frame behind them is a torn write.
"""

from __future__ import annotations

from typing import Final

from google_crc32c import extend as crc32c_extend
from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.store.protocol import HEADER_BYTES, MESSAGE, Record, copy_row, read_record

FRAME_HEADER_BYTES: Final = 28
MAGIC_BYTES: Final = b"SLF1"
_MAGIC: Final = 0x31464C53  # the same four bytes as an integer
MAX_U32: Final = 0xFFFF_FFFF  # lengths, counts and offsets are u32


class FrameHeader:
    """The header of a frame that was found sound."""

    def __init__(self, length: i64, count: i64, unsynced: i64, lsn: i64) -> None:
        self.length: i64 = length
        self.count: i64 = count
        self.unsynced: i64 = unsynced
        self.lsn: i64 = lsn


def _to_signed(value: i64) -> i32:
    return i32(value if value < 0x8000_0000 else value - 0x1_0000_0000)


def encode_frame_header(length: i64, count: i64, unsynced: i64, lsn: i64, salt: i64) -> bytes:
    """The 28 bytes that go before a body."""
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
    """The header at `data[at:]`; None if there is none."""
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
    """All records of the body at `data[at:]`, the first of which has `address`; None unless each of them is sound."""
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
    """Add an index row for each message of a body, by its headers alone. False if the body is not `count` records
    long: recovery would throw such a frame away, so it must never be acknowledged."""
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
    """Name the messages of a damaged stretch as well as its bytes still can: size after size, until one is absurd."""
    while at + HEADER_BYTES <= end:
        size: i64 = i64(read_i32_le(data, at + 4)) & MAX_U32
        if size < HEADER_BYTES or at + size > end:
            return
        if data[at + 8] == MESSAGE:
            lost.append(
                (int(i64(read_i32_le(data, at + 12)) & MAX_U32), int(read_i64_le(data, at + 16)))
            )
        at += size
