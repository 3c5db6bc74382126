"""The embedded store: one segmented commit log in one directory, used by one process.

This object belongs to the loop's thread and accesses no file after it is open. It knows the address
of the next frame because it decides, when a frame is committed, whether that frame fills its
segment; the writer follows that decision. FORMAT.md describes the format, the order of writes and
the result of each crash.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from sluice.errors import StoreDamaged, StoreError, StoreNotOpened
from sluice.store.embedded.direct_writes import DirectWrites
from sluice.store.embedded.files import FileSystem
from sluice.store.embedded.frame_format import FRAME_HEADER_BYTES, MAX_U32
from sluice.store.embedded.layout import (
    LAYOUT_FILE,
    LOCK_FILE,
    DirectoryListing,
    read_layout,
    write_layout,
)
from sluice.store.embedded.log_recovery import LogRecovery
from sluice.store.embedded.reader import LogReader, ReadRequest, ScanRequest
from sluice.store.embedded.salt import UNKNOWN_SALT, find_salt, has_data
from sluice.store.embedded.writer import (
    BeginSnapshotJob,
    CommitJob,
    LogWriter,
    SealJob,
    SnapshotJob,
)
from sluice.store.log_position import LogPosition
from sluice.store.protocol import RecoveryLoader, RecoveryReport, check_crc32c
from sluice.store.snapshot_policy import SnapshotPolicy


class EmbeddedStore:
    """A durable store on local files.

    `on_failure` is called once, in the loop's thread, when a write, a sync or a read fails; from
    then on no commit completes. `on_low_space` is called with the reason when less than
    `min_free_bytes` are free on the disk, and with an empty string when there is enough space
    again. A frame committed without `sync` is synced within `sync_seconds`. With `read_only` the
    store is opened without writing, truncating or removing a file: it accepts reads and no commits.
    With `call_soon`, a function of the loop, the loop writes frames itself while `direct_writes`
    allows it; otherwise the writer thread writes all of them.
    """

    def __init__(
        self,
        directory: str,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
        *,
        segment_bytes: int = 64 << 20,
        snapshot_bytes: int = 64 << 20,
        sync_seconds: float = 0.2,
        salvage: bool = False,
        read_only: bool = False,
        min_free_bytes: int = 0,
        on_low_space: Callable[[str], None] | None = None,
        files: FileSystem | None = None,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
        direct_writes: DirectWrites | None = None,
    ) -> None:
        self._directory = directory
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        self._segment_bytes = segment_bytes
        self._snapshot_bytes = snapshot_bytes
        self._sync_seconds = sync_seconds
        self._salvage = salvage
        self._read_only = read_only
        self._min_free_bytes = min_free_bytes if on_low_space is not None else 0
        self._on_low_space = on_low_space
        self._files = files if files is not None else FileSystem()
        self._call_soon = call_soon
        self._direct_writes = direct_writes if direct_writes is not None else DirectWrites()
        self._lock_fd = -1
        self._writer: LogWriter | None = None
        self._reader: LogReader | None = None
        self._snapshot_policy = SnapshotPolicy(snapshot_bytes)
        self._log = self._new_log()
        self._snapshot_start: BeginSnapshotJob | None = None  # a snapshot in progress
        self._has_failed = False

    def _new_log(self) -> LogPosition:
        return LogPosition(FRAME_HEADER_BYTES, self._segment_bytes, MAX_U32, self._snapshot_policy)

    def open(self, loader: RecoveryLoader) -> RecoveryReport:
        check_crc32c()
        if self._lock_fd >= 0:
            raise StoreError("the store is open already")
        try:
            if self._read_only:
                self._check_directory()
                self._lock_fd = self._files.lock_to_read(f"{self._directory}/{LOCK_FILE}")
            else:
                self._files.make_directory(self._directory)
                self._check_not_foreign()
                self._lock_fd = self._files.lock(f"{self._directory}/{LOCK_FILE}")
            self._files.fill_reserve()
            return self._recover(loader)
        except OSError as error:
            self._unlock()
            raise StoreNotOpened(self._directory, error) from error
        except BaseException:
            self._unlock()
            raise

    def _check_directory(self) -> None:
        if not DirectoryListing(self._files.list_names(self._directory)).is_store:
            raise StoreError(
                f"there is no store in {self._directory}",
                "Give the directory that sluice serve --data uses",
            )

    def _check_not_foreign(self) -> None:
        """Refuse to begin a store among the files of others, such as a home directory."""
        found = DirectoryListing(self._files.list_names(self._directory))
        if found.foreign and not found.is_store:
            raise StoreError(
                f"{self._directory} is not a store and not empty: it has {found.foreign[0]!r}",
                "Give a new or empty directory; nothing was written",
            )

    def _recover(self, loader: RecoveryLoader) -> RecoveryReport:
        salt = read_layout(self._files, self._directory)
        salt_warning = ""
        if salt < 0:
            salt, salt_warning = self._find_salt(
                DirectoryListing(self._files.list_names(self._directory))
            )
            if not salt_warning and not self._read_only:  # new store: before its first segment
                write_layout(self._files, self._directory, salt)
        self._snapshot_policy = SnapshotPolicy(self._snapshot_bytes)
        self._log = self._new_log()
        recovered = LogRecovery(
            self._files,
            self._directory,
            salt,
            self._segment_bytes,
            self._salvage,
            loader,
            self._snapshot_policy,
            self._read_only,
        ).run()
        if salt_warning:
            recovered.report.warnings.insert(0, salt_warning)
            if not self._read_only:  # only now: the log has proved that the salt is right
                write_layout(self._files, self._directory, salt)
        self._log.resume(int(recovered.segment), recovered.segment_sizes)
        reader = LogReader(
            self._files,
            self._directory,
            salt,
            self._salvage,
            self._call_soon_threadsafe,
            self._fail,
        )
        reader.start()
        self._reader = reader
        if self._read_only:
            return recovered.report
        writer = LogWriter(
            self._files,
            self._directory,
            salt,
            recovered,
            self._segment_bytes,
            self._sync_seconds,
            self._min_free_bytes,
            self._call_soon_threadsafe,
            self._fail,
            reader.close_segments,
            self._report_low_space,
            self._call_soon,
            self._direct_writes,
        )
        writer.start()
        self._writer = writer
        return recovered.report

    def _find_salt(self, listing: DirectoryListing) -> tuple[int, str]:
        """Return the salt of a directory without a valid `layout`, and a warning for the operator.

        A new store has no warning. The frames contain their salt, so no data is lost with the file.
        """
        if not listing.is_store:
            return secrets.randbits(32), ""
        problem = f"{LAYOUT_FILE} {'is damaged' if listing.has_layout else 'is missing'}"
        repair = "it can be written again" if self._read_only else "it was written again"
        salt = find_salt(self._files, self._directory, listing.segments)
        if salt != UNKNOWN_SALT:
            return salt, f"{problem}; {repair}, with the salt found in the frames of the log"
        if not has_data(self._files, self._directory, listing.segments):
            return secrets.randbits(32), f"{problem}; {repair}: there are no frames in the log"
        if not self._salvage:
            raise StoreDamaged(
                f"{self._directory}/{LAYOUT_FILE}",
                0,
                "the file is lost, and the frames of the log do not agree on one salt",
                "Restore this small file from a backup, or start once with --salvage: "
                "everything written since the last snapshot is then lost",
            )
        return (
            secrets.randbits(32),
            f"{problem}, and the log does not contain its salt: all frames are ignored",
        )

    def next_frame_address(self) -> int:
        return self._log.next_address()

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> int:
        writer = self._writer
        if writer is None:
            raise StoreError("the store is not open")
        fills_segment = self._log.append(len(frame))
        writer.commit(CommitJob(frame, count, sync, fills_segment, done))
        return self._log.next_address()

    def seal_segment(self) -> bool:
        writer = self._writer
        if writer is None:
            raise StoreError("the store is not open")
        if self._log.offset == 0:
            return False
        self._log.roll()
        writer.submit(SealJob())
        return True

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        if self._reader is None:
            raise StoreError("the store is not open")
        self._reader.submit(ReadRequest(list(addresses), done))

    def scan_segment(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        if self._reader is None:
            raise StoreError("the store is not open")
        self._reader.submit(ScanRequest(segment, done))

    def is_snapshot_due(self) -> bool:
        return self._snapshot_policy.is_due()

    def begin_snapshot(self) -> None:
        self._begin_snapshot()

    def _begin_snapshot(self) -> BeginSnapshotJob:
        writer = self._writer
        if writer is None:
            raise StoreError("the store is not open")
        self._snapshot_policy.begin_snapshot()
        self._snapshot_start = BeginSnapshotJob(list(self._log.segment_sizes))
        writer.submit(self._snapshot_start)
        return self._snapshot_start

    def snapshot(
        self, state: list[bytes], freed_segments: Sequence[int], done: Callable[[], None]
    ) -> None:
        """Persist a snapshot; never delete the open segment or one that does not exist."""
        writer = self._writer
        if writer is None:
            raise StoreError("the store is not open")
        start = self._snapshot_start if self._snapshot_start is not None else self._begin_snapshot()
        self._snapshot_start = None
        self._snapshot_policy.record_snapshot_size(state)
        deleted = self._log.delete_segments(freed_segments)
        writer.submit(SnapshotJob(start, state, deleted, SnapshotCallback(self, done).call))

    def finish_snapshot(self) -> None:
        self._snapshot_policy.finish_snapshot()

    def segment_sizes(self) -> dict[int, int]:
        return dict(self._log.segment_sizes)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.stop()
            self._writer = None
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            self._files.close(self._lock_fd)
            self._lock_fd = -1
        self._files.drop_reserve()

    def _report_low_space(self, reason: str) -> None:
        if self._on_low_space is not None:
            self._on_low_space(reason)

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._on_failure(error)


class SnapshotCallback:
    """Notifies the store before the caller of `snapshot`."""

    def __init__(self, store: EmbeddedStore, callback: Callable[[], None]) -> None:
        self._store = store
        self._callback = callback

    def call(self) -> None:
        self._store.finish_snapshot()
        self._callback()
