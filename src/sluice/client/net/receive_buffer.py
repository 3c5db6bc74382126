"""Messages between the socket and the application: bounded, because a slow application must cost the server's queue
depth and not our memory.

Above `limit` the connection stops reading. There is one exception: while the application waits for an answer of the
server (a confirm, a SUBACK), reading goes on, because the answer stands in the stream behind the messages and an
application that waits for it takes none. QoS 1 and 2 messages stay bounded by the receive maximum even then; QoS 0
messages are dropped and counted while more than `most` wait, which is what QoS 0 allows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from sluice.client.message import Message

T = TypeVar("T")

HARD_LIMIT_FACTOR = 8  # how far the exception may go, in limits


class ReceiveBuffer(Generic[T]):
    def __init__(self, limit: int, on_taken: Callable[[T], None] | None = None) -> None:
        self.limit = limit
        self.hard_limit = limit * HARD_LIMIT_FACTOR
        self.dropped = 0
        self._messages: deque[T] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._on_taken = on_taken
        self._is_ended = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def is_full(self) -> bool:
        return len(self._messages) >= self.limit

    @property
    def is_overflowing(self) -> bool:
        """Judged before a read, not within it: one read may bring thousands of small messages."""
        return len(self._messages) >= self.hard_limit

    def peek(self) -> T | None:
        """Return the message that is taken next, and leave it here."""
        return self._messages[0] if self._messages else None

    def put(self, message: T) -> None:
        self._messages.append(message)
        if self._waiters:
            self._wake_one()

    def end(self, error: Exception | None) -> None:
        """No more will come. With an error, what is here is still handed out, and then the error; without one the
        application closed the client itself and wants no more."""
        if self._is_ended:
            return
        self._is_ended = True
        self._error = error
        if error is None:
            self._messages.clear()
        while self._waiters:
            self._wake_one()

    async def take(self) -> T | None:
        """The next message; None after the end. A cancelled take loses nothing."""
        while not self._messages:
            if self._is_ended:
                if self._error is not None:
                    raise self._error
                return None
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.cancelled():
                    with suppress(
                        ValueError
                    ):  # whoever woke others in the meantime has passed over it
                        self._waiters.remove(waiter)
                elif self._messages:
                    self._wake_one()  # it was our turn: the message is the next one's
                raise
        message = self._messages.popleft()
        if self._messages and self._waiters:
            self._wake_one()
        if self._on_taken is not None:
            self._on_taken(message)
        return message

    def take_waiting(self) -> list[T]:
        """All that is here, without waiting."""
        taken = list(self._messages)
        self._messages.clear()
        return taken

    def _wake_one(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


class Messages:
    """What `client.messages()` gives: an async iterator. Several of them share one inbox, each message goes to one."""

    def __init__(self, buffer: ReceiveBuffer[Message]) -> None:
        self._buffer = buffer

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> Message:
        message = await self._buffer.take()
        if message is None:
            raise StopAsyncIteration
        return message
