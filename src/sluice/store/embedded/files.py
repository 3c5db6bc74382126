"""All file system calls of the embedded store, one simple method each.

The class exists for tests: a double forgets unsynced data, tears partial writes and cuts the power
at any of these calls. So no other module of the store may import `os`. Nothing is mapped into
memory: a page fault holds the GIL during the disk access, `pread` releases it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from typing import Final

from mypy_extensions import mypyc_attr

from sluice.errors import StoreLocked

# Descriptors for a snapshot, a new segment, an index, a directory, and concurrent reads.
_RESERVED_DESCRIPTORS: Final = 8
_DSYNC_FLAG: Final[int] = getattr(os, "RWF_DSYNC", 0)  # Linux; elsewhere write and sync
# On Linux this starts writing dirty pages now.
_WRITEBACK_ADVICE: Final[int] = getattr(os, "POSIX_FADV_DONTNEED", -1)


@mypyc_attr(allow_interpreted_subclasses=True)
class FileSystem:
    """The real file system. A failure is an OSError and is not retried.

    A lack of descriptors is the exception. Every connection takes one, and connections must not
    stop the log. So a few descriptors are reserved and used if no other is free; closing a file
    refills the reserve.
    """

    def __init__(self) -> None:
        # Not `_null`: in the compiled build that is `__null`, a reserved word of C.
        self._devnull_fd = -1
        self._reserve: list[int] = []
        self._reserve_lock = threading.Lock()  # the reader and the writer thread share the reserve

    def open(self, path: str, flags: int) -> int:
        while True:
            try:
                return os.open(path, flags | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno != errno.EMFILE or not self._release_reserved():
                    raise

    def _release_reserved(self) -> bool:
        """Close one reserved descriptor.

        A new connection may take it first; then callers repeat.
        """
        with self._reserve_lock:
            if not self._reserve:
                return False
            os.close(self._reserve.pop())
            return True

    def is_low_on_descriptors(self) -> bool:
        """Return whether the reserve is in use, so that callers close spare files."""
        return self._devnull_fd >= 0 and len(self._reserve) < _RESERVED_DESCRIPTORS

    def fill_reserve(self) -> None:
        """Open the reserve, before connections use up the descriptors."""
        self._devnull_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._refill_reserve()

    def _refill_reserve(self) -> None:
        with self._reserve_lock:
            try:
                while self._devnull_fd >= 0 and len(self._reserve) < _RESERVED_DESCRIPTORS:
                    self._reserve.append(os.dup(self._devnull_fd))
            except OSError:
                pass  # refilled when the next file is closed

    def drop_reserve(self) -> None:
        with self._reserve_lock:
            for fd in self._reserve:
                os.close(fd)
            self._reserve.clear()
            if self._devnull_fd >= 0:
                os.close(self._devnull_fd)
                self._devnull_fd = -1

    def make_directory(self, path: str) -> None:
        """Create `path` unless it exists, and sync its name: its content is lost with its name."""
        if os.path.isdir(path):
            return
        os.makedirs(path, mode=0o700, exist_ok=True)
        self.sync_directory(os.path.dirname(os.path.abspath(path)))

    def free_bytes(self, directory: str) -> int:
        """Return the free bytes on the disk of a directory for unprivileged processes."""
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
        """Lock `path` for this process until the descriptor is closed or the process ends."""
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
        """Lock `path` against writers until the descriptor is closed, without changing the file.

        Return -1 if there is no such file: then no process has the store open either.
        """
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
        """Create a new file for writing; it must not exist."""
        return self.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open_to_write(self, path: str) -> int:
        return self.open(path, os.O_RDWR)

    def open_to_read(self, path: str) -> int:
        return self.open(path, os.O_RDONLY)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def write(self, fd: int, parts: list[bytes], at: int) -> None:
        """Write all of `parts` from offset `at`, with several calls if the system accepts less."""
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
                raise OSError(errno.EIO, "the system accepts no more bytes and reports no error")
            written += taken

    def write_synced(self, fd: int, parts: list[bytes], at: int) -> None:
        """Write `parts` and sync them: one system call, and so one wait less for the GIL."""
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

    def start_writeback(self, fd: int, at: int, size: int) -> None:
        """Begin to store written bytes, without waiting: a later `sync` waits for less.

        Nothing depends on it. A failure shows in that sync.
        """
        if _WRITEBACK_ADVICE < 0:
            return
        try:
            os.posix_fadvise(fd, at, size, _WRITEBACK_ADVICE)
        except OSError:
            pass  # not every file system takes advice

    def preallocate(self, fd: int, zeros: bytes, at: int) -> bool:
        """Write zeros where the file will grow, without waiting; return whether it worked.

        Nothing depends on it. A sync of data written over the zeros has no blocks to allocate and
        no new file size to store, and is therefore faster.
        """
        if _WRITEBACK_ADVICE < 0:
            return False
        try:
            if os.pwrite(fd, zeros, at) < len(zeros):
                return False
        except OSError:
            return False  # perhaps the disk is full; only the write of a frame decides that
        self.start_writeback(fd, at, len(zeros))
        return True

    def read(self, fd: int, size: int, at: int) -> bytes:
        """Read `size` bytes from offset `at`; fewer only at the end of the file."""
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
        """Return when content and file size would survive a power cut."""
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        """Remove a name. A missing name is no failure: it was removed before a crash."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass

    def sync_directory(self, path: str) -> None:
        """Return when new, changed and removed names of a directory would survive a power cut."""
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            self.close(fd)

    def close(self, fd: int) -> None:
        with self._reserve_lock:
            if self._devnull_fd >= 0 and len(self._reserve) < _RESERVED_DESCRIPTORS:
                # Atomic: no other thread can get the descriptor in between.
                os.dup2(self._devnull_fd, fd, inheritable=False)
                self._reserve.append(fd)
                return
        os.close(fd)


_MAX_PARTS_PER_WRITE: Final = 512  # systems accept at least 1,024


def write_file_atomically(files: FileSystem, directory: str, name: str, parts: list[bytes]) -> None:
    """Create or replace a file atomically: under `name` there is only synced content.

    The name itself is durable after the next `sync_directory`, which the caller has to call.
    """
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
