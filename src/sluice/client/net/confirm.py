"""Exchanges that can be awaited: the seam between the protocol, which knows no loop, and the application."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from sluice.client.protocol.pending import Exchange, Outgoing, PublishResult


async def finished(exchange: Exchange) -> None:
    """Return when `exchange` is done. Cancelling the wait leaves the exchange alone."""
    if exchange.done:
        return
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: Exchange) -> None:
        if not waiter.done():
            waiter.set_result(None)

    exchange.add_done_callback(wake)
    try:
        await waiter
    finally:
        exchange.remove_done_callback(wake)


class Confirm(Outgoing):
    """What `publish_nowait` returns. Await it for the server's answer, once, many times or never: an unawaited
    confirm costs nothing, and cancelling a wait does not take the message back."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, PublishResult]:
        if not self.done:
            yield from finished(self).__await__()
        return self.result()
