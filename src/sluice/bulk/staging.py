"""Stages: uploaded batches before their commit, in files, or in memory for a store without files.

A stage is one Arrow stream as received. It waits for its commit, an abort or the end of its time. A
restart deletes all stages: a client whose commit was not acknowledged sends its rows again. The
stages belong to the loop of the HTTP API and touch no queue.
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

STAGES_DIRECTORY: Final = "bulk/stages"


def discard_stages(folder: Path) -> None:
    """Remove the stages of a previous run; no commit can name them anymore."""
    shutil.rmtree(folder / STAGES_DIRECTORY, ignore_errors=True)


class Stage:
    def __init__(self, name: str, app: str, batch: int, queue: str, path: Path | None) -> None:
        self.name = name
        self.app = app
        self.batch = batch
        self.queue = queue  # for rows that name none
        self.path = path
        self.data = b""  # used if path is None
        self.rows = 0
        self.bytes = 0
        self.unpacked_bytes = 0  # size after decompression
        self.last_active_at = 0.0
        self.is_complete = False
        self.is_dropped = False
        self.readers = 0  # commits that read the stage; it stays readable until they are done


class Upload:
    """A stage that is being received."""

    def __init__(self, stages: StageStore, stage: Stage) -> None:
        self.stage = stage
        self._stages = stages
        self._file: IO[bytes] = BytesIO() if stage.path is None else stage.path.open("xb")

    def write(self, data: bytes) -> None:
        """Write to the page cache or memory. No sync: no commit relies on a stage."""
        self._stages.check_limits(self.stage, len(data))
        try:
            self._file.write(data)
        except OSError as fault:
            raise StageUnwritable(fault) from fault
        self.stage.bytes += len(data)
        self._stages.bytes += len(data)

    def close_file(self) -> None:
        if isinstance(self._file, BytesIO):
            self.stage.data = self._file.getvalue()
        try:
            self._file.close()
        except OSError as fault:  # the rest of the buffer
            raise StageUnwritable(fault) from fault

    def complete(self, rows: int, unpacked_bytes: int) -> Stage:
        """Mark the stage as complete and checked."""
        self._stages.check_limits(self.stage, 0)
        self.stage.rows = rows
        self.stage.unpacked_bytes = unpacked_bytes
        self.stage.is_complete = True
        return self.stage

    def abandon(self) -> None:
        with suppress(OSError):  # on a full disk the rest of the buffer fails too
            self._file.close()
        self._stages.drop_stage(self.stage)


class StageStore:
    """All stages. `data` is the directory of the store, None for a store in memory.

    `max_batch_bytes` bounds the size of one commit, as received and decompressed; `max_bytes`
    bounds all stages together; `seconds` is how long a stage waits.
    """

    def __init__(
        self,
        data_directory: Path | None,
        max_batch_bytes: int,
        max_bytes: int,
        ttl_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        max_batch_rows: int = 1_000_000,
    ) -> None:
        self._directory = None if data_directory is None else data_directory / STAGES_DIRECTORY
        self.max_batch_bytes = max_batch_bytes
        self.max_batch_rows = max_batch_rows  # a row takes memory even if it has no bytes
        self._max_bytes = max_bytes
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._stages: dict[str, Stage] = {}
        self.bytes = 0

    def begin(self, app: str, batch: int, queue: str) -> Upload:
        self.drop_expired()
        name = secrets.token_hex(8)
        path = None
        if self._directory is not None:
            path = self._directory / f"{name}.arrow"
        stage = Stage(name, app, batch, queue, path)
        stage.last_active_at = self._clock()
        try:
            if self._directory is not None:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            upload = Upload(self, stage)
        except OSError as fault:
            raise StageUnwritable(fault) from fault
        self._stages[name] = stage
        return upload

    def check_limits(self, stage: Stage, extra_bytes: int) -> None:
        if stage.bytes + extra_bytes > self.max_batch_bytes:
            raise BatchTooLarge(
                stage.app, stage.batch, stage.bytes + extra_bytes, self.max_batch_bytes
            )
        if self.bytes + extra_bytes > self._max_bytes:
            self.drop_expired()
            if self.bytes + extra_bytes > self._max_bytes:
                raise StagesFull(self._max_bytes)
        if stage.is_dropped:
            raise StaleBatch(stage.app, stage.batch, "it was aborted during its upload")
        stage.last_active_at = self._clock()

    def find(self, app: str, batch: int, names: list[str]) -> list[Stage]:
        """Return the stages of a batch to commit, in this order."""
        self.drop_expired()
        found: list[Stage] = []
        for name in names:
            stage = self._stages.get(name)
            if stage is None or not stage.is_complete or (stage.app, stage.batch) != (app, batch):
                raise StaleBatch(app, batch, f"stage {name!r} does not exist")
            found.append(stage)
        size = sum(stage.bytes for stage in found)
        unpacked_bytes = sum(stage.unpacked_bytes for stage in found)
        if max(size, unpacked_bytes) > self.max_batch_bytes:
            raise BatchTooLarge(
                app, batch, max(size, unpacked_bytes), self.max_batch_bytes, unpacked_bytes > size
            )
        rows = sum(stage.rows for stage in found)
        if rows > self.max_batch_rows:
            raise TooManyRows(app, batch, rows, self.max_batch_rows)
        return found

    def drop_batch(self, app: str, batch: int) -> int:
        """Delete all stages of a batch and return their number."""
        batch_stages = [
            stage for stage in self._stages.values() if (stage.app, stage.batch) == (app, batch)
        ]
        for stage in batch_stages:
            self.drop_stage(stage)
        return len(batch_stages)

    def drop_stage(self, stage: Stage) -> None:
        if self._stages.pop(stage.name, None) is None:
            return
        stage.is_dropped = True
        if not stage.readers:
            self._delete_data(stage)

    @contextmanager
    def hold_open(self, found: list[Stage]) -> Iterator[None]:
        """Keep stages readable while another commit or abort of the same batch drops them."""
        for stage in found:
            stage.readers += 1
        try:
            yield
        finally:
            for stage in found:
                stage.readers -= 1
                if stage.is_dropped and not stage.readers:
                    self._delete_data(stage)

    def _delete_data(self, stage: Stage) -> None:
        stage.data = b""
        self.bytes -= stage.bytes
        if stage.path is not None:
            stage.path.unlink(missing_ok=True)

    def drop_expired(self) -> None:
        expired_before = self._clock() - self._ttl_seconds
        for stage in [one for one in self._stages.values() if one.last_active_at < expired_before]:
            self.drop_stage(stage)

    def close(self) -> None:
        for stage in list(self._stages.values()):
            self.drop_stage(stage)
        if self._directory is not None and self._directory.is_dir():
            shutil.rmtree(self._directory, ignore_errors=True)
            try:
                os.rmdir(self._directory.parent)
            except OSError:
                pass  # the directory holds other files
