"""Who has written when: read from what Redis itself has written down, its append-only file.

Redis works off one command after another, and keeps what each has changed in that order. Taking a cell raises its
fence by one; the fence's value is the owner's epoch, and the stamp of every write begins with the epoch of who wrote
it. So two owners that write at the same time would show: a write with an epoch that is not the last one, behind the
raise.
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
    """What an append-only file tells. `faults` is empty where at no time a cell had two owners that wrote."""

    def __init__(self) -> None:
        self.taken: Counter[bytes] = (
            Counter()
        )  # by the key of a cell's log: how often it has had a new owner
        self.writes = 0
        self.faults: list[str] = []
        self._last: dict[bytes, int] = {}

    def read(self, folder: Path) -> OwnerEpochs:
        """All that the Redis with this directory has kept, from its first command on."""
        for path in sorted((folder / "appendonlydir").glob("*.aof")):
            with path.open("rb") as file:
                for commands in _steps(file):
                    self._take(commands)
        return self

    def _take(self, commands: list[list[bytes]]) -> None:
        """What one call has changed: a script's commands stand between MULTI and EXEC."""
        stamped = False
        stored = b""
        for words in commands:
            name, key = words[0].upper(), words[1] if len(words) > 1 else b""
            if name in (b"INCR", b"INCRBY") and key.endswith(FENCE):
                self.taken[key.removesuffix(FENCE)] += 1
            elif name == b"HSET" and words[2] == b"stamp":
                stamped = True
                self._check_write(key, int(words[3]))
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
            self.faults.append(f"{log.decode()}: stamp {stamp} came behind {self._last[log]}")
        self._last[log] = stamp


def refused(client: redis.Redis) -> int:
    """How many writes of former owners Redis has refused."""
    reported = client.info("errorstats").get("errorstat_FENCED", {})
    return int(reported.get("count", 0))


def _steps(file: BinaryIO) -> Iterator[list[list[bytes]]]:
    together: list[list[bytes]] | None = None
    for words in _commands(file):
        name = words[0].upper()
        if name == b"MULTI":
            together = []
        elif name == b"EXEC":
            yield together or []
            together = None
        elif together is None:
            yield [words]
        else:
            together.append(words)


def _commands(file: BinaryIO) -> Iterator[list[bytes]]:
    """RESP: how many words, then each with its length before it. Lines with # are Redis's notes."""
    while line := file.readline():
        if line.startswith(b"*"):
            words = []
            for _ in range(int(line[1:])):
                size = int(file.readline()[1:])
                words.append(file.read(size))
                file.read(2)
            yield words
