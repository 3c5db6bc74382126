"""Reading a segment frame by frame, from its log alone: what recovery does, and what replaces a lost index.

The log is read in windows of 1 MiB, or of one frame if that is larger, so that a segment is never held whole.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.store.embedded.files import Files
from sluice.store.embedded.frame_format import FRAME_BYTES, MAGIC_BYTES, FrameHead, read_body, read_head
from sluice.store.protocol import Record

_WINDOW_BYTES: Final = 1 << 20


class Frame:
    """A frame that was found whole, and the offset behind it."""

    def __init__(self, head: FrameHead, records: list[Record], end: i64) -> None:
        self.head = head
        self.records = records
        self.end: i64 = end


class SegmentScan:
    def __init__(self, files: Files, fd: int, segment: i64, salt: i64) -> None:
        self._files = files
        self._fd = fd
        self._salt: i64 = salt
        self._base: i64 = 0
        self._window: bytes = b""
        self.segment: i64 = segment
        self.size: i64 = files.size(fd)

    def frame_at(self, offset: i64) -> Frame | None:
        """The frame that begins at `offset`; None if there is none that is whole."""
        if not self._look(offset, FRAME_BYTES):
            return None
        head = read_head(self._window, offset - self._base, self._salt)
        if head is None or not self._look(offset, FRAME_BYTES + head.length):
            return None
        first: i64 = offset + FRAME_BYTES
        records = read_body(self._window, first - self._base, head, self.segment << 32 | first)
        if records is None:
            return None
        return Frame(head, records, first + head.length)

    def search(self, offset: i64) -> i64:
        """The offset of the first whole frame at or behind `offset`; -1 if none follows."""
        while offset + FRAME_BYTES <= self.size:
            self._look(offset, FRAME_BYTES)
            found: i64 = self._window.find(MAGIC_BYTES, offset - self._base)
            if found < 0:
                # The last three bytes of the window may be the beginning of one.
                offset = max(offset + 1, self._base + len(self._window) - (len(MAGIC_BYTES) - 1))
                continue
            offset = self._base + found
            if self.frame_at(offset) is not None:
                return offset
            offset += 1
        return -1

    def raw(self, start: i64, end: i64) -> bytes:
        """The bytes between two offsets, as they are."""
        return self._files.read(self._fd, int(end - start), int(start))

    def _look(self, offset: i64, size: i64) -> bool:
        """Bring `size` bytes from `offset` into the window; False if the file ends before them."""
        if offset + size > self.size:
            return False
        if offset < self._base or offset + size > self._base + len(self._window):
            self._window = self._files.read(self._fd, int(max(size, _WINDOW_BYTES)), int(offset))
            self._base = offset
        return offset + size <= self._base + len(self._window)
