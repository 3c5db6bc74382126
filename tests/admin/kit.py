"""A broker with its admin service, with a loop and a clock that the test advances, on either store.

    harness = AdminHarness("memory")
    await harness.call(harness.admin.create_queue({"name": "tasks"}))
    harness.advance(10)

The clients are those of the broker's own tests. Nothing sleeps: asyncio's loop turns only so that
coroutines can wait for the broker's loop.
"""

from __future__ import annotations

import asyncio
import queue as threads
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sluice.admin.service import AdminService
from sluice.broker.limits import Limits
from sluice.queues.model.effects import Alert
from sluice.queues.model.ledger import verify
from sluice.store.embedded import EmbeddedStore
from sluice.store.memory import MemoryStore
from tests.broker.kit import Client, Loop
from tests.broker.namespaces.kit import (
    QueueHarness,
    Templates,
    delivery_properties,
    join,
    make_templates,
    put,
    settle,
    take,
)
from tests.queues.kit import STORE_TIMEOUT_SECONDS, RecordingStore

T = TypeVar("T")

__all__ = ["AdminHarness", "delivery_properties", "join", "put", "settle", "take"]


class ThreadedLoop(Loop):
    """The same loop for a store with threads: it is settled when no thread has pending work."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: threads.SimpleQueue[Callable[[], None]] = threads.SimpleQueue()
        self.store: RecordingStore | None = None

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._calls.put(callback)

    def settle(self) -> None:
        while True:
            while not self._calls.empty():
                self._calls.get()()
            if self.store is None or self.store.pending == 0:
                return
            self._calls.get(timeout=STORE_TIMEOUT_SECONDS)()


class AdminHarness(QueueHarness):
    def __init__(
        self, kind: str, directory: Path, templates: Templates = (), segment_bytes: int = 1 << 20
    ) -> None:
        self._kind = kind
        self._directory = directory
        self._queue_templates = make_templates(templates)
        self._queues = True
        self._segment_bytes = segment_bytes
        self.limits = Limits()
        self.log: list[tuple[str, dict[str, object]]] = []
        self.alerts: list[Alert] = []
        self.warnings: list[str] = []
        self.failures: list[Exception] = []
        self._memory: MemoryStore | None = None
        self._start(Loop().now)

    def _start(self, now: float) -> None:
        if self._kind == "embedded":
            loop = ThreadedLoop()
            self.loop: Loop = loop
            loop.store = RecordingStore(
                EmbeddedStore(
                    str(self._directory),
                    self._call_soon,
                    self.failures.append,
                    segment_bytes=self._segment_bytes,
                    snapshot_bytes=self._segment_bytes,
                )
            )
            self.store: Any = loop.store
        else:
            self.loop = Loop()
            if self._memory is None:
                self._memory = MemoryStore(
                    self._call_soon,
                    segment_bytes=self._segment_bytes,
                    snapshot_bytes=self._segment_bytes,
                )
            self.store = self._memory
        self.loop.now = now
        self._build()
        self.queue_handler = self.core.queue_handler
        self.admin = AdminService(
            self.engine,
            self.commit_loop,
            self.queue_handler,
            self.broker,
            self._kind,
            "interpreted",
        )

    def restart(self) -> None:
        """Stop cleanly and start again."""
        now = self.loop.now
        self.close()
        self._start(now)

    def kill(self) -> None:
        """End as by SIGKILL, and start again on what the store has."""
        if self._memory is None:
            pytest.skip("the embedded store is killed with its process: tests/adversity")
        now = self.loop.now
        self._memory = self._memory.crash(
            self._memory.count_unsynced() - self._memory.count_pending()
        )
        self._start(now)

    def close(self) -> None:
        self.loop.settle()
        assert verify(self.engine.queues) == []
        assert self.failures == []
        self.commit_loop.close()

    async def call(self, operation: Coroutine[Any, Any, T]) -> T:
        """Turn the broker's loop until the service has answered."""
        task = asyncio.ensure_future(operation)
        while not task.done():
            await asyncio.sleep(0)
            self.loop.settle()
        self.loop.settle()
        return task.result()

    def worker(self, client: str = "w-1", queue: str = "tasks", **options: Any) -> Client:
        """Return a connected consumer."""
        worker = self.connect(client)
        assert join(worker, f"$queue/{queue}", **options)[0] < 0x80
        return worker

    def publish(self, payload: bytes = b"x", queue: str = "tasks", **options: object) -> None:
        """Publish with a separate client; `options` such as `message_id` become user properties."""
        author = self.connect("author")
        reported: dict[str, object] = {
            name.replace("_", "-"): value for name, value in options.items()
        }
        assert put(author, f"$queue/{queue}", payload, options=reported)[0] < 0x80
        author.disconnect()
