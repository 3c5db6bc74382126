"""The desk between the doors and the broker: questions are put on one loop and answered on another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

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
        if asyncio.get_running_loop() is self._loop:
            return await question(self._service)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._put(question), self._loop))

    async def _put(self, question: Callable[[AdminService], Coroutine[Any, Any, T]]) -> T:
        """The coroutine is made on the broker's loop too, so that no part of the service runs elsewhere."""
        return await question(self._service)
