"""The reader thread: messages by address and rows by segment, away from the loop because a cold read waits for a disk.

Addresses that lie near each other are read with one `pread`. An address does not tell how long its record is, so a
window ends a little behind the last address in it, and a record that it cuts gets a window of its own. A window is
also all that is worked on without letting go of the GIL, which keeps the loop's wait below a millisecond.
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
_MAX_GAP_BYTES: Final = (
    64 << 10
)  # bytes that nobody asked for are cheaper than another call up to about here
_TAIL_BYTES: Final = 4 << 10  # most records end by then
_MAX_OPEN_FILES: Final = 64
_RETRY_DELAYS: Final = [0.05, 0.25, 0.7, 2.0]  # seconds before a read that failed is tried again


class Request:
    """Something for the reader to do."""


class ReadRequest(Request):
    def __init__(self, addresses: list[int], done: Callable[[list[bytes | None]], None]) -> None:
        self.addresses = addresses
        self.done = done


class ScanRequest(Request):
    def __init__(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self.segment = segment
        self.done = done


class CloseSegmentsRequest(Request):
    """Segments that were given back: the disk has them only when the last descriptor is closed."""

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
        self._descriptors: dict[
            int, int
        ] = {}  # descriptors by segment, the one used last at the end
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="sluice-log-reader", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def submit(self, request: Request) -> None:
        self._requests.put(request)

    def close_segments(self, segments: list[int]) -> None:
        self._requests.put(CloseSegmentsRequest(segments))

    def stop(self) -> None:
        """Answer every request made so far, and end the thread."""
        self._requests.put(StopRequest())
        self._worker.join()
        for fd in self._descriptors.values():
            self._files.close(fd)
        self._descriptors.clear()

    # -- in the thread

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
            pass  # the loop is closed, and whoever waited is gone with it

    def _open_log(self, segment: int) -> int:
        """An open log, or -1 if there is none of that number."""
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
        """The records at `addresses`, in their order; those of one segment are read from its beginning to its end."""
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
        """Read once, from the nth address in order as far as neighbours follow, and take what lies whole in it.
        Returns the first address that does not; the one it began with always counts as taken."""
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
                    return nth  # cut by the end of the window: it begins the next one
                window = self._read_bytes(segment, fd, start, size)
            found[position] = verify_record(window, at, size)
            nth += 1
        return nth

    def _read_bytes(self, segment: int, fd: int, start: i64, size: i64) -> bytes:
        """Bytes of a log. Those that the disk gives wrong are damaged, and lost. Those that it does not give may be
        there tomorrow, when a cable or a path is mended, so they must not be taken for lost: after some tries the
        store fails, as it does when it cannot write. Only a store that was opened to salvage goes on without them."""
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
        """From the index; from the log, as far as that is sound, if the index is missing or not written yet."""
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
    """How long the record at `data[at:]` says it is; as long as a header while that is not there."""
    if at + HEADER_BYTES > len(data):
        return HEADER_BYTES
    return i64(read_i32_le(data, at + 4)) & 0xFFFF_FFFF


def verify_record(data: bytes, at: i64, size: i64) -> bytes | None:
    """The bytes of the record at `data[at:]`, if they are those that were written."""
    if size < HEADER_BYTES or at + size > len(data):
        return None
    crc: int = crc32c(data[at + 4 : at + size])
    if i64(read_i32_le(data, at)) & 0xFFFF_FFFF != crc:
        return None
    return data[at : at + size]
