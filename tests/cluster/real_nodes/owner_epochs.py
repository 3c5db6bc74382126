"""Find writes by two owners of a cell in the append-only file of Redis.

Redis runs one command after another and logs changes in that order. Claiming a cell raises its
fence by one; the value of the fence is the owner's epoch, and the stamp of every write begins with
the epoch of its writer. So two owners that write at the same time show as a write with an old epoch
after the raise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import redis

from sluice.store.redis.scripts import STAMP_UNIT

FENCE = b":fence"


class OwnerEpochs:
    """The result for one append-only file. `faults` is empty if no cell had two writing owners."""

    def __init__(self) -> None:
        # By the key of a cell's log: the number of its owners.
        self.taken: Counter[bytes] = Counter()
        self.writes = 0
        self.faults: list[str] = []
        self._last: dict[bytes, int] = {}

    def read(self, folder: Path) -> OwnerEpochs:
        """Read all commands that the Redis with this directory has logged."""
        for path in sorted((folder / "appendonlydir").glob("*.aof")):
            with path.open("rb") as file:
                for commands in _steps(file):
                    self._take(commands)
        return self

    def _take(self, commands: list[list[bytes]]) -> None:
        """Apply the changes of one call: the commands of a script are between MULTI and EXEC."""
        stamped = False
        stored = b""
        for arguments in commands:
            name, key = arguments[0].upper(), arguments[1] if len(arguments) > 1 else b""
            if name in (b"INCR", b"INCRBY") and key.endswith(FENCE):
                self.taken[key.removesuffix(FENCE)] += 1
            elif name == b"HSET" and arguments[2] == b"stamp":
                stamped = True
                self._check_write(key, int(arguments[3]))
            elif name == b"XADD":
                stored = key
        if stored and not stamped:
            self.faults.append(f"{stored.decode()} was written to without a stamp")

    def _check_write(self, log: bytes, stamp: int) -> None:
        self.writes += 1
        epoch, newest = stamp // STAMP_UNIT, self.taken[log]
        if epoch != newest:
            self.faults.append(f"{log.decode()}: epoch {epoch} wrote when {newest} was the owner's")
        elif stamp <= self._last.get(log, 0):
            self.faults.append(f"{log.decode()}: stamp {stamp} came after {self._last[log]}")
        self._last[log] = stamp


def refused(client: redis.Redis) -> int:
    """Return how many writes of former owners Redis has refused."""
    reported = client.info("errorstats").get("errorstat_FENCED", {})
    return int(reported.get("count", 0))


def _steps(file: BinaryIO) -> Iterator[list[list[bytes]]]:
    together: list[list[bytes]] | None = None
    for arguments in _commands(file):
        name = arguments[0].upper()
        if name == b"MULTI":
            together = []
        elif name == b"EXEC":
            yield together or []
            together = None
        elif together is None:
            yield [arguments]
        else:
            together.append(arguments)


def _commands(file: BinaryIO) -> Iterator[list[bytes]]:
    """Parse RESP: a count, then each argument after its length. Lines with # are annotations."""
    while line := file.readline():
        if line.startswith(b"*"):
            arguments = []
            for _ in range(int(line[1:])):
                size = int(file.readline()[1:])
                arguments.append(file.read(size))
                file.read(2)
            yield arguments
