"""The writer: the only part that changes files while the store is open.

Its thread executes jobs in the order of submission, so the order of commits is the order on disk.
It notifies the loop of each with one `call_soon_threadsafe`. The writer ends at the first failure:
after a failed write or sync the content of the disk is unknown (the kernel may have dropped the
dirty pages and forgotten the error). So nothing is retried, nothing more is acknowledged, and the
next start recovers.

While the disk is fast (`direct_writes`), the loop writes frames itself: it writes at once, lets the
disk begin, and syncs in a callback of its own, after the output of the turn and one look at the
sockets. It does so only if the thread has finished every job, and the file lock excludes the
delayed sync of the thread. If something else is due with a commit (a new segment, zeros, the timer
of a delayed sync, a look at the free space), the thread gets that commit.

A commit acquires the GIL twice, and a busy loop rarely releases it. With Python's switch interval
of 5 ms and a busy loop, the slowest 1 % of commits took 0.2 to 2 s; with 0.5 ms or less, 9 to 20
ms. The likely cause: the loop releases the GIL too briefly for this thread to wake, and often
enough that the interval never expires. The program that runs the loop should lower it
(`sys.setswitchinterval`).
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
from sluice.store.embedded.direct_writes import DirectWrites
from sluice.store.embedded.files import FileSystem
from sluice.store.embedded.frame_format import (
    FRAME_HEADER_BYTES,
    collect_index_rows,
    encode_frame_header,
)
from sluice.store.embedded.layout import DirectoryListing, index_name, log_name
from sluice.store.embedded.log_recovery import RecoveredLog
from sluice.store.embedded.segment_index import write_index
from sluice.store.embedded.snapshot_file import write_snapshot

_SPACE_CHECK_SECONDS: Final = 1.0  # between checks of free space while there are writes
_SPACE_CHECK_BYTES: Final = 4 << 20  # or after this many bytes
# The open segment ends with zeros where small frames will be written: see `_preallocate`.
_ZEROS: Final = bytes(1 << 20)
_SMALL_FRAME_BYTES: Final = 128 << 10
# The loop lets the disk begin with frames of this size: a smaller one takes little but its flush.
_MIN_WRITEBACK_BYTES: Final = 16 << 10
_PREALLOCATION_OFF: Final = 1 << 40  # beyond any segment: no preallocation in this one


class Job:
    """A job for the writer thread."""


class CommitJob(Job):
    def __init__(
        self, frame: bytes, count: int, sync: bool, fills_segment: bool, done: Callable[[], None]
    ) -> None:
        self.frame = frame
        self.count = count
        self.sync = sync
        self.fills_segment = fills_segment
        self.done = done


class SyncJob(Job):
    """Sync the frame that the loop has written."""

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done


class BeginSnapshotJob(Job):
    """Begin a snapshot, which covers the log up to its current end."""

    def __init__(self, segments: list[int]) -> None:
        self.segments = segments  # the segments that exist now
        self.lsn: i64 = 0
        self.segment: i64 = 0
        self.offset: i64 = 0


class SnapshotJob(Job):
    def __init__(
        self,
        start: BeginSnapshotJob,
        state: list[bytes],
        freed_segments: list[int],
        done: Callable[[], None],
    ) -> None:
        self.start = start
        self.state = state
        self.freed_segments = freed_segments
        self.done = done


class SealJob(Job):
    """Close the open segment, full or not."""


class StopJob(Job):
    pass


class LogWriter:
    def __init__(
        self,
        files: FileSystem,
        directory: str,
        salt: int,
        recovered: RecoveredLog,
        segment_bytes: int,
        sync_seconds: float,
        min_free_bytes: int,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
        on_segments_deleted: Callable[[list[int]], None],
        on_low_space: Callable[[str], None],
        call_soon: Callable[[Callable[[], None]], object] | None,
        direct_writes: DirectWrites,
    ) -> None:
        self._files = files
        self._directory = directory
        self._salt: i64 = salt  # in each frame: marks the frames of this store
        self._fd = recovered.fd
        self._segment: i64 = recovered.segment
        self._offset: i64 = recovered.offset
        self._lsn: i64 = recovered.lsn  # number of the last frame
        self._rows = recovered.rows  # index rows of the messages in the open segment
        self._segment_bytes: i64 = segment_bytes
        # Offset up to which zeros are preallocated, if it is after the end of the log.
        self._preallocated_end: i64 = 0
        self._unsynced_frames: i64 = 0  # frames written since the last sync
        self._sync_due = 0.0
        self._sync_seconds = sync_seconds
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        self._on_segments_deleted = on_segments_deleted
        self._on_low_space = on_low_space
        self._min_free_bytes = min_free_bytes
        self._is_low_on_space = False
        self._space_checked_at = 0.0
        self._bytes_since_check: i64 = 0
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        # Jobs given to the thread, and those that it has finished. Each side counts its own.
        self._submitted: i64 = 0
        self._finished: i64 = 0
        self._has_failed = False
        self._file_lock = threading.Lock()  # held while a thread uses the files
        self._call_soon = call_soon  # None: the loop writes nothing itself
        self._direct_writes = direct_writes
        self._written_job: CommitJob | None = None  # written by the loop, which syncs it soon
        self._write_seconds = 0.0  # how long the loop took to write it
        self._sync_callback: Callable[[], None] = self._sync_direct
        # The thread will wake up without a job: for a delayed sync or a look at the free space.
        self._is_timer_set = False
        # Not `_thread`: in the compiled build that is `__thread`, a reserved word of C.
        self._worker = threading.Thread(target=self._run, name="sluice-log-writer", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def submit(self, job: Job) -> None:
        """Give a job to the thread."""
        self._submitted += 1
        self._jobs.put(job)

    def commit(self, job: CommitJob) -> None:
        """Write a frame, in the loop now or in the thread soon, and later notify its waiter."""
        call_soon = self._call_soon
        if call_soon is None or not self._write_direct(job, call_soon):
            self.submit(job)

    def stop(self) -> None:
        """Finish every job so far, sync (unless the writer has failed) and end the thread."""
        self.submit(StopJob())
        self._worker.join()
        self._files.close(self._fd)

    # -- in the loop

    def _may_write_directly(self, job: CommitJob) -> bool:
        """Return whether the loop may write a frame, and nothing else is due with it.

        The file lock is held. A frame without a sync relies on the timer of the thread, which waits
        longer while it looks for free space.
        """
        size: i64 = len(job.frame)
        return (
            self._direct_writes.allows(size)
            and self._finished == self._submitted
            and self._written_job is None
            and not self._has_failed
            and not job.fills_segment
            and not self._is_preallocation_due(size)
            and not self._is_space_check_due(size)
            and (
                job.sync
                or self._unsynced_frames > 0
                or (self._is_timer_set and not self._is_low_on_space)
            )
        )

    def _write_direct(
        self, job: CommitJob, call_soon: Callable[[Callable[[], None]], object]
    ) -> bool:
        """Write a frame and let the disk begin; return False if the thread has to do it.

        The sync is a callback of its own: meanwhile the loop writes the output of this turn and
        reads the sockets once.
        """
        if not self._file_lock.acquire(False):  # a delayed sync is in progress
            return False
        try:
            if not self._may_write_directly(job):
                return False
            started = time.monotonic()
            at = self._offset
            self._write_frame(job, False)
            if job.sync:
                if self._offset - at >= _MIN_WRITEBACK_BYTES:
                    self._files.start_writeback(self._fd, int(at), int(self._offset - at))
                self._write_seconds = time.monotonic() - started
            self._written_job = job
        except Exception as error:
            self._fail(error)
            return True
        finally:
            self._file_lock.release()
        call_soon(self._sync_callback)
        return True

    def _sync_direct(self) -> None:
        """Sync the frame that the loop has written, unless the thread has done so meanwhile."""
        job, self._written_job = self._written_job, None
        if job is None:
            return
        if job.sync:
            if not self._file_lock.acquire(False):  # the thread executes a job of another caller
                self.submit(SyncJob(job.done))
                return
            try:
                if self._has_failed:
                    return
                started = time.monotonic()
                self._sync()
                now = time.monotonic()
                seconds = self._write_seconds + now - started
                self._direct_writes.record_direct(len(job.frame), seconds, now)
            except Exception as error:
                self._fail(error)
                return
            finally:
                self._file_lock.release()
        job.done()

    # -- in the writer thread

    def _run(self) -> None:
        try:
            self._check_free_space()
            self._is_timer_set = self._has_timer()
            while self._run_next_job():
                pass
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Report a failure; no job is executed afterward."""
        self._has_failed = True
        failure = StoreFailed(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        self._notify_failure(failure)

    def _run_next_job(self) -> bool:
        job = self._next_job()
        with self._file_lock:
            if self._has_failed or not self._run_job(job):
                return False
            self._is_timer_set = self._has_timer()
        if job is not None:
            self._finished += 1
        return True

    def _run_job(self, job: Job | None) -> bool:
        """Execute a job, or without one what is due; return whether more may follow."""
        if job is None:
            if self._unsynced_frames > 0 and self._sync_due <= time.monotonic():
                self._sync()
            if self._is_low_on_space:
                self._check_free_space()
        elif isinstance(job, CommitJob):
            self._commit(job)
        elif isinstance(job, SyncJob):
            self._sync()
            self._notify(job.done)
        elif isinstance(job, SnapshotJob):
            self._write_snapshot(job)
        elif isinstance(job, SealJob):
            self._roll_segment()
        elif isinstance(job, BeginSnapshotJob):
            job.lsn = self._lsn
            job.segment = self._segment
            job.offset = self._offset
        else:
            self._sync()
            self._trim_preallocated()
            return False
        return True

    def _next_job(self) -> Job | None:
        """Return the next job, or None when a delayed sync or a check of free space is due."""
        if not self._is_timer_set:
            return self._jobs.get()
        deadline = (
            self._sync_due
            if self._unsynced_frames > 0
            else self._space_checked_at + _SPACE_CHECK_SECONDS
        )
        wait = deadline - time.monotonic()
        if wait <= 0:
            return None
        try:
            return self._jobs.get(True, wait)
        except queue.Empty:
            return None

    def _has_timer(self) -> bool:
        """Return whether the thread has to wake up without a job."""
        return self._unsynced_frames > 0 or self._is_low_on_space

    def _commit(self, job: CommitJob) -> None:
        size: i64 = len(job.frame)
        started = time.monotonic()
        if self._write_frame(job, job.sync):
            now = time.monotonic()
            self._direct_writes.record_in_thread(size, now - started, now)
        self._notify(job.done)
        if job.fills_segment:
            self._roll_segment()
        elif self._is_preallocation_due(0) and size < _SMALL_FRAME_BYTES:
            self._preallocate()
        if self._is_space_check_due(0):
            self._check_free_space()

    def _write_frame(self, job: CommitJob, sync: bool) -> bool:
        """Write a frame and, with `sync`, sync it; return whether one call did both."""
        body = job.frame
        first_address = self._segment << 32 | (self._offset + FRAME_HEADER_BYTES)
        if not collect_index_rows(self._rows, body, job.count, first_address):
            raise ValueError(
                f"a frame of {len(body)} bytes does not contain exactly {job.count} records"
            )
        header = encode_frame_header(
            len(body), job.count, self._unsynced_frames, self._lsn + 1, self._salt
        )
        syncs_with_write = sync and self._unsynced_frames == 0  # no older frame needs a sync
        if syncs_with_write:
            self._files.write_synced(self._fd, [header, body], int(self._offset))
        else:
            self._files.write(self._fd, [header, body], int(self._offset))
        self._lsn += 1
        self._offset += FRAME_HEADER_BYTES + len(body)
        if not syncs_with_write:
            self._unsynced_frames += 1
            if sync:
                self._sync()
            elif self._unsynced_frames == 1:
                self._sync_due = time.monotonic() + self._sync_seconds
        self._bytes_since_check += FRAME_HEADER_BYTES + len(body)
        return syncs_with_write

    def _is_preallocation_due(self, size: i64) -> bool:
        """Return whether zeros are due after a frame of `size` more bytes."""
        return (
            size < _SMALL_FRAME_BYTES
            and self._preallocated_end < self._segment_bytes
            and self._preallocated_end - self._offset - size < len(_ZEROS) // 2
            and not self._is_low_on_space
        )

    def _is_space_check_due(self, size: i64) -> bool:
        """Return whether a look at the free space is due after `size` more bytes."""
        return (
            self._bytes_since_check + size > _SPACE_CHECK_BYTES
            or time.monotonic() - self._space_checked_at > _SPACE_CHECK_SECONDS
        )

    def _preallocate(self) -> None:
        """Write zeros after the log, so that the next frames are cheap to sync.

        An append makes the file longer, and a sync must then store the new size and blocks: twice
        the time, 50 % more CPU, and occasional long waits. This runs after the publishers have
        their acknowledgements. Large frames gain little and would be written twice.
        """
        start = max(self._preallocated_end, self._offset)
        size = min(i64(len(_ZEROS)), self._segment_bytes - start)
        if size <= 0:
            return  # the rest of the segment is preallocated
        if self._files.preallocate(
            self._fd, _ZEROS if size == len(_ZEROS) else bytes(size), int(start)
        ):
            self._preallocated_end = start + size
        else:
            self._files.truncate(self._fd, int(self._offset))  # keep the last space for frames
            self._preallocated_end = _PREALLOCATION_OFF

    def _trim_preallocated(self) -> bool:
        """Remove the zeros after the log; return whether there were any."""
        if self._preallocated_end <= self._offset:
            return False
        self._files.truncate(self._fd, int(self._offset))
        self._preallocated_end = 0
        return True

    def _check_free_space(self) -> None:
        """Report low space before the disk is full.

        The broker can refuse publishers, but a failed write stops the store. Settlements are still
        written, and let segments be deleted.
        """
        self._space_checked_at = time.monotonic()
        self._bytes_since_check = 0
        if self._min_free_bytes == 0:
            return
        try:
            free = self._files.free_bytes(self._directory)
        except OSError:
            return  # only a failing write matters
        required = (
            self._min_free_bytes + self._min_free_bytes // 4
            if self._is_low_on_space
            else self._min_free_bytes
        )
        if (free < required) != self._is_low_on_space:
            self._is_low_on_space = free < required
            reason = (
                f"{free >> 20} MiB are free on the disk of {self._directory}, and disk.min_free is "
                f"{self._min_free_bytes >> 20} MiB"
            )
            self._notify_low_space(reason if self._is_low_on_space else "")

    def _sync(self) -> None:
        if self._unsynced_frames > 0:
            self._files.sync(self._fd)
            self._unsynced_frames = 0

    def _roll_segment(self) -> None:
        """Seal the segment and begin the next one.

        The sync comes first: the existence of a successor tells recovery that every frame in the
        segment was whole and that nothing else is in it.
        """
        if self._trim_preallocated():
            self._files.sync(self._fd)
            self._unsynced_frames = 0
        self._sync()
        write_index(
            self._files, self._directory, self._segment, self._offset, self._rows.getvalue()
        )
        fd = self._files.create(f"{self._directory}/{log_name(int(self._segment) + 1)}")
        old, self._fd = self._fd, fd
        self._files.close(old)
        self._files.sync_directory(self._directory)
        self._segment += 1
        self._offset = 0
        self._preallocated_end = 0
        self._rows = BytesWriter()

    def _write_snapshot(self, job: SnapshotJob) -> None:
        """Sync the log, write the snapshot, then delete segments, in this order.

        If the snapshot were ahead of the log, frames written later before its position would be
        ignored. If a segment were deleted before the snapshot is durable, the notes in it that
        settle older messages would be lost.
        """
        self._sync()
        start = job.start
        kept_segments = [segment for segment in start.segments if segment not in job.freed_segments]
        name = write_snapshot(
            self._files,
            self._directory,
            start.lsn,
            start.segment,
            start.offset,
            kept_segments,
            job.state,
        )
        for old in DirectoryListing(self._files.list_names(self._directory)).snapshots:
            if old != name:
                self._files.unlink(f"{self._directory}/{old}")
        for segment in job.freed_segments:
            self._files.unlink(f"{self._directory}/{log_name(segment)}")
            self._files.unlink(f"{self._directory}/{index_name(segment)}")
        if job.freed_segments:
            self._on_segments_deleted(job.freed_segments)
        self._notify(job.done)

    def _notify(self, done: Callable[[], None]) -> None:
        try:
            self._call_soon_threadsafe(done)
        except RuntimeError:
            pass  # the loop is closed, so no caller waits

    def _notify_low_space(self, reason: str) -> None:
        try:
            self._call_soon_threadsafe(self._on_low_space, reason)
        except RuntimeError:
            pass

    def _notify_failure(self, failure: StoreFailed) -> None:
        try:
            self._call_soon_threadsafe(self._on_failure, failure)
        except RuntimeError:
            pass
