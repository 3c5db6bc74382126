"""Reads a segment frame by frame from its log, for recovery and to rebuild a lost index.

The log is read in windows of 1 MiB, or of one frame if that is larger, so that a segment is never
in memory as a whole.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.store.embedded.files import FileSystem
from sluice.store.embedded.frame_format import (
    FRAME_HEADER_BYTES,
    MAGIC_BYTES,
    FrameHeader,
    read_frame_header,
    read_frame_records,
)
from sluice.store.protocol import Record

_WINDOW_BYTES: Final = 1 << 20


class ScannedFrame:
    """A whole frame, and the offset after it."""

    def __init__(self, header: FrameHeader, records: list[Record], end: i64) -> None:
        self.header = header
        self.records = records
        self.end: i64 = end


class SegmentScan:
    def __init__(self, files: FileSystem, fd: int, segment: i64, salt: i64) -> None:
        self._files = files
        self._fd = fd
        self._salt: i64 = salt
        self._window_start: i64 = 0
        self._window: bytes = b""
        self.segment: i64 = segment
        self.size: i64 = files.size(fd)

    def read_frame(self, offset: i64) -> ScannedFrame | None:
        """Return the frame that begins at `offset`, or None if there is no whole one."""
        if not self._load_window(offset, FRAME_HEADER_BYTES):
            return None
        header = read_frame_header(self._window, offset - self._window_start, self._salt)
        if header is None or not self._load_window(offset, FRAME_HEADER_BYTES + header.length):
            return None
        first: i64 = offset + FRAME_HEADER_BYTES
        records = read_frame_records(
            self._window, first - self._window_start, header, self.segment << 32 | first
        )
        if records is None:
            return None
        return ScannedFrame(header, records, first + header.length)

    def find_frame(self, offset: i64) -> i64:
        """Return the offset of the first whole frame at or after `offset`, or -1."""
        while offset + FRAME_HEADER_BYTES <= self.size:
            self._load_window(offset, FRAME_HEADER_BYTES)
            found: i64 = self._window.find(MAGIC_BYTES, offset - self._window_start)
            if found < 0:
                # The last three bytes of the window may be the beginning of a frame.
                offset = max(
                    offset + 1, self._window_start + len(self._window) - (len(MAGIC_BYTES) - 1)
                )
                continue
            offset = self._window_start + found
            if self.read_frame(offset) is not None:
                return offset
            offset += 1
        return -1

    def read_bytes(self, start: i64, end: i64) -> bytes:
        """Return the bytes between two offsets, unchecked."""
        return self._files.read(self._fd, int(end - start), int(start))

    def _load_window(self, offset: i64, size: i64) -> bool:
        """Load `size` bytes from `offset` into the window; return False if the file is shorter."""
        if offset + size > self.size:
            return False
        if offset < self._window_start or offset + size > self._window_start + len(self._window):
            self._window = self._files.read(self._fd, int(max(size, _WINDOW_BYTES)), int(offset))
            self._window_start = offset
        return offset + size <= self._window_start + len(self._window)
