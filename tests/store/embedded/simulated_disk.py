"""A disk with a volatile cache: a power cut may lose unsynced data, in whole or in part.

It replaces `FileSystem`. After `cut_after(n)` the nth change is the last; then every call raises
`PowerCut`. `reboot()` decides at random, sector by sector and name by name, what was written:

  * a file that was written and not synced: each 512-byte sector new or old (zeros if there was
    none), any length between the old one and the new one
  * names that were created, changed or removed without a `sync_directory`: each of these changes
    happened or did not, independently
  * a write in progress: any beginning of it
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Sequence

from sluice.store.embedded import FileSystem

SECTOR_BYTES = 512
LAID_OUT_BYTES = 4096


class PowerCut(Exception):
    """The power is off."""


def check_power_cut(failures: Sequence[Exception]) -> None:
    """Fail unless the store failed because the power was cut.

    The store turns every exception in its threads into a failure of its own. Without this check, an
    assertion of the double (or a bug of the writer) would look like one more power cut.
    """
    for failure in failures:
        if not isinstance(failure.__cause__, PowerCut):
            raise AssertionError(f"the store failed without a power cut: {failure}") from failure


class Inode:
    def __init__(self) -> None:
        self.data = bytearray()
        self.synced = b""


class Disk(FileSystem):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.draw = draw
        self.changes = 0
        self.direct_frame_count = 0  # frames that the thread of this object wrote
        self._creator = threading.get_ident()
        self._names: dict[str, Inode] = {}
        self._synced_names: dict[str, Inode] = {}
        # removed name, new name, inode
        self._name_changes: list[tuple[str, str, Inode]] = []
        self._open: dict[int, Inode] = {}
        self._next_fd = 1000
        self._left: int | None = None
        self._off = False

    # -- the power

    def cut_after(self, changes: int | None) -> None:
        self._left = changes

    def reboot(self) -> None:
        names = dict(self._synced_names)
        for removed, added, inode in self._name_changes:
            if self.draw.random() < 0.5:
                names.pop(removed, None)
                if added:
                    names[added] = inode
        for inode in set(names.values()):
            inode.data = self._surviving(inode)
            inode.synced = bytes(inode.data)
        self._names, self._synced_names, self._name_changes = names, dict(names), []
        self._open.clear()
        self._left, self._off = None, False

    def restart(self) -> None:
        """Restart after a kill of the process: the cache is intact, and still volatile."""
        self._open.clear()
        self._left, self._off = None, False

    def _surviving(self, inode: Inode) -> bytearray:
        new, old = bytes(inode.data), inode.synced
        if new == old:
            return bytearray(old)
        short, long = sorted((len(new), len(old)))
        size = self.draw.choice((short, long, self.draw.randint(short, long)))
        left = bytearray(size)
        fate = self.draw.choice(("old", "new", "mixed", "hole"))
        hole = self.draw.randint(min(short, size), size) // SECTOR_BYTES * SECTOR_BYTES
        for at in range(0, size, SECTOR_BYTES):
            end = min(at + SECTOR_BYTES, size)
            of_new = fate == "new" or (fate == "mixed" and self.draw.random() < 0.5)
            of_new = of_new or (fate == "hole" and at != hole)
            sector = (new if of_new else old)[at:end]
            left[at : at + len(sector)] = sector
        return left

    def _change(self) -> None:
        self._check()
        self.changes += 1
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._off = True

    def _check(self) -> None:
        if self._off:
            raise PowerCut("the power is cut")

    # -- for tests that read or create files

    def files(self) -> dict[str, bytes]:
        return {path: bytes(inode.data) for path, inode in self._names.items()}

    def put(self, path: str, data: bytes) -> None:
        inode = self._names[path] = self._synced_names[path] = Inode()
        inode.data = bytearray(data)
        inode.synced = data

    # -- the FileSystem interface

    def make_directory(self, path: str) -> None:
        self._check()

    def list_names(self, directory: str) -> list[str]:
        self._check()
        return [name.rpartition("/")[2] for name in self._names]

    def lock(self, path: str) -> int:
        self._check()
        return self._descriptor(Inode())

    def create(self, path: str) -> int:
        self._change()
        self._check()
        assert path not in self._names, path
        inode = self._names[path] = Inode()
        self._name_changes.append(("", path, inode))
        return self._descriptor(inode)

    def open_to_write(self, path: str) -> int:
        return self.open_to_read(path)

    def open_to_read(self, path: str) -> int:
        self._check()
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return self._descriptor(self._names[path])

    def _descriptor(self, inode: Inode) -> int:
        self._next_fd += 1
        self._open[self._next_fd] = inode
        return self._next_fd

    def size(self, fd: int) -> int:
        self._check()
        return len(self._open[fd].data)

    def write(self, fd: int, parts: list[bytes], at: int) -> None:
        if len(parts) == 2 and threading.get_ident() == self._creator:
            self.direct_frame_count += 1
        self._change()
        inode, data = self._open[fd], b"".join(parts)
        if self._off:
            data = data[: self.draw.randint(0, len(data))]
        assert at <= len(inode.data), "a hole in the log"
        inode.data[at : at + len(data)] = data
        self._check()

    def read(self, fd: int, size: int, at: int) -> bytes:
        self._check()
        return bytes(self._open[fd].data[at : at + size])

    def write_synced(self, fd: int, parts: list[bytes], at: int) -> None:
        inode = self._open[fd]
        assert bytes(inode.data[:at]) == inode.synced[:at], (
            "it syncs only its own bytes, and older ones are unsynced"
        )
        self.write(fd, parts, at)
        self._change()
        if not self._off or self.draw.random() < 0.5:
            end = at + sum(len(part) for part in parts)
            # Later bytes may be lost.
            inode.synced = bytes(inode.data[:end]) + inode.synced[end:]
        self._check()

    def start_writeback(self, fd: int, at: int, size: int) -> None:
        """A power cut may keep any part of unsynced bytes, with or without it."""

    def preallocate(self, fd: int, zeros: bytes, at: int) -> bool:
        """Write only a few zeros.

        Frames after them are appended, and one zero is enough to find a log that was not truncated.
        """
        if at <= len(self._open[fd].data):
            self.write(fd, [zeros[:LAID_OUT_BYTES]], at)
        return True

    def sync(self, fd: int) -> None:
        self._change()
        # It may have succeeded without a confirmation.
        if not self._off or self.draw.random() < 0.5:
            inode = self._open[fd]
            inode.synced = bytes(inode.data)
        self._check()

    def truncate(self, fd: int, size: int) -> None:
        self._change()
        self._check()
        del self._open[fd].data[size:]

    def rename(self, old: str, new: str) -> None:
        self._change()
        self._check()
        inode = self._names[new] = self._names.pop(old)
        self._name_changes.append((old, new, inode))

    def unlink(self, path: str) -> None:
        self._change()
        self._check()
        if path in self._names:
            self._name_changes.append((path, "", self._names.pop(path)))

    def sync_directory(self, path: str) -> None:
        self._change()
        if not self._off or self.draw.random() < 0.5:
            self._synced_names, self._name_changes = dict(self._names), []
        self._check()

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
