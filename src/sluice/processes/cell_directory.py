"""The directory of a node with several processes: the number of its cells, and their stores.

lock            held while the node runs, as by a node with one process
cells/count     one line of text: the number of cells; written last when the node is created
cells/<number>  the embedded store of each cell
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
COUNT_FILE: Final = "count"
RUN_DIRECTORY: Final = "run"
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


class CellDirectory:
    """The data directory of this node, locked from `open` to `close`."""

    def __init__(self, data: Path) -> None:
        self.path = data
        self._run = data / RUN_DIRECTORY
        self._sockets = self._run
        self._files = FileSystem()
        self._lock_fd = -1

    def open(self, cells: int) -> int:
        """Lock the directory, create `cells` cells if it is new, and return their number."""
        files, path = self._files, str(self.path)
        try:
            files.make_directory(path)
            self._check_usable()
            self._lock_fd = files.lock(f"{path}/{LOCK_FILE}")
            found = read_cells(self.path)
            if not found:
                self._create(cells)
            self._make_run_directory()
            return found or cells
        except OSError as fault:
            raise StoreNotOpened(path, fault) from fault

    def _check_usable(self) -> None:
        if read_cells(self.path):
            return
        found = DirectoryListing(self._files.list_names(str(self.path)))
        foreign = [one for one in found.foreign if one not in (CELLS_DIRECTORY, RUN_DIRECTORY)]
        if found.is_store:
            raise StoreError(
                f"{self.path} has the store of a node with one process",
                "Start with --processes 1, or give --data a new directory",
            )
        if foreign:
            raise StoreError(
                f"{self.path} is not a store and not empty: it has {foreign[0]!r}",
                "Give a new or empty directory; nothing was written",
            )

    def _create(self, cells: int) -> None:
        """Record the number of cells; each store is created when it is opened."""
        folder = str(self.path / CELLS_DIRECTORY)
        self._files.make_directory(folder)
        write_file_atomically(self._files, folder, COUNT_FILE, [b"%d\n" % cells])
        self._files.sync_directory(folder)

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
