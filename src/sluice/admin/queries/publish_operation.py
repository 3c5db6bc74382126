"""Publish a message for an operator or for a program without MQTT.

The message is checked by the rules for clients, in the same place: sizes, ids, schema, duplicates,
a full queue.
"""

from __future__ import annotations

from math import isfinite

from sluice.admin.broker_facade import BrokerFacade, strip_queue_prefix
from sluice.admin.model import OutgoingMessage, Published
from sluice.broker.namespaces import MessageProperties, build_message
from sluice.errors import InvalidQueueConfig, InvalidQueueName
from sluice.queues.names import REPLY_QUEUE_PREFIX, format_message_id, queue_name_error


async def publish(facade: BrokerFacade, name: str, outgoing: OutgoingMessage) -> Published:
    """Publish a message and return when it is committed."""
    name = strip_queue_prefix(name)
    fault = "a queue name is text that an MQTT packet can carry, without the zero character"
    if is_valid_mqtt_text(name):
        fault = queue_name_error(name)
    if not fault and name.startswith(REPLY_QUEUE_PREFIX):
        fault = (
            "responses are not a queue: publish them over MQTT to $queue/responses/<correlation id>"
        )
    if fault:
        raise InvalidQueueName(name, fault)
    now = facade.begin_change()
    expires_at = now + _check_seconds("expiry", outgoing.expiry) if outgoing.expiry else 0.0
    message = build_message(
        facade.queue_handler, name, outgoing.payload, collect_properties(outgoing), expires_at
    )
    queue = facade.engine.queues.get(name)
    if queue is None:
        queue = facade.queue_handler.create_queue(name)
    next_sequences = [int(partition.next_seq) for partition in queue.partitions]
    duplicates = int(queue.duplicates)
    facade.queue_handler.enqueue_message(queue, message)
    duplicate = int(queue.duplicates) > duplicates
    assigned_id = message.id.decode("utf-8", "replace")
    is_stored = duplicate
    for partition, end in zip(queue.partitions, next_sequences, strict=True):
        if partition.next_seq > end:
            is_stored = True
            assigned_id = assigned_id or format_message_id(partition.pid, end).decode()
    await facade.wait_committed()
    return Published(
        message_id=assigned_id, queue=name, duplicate=duplicate, dead_letter=not is_stored
    )


def is_valid_mqtt_text(text: str) -> bool:
    """Return whether a delivery can contain the text (MQTT 1.5.4).

    Clients cannot send other texts; callers of the admin APIs can.
    """
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def collect_properties(outgoing: OutgoingMessage) -> MessageProperties:
    attached = MessageProperties()
    attached.content_type = outgoing.content_type
    attached.response_topic = outgoing.response_topic
    attached.correlation_data = outgoing.correlation_data
    attached.user = [*_user_properties(outgoing), *outgoing.properties]
    return attached


def _user_properties(outgoing: OutgoingMessage) -> list[tuple[str, str]]:
    """Return the user properties with which a client would set these options."""
    properties: list[tuple[str, str]] = []
    if outgoing.message_id:
        properties.append(("message-id", outgoing.message_id))
    if outgoing.key:
        properties.append(("partition-key", outgoing.key))
    if outgoing.priority:
        properties.append(("priority", str(outgoing.priority)))
    if outgoing.delay and outgoing.deliver_at:
        raise InvalidQueueConfig("both delay and deliver_at are given", "Give one of them")
    if outgoing.delay:
        properties.append(("delay", f"{round(_check_seconds('delay', outgoing.delay) * 1000.0)}ms"))
    elif outgoing.deliver_at:
        properties.append(
            ("deliver-at", str(round(_check_seconds("deliver_at", outgoing.deliver_at) * 1000.0)))
        )
    return properties


def _check_seconds(name: str, value: float) -> float:
    if not isfinite(value) or value < 0.0:
        raise InvalidQueueConfig(f"{name} is {value}", "Give a time that is not before now")
    return value
