"""Routes rejected messages of a plain topic.

    reject(message, reason)
    ├─ delivery-error    dead-letter topic ─▶ there          none ─▶ a warning, settled
    └─ unacceptable      invalid-message topic ─▶ there      none ─▶ as delivery-error

`reject` always returns True: the message is settled and is not redelivered. If the dead-letter
publish itself fails, an error is logged with all metadata of the message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from sluice.client.client import Client
from sluice.client.errors import ClientError
from sluice.client.message import Message
from sluice.client.outcomes import RECORDED_SPELLINGS, UNACCEPTABLE, normalize_reason
from sluice.client.queues import sanitize_text
from sluice.client.topics.dead_letter_envelope import (
    ORIGINAL_MESSAGE_TYPE,
    ORIGINAL_TOPIC,
    REJECTION_MESSAGE,
    REJECTION_REASON,
    REJECTION_TIMESTAMP,
    add_to_payload,
    add_to_properties,
    message_type_in,
)
from sluice.wire.packets import V5
from sluice.wire.properties import Properties

log = logging.getLogger("sluice.client")

DEAD_LETTER_SECONDS: Final = 10.0  # for the broker to accept a dead letter


class Producer:
    """Publishes to one topic, on its own connection, which the first message opens."""

    def __init__(self, make_client: Callable[[], Client], topic: str) -> None:
        self.topic = topic
        self._make_client = make_client
        self._connect_lock = asyncio.Lock()
        self._client: Client | None = None

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    async def send(self, payload: bytes, properties: Properties | None) -> None:
        async with asyncio.timeout(DEAD_LETTER_SECONDS):
            async with self._connect_lock:
                if self._client is None:
                    client = self._make_client()
                    await client.connect()
                    self._client = client
            await self._client.publish(self.topic, payload, qos=1, properties=properties)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


class Rejections:
    """Sends rejected messages to the configured topics."""

    def __init__(
        self,
        version: int,
        dead_letters: Producer | None,
        invalid_messages: Producer | None,
        message_type: str | None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.dead_letters = dead_letters
        self.invalid_messages = invalid_messages
        self._version = version
        self._message_type = message_type
        self._now = now

    async def reject(self, message: Message, given: str | None, description: str) -> bool:
        reason = normalize_reason(given)
        producer = self.route(reason)
        metadata = self._metadata(message, reason, description)
        if producer is None:
            log.warning(
                "message on %s rejected (%s%s) and dropped: no topic for rejected messages",
                message.topic, reason, f": {description}" if description else "",
            )  # fmt: skip
        else:
            try:
                await self._send(producer, message, metadata)
            except (ClientError, TimeoutError, OSError) as fault:
                log.error(
                "rejected message lost: it could not be sent to %s: %s; %s",
                    producer.topic, str(fault) or type(fault).__name__, metadata,
                )  # fmt: skip
        await message.ack()
        return True

    def route(self, reason: str) -> Producer | None:
        if reason == UNACCEPTABLE and self.invalid_messages is not None:
            return self.invalid_messages
        return self.dead_letters

    async def close(self) -> None:
        for producer in (self.dead_letters, self.invalid_messages):
            if producer is not None:
                await producer.close()

    def _metadata(self, message: Message, reason: str, description: str) -> dict[str, str]:
        kind = (
            self._message_type
            or message.properties.content_type
            or message_type_in(message.payload)
        )
        metadata = {
            ORIGINAL_TOPIC: message.topic,
            REJECTION_REASON: RECORDED_SPELLINGS[reason],
            REJECTION_TIMESTAMP: self._now()
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            ORIGINAL_MESSAGE_TYPE: kind or "bytes",
        }
        if description:
            metadata[REJECTION_MESSAGE] = sanitize_text(description)
        return metadata

    async def _send(self, producer: Producer, message: Message, metadata: dict[str, str]) -> None:
        if self._version != V5:
            await producer.send(add_to_payload(message.payload, message.topic, metadata), None)
            return
        original = message.properties
        properties = Properties()
        properties.payload_format = original.payload_format
        properties.content_type = original.content_type
        properties.response_topic = original.response_topic
        properties.correlation_data = original.correlation_data
        properties.user = add_to_properties(original.user, metadata)
        await producer.send(message.payload, properties)
