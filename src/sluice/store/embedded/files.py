"""Every touch of the file system by the embedded store, one method each and nothing clever.

There is one reason for the class: a test hands in a double that forgets what was not synced, tears what was half
written and cuts the power at any of these calls. So no other module of the store may import `os`. Nothing is mapped
into memory either: a page fault holds the GIL while the disk turns, `pread` lets go of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from typing import Final

from mypy_extensions import mypyc_attr

from sluice.errors import StoreLocked

# Descriptors: for a snapshot, a new segment, an index, a directory, and what readers need meanwhile.
_RESERVED_DESCRIPTORS: Final = 8
_DSYNC_FLAG: Final[int] = getattr(os, "RWF_DSYNC", 0)  # Linux; elsewhere in two steps
_WRITEBACK_ADVICE: Final[int] = getattr(
    os, "POSIX_FADV_DONTNEED", -1
)  # in Linux: write now what would be written later


@mypyc_attr(allow_interpreted_subclasses=True)
class FileSystem:
    """The real ones. A file descriptor is an int, a path a str, and a failure an OSError that is not retried.

    The exception is a lack of descriptors. Whoever connects takes one, and nobody who connects may stop the log: so a
    few are held in reserve and used when there is no other, and a file that is closed gives them back."""

    def __init__(self) -> None:
        self._devnull_fd = -1  # not `_null`: that is `__null` in the compiled build, a word of C
        self._reserve: list[int] = []
        self._reserve_lock = threading.Lock()  # reader and writer share the reserve

    def open(self, path: str, flags: int) -> int:
        while True:
            try:
                return os.open(path, flags | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno != errno.EMFILE or not self._release_reserved():
                    raise

    def _release_reserved(self) -> bool:
        """Let one of the reserve go. A new connection may be quicker than we are: then the next one goes as well."""
        with self._reserve_lock:
            if not self._reserve:
                return False
            os.close(self._reserve.pop())
            return True

    def is_low_on_descriptors(self) -> bool:
        """Whether the reserve is in use: who holds files for convenience should let some go."""
        return self._devnull_fd >= 0 and len(self._reserve) < _RESERVED_DESCRIPTORS

    def fill_reserve(self) -> None:
        """While there are enough of them."""
        self._devnull_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._refill_reserve()

    def _refill_reserve(self) -> None:
        with self._reserve_lock:
            try:
                while self._devnull_fd >= 0 and len(self._reserve) < _RESERVED_DESCRIPTORS:
                    self._reserve.append(os.dup(self._devnull_fd))
            except OSError:
                pass  # with the next file that is closed

    def drop_reserve(self) -> None:
        with self._reserve_lock:
            for fd in self._reserve:
                os.close(fd)
            self._reserve.clear()
            if self._devnull_fd >= 0:
                os.close(self._devnull_fd)
                self._devnull_fd = -1

    def make_directory(self, path: str) -> None:
        """Make `path` unless it is there, and its name durable: what is in a lost directory is lost as well."""
        if os.path.isdir(path):
            return
        os.makedirs(path, mode=0o700, exist_ok=True)
        self.sync_directory(os.path.dirname(os.path.abspath(path)))

    def free_bytes(self, directory: str) -> int:
        """Room that is left on the disk of a directory for whoever asks."""
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize

    def list_names(self, directory: str) -> list[str]:
        while True:
            try:
                found = os.listdir(directory)
                break
            except OSError as error:
                if error.errno != errno.EMFILE or not self._release_reserved():
                    raise
        self._refill_reserve()
        return found

    def lock(self, path: str) -> int:
        """Hold `path` for this process until the descriptor is closed; a killed process lets go by itself."""
        fd = self.open(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise StoreLocked(os.path.dirname(path), holder) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return fd

    def lock_to_read(self, path: str) -> int:
        """Keep writers away from `path` until the descriptor is closed, and change nothing: neither
        the file nor the
        number in it. -1 if there is no such file: then no process has the store open either."""
        try:
            fd = self.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise StoreLocked(os.path.dirname(path), holder) from None
        return fd

    def create(self, path: str) -> int:
        """A new file to write, which must not have been there."""
        return self.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open_to_write(self, path: str) -> int:
        return self.open(path, os.O_RDWR)

    def open_to_read(self, path: str) -> int:
        return self.open(path, os.O_RDONLY)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def write(self, fd: int, parts: list[bytes], at: int) -> None:
        """Write all of `parts` from offset `at`. The system may take less than it was given: then the rest follows."""
        written = os.pwritev(fd, parts, at)
        total = 0
        for part in parts:
            total += len(part)
        if written == total:
            return
        rest = memoryview(b"".join(parts))
        while written < total:
            taken = os.pwrite(fd, rest[written:], at + written)
            if taken == 0:
                raise OSError(errno.EIO, "the system takes no more bytes and gives no reason")
            written += taken

    def write_synced(self, fd: int, parts: list[bytes], at: int) -> None:
        """The same as `write`, and `sync` for these bytes alone: one call to the system, and so one wait less for the
        right to run Python behind it."""
        if _DSYNC_FLAG == 0:
            self.write(fd, parts, at)
            self.sync(fd)
            return
        total = 0
        for part in parts:
            total += len(part)
        written = os.pwritev(fd, parts, at, _DSYNC_FLAG)
        if written != total:
            self.write(fd, [b"".join(parts)[written:]], at + written)
            self.sync(fd)

    def preallocate(self, fd: int, zeros: bytes, at: int) -> bool:
        """Put zeros where the file will be written to soon, and have them on their way to the disk without waiting for
        them; whether that could be done. Nothing rests on it: a sync of what is later written over them has no blocks
        to find and no new size to keep, and so less to do."""
        if _WRITEBACK_ADVICE < 0:
            return False
        try:
            if os.pwrite(fd, zeros, at) < len(zeros):
                return False
            os.posix_fadvise(fd, at, len(zeros), _WRITEBACK_ADVICE)
        except OSError:
            return False  # no room for zeros, perhaps: what counts is whether a frame finds some
        return True

    def read(self, fd: int, size: int, at: int) -> bytes:
        """`size` bytes from offset `at`; fewer only where the file ends."""
        data = os.pread(fd, size, at)
        if len(data) == size or not data:
            return data
        parts = [data]
        have = len(data)
        while have < size:
            data = os.pread(fd, size - have, at + have)
            if not data:
                break
            parts.append(data)
            have += len(data)
        return b"".join(parts)

    def sync(self, fd: int) -> None:
        """Return when the contents, and the size that leads to them, would survive a power cut."""
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        """Remove a name. One that is gone already was removed before a crash: that is no failure."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass

    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory, new, changed and removed, would survive a power cut."""
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            self.close(fd)

    def close(self, fd: int) -> None:
        with self._reserve_lock:
            if self._devnull_fd >= 0 and len(self._reserve) < _RESERVED_DESCRIPTORS:
                os.dup2(
                    self._devnull_fd, fd, inheritable=False
                )  # in one step: nobody gets it in between
                self._reserve.append(fd)
                return
        os.close(fd)


_MAX_PARTS_PER_WRITE: Final = 512  # of one write: systems take 1,024 at least


def write_file_atomically(files: FileSystem, directory: str, name: str, parts: list[bytes]) -> None:
    """Put a file in its place, all of it or nothing: whoever finds `name` finds what was synced before it got that
    name. The name itself is durable after the next `sync_directory`, which is the caller's."""
    temporary = f"{directory}/{name}.tmp"
    files.unlink(temporary)
    fd = files.create(temporary)
    try:
        at = 0
        for first in range(0, len(parts), _MAX_PARTS_PER_WRITE):
            batch = parts[first : first + _MAX_PARTS_PER_WRITE]
            files.write(fd, batch, at)
            at += sum(len(part) for part in batch)
        files.sync(fd)
    finally:
        files.close(fd)
    files.rename(temporary, f"{directory}/{name}")


def read_file(files: FileSystem, path: str) -> bytes:
    fd = files.open_to_read(path)
    try:
        return files.read(fd, files.size(fd), 0)
    finally:
        files.close(fd)
