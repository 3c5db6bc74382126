"""A worker at work, from its connection to its stop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from sluice.client import Client
from sluice.worker.adaptive_prefetch import CallLater
from sluice.worker.executor import TaskExecutor
from sluice.worker.task import Task


class Running:
    """The tasks of a worker on one connection. What ends it early is raised by `finished`."""

    def __init__(
        self,
        client: Client,
        tasks: Sequence[Task[..., Any]],
        extend_seconds: float,
        call_later: CallLater,
    ) -> None:
        self.client = client
        self.executors = [TaskExecutor(client, task, extend_seconds, call_later) for task in tasks]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """All tasks, or none: what has begun when one is refused is stopped again."""
        try:
            for executor in self.executors:
                self._tasks += await executor.start()
        except BaseException:
            await self.stop(0.0)
            raise

    @property
    def is_idle(self) -> bool:
        """Whether nothing is worked on, and nothing waits here."""
        return all(lanes.is_idle for lanes in self.executors)

    @property
    def done_count(self) -> int:
        """Jobs that ended well."""
        return sum(lanes.done_count for lanes in self.executors)

    async def finished(self) -> None:
        """Return when the connection is closed; raise when it is lost for good."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self, grace_seconds: float) -> None:
        await asyncio.gather(*(lanes.stop(grace_seconds) for lanes in self.executors))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop(0.0)
