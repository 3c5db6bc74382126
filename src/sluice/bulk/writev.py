"""Values that are sent from where they lie in the maps of the log, without having been copied together before.

The system's `writev` takes a list of addresses and sizes, and that is what the compiled code has written down
(`columns.Values`). Python's own takes an object for each of them, which costs more than the copy that is saved: so it
is called by its address here. An address is good as long as its map is there, which is up to whoever sends.
"""

from __future__ import annotations

import ctypes
import errno
import os
from bisect import bisect_left, bisect_right
from typing import Final

MAX_IOVECS: Final = 1024  # that the system takes at once
IOVEC_BYTES: Final = 16  # struct iovec: an address and a size

_writev: Final = ctypes.CDLL(None, use_errno=True).writev
_writev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_writev.restype = ctypes.c_ssize_t


class IovecBuffer:
    """The values at these spots, one behind the other. `offsets` are those of the column that they are the first of:
    i32, where each begins, and where the last ends."""

    def __init__(self, iovecs: bytes, offsets: bytes) -> None:
        self._count = len(iovecs) // IOVEC_BYTES
        self._starts = memoryview(offsets).cast("i")[: self._count + 1]
        self._iovecs = memoryview(iovecs).cast("q")
        self._remaining = (ctypes.c_int64 * (2 * self._count)).from_buffer_copy(iovecs)
        self._first_unsent = 0  # that is not sent, or not to its end
        self._sent_bytes = 0  # of all bytes

    def __len__(self) -> int:
        return self._starts[self._count]

    def send(self, fd: int, max_bytes: int) -> bool:
        """Write about `most` bytes, or as many as are taken; whether that was the last of it. BlockingIOError: none
        is taken now."""
        if self._sent_bytes == len(self):
            return True
        first = self._first_unsent
        end = min(first + MAX_IOVECS, self._count)
        stop = bisect_left(self._starts, self._sent_bytes + max_bytes, first + 1, end)
        sent_of_first = self._sent_bytes - self._starts[first]
        self._remaining[2 * first] = self._iovecs[2 * first] + sent_of_first
        self._remaining[2 * first + 1] = min(max_bytes, self._iovecs[2 * first + 1] - sent_of_first)
        written = _writev(fd, ctypes.addressof(self._remaining) + first * IOVEC_BYTES, stop - first)
        if written < 0:
            error_number = ctypes.get_errno()
            if error_number == errno.EINTR:
                return False
            raise OSError(
                error_number, os.strerror(error_number)
            )  # Python makes BlockingIOError of EAGAIN
        self._sent_bytes += written
        self._first_unsent = bisect_right(self._starts, self._sent_bytes, first, stop + 1) - 1
        return self._sent_bytes == len(self)
