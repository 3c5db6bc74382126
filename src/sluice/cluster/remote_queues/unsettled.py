"""What a client has in hand of the queues of one other cell, by the names under which it settles.

While the line lasts on which a delivery came, its name is enough: the far cell knows who has what. When the line is
made anew the cell may have another owner, and that one knows of no leases: it finds a message by the token of its
delivery, or by a name that Sluice gave, and never by one of its publisher's. Clients may name ids alone, and many in
one publish. So tokens are kept here, and what is said of a delivery of an earlier line is said with its token.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.broker.namespaces.queues.queue_consumer import user_property
from sluice.broker.namespaces.queues.queue_topics import (
    EXTEND,
    PREFIX,
    QueueTopic,
    Wishes,
    parse_queue_topic,
    read_wishes,
    without_ids,
)
from sluice.broker.namespaces.queues.queue_options import read_ids
from sluice.errors import InvalidQueueConfig
from sluice.wire.packets import Publish

MOST_HELD: Final = 16_384  # of one queue: hardly a prefetch is larger; what is beyond was not settled in time
MOST_TOPICS: Final = 1024

_NAME: Final = b"\x26\x00\x0amessage-id"  # how the properties of every delivery begin


def name_in(raw: bytes) -> bytes:
    """The message id in the properties of a delivery."""
    if not raw.startswith(_NAME):
        return b""
    size: i64 = (i64(raw[13]) << 8) | i64(raw[14])
    return raw[15 : 15 + size]


class Holding:
    def __init__(self) -> None:
        # By queue (as a topic) and name: the properties of the delivery. Of this line, and of those before it.
        self._here: dict[bytes, dict[bytes, bytes]] = {}
        self._earlier: dict[bytes, dict[bytes, bytes]] = {}
        self._topics: dict[bytes, QueueTopic] = {}
        self._wishes = Wishes()

    def of_queue(self, topic: bytes) -> dict[bytes, bytes]:
        """Where deliveries on this topic are noted."""
        found = self._here.get(topic)
        if found is None:
            found = self._here[topic] = {}
        return found

    def note(self, held: dict[bytes, bytes], topic: bytes, raw: bytes) -> None:
        """A delivery goes by; `held` is of its queue."""
        name = name_in(raw)
        held[name] = raw
        if len(held) > MOST_HELD:
            for old in list(held)[: MOST_HELD // 2]:
                del held[old]
        if self._earlier:
            before = self._earlier.get(topic)
            if before is not None:
                before.pop(name, None)  # what was given again is this line's

    def keep(self, delivery: Publish, earlier: bool) -> None:
        """A delivery that a PUBACK would settle, and its client says a word about: where it was given before this line,
        the word needs its token."""
        topic, _, name = delivery.topic.partition(b"/$msg/")
        held = self._earlier.setdefault(topic, {}) if earlier else self.of_queue(topic)
        held[name or name_in(delivery.raw)] = delivery.raw

    def line_is_new(self) -> None:
        """What was given so far came on an earlier line."""
        for topic, held in self._here.items():
            before = self._earlier.setdefault(topic, {})
            before.update(held)
            for old in list(before)[: max(0, len(before) - MOST_HELD)]:
                del before[old]
        self._earlier = {topic: held for topic, held in self._earlier.items() if held}
        self._here = {}

    def names(self, packet: Publish) -> list[bytes]:
        """Which deliveries a settling publish is about, in any of the forms that a queue takes."""
        wishes = self._wishes
        read_wishes(packet.raw, wishes)
        if wishes.more is not None:
            return wishes.more
        if wishes.begin >= 0:
            return [wishes.id]
        rest = self._parse(packet.topic).rest
        if rest:
            return [rest]
        try:
            return read_ids(packet.payload)
        except InvalidQueueConfig:
            return []  # the far cell says what is wrong with it

    def verb(self, packet: Publish) -> int:
        return int(self._parse(packet.topic).verb)

    def settled(self, packet: Publish) -> None:
        """What a publish was about is settled, and the far cell has said so."""
        if not self._here and not self._earlier:
            return
        known = self._parse(packet.topic)
        if known.verb == EXTEND:
            return
        topic = PREFIX + known.queue.encode()
        held = self._here.get(topic)
        before = self._earlier.get(topic) if self._earlier else None
        if held is None and before is None:
            return
        for name in self.names(packet):
            if held is not None:
                held.pop(name, None)
            if before is not None:
                before.pop(name, None)

    def split(self, packet: Publish) -> tuple[list[Publish], Publish | None]:
        """A settling publish anew: one for each delivery of an earlier line, by its token, and one for the rest of it
        if there is any. Nothing in the list: it is about none of them, and may stay as it is."""
        if not self._earlier:
            return [], packet
        known = self._parse(packet.topic)
        before = self._earlier.get(PREFIX + known.queue.encode())
        if before is None:
            return [], packet
        names = self.names(packet)
        wishes = self._wishes
        if wishes.token and len(names) != 1:
            return [], packet
        topic = packet.topic[: len(packet.topic) - len(known.rest) - 1] if known.rest else packet.topic
        raw = without_ids(packet.raw, wishes) if wishes.begin >= 0 else packet.raw
        token, group = wishes.token, wishes.group
        late: list[Publish] = []
        rest: list[bytes] = []
        for name in names:
            given = before.get(name)
            if given is None:
                rest.append(name)
                continue
            if known.verb != EXTEND:
                del before[name]
            read_wishes(given, wishes)
            said = raw + user_property(b"message-id", wishes.id)
            if not group:
                said += user_property(b"consumer-group", wishes.group.encode())
            if not token:
                said += user_property(b"delivery-token", wishes.token)
            late.append(Publish(topic, b"", 1, False, False, 0, said))
        if not late:
            return [], packet
        if not rest:
            return late, None
        for name in rest:
            raw += user_property(b"message-id", name)
        return late, Publish(topic, b"", 1, False, False, 0, raw)

    def _parse(self, topic: bytes) -> QueueTopic:
        known = self._topics.get(topic)
        if known is None:
            known = parse_queue_topic(topic)
            if not known.rest:
                if len(self._topics) >= MOST_TOPICS:
                    self._topics.clear()
                self._topics[topic] = known
        return known


def settlement(message: Publish, verb: bytes) -> Publish:
    """An explicit word for a delivery whose line is gone: by the names that the delivery itself carries."""
    wishes = Wishes()
    read_wishes(message.raw, wishes)
    queue = parse_queue_topic(message.topic).queue
    raw = user_property(b"message-id", wishes.id) + user_property(b"consumer-group", wishes.group.encode())
    raw += user_property(b"delivery-token", wishes.token)
    return Publish(b"$queue/" + queue.encode() + verb, b"", 1, False, False, 0, raw)
