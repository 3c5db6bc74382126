"""Functions of the application around its jobs: hooks at start and stop, middleware per job."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sluice.client import Delivery
from sluice.worker.task import AnyTask

Hook = Callable[[], Awaitable[None] | None]
CallNext = Callable[[], Awaitable[Any]]
Middleware = Callable[[Delivery, AnyTask, CallNext], Awaitable[Any]]


async def run_hooks(hooks: Sequence[Hook]) -> None:
    """Call hooks in their order, one after the other."""
    for hook in hooks:
        outcome = hook()
        if inspect.isawaitable(outcome):
            await outcome


class MiddlewareChain:
    """All middleware of a worker around one job; the last one calls the handler."""

    __slots__ = ("_at", "_call", "_delivery", "_middlewares", "_task")

    def __init__(
        self,
        middlewares: Sequence[Middleware],
        delivery: Delivery,
        task: AnyTask,
        call: CallNext,
        at: int = 0,
    ) -> None:
        self._middlewares = middlewares
        self._delivery = delivery
        self._task = task
        self._call = call
        self._at = at

    async def __call__(self) -> Any:
        if self._at == len(self._middlewares):
            return await self._call()
        following = MiddlewareChain(
            self._middlewares, self._delivery, self._task, self._call, self._at + 1
        )
        return await self._middlewares[self._at](self._delivery, self._task, following)
