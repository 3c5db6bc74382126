"""The store for tests, ours and yours: the whole contract in RAM, with a handle on every crash.

    store = MemoryStore(loop.call_soon)             each commit is done at the next turn of the loop
    store.hold()                                    from now on commits wait ...
    store.release(1)                                ... until the test lets the oldest go
    store = store.crash(keep_unsynced=2)            what a power cut leaves: all that was synced, and of what was not
                                                    the first two (a frame or a snapshot each); open() it again

The old object is dead after a crash and calls nobody back. Segments are rolled, sealed and given back as on disk, so
that an engine meets every shape of address here that it will meet there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.errors import StoreError
from sluice.store.snapshot_policy import Pace
from sluice.store.protocol import (
    HEADER_BYTES,
    MESSAGE,
    Loader,
    Record,
    Recovery,
    copy_row,
    read_record,
    write_row,
)

_GAP_BYTES: Final = 28  # frames do not touch on disk either: nobody may compute an address across two of them


class _Frame:
    """A commit, and the address of its first record."""

    def __init__(self, address: int, data: bytes, count: int, number: int) -> None:
        self.address = address
        self.data = data
        self.count = count
        self.number = number

    def records(self) -> list[Record]:
        found: list[Record] = []
        at: i64 = 0
        end: i64 = len(self.data)
        while at < end:
            record = read_record(self.data, at, end, self.address + at)
            if record is None:
                raise StoreError(f"the frame at {self.address:#x} holds bytes that are no record")
            found.append(record)
            at += record.size
        if len(found) != self.count:
            raise StoreError(f"a frame of {len(found)} records was committed as one of {self.count}")
        return found


class _Step:
    """A commit or a snapshot that was asked for, in the order of asking."""

    def __init__(
        self,
        frame: _Frame | None,
        sync: bool,
        state: bytes,
        free: list[int],
        number: int,
        segment: int,
        done: Callable[[], None],
    ) -> None:
        self.frame = frame
        self.sync = sync
        self.state = state
        self.free = free
        self.number = number  # of the last frame before a snapshot
        self.segment = segment  # the one that was being written to
        self.done = done
        self.answered = False


class _Kept:
    """What survives."""

    def __init__(self) -> None:
        self.frames: dict[int, list[_Frame]] = {}  # by segment
        self.state: bytes | None = None
        self.covered = 0  # the number of the last frame that `state` covers
        self.number = 0  # of the last frame
        self.segment = 1  # the highest number ever used: a number is not used twice

    def apply(self, step: _Step) -> None:
        if step.frame is not None:
            self.frames.setdefault(step.frame.address >> 32, []).append(step.frame)
            self.number = step.frame.number
            self.segment = step.frame.address >> 32
        else:
            self.state = step.state
            self.covered = step.number
            self.segment = max(self.segment, step.segment)
            for segment in step.free:
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
        self._synced = _Kept()  # beyond the reach of a crash
        self._frames: dict[int, list[_Frame]] = {}  # all that a living process can read
        self._steps: list[_Step] = []  # not synced, oldest first
        self._damaged: set[int] = set()
        self._held = False
        self._open = False
        self._segment = 1
        self._offset = 0
        self._number = 0
        self._sizes: dict[int, int] = {}
        self._pace = Pace(snapshot_bytes)
        self._covers = -1  # the last frame before the snapshot that is being written; -1: none is

    # -- the contract

    def open(self, loader: Loader) -> Recovery:
        if self._open:
            raise StoreError("the store is open already")
        self._open = True
        kept = self._synced
        report = Recovery()
        if kept.state is not None:
            loader.load_snapshot(kept.state)
            self._pace.loaded(len(kept.state))
        for segment in sorted(kept.frames):
            rows = BytesWriter()
            for frame in kept.frames[segment]:
                if frame.number <= kept.covered:
                    for record in frame.records():
                        if record.kind == MESSAGE:
                            write_row(rows, record.address, record)
                            report.messages += 1
            if len(rows):
                loader.load_rows(rows.getvalue())
        for segment in sorted(kept.frames):
            for frame in kept.frames[segment]:
                if frame.number > kept.covered:
                    self._load(frame, loader, report)
        self._go_on(report)
        return report

    def _load(self, frame: _Frame, loader: Loader, report: Recovery) -> None:
        report.frames += 1
        for record in frame.records():
            report.records += 1
            if record.kind == MESSAGE:
                report.messages += 1
            loader.load_record(record)
        self._pace.written += _GAP_BYTES + len(frame.data)

    def _go_on(self, report: Recovery) -> None:
        """After a start a new segment is begun if the last one is full, as on disk."""
        kept = self._synced
        self._number = max(kept.number, kept.covered)
        self._segment = kept.segment
        for segment, frames in sorted(kept.frames.items()):
            self._frames[segment] = list(frames)
            last = frames[-1]
            self._sizes[segment] = (last.address & 0xFFFF_FFFF) + len(last.data)
        self._offset = self._sizes.get(self._segment, 0)
        self._sizes[self._segment] = self._offset
        self._roll_if_full()
        report.segments = len(self._sizes)

    def next_frame(self) -> int:
        return self._segment << 32 | (self._offset + _GAP_BYTES)

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> None:
        self._check_open()
        self._number += 1
        made = _Frame(self.next_frame(), frame, count, self._number)
        made.records()  # what cannot be read back is refused here, where the stack tells who wrote it
        size = _GAP_BYTES + len(frame)
        self._frames.setdefault(self._segment, []).append(made)
        self._offset += size
        self._pace.written += size
        self._sizes[self._segment] = self._offset
        self._roll_if_full()
        self._ask(_Step(made, sync, b"", [], 0, 0, done))

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        self._check_open()
        self._call_soon(self._answer_read, list(addresses), done)

    def wants_snapshot(self) -> bool:
        return self._pace.wants()

    def begin_snapshot(self) -> None:
        self._check_open()
        self._covers = self._number
        self._pace.begin()

    def snapshot(self, state: list[bytes], free: Sequence[int], done: Callable[[], None]) -> None:
        self._check_open()
        if self._covers < 0:
            self.begin_snapshot()
        self._pace.given(state)
        gone = [segment for segment in free if segment in self._sizes and segment != self._segment]
        for segment in gone:
            del self._sizes[segment]
        covers, self._covers = self._covers, -1
        self._ask(_Step(None, True, b"".join(state), gone, covers, self._segment, done))

    def seal(self) -> bool:
        self._check_open()
        if self._offset == 0:
            return False
        self._roll()
        return True

    def segment_sizes(self) -> dict[int, int]:
        return dict(self._sizes)

    def scan(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self._check_open()
        self._call_soon(self._answer_scan, segment, done)

    def close(self) -> None:
        """Finish what is under way, held or not; the object may be opened again."""
        if self._open:
            self.release()
            self._forget_process()

    # -- the handles

    def hold(self) -> None:
        """Let no commit and no snapshot be done from now on until `release`."""
        self._held = True

    def release(self, steps: int = -1) -> None:
        """Let the oldest `steps` of those that wait be done; all of them, and those to come, if not told how many."""
        if steps < 0:
            self._held = False
        for step in list(self._steps):
            if steps != 0 and not step.answered:
                self._finish(step)
                steps -= 1
        self._let_go()

    def waiting(self) -> int:
        """How many commits and snapshots are held."""
        return sum(not step.answered for step in self._steps)

    def unsynced(self) -> int:
        """How many commits and snapshots a power cut could take back now."""
        return len(self._steps)

    def crash(self, keep_unsynced: int = 0) -> MemoryStore:
        """Cut the power. Returns what is left, to be opened; this object does nothing any more."""
        left = MemoryStore(
            self._call_soon, segment_bytes=self._segment_bytes, snapshot_bytes=self._snapshot_bytes
        )
        left._synced = self._synced
        left._damaged = self._damaged
        for step in self._steps[:keep_unsynced]:
            left._synced.apply(step)
        self._open = False
        self._steps = []
        return left

    def damage(self, address: int) -> None:
        """Let the record at `address` be unreadable from now on."""
        self._damaged.add(address)

    # -- inside

    def _check_open(self) -> None:
        if not self._open:
            raise StoreError("the store is not open")

    def _roll_if_full(self) -> None:
        if self._offset >= self._segment_bytes:
            self._roll()

    def _roll(self) -> None:
        self._segment += 1
        self._offset = 0
        self._sizes[self._segment] = 0
        self._pace.sealed = True

    def _ask(self, step: _Step) -> None:
        self._steps.append(step)
        if not self._held:
            self._call_soon(self._finish_soon, step)

    def _finish_soon(self, step: _Step) -> None:
        """One that a `hold` has overtaken waits after all; one that was released meanwhile is done already."""
        if self._open and not self._held and not step.answered:
            self._finish(step)
            self._let_go()

    def _finish(self, step: _Step) -> None:
        """Done. A sync takes with it everything before it; a frame without one stays within reach of a crash."""
        step.answered = True
        if step.frame is None:
            self._pace.done()
        if step.sync:
            while self._steps:
                oldest = self._steps.pop(0)
                self._synced.apply(oldest)
                for segment in oldest.free:
                    self._frames.pop(segment, None)
                if oldest is step:
                    break
        step.done()

    def _let_go(self) -> None:
        """Frames that were answered long ago do not pile up while nobody commits with a sync."""
        while len(self._steps) > 1000 and self._steps[0].answered:
            self._synced.apply(self._steps.pop(0))

    def _forget_process(self) -> None:
        while self._steps:
            self._synced.apply(self._steps.pop(0))
        self._open = False
        self._frames = {}
        self._sizes = {}
        self._segment, self._offset = 1, 0
        self._covers = -1
        self._pace = Pace(self._snapshot_bytes)

    def _answer_read(self, addresses: list[int], done: Callable[[list[bytes | None]], None]) -> None:
        if self._open:
            done([self._record(address) for address in addresses])

    def _record(self, address: int) -> bytes | None:
        frames = self._frames.get(address >> 32, [])
        nth = bisect_right(frames, address, key=_address) - 1
        if nth < 0 or address in self._damaged:
            return None
        at = address - frames[nth].address
        record = read_record(frames[nth].data, at, len(frames[nth].data), address)
        return frames[nth].data[at : at + int(record.size)] if record is not None else None

    def _answer_scan(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        if not self._open:
            return
        rows = BytesWriter()
        for frame in self._frames.get(segment, []):
            for record in frame.records():
                if record.kind == MESSAGE:
                    at = record.address - frame.address
                    copy_row(rows, frame.data, at, record.address)
        done([rows.getvalue()] if len(rows) >= HEADER_BYTES else [])


def _address(frame: _Frame) -> int:
    return frame.address
