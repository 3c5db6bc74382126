"""Converts a PUBLISH to a message of a queue: the options of its user properties are applied.

The properties of the publisher stay encoded; only the options for queues among them are decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.broker.namespaces.queues.queue_options import (
    MAX_MESSAGE_ID_BYTES,
    MAX_TIMESTAMP_MS,
    read_delay,
    read_number,
    read_timestamp_ms,
)
from sluice.broker.queue_topics import (
    MAX_IDS,
    PUBLISH,
    QUEUE_PREFIX,
    PublishOptions,
    parse_queue_topic,
    read_publish_options,
    strip_message_ids,
)
from sluice.errors import (
    InvalidPayload,
    InvalidQueueConfig,
    InvalidQueueName,
    MessageTooLarge,
    ThenElsewhere,
    ThenNotAllowed,
    TooManyIds,
)
from sluice.message import MAX_EXPIRES, Message
from sluice.queues.engine import Engine
from sluice.queues.flow import check_message
from sluice.queues.model import Queue
from sluice.queues.names import queue_name_error
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.namespaces.queues.handler import QueueHandler
    from sluice.broker.sessions import Session


class ThenStep:
    """The messages that an ack publishes (user property `then`), in the same frame.

    All of them are published, or the ack is refused. `prepare` makes every check before anything
    changes; afterward, `publish` cannot fail.
    """

    def __init__(self, handler: QueueHandler, packets: list[Publish], session: Session) -> None:
        self._handler: QueueHandler = handler
        self._packets: list[Publish] = packets
        self._session: Session = session
        self._messages: dict[str, list[Message]] = {}

    def check_rights(self) -> None:
        """Refuse a topic that is no queue, and one that the client may not publish to."""
        grant = self._session.grant
        for packet in self._packets:
            parsed = parse_queue_topic(packet.topic)
            topic = packet.topic.decode()
            if not packet.topic.startswith(QUEUE_PREFIX) or parsed.verb != PUBLISH:
                raise InvalidQueueName(topic, "then publishes to $queue/<queue> only")
            if fault := queue_name_error(parsed.queue):
                raise InvalidQueueName(topic, fault)
            if grant is not None and not grant.may_publish(packet):
                raise ThenNotAllowed(topic)

    def prepare(self) -> None:
        """Refuse the step if any queue would refuse its message."""
        handler = self._handler
        engine = handler.engine
        engine.publishing.check_store_available()
        now = engine.now
        for packet in self._packets:
            if handler.is_in_other_cell(packet.topic):
                raise ThenElsewhere(packet.topic.decode())
            if packet.expiry_seconds >= 0:
                packet.expires_at = now + float(packet.expiry_seconds)
            message = handler.build_message(packet)
            name = packet.topic[len(QUEUE_PREFIX) :].decode()
            queue = handler.find_or_create(name, self._session)
            for target, copy in handler.bindings.copies_of(queue, message):
                self._add(target, copy)
            self._add(queue, message)
        for name, messages in self._messages.items():
            queue = engine.queues[name]
            admission = engine.batches.begin(queue, len(messages))
            if admission.needs_messages:
                admission.add(messages, 0, len(messages))
            admission.check()

    def _add(self, queue: Queue, message: Message) -> None:
        rules = queue.rules
        if len(message.payload) > rules.max_message_size:
            raise MessageTooLarge(queue.name, len(message.payload), int(rules.max_message_size))
        if rules.is_compacted:
            check_message(queue, message)
        if rules.schema and (fault := self._handler.schemas.get_validator(queue)(message.payload)):
            raise InvalidPayload(queue.name, fault)
        self._messages.setdefault(queue.name, []).append(message)

    def publish(self) -> None:
        engine = self._handler.engine
        for name, messages in self._messages.items():
            queue = engine.queues[name]
            engine.batches.append_range(queue, messages, 0, len(messages))
            if queue.rules.sync:
                engine.frame_builder.request_sync()


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
