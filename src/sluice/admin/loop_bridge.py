"""The desk between the doors and the broker: questions are put on one loop and answered on another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from sluice.admin.service import AdminService

T = TypeVar("T")


class Desk:
    """Carries a question from a door's loop to the broker's, and the answer back. `loop` is the broker's."""

    def __init__(self, service: AdminService, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._loop = loop

    async def ask(self, question: Callable[[AdminService], Coroutine[Any, Any, T]]) -> T:
        """Ask, and wait for the answer. An asker who goes away takes the question along: what was decided by then
        stays decided."""
        here = asyncio.get_running_loop()
        if here is self._loop:
            return await question(self._service)
        errand = _Errand(here, question)
        self._loop.call_soon_threadsafe(errand.begin, self._service)
        try:
            return await errand.answer
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(errand.give_up)
            raise


class _Errand(Generic[T]):
    """One question under way. Each loop is woken once for it; asyncio's own way there and back goes through one more
    future, with a lock, on either side."""

    def __init__(
        self,
        home: asyncio.AbstractEventLoop,
        question: Callable[[AdminService], Coroutine[Any, Any, T]],
    ) -> None:
        self.answer: asyncio.Future[T] = home.create_future()
        self._home = home
        self._question = question
        self._task: asyncio.Task[T] | None = None

    # -- on the broker's loop

    def begin(self, service: AdminService) -> None:
        """The coroutine is made here too, so that no part of the service runs elsewhere."""
        if not self.answer.done():
            self._task = asyncio.get_running_loop().create_task(self._question(service))
            self._task.add_done_callback(self._answered)

    def give_up(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _answered(self, task: asyncio.Task[T]) -> None:
        try:
            self._home.call_soon_threadsafe(self._tell, task)
        except RuntimeError:
            if not task.cancelled():
                task.exception()  # the door's loop is closed: nobody is left to hear it

    # -- on the door's

    def _tell(self, task: asyncio.Task[T]) -> None:
        if self.answer.done():
            if not task.cancelled():
                task.exception()  # the asker has gone
        elif task.cancelled():
            self.answer.cancel()
        elif (fault := task.exception()) is not None:
            self.answer.set_exception(fault)
        else:
            self.answer.set_result(task.result())
