"""What lies in the directory of the embedded store, by name, and the file that says which layout this is.

lock                    held by the process that has the store open; its number is inside, for people
layout                  one line of text: "sluice-log 1 <salt> <crc32c>"
00000001.log            a segment: frames, one behind the other
00000001.idx            its index, written when it is full
00000000000000a7.state  a snapshot, named by the last frame that it covers
*.tmp                   a file that had not got its name when the process ended; removed at the next start
"""

from __future__ import annotations

from typing import Final

from google_crc32c import value as crc32c

from sluice.errors import StoreDamaged, StoreUnknown
from sluice.store.embedded.files import Files, read_whole, write_whole

VERSION: Final = 1
LAYOUT: Final = "layout"
LOCK: Final = "lock"


def log_name(segment: int) -> str:
    return f"{segment:08}.log"


def index_name(segment: int) -> str:
    return f"{segment:08}.idx"


def snapshot_name(lsn: int) -> str:
    return f"{lsn:016x}.state"


class Listing:
    """The names of a directory, sorted by what they are."""

    def __init__(self, names: list[str]) -> None:
        self.segments: list[int] = []
        self.snapshots: list[str] = []  # oldest first
        self.indexes: list[int] = []
        self.temporary: list[str] = []
        self.has_layout = LAYOUT in names
        for name in sorted(names):
            stem, _, ending = name.rpartition(".")
            if ending == "tmp":
                self.temporary.append(name)
            elif ending == "log" and stem.isdigit():
                self.segments.append(int(stem))
            elif ending == "idx" and stem.isdigit():
                self.indexes.append(int(stem))
            elif ending == "state":
                self.snapshots.append(name)
        self.segments.sort()


def write_layout(files: Files, directory: str, salt: int) -> None:
    words = f"sluice-log {VERSION} {salt:08x}"
    line = f"{words} {crc32c(words.encode()):08x}\n".encode()
    write_whole(files, directory, LAYOUT, [line])
    files.sync_directory(directory)


def read_layout(files: Files, directory: str) -> int:
    """The salt of this store. Refuses a layout that this Sluice does not know before it can do harm to it."""
    path = f"{directory}/{LAYOUT}"
    words = read_whole(files, path).decode("ascii", "replace").split()
    if len(words) >= 2 and words[0] == "sluice-log" and words[1].isdigit() and words[1] != str(VERSION):
        raise StoreUnknown(directory, words[1], VERSION)
    line = " ".join(words[:3])
    if len(words) != 4 or words[0] != "sluice-log" or words[3] != f"{crc32c(line.encode()):08x}":
        raise StoreDamaged(
            path,
            0,
            "the file that names the layout is not what was written",
            "Restore this small file from a backup; the log cannot be read without its salt",
        )
    return int(words[2], 16)
