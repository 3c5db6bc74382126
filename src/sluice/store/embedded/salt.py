"""Compute the salt of a log from its frames, if the `layout` file is lost or damaged.

The crc of a frame's header starts from the salt, and a crc can be computed backwards: header and
crc together give the salt. Any 28 bytes give some salt, so a salt is accepted only if whole,
adjacent frames agree on it. The scan starts at the first byte of each segment, where no client's
payload can be, and skips payloads that look like frames.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.store.embedded.files import FileSystem
from sluice.store.embedded.frame_format import FRAME_HEADER_BYTES, MAGIC_BYTES, MAX_U32
from sluice.store.embedded.layout import log_name
from sluice.store.embedded.segment_scan import SegmentScan

UNKNOWN_SALT: Final = -1
_POLYNOMIAL: Final = 0x82F63B78  # CRC-32C, bits reversed
_CHECKED_HEADER_BYTES: Final = 24  # bytes of a frame's header before the crc
_SUFFICIENT_FRAMES: Final = 32  # stop once this many frames agree


def derive_salt(crc: i64, data: bytes) -> i64:
    """Return the salt with which `crc` is the crc32c of `data`: the inverse of `crc32c.extend`."""
    table: list[int] = []
    for nth in range(256):
        value = nth
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    # The last step left the top byte of its table entry in the crc.
    index_by_top_byte: list[int] = [0] * 256
    for nth in range(256):
        index_by_top_byte[table[nth] >> 24] = nth
    state: i64 = crc ^ MAX_U32
    at: i64 = len(data) - 1
    while at >= 0:
        nth = index_by_top_byte[int(state >> 24)]
        state = ((state ^ table[nth]) << 8 & MAX_U32) | (nth ^ data[at])
        at -= 1
    return state ^ MAX_U32


def find_salt(files: FileSystem, directory: str, segments: list[int]) -> int:
    """Return the salt that the frames of the log agree on, or UNKNOWN."""
    votes: dict[int, int] = {}
    for segment in segments:
        fd = files.open_to_read(f"{directory}/{log_name(segment)}")
        try:
            _count_votes(files, fd, segment, votes)
        finally:
            files.close(fd)
        if votes and max(votes.values()) >= _SUFFICIENT_FRAMES:
            break
    best = UNKNOWN_SALT
    most_votes = 0
    for salt, count in votes.items():
        if count > most_votes:
            best, most_votes = salt, count
        elif count == most_votes:
            best = UNKNOWN_SALT
    return best


def has_data(files: FileSystem, directory: str, segments: list[int]) -> bool:
    """Return whether any segment holds anything but zeros (preallocated space for frames)."""
    for segment in segments:
        fd = files.open_to_read(f"{directory}/{log_name(segment)}")
        try:
            size = files.size(fd)
            for at in range(0, size, 1 << 20):
                if files.read(fd, min(1 << 20, size - at), at).strip(b"\0"):
                    return True
        finally:
            files.close(fd)
    return False


def _count_votes(files: FileSystem, fd: int, segment: int, votes: dict[int, int]) -> None:
    """Count the frames of one segment by the salt that they were written with."""
    offset: i64 = 0
    counted = 0
    size: i64 = files.size(fd)
    while offset + FRAME_HEADER_BYTES <= size and counted < _SUFFICIENT_FRAMES:
        header = files.read(fd, FRAME_HEADER_BYTES, int(offset))
        if header[: len(MAGIC_BYTES)] == MAGIC_BYTES:
            crc = int.from_bytes(header[_CHECKED_HEADER_BYTES:FRAME_HEADER_BYTES], "little")
            salt = derive_salt(crc, header[:_CHECKED_HEADER_BYTES])
            end = _count_frames(SegmentScan(files, fd, segment, salt), offset, votes, int(salt))
            if end > offset:
                offset = end
                counted = votes[int(salt)]
                continue
        offset = _find_magic(files, fd, offset + 1, size)


def _count_frames(scan: SegmentScan, offset: i64, votes: dict[int, int], salt: int) -> i64:
    """Count whole, adjacent frames from `offset` on and return the offset after the last one."""
    frame = scan.read_frame(offset)
    while frame is not None and frame.header.count > 0:
        votes[salt] = votes.get(salt, 0) + 1
        offset = frame.end
        if votes[salt] >= _SUFFICIENT_FRAMES:
            break
        frame = scan.read_frame(offset)
    return offset


def _find_magic(files: FileSystem, fd: int, offset: i64, size: i64) -> i64:
    """Return the offset of the next four bytes that begin a frame, or `size`."""
    while offset < size:
        window = files.read(fd, int(min(i64(1 << 20), size - offset)), int(offset))
        found: i64 = window.find(MAGIC_BYTES)
        if found >= 0:
            return offset + found
        offset += max(i64(1), i64(len(window) - (len(MAGIC_BYTES) - 1)))
    return size
