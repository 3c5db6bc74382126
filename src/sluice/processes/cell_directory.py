"""The directory of a node with several processes: the number of its cells, and their stores.

lock            held while the node runs, as by a node with one process
cells/count     one line of text: the number of cells; written last when the node is created
cells/<number>  the embedded store of each cell
conversion/     unfinished cells, while the store of one process is divided
run/            Unix sockets between the processes, and uploads, while they run
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from sluice.errors import StoreDamaged, StoreError, StoreNotOpened
from sluice.store.embedded import LOCK_FILE, DirectoryListing, FileSystem, write_file_atomically

CELLS_DIRECTORY: Final = "cells"
STAGING_DIRECTORY: Final = "conversion"  # unfinished cells
COUNT_FILE: Final = "count"
RUN_DIRECTORY: Final = "run"
OWN_DIRECTORIES: Final = (CELLS_DIRECTORY, STAGING_DIRECTORY, RUN_DIRECTORY)
MAX_CELLS: Final = 64
MAX_SOCKET_PATH_BYTES: Final = 95  # the system allows 103 or 107


def cell_store_path(data: Path, cell: int) -> Path:
    """Return the directory of the store of a cell."""
    return data / CELLS_DIRECTORY / str(cell)


def read_cells(data: Path) -> int:
    """Return the number of cells of a data directory; 0 if it has none."""
    path = data / CELLS_DIRECTORY / COUNT_FILE
    try:
        text = path.read_text("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as fault:
        raise StoreNotOpened(str(data), fault) from fault
    if not text.isdecimal() or not 0 < int(text) <= MAX_CELLS:
        raise StoreDamaged(
            str(path),
            0,
            "the number of cells cannot be read",
            f"Write the number of directories in {path.parent} to it, and a line feed",
        )
    return int(text)


def record_cells(data: Path, cells: int) -> None:
    """Record the number of cells; from then on they are complete."""
    files, folder = FileSystem(), str(data / CELLS_DIRECTORY)
    files.make_directory(folder)
    write_file_atomically(files, folder, COUNT_FILE, [b"%d\n" % cells])
    files.sync_directory(folder)


class CellDirectory:
    """The data directory of this node, locked from `open` to `close`."""

    def __init__(self, data: Path) -> None:
        self.path = data
        self._run = data / RUN_DIRECTORY
        self._sockets = self._run
        self._files = FileSystem()
        self._lock_fd = -1

    def open(self) -> None:
        """Lock the directory, and create it if it is missing."""
        files, path = self._files, str(self.path)
        try:
            files.make_directory(path)
            self._check_not_foreign()
            self._lock_fd = files.lock(f"{path}/{LOCK_FILE}")
            self._make_run_directory()
        except OSError as fault:
            raise StoreNotOpened(path, fault) from fault

    def _check_not_foreign(self) -> None:
        """Refuse to begin among the files of others, such as a home directory."""
        found = self._list()
        foreign = [one for one in found.foreign if one not in OWN_DIRECTORIES]
        if foreign and not found.is_store and not read_cells(self.path):
            raise StoreError(
                f"{self.path} is not a store and not empty: it has {foreign[0]!r}",
                "Give a new or empty directory; nothing was written",
            )

    def has_single_store(self) -> bool:
        """Return whether the directory has the store of a node with one process."""
        return self._list().is_store

    def delete_single_store(self) -> None:
        """Delete that store: all of it is in the cells."""
        foreign = self._list().foreign
        for name in self._files.list_names(str(self.path)):
            if name not in foreign and name != LOCK_FILE and (self.path / name).is_file():
                (self.path / name).unlink()
        self._files.sync_directory(str(self.path))

    def _list(self) -> DirectoryListing:
        return DirectoryListing(self._files.list_names(str(self.path)))

    def _make_run_directory(self) -> None:
        """Make it empty. The sockets are elsewhere if its path is too long for them."""
        shutil.rmtree(self._run, ignore_errors=True)
        self._run.mkdir(mode=0o700)
        if len(os.fsencode(self._run.absolute())) > MAX_SOCKET_PATH_BYTES:
            self._sockets = Path(tempfile.mkdtemp(prefix="sluice-"))

    def link_path(self, process: int) -> Path:
        """Return the path of the socket on which a process accepts links."""
        return self._sockets.absolute() / f"{process}.sock"

    def upload_path(self, process: int) -> Path:
        return self._run / f"uploads-{process}"

    def close(self) -> None:
        for path in {self._run, self._sockets}:
            shutil.rmtree(path, ignore_errors=True)
        self._files.close(self._lock_fd)
        self._lock_fd = -1
