"""Where MQTT meets the queues: publishes, settlements and subscriptions under `$queue/`.

It translates and answers; every decision about messages is the engine's. Refusals become reason codes by one table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.broker.namespaces.compacted.handler import PREFIX as ECQ_PREFIX
from sluice.broker.namespaces.compacted.handler import EcqDoor, is_write
from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer
from sluice.broker.namespaces.queues.queue_subscriptions import QueueMembers
from sluice.broker.namespaces.queues.reason_mapping import reason_of, subscribe_reason_of
from sluice.broker.namespaces.queues.queue_topics import (
    ACK,
    ADMIN,
    EXTEND,
    MAX_IDS,
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
    without_ids,
)
from sluice.broker.namespaces.queues.queue_options import (
    LAST_MOMENT,
    MAX_ID,
    default_group,
    read_delay,
    read_ids,
    read_moment,
    read_number,
    read_token,
)
from sluice.broker.acl.acl import QUEUE_ADMIN
from sluice.broker.sessions.subscriptions import Capture, Subscription, Subscriptions
from sluice.broker.turn import Turn
from sluice.errors import (
    InvalidPayload,
    InvalidQueueConfig,
    InvalidQueueName,
    NotHolder,
    QueueError,
    StaleDelivery,
    TokenNeeded,
    TooManyIds,
    UnknownDelivery,
    UnknownGroup,
    WrongToken,
)
from sluice.message import LAST_SECOND, Message
from sluice.queues.config import MAX_BINDING_LEVELS
from sluice.queues.flow.dead_letters import UNACCEPTABLE, bury_unborn
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.engine import Engine
from sluice.queues.model.group import Group
from sluice.queues.names import fault_of_name, fault_of_new_name
from sluice.queues.model.queue import Queue
from sluice.queues.service import QueueService
from sluice.queues.flow.delivery_tokens import Token
from sluice.wire.packets import V5, Publish, SubscriptionRequest
from sluice.wire.properties import PUBACK, PUBREC, Properties
from sluice.wire.reasons import (
    NOT_AUTHORIZED,
    TOPIC_NAME_INVALID,
)
from sluice.wire.topics import begins

if TYPE_CHECKING:
    from sluice.broker.cluster_port import Abroad
    from sluice.broker.namespaces.admin_topics import AdminTopics
    from sluice.broker.net.connection import Connection
    from sluice.broker.namespaces.responses import Responses
    from sluice.broker.sessions.session import Session

ADMIN_PREFIX: Final = b"$admin/"
MAX_TOPICS: Final = 65_536  # topics that are kept taken apart, none of them longer than MAX_TOPIC
MAX_TOPIC: Final = 256
MAX_VALIDATORS: Final = 1000
WARNING_SECONDS: Final = 1.0

Validator = Callable[[bytes], str]


class Settler:
    """A client that settles deliveries of `group`, and its grounds to do so.

    A `member` consumes as that group. An `operator` is no member, and has a rule `queue-admin` for the queue. Any
    other client must be the last holder of the delivery, by client id and user, or give the delivery token.
    """

    def __init__(self, group: Group, session: Session, member: bool, operator: bool) -> None:
        self.group: Group = group
        self.session: Session = session
        self.identity: str = session.identity
        self.member: bool = member
        self.operator: bool = operator


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
        self.ecq: EcqDoor = EcqDoor(engine, turn)  # what is under $ECQ/
        self._turn: Turn = turn
        self._subscriptions: Subscriptions = subscriptions
        self._validator_of = validator_of
        self._validators: dict[str, Validator] = {}
        self._topics: dict[bytes, QueueTopic] = {}
        self._wishes = Wishes()
        self._token = Token()  # the one of the settlement at hand
        self._next_warning: float = 0.0  # when the log may hear of a wrong token again
        self.members: QueueMembers = QueueMembers(engine, self.open, turn, self._begin)
        self._ignored_bindings: set[bytes] = set()  # bindings that a log line has named
        self.abroad: Abroad | None = None  # None: all queues are here
        self.admin: AdminTopics | None = None  # who carries out what is published to $admin/...
        self.responses: Responses | None = None  # who keeps what is published to $queue/responses/...

    def _begin(self) -> None:
        """Something is asked of the engine: it goes by this turn's time, and is driven at this turn's end."""
        turn = self._turn
        self.engine.now = turn.now
        turn.schedule()

    def takes(self, topic: bytes) -> bool:
        """Whether a topic is one of ours."""
        if len(topic) > 1 and topic[1] == ECQ_PREFIX[1]:
            return is_write(topic) or begins(topic, ECQ_PREFIX)
        return begins(topic, PREFIX) or begins(topic, ADMIN_PREFIX)

    def watch(self) -> None:
        if self.admin is not None:
            self.admin.watch()

    # ---- responses

    def may_take_responses(self, session: Session, topic_filter: bytes, granted: int) -> tuple[int, str]:
        """Responses have one consumer: the granted QoS, or a reason and why."""
        if self.responses is None or self.responses.may_subscribe(session, topic_filter):
            return granted, ""
        return (
            NOT_AUTHORIZED,
            "another client takes these responses already: use a correlation id of your own",
        )

    def takes_responses(self, subscription: Subscription) -> None:
        if self.responses is not None:
            self.responses.subscribed(subscription)

    # ---- publishing

    def publish(self, packet: Publish, session: Session, connection: Connection) -> None:
        """A PUBLISH to a topic that is one of ours."""
        topic = packet.topic
        self._begin()
        if topic[1] == ECQ_PREFIX[1]:
            self._publish_value(packet, session, connection)
            return
        self.ecq.catch_up()
        known = self._topics.get(topic)
        if known is None:
            known = self._parse(topic)
            if self.abroad is not None and not session.foreign:
                known.cell = self.abroad.cell_for(topic, packet.payload)
        verb = known.verb
        if known.cell >= 0 and self.abroad is not None:
            settles = ACK <= verb <= RELEASE
            self.abroad.legs_of(session).publish(known.cell, packet, settles, connection)
            return
        try:
            if verb == ADMIN:
                self._administer(packet, session)
            elif verb == PUBLISH:
                self._enqueue(packet, known, session, connection)
            elif ACK <= verb <= RELEASE:
                self._settle(packet, known, session)
            elif verb == RESPONSE:
                self._respond(packet, session, connection)
            else:
                text = known.rest.decode() if verb == WRONG else "a group is subscribed to, not published to"
                session.refuse(packet, connection, TOPIC_NAME_INVALID, text)
                return
        except QueueError as error:
            settling = ACK <= verb <= RELEASE and session.version != V5
            if settling and packet.qos > 0:
                # 3.1.1 has no word for "too late", and a late settle is no reason to cut the line.
                self.engine.journal.add_receipt(session, session.tag(packet))
                session.answer_later(packet)
            elif not settling:
                session.refuse(packet, connection, reason_of(error), str(error))

    def _publish_value(self, packet: Publish, session: Session, connection: Connection) -> None:
        """A value for an exclusive queue, which lies in the cell of its owner."""
        if self.abroad is not None and not session.foreign:
            cell = self.abroad.cell_for(packet.topic, packet.payload)
            if cell >= 0:
                self.abroad.legs_of(session).publish(cell, packet, False, connection)
                return
        self.ecq.publish(packet, session, connection)

    def _administer(self, packet: Publish, session: Session) -> None:
        if self.admin is not None:
            self.admin.publish(packet.topic, packet.payload)
        if packet.qos > 0:
            self.answer_when_kept(session, packet)

    def _respond(self, packet: Publish, session: Session, connection: Connection) -> None:
        """An answer is with its receiver, or waits in memory, and is acknowledged at once.
        QoS 2 of a persistent session is passed on when its packet id is stored."""
        if self.responses is None:
            session.publish_plain(packet, connection)
            return
        if packet.qos == 2 and session.sid:
            self.responses.check_room(packet)
            session.router.forwarder.hold_response(packet)
            self.answer_when_kept(session, packet)
            return
        self.responses.publish(packet)
        if packet.qos > 0:
            connection.acknowledge(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, 0, "")

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

    def _enqueue(self, packet: Publish, known: QueueTopic, session: Session, connection: Connection) -> None:
        engine = self.engine
        message = self.message_of(packet)
        queue = self._queue_of(known)
        if queue is None:
            queue = self.open(known.queue)
        if queue.rules.schema and not self._fits_schema(queue, message):
            if packet.qos > 0:
                self.answer_when_kept(session, packet)
        elif packet.qos > 0:
            engine.publish(queue, message, session, session.tag(packet))
            session.answer_later(packet)
        else:
            engine.publish(queue, message, None, 0)
        session.router.hold_back(connection)

    def _queue_of(self, known: QueueTopic) -> Queue | None:
        """The queue that a topic names: kept beside the topic, because of many queues most are in no cache."""
        queue = known.found
        if queue is None or queue.gone:
            queue = known.found = self.engine.queues.get(known.queue)
        return queue

    def message_of(self, packet: Publish) -> Message:
        """A PUBLISH as a message: its properties go along unread, but for those that are for the queue."""
        message = self._as_it_came(packet)
        if packet.raw:
            self._grant_wishes(message)
        return message

    def _as_it_came(self, packet: Publish) -> Message:
        """The message without what it asks for, which is in `_wishes`."""
        message = Message(packet.payload, packet.raw)
        if packet.expires_at != 0.0:
            message.expires = min(int(packet.expires_at + 0.999), LAST_SECOND)
        if packet.raw:
            wishes = self._wishes
            read_wishes(packet.raw, wishes)
            message.key = wishes.key
            if wishes.begin >= 0:
                message.id = wishes.id
                message.props = without_ids(packet.raw, wishes)
        return message

    def _grant_wishes(self, message: Message) -> None:
        wishes = self._wishes
        if wishes.more is not None and len(wishes.more) > MAX_IDS:
            raise TooManyIds(MAX_IDS)
        if len(message.id) > MAX_ID:
            raise InvalidQueueConfig(f"message-id has {len(message.id)} bytes", f"Give at most {MAX_ID}")
        if message.id == b"." or message.id == b"..":
            raise InvalidQueueConfig(
                f"message-id is {message.id.decode()!r}", "Give another one: paths of REST lose such a name"
            )
        if wishes.priority:
            message.priority = read_number("priority", wishes.priority.decode(), 0, 9)
        if wishes.delay:
            delay = self.engine.now + read_delay("delay", wishes.delay)
            message.deliver_at = min(int(delay * 1000.0), LAST_MOMENT)
        elif wishes.deliver_at:
            message.deliver_at = read_moment(wishes.deliver_at)

    def _copy_of(self, packet: Publish, queue: Queue) -> Message:
        """A plain publish as a message. Who published it may never have heard of queues and have properties of these
        names for other ends: what is of no use to the queue is no reason to refuse it."""
        message = self._as_it_came(packet)
        message.topic = packet.topic
        if packet.raw and not queue.rules.compacted:
            try:
                self._grant_wishes(message)
            except (InvalidQueueConfig, TooManyIds):
                pass
        if len(message.id) > MAX_ID or message.id == b"." or message.id == b"..":
            message.id = b""
        return message

    def capture(self, packet: Publish, captures: list[Capture]) -> i64:
        """Keep copies of a plain publish; how many queues took one."""
        self._begin()
        taken: i64 = 0
        for capture in captures:
            queue = self.engine.queues.get(capture.queue)
            if queue is None or not _has_headers(packet, capture.headers):
                continue
            message = self._copy_of(packet, queue)
            if not queue.rules.schema or self._fits_schema(queue, message):
                self.engine.publish(queue, message, None, 0)
            taken += 1
        return taken

    def answer_when_kept(self, session: Session, packet: Publish) -> None:
        self.engine.journal.add_receipt(session, session.tag(packet))
        session.answer_later(packet)

    def bindings_changed(self) -> None:
        """A queue was made, changed or deleted: which plain topics are captured follows from all of them."""
        captures: list[Capture] = []
        for queue in self.engine.queues.values():
            if queue.rules.bindings:
                for binding in json.loads(queue.config)["bindings"]:
                    topic_filter: bytes = binding["topic"].encode()
                    if self.abroad is not None and self._is_too_deep(queue, topic_filter):
                        continue
                    headers = [(name, value) for name, value in binding["headers"].items()]
                    captures.append(Capture(queue.name, topic_filter, headers))
        self._subscriptions.set_captures(captures)
        if self.abroad is not None:
            self.abroad.captures_changed(captures)

    def _is_too_deep(self, queue: Queue, topic_filter: bytes) -> bool:
        """Return whether the nodes of a cluster cannot route by a stored binding, and warn of it once.

        Older versions accepted such bindings.
        """
        levels = topic_filter.count(b"/") + 1
        if levels <= MAX_BINDING_LEVELS:
            return False
        if topic_filter not in self._ignored_bindings:
            self._ignored_bindings.add(topic_filter)
            self.engine.warnings.append(
                f"queue {queue.name!r} captures nothing by a binding of {levels} levels: a cluster routes by at most "
                f"{MAX_BINDING_LEVELS}. Change the bindings of the queue"
            )
        return True

    def open(self, name: str) -> Queue:
        """A queue that comes into being, with everybody who has subscribed to its like."""
        fault = fault_of_new_name(name)
        if fault:
            raise InvalidQueueName(name, fault)
        queue = self.engine.ensure(name)
        self.appeared(queue)
        return queue

    def delete(self, queue: Queue) -> None:
        """A queue goes, with all in it. Who has subscribed to it stays so, and joins again if the name comes back."""
        self._begin()
        self.members.leave_behind(queue)
        self.engine.delete(queue)
        if queue.rules.bindings:
            self.bindings_changed()

    def appeared(self, queue: Queue) -> None:
        self.members.come_back(queue)
        self.members.join_wild(queue)
        if queue.rules.bindings:
            self.bindings_changed()

    def validator(self, queue: Queue) -> Validator:
        """The check that payloads for this queue must pass."""
        schema = queue.rules.schema
        validator = self._validators.get(schema)
        if validator is None:
            if len(self._validators) >= MAX_VALIDATORS:
                self._validators.clear()
            validator = self._validators[schema] = self._validator_of(schema)
        return validator

    def _fits_schema(self, queue: Queue, message: Message) -> bool:
        """What does not fit is refused, or goes to the invalid-message channel where the queue has one.

        A payload that is too large is not checked, since that could take long: `Engine.publish` refuses it.
        """
        if len(message.payload) > queue.rules.max_message_size:
            return True
        fault = self.validator(queue)(message.payload)
        if not fault:
            return True
        if not queue.rules.invalid_name:
            raise InvalidPayload(queue.name, fault)
        bury_unborn(self.engine, queue, message, UNACCEPTABLE, fault)
        return False

    def take(self, queue: Queue, message: Message) -> bool:
        """A message that came by another door, under the same rules. False: it does not fit the schema, and went to
        the invalid-message channel instead."""
        if queue.rules.schema and not self._fits_schema(queue, message):
            return False
        self.engine.publish(queue, message, None, 0)
        return True

    def publish_will(self, will: Publish) -> None:
        """A will for a queue. There is nobody left to hear a refusal, so the log does."""
        if self.abroad is not None:
            cell = self.abroad.cell_for(will.topic, will.payload)
            if cell >= 0:
                self.abroad.post_will(cell, will)
                return
        if begins(will.topic, ECQ_PREFIX):
            self.ecq.publish_will(will)
            return
        self._begin()
        known = parse_queue_topic(will.topic)
        try:
            if known.verb != PUBLISH:
                raise InvalidQueueName(known.queue, "a will goes to a queue, and can settle nothing")
            queue = self.engine.queues.get(known.queue) or self.open(known.queue)
            message = self.message_of(will)
            if not queue.rules.schema or self._fits_schema(queue, message):
                self.engine.publish(queue, message, None, 0)
        except QueueError as error:
            self.engine.warnings.append(f"a will for {will.topic.decode()} was not kept: {error}")

    # ---- settling

    def _settle(self, packet: Publish, known: QueueTopic, session: Session) -> None:
        wishes = self._wishes
        read_wishes(packet.raw, wishes)
        name = wishes.id
        more = wishes.more
        if more is not None and len(more) > MAX_IDS:
            raise TooManyIds(MAX_IDS)
        if not name:
            name = known.rest
            if not name:
                more = read_ids(packet.payload)
                name = more[0]
        queue = self._queue_of(known)
        if queue is None:
            raise UnknownDelivery(name.decode("utf-8", "replace"))
        settler = self._settler_of(queue, wishes.group, session)
        token = self._token
        token.counter = 0
        place = b""
        if wishes.token:
            read_token(wishes.token, token)
            place = wishes.token.partition(b".")[2]
        if more is None or len(more) == 1:
            try:
                self._settle_one(known.verb, settler, name, token, place)
            except WrongToken:
                self._count_wrong_token(settler)
                raise
        else:
            self._settle_many(known.verb, settler, more, token)
        if packet.qos > 0:
            self.engine.journal.add_receipt(session, session.tag(packet))
            session.answer_later(packet)

    def _settler_of(self, queue: Queue, name: str, session: Session) -> Settler:
        """Return the group that a client settles for, and on what grounds."""
        consumer = session.by_queue.get(queue.name)
        if consumer is not None and consumer.group is not None and (not name or name == consumer.group_name):
            return Settler(consumer.group, session, True, False)
        name = name or default_group(session.client_id)
        group = queue.groups.get(name)
        if group is None:
            raise UnknownGroup(queue.name, name)
        grant = session.grant
        operator = grant is not None and grant.allows(QUEUE_ADMIN, queue.name.encode())
        return Settler(group, session, False, operator)

    def _settle_one(self, verb: i64, settler: Settler, name: bytes, token: Token, place: bytes) -> None:
        """`place` is the position of the message in the log, if the token has it."""
        group = settler.group
        identity = settler.identity
        engine = self.engine
        delay = -1.0
        reason = ""
        if verb == NACK and self._wishes.delay:
            delay = read_delay("delay", self._wishes.delay)
        elif verb == REJECT:
            reason = self._read_reason()
        try:
            lease = engine.lease_of(
                group, name, token, "" if settler.operator and not token.counter else identity
            )
        except (UnknownDelivery, StaleDelivery) as error:
            known = isinstance(error, StaleDelivery)
            if not token.counter and not self._may_settle_late(settler, name, known):
                raise
            if verb == ACK and engine.finish_late(group, place or name, token, identity):
                return
            again = engine.retake(group, place or name, token, identity) if verb != ACK else None
            if again is None:
                if token.counter and engine.is_forged(group, place or name, token, identity, known):
                    raise WrongToken(name.decode("utf-8", "replace")) from None
                raise
            lease = again
        if verb == ACK:
            engine.ack(lease)
        elif verb == NACK:
            engine.nack(lease, delay, self._wishes.description.decode())
        elif verb == REJECT:
            engine.bury(lease, reason, self._wishes.description.decode())
        elif verb == EXTEND:
            engine.extend(lease)
        else:
            engine.release(lease)

    def _may_settle_late(self, settler: Settler, name: bytes, known: bool) -> bool:
        """Return whether a client may settle, without a token, a delivery that this run of the broker did not make.

        An operator may. So may a member of the group that cannot send a token because it speaks MQTT 3.1.1; a member
        could also receive the message and settle it then. `known`: this run knows the delivery, and it is another's.
        """
        if settler.operator or (settler.member and settler.session.lacks_properties):
            return True
        if known and not settler.member:
            raise NotHolder(name.decode("utf-8", "replace")) from None
        if settler.member and not known and self.engine.is_from_before(settler.group, name):
            raise TokenNeeded(name.decode("utf-8", "replace")) from None
        return False

    def _count_wrong_token(self, settler: Settler) -> None:
        """Count a packet whose token its client was not given, and log at most one in a second."""
        session = settler.session
        session.wrong_tokens += 1
        session.router.counters.wrong_tokens += 1
        connection = session.connection
        if connection is not None and self.engine.now >= self._next_warning:
            self._next_warning = self.engine.now + WARNING_SECONDS
            facts: dict[str, object] = {
                "client": session.client_id,
                "user": session.user,
                "peer": connection.peer(),
                "queue": settler.group.queue.name,
                "group": settler.group.name,
                "count": session.wrong_tokens,
            }
            connection.broker.log("wrong delivery token", facts)

    def _read_reason(self) -> str:
        reason = self._wishes.reason.decode() or "rejected"
        if reason == "delivery-error":
            return "rejected"
        if reason not in ("rejected", "unacceptable"):
            raise InvalidQueueConfig(f"reason is {reason!r}", "Use delivery-error or unacceptable")
        return reason

    def _settle_many(self, verb: i64, settler: Settler, ids: list[bytes], token: Token) -> None:
        """A batch: all that can be settled is; the answer tells of the rest.

        An id that was refused is refused again without a search: each search visits all deliveries with that id.
        """
        first: QueueError | None = None
        failed = 0
        is_wrong_token = False
        refused: set[bytes] = set()
        for name in ids:
            if refused and name in refused:
                failed += 1
                continue
            try:
                self._settle_one(verb, settler, name, token, b"")
            except QueueError as error:
                failed += 1
                refused.add(name)
                first = first or error
                if isinstance(error, WrongToken):
                    is_wrong_token = True
        if is_wrong_token:
            self._count_wrong_token(settler)
        if first is not None:
            first.do = f"{failed} of {len(ids)} could not be settled. {first.do}"
            raise first

    # ---- subscribing

    def subscribe(
        self,
        session: Session,
        request: SubscriptionRequest,
        granted: int,
        properties: Properties | None,
        identifier: int,
    ) -> tuple[int, str]:
        """Join a queue, or all that match: the granted QoS, or a reason and why."""
        self._begin()
        wishes = [str(identifier)]
        for name, value in properties.user if properties is not None else []:
            wishes.append(name)
            wishes.append(value)
        try:
            return self.members.subscribe(session, request.topic_filter, min(granted, 1), wishes)
        except QueueError as error:
            return subscribe_reason_of(error), str(error)

    def rejoin(self, session: Session, topic_filter: bytes, qos: i64, wishes: list[str]) -> None:
        """A subscription from before a restart, of a session whose client is not back yet."""
        if begins(topic_filter, ECQ_PREFIX):
            self.ecq.rejoin(session, wishes)
            return
        if self.abroad is not None and not session.foreign and self.abroad.is_far(topic_filter):
            self.abroad.rejoin(session, topic_filter, qos, wishes)
            if not self.abroad.is_near(topic_filter):
                return
        self._begin()
        try:
            self.members.subscribe(session, topic_filter, qos, wishes, at_once=True)
        except QueueError as error:
            self.engine.warnings.append(f"{session.client_id} could not be subscribed again: {error}")

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        """Whether there was such a subscription."""
        if begins(topic_filter, ECQ_PREFIX):
            return self.ecq.unsubscribe(session, topic_filter)
        self._begin()
        if self.abroad is not None and not session.foreign and self.abroad.is_far(topic_filter):
            self.abroad.legs_of(session).unsubscribe(topic_filter)
        return self.members.unsubscribe(session, topic_filter)

    # ---- a session comes and goes

    def paused(self, session: Session) -> None:
        """Its connection is gone, the session waits: it keeps what it holds until the deadlines, and gets no more."""
        self._begin()
        self.members.pause(session)

    def resumed(self, session: Session) -> None:
        self._begin()
        self.members.resume(session)

    def ended(self, session: Session) -> None:
        self.ecq.ended(session)
        if session.by_queue or self.members.has_wild():
            self._begin()
            self.members.end(session)

    def acknowledged(self, lease: Lease, reason: i64) -> None:
        """A PUBACK that is an ack, or with a failure reason a nack."""
        self._begin()
        if reason < 0x80:
            self.engine.ack(lease)
        else:
            self.engine.nack(lease, -1.0, f"the consumer answered with reason 0x{reason:02x}")

    def too_large(self, lease: Lease) -> None:
        """Its consumer cannot take a packet of this size: that will not change, so it counts as a failure."""
        self._begin()
        self.engine.nack(lease, -1.0, "larger than the consumer's maximum packet size")

    def feed(self, consumer: QueueConsumer) -> None:
        self._turn.schedule()
        self.engine.feed(consumer)


def _has_headers(packet: Publish, wanted: list[tuple[str, str]]) -> bool:
    """Whether a packet has all these user properties."""
    return not wanted or all(pair in packet.properties().user for pair in wanted)
