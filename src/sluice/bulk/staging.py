"""Batches on their way in: what was sent and is not committed yet, in files, or in memory for a store without any.

A stage is one Arrow stream, as it came. It waits for its commit, an abort, or the end of its time; a start finds
nothing of it, because whoever had not heard of a commit sends again. It lives on the door's loop and touches no
queue.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO, Final

from sluice.errors import BatchTooLarge, StagesFull, StageUnwritable, StaleBatch, TooManyRows

FOLDER: Final = "bulk/stages"


class Stage:
    def __init__(self, name: str, app: str, batch: int, queue: str, path: Path | None) -> None:
        self.name = name
        self.app = app
        self.batch = batch
        self.queue = queue  # of rows that name none
        self.path = path
        self.data = b""  # without a path
        self.rows = 0
        self.bytes = 0
        self.unpacked = 0  # bytes, if it is compressed
        self.since = 0.0
        self.is_whole = False
        self.is_dropped = False
        self.readers = 0  # commits that are at it: it stays readable until they are done


class Upload:
    """A stage that is being received."""

    def __init__(self, stages: Stages, stage: Stage) -> None:
        self.stage = stage
        self._stages = stages
        self._file: IO[bytes] = BytesIO() if stage.path is None else stage.path.open("xb")

    def write(self, data: bytes) -> None:
        """Into the page cache, or memory: a sync would promise what no commit relies on."""
        self._stages.check(self.stage, len(data))
        try:
            self._file.write(data)
        except OSError as fault:
            raise StageUnwritable(fault) from fault
        self.stage.bytes += len(data)
        self._stages.bytes += len(data)

    def end(self) -> None:
        if isinstance(self._file, BytesIO):
            self.stage.data = self._file.getvalue()
        try:
            self._file.close()
        except OSError as fault:  # what was still in the buffer
            raise StageUnwritable(fault) from fault

    def finish(self, rows: int, unpacked: int) -> Stage:
        """It is whole, and was looked through."""
        self._stages.check(self.stage, 0)
        self.stage.rows = rows
        self.stage.unpacked = unpacked
        self.stage.is_whole = True
        return self.stage

    def abandon(self) -> None:
        with suppress(OSError):  # a full disk does not take the rest either
            self._file.close()
        self._stages.drop_one(self.stage)


class Stages:
    """`data` is the directory of the store, None for one in memory. `max_batch_bytes` bounds what one commit may bring,
    as it comes and unpacked, `max_bytes` all stages together, `seconds` how long one waits."""

    def __init__(
        self,
        data: Path | None,
        max_batch_bytes: int,
        max_bytes: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        max_batch_rows: int = 1_000_000,
    ) -> None:
        self._folder = None if data is None else data / FOLDER
        self.max_batch_bytes = max_batch_bytes
        self.max_batch_rows = max_batch_rows  # a row takes memory even if it has no bytes
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._stages: dict[str, Stage] = {}
        self.bytes = 0
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def begin(self, app: str, batch: int, queue: str) -> Upload:
        self.drop_old()
        name = secrets.token_hex(8)
        path = None
        if self._folder is not None:
            path = self._folder / f"{name}.arrow"
        stage = Stage(name, app, batch, queue, path)
        stage.since = self._clock()
        try:
            if self._folder is not None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            upload = Upload(self, stage)
        except OSError as fault:
            raise StageUnwritable(fault) from fault
        self._stages[name] = stage
        return upload

    def check(self, stage: Stage, more: int) -> None:
        if stage.bytes + more > self.max_batch_bytes:
            raise BatchTooLarge(stage.app, stage.batch, stage.bytes + more, self.max_batch_bytes)
        if self.bytes + more > self._max_bytes:
            self.drop_old()
            if self.bytes + more > self._max_bytes:
                raise StagesFull(self._max_bytes)
        if stage.is_dropped:
            raise StaleBatch(stage.app, stage.batch, "it was aborted while it came in")
        stage.since = self._clock()

    def find(self, app: str, batch: int, names: list[str]) -> list[Stage]:
        """The stages of a batch that is to be committed, in this order."""
        self.drop_old()
        found: list[Stage] = []
        for name in names:
            stage = self._stages.get(name)
            if stage is None or not stage.is_whole or (stage.app, stage.batch) != (app, batch):
                raise StaleBatch(app, batch, f"stage {name!r} is not there")
            found.append(stage)
        size = sum(stage.bytes for stage in found)
        unpacked = sum(stage.unpacked for stage in found)
        if max(size, unpacked) > self.max_batch_bytes:
            raise BatchTooLarge(app, batch, max(size, unpacked), self.max_batch_bytes, unpacked > size)
        rows = sum(stage.rows for stage in found)
        if rows > self.max_batch_rows:
            raise TooManyRows(app, batch, rows, self.max_batch_rows)
        return found

    def drop(self, app: str, batch: int) -> int:
        """Everything of a batch; how many stages that were."""
        mine = [stage for stage in self._stages.values() if (stage.app, stage.batch) == (app, batch)]
        for stage in mine:
            self.drop_one(stage)
        return len(mine)

    def drop_one(self, stage: Stage) -> None:
        if self._stages.pop(stage.name, None) is None:
            return
        stage.is_dropped = True
        if not stage.readers:
            self._give_back(stage)

    @contextmanager
    def reading(self, found: list[Stage]) -> Iterator[None]:
        """Somebody else's commit or abort of the same batch takes nothing away from who reads it meanwhile."""
        for stage in found:
            stage.readers += 1
        try:
            yield
        finally:
            for stage in found:
                stage.readers -= 1
                if stage.is_dropped and not stage.readers:
                    self._give_back(stage)

    def _give_back(self, stage: Stage) -> None:
        stage.data = b""
        self.bytes -= stage.bytes
        if stage.path is not None:
            stage.path.unlink(missing_ok=True)

    def drop_old(self) -> None:
        late = self._clock() - self._seconds
        for stage in [one for one in self._stages.values() if one.since < late]:
            self.drop_one(stage)

    def close(self) -> None:
        for stage in list(self._stages.values()):
            self.drop_one(stage)
        if self._folder is not None and self._folder.is_dir():
            shutil.rmtree(self._folder, ignore_errors=True)
            try:
                os.rmdir(self._folder.parent)
            except OSError:
                pass  # something else is in it
