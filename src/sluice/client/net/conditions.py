"""Tasks that wait for a condition of the client: capacity, a connection, all confirms."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class ConditionWaiters:
    """Waiting tasks and their conditions. Checked once per read, not per message."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: deque[tuple[Callable[[], bool], asyncio.Future[None]]] = deque()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Return after `check` has found the condition true, or after `wake_all`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (condition, waiter)
        self._entries.append(entry)
        try:
            await waiter
        except asyncio.CancelledError:
            if entry in self._entries:
                self._entries.remove(entry)
            raise

    def check(self) -> None:
        """Wake the tasks whose condition is true now."""
        entries = self._entries
        for _ in range(len(entries)):
            condition, waiter = entries.popleft()
            if waiter.done():
                continue
            if condition():
                waiter.set_result(None)
            else:
                entries.append((condition, waiter))

    def wake_all(self) -> None:
        while self._entries:
            _, waiter = self._entries.popleft()
            if not waiter.done():
                waiter.set_result(None)
