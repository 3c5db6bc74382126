"""Send values from the mapped log to a socket without copying them first.

The system call `writev` takes a list of addresses and sizes, which the compiled code has prepared
(`column_builders.ValueColumn`). Python's own `os.writev` takes an object per value, which costs
more than the saved copy; so this module calls the C function by its address. An address is valid
as long as its segment is mapped: the sender keeps the map open.
"""

from __future__ import annotations

import ctypes
import errno
import os
from bisect import bisect_left, bisect_right
from typing import Final

MAX_IOVECS: Final = 1024  # IOV_MAX, the limit of one system call
IOVEC_BYTES: Final = 16  # struct iovec: an address and a size

_writev: Final = ctypes.CDLL(None, use_errno=True).writev
_writev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_writev.restype = ctypes.c_ssize_t


class IovecBuffer:
    """The values at these iovecs, in order.

    `offsets` (i32) are those of the column whose first values these are: the start of each value
    and the end of the last.
    """

    def __init__(self, iovecs: bytes, offsets: bytes) -> None:
        self._count = len(iovecs) // IOVEC_BYTES
        self._starts = memoryview(offsets).cast("i")[: self._count + 1]
        self._iovecs = memoryview(iovecs).cast("q")
        self._remaining = (ctypes.c_int64 * (2 * self._count)).from_buffer_copy(iovecs)
        self._first_unsent = 0  # first value that is not sent completely
        self._sent_bytes = 0

    def __len__(self) -> int:
        return self._starts[self._count]

    def send(self, fd: int, max_bytes: int) -> bool:
        """Write about `max_bytes`, or as many as the socket accepts; return True when all is sent.

        Raises BlockingIOError if the socket accepts nothing now.
        """
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
            # Python turns EAGAIN into BlockingIOError.
            raise OSError(error_number, os.strerror(error_number))
        self._sent_bytes += written
        self._first_unsent = bisect_right(self._starts, self._sent_bytes, first, stop + 1) - 1
        return self._sent_bytes == len(self)
