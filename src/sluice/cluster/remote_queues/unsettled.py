"""What a client has in hand of the queues of one other cell, by the names under which it settles.

While the line lasts on which a delivery came, its name is enough: the far cell knows who has what. When the line is
made anew the cell may have another owner, and that one knows of no leases: it finds a message by the token of its
delivery, or by a name that Sluice gave, and never by one of its publisher's. Clients may name ids alone, and many in
one publish. So tokens are kept here, and what is said of a delivery of an earlier line is said with its token.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.broker.namespaces.queues.queue_consumer import encode_user_property
from sluice.broker.namespaces.queues.queue_options import read_message_ids
from sluice.broker.namespaces.queues.queue_topics import (
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

MAX_UNSETTLED_PER_QUEUE: Final = (
    16_384  # of one queue: hardly a prefetch is larger; what is beyond was not settled in time
)
MAX_CACHED_TOPICS: Final = 1024

_MESSAGE_ID_PREFIX: Final = b"\x26\x00\x0amessage-id"  # how the properties of every delivery begin


def message_id_of(raw: bytes) -> bytes:
    """The message id in the properties of a delivery."""
    if not raw.startswith(_MESSAGE_ID_PREFIX):
        return b""
    size: i64 = (i64(raw[13]) << 8) | i64(raw[14])
    return raw[15 : 15 + size]


class UnsettledDeliveries:
    def __init__(self) -> None:
        # By queue (as a topic) and name: the properties of the delivery. Of this line, and of those before it.
        self._current: dict[bytes, dict[bytes, bytes]] = {}
        self._earlier: dict[bytes, dict[bytes, bytes]] = {}
        self._topics: dict[bytes, QueueTopic] = {}
        self._options = PublishOptions()

    def entries_for(self, topic: bytes) -> dict[bytes, bytes]:
        """Where deliveries on this topic are noted."""
        found = self._current.get(topic)
        if found is None:
            found = self._current[topic] = {}
        return found

    def record(self, entries: dict[bytes, bytes], topic: bytes, raw: bytes) -> None:
        """A delivery goes by; `held` is of its queue."""
        message_id = message_id_of(raw)
        entries[message_id] = raw
        if len(entries) > MAX_UNSETTLED_PER_QUEUE:
            for old in list(entries)[: MAX_UNSETTLED_PER_QUEUE // 2]:
                del entries[old]
        if self._earlier:
            earlier = self._earlier.get(topic)
            if earlier is not None:
                earlier.pop(message_id, None)  # what was given again is this line's

    def record_explicit(self, delivery: Publish, is_earlier: bool) -> None:
        """A delivery that a PUBACK would settle, and its client says a word about: where it was given before this line,
        the word needs its token."""
        topic, _, message_id = delivery.topic.partition(b"/$msg/")
        entries = self._earlier.setdefault(topic, {}) if is_earlier else self.entries_for(topic)
        entries[message_id or message_id_of(delivery.raw_properties)] = delivery.raw_properties

    def on_reconnected(self) -> None:
        """What was given so far came on an earlier line."""
        for topic, entries in self._current.items():
            earlier = self._earlier.setdefault(topic, {})
            earlier.update(entries)
            for old in list(earlier)[: max(0, len(earlier) - MAX_UNSETTLED_PER_QUEUE)]:
                del earlier[old]
        self._earlier = {topic: entries for topic, entries in self._earlier.items() if entries}
        self._current = {}

    def message_ids(self, packet: Publish) -> list[bytes]:
        """Which deliveries a settling publish is about, in any of the forms that a queue takes."""
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
            return []  # the far cell says what is wrong with it

    def verb(self, packet: Publish) -> int:
        return int(self._parse(packet.topic).verb)

    def remove_settled(self, packet: Publish) -> None:
        """What a publish was about is settled, and the far cell has said so."""
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
        """A settling publish anew: one for each delivery of an earlier line, by its token, and one for the rest of it
        if there is any. Nothing in the list: it is about none of them, and may stay as it is."""
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
    """An explicit word for a delivery whose line is gone: by the names that the delivery itself carries."""
    options = PublishOptions()
    read_publish_options(message.raw_properties, options)
    queue = parse_queue_topic(message.topic).queue
    raw = encode_user_property(b"message-id", options.id) + encode_user_property(
        b"consumer-group", options.group.encode()
    )
    raw += encode_user_property(b"delivery-token", options.token)
    return Publish(b"$queue/" + queue.encode() + verb, b"", 1, False, False, 0, raw)
