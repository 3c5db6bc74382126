"""Threads for handlers that are no coroutines.

`run_in_executor` wakes the loop once for every job, through a socket. Here the results of jobs that end close together
are collected by one wake-up, which makes small jobs several times cheaper.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

Job = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]"]


class HandlerThreadPool:
    """`size` threads. They are daemons: a handler that never ends must not keep the process from ending."""

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
        self._jobs.put((function, arguments, answer))
        return answer

    def stop(self) -> None:
        """The threads end after what they are doing; nobody waits for them here."""
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, arguments, answer = job
            try:
                self._results.append((answer, function(*arguments), None))
            except (
                BaseException
            ) as error:  # whatever it is, it is the job's, and the thread goes on
                self._results.append((answer, None, error))
            if not self._is_wakeup_pending:
                self._is_wakeup_pending = True
                try:
                    self._loop.call_soon_threadsafe(self._collect)
                except RuntimeError:
                    return  # the loop is gone: this job was given back long ago

    def _collect(self) -> None:
        self._is_wakeup_pending = False  # before the look: what comes during it wakes us again
        results = self._results
        while results:
            answer, value, error = results.popleft()
            if answer.done():
                continue  # given up meanwhile
            if error is None:
                answer.set_result(value)
            elif isinstance(error, StopIteration):
                answer.set_exception(RuntimeError(f"the handler raised {error!r}"))
            else:
                answer.set_exception(error)
