"""Converts a PUBLISH to a message of a queue: the options of its user properties are applied.

The properties of the publisher stay encoded; only the options for queues among them are decoded.
"""

from __future__ import annotations

from sluice.broker.namespaces.queues.queue_options import (
    MAX_MESSAGE_ID_BYTES,
    MAX_TIMESTAMP_MS,
    read_delay,
    read_number,
    read_timestamp_ms,
)
from sluice.broker.queue_topics import (
    MAX_IDS,
    PublishOptions,
    read_publish_options,
    strip_message_ids,
)
from sluice.errors import InvalidQueueConfig, TooManyIds
from sluice.message import MAX_EXPIRES, Message
from sluice.queues.engine import Engine
from sluice.queues.model import Queue
from sluice.wire.packets import Publish


class MessageBuilder:
    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = engine
        self._options = PublishOptions()  # reused: of the current packet

    def build_message(self, packet: Publish) -> Message:
        """Convert a PUBLISH to a message; only queue options among its properties are decoded."""
        message = self._build_raw_message(packet)
        if packet.raw_properties:
            self._apply_options(message)
        return message

    def _build_raw_message(self, packet: Publish) -> Message:
        """Return the message without applying its options, which are in `_options`."""
        message = Message(packet.payload, packet.raw_properties)
        if packet.expires_at != 0.0:
            message.expires = min(int(packet.expires_at + 0.999), MAX_EXPIRES)
        if packet.raw_properties:
            options = self._options
            read_publish_options(packet.raw_properties, options)
            message.key = options.key
            if options.id_begin >= 0:
                message.id = options.id
                message.props = strip_message_ids(packet.raw_properties, options)
        return message

    def _apply_options(self, message: Message) -> None:
        options = self._options
        if options.all_ids is not None and len(options.all_ids) > MAX_IDS:
            raise TooManyIds(MAX_IDS)
        if len(message.id) > MAX_MESSAGE_ID_BYTES:
            raise InvalidQueueConfig(
                f"message-id has {len(message.id)} bytes", f"Give at most {MAX_MESSAGE_ID_BYTES}"
            )
        if message.id == b"." or message.id == b"..":
            raise InvalidQueueConfig(
                f"message-id is {message.id.decode()!r}",
                "Give another one: REST paths cannot contain it",
            )
        if options.priority:
            message.priority = read_number("priority", options.priority.decode(), 0, 9)
        if options.delay:
            delay = self._engine.now + read_delay("delay", options.delay)
            message.deliver_at_ms = min(int(delay * 1000.0), MAX_TIMESTAMP_MS)
        elif options.deliver_at:
            message.deliver_at_ms = read_timestamp_ms(options.deliver_at)

    def build_bound_copy(self, packet: Publish, queue: Queue) -> Message:
        """Convert a plain publish to a message of a queue with a binding.

        Its publisher may not know of queues and may use properties of these names for other
        purposes. So invalid options are ignored.
        """
        message = self._build_raw_message(packet)
        message.topic = packet.topic
        if packet.raw_properties and not queue.rules.is_compacted:
            try:
                self._apply_options(message)
            except (InvalidQueueConfig, TooManyIds):
                pass
        if len(message.id) > MAX_MESSAGE_ID_BYTES or message.id == b"." or message.id == b"..":
            message.id = b""
        return message
