"""A worker that runs on a connection, from its start to its stop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from sluice.client import Client
from sluice.worker.adaptive_prefetch import CallLater
from sluice.worker.executor import TaskExecutor
from sluice.worker.middleware import Hook, Middleware, run_hooks
from sluice.worker.sending import JobSender
from sluice.worker.task import AnyTask


class Running:
    """The tasks of a worker on one connection. `finished` raises the error that ends it early."""

    def __init__(
        self,
        client: Client,
        tasks: Sequence[AnyTask],
        extend_seconds: float,
        call_later: CallLater,
        startup: Sequence[Hook],
        shutdown: Sequence[Hook],
        middlewares: Sequence[Middleware],
        sender: JobSender,
    ) -> None:
        self.client = client
        self.executors = [
            TaskExecutor(client, task, extend_seconds, call_later, middlewares) for task in tasks
        ]
        self._startup = startup
        self._shutdown = shutdown
        self._sender = sender
        self._is_started = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Run the startup hooks and start all tasks, or none: if one fails, stop the others."""
        self._sender.use(self.client)
        try:
            await run_hooks(self._startup)
            self._is_started = True
            for executor in self.executors:
                self._tasks += await executor.start()
        except BaseException:
            await self.stop(0.0)
            raise

    @property
    def is_idle(self) -> bool:
        """Return whether no job runs or is buffered."""
        return all(executor.is_idle for executor in self.executors)

    @property
    def done_count(self) -> int:
        """Return the number of jobs that succeeded."""
        return sum(executor.done_count for executor in self.executors)

    async def finished(self) -> None:
        """Return when the connection is closed; raise when it is lost for good."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self, grace_seconds: float) -> None:
        """Stop all tasks, then run the shutdown hooks, once and only if the startup succeeded."""
        await asyncio.gather(*(executor.stop(grace_seconds) for executor in self.executors))
        if self._is_started:
            self._is_started = False
            await run_hooks(self._shutdown)
        self._sender.use(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *fault: object) -> None:
        await self.stop(0.0)
