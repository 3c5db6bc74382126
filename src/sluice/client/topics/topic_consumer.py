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
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from sluice.client.client import Client
from sluice.client.message import Message
from sluice.client.queues.delivery import Reason
from sluice.client.topics.rejections import Producer, Rejections

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


@dataclass(frozen=True, slots=True)
class Subscription:
    """A topic filter, and the optional topics for rejected messages.

    `message_type` is recorded on rejected messages; the default is their content type.
    """

    topic: str
    qos: int = 1
    dead_letter_topic: str | None = None
    invalid_message_topic: str | None = None
    message_type: str | None = None


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

    def create(self, subscription: Subscription) -> TopicConsumer:
        client = self._make_client(manual_ack=True)
        version = client.options.version
        rejections = Rejections(
            version,
            self._producer(subscription.dead_letter_topic, "dead-letters"),
            self._producer(subscription.invalid_message_topic, "invalid-messages"),
            subscription.message_type,
        )
        return TopicConsumer(client, subscription, rejections)

    def _producer(self, topic: str | None, name: str) -> Producer | None:
        return None if topic is None else Producer(lambda: self._client_for(name), topic)

    def _client_for(self, name: str) -> Client:
        """Return a client without the consumer's session: two clients must not share one."""
        client_id = self._options.get("client_id")
        return self._make_client(
            **{**_PRODUCER_OVERRIDES, "client_id": f"{client_id}-{name}" if client_id else ""}
        )


class TopicConsumer:
    """The messages of one subscription. The application acknowledges or rejects each of them."""

    def __init__(self, client: Client, subscription: Subscription, rejections: Rejections) -> None:
        self.client = client
        self.subscription = subscription
        self.rejections = rejections

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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        message = await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    async def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, or None after the end.

        Raise TimeoutError if none arrives in time.
        """
        try:
            async with asyncio.timeout(timeout):
                return await anext(self.client.messages())
        except StopAsyncIteration:
            return None

    async def acknowledge(self, message: Message) -> bool:
        """Acknowledge a message as done."""
        return await message.ack()

    async def reject(
        self, message: Message, reason: Reason = "delivery-error", description: str = ""
    ) -> bool:
        """Send a message to the dead-letter topic and settle it; always return True.

        With `unacceptable` it goes to the invalid-message topic. If it cannot be stored, an error
        is logged.
        """
        return await self.rejections.reject(message, reason, description)
