"""The reader thread: messages by address and rows by segment, because a cold read waits for a disk.

Addresses near each other are read with one `pread`. An address does not contain the length of its
record, so a window ends a little after its last address, and a record that the window cuts gets a
window of its own. The thread holds the GIL for at most one window of work, which keeps the delay of
the loop below a millisecond.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from google_crc32c import value as crc32c
from librt.strings import BytesWriter, read_i32_le
from mypy_extensions import i64

from sluice.errors import StoreFailed, StoreUnreadable
from sluice.store.embedded.files import FileSystem
from sluice.store.embedded.layout import log_name
from sluice.store.embedded.segment_index import read_index, split_rows
from sluice.store.embedded.segment_scan import SegmentScan
from sluice.store.protocol import HEADER_BYTES, MESSAGE, write_row

WINDOW_BYTES: Final = 1 << 20
# Up to this gap, reading unneeded bytes is cheaper than another call.
_MAX_GAP_BYTES: Final = 64 << 10
_TAIL_BYTES: Final = 4 << 10  # most records are shorter
_MAX_OPEN_FILES: Final = 64
_RETRY_DELAYS: Final = [0.05, 0.25, 0.7, 2.0]  # seconds before a failed read is repeated


class Request:
    """A request for the reader thread."""


class ReadRequest(Request):
    def __init__(self, addresses: list[int], done: Callable[[list[bytes | None]], None]) -> None:
        self.addresses = addresses
        self.done = done


class ScanRequest(Request):
    def __init__(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self.segment = segment
        self.done = done


class CloseSegmentsRequest(Request):
    """Close deleted segments: the disk frees them when the last descriptor is closed."""

    def __init__(self, segments: list[int]) -> None:
        self.segments = segments


class StopRequest(Request):
    pass


class LogReader:
    def __init__(
        self,
        files: FileSystem,
        directory: str,
        salt: int,
        salvage: bool,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._files = files
        self._directory = directory
        self._salt: i64 = salt
        self._salvage = salvage
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        # Descriptors by segment, least recently used first.
        self._descriptors: dict[int, int] = {}
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="sluice-log-reader", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def submit(self, request: Request) -> None:
        self._requests.put(request)

    def close_segments(self, segments: list[int]) -> None:
        self._requests.put(CloseSegmentsRequest(segments))

    def stop(self) -> None:
        """Answer every request made so far, then end the thread."""
        self._requests.put(StopRequest())
        self._worker.join()
        for fd in self._descriptors.values():
            self._files.close(fd)
        self._descriptors.clear()

    # -- in the reader thread

    def _run(self) -> None:
        try:
            while self._serve_next_request():
                pass
        except StoreUnreadable as unreadable:
            self._notify(self._on_failure, unreadable)
        except Exception as error:
            failure = StoreFailed(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            self._notify(self._on_failure, failure)

    def _serve_next_request(self) -> bool:
        request = self._requests.get()
        if isinstance(request, ReadRequest):
            self._notify(request.done, self._read_records(request.addresses))
        elif isinstance(request, ScanRequest):
            self._notify(request.done, self._read_rows(request.segment))
        elif isinstance(request, CloseSegmentsRequest):
            for segment in request.segments:
                fd = self._descriptors.pop(segment, -1)
                if fd >= 0:
                    self._files.close(fd)
        else:
            return False
        return True

    def _notify(self, done: Callable[..., None], result: object) -> None:
        try:
            self._call_soon_threadsafe(done, result)
        except RuntimeError:
            pass  # the loop is closed, so no caller waits

    def _open_log(self, segment: int) -> int:
        """Return the descriptor of a log, or -1 if the segment does not exist."""
        fd = self._descriptors.pop(segment, -1)
        if fd < 0:
            if len(self._descriptors) >= _MAX_OPEN_FILES or (
                self._descriptors and self._files.is_low_on_descriptors()
            ):
                oldest = next(iter(self._descriptors))
                self._files.close(self._descriptors.pop(oldest))
            try:
                fd = self._files.open_to_read(f"{self._directory}/{log_name(segment)}")
            except FileNotFoundError:
                return -1
        self._descriptors[segment] = fd
        return fd

    def _read_records(self, addresses: list[int]) -> list[bytes | None]:
        """Return the records at `addresses`, in that order; read each segment from start to end."""
        found: list[bytes | None] = [None] * len(addresses)
        order = sorted(range(len(addresses)), key=addresses.__getitem__)
        nth = 0
        while nth < len(order):
            segment = addresses[order[nth]] >> 32
            end = nth
            while end < len(order) and addresses[order[end]] >> 32 == segment:
                end += 1
            fd = self._open_log(segment)
            while fd >= 0 and nth < end:
                nth = self._read_window(segment, fd, addresses, order, nth, end, found)
            nth = end
        return found

    def _read_window(
        self,
        segment: int,
        fd: int,
        addresses: list[int],
        order: list[int],
        nth: int,
        end: int,
        found: list[bytes | None],
    ) -> int:
        """Read one window from the nth address on, and extract all records that are whole in it.

        Return the index of the first address that is not done; the nth always counts as done.
        """
        start: i64 = addresses[order[nth]] & 0xFFFF_FFFF
        last: i64 = start
        window_end = nth + 1
        while window_end < end:
            at: i64 = addresses[order[window_end]] & 0xFFFF_FFFF
            if at - last > _MAX_GAP_BYTES or at - start > WINDOW_BYTES - _TAIL_BYTES:
                break
            last = at
            window_end += 1
        window = self._read_bytes(segment, fd, start, last - start + _TAIL_BYTES)
        first = nth
        while nth < window_end:
            position = order[nth]
            at = (addresses[position] & 0xFFFF_FFFF) - start
            size = read_record_size(window, at)
            if size > len(window) - at:
                if nth > first:
                    return nth  # cut by the end of the window: begins the next one
                window = self._read_bytes(segment, fd, start, size)
            found[position] = verify_record(window, at, size)
            nth += 1
        return nth

    def _read_bytes(self, segment: int, fd: int, start: i64, size: i64) -> bytes:
        """Read bytes of a log, with retries.

        Bytes that the disk returns wrong are damaged, and lost. Bytes that the disk cannot return
        may be readable after a repair of cable or path, so they must not be taken for lost: after
        some retries the store fails, as it does when a write fails. Only a store opened with
        `salvage` continues without them.
        """
        available = self._files.size(fd) - start
        if available <= 0:
            return b""
        attempts = 0
        while True:
            try:
                return self._files.read(fd, int(min(size, available)), int(start))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                if attempts == len(_RETRY_DELAYS):
                    if self._salvage:
                        return b""
                    raise StoreUnreadable(
                        f"{self._directory}/{log_name(segment)}", int(start)
                    ) from error
            time.sleep(_RETRY_DELAYS[attempts])
            attempts += 1

    def _read_rows(self, segment: int) -> list[bytes]:
        """Return rows from the index, or from the valid part of the log if there is no index."""
        index = read_index(self._files, self._directory, segment)
        if index is not None:
            return split_rows(index.rows)
        fd = self._open_log(segment)
        if fd < 0:
            return []
        rows = BytesWriter()
        scan = SegmentScan(self._files, fd, segment, self._salt)
        at = scan.find_frame(0)
        while at >= 0:
            frame = scan.read_frame(at)
            if frame is None:
                at = scan.find_frame(at + 1)
                continue
            for record in frame.records:
                if record.kind == MESSAGE:
                    write_row(rows, record.address, record)
            at = frame.end
        return split_rows(rows.getvalue())


def read_record_size(data: bytes, at: i64) -> i64:
    """Return the size in the header of the record at `data[at:]`; a header's size if it is cut."""
    if at + HEADER_BYTES > len(data):
        return HEADER_BYTES
    return i64(read_i32_le(data, at + 4)) & 0xFFFF_FFFF


def verify_record(data: bytes, at: i64, size: i64) -> bytes | None:
    """Return the bytes of the record at `data[at:]`, or None if its crc is wrong."""
    if size < HEADER_BYTES or at + size > len(data):
        return None
    crc: int = crc32c(data[at + 4 : at + size])
    if i64(read_i32_le(data, at)) & 0xFFFF_FFFF != crc:
        return None
    return data[at : at + size]
