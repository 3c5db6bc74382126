"""Where MQTT meets the queues: publishes, settlements and subscriptions under `$queue/`.

It translates and answers; every decision about messages is the engine's. Refusals become reason codes by one table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.broker.queue_consumer import QueueConsumer
from sluice.broker.queue_topics import (
    ACK,
    ADMIN,
    EXTEND,
    GROUP,
    NACK,
    PREFIX,
    PUBLISH,
    REJECT,
    RELEASE,
    RESPONSE,
    WRONG,
    QueueTopic,
    Wishes,
    parse_queue_topic,
    read_wishes,
)
from sluice.broker.subscriptions import Capture, Subscriptions, encode_identifiers
from sluice.broker.turn import Turn
from sluice.errors import (
    InvalidPayload,
    InvalidQueueConfig,
    InvalidQueueName,
    MessageTooLarge,
    QueueError,
    QueueFull,
    StaleDelivery,
    UnknownDelivery,
)
from sluice.message import Message
from sluice.notation import parse_duration
from sluice.queues.delivery import Lease
from sluice.queues.engine import Engine
from sluice.queues.group import Group
from sluice.queues.names import fault_of_name
from sluice.queues.queue import Queue
from sluice.queues.service import QueueService
from sluice.queues.start import start_floors
from sluice.wire.packets import V5, Publish, SubscriptionRequest
from sluice.wire.properties import Properties
from sluice.wire.reasons import (
    IMPLEMENTATION_SPECIFIC_ERROR,
    NO_MATCHING_SUBSCRIBERS,
    PACKET_TOO_LARGE,
    PAYLOAD_FORMAT_INVALID,
    QUOTA_EXCEEDED,
    TOPIC_FILTER_INVALID,
    TOPIC_NAME_INVALID,
)
from sluice.wire.topics import has_wildcard, matches

if TYPE_CHECKING:
    from sluice.broker.admin_topics import AdminTopics
    from sluice.broker.connection import Connection
    from sluice.broker.session import Session

MAX_TOPICS: Final = 65_536  # topics that are kept taken apart, none of them longer than MAX_TOPIC
MAX_TOPIC: Final = 256

Validator = Callable[[bytes], str]


def reason_of(error: QueueError) -> int:
    """The MQTT reason for a refusal."""
    if isinstance(error, QueueFull):
        return QUOTA_EXCEEDED
    if isinstance(error, MessageTooLarge):
        return PACKET_TOO_LARGE
    if isinstance(error, InvalidQueueName):
        return TOPIC_NAME_INVALID
    if isinstance(error, UnknownDelivery):
        return NO_MATCHING_SUBSCRIBERS
    if isinstance(error, StaleDelivery):
        return IMPLEMENTATION_SPECIFIC_ERROR
    if isinstance(error, InvalidPayload | InvalidQueueConfig):
        return PAYLOAD_FORMAT_INVALID
    return IMPLEMENTATION_SPECIFIC_ERROR


class WildSubscription:
    """A filter with wildcards: it joins every queue that matches, now and later."""

    def __init__(self, session: Session, topic_filter: bytes, qos: i64, options: Options) -> None:
        self.session: Session = session
        self.topic_filter: bytes = topic_filter
        self.qos: i64 = qos
        self.options: Options = options


class Options:
    """What a SUBSCRIBE asks for: its subscription identifier, then its user properties, name and value in turn."""

    def __init__(self, session: Session, wishes: list[str]) -> None:
        self.group: str = default_group(session.client_id)
        self.prefetch: int = 0  # 0: what the queue says
        self.by_puback: bool = session.version != V5
        self.start: str = "earliest"
        self.priority: int = 0
        self.exclusive: bool = False
        self.id_in_topic: bool = False
        identifier = int(wishes[0])
        self.extra: bytes = encode_identifiers([identifier] if identifier else [])
        for at in range(1, len(wishes), 2):
            self._take(wishes[at], wishes[at + 1])

    def _take(self, name: str, value: str) -> None:
        if name == "consumer-group":
            if not value or any(character in value for character in "/+#$"):
                raise InvalidQueueConfig(
                    f"consumer-group {value!r} cannot be a group", "Leave out / + # and $"
                )
            self.group = value
        elif name == "prefetch":
            self.prefetch = _number(name, value, 1, 65_535)
        elif name == "ack-mode":
            if value not in ("explicit", "puback"):
                raise InvalidQueueConfig(f"ack-mode is {value!r}", "Use explicit or puback")
            self.by_puback = value == "puback"
        elif name == "start":
            self.start = value
        elif name == "consumer-priority":
            self.priority = _number(name, value, -1_000_000, 1_000_000)
        elif name == "exclusive":
            self.exclusive = value.lower() in ("true", "1", "yes")


def _number(name: str, value: str, least: int, greatest: int) -> int:
    try:
        number = int(value)
    except ValueError:
        number = least - 1
    if not least <= number <= greatest:
        raise InvalidQueueConfig(f"{name} is {value!r}", f"Give a whole number from {least} to {greatest}")
    return number


def default_group(client_id: str) -> str:
    """Workers called images-1 and images-2 are the group images."""
    return client_id.rpartition("-")[0] or client_id


class QueueDoor:
    """`validator_of` gives a check for a JSON Schema: the fault of a payload, or the empty string."""

    def __init__(
        self,
        engine: Engine,
        turn: Turn,
        subscriptions: Subscriptions,
        service: QueueService,
        validator_of: Callable[[str], Validator],
    ) -> None:
        self.engine: Engine = engine
        self.service: QueueService = service
        self._turn: Turn = turn
        self._subscriptions: Subscriptions = subscriptions
        self._validator_of = validator_of
        self._validators: dict[str, Validator] = {}
        self._topics: dict[bytes, QueueTopic] = {}
        self._wishes = Wishes()
        self._wild: list[WildSubscription] = []
        self.admin: AdminTopics | None = None  # who carries out what is published to $admin/...

    def _begin(self) -> None:
        """Something is asked of the engine: it goes by this turn's time, and is driven at this turn's end."""
        turn = self._turn
        self.engine.now = turn.now
        turn.schedule()

    def takes(self, topic: bytes) -> bool:
        """Whether a topic is one of ours."""
        return topic.startswith((PREFIX, b"$admin/"))

    def watch(self) -> None:
        if self.admin is not None:
            self.admin.watch()

    # ---- publishing

    def publish(self, packet: Publish, session: Session, connection: Connection) -> None:
        """A PUBLISH to a topic under `$queue/`."""
        topic = packet.topic
        self._begin()
        known = self._topics.get(topic)
        if known is None:
            known = self._parse(topic)
        verb = known.verb
        try:
            if verb == ADMIN:
                self._administer(packet, session)
            elif verb == PUBLISH:
                self._enqueue(packet, known, session)
            elif ACK <= verb <= RELEASE:
                self._settle(packet, known, session)
            elif verb == RESPONSE:
                session.publish_plain(packet, connection)
                return
            else:
                text = known.rest.decode() if verb == WRONG else "a group is subscribed to, not published to"
                session.refuse(packet, connection, TOPIC_NAME_INVALID, text)
                return
        except QueueError as error:
            settling = ACK <= verb <= RELEASE and session.version != V5
            if settling and packet.qos > 0:
                # 3.1.1 has no word for "too late", and a late settle is no reason to cut the line.
                self.engine.journal.add_receipt(session, packet.packet_id | (packet.qos << 16))
                session.answer_later(packet)
            elif not settling:
                session.refuse(packet, connection, reason_of(error), str(error))

    def _administer(self, packet: Publish, session: Session) -> None:
        if self.admin is not None:
            self.admin.publish(packet.topic, packet.payload)
        if packet.qos > 0:
            self.answer_when_kept(session, packet)

    def _parse(self, topic: bytes) -> QueueTopic:
        if not topic.startswith(PREFIX):
            return QueueTopic(ADMIN, "")
        known = parse_queue_topic(topic)
        if known.verb == PUBLISH or (ACK <= known.verb <= RELEASE and not known.rest):
            fault = fault_of_name(known.queue)
            if fault:
                known = QueueTopic(WRONG, known.queue, fault.encode())
            if len(topic) <= MAX_TOPIC:
                if len(self._topics) >= MAX_TOPICS:
                    self._topics.clear()
                self._topics[topic] = known
        return known

    def _enqueue(self, packet: Publish, known: QueueTopic, session: Session) -> None:
        engine = self.engine
        queue = engine.queues.get(known.queue)
        if queue is None:
            queue = self.open(known.queue)
        message = self.message_of(packet)
        if queue.rules.schema:
            self._check_payload(queue, message)
        if packet.qos > 0:
            engine.publish(queue, message, session, packet.packet_id | (packet.qos << 16))
            session.answer_later(packet)
        else:
            engine.publish(queue, message, None, 0)

    def message_of(self, packet: Publish) -> Message:
        """A PUBLISH as a message: its properties go along unread, but for those that are for the queue."""
        message = Message(packet.payload, packet.raw)
        if packet.expires_at != 0.0:
            message.expires = int(packet.expires_at + 0.999)
        if packet.raw:
            wishes = self._wishes
            read_wishes(packet.raw, wishes)
            message.key = wishes.key
            if wishes.ids:
                message.id = wishes.ids[0]
            if wishes.priority:
                message.priority = _number("priority", wishes.priority.decode(), 0, 9)
            if wishes.delay:
                message.deliver_at = int((self.engine.now + _duration("delay", wishes.delay)) * 1000.0)
            elif wishes.deliver_at:
                message.deliver_at = _moment(wishes.deliver_at)
        return message

    def capture(self, packet: Publish, captures: list[Capture]) -> i64:
        """Keep copies of a plain publish; how many queues took one."""
        self._begin()
        taken: i64 = 0
        for capture in captures:
            queue = self.engine.queues.get(capture.queue)
            if queue is None or not _has_headers(packet, capture.headers):
                continue
            message = self.message_of(packet)
            message.topic = packet.topic
            if queue.rules.schema:
                self._check_payload(queue, message)
            self.engine.publish(queue, message, None, 0)
            taken += 1
        return taken

    def answer_when_kept(self, session: Session, packet: Publish) -> None:
        self.engine.journal.add_receipt(session, packet.packet_id | (packet.qos << 16))
        session.answer_later(packet)

    def bindings_changed(self) -> None:
        """A queue was made, changed or deleted: which plain topics are captured follows from all of them."""
        captures: list[Capture] = []
        for queue in self.engine.queues.values():
            if queue.rules.bindings:
                for binding in json.loads(queue.config)["bindings"]:
                    headers = [(name, value) for name, value in binding["headers"].items()]
                    captures.append(Capture(queue.name, binding["topic"].encode(), headers))
        self._subscriptions.set_captures(captures)

    def open(self, name: str) -> Queue:
        """A queue that comes into being, with everybody who has subscribed to its like."""
        queue = self.engine.ensure(name)
        self.appeared(queue)
        return queue

    def appeared(self, queue: Queue) -> None:
        self.joined_by_wildcards(queue)
        if queue.rules.bindings:
            self.bindings_changed()

    def joined_by_wildcards(self, queue: Queue) -> None:
        for wild in self._wild:
            if self._covers(wild.topic_filter, queue.name) and queue.name not in wild.session.by_queue:
                self._join(wild.session, wild.topic_filter, queue, wild.qos, wild.options)

    def _check_payload(self, queue: Queue, message: Message) -> None:
        schema = queue.rules.schema
        validator = self._validators.get(schema)
        if validator is None:
            validator = self._validators[schema] = self._validator_of(schema)
        fault = validator(message.payload)
        if fault:
            raise InvalidPayload(queue.name, fault)

    # ---- settling

    def _settle(self, packet: Publish, known: QueueTopic, session: Session) -> None:
        wishes = self._wishes
        read_wishes(packet.raw, wishes)
        ids = wishes.ids
        if not ids:
            ids = [known.rest] if known.rest else _ids_in(packet.payload)
        queue = self.engine.find(known.queue)
        group, client = self._group_of(queue, wishes.group, session)
        token = _token(wishes.token) if wishes.token else 0
        if len(ids) == 1:
            self._settle_one(known.verb, group, ids[0], token, client)
        else:
            self._settle_many(known.verb, group, ids, token, client)
        if packet.qos > 0:
            self.engine.journal.add_receipt(session, packet.packet_id | (packet.qos << 16))
            session.answer_later(packet)

    def _group_of(self, queue: Queue, name: str, session: Session) -> tuple[Group, str]:
        """The group a client settles for, and the name under which it must hold the delivery ("": any will do)."""
        consumer = session.by_queue.get(queue.name)
        if consumer is not None and consumer.group is not None and (not name or name == consumer.group_name):
            return consumer.group, session.client_id
        group = queue.groups.get(name or default_group(session.client_id))
        if group is None:
            raise UnknownDelivery("")
        return group, ""

    def _settle_one(self, verb: i64, group: Group, name: bytes, token: i64, client: str) -> None:
        engine = self.engine
        lease = engine.lease_of(group, name, token, client)
        if verb == ACK:
            engine.ack(lease)
        elif verb == NACK:
            delay = _duration("delay", self._wishes.delay) if self._wishes.delay else -1.0
            engine.nack(lease, delay, self._wishes.description.decode())
        elif verb == REJECT:
            self._reject(lease)
        elif verb == EXTEND:
            engine.extend(lease)
        else:
            engine.release(lease)

    def _reject(self, lease: Lease) -> None:
        reason = self._wishes.reason.decode() or "rejected"
        if reason == "delivery-error":
            reason = "rejected"
        elif reason not in ("rejected", "unacceptable"):
            raise InvalidQueueConfig(f"reason is {reason!r}", "Use delivery-error or unacceptable")
        self.engine.bury(lease, reason, self._wishes.description.decode())

    def _settle_many(self, verb: i64, group: Group, ids: list[bytes], token: i64, client: str) -> None:
        """A batch: all that can be settled is; the answer tells of the rest."""
        first: QueueError | None = None
        failed = 0
        for name in ids:
            try:
                self._settle_one(verb, group, name, token, client)
            except QueueError as error:
                failed += 1
                first = first or error
        if first is not None:
            first.do = f"{failed} of {len(ids)} could not be settled. {first.do}"
            raise first

    # ---- subscribing

    def subscribe(
        self, session: Session, request: SubscriptionRequest, properties: Properties | None, identifier: int
    ) -> tuple[int, str]:
        """Join a queue, or all that match: the granted QoS, or a reason and why."""
        self._begin()
        wishes = [str(identifier)]
        for name, value in properties.user if properties is not None else []:
            wishes.append(name)
            wishes.append(value)
        try:
            return self._subscribe(session, request.topic_filter, min(request.qos, 1), wishes)
        except QueueError as error:
            return reason_of(error), str(error)

    def rejoin(self, session: Session, topic_filter: bytes, qos: i64, wishes: list[str]) -> None:
        """A subscription from before a restart, of a session whose client is not back yet."""
        self._begin()
        try:
            self._subscribe(session, topic_filter, qos, wishes)
        except QueueError as error:
            self.engine.warnings.append(f"{session.client_id} could not be subscribed again: {error}")
        self.paused(session)

    def _subscribe(
        self, session: Session, topic_filter: bytes, qos: i64, wishes: list[str]
    ) -> tuple[int, str]:
        options = Options(session, wishes)
        known = parse_queue_topic(topic_filter)
        if known.verb == GROUP:
            options.group = known.rest.decode()
            options.id_in_topic = True
        elif known.verb != PUBLISH:
            return TOPIC_FILTER_INVALID, known.rest.decode() or "only queues and groups can be subscribed to"
        if has_wildcard(topic_filter):
            self.unsubscribe(session, topic_filter)
            self._wild.append(WildSubscription(session, topic_filter, qos, options))
            for queue in list(self.engine.queues.values()):
                if self._covers(topic_filter, queue.name) and queue.name not in session.by_queue:
                    self._join(session, topic_filter, queue, qos, options)
        else:
            fault = fault_of_name(known.queue)
            if fault:
                return TOPIC_FILTER_INVALID, fault
            named = self.engine.queues.get(known.queue)
            self._join(session, topic_filter, named or self.open(known.queue), qos, options)
        session.queue_requests[topic_filter] = (int(qos), wishes)
        return int(qos), ""

    def _covers(self, topic_filter: bytes, name: str) -> bool:
        """Whether a wildcard means this queue. Dead letters are meant only by a filter that names them."""
        if name.startswith("dlq/") and not topic_filter.startswith(b"$queue/dlq/"):
            return False
        return matches(topic_filter, PREFIX + name.encode())

    def _join(self, session: Session, topic_filter: bytes, queue: Queue, qos: i64, options: Options) -> None:
        engine = self.engine
        before = session.by_queue.get(queue.name)
        prefetch: i64 = options.prefetch or queue.rules.prefetch
        if before is not None:
            if before.group_name == options.group and before.id_in_topic == options.id_in_topic:
                before.prefetch = (
                    prefetch  # the same again, as clients do on each connect: what it holds stays with it
                )
                before.qos = qos
                before.by_puback = options.by_puback
                return
            engine.leave(before)
        group = queue.groups.get(options.group)
        if group is None:
            group = engine.group(queue, options.group, start_floors(queue, options.start))
        consumer = QueueConsumer(
            session,
            topic_filter,
            queue.name,
            options.group,
            qos,
            prefetch,
            options.priority,
            options.exclusive,
            options.by_puback,
            options.id_in_topic,
            options.extra,
        )
        session.by_queue[queue.name] = consumer
        engine.join(queue, group, consumer)

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        """Whether there was such a subscription."""
        self._begin()
        found = session.queue_requests.pop(topic_filter, None) is not None
        for wild in self._wild:
            if wild.session is session and wild.topic_filter == topic_filter:
                self._wild.remove(wild)
                break
        for name, consumer in list(session.by_queue.items()):
            if consumer.topic_filter == topic_filter:
                del session.by_queue[name]
                self.engine.leave(consumer)
        return found

    # ---- a session comes and goes

    def paused(self, session: Session) -> None:
        """Its connection is gone, the session waits: it keeps what it holds until the deadlines, and gets no more."""
        self._begin()
        for consumer in session.by_queue.values():
            self.engine.pause(consumer)

    def resumed(self, session: Session) -> None:
        self._begin()
        for consumer in session.by_queue.values():
            self.engine.resume(consumer)

    def ended(self, session: Session) -> None:
        if not session.by_queue and not self._wild:
            return
        self._begin()
        self._wild = [wild for wild in self._wild if wild.session is not session]
        for consumer in list(session.by_queue.values()):
            self.engine.leave(consumer)
        session.by_queue = {}

    def acknowledged(self, lease: Lease, reason: i64) -> None:
        """A PUBACK that is an ack, or with a failure reason a nack."""
        self._begin()
        if reason < 0x80:
            self.engine.ack(lease)
        else:
            self.engine.nack(lease, -1.0, f"the consumer answered with reason 0x{reason:02x}")

    def feed(self, consumer: QueueConsumer) -> None:
        self._turn.schedule()
        self.engine.feed(consumer)


def _has_headers(packet: Publish, wanted: list[tuple[str, str]]) -> bool:
    """Whether a packet has all these user properties."""
    return not wanted or all(pair in packet.properties().user for pair in wanted)


def _duration(name: str, text: bytes) -> float:
    try:
        return parse_duration(text.decode())
    except ValueError as fault:
        raise InvalidQueueConfig(f"{name}: {fault}") from None


def _moment(text: bytes) -> i64:
    """A time in milliseconds since 1970, given as that number or in ISO 8601."""
    value = text.decode()
    try:
        if value.isdigit():
            return int(value)
        return int(datetime.fromisoformat(value).timestamp() * 1000.0)
    except ValueError:
        raise InvalidQueueConfig(
            f"deliver-at is {value!r}", "Give milliseconds since 1970, or a time such as 2030-01-31T12:00:00Z"
        ) from None


def _token(text: bytes) -> i64:
    """A delivery token; what is not one matches none."""
    try:
        return int(text, 16)
    except ValueError:
        return -1


def _ids_in(payload: bytes) -> list[bytes]:
    """Message ids in a payload: one, or a JSON list of them."""
    if not payload.strip():
        raise InvalidQueueConfig(
            "no message is named", "Name it by user property message-id, in the topic, or in the payload"
        )
    if payload[:1] != b"[":
        return [payload.strip()]
    try:
        return [str(one).encode() for one in json.loads(payload)]
    except ValueError:
        raise InvalidQueueConfig("the payload is not a JSON list of message ids") from None
