"""Exchanges that can be awaited: the seam between the protocol, which knows no loop, and the application."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from sluice.client.protocol.pending import PendingOperation, PendingPublish, PublishResult


async def wait_done(operation: PendingOperation) -> None:
    """Return when `exchange` is done. Cancelling the wait leaves the exchange alone."""
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
    """What `publish_nowait` returns. Await it for the server's answer, once, many times or never: an unawaited
    confirm costs nothing, and cancelling a wait does not take the message back."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, PublishResult]:
        if not self.done:
            yield from wait_done(self).__await__()
        return self.result()
