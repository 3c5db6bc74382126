"""Buffer of received messages that the application has not taken yet.

The buffer is bounded, so that a slow application costs queue depth at the server and not memory.

Above `limit` the connection stops reading, with one exception: while the application waits for an
answer of the server (a PUBACK, a SUBACK), reading continues, because the answer comes after the
messages in the stream and a waiting application takes no messages. QoS 1 and 2 messages are bounded
by the receive maximum even then; QoS 0 messages are dropped and counted above `hard_limit`, as QoS
0 allows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from sluice.client.message import Message

T = TypeVar("T")

HARD_LIMIT_FACTOR = 8  # hard limit in multiples of the limit


class ReceiveBuffer(Generic[T]):
    """A bounded FIFO between the socket and the application."""

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
        """Return whether QoS 0 messages are dropped.

        The caller checks it before a read, not within it: one read may have thousands of messages.
        """
        return len(self._messages) >= self.hard_limit

    def peek(self) -> T | None:
        """Return the next message without taking it."""
        return self._messages[0] if self._messages else None

    def put(self, message: T) -> None:
        self._messages.append(message)
        if self._waiters:
            self._wake_one()

    def end(self, error: Exception | None) -> None:
        """End the buffer. With an error, takers still get the buffered messages and then the error.

        Without an error, the application itself closed the client, and the messages are dropped.
        """
        if self._is_ended:
            return
        self._is_ended = True
        self._error = error
        if error is None:
            self._messages.clear()
        while self._waiters:
            self._wake_one()

    async def take(self) -> T | None:
        """Return the next message, or None after the end. A cancelled take loses nothing."""
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
                    with suppress(ValueError):  # `_wake_one` may have removed it meanwhile
                        self._waiters.remove(waiter)
                elif self._messages:
                    self._wake_one()  # we were woken for this message: wake the next taker
                raise
        message = self._messages.popleft()
        if self._messages and self._waiters:
            self._wake_one()
        if self._on_taken is not None:
            self._on_taken(message)
        return message

    def take_waiting(self) -> list[T]:
        """Take all buffered messages without waiting."""
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
    """The async iterator of `client.messages()`. Several iterators share the messages."""

    def __init__(self, buffer: ReceiveBuffer[Message]) -> None:
        self._buffer = buffer

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> Message:
        message = await self._buffer.take()
        if message is None:
            raise StopAsyncIteration
        return message
