"""The snapshot file: the state of the queues between two frames, and its position in the log.

    state    40 bytes, a list and the state, little endian
      4 bytes "SLS1"                    u32 crc32c of all following bytes
      u64 lsn of the last frame it covers
      u64 segment   u64 offset          where the first frame that it does not cover begins
      u64 count of the live segments, then their numbers, u64 each, then the state

The list makes the deletion of segments repeatable. A segment before the snapshot's that is not in
the list was being deleted when the process ended. A segment in the list without a file was removed
by something other than Sluice.
"""

from __future__ import annotations

import errno
from typing import Final

from google_crc32c import extend as crc32c_extend
from google_crc32c import value as crc32c
from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.store.embedded.files import FileSystem, read_file, write_file_atomically
from sluice.store.embedded.layout import snapshot_name

_MAGIC: Final = b"SLS1"
_HEADER_BYTES: Final = 40


class StoredSnapshot:
    """A snapshot that was read and is valid."""

    def __init__(
        self, name: str, lsn: int, segment: int, offset: int, segments: list[int], state: bytes
    ) -> None:
        self.name = name
        self.lsn = lsn
        self.segment = segment
        self.offset = offset
        self.segments = segments
        self.state = state


def write_snapshot(
    files: FileSystem,
    directory: str,
    lsn: i64,
    segment: i64,
    offset: i64,
    segments: list[int],
    state: list[bytes],
) -> str:
    """Write a snapshot, whose state comes in pieces, durably; return the name of the file."""
    writer = BytesWriter()
    write_i64_le(writer, lsn)
    write_i64_le(writer, segment)
    write_i64_le(writer, offset)
    write_i64_le(writer, len(segments))
    for number in segments:
        write_i64_le(writer, number)
    header = writer.getvalue()
    crc: int = crc32c(header)
    for piece in state:
        crc = crc32c_extend(crc, piece)
    crc_writer = BytesWriter()
    write_i32_le(crc_writer, i32(crc if crc < 0x8000_0000 else crc - 0x1_0000_0000))
    name = snapshot_name(int(lsn))
    write_file_atomically(files, directory, name, [_MAGIC + crc_writer.getvalue() + header, *state])
    files.sync_directory(directory)
    return name


def read_snapshot(files: FileSystem, directory: str, name: str) -> StoredSnapshot | None:
    """Return the snapshot of that name, or None if it is not valid."""
    try:
        data = read_file(files, f"{directory}/{name}")
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return None
    if len(data) < _HEADER_BYTES or data[:4] != _MAGIC:
        return None
    crc: int = crc32c(data[8:])
    if i64(read_i32_le(data, 4)) & 0xFFFF_FFFF != crc:
        return None
    count: i64 = read_i64_le(data, 32)
    body: i64 = _HEADER_BYTES + 8 * count
    if count < 0 or body > len(data):
        return None
    segments: list[int] = []
    at: i64 = _HEADER_BYTES
    while at < body:
        segments.append(int(read_i64_le(data, at)))
        at += 8
    return StoredSnapshot(
        name,
        int(read_i64_le(data, 8)),
        int(read_i64_le(data, 16)),
        int(read_i64_le(data, 24)),
        segments,
        data[body:],
    )
