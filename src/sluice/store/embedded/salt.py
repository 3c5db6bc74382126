"""Compute the salt of a log from its frames, if the `layout` file is lost or damaged.

The crc of a frame's header begins from the salt, and a crc can be run backwards: header and crc
together give the salt that was used. Any 28 bytes give some salt, so a salt is believed only when
whole frames, one right behind the other, agree on it. The walk begins at the first byte of each
segment, where no client's payload can stand, and passes over payloads that look like frames.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.store.embedded.files import Files
from sluice.store.embedded.frame_format import FRAME_BYTES, LIMIT, MAGIC_BYTES
from sluice.store.embedded.layout import log_name
from sluice.store.embedded.segment_scan import SegmentScan

UNKNOWN: Final = -1
_POLYNOMIAL: Final = 0x82F63B78  # CRC-32C, bits reversed
_HEAD_BYTES: Final = 24  # of a frame's header, before the crc
_ENOUGH: Final = 32  # frames that agree


def salt_before(crc: i64, data: bytes) -> i64:
    """Return the salt with which `crc` is the crc32c of `data`: the inverse of `crc32c.extend`."""
    table: list[int] = []
    for nth in range(256):
        value = nth
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    by_top: list[int] = [0] * 256  # the last step left the top byte of its table entry in the crc
    for nth in range(256):
        by_top[table[nth] >> 24] = nth
    state: i64 = crc ^ LIMIT
    at: i64 = len(data) - 1
    while at >= 0:
        nth = by_top[int(state >> 24)]
        state = ((state ^ table[nth]) << 8 & LIMIT) | (nth ^ data[at])
        at -= 1
    return state ^ LIMIT


def find_salt(files: Files, directory: str, segments: list[int]) -> int:
    """Return the salt that the frames of the log agree on, or UNKNOWN."""
    votes: dict[int, int] = {}
    for segment in segments:
        fd = files.open_to_read(f"{directory}/{log_name(segment)}")
        try:
            _count_votes(files, fd, segment, votes)
        finally:
            files.close(fd)
        if votes and max(votes.values()) >= _ENOUGH:
            break
    best = UNKNOWN
    most = 0
    for salt, count in votes.items():
        if count > most:
            best, most = salt, count
        elif count == most:
            best = UNKNOWN
    return best


def has_bytes(files: Files, directory: str, segments: list[int]) -> bool:
    """Return whether any segment holds anything but zeros (room for frames to come)."""
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


def _count_votes(files: Files, fd: int, segment: int, votes: dict[int, int]) -> None:
    """Count the frames of one segment by the salt that they were written with."""
    offset: i64 = 0
    counted = 0
    size: i64 = files.size(fd)
    while offset + FRAME_BYTES <= size and counted < _ENOUGH:
        head = files.read(fd, FRAME_BYTES, int(offset))
        if head[: len(MAGIC_BYTES)] == MAGIC_BYTES:
            crc = int.from_bytes(head[_HEAD_BYTES:FRAME_BYTES], "little")
            salt = salt_before(crc, head[:_HEAD_BYTES])
            end = _walk(SegmentScan(files, fd, segment, salt), offset, votes, int(salt))
            if end > offset:
                offset = end
                counted = votes[int(salt)]
                continue
        offset = _next_magic(files, fd, offset + 1, size)


def _walk(scan: SegmentScan, offset: i64, votes: dict[int, int], salt: int) -> i64:
    """Count whole frames from `offset` on, one right behind the other; return where they end."""
    frame = scan.frame_at(offset)
    while frame is not None and frame.head.count > 0:
        votes[salt] = votes.get(salt, 0) + 1
        offset = frame.end
        if votes[salt] >= _ENOUGH:
            break
        frame = scan.frame_at(offset)
    return offset


def _next_magic(files: Files, fd: int, offset: i64, size: i64) -> i64:
    """Return the offset of the next four bytes that begin a frame, or `size`."""
    while offset < size:
        window = files.read(fd, int(min(i64(1 << 20), size - offset)), int(offset))
        found: i64 = window.find(MAGIC_BYTES)
        if found >= 0:
            return offset + found
        offset += max(i64(1), i64(len(window) - (len(MAGIC_BYTES) - 1)))
    return size
