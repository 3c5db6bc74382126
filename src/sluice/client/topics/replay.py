"""Puts the messages of a dead-letter topic back on the topics that they came from.

A topic stores nothing. Dead letters are there to replay if they went to a queue (`$queue/...`), or
if a persistent session subscribed to their topic before: connect with that client id. The message
leaves queue or session only after the server has accepted the replayed one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from sluice.client.client import Client
from sluice.client.errors import PublishRefused, Unsupported
from sluice.client.message import Message
from sluice.client.queues import QUEUE_PREFIX, Delivery
from sluice.client.topics.dead_letter_envelope import METADATA, original_payload, read_dead_letter
from sluice.wire.packets import V5
from sluice.wire.properties import Properties
from sluice.wire.topics import matches

log = logging.getLogger("sluice.client")

DEAD_LETTER_QUEUES: Final = f"{QUEUE_PREFIX}dlq/"


@dataclass(slots=True)
class ReplayResult:
    """How many messages are back on their topics, and how many are no dead letters."""

    replayed: int = 0
    skipped: int = 0


async def replay_dead_letters(
    client: Client,
    topic: str,
    *,
    group: str = "replay",
    idle_seconds: float = 2.0,
    limit: int | None = None,
) -> ReplayResult:
    """Publish the dead letters of `topic` to their `originalTopic`, without the metadata.

    Return when none has come for `idle_seconds`, or after `limit` of them. The client needs
    `manual_ack=True`, and should be used for nothing else meanwhile. `group` is the consumer group
    if `topic` is a queue. Messages without `originalTopic` are skipped and stay where they are.
    """
    if not client.options.manual_ack:
        raise Unsupported(
            "a client that acknowledges by itself would lose dead letters in a crash",
            "Connect with manual_ack=True",
        )
    if topic.startswith(DEAD_LETTER_QUEUES):
        raise Unsupported(
            f"{topic!r} has dead letters of the queue {topic[len(DEAD_LETTER_QUEUES) :]!r}",
            f"Put them back with `sluice dlq retry {topic[len(DEAD_LETTER_QUEUES) :]} --all`",
        )
    result = ReplayResult()
    take = _take_queue if topic.startswith(QUEUE_PREFIX) else _take_topic
    async with aclosing(take(client, topic, group, idle_seconds)) as taken:
        async for message, delivery in taken:
            if not await _replay(client, topic, message, delivery):
                result.skipped += 1
                continue
            await (message.ack() if delivery is None else delivery.ack(confirm=True))
            result.replayed += 1
            if result.replayed == limit:
                break
    return result


Taken = AsyncGenerator[tuple[Message, Delivery | None], None]


async def _take_queue(client: Client, topic: str, group: str, idle_seconds: float) -> Taken:
    async with client.consumer(topic, group=group) as consumer:
        while True:
            try:
                delivery = await consumer.take(idle_seconds)
            except TimeoutError:
                return
            if delivery is None:
                return
            yield delivery.message, delivery


async def _take_topic(client: Client, topic: str, group: str, idle_seconds: float) -> Taken:
    await client.subscribe(topic, qos=1)
    messages = client.messages()
    while True:
        try:
            async with asyncio.timeout(idle_seconds):
                message = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            return
        if matches(topic.encode(), message.topic.encode()):
            yield message, None


async def _replay(client: Client, topic: str, message: Message, delivery: Delivery | None) -> bool:
    """Publish the original of a dead letter; return False if it cannot be replayed."""
    dead_letter = read_dead_letter(message)
    target = dead_letter.original_topic
    if not target or matches(topic.encode(), target.encode()):
        log.warning(
            "message on %s not replayed: %s",
            message.topic,
            "it has no originalTopic" if not target else "its originalTopic is this topic",
        )
        return False
    properties: Properties | None = None
    if client.options.version == V5:
        original = message.properties
        properties = Properties()
        properties.payload_format = original.payload_format
        properties.content_type = original.content_type
        properties.response_topic = original.response_topic
        properties.correlation_data = original.correlation_data
        user = original.user if delivery is None else delivery.user_properties
        properties.user = [pair for pair in user if pair[0] not in METADATA]
    try:
        await client.publish(target, original_payload(message), qos=1, properties=properties)
    except PublishRefused as refusal:
        log.error("message on %s not replayed to %s: %s", message.topic, target, refusal)
        return False
    return True
