"""Operations on messages that wait: cancel and reschedule them, one by its id or many by a filter.

Operations on many run in portions, so that deliveries continue meanwhile. A message that a consumer
takes before its turn comes is left to that consumer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import isfinite
from typing import Final

from sluice.admin import model
from sluice.admin.broker_facade import BrokerFacade
from sluice.admin.model import Commanded, MessageFilter
from sluice.admin.queries.message_lookup import (
    build_message_view,
    locate_message,
    read_in_batches,
)
from sluice.errors import AlreadyDelivered, InvalidQueueConfig, UnknownMessage
from sluice.message import Message
from sluice.queues.service import MessageLocation, QueueInspector, stored_messages, views

MAX_COMMANDED: Final = 100_000  # messages that one call changes
STATES: Final = (views.WAITING, views.DELAYED, views.RETRYING)
MAX_TIME: Final = 253_402_300_799.0  # end of the year 9999


class Command:
    """What is done to a message: it is cancelled, or rescheduled to `due_at`."""

    def __init__(self, facade: BrokerFacade, by: str, due_at: float = -1.0) -> None:
        self._facade = facade
        self._by = by
        self._due_at = due_at

    def apply(self, location: MessageLocation, message_id: bytes) -> None:
        partition, seq = location
        commands = self._facade.engine.commands
        if self._due_at < 0.0:
            commands.cancel(partition, seq, message_id, self._by)
        else:
            commands.reschedule(partition, seq, message_id, self._due_at, self._by)


def cancel_command(facade: BrokerFacade, by: str) -> Command:
    return Command(facade, by)


def reschedule_command(
    facade: BrokerFacade, by: str, delay: float | None, deliver_at: float
) -> Command:
    """Give a time as `delay` in seconds from now, 0.0: deliver now; or as `deliver_at`."""
    if (delay is None) == (deliver_at == 0.0):
        raise InvalidQueueConfig(
            "a message is moved to one time", "Give delay (0s: deliver now) or deliver_at"
        )
    due_at = deliver_at if delay is None else facade.sync_clock() + delay
    if not isfinite(due_at) or not 0.0 <= due_at <= MAX_TIME:
        raise InvalidQueueConfig("the time is out of range", "Give one before the year 10000")
    return Command(facade, by, due_at)


async def apply_to_one(
    facade: BrokerFacade, name: str, message_id: str, command: Command
) -> MessageLocation:
    """Apply a command to the message with this id; return where it is, or was."""
    queue = facade.inspect(name)
    location = await locate_message(facade, queue, message_id)
    facade.begin_change()
    if location is None:
        raise UnknownMessage(queue.name, message_id)
    command.apply(location, message_id.encode("utf-8", "replace"))
    await facade.wait_committed()
    return location


async def show_message(facade: BrokerFacade, location: MessageLocation) -> model.Message:
    (message,) = await facade.read_messages([location])
    if message is None:
        queue = stored_messages.queue_of(location)
        raise UnknownMessage(queue, stored_messages.generated_id(location))
    return build_message_view(location, message, 0)


async def apply_to_many(
    facade: BrokerFacade,
    name: str,
    criteria: MessageFilter,
    limit: int,
    is_dry_run: bool,
    command: Command,
) -> Commanded:
    """Apply a command to the messages that a filter matches, oldest first; or count them."""
    if not 0 < limit <= MAX_COMMANDED:
        raise InvalidQueueConfig(f"limit is {limit}", f"Give 1 to {MAX_COMMANDED}")
    if criteria.state and criteria.state not in STATES:
        raise InvalidQueueConfig(f"state is {criteria.state!r}", f"Give {', '.join(STATES)}")
    queue = facade.inspect(name)
    changed = in_delivery = left = 0
    async for location, message in _scan(facade, queue, criteria):
        if stored_messages.describe(location, None).state == views.DELIVERED:
            in_delivery += 1
        elif changed >= limit:
            left += 1
        elif is_dry_run:
            changed += 1
        else:
            facade.begin_change()
            try:
                own_id = message.id or stored_messages.generated_id(location).encode()
                command.apply(location, own_id)
            except (AlreadyDelivered, UnknownMessage):
                in_delivery += 1
            else:
                changed += 1
    await facade.wait_committed()
    return Commanded(changed=changed, in_delivery=in_delivery, left=left, dry_run=is_dry_run)


async def _scan(
    facade: BrokerFacade, queue: QueueInspector, criteria: MessageFilter
) -> AsyncIterator[tuple[MessageLocation, Message]]:
    needle = criteria.contains.encode()
    key = criteria.key.encode("utf-8", "replace")
    async for location, message in read_in_batches(facade, queue.locations()):
        state = stored_messages.describe(location, None).state
        if state == views.SETTLED or (
            criteria.state and state not in (criteria.state, views.DELIVERED)
        ):
            continue
        enqueued_at = float(message.enqueued_at_ms) / 1000.0
        if enqueued_at < criteria.since or (criteria.until and enqueued_at >= criteria.until):
            continue
        if (not key or message.key == key) and (not needle or needle in message.payload):
            yield location, message
