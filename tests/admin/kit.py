"""A broker with its admin service, on a loop and a clock that move when told to, on either store.

    house = AdminHouse("memory")
    await house.ask(house.admin.create_queue({"name": "tasks"}))
    house.advance(10)

The clients are those of the broker's own tests. Nothing sleeps: asyncio's loop turns only so that coroutines can wait
for what the broker's loop does.
"""

from __future__ import annotations

import asyncio
import queue as threads
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from sluice.admin.service import AdminService
from sluice.broker.limits import Limits
from sluice.queues.flow.dead_letters import Alert
from sluice.queues.model.ledger import verify
from sluice.store.embedded import EmbeddedStore
from sluice.store.memory import MemoryStore
from tests.broker.kit import Client, Loop
from tests.broker.namespaces.kit import (
    QueueHarness,
    Templates,
    delivery_properties,
    join,
    put,
    settle,
    take,
)
from tests.queues.kit import PATIENCE_SECONDS, RecordingStore

T = TypeVar("T")

__all__ = ["AdminHarness", "delivery_properties", "join", "put", "settle", "take"]


class ThreadedLoop(Loop):
    """The same loop when threads stand behind it: it is settled when none of them owes an answer any more."""

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
            self._calls.get(timeout=PATIENCE_SECONDS)()


class AdminHarness(QueueHarness):
    def __init__(
        self, kind: str, directory: Path, templates: Templates = (), segment_bytes: int = 1 << 20
    ) -> None:
        self._kind = kind
        self._directory = directory
        self._templates = templates
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
        assert self.broker.router.queue_handler is not None
        self.door = self.broker.router.queue_handler
        self.admin = AdminService(
            self.engine, self.runner, self.door, self.broker, self._kind, "interpreted"
        )

    def restart(self) -> None:
        """Stop in good order and start again."""
        now = self.loop.now
        self.close()
        self._start(now)

    def close(self) -> None:
        self.loop.settle()
        assert verify(self.engine) == []
        assert self.failures == []
        self.runner.close()

    async def call(self, question: Coroutine[Any, Any, T]) -> T:
        """Let the broker's loop turn until the service has answered."""
        task = asyncio.ensure_future(question)
        while not task.done():
            await asyncio.sleep(0)
            self.loop.settle()
        self.loop.settle()
        return task.result()

    def worker(self, client: str = "w-1", queue: str = "tasks", **wishes: Any) -> Client:
        """A connected consumer."""
        worker = self.connect(client)
        assert join(worker, f"$queue/{queue}", **wishes)[0] < 0x80
        return worker

    def publish(self, payload: bytes = b"x", queue: str = "tasks", **wishes: object) -> None:
        """By a client of its own; `message_id=...` and the like are user properties."""
        author = self.connect("author")
        reported: dict[str, object] = {
            name.replace("_", "-"): value for name, value in wishes.items()
        }
        assert put(author, f"$queue/{queue}", payload, wishes=reported)[0] < 0x80
        author.disconnect()
