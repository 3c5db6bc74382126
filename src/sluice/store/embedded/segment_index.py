"""The index of a full segment: a start reads one row of 40 bytes for each message.

    idx      32 bytes and the rows, little endian
      4 bytes "SLI1"      u32 crc32c of all following bytes
      u64 segment         u64 length of the log when it was full
      u64 count of rows   then the rows, 40 bytes each (store/protocol.py: write_row)

A missing or damaged index is rebuilt from its log.
"""

from __future__ import annotations

import errno
from typing import Final

from google_crc32c import extend as crc32c_extend
from google_crc32c import value as crc32c
from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.store.embedded.files import FileSystem, read_file, write_file_atomically
from sluice.store.embedded.layout import index_name
from sluice.store.protocol import ROW_BYTES

_MAGIC: Final = b"SLI1"
_HEADER_BYTES: Final = 32
_CHUNK_BYTES: Final = (1 << 20) // ROW_BYTES * ROW_BYTES


class SegmentIndex:
    """An index that was read and is valid."""

    def __init__(self, rows: bytes, log_bytes: int) -> None:
        self.rows = rows
        self.log_bytes = log_bytes


def write_index(
    files: FileSystem, directory: str, segment: i64, log_bytes: i64, rows: bytes
) -> None:
    """Write the index of a segment. Its name is durable after the next `sync_directory`."""
    writer = BytesWriter()
    write_i64_le(writer, segment)
    write_i64_le(writer, log_bytes)
    write_i64_le(writer, len(rows) // ROW_BYTES)
    header = writer.getvalue()
    crc: int = crc32c_extend(crc32c(header), rows)
    crc_writer = BytesWriter()
    write_i32_le(crc_writer, i32(crc if crc < 0x8000_0000 else crc - 0x1_0000_0000))
    write_file_atomically(
        files, directory, index_name(int(segment)), [_MAGIC + crc_writer.getvalue() + header, rows]
    )


def read_index(files: FileSystem, directory: str, segment: i64) -> SegmentIndex | None:
    """Return the index of a segment, or None if it is missing or not valid."""
    try:
        data = read_file(files, f"{directory}/{index_name(int(segment))}")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EIO):
            raise
        return None
    if len(data) < _HEADER_BYTES or data[:4] != _MAGIC:
        return None
    crc: int = crc32c(data[8:])
    if i64(read_i32_le(data, 4)) & 0xFFFF_FFFF != crc or read_i64_le(data, 8) != segment:
        return None
    rows = data[_HEADER_BYTES:]
    if read_i64_le(data, 24) * ROW_BYTES != len(rows):
        return None
    return SegmentIndex(rows, int(read_i64_le(data, 16)))


def split_rows(rows: bytes) -> list[bytes]:
    """Split rows into pieces that the loop can process in one iteration each."""
    if len(rows) <= _CHUNK_BYTES:
        return [rows] if rows else []
    return [rows[at : at + _CHUNK_BYTES] for at in range(0, len(rows), _CHUNK_BYTES)]
