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

MOST_SPOTS: Final = 1024  # that the system takes at once
SPOT_BYTES: Final = 16  # struct iovec: an address and a size

_writev: Final = ctypes.CDLL(None, use_errno=True).writev
_writev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_writev.restype = ctypes.c_ssize_t


class Gathered:
    """The values at these spots, one behind the other. `offsets` are those of the column that they are the first of:
    i32, where each begins, and where the last ends."""

    def __init__(self, spots: bytes, offsets: bytes) -> None:
        self._count = len(spots) // SPOT_BYTES
        self._starts = memoryview(offsets).cast("i")[: self._count + 1]
        self._spots = memoryview(spots).cast("q")
        self._left = (ctypes.c_int64 * (2 * self._count)).from_buffer_copy(spots)
        self._first = 0  # that is not sent, or not to its end
        self._sent = 0  # of all bytes

    def __len__(self) -> int:
        return self._starts[self._count]

    def send(self, fd: int, most: int) -> bool:
        """Write about `most` bytes, or as many as are taken; whether that was the last of it. BlockingIOError: none
        is taken now."""
        if self._sent == len(self):
            return True
        first = self._first
        end = min(first + MOST_SPOTS, self._count)
        stop = bisect_left(self._starts, self._sent + most, first + 1, end)
        inside = self._sent - self._starts[first]
        self._left[2 * first] = self._spots[2 * first] + inside
        self._left[2 * first + 1] = min(most, self._spots[2 * first + 1] - inside)
        done = _writev(fd, ctypes.addressof(self._left) + first * SPOT_BYTES, stop - first)
        if done < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                return False
            raise OSError(number, os.strerror(number))  # Python makes BlockingIOError of EAGAIN
        self._sent += done
        self._first = bisect_right(self._starts, self._sent, first, stop + 1) - 1
        return self._sent == len(self)
