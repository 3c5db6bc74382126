"""Stored messages: reading them in batches, finding one by its id, and building its view.

A message has the id `<partition>-<sequence>`, which tells where it is, or its publisher's own id,
which does not. The latter is searched where it is likely (deliveries, the ids of the dedup window)
and then one by one, up to a limit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Final

from sluice.admin import model
from sluice.admin.broker_facade import BATCH_SIZE, BrokerFacade, split_into_batches
from sluice.broker.namespaces import read_message_properties
from sluice.message import Message, decode_headers
from sluice.queues.service import (
    GroupInspector,
    MessageLocation,
    QueueInspector,
    stored_messages,
    views,
)

# Messages that are scanned for an id that no index knows.
MAX_SCANNED_MESSAGES: Final = 50_000


async def read_in_batches(
    facade: BrokerFacade, locations: Iterator[MessageLocation]
) -> AsyncIterator[tuple[MessageLocation, Message]]:
    """Read the messages at `locations` in batches; leave out missing and damaged ones."""
    for batch in split_into_batches(locations):
        for location, message in zip(batch, await facade.read_messages(batch), strict=True):
            if message is not None and stored_messages.is_stored(location):
                yield location, message
        await facade.yield_to_loop()


async def find_unsettled(
    facade: BrokerFacade, group: GroupInspector, locations: Iterator[MessageLocation], limit: int
) -> list[MessageLocation]:
    """Return the first locations that a group has not settled.

    Settled messages are skipped: there may be many, stored for other groups.
    """
    found: list[MessageLocation] = []
    for nth, location in enumerate(locations):
        if len(found) >= limit:
            break
        if nth % BATCH_SIZE == BATCH_SIZE - 1:
            await facade.yield_to_loop()
        if group.describe(location).state != views.SETTLED:
            found.append(location)
    return found


async def locate_message(
    facade: BrokerFacade, queue: QueueInspector, message_id: str
) -> MessageLocation | None:
    """Return where in a queue the message with this id is stored, or None."""
    if not message_id:
        return None
    found = queue.locate(message_id)
    if found is not None:
        return found
    if queue.id_stored_at(message_id):
        found = await _find_by_id(facade, queue.locations_around_id(message_id), message_id)
        if found is not None:
            return found
    if queue.parse_location(message_id) is not None and not queue.has_dead_letters():
        return None  # a generated id of a deleted message, never redriven under its old id
    return await _find_by_id(facade, islice(queue.locations(), MAX_SCANNED_MESSAGES), message_id)


async def _find_by_id(
    facade: BrokerFacade, locations: Iterator[MessageLocation], message_id: str
) -> MessageLocation | None:
    own_id = message_id.encode("utf-8", "replace")
    async for location, message in read_in_batches(facade, locations):
        if message.id == own_id:
            return location
    return None


def build_message_view(
    location: MessageLocation,
    message: Message,
    payload_bytes: int,
    group: GroupInspector | None = None,
) -> model.Message:
    """Show a stored message with its state in a group, or in the queue."""
    stored = stored_messages.describe(location, None) if group is None else group.describe(location)
    moved_to = stored.rescheduled_to
    attached = read_message_properties(message)
    return model.Message(
        message_id=stored_messages.displayed_id(location, message),
        queue=stored.queue,
        partition=stored.partition,
        sequence=stored.sequence,
        key=message.key.decode("utf-8", "replace"),
        priority=int(message.priority),
        payload=message.payload[:payload_bytes],
        size=len(message.payload),
        enqueued_at=float(message.enqueued_at_ms) / 1000.0,
        expires_at=float(message.expires),
        deliver_at=float(message.deliver_at_ms) / 1000.0 if moved_to is None else moved_to,
        topic=message.topic.decode("utf-8", "replace"),
        content_type=attached.content_type,
        response_topic=attached.response_topic,
        correlation_data=attached.correlation_data,
        properties=list(attached.user),
        headers=dict(decode_headers(message.headers)),
        state=stored.state,
        attempt=stored.attempt,
        consumer=stored.consumer,
    )
