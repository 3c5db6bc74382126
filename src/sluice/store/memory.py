"""The store for tests: the whole contract in memory, with control over commits and crashes.

    store = MemoryStore(loop.call_soon)      each commit completes in the next iteration of the loop
    store.hold()                             from now on commits stay pending ...
    store.release(1)                         ... until the test completes the oldest one
    store = store.crash(keep_unsynced=2)     a power cut: everything synced survives, and the first
                                             two unsynced writes (frames or snapshots); open() it

After a crash the old object is closed and calls no callbacks. Segments are rolled, sealed and
deleted as on disk, so that the engine meets the same forms of addresses in tests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.errors import StoreError
from sluice.store.log_position import LogPosition
from sluice.store.protocol import (
    HEADER_BYTES,
    MESSAGE,
    Record,
    RecoveryLoader,
    RecoveryReport,
    copy_row,
    read_record,
    write_row,
)
from sluice.store.snapshot_policy import SnapshotPolicy

# Frames are not adjacent on disk either: no code may compute an address across two of them.
_FRAME_GAP_BYTES: Final = 28
_MAX_SEGMENT_BYTES: Final = 0xFFFF_FFFF


class _Frame:
    """A commit, and the address of its first record."""

    def __init__(self, address: int, data: bytes, count: int, number: int) -> None:
        self.address = address
        self.data = data
        self.count = count
        self.number = number

    def read_records(self) -> list[Record]:
        records: list[Record] = []
        at: i64 = 0
        end: i64 = len(self.data)
        while at < end:
            record = read_record(self.data, at, end, self.address + at)
            if record is None:
                raise StoreError(f"the frame at {self.address:#x} holds bytes that are no record")
            records.append(record)
            at += record.size
        if len(records) != self.count:
            raise StoreError(
                f"a frame of {len(records)} records was committed as one of {self.count}"
            )
        return records


class _PendingWrite:
    """A requested commit or snapshot, in order of request."""

    def __init__(
        self,
        frame: _Frame | None,
        sync: bool,
        state: bytes,
        freed_segments: list[int],
        covered_frame: int,
        open_segment: int,
        done: Callable[[], None],
    ) -> None:
        self.frame = frame
        self.sync = sync
        self.state = state
        self.freed_segments = freed_segments
        self.covered_frame = covered_frame  # number of the last frame before a snapshot
        self.open_segment = open_segment  # segment open for writing at that time
        self.done = done
        self.is_done = False


class _DurableState:
    """What survives."""

    def __init__(self) -> None:
        self.frames: dict[int, list[_Frame]] = {}  # by segment
        self.state: bytes | None = None
        self.covered_frame = 0  # number of the last frame that `state` covers
        self.last_frame = 0  # number of the last frame
        self.last_segment = 1  # highest number ever used: numbers are not reused

    def apply(self, write: _PendingWrite) -> None:
        if write.frame is not None:
            self.frames.setdefault(write.frame.address >> 32, []).append(write.frame)
            self.last_frame = write.frame.number
            self.last_segment = write.frame.address >> 32
        else:
            self.state = write.state
            self.covered_frame = write.covered_frame
            self.last_segment = max(self.last_segment, write.open_segment)
            for segment in write.freed_segments:
                self.frames.pop(segment, None)


class MemoryStore:
    def __init__(
        self,
        call_soon: Callable[..., object],
        *,
        segment_bytes: int = 1 << 20,
        snapshot_bytes: int = 1 << 20,
    ) -> None:
        self._call_soon = call_soon
        self._segment_bytes = segment_bytes
        self._snapshot_bytes = snapshot_bytes
        self._durable = _DurableState()  # survives a crash
        self._frames: dict[int, list[_Frame]] = {}  # everything that the running process can read
        self._pending_writes: list[_PendingWrite] = []  # not synced, oldest first
        self._damaged: set[int] = set()
        self._is_held = False
        self._is_open = False
        self._last_frame = 0
        self._snapshot_policy = SnapshotPolicy(snapshot_bytes)
        self._log = self._new_log()
        # The last frame before the snapshot that is being written; -1 if there is none.
        self._snapshot_frame = -1

    def _new_log(self) -> LogPosition:
        return LogPosition(
            _FRAME_GAP_BYTES, self._segment_bytes, _MAX_SEGMENT_BYTES, self._snapshot_policy
        )

    # -- the Store contract

    def open(self, loader: RecoveryLoader) -> RecoveryReport:
        if self._is_open:
            raise StoreError("the store is open already")
        self._is_open = True
        durable = self._durable
        report = RecoveryReport()
        if durable.state is not None:
            loader.load_snapshot(durable.state)
            self._snapshot_policy.record_loaded_snapshot(len(durable.state))
        for segment in sorted(durable.frames):
            rows = BytesWriter()
            for frame in durable.frames[segment]:
                if frame.number <= durable.covered_frame:
                    for record in frame.read_records():
                        if record.kind == MESSAGE:
                            write_row(rows, record.address, record)
                            report.messages += 1
            if len(rows):
                loader.load_rows(rows.getvalue())
        for segment in sorted(durable.frames):
            for frame in durable.frames[segment]:
                if frame.number > durable.covered_frame:
                    self._load_frame(frame, loader, report)
        self._resume_log(report)
        return report

    def _load_frame(self, frame: _Frame, loader: RecoveryLoader, report: RecoveryReport) -> None:
        report.frames += 1
        for record in frame.read_records():
            report.records += 1
            if record.kind == MESSAGE:
                report.messages += 1
            loader.load_record(record)
        self._snapshot_policy.log_bytes += _FRAME_GAP_BYTES + len(frame.data)

    def _resume_log(self, report: RecoveryReport) -> None:
        """Begin a new segment if the last one is full, as on disk."""
        durable = self._durable
        self._last_frame = max(durable.last_frame, durable.covered_frame)
        segment_sizes: dict[int, int] = {}
        for segment, frames in sorted(durable.frames.items()):
            self._frames[segment] = list(frames)
            last = frames[-1]
            segment_sizes[segment] = (last.address & 0xFFFF_FFFF) + len(last.data)
        self._log.resume(durable.last_segment, segment_sizes)
        self._log.roll_if_full()
        report.segments = len(segment_sizes)

    def next_frame_address(self) -> int:
        return self._log.next_address()

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> int:
        self._check_open()
        self._last_frame += 1
        new_frame = _Frame(self.next_frame_address(), frame, count, self._last_frame)
        # Refuse an invalid frame here, where the stack shows its author.
        new_frame.read_records()
        self._frames.setdefault(int(self._log.segment), []).append(new_frame)
        self._log.append(len(frame))
        self._submit(_PendingWrite(new_frame, sync, b"", [], 0, 0, done))
        return self.next_frame_address()

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        self._check_open()
        self._call_soon(self._complete_read, list(addresses), done)

    def is_snapshot_due(self) -> bool:
        return self._snapshot_policy.is_due()

    def begin_snapshot(self) -> None:
        self._check_open()
        self._snapshot_frame = self._last_frame
        self._snapshot_policy.begin_snapshot()

    def snapshot(
        self, state: list[bytes], freed_segments: Sequence[int], done: Callable[[], None]
    ) -> None:
        self._check_open()
        if self._snapshot_frame < 0:
            self.begin_snapshot()
        self._snapshot_policy.record_snapshot_size(state)
        deleted = self._log.delete_segments(freed_segments)
        covered_frame, self._snapshot_frame = self._snapshot_frame, -1
        open_segment = int(self._log.segment)
        self._submit(
            _PendingWrite(None, True, b"".join(state), deleted, covered_frame, open_segment, done)
        )

    def seal_segment(self) -> bool:
        self._check_open()
        if self._log.offset == 0:
            return False
        self._log.roll()
        return True

    def segment_sizes(self) -> dict[int, int]:
        return dict(self._log.segment_sizes)

    def scan_segment(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self._check_open()
        self._call_soon(self._complete_scan, segment, done)

    def close(self) -> None:
        """Finish all pending writes, held or not; the object may be opened again."""
        if self._is_open:
            self.release()
            self._reset_process_state()

    # -- control for tests

    def hold(self) -> None:
        """Keep all commits and snapshots pending until `release`."""
        self._is_held = True

    def release(self, count: int = -1) -> None:
        """Complete the oldest `count` pending writes; by default all, and stop holding new ones."""
        if count < 0:
            self._is_held = False
        for write in list(self._pending_writes):
            if count != 0 and not write.is_done:
                self._finish(write)
                count -= 1
        self._apply_old_writes()

    def count_pending(self) -> int:
        """Return the number of commits and snapshots that are held."""
        return sum(not step.is_done for step in self._pending_writes)

    def count_unsynced(self) -> int:
        """Return the number of commits and snapshots that a power cut would lose now."""
        return len(self._pending_writes)

    def crash(self, keep_unsynced: int = 0) -> MemoryStore:
        """Simulate a power cut: close this object and return the surviving store, to be opened."""
        survivor = MemoryStore(
            self._call_soon, segment_bytes=self._segment_bytes, snapshot_bytes=self._snapshot_bytes
        )
        survivor._durable = self._durable
        survivor._damaged = self._damaged
        for write in self._pending_writes[:keep_unsynced]:
            survivor._durable.apply(write)
        self._is_open = False
        self._pending_writes = []
        return survivor

    def damage(self, address: int) -> None:
        """Make the record at `address` unreadable."""
        self._damaged.add(address)

    # -- internals

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreError("the store is not open")

    def _submit(self, write: _PendingWrite) -> None:
        self._pending_writes.append(write)
        if not self._is_held:
            self._call_soon(self._finish_soon, write)

    def _finish_soon(self, write: _PendingWrite) -> None:
        """Complete a write unless `hold` was called or `release` completed it meanwhile."""
        if self._is_open and not self._is_held and not write.is_done:
            self._finish(write)
            self._apply_old_writes()

    def _finish(self, write: _PendingWrite) -> None:
        """Complete a write.

        A sync makes all earlier writes durable too. A frame without sync can still be lost in a
        crash.
        """
        write.is_done = True
        if write.frame is None:
            self._snapshot_policy.finish_snapshot()
        if write.sync:
            while self._pending_writes:
                oldest = self._pending_writes.pop(0)
                self._durable.apply(oldest)
                for segment in oldest.freed_segments:
                    self._frames.pop(segment, None)
                if oldest is write:
                    break
        write.done()

    def _apply_old_writes(self) -> None:
        """Apply completed writes so that they do not accumulate while no commit syncs."""
        while len(self._pending_writes) > 1000 and self._pending_writes[0].is_done:
            self._durable.apply(self._pending_writes.pop(0))

    def _reset_process_state(self) -> None:
        while self._pending_writes:
            self._durable.apply(self._pending_writes.pop(0))
        self._is_open = False
        self._frames = {}
        self._snapshot_frame = -1
        self._snapshot_policy = SnapshotPolicy(self._snapshot_bytes)
        self._log = self._new_log()

    def _complete_read(
        self, addresses: list[int], done: Callable[[list[bytes | None]], None]
    ) -> None:
        if self._is_open:
            done([self._read_record(address) for address in addresses])

    def _read_record(self, address: int) -> bytes | None:
        frames = self._frames.get(address >> 32, [])
        nth = bisect_right(frames, address, key=_frame_address) - 1
        if nth < 0 or address in self._damaged:
            return None
        at = address - frames[nth].address
        record = read_record(frames[nth].data, at, len(frames[nth].data), address)
        return frames[nth].data[at : at + int(record.size)] if record is not None else None

    def _complete_scan(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        if not self._is_open:
            return
        rows = BytesWriter()
        for frame in self._frames.get(segment, []):
            for record in frame.read_records():
                if record.kind == MESSAGE:
                    at = record.address - frame.address
                    copy_row(rows, frame.data, at, record.address)
        done([rows.getvalue()] if len(rows) >= HEADER_BYTES else [])


def _frame_address(frame: _Frame) -> int:
    return frame.address
