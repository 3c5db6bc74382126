"""Threads for handlers that are not coroutines.

`run_in_executor` wakes the loop through a socket for every job. Here one wake-up collects the
results of all jobs that end close together, which makes small jobs several times cheaper.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

Job = tuple[Context, Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]"]


class HandlerThreadPool:
    """`size` daemon threads: a handler that never ends must not keep the process alive."""

    def __init__(self, size: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._is_wakeup_pending = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((copy_context(), function, arguments, answer))
        return answer

    def stop(self) -> None:
        """End the threads after their current jobs, without waiting for them."""
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            context, function, arguments, answer = job
            try:
                self._results.append((answer, context.run(function, *arguments), None))
            except BaseException as error:  # the job's outcome: the thread must continue
                self._results.append((answer, None, error))
            if not self._is_wakeup_pending:
                self._is_wakeup_pending = True
                try:
                    self._loop.call_soon_threadsafe(self._collect)
                except RuntimeError:
                    return  # the loop is closed, and the job was released before

    def _collect(self) -> None:
        # Cleared first: a result that arrives during the loop wakes us again.
        self._is_wakeup_pending = False
        results = self._results
        while results:
            answer, value, error = results.popleft()
            if answer.done():
                continue  # cancelled meanwhile
            if error is None:
                answer.set_result(value)
            elif isinstance(error, StopIteration):
                answer.set_exception(RuntimeError(f"the handler raised {error!r}"))
            else:
                answer.set_exception(error)
