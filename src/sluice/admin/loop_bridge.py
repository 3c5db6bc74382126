"""Calls from the loop of the admin APIs to the admin service on the broker's loop, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from sluice.admin.service import AdminService

T = TypeVar("T")


class LoopBridge:
    """Carry a call to the broker's loop `loop` and its result back to the caller's loop."""

    def __init__(self, service: AdminService, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._loop = loop

    async def call(self, operation: Callable[[AdminService], Coroutine[Any, Any, T]]) -> T:
        """Run an operation on the broker's loop and return its result.

        A cancelled caller cancels the operation; what it had decided by then stays decided.
        """
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
    """One call in progress. Each loop is woken once for it.

    asyncio's own `run_coroutine_threadsafe` needs one more future, with a lock, on either side.
    """

    def __init__(
        self,
        caller_loop: asyncio.AbstractEventLoop,
        operation: Callable[[AdminService], Coroutine[Any, Any, T]],
    ) -> None:
        self.result: asyncio.Future[T] = caller_loop.create_future()
        self._caller_loop = caller_loop
        self._operation = operation
        self._task: asyncio.Task[T] | None = None

    # ---- on the broker's loop

    def start(self, service: AdminService) -> None:
        """Create and start the coroutine; no part of the service runs on another loop."""
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
                task.exception()  # the caller's loop is closed: mark the exception as retrieved

    # ---- on the caller's loop

    def _deliver_result(self, task: asyncio.Task[T]) -> None:
        if self.result.done():
            if not task.cancelled():
                task.exception()  # the caller has gone: mark the exception as retrieved
        elif task.cancelled():
            self.result.cancel()
        elif (fault := task.exception()) is not None:
            self.result.set_exception(fault)
        else:
            self.result.set_result(task.result())
