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

LENIENCY = 8  # how far the exception may go, in limits


class Inbox(Generic[T]):
    def __init__(self, limit: int, when_taken: Callable[[T], None] | None = None) -> None:
        self.limit = limit
        self.most = limit * LENIENCY
        self.dropped = 0
        self._messages: deque[T] = deque()
        self._takers: deque[asyncio.Future[None]] = deque()
        self._when_taken = when_taken
        self._ended = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def full(self) -> bool:
        return len(self._messages) >= self.limit

    @property
    def overflowing(self) -> bool:
        """Judged before a read, not within it: one read may bring thousands of small messages."""
        return len(self._messages) >= self.most

    def first(self) -> T | None:
        """Return the message that is taken next, and leave it here."""
        return self._messages[0] if self._messages else None

    def put(self, message: T) -> None:
        self._messages.append(message)
        if self._takers:
            self._wake_one()

    def end(self, error: Exception | None) -> None:
        """No more will come. With an error, what is here is still handed out, and then the error; without one the
        application closed the client itself and wants no more."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        if error is None:
            self._messages.clear()
        while self._takers:
            self._wake_one()

    async def take(self) -> T | None:
        """The next message; None after the end. A cancelled take loses nothing."""
        while not self._messages:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            taker = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            try:
                await taker
            except asyncio.CancelledError:
                if taker.cancelled():
                    with suppress(ValueError):  # whoever woke others in the meantime has passed over it
                        self._takers.remove(taker)
                elif self._messages:
                    self._wake_one()  # it was our turn: the message is the next one's
                raise
        message = self._messages.popleft()
        if self._messages and self._takers:
            self._wake_one()
        if self._when_taken is not None:
            self._when_taken(message)
        return message

    def take_waiting(self) -> list[T]:
        """All that is here, without waiting."""
        taken = list(self._messages)
        self._messages.clear()
        return taken

    def _wake_one(self) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                return


class Messages:
    """What `client.messages()` gives: an async iterator. Several of them share one inbox, each message goes to one."""

    def __init__(self, inbox: Inbox[Message]) -> None:
        self._inbox = inbox

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> Message:
        message = await self._inbox.take()
        if message is None:
            raise StopAsyncIteration
        return message
