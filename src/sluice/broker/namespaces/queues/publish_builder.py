"""Messages for doors that do not speak MQTT: what a client would have attached to a PUBLISH, as plain values.

What comes in by such a door is made into the packet that a client would have sent, and judged where those are judged;
so all doors take and refuse alike.
"""

from __future__ import annotations

from sluice.broker.namespaces.queues.handler import QueueHandler
from sluice.errors import InvalidQueueConfig, ProtocolViolation
from sluice.message import Message
from sluice.wire.packets import Publish
from sluice.wire.properties import PUBLISH, Properties, encode_properties, read_properties


class MessageProperties:
    """The properties of a message, its queue's wishes (key, priority ...) among the user's own."""

    def __init__(self) -> None:
        self.content_type: str = ""
        self.response_topic: str = ""
        self.correlation_data: bytes = b""
        self.user: list[tuple[str, str]] = []


def read_message_properties(message: Message) -> MessageProperties:
    """It was checked when it came in; should it be nonsense all the same, nothing is attached."""
    found = MessageProperties()
    try:
        properties = read_properties(message.props, 0, len(message.props), PUBLISH)
    except ProtocolViolation:
        return found
    found.content_type = properties.content_type or ""
    found.response_topic = properties.response_topic or ""
    found.correlation_data = properties.correlation_data or b""
    found.user = properties.user
    return found


def build_message(
    handler: QueueHandler,
    queue: str,
    payload: bytes,
    message_properties: MessageProperties,
    expires_at: float,
) -> Message:
    """The message that a client's PUBLISH of this to a queue would be; refused if no client could send it."""
    properties = Properties()
    properties.content_type = message_properties.content_type or None
    properties.response_topic = message_properties.response_topic or None
    properties.correlation_data = message_properties.correlation_data or None
    properties.user = message_properties.user
    try:
        raw = encode_properties(properties)
        read_properties(raw, 0, len(raw), PUBLISH)
    except (ValueError, ProtocolViolation) as fault:
        raise InvalidQueueConfig(
            f"the properties of the message cannot be sent: {fault}",
            "Give texts of at most 65,535 bytes, without null characters, and a response topic without wildcards",
        ) from None
    packet = Publish(f"$queue/{queue}".encode(), payload, 1, raw_properties=raw)
    packet.expires_at = expires_at
    return handler.build_message(packet)
