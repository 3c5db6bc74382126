"""A message published by an operator or by a program without MQTT.

It is judged by the rules that hold for clients, in the same place: sizes, ids, schema, duplicates, a full queue.
"""

from __future__ import annotations

from math import isfinite

from sluice.admin.broker_facade import Hands, plain
from sluice.admin.views import Outgoing, Published
from sluice.broker.namespaces.queues.publish_builder import Attached, make_message
from sluice.errors import InvalidQueueConfig, InvalidQueueName
from sluice.queues.names import RESPONSES, fault_of_name, message_id


async def publish(hands: Hands, name: str, outgoing: Outgoing) -> Published:
    """Answered when the store has it."""
    name = plain(name)
    fault = "a queue name is text that an MQTT packet can carry, without the zero character"
    if can_be_sent(name):
        fault = fault_of_name(name)
    if not fault and name.startswith(RESPONSES):
        fault = "responses are no queue: publish them over MQTT, to $queue/responses/<correlation id>"
    if fault:
        raise InvalidQueueName(name, fault)
    now = hands.begin()
    expires_at = now + _seconds("expiry", outgoing.expiry) if outgoing.expiry else 0.0
    message = make_message(hands.door, name, outgoing.payload, attached_by(outgoing), expires_at)
    queue = hands.engine.queues.get(name)
    if queue is None:
        queue = hands.door.open(name)
    ends = [int(partition.next) for partition in queue.partitions]
    duplicates = int(queue.duplicates)
    hands.door.take(queue, message)
    duplicate = int(queue.duplicates) > duplicates
    given = message.id.decode("utf-8", "replace")
    taken = duplicate
    for partition, end in zip(queue.partitions, ends, strict=True):
        if partition.next > end:
            taken = True
            given = given or message_id(partition.pid, end).decode()
    await hands.kept()
    return Published(message_id=given, queue=name, duplicate=duplicate, dead_letter=not taken)


def can_be_sent(text: str) -> bool:
    """Whether a delivery can name it (section 1.5.4): clients cannot send such names, the admin doors can."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def attached_by(outgoing: Outgoing) -> Attached:
    attached = Attached()
    attached.content_type = outgoing.content_type
    attached.response_topic = outgoing.response_topic
    attached.correlation_data = outgoing.correlation_data
    attached.user = [*_wishes(outgoing), *outgoing.properties]
    return attached


def _wishes(outgoing: Outgoing) -> list[tuple[str, str]]:
    """What a client would ask for by user properties."""
    wishes: list[tuple[str, str]] = []
    if outgoing.message_id:
        wishes.append(("message-id", outgoing.message_id))
    if outgoing.key:
        wishes.append(("partition-key", outgoing.key))
    if outgoing.priority:
        wishes.append(("priority", str(outgoing.priority)))
    if outgoing.delay and outgoing.deliver_at:
        raise InvalidQueueConfig("both delay and deliver_at are given", "Give one of them")
    if outgoing.delay:
        wishes.append(("delay", f"{round(_seconds('delay', outgoing.delay) * 1000.0)}ms"))
    elif outgoing.deliver_at:
        wishes.append(("deliver-at", str(round(_seconds("deliver_at", outgoing.deliver_at) * 1000.0))))
    return wishes


def _seconds(name: str, value: float) -> float:
    if not isfinite(value) or value < 0.0:
        raise InvalidQueueConfig(f"{name} is {value}", "Give a time that is not before now")
    return value
