"""The stores of a broker under test, with loops that are idle only when the store is idle."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from sluice.store.embedded import EmbeddedStore
from sluice.store.memory import MemoryStore
from tests.broker.loop import Loop
from tests.queues.kit import STORE_TIMEOUT_SECONDS, RecordingStore

CallSoon = Callable[..., None]
Kept = Literal["synced", "answered", "written"]  # the frames that outlive the broker


class Backend(Protocol):
    """Opens the same store again after each stop."""

    name: str

    def make_loop(self) -> Loop: ...

    def open(self, loop: Loop, call_soon: CallSoon) -> Any: ...

    def crash(self, kept: Kept) -> None:
        """Forget what the end of the broker loses."""


class MemoryBackend:
    name = "memory"

    def __init__(self, segment_bytes: int = 1 << 20) -> None:
        self._segment_bytes = segment_bytes
        self._store: MemoryStore | None = None

    def make_loop(self) -> Loop:
        return Loop()

    def open(self, loop: Loop, call_soon: CallSoon) -> MemoryStore:
        if self._store is None:
            self._store = MemoryStore(
                call_soon, segment_bytes=self._segment_bytes, snapshot_bytes=self._segment_bytes
            )
        return self._store

    def crash(self, kept: Kept) -> None:
        store = self._store
        assert store is not None
        frames = 0 if kept == "synced" else store.count_unsynced()
        if kept == "answered":
            frames -= store.count_pending()
        self._store = store.crash(frames)


class EmbeddedBackend:
    """Files. Their store is killed with its process only: see tests/adversity."""

    name = "embedded"

    def __init__(self, folder: Path, segment_bytes: int = 1 << 20) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._failures: list[Exception] = []

    def make_loop(self) -> Loop:
        return ThreadedLoop(self._failures)

    def open(self, loop: Loop, call_soon: CallSoon) -> RecordingStore:
        assert isinstance(loop, ThreadedLoop)
        loop.store = RecordingStore(
            EmbeddedStore(
                str(self._folder),
                call_soon,
                self._failures.append,
                segment_bytes=self._segment_bytes,
                snapshot_bytes=self._segment_bytes,
            )
        )
        return loop.store

    def crash(self, kept: Kept) -> None:
        pytest.skip("the embedded store is killed with its process: tests/adversity")


class ThreadedLoop(Loop):
    """The loop for a store with threads: it is settled when no thread has pending work."""

    def __init__(self, failures: list[Exception]) -> None:
        super().__init__()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._failures = failures
        self.store: RecordingStore | None = None

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._calls.put(callback)

    def settle(self) -> None:
        while True:
            while not self._calls.empty():
                self._calls.get()()
            assert self._failures == []
            if self.store is None or self.store.pending == 0:
                return
            self._calls.get(timeout=STORE_TIMEOUT_SECONDS)()
