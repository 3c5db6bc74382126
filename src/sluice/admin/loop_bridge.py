"""The desk between the doors and the broker: questions are put on one loop and answered on another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from sluice.admin.service import AdminService

T = TypeVar("T")


class LoopBridge:
    """Carries a question from a door's loop to the broker's, and the answer back. `loop` is the broker's."""

    def __init__(self, service: AdminService, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._loop = loop

    async def call(self, operation: Callable[[AdminService], Coroutine[Any, Any, T]]) -> T:
        """Ask, and wait for the answer. An asker who goes away takes the question along: what was decided by then
        stays decided."""
        caller_loop = asyncio.get_running_loop()
        if caller_loop is self._loop:
            return await operation(self._service)
        pending_call = _CrossLoopCall(caller_loop, operation)
        self._loop.call_soon_threadsafe(pending_call.start, self._service)
        try:
            return await pending_call.result
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(pending_call.cancel)
            raise


class _CrossLoopCall(Generic[T]):
    """One question under way. Each loop is woken once for it; asyncio's own way there and back goes through one more
    future, with a lock, on either side."""

    def __init__(
        self,
        caller_loop: asyncio.AbstractEventLoop,
        operation: Callable[[AdminService], Coroutine[Any, Any, T]],
    ) -> None:
        self.result: asyncio.Future[T] = caller_loop.create_future()
        self._caller_loop = caller_loop
        self._operation = operation
        self._task: asyncio.Task[T] | None = None

    # -- on the broker's loop

    def start(self, service: AdminService) -> None:
        """The coroutine is made here too, so that no part of the service runs elsewhere."""
        if not self.result.done():
            self._task = asyncio.get_running_loop().create_task(self._operation(service))
            self._task.add_done_callback(self._on_task_done)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _on_task_done(self, task: asyncio.Task[T]) -> None:
        try:
            self._caller_loop.call_soon_threadsafe(self._deliver_result, task)
        except RuntimeError:
            if not task.cancelled():
                task.exception()  # the door's loop is closed: nobody is left to hear it

    # -- on the door's

    def _deliver_result(self, task: asyncio.Task[T]) -> None:
        if self.result.done():
            if not task.cancelled():
                task.exception()  # the asker has gone
        elif task.cancelled():
            self.result.cancel()
        elif (fault := task.exception()) is not None:
            self.result.set_exception(fault)
        else:
            self.result.set_result(task.result())
