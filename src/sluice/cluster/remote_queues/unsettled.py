"""Deliveries of one remote cell that a client has not settled yet, by message id.

While the stream lasts on which a delivery arrived, its message id is enough to settle: the remote
cell knows the leases. After a reconnect the cell may have another owner, which knows no leases. It
finds a message by its delivery token or by an id that Sluice assigned, never by an id that the
publisher assigned. Clients may settle by id alone, and many deliveries in one publish. So this
module records tokens. Invariant: a delivery of an earlier stream is settled with its token.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.broker.namespaces import encode_user_property, read_message_ids
from sluice.broker.queue_topics import (
    EXTEND,
    QUEUE_PREFIX,
    PublishOptions,
    QueueTopic,
    parse_queue_topic,
    read_publish_options,
    strip_message_ids,
)
from sluice.errors import InvalidQueueConfig
from sluice.wire.packets import Publish

# Hardly any prefetch is larger. Older deliveries beyond it were not settled in time.
MAX_UNSETTLED_PER_QUEUE: Final = 16_384
MAX_CACHED_TOPICS: Final = 1024

_MESSAGE_ID_PREFIX: Final = b"\x26\x00\x0amessage-id"  # the properties of every delivery begin so


def message_id_of(raw: bytes) -> bytes:
    """Return the message id in the properties of a delivery."""
    if not raw.startswith(_MESSAGE_ID_PREFIX):
        return b""
    size: i64 = (i64(raw[13]) << 8) | i64(raw[14])
    return raw[15 : 15 + size]


class UnsettledDeliveries:
    """Unsettled deliveries of the current stream and of earlier streams."""

    def __init__(self) -> None:
        # By queue topic and message id: the properties of the delivery.
        self._current: dict[bytes, dict[bytes, bytes]] = {}
        self._earlier: dict[bytes, dict[bytes, bytes]] = {}
        self._topics: dict[bytes, QueueTopic] = {}
        self._options = PublishOptions()

    def entries_for(self, topic: bytes) -> dict[bytes, bytes]:
        """Return the dict that records the deliveries of this topic."""
        found = self._current.get(topic)
        if found is None:
            found = self._current[topic] = {}
        return found

    def record(self, entries: dict[bytes, bytes], topic: bytes, raw: bytes) -> None:
        """Record a delivery in `entries`, the dict of its queue."""
        message_id = message_id_of(raw)
        entries[message_id] = raw
        if len(entries) > MAX_UNSETTLED_PER_QUEUE:
            for old in list(entries)[: MAX_UNSETTLED_PER_QUEUE // 2]:
                del entries[old]
        if self._earlier:
            earlier = self._earlier.get(topic)
            if earlier is not None:
                earlier.pop(message_id, None)  # redelivered on the current stream

    def record_explicit(self, delivery: Publish, is_earlier: bool) -> None:
        """Record a delivery that a PUBACK would settle and that the client settles explicitly.

        If the delivery arrived on an earlier stream, its settlement needs the token.
        """
        topic, _, message_id = delivery.topic.partition(b"/$msg/")
        entries = self._earlier.setdefault(topic, {}) if is_earlier else self.entries_for(topic)
        entries[message_id or message_id_of(delivery.raw_properties)] = delivery.raw_properties

    def on_reconnected(self) -> None:
        """Move all recorded deliveries to those of earlier streams."""
        for topic, entries in self._current.items():
            earlier = self._earlier.setdefault(topic, {})
            earlier.update(entries)
            for old in list(earlier)[: max(0, len(earlier) - MAX_UNSETTLED_PER_QUEUE)]:
                del earlier[old]
        self._earlier = {topic: entries for topic, entries in self._earlier.items() if entries}
        self._current = {}

    def message_ids(self, packet: Publish) -> list[bytes]:
        """Return the ids that a settlement names, in any of the forms that queues accept."""
        options = self._options
        read_publish_options(packet.raw_properties, options)
        if options.all_ids is not None:
            return options.all_ids
        if options.id_begin >= 0:
            return [options.id]
        rest = self._parse(packet.topic).argument
        if rest:
            return [rest]
        try:
            return read_message_ids(packet.payload)
        except InvalidQueueConfig:
            return []  # the remote cell refuses it with a reason

    def verb(self, packet: Publish) -> int:
        return int(self._parse(packet.topic).verb)

    def remove_settled(self, packet: Publish) -> None:
        """Remove the deliveries of a settlement that the remote cell has acknowledged."""
        if not self._current and not self._earlier:
            return
        parsed = self._parse(packet.topic)
        if parsed.verb == EXTEND:
            return
        topic = QUEUE_PREFIX + parsed.queue.encode()
        current = self._current.get(topic)
        earlier = self._earlier.get(topic) if self._earlier else None
        if current is None and earlier is None:
            return
        for message_id in self.message_ids(packet):
            if current is not None:
                current.pop(message_id, None)
            if earlier is not None:
                earlier.pop(message_id, None)

    def split_by_connection(self, packet: Publish) -> tuple[list[Publish], Publish | None]:
        """Split a settlement into one publish for each delivery of an earlier stream and a rest.

        The former settle by token. The rest is None if nothing remains. An empty list means that
        the settlement names no delivery of an earlier stream and can be sent unchanged.
        """
        if not self._earlier:
            return [], packet
        parsed = self._parse(packet.topic)
        earlier = self._earlier.get(QUEUE_PREFIX + parsed.queue.encode())
        if earlier is None:
            return [], packet
        message_ids = self.message_ids(packet)
        options = self._options
        if options.token and len(message_ids) != 1:
            return [], packet
        topic = (
            packet.topic[: len(packet.topic) - len(parsed.argument) - 1]
            if parsed.argument
            else packet.topic
        )
        raw = (
            strip_message_ids(packet.raw_properties, options)
            if options.id_begin >= 0
            else packet.raw_properties
        )
        token, group = options.token, options.group
        late: list[Publish] = []
        rest: list[bytes] = []
        for message_id in message_ids:
            given = earlier.get(message_id)
            if given is None:
                rest.append(message_id)
                continue
            if parsed.verb != EXTEND:
                del earlier[message_id]
            read_publish_options(given, options)
            properties = raw + encode_user_property(b"message-id", options.id)
            if not group:
                properties += encode_user_property(b"consumer-group", options.group.encode())
            if not token:
                properties += encode_user_property(b"delivery-token", options.token)
            late.append(Publish(topic, b"", 1, False, False, 0, properties))
        if not late:
            return [], packet
        if not rest:
            return late, None
        for message_id in rest:
            raw += encode_user_property(b"message-id", message_id)
        return late, Publish(topic, b"", 1, False, False, 0, raw)

    def _parse(self, topic: bytes) -> QueueTopic:
        parsed = self._topics.get(topic)
        if parsed is None:
            parsed = parse_queue_topic(topic)
            if not parsed.argument:
                if len(self._topics) >= MAX_CACHED_TOPICS:
                    self._topics.clear()
                self._topics[topic] = parsed
        return parsed


def make_settlement(message: Publish, verb: bytes) -> Publish:
    """Return an explicit settlement for a delivery of an earlier stream, by its id and token."""
    options = PublishOptions()
    read_publish_options(message.raw_properties, options)
    queue = parse_queue_topic(message.topic).queue
    raw = encode_user_property(b"message-id", options.id) + encode_user_property(
        b"consumer-group", options.group.encode()
    )
    raw += encode_user_property(b"delivery-token", options.token)
    return Publish(b"$queue/" + queue.encode() + verb, b"", 1, False, False, 0, raw)
