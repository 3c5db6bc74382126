"""A disk and a clock that the test controls, for a broker process: compiles shim.c once.

    shim = Shim(folder)
    broker = Broker(folder, "", (), shim.environ)
    shim.order(sync_delay=200_000)
    shim.order(room=0)              # the disk is full from the next write on

It needs a C compiler and no privileges.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tests.support.external_programs import need_program

SOURCE = Path(__file__).with_name("shim.c")
ORDERS = (
    "sync_delay",  # microseconds
    "write_delay",
    "room",  # bytes; -1: no limit
    "write_errno",  # error of writes; 0: none
    "sync_errno",
    "read_errno",
    "good_reads",  # number of reads before the first failure
    "create_errno",
    "wall_offset",  # seconds
    "failures",  # number of failed calls so far
)


@cache
def library() -> Path:
    """Return the compiled shim, built once per run."""
    path = Path(mkdtemp(prefix="sluice-shim-")) / "shim.so"
    compiler = need_program("gcc")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", path, SOURCE, "-ldl"], check=True)
    return path


class Shim:
    def __init__(self, folder: Path) -> None:
        path = folder / "orders"
        path.write_bytes(bytes(8 * len(ORDERS)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * len(ORDERS))
        self.environ = {"LD_PRELOAD": str(library()), "SHIM_ORDERS": str(path)}
        self.reset()

    def order(self, **orders: int) -> None:
        """Set values by the names in ORDERS; they apply from the next system call on."""
        for name, value in orders.items():
            struct.pack_into("<q", self._map, 8 * ORDERS.index(name), value)

    def reset(self) -> None:
        """Restore normal behavior."""
        self.order(**{name: -1 if name == "room" else 0 for name in ORDERS})

    def counter(self, name: str) -> int:
        value: int = struct.unpack_from("<q", self._map, 8 * ORDERS.index(name))[0]
        return value
