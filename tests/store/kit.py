"""Test kit for stores: a manual event loop, records, a loader, a store under test."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from librt.strings import BytesWriter

from sluice.store.embedded import EmbeddedStore, FileSystem
from sluice.store.embedded.direct_writes import SAMPLES_NEEDED, DirectWrites
from sluice.store.memory import MemoryStore
from sluice.store.protocol import (
    HEADER_BYTES,
    MESSAGE,
    NOTE,
    ROW_BYTES,
    Record,
    RecoveryReport,
    Store,
    read_row,
    write_record,
)
from sluice.store.protocol import read_record as parse
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.store import RedisStore

SEGMENT_BYTES = 64 << 10
TIMEOUT_SECONDS = 30.0  # reached only if a store is broken


class ManualLoop:
    """The part of an event loop that a store uses: callbacks, in order, in one thread."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = (
            queue.SimpleQueue()
        )

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self._calls.put((callback, args))

    def turn_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            callback, args = self._calls.get(timeout=TIMEOUT_SECONDS)
            callback(*args)

    def turn_once(self) -> bool:
        """Run the callbacks that are ready, without waiting for more."""
        ran = False
        while not self._calls.empty():
            callback, args = self._calls.get()
            callback(*args)
            ran = True
        return ran


class RecordingLoader:
    """Records everything it loads, and checks the order of loading."""

    def __init__(self) -> None:
        self.snapshot: bytes | None = None
        self.rows: list[Record] = []
        self.records: list[Record] = []

    def load_snapshot(self, snapshot: bytes) -> None:
        assert self.snapshot is None and not self.rows and not self.records
        self.snapshot = snapshot

    def load_rows(self, rows: bytes) -> None:
        assert not self.records, "rows come before records"
        assert len(rows) % ROW_BYTES == 0
        self.rows += [read_row(rows, at) for at in range(0, len(rows), ROW_BYTES)]

    def load_record(self, record: Record) -> None:
        self.records.append(record)

    def addresses(self) -> dict[tuple[int, int], int]:
        """Return the address of each message by (pid, seq); the last one wins."""
        found = {(record.pid, record.seq): record.address for record in self.rows}
        found.update({(r.pid, r.seq): r.address for r in self.records if r.kind == MESSAGE})
        return found


class SampleRecord:
    """A record to write."""

    def __init__(self, kind: int, pid: int, seq: int, body: bytes) -> None:
        self.kind, self.pid, self.seq, self.body = kind, pid, seq, body


def message(seq: int, body: bytes = b"", pid: int = 1) -> SampleRecord:
    return SampleRecord(MESSAGE, pid, seq, body)


def note(seq: int, body: bytes = b"", pid: int = 1) -> SampleRecord:
    return SampleRecord(NOTE, pid, seq, body)


def frame_of(records: Sequence[SampleRecord]) -> bytes:
    frame = BytesWriter()
    for sample in records:
        # The other fields are functions of seq, so that all of them can be checked.
        write_record(
            frame,
            sample.kind,
            sample.seq % 256,
            sample.pid,
            sample.seq,
            sample.seq * 7919 % (1 << 32),
            sample.seq * 31 % (1 << 32),
            1_700_000_000_000 + sample.seq,
            sample.body,
        )
    return frame.getvalue()


def matches_sample(record: Record) -> bool:
    return (record.flags, record.key_hash, record.expires, record.time) == (
        record.seq % 256,
        record.seq * 7919 % (1 << 32),
        record.seq * 31 % (1 << 32),
        1_700_000_000_000 + record.seq,
    )


def body_of(data: bytes | None) -> bytes | None:
    """Return the body of a record."""
    if data is None:
        return None
    record = parse(data, 0, len(data), 0)
    assert record is not None and record.size == len(data)
    return record.body


def make_always_direct() -> DirectWrites:
    """Return a policy under which the loop writes every frame that needs nothing else."""
    policy = DirectWrites(math.inf, math.inf)
    for _ in range(SAMPLES_NEEDED):
        policy.record_in_thread(1, 0.0, 0.0)
    return policy


