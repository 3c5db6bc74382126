"""The names of the files in the embedded store's directory, and the `layout` file with its version.

lock                    held by the process that has the store open; contains its process id
layout                  one line of text: "sluice-log 1 <salt> <crc32c>"
00000001.log            a segment: adjacent frames
00000001.idx            its index, written when it is full
00000000000000a7.state  a snapshot, named by the last frame that it covers
*.tmp                   not renamed before the process ended; removed at the next start
"""

from __future__ import annotations

import errno
from typing import Final

from google_crc32c import value as crc32c

from sluice.errors import StoreUnknown
from sluice.store.embedded.files import FileSystem, read_file, write_file_atomically

LAYOUT_VERSION: Final = 1
LAYOUT_FILE: Final = "layout"
LOCK_FILE: Final = "lock"


def log_name(segment: int) -> str:
    return f"{segment:08}.log"


def index_name(segment: int) -> str:
    return f"{segment:08}.idx"


def snapshot_name(lsn: int) -> str:
    return f"{lsn:016x}.state"


class DirectoryListing:
    """The names of a directory, grouped by kind."""

    def __init__(self, names: list[str]) -> None:
        self.segments: list[int] = []
        self.snapshots: list[str] = []  # oldest first
        self.indexes: list[int] = []
        self.temporary: list[str] = []
        self.foreign: list[str] = []  # no store writes these; hidden files do not count
        self.has_layout = LAYOUT_FILE in names
        for name in sorted(names):
            stem, _, ending = name.rpartition(".")
            if ending == "tmp":
                if stem == LAYOUT_FILE or stem.endswith((".idx", ".state")):
                    self.temporary.append(name)  # no other program's: it is removed at a start
            elif ending == "log" and stem.isdigit():
                self.segments.append(int(stem))
            elif ending == "idx" and stem.isdigit():
                self.indexes.append(int(stem))
            elif ending == "state":
                self.snapshots.append(name)
            elif not name.startswith(".") and name not in (LAYOUT_FILE, LOCK_FILE, "lost+found"):
                self.foreign.append(name)
        self.segments.sort()

    @property
    def is_store(self) -> bool:
        """Return whether anything in the directory was written by a store."""
        return self.has_layout or bool(self.segments) or bool(self.snapshots)


def write_layout(files: FileSystem, directory: str, salt: int) -> None:
    content = f"sluice-log {LAYOUT_VERSION} {salt:08x}"
    line = f"{content} {crc32c(content.encode()):08x}\n".encode()
    write_file_atomically(files, directory, LAYOUT_FILE, [line])
    files.sync_directory(directory)


def read_layout(files: FileSystem, directory: str) -> int:
    """Return the salt of this store, or -1 if the file is lost, damaged or unreadable.

    Refuse an unknown layout version, so that this Sluice does not damage it.
    """
    try:
        fields = read_file(files, f"{directory}/{LAYOUT_FILE}").decode("ascii", "replace").split()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EIO):
            raise
        return -1
    if (
        len(fields) >= 2
        and fields[0] == "sluice-log"
        and fields[1].isdigit()
        and fields[1] != str(LAYOUT_VERSION)
    ):
        raise StoreUnknown(directory, fields[1], LAYOUT_VERSION)
    line = " ".join(fields[:3])
    if len(fields) != 4 or fields[0] != "sluice-log" or fields[3] != f"{crc32c(line.encode()):08x}":
        return -1
    try:
        return int(fields[2], 16)
    except ValueError:
        return -1
