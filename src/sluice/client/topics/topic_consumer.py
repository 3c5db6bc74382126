"""Consuming a plain topic of any MQTT broker, 3.1.1 included, with dead letters by the client.

factory = ConsumerFactory.from_url("mqtt://localhost", client_id="billing", version=4)
orders = Subscription(
    "orders/#", dead_letter_topic="dead/orders", invalid_message_topic="invalid/orders"
)
async with factory.create(orders) as consumer:
    async for message in consumer:
        try:
            bill(message.payload)
        except ValueError as fault:
            await consumer.reject(message, "unacceptable", str(fault))
        else:
            await consumer.acknowledge(message)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Generic, Self, TypeVar, overload

from sluice.client.client import Client
from sluice.client.message import Message
from sluice.client.outcomes import Reason
from sluice.client.topics.handler_loop import Handler, HandlerLoop
from sluice.client.topics.rejections import Producer, Rejections
from sluice.client.topics.subscription import (
    Subscription,
    TopicSubscription,
    read_subscription,
)

T = TypeVar("T")

# Options of the consumer's own connection that a producer must not share.
_PRODUCER_OVERRIDES: Final[dict[str, Any]] = {
    "client_id": "",
    "clean_start": True,
    "session_expiry": 0,
    "will": None,
    "manual_ack": False,
    "on_connect": None,
    "on_disconnect": None,
}


class ConsumerFactory:
    """Creates consumers that share connection options, those of `Client`."""

    def __init__(self, host: str = "127.0.0.1", port: int = 1883, **options: Any) -> None:
        self._make_client: Callable[..., Client] = lambda **more: Client(
            host, port, **{**options, **more}
        )
        self._options = options

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        factory = cls(**options)
        factory._make_client = lambda **more: Client.from_url(url, **{**options, **more})
        return factory

    @overload
    def create(self, subscription: Subscription[T]) -> TopicConsumer[T]: ...

    @overload
    def create(self, subscription: TopicSubscription) -> TopicConsumer[Any]: ...

    def create(self, subscription: TopicSubscription) -> TopicConsumer[Any]:
        """Return a consumer of a `Subscription`, or of an object that is described like one.

        An object gets dead letters if it has `dead_letter_topic` (`SupportsDeadLetters`), and
        invalid messages if it has `invalid_message_topic` (`SupportsInvalidMessages`).
        """
        known = read_subscription(subscription)
        buffer = {} if known.buffer_size is None else {"max_buffered": known.buffer_size}
        client = self._make_client(manual_ack=True, **buffer)
        rejections = Rejections(
            client.options.version,
            self._producer(known.dead_letter_topic, "dead-letters"),
            self._producer(known.invalid_message_topic, "invalid-messages"),
            known.message_type_name,
        )
        return TopicConsumer(client, known, rejections)

    def _producer(self, topic: str | None, name: str) -> Producer | None:
        return None if topic is None else Producer(lambda: self._client_for(name), topic)

    def _client_for(self, name: str) -> Client:
        """Return a client without the consumer's session: two clients must not share one."""
        client_id = self._options.get("client_id")
        return self._make_client(
            **{**_PRODUCER_OVERRIDES, "client_id": f"{client_id}-{name}" if client_id else ""}
        )


class TopicConsumer(Generic[T]):
    """The messages of one subscription. The application acknowledges or rejects each of them.

    `run` does that by the outcome of a handler.
    """

    def __init__(
        self, client: Client, subscription: Subscription[T], rejections: Rejections
    ) -> None:
        self.client = client
        self.subscription = subscription
        self.rejections = rejections
        self.decoder = subscription.make_decoder()
        self._handler_loop: HandlerLoop[T] | None = None

    async def open(self) -> None:
        await self.client.connect()
        await self.client.subscribe(self.subscription.topic, qos=self.subscription.qos)

    async def close(self) -> None:
        """Close the consumer. A persistent session redelivers messages that are not settled."""
        await self.rejections.close()
        await self.client.close()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.client.close(drain_seconds=0)
            raise
        return self

    async def __aexit__(self, *fault: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        message = await self.receive_next()
        if message is None:
            raise StopAsyncIteration
        return message

    async def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, or None after the end.

        Raise TimeoutError if none arrives in time; the default is `receive_timeout_seconds` of the
        subscription.
        """
        seconds = self.subscription.receive_timeout_seconds if timeout is None else timeout
        async with asyncio.timeout(seconds):
            return await self.receive_next()

    async def receive_next(self) -> Message | None:
        """Return the next message, however long that takes, or None after the end."""
        try:
            return await anext(self.client.messages())
        except StopAsyncIteration:
            return None

    def decode(self, message: Message) -> T:
        """Return the payload as the subscription's type. Raise `UnreadablePayload`."""
        return self.decoder(message.payload)

    async def run(self, handler: Handler[T]) -> None:
        """Call `handler(value, message)` for each message until `stop`.

        A return acknowledges, an exception requeues and finally rejects, `Reject` and an unreadable
        payload reject at once. A coroutine runs on the loop, any other function in a thread.
        """
        self._handler_loop = HandlerLoop(self, handler)
        await self._handler_loop.run()

    def stop(self) -> None:
        """End `run` when the handlers that run now have ended."""
        if self._handler_loop is not None:
            self._handler_loop.stop()

    async def acknowledge(self, message: Message) -> bool:
        """Acknowledge a message as done."""
        return await message.ack()

    async def reject(
        self, message: Message, reason: Reason | None = None, description: str = ""
    ) -> bool:
        """Send a message to the dead-letter topic and settle it; always return True.

        The default reason is `delivery-error`; with `unacceptable` it goes to the invalid-message
        topic. If it cannot be stored, an error is logged.
        """
        return await self.rejections.reject(message, reason, description)
