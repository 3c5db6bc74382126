"""Build messages for APIs other than MQTT, from plain values.

A message from such an API is turned into the packet that a client would have sent, and is checked
where packets are checked. So all APIs accept and refuse the same messages.
"""

from __future__ import annotations

from sluice.broker.namespaces.queues.handler import QueueHandler
from sluice.errors import InvalidQueueConfig, ProtocolViolation
from sluice.message import Message
from sluice.wire.packets import Publish
from sluice.wire.properties import PUBLISH, Properties, encode_properties, read_properties


class MessageProperties:
    """The properties of a message; the queue's options (key, priority ...) are user properties."""

    def __init__(self) -> None:
        self.content_type: str = ""
        self.response_topic: str = ""
        self.correlation_data: bytes = b""
        self.user: list[tuple[str, str]] = []


def read_message_properties(message: Message) -> MessageProperties:
    """Decode the properties of a stored message; return empty ones if they are malformed."""
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


def read_content_type(raw_properties: bytes) -> str:
    """Return the content type among the stored properties of a message, or the empty string."""
    if not raw_properties:
        return ""
    try:
        return read_properties(raw_properties, 0, len(raw_properties), PUBLISH).content_type or ""
    except ProtocolViolation:
        return ""


def build_message(
    handler: QueueHandler,
    queue: str,
    payload: bytes,
    message_properties: MessageProperties,
    expires_at: float,
) -> Message:
    """Return the message that a client's PUBLISH would create; raise if no client could send it."""
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
            "Give texts of at most 65,535 bytes, without null characters, "
            "and a response topic without wildcards",
        ) from None
    packet = Publish(f"$queue/{queue}".encode(), payload, 1, raw_properties=raw)
    packet.expires_at = expires_at
    return handler.build_message(packet)