class StoreUnderTest:
    """One store of any kind, with blocking methods.

    `writes_directly`: the loop writes frames itself, on a slow disk too.
    """

    def __init__(
        self,
        directory: Path | None,
        files: FileSystem | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        redis: str = "",
        prefix: str = "sluice",
        writes_directly: bool = False,
        **options: object,
    ) -> None:
        self.directory = directory
        self._writes_directly = writes_directly
        self.redis = redis  # address of a server, for the Redis store
        self.prefix = prefix
        self.loop = ManualLoop()
        self.failures: list[Exception] = []
        self.loaded = RecordingLoader()
        self.report = RecoveryReport()
        self._files = files
        self._segment_bytes = segment_bytes
        self._options = options
        self._memory = MemoryStore(self.loop.call_soon, segment_bytes=segment_bytes)
        self.store: Store = self._make()

    def _make(self) -> Store:
        if self.redis:
            options: dict[str, Any] = {"options": RedisOptions(prefix=self.prefix), **self._options}
            return RedisStore(
                self.redis,
                self.loop.call_soon,
                self.failures.append,
                segment_bytes=self._segment_bytes,
                **options,
            )
        if self.directory is None:
            return self._memory
        return EmbeddedStore(
            str(self.directory),
            self.loop.call_soon,
            self.failures.append,
            segment_bytes=self._segment_bytes,
            files=self._files,
            call_soon=self.loop.call_soon if self._writes_directly else None,
            direct_writes=make_always_direct() if self._writes_directly else None,
            **self._options,  # type: ignore[arg-type]
        )

    def open(self) -> StoreUnderTest:
        self.loaded = RecordingLoader()
        self.report = self.store.open(self.loaded)
        return self

    def reopen(self) -> StoreUnderTest:
        self.store.close()
        self.store = self._make()
        return self.open()

    def start_commit(
        self, *records: SampleRecord, sync: bool = True, done: Callable[[], None]
    ) -> list[int]:
        at = self.store.next_frame_address()
        next_address = self.store.commit(frame_of(records), len(records), sync, done)
        assert next_address == self.store.next_frame_address()
        addresses = []
        for sample in records:
            addresses.append(at)
            at += HEADER_BYTES + len(sample.body)
        return addresses

    def commit(self, *records: SampleRecord, sync: bool = True) -> list[int]:
        """Commit one frame, wait until it is done, and return the address of each record."""
        answers: list[int] = []
        addresses = self.start_commit(*records, sync=sync, done=lambda: answers.append(1))
        self.loop.turn_until(lambda: bool(answers or self.failures))
        assert not self.failures, self.failures
        return addresses

    def try_commit(self, *records: SampleRecord) -> bool:
        """Return whether a commit completes, on a store that may have failed."""
        answers: list[int] = []
        self.start_commit(*records, done=lambda: answers.append(1))
        self.loop.turn_until(lambda: bool(answers or self.failures))
        return bool(answers)

    def read(self, addresses: Sequence[int]) -> list[bytes | None]:
        answers: list[list[bytes | None]] = []
        self.store.read(addresses, answers.append)
        self.loop.turn_until(lambda: bool(answers))
        assert len(answers[0]) == len(addresses)
        return answers[0]

    def bodies(self, addresses: Sequence[int]) -> list[bytes | None]:
        return [body_of(data) for data in self.read(addresses)]

    def scan(self, segment: int) -> list[Record]:
        answers: list[list[bytes]] = []
        self.store.scan_segment(segment, answers.append)
        self.loop.turn_until(lambda: bool(answers))
        return [read_row(rows, at) for rows in answers[0] for at in range(0, len(rows), ROW_BYTES)]

    def snapshot(self, state: bytes, free: Sequence[int] = (), pieces: int = 2) -> None:
        answers: list[int] = []
        size = max(1, len(state) // pieces)
        parts = [state[at : at + size] for at in range(0, len(state), size)]
        self.store.snapshot(parts, free, lambda: answers.append(1))
        self.loop.turn_until(lambda: bool(answers or self.failures))
        assert not self.failures, self.failures

    def fill_segment(self, first_seq: int, body_bytes: int = 1000) -> list[int]:
        """Commit messages until a new segment begins; return their addresses."""
        segment = self.store.next_frame_address() >> 32
        addresses: list[int] = []
        while self.store.next_frame_address() >> 32 == segment:
            seq = first_seq + len(addresses)
            addresses += self.commit(message(seq, seq.to_bytes(4, "big") * (body_bytes // 4)))
        return addresses
