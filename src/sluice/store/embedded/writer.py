"""The writer thread: the only one that changes files while the store is open.

It takes jobs in the order in which the loop gave them, and so the order of commits is the order on disk. It tells the
loop of each with one `call_soon_threadsafe`. The first failure is its last act: after a failed write or sync nobody
knows what the disk holds (the kernel may have dropped the dirty pages and forgotten the error), so nothing is tried
again, nothing more is acknowledged, and the next start finds out.

A commit takes the GIL twice, and a loop that is never idle hardly lets go of it: with Python's switch interval
of 5 ms and a loop kept busy, the slowest hundredth of commits took 0.2 to 2 s; with 0.5 ms or less, 9 to 20 ms. The
likely cause is that the loop gives the GIL up for too short a time for this thread to wake, and often enough that the
interval never runs out. The program that runs the loop should lower it (`sys.setswitchinterval`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.errors import StoreFailed
from sluice.store.embedded.files import Files
from sluice.store.embedded.frame_format import FRAME_BYTES, collect_rows, frame_head
from sluice.store.embedded.segment_index import write_index
from sluice.store.embedded.layout import Listing, index_name, log_name
from sluice.store.embedded.log_recovery import Recovered
from sluice.store.embedded.snapshot_file import write_snapshot

_LOOK_SECONDS: Final = 1.0  # between looks for room on the disk, while anything is written,
_LOOK_BYTES: Final = 4 << 20  # or so many bytes
# The open segment has zeros behind the end of the log, where small frames will go: see `_lay_out`.
_ZEROS: Final = bytes(1 << 20)
_SMALL_FRAME: Final = 128 << 10
_NO_MORE: Final = 1 << 40  # beyond any segment: nothing is laid out in this one


class Job:
    """Something for the writer to do."""


class CommitJob(Job):
    def __init__(self, frame: bytes, count: int, sync: bool, roll: bool, done: Callable[[], None]) -> None:
        self.frame = frame
        self.count = count
        self.sync = sync
        self.roll = roll  # this frame fills its segment
        self.done = done


class BeginJob(Job):
    """A snapshot is begun: what it covers ends where the log ends now."""

    def __init__(self, kept: list[int]) -> None:
        self.kept = kept  # the segments that there are now
        self.lsn: i64 = 0
        self.segment: i64 = 0
        self.offset: i64 = 0


class SnapshotJob(Job):
    def __init__(
        self, begun: BeginJob, state: list[bytes], free: list[int], done: Callable[[], None]
    ) -> None:
        self.begun = begun
        self.state = state
        self.free = free
        self.done = done


class SealJob(Job):
    """The open segment ends here, full or not."""


class StopJob(Job):
    pass


class Writer:
    def __init__(
        self,
        files: Files,
        directory: str,
        salt: int,
        log: Recovered,
        segment_bytes: int,
        sync_seconds: float,
        min_free_bytes: int,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
        on_free: Callable[[list[int]], None],
        on_short: Callable[[str], None],
    ) -> None:
        self._files = files
        self._directory = directory
        self._salt: i64 = salt
        self._fd = log.fd
        self._segment: i64 = log.segment
        self._offset: i64 = log.offset
        self._lsn: i64 = log.lsn
        self._rows = log.rows
        self._segment_bytes: i64 = segment_bytes
        self._laid_out: i64 = 0  # zeros reach from the end of the log to here, if that is behind it
        self._unsynced: i64 = 0  # frames written since the last sync
        self._sync_due = 0.0
        self._sync_seconds = sync_seconds
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        self._on_free = on_free
        self._on_short = on_short
        self._min_free = min_free_bytes
        self._is_short = False  # of room on the disk
        self._looked_at = 0.0  # for room
        self._since_look: i64 = 0  # bytes written
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        # Not `_thread`: that is `__thread` in the compiled build, a word of C.
        self._worker = threading.Thread(target=self._run, name="sluice-log-writer", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """Finish every job given so far, sync, and end the thread; without a sync if the thread has failed."""
        self._jobs.put(StopJob())
        self._worker.join()
        self._files.close(self._fd)

    # -- in the thread

    def _run(self) -> None:
        try:
            self._look_for_room()
            while self._step():
                pass
        except Exception as error:
            fault = StoreFailed(f"{type(error).__name__}: {error}")
            fault.__cause__ = error
            self._tell_failure(fault)

    def _step(self) -> bool:
        job = self._next_job()
        if job is None:
            if self._unsynced > 0 and self._sync_due <= time.monotonic():
                self._sync()
            if self._is_short:
                self._look_for_room()
        elif isinstance(job, CommitJob):
            self._commit(job)
        elif isinstance(job, SnapshotJob):
            self._snapshot(job)
        elif isinstance(job, SealJob):
            self._roll()
        elif isinstance(job, BeginJob):
            job.lsn = self._lsn
            job.segment = self._segment
            job.offset = self._offset
        else:
            self._sync()
            self._cut()
            return False
        return True

    def _next_job(self) -> Job | None:
        """The next job; None when frames have waited for their sync as long as they may, or it is time to see whether
        there is room again."""
        if self._unsynced == 0 and not self._is_short:
            return self._jobs.get()
        until = self._sync_due if self._unsynced > 0 else self._looked_at + _LOOK_SECONDS
        wait = until - time.monotonic()
        if wait <= 0:
            return None
        try:
            return self._jobs.get(True, wait)
        except queue.Empty:
            return None

    def _commit(self, job: CommitJob) -> None:
        body = job.frame
        first = self._segment << 32 | (self._offset + FRAME_BYTES)
        if not collect_rows(self._rows, body, job.count, first):
            raise ValueError(f"a frame of {len(body)} bytes does not hold the {job.count} records it should")
        head = frame_head(len(body), job.count, self._unsynced, self._lsn + 1, self._salt)
        at_once = job.sync and self._unsynced == 0  # nothing older waits for a sync
        if at_once:
            self._files.write_synced(self._fd, [head, body], int(self._offset))
        else:
            self._files.write(self._fd, [head, body], int(self._offset))
        self._lsn += 1
        self._offset += FRAME_BYTES + len(body)
        if not at_once:
            self._unsynced += 1
            if job.sync:
                self._sync()
            elif self._unsynced == 1:
                self._sync_due = time.monotonic() + self._sync_seconds
        self._tell(job.done)
        if job.roll:
            self._roll()
        elif (
            len(body) < _SMALL_FRAME
            and self._laid_out - self._offset < len(_ZEROS) // 2
            and not self._is_short
        ):
            self._lay_out()
        self._since_look += FRAME_BYTES + len(body)
        if self._since_look > _LOOK_BYTES or time.monotonic() - self._looked_at > _LOOK_SECONDS:
            self._look_for_room()

    def _lay_out(self) -> None:
        """Make the next frames cheap to sync. One that is appended makes the file longer, and a sync then keeps its new
        size and blocks as well as its bytes: twice the time, half as much CPU again, and a long wait now and then. It
        is done when publishers have their answer. Large frames have little of that, and would be written twice."""
        start = max(self._laid_out, self._offset)
        size = min(i64(len(_ZEROS)), self._segment_bytes - start)
        if size <= 0:
            return  # what is left of the segment has them
        if self._files.lay_out(self._fd, _ZEROS if size == len(_ZEROS) else bytes(size), int(start)):
            self._laid_out = start + size
        else:
            self._files.truncate(self._fd, int(self._offset))  # the last room is for frames
            self._laid_out = _NO_MORE

    def _cut(self) -> bool:
        """Take away the zeros behind the log; whether there were any."""
        if self._laid_out <= self._offset:
            return False
        self._files.truncate(self._fd, int(self._offset))
        self._laid_out = 0
        return True

    def _look_for_room(self) -> None:
        """Say so before the disk is full: publishers can be refused, a write that fails is the end. What is settled
        goes on being written, and gives room back."""
        self._looked_at = time.monotonic()
        self._since_look = 0
        if self._min_free == 0:
            return
        try:
            free = self._files.free_bytes(self._directory)
        except OSError:
            return  # whether a write succeeds is what counts
        enough = self._min_free + self._min_free // 4 if self._is_short else self._min_free
        if (free < enough) != self._is_short:
            self._is_short = free < enough
            why = (
                f"{free >> 20} MiB are left on the disk of {self._directory}, and disk.min_free is "
                f"{self._min_free >> 20} MiB"
            )
            self._tell_short(why if self._is_short else "")

    def _sync(self) -> None:
        if self._unsynced > 0:
            self._files.sync(self._fd)
            self._unsynced = 0

    def _roll(self) -> None:
        """Seal the segment and begin the next. The sync comes first: that a segment has a successor is what tells
        recovery that every frame in it was whole, and that nothing else is in it."""
        if self._cut():
            self._files.sync(self._fd)
            self._unsynced = 0
        self._sync()
        write_index(self._files, self._directory, self._segment, self._offset, self._rows.getvalue())
        fd = self._files.create(f"{self._directory}/{log_name(int(self._segment) + 1)}")
        old, self._fd = self._fd, fd
        self._files.close(old)
        self._files.sync_directory(self._directory)
        self._segment += 1
        self._offset = 0
        self._laid_out = 0
        self._rows = BytesWriter()

    def _snapshot(self, job: SnapshotJob) -> None:
        """Sync, snapshot, and only then give back. A snapshot ahead of the log would swallow the frames that are
        later written below its place; a segment gone before the snapshot is durable takes with it the notes that
        say which older messages are settled."""
        self._sync()
        begun = job.begun
        kept = [segment for segment in begun.kept if segment not in job.free]
        name = write_snapshot(
            self._files, self._directory, begun.lsn, begun.segment, begun.offset, kept, job.state
        )
        for old in Listing(self._files.names(self._directory)).snapshots:
            if old != name:
                self._files.unlink(f"{self._directory}/{old}")
        for segment in job.free:
            self._files.unlink(f"{self._directory}/{log_name(segment)}")
            self._files.unlink(f"{self._directory}/{index_name(segment)}")
        if job.free:
            self._on_free(job.free)
        self._tell(job.done)

    def _tell(self, done: Callable[[], None]) -> None:
        try:
            self._call_soon_threadsafe(done)
        except RuntimeError:
            pass  # the loop is closed, and whoever waited is gone with it

    def _tell_short(self, why: str) -> None:
        try:
            self._call_soon_threadsafe(self._on_short, why)
        except RuntimeError:
            pass

    def _tell_failure(self, fault: StoreFailed) -> None:
        try:
            self._call_soon_threadsafe(self._on_failure, fault)
        except RuntimeError:
            pass
