"""Pending operations that can be awaited: connects the protocol, which has no loop, to asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from sluice.client.errors import PublishesFailed
from sluice.client.protocol import PendingOperation, PendingPublish, PublishResult
from sluice.wire.packets import Publish


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


class UnseenFailures:
    """Failed publishes whose confirms were not awaited: `drain` reports them."""

    def __init__(self) -> None:
        self._count = 0
        self._first: Exception | None = None
        self._report = 1  # the number of the next report

    def add(self, error: Exception) -> int:
        """Count a failure and return the number of the report that will contain it."""
        self._count += 1
        self._first = self._first or error
        return self._report

    def remove(self, report: int) -> None:
        """Leave one failure out of a report that is still to come: its confirm was awaited."""
        if report == self._report:
            self._count -= 1

    def raise_all(self) -> None:
        """Raise an error about all failures since the last call, if there are any."""
        count, first = self._count, self._first
        self._count, self._first = 0, None
        self._report += 1
        if count > 0 and first is not None:
            raise PublishesFailed(count, first) from first


class NowaitConfirm(Confirm):
    """A confirm that may never be awaited; its failure then counts as unseen."""

    __slots__ = ("_failures", "_report")

    def __init__(self, packet: Publish, failures: UnseenFailures) -> None:
        super().__init__(packet)
        self._failures = failures
        self._report = 0

    def _finish(self) -> None:
        if self.error is not None and not self._callbacks:
            self._report = self._failures.add(self.error)
        super()._finish()

    def result(self) -> PublishResult:
        if self._report:
            self._failures.remove(self._report)
            self._report = 0
        return super().result()
