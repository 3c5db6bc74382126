"""Pending operations that can be awaited: connects the protocol, which has no loop, to asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from sluice.client.protocol import PendingOperation, PendingPublish, PublishResult


async def wait_done(operation: PendingOperation) -> None:
    """Wait until `operation` is done. Cancelling the wait does not affect the operation."""
    if operation.done:
        return
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: PendingOperation) -> None:
        if not waiter.done():
            waiter.set_result(None)

    operation.add_done_callback(wake)
    try:
        await waiter
    finally:
        operation.remove_done_callback(wake)


class Confirm(PendingPublish):
    """The result of `publish_nowait`. Await it for the server's answer, any number of times.

    A confirm that is never awaited costs nothing, and cancelling a wait does not withdraw the
    message.
    """

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, PublishResult]:
        if not self.done:
            yield from wait_done(self).__await__()
        return self.result()
