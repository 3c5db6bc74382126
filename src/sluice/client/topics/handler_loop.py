"""Calls a handler for each message of a plain topic, and settles the message by the outcome.

    handler returns          acknowledged
    payload is unreadable    rejected as unacceptable
    Reject                   rejected with its reason
    any other exception      handled again after the requeue delay, up to `requeue_count` times;
                             then rejected as a delivery error

A message that waits for its requeue is not acknowledged, so a persistent session delivers it again
after a crash. It keeps its place in the client's window: the server sends no more than that.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sluice.client.errors import ClientError
from sluice.client.message import Message
from sluice.client.outcomes import (
    DELIVERY_ERROR,
    UNACCEPTABLE,
    Reject,
    Retry,
    describe,
    normalize_reason,
)
from sluice.client.payload_codecs import UnreadablePayload
from sluice.client.topics.subscription import UNLIMITED
from sluice.units import parse_duration

if TYPE_CHECKING:
    from sluice.client.topics.topic_consumer import TopicConsumer

log = logging.getLogger("sluice.client")

T = TypeVar("T")
Handler = Callable[[T, Message], Awaitable[None] | None]


class UnacceptableLimitReached(ClientError):
    """So many messages were unacceptable that something is wrong with their producer."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(
            f"{name!r} had {count} unacceptable message{'' if count == 1 else 's'}, as many as "
            "its unacceptable_limit",
            "Check what is published there, then run the handler again",
        )


class HandlerLoop(Generic[T]):
    """`performers` asyncio tasks, each handling one message after the other."""

    def __init__(self, consumer: TopicConsumer[T], handler: Handler[T]) -> None:
        self._consumer = consumer
        self._subscription = consumer.subscription
        self._handler = handler
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004
        )
        self._threads: ThreadPoolExecutor | None = None
        self._performers: set[asyncio.Task[None]] = set()
        self._active: set[asyncio.Task[Any]] = set()
        self._failures: dict[int, int] = {}  # by identity of the messages that wait for a requeue
        self._timers: set[asyncio.TimerHandle] = set()
        self._unacceptable = 0
        self._is_stopping = False

    async def run(self) -> None:
        """Handle messages until `stop`, or until the connection or the unacceptable limit ends it.

        Handlers that run then may finish.
        """
        count = self._subscription.performers
        if not self._is_async:
            self._threads = ThreadPoolExecutor(count, self._subscription.name)
        self._performers = {
            asyncio.create_task(self._perform(), name=f"{self._subscription.name}-{number}")
            for number in range(count)
        }
        try:
            done, _ = await asyncio.wait(self._performers, return_when=asyncio.FIRST_EXCEPTION)
            self.stop()
            await asyncio.wait(self._performers)
            for task in done:
                if not task.cancelled():
                    task.result()
        finally:
            for task in self._performers:
                task.cancel()
            for timer in self._timers:
                timer.cancel()
            if self._threads is not None:
                self._threads.shutdown(wait=False)

    def stop(self) -> None:
        """Take no more messages, and let running handlers finish."""
        self._is_stopping = True
        for task in self._performers - self._active:
            task.cancel()

    async def _perform(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while not self._is_stopping:
            message = await self._consumer.receive_next()
            if message is None:
                return
            self._active.add(task)
            try:
                await self._handle(message)
            finally:
                self._active.discard(task)

    async def _handle(self, message: Message) -> None:
        try:
            value = self._consumer.decode(message)
        except UnreadablePayload as fault:
            await self._reject_unacceptable(message, describe(fault))
            return
        try:
            async with asyncio.timeout(self._subscription.timeout_seconds):
                await self._call(value, message)
        except Reject as rejection:
            if normalize_reason(rejection.reason) == UNACCEPTABLE:
                await self._reject_unacceptable(message, describe(rejection))
            else:
                await self._reject(message, describe(rejection))
        except Exception as error:
            await self._on_failed(message, error)
        else:
            self._failures.pop(id(message), None)
            await message.ack()

    async def _call(self, value: T, message: Message) -> None:
        if self._threads is None:
            outcome = self._handler(value, message)
            assert outcome is not None
            await outcome
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._handler, value, message)

    async def _on_failed(self, message: Message, error: Exception) -> None:
        limit = self._subscription.requeue_count
        failures = self._failures.get(id(message), 0) + 1
        if limit != UNLIMITED and failures > limit:
            log.error(
                "%s failed at a message on %s, attempt %d: %s; rejected",
                self._subscription.name, message.topic, failures, describe(error), exc_info=error,
            )  # fmt: skip
            await self._reject(message, describe(error))
            return
        log.warning(
            "%s failed at a message on %s, attempt %d: %s; it is handled again",
            self._subscription.name, message.topic, failures, describe(error), exc_info=error,
        )  # fmt: skip
        self._failures[id(message)] = failures
        self._requeue(message, self._delay_after(error))

    def _delay_after(self, error: Exception) -> float:
        delay = error.delay if isinstance(error, Retry) else None
        if delay is None:
            return self._subscription.requeue_delay_seconds
        return parse_duration(delay) if isinstance(delay, str) else delay

    def _requeue(self, message: Message, delay_seconds: float) -> None:
        def put_back() -> None:
            self._timers.discard(timer)
            self._consumer.client.requeue(message)

        timer = asyncio.get_running_loop().call_later(delay_seconds, put_back)
        self._timers.add(timer)

    async def _reject(self, message: Message, description: str) -> None:
        self._failures.pop(id(message), None)
        await self._consumer.reject(message, DELIVERY_ERROR, description)

    async def _reject_unacceptable(self, message: Message, description: str) -> None:
        self._failures.pop(id(message), None)
        log.error(
            "%s rejects a message on %s as unacceptable: %s",
            self._subscription.name, message.topic, description,
        )  # fmt: skip
        await self._consumer.reject(message, UNACCEPTABLE, description)
        self._unacceptable += 1
        limit = self._subscription.unacceptable_limit
        if limit and self._unacceptable >= limit:
            raise UnacceptableLimitReached(self._subscription.name, self._unacceptable)
