"""Handler of `$queue/`: publishes, settlements and subscriptions of queues.

The handler translates and acknowledges; the engine makes every decision about messages. One table
maps errors to reason codes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.broker.acl.acl import QUEUE_ADMIN
from sluice.broker.namespaces.compacted.handler import PREFIX as ECQ_PREFIX
from sluice.broker.namespaces.compacted.handler import ExclusiveQueueHandler, is_write_topic
from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer
from sluice.broker.namespaces.queues.queue_options import (
    MAX_MESSAGE_ID_BYTES,
    MAX_TIMESTAMP_MS,
    default_group,
    read_delay,
    read_message_ids,
    read_number,
    read_timestamp_ms,
    read_token,
)
from sluice.broker.namespaces.queues.queue_subscriptions import QueueSubscriptions
from sluice.broker.namespaces.queues.queue_topics import (
    ACK,
    ADMIN,
    EXTEND,
    INVALID,
    MAX_IDS,
    NACK,
    PUBLISH,
    QUEUE_PREFIX,
    REJECT,
    RELEASE,
    RESPONSE,
    PublishOptions,
    QueueTopic,
    parse_queue_topic,
    read_publish_options,
    strip_message_ids,
)
from sluice.broker.namespaces.queues.reason_mapping import get_reason_code, get_suback_reason_code
from sluice.broker.sessions.subscriptions import Subscription, TopicBinding
from sluice.broker.subscribe_options import SubscribeOptions
from sluice.broker.turn import Turn
from sluice.errors import (
    InvalidPayload,
    InvalidQueueConfig,
    InvalidQueueName,
    NotHolder,
    QueueError,
    QueueNotCreated,
    StaleDelivery,
    TokenNeeded,
    TooManyIds,
    UnknownDelivery,
    UnknownGroup,
    WrongToken,
)
from sluice.message import MAX_EXPIRES, Message
from sluice.queues.config import MAX_BINDING_LEVELS
from sluice.queues.engine import Engine
from sluice.queues.flow import UNACCEPTABLE, DeliveryToken
from sluice.queues.model import Group, Lease, Queue
from sluice.queues.names import new_queue_name_error, queue_name_error
from sluice.queues.service import QueueService
from sluice.wire.packets import V5, Publish
from sluice.wire.properties import PUBACK, PUBREC
from sluice.wire.reasons import (
    NOT_AUTHORIZED,
    TOPIC_NAME_INVALID,
)
from sluice.wire.topics import starts_with

if TYPE_CHECKING:
    from sluice.broker.namespaces.admin_topics import AdminTopics
    from sluice.broker.namespaces.responses import Responses
    from sluice.broker.net.connection import Connection
    from sluice.broker.router import Router
    from sluice.broker.sessions.session import Session

ADMIN_PREFIX: Final = b"$admin/"
# Parsed topics; longer topics than MAX_CACHED_TOPIC_BYTES are not cached.
MAX_CACHED_TOPICS: Final = 65_536
MAX_CACHED_TOPIC_BYTES: Final = 256
MAX_VALIDATORS: Final = 1000
WARNING_INTERVAL_SECONDS: Final = 1.0

Validator = Callable[[bytes], str]


class Settler:
    """A client that settles deliveries of `group`, and its right to do so.

    A member consumes as that group. An operator is no member, and has a rule `queue-admin` for the
    queue. Any other client must be the last holder of the delivery, by client id and user, or give
    the delivery token.
    """

    def __init__(self, group: Group, session: Session, is_member: bool, is_operator: bool) -> None:
        self.group: Group = group
        self.session: Session = session
        self.identity: str = session.identity
        self.is_member: bool = is_member
        self.is_operator: bool = is_operator


class QueueHandler:
    """The handler of the namespaces `$queue/`, `$ECQ/` and `$admin/`.

    `make_validator` returns a check for a JSON Schema, which returns the error of a payload, or an
    empty string.
    """

    def __init__(
        self,
        engine: Engine,
        router: Router,
        service: QueueService,
        make_validator: Callable[[str], Validator],
    ) -> None:
        self.engine: Engine = engine
        self.service: QueueService = service
        # Serves $ECQ/.
        self.exclusive_handler: ExclusiveQueueHandler = ExclusiveQueueHandler(engine, router.turn)
        self._router: Router = router
        self._turn: Turn = router.turn
        self._make_validator = make_validator
        self._validators: dict[str, Validator] = {}
        self._topic_cache: dict[bytes, QueueTopic] = {}
        self._options = PublishOptions()
        self._token = DeliveryToken()  # reused: the token of the current settlement
        self._next_warning_at: float = 0.0  # when a wrong token may be logged again
        self.queue_subscriptions: QueueSubscriptions = QueueSubscriptions(
            engine, self.create_queue, router.turn, self._begin_command
        )
        self._ignored_bindings: set[bytes] = set()  # bindings that were logged
        # Handles $admin/...
        self.admin_topics: AdminTopics | None = None
        # Handles $queue/responses/...
        self.responses: Responses | None = None

    def _begin_command(self) -> None:
        """Prepare the engine for a command: set its time, and schedule the end of the turn."""
        turn = self._turn
        self.engine.now = turn.now
        turn.schedule_flush()

    def handles(self, topic: bytes) -> bool:
        """Return whether this handler serves a topic."""
        if len(topic) > 1 and topic[1] == ECQ_PREFIX[1]:
            return is_write_topic(topic) or starts_with(topic, ECQ_PREFIX)
        return starts_with(topic, QUEUE_PREFIX) or starts_with(topic, ADMIN_PREFIX)

    def on_admin_subscribed(self) -> None:
        if self.admin_topics is not None:
            self.admin_topics.on_subscribed()

    # ---- responses

    def check_response_subscription(
        self, session: Session, topic_filter: bytes, granted: int
    ) -> tuple[int, str]:
        """Check that no other client consumes these responses.

        Return the granted QoS, or a reason code and text.
        """
        if self.responses is None or self.responses.is_free_for(session, topic_filter):
            return granted, ""
        return (
            NOT_AUTHORIZED,
            "another client takes these responses already: use a correlation id of your own",
        )

    def on_responses_subscribed(self, subscription: Subscription) -> None:
        if self.responses is not None:
            self.responses.on_subscribed(subscription)

    # ---- publishing

    def publish(self, packet: Publish, session: Session, connection: Connection) -> None:
        """Process a PUBLISH to a topic that this handler serves."""
        topic = packet.topic
        self._begin_command()
        if topic[1] == ECQ_PREFIX[1]:
            self._publish_exclusive(packet, session, connection)
            return
        self.exclusive_handler.apply_writes()
        parsed = self._topic_cache.get(topic)
        if parsed is None:
            parsed = self._parse_topic(topic)
            if not session.is_proxy:
                parsed.cell = self._router.cluster.cell_for(topic, packet.payload)
        verb = parsed.verb
        if parsed.cell >= 0:
            is_settlement = ACK <= verb <= RELEASE
            self._router.cluster.get_proxies(session).publish(
                parsed.cell, packet, is_settlement, connection
            )
            return
        try:
            if verb == ADMIN:
                self._publish_admin(packet, session)
            elif verb == PUBLISH:
                self._enqueue(packet, parsed, session, connection)
            elif ACK <= verb <= RELEASE:
                self._settle(packet, parsed, session)
            elif verb == RESPONSE:
                self._publish_response(packet, session, connection)
            else:
                text = (
                    parsed.argument.decode()
                    if verb == INVALID
                    else "a group is subscribed to, not published to"
                )
                session.refuse(packet, connection, TOPIC_NAME_INVALID, text)
                return
        except QueueError as error:
            is_unanswerable_settlement = ACK <= verb <= RELEASE and session.version != V5
            if is_unanswerable_settlement and packet.qos > 0:
                # MQTT 3.1.1 cannot report "too late", and a late settlement does not justify ending
                # the connection.
                self.engine.frame_builder.add_commit_waiter(session, session.make_tag(packet))
                session.expect_commit(packet)
            elif not is_unanswerable_settlement:
                session.refuse(packet, connection, get_reason_code(error), str(error))

    def _publish_exclusive(self, packet: Publish, session: Session, connection: Connection) -> None:
        """Publish a value to an exclusive queue, which is in the cell of its owner."""
        if not session.is_proxy:
            cell = self._router.cluster.cell_for(packet.topic, packet.payload)
            if cell >= 0:
                self._router.cluster.get_proxies(session).publish(cell, packet, False, connection)
                return
        self.exclusive_handler.publish(packet, session, connection)

    def _publish_admin(self, packet: Publish, session: Session) -> None:
        if self.admin_topics is not None:
            self.admin_topics.publish(packet.topic, packet.payload)
        if packet.qos > 0:
            self.ack_after_commit(session, packet)

    def _publish_response(self, packet: Publish, session: Session, connection: Connection) -> None:
        """Deliver a response, or hold it in memory, and acknowledge it at once.

        QoS 2 of a persistent session is forwarded after its packet id is committed.
        """
        if self.responses is None:
            session.publish_plain(packet, connection)
            return
        if packet.qos == 2 and session.persistent_id:
            self.responses.check_capacity(packet)
            session.router.forwarder.defer_response(packet)
            self.ack_after_commit(session, packet)
            return
        self.responses.publish(packet)
        if packet.qos > 0:
            connection.send_ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, 0, "")

    def _parse_topic(self, topic: bytes) -> QueueTopic:
        if not topic.startswith(QUEUE_PREFIX):
            return QueueTopic(ADMIN, "")
        parsed = parse_queue_topic(topic)
        if parsed.verb == PUBLISH or (ACK <= parsed.verb <= RELEASE and not parsed.argument):
            error_text = queue_name_error(parsed.queue)
            if error_text:
                parsed = QueueTopic(INVALID, parsed.queue, error_text.encode())
            if len(topic) <= MAX_CACHED_TOPIC_BYTES:
                if len(self._topic_cache) >= MAX_CACHED_TOPICS:
                    self._topic_cache.clear()
                self._topic_cache[topic] = parsed
        return parsed

    def _enqueue(
        self, packet: Publish, parsed: QueueTopic, session: Session, connection: Connection
    ) -> None:
        engine = self.engine
        message = self.build_message(packet)
        queue = self._find_queue(parsed)
        if queue is None:
            queue = self.create_queue(parsed.queue)
        if queue.rules.schema and not self._fits_schema(queue, message):
            if packet.qos > 0:
                self.ack_after_commit(session, packet)
        elif packet.qos > 0:
            engine.publish(queue, message, session, session.make_tag(packet))
            session.expect_commit(packet)
        else:
            engine.publish(queue, message, None, 0)
        session.router.apply_backpressure(connection)

    def _find_queue(self, parsed: QueueTopic) -> Queue | None:
        """Return the queue of a topic.

        It is cached with the topic: with many queues, a dict lookup is mostly a CPU cache miss.
        """
        queue = parsed.cached_queue
        if queue is None or queue.is_deleted:
            queue = parsed.cached_queue = self.engine.queues.get(parsed.queue)
        return queue

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
            delay = self.engine.now + read_delay("delay", options.delay)
            message.deliver_at = min(int(delay * 1000.0), MAX_TIMESTAMP_MS)
        elif options.deliver_at:
            message.deliver_at = read_timestamp_ms(options.deliver_at)

    def _build_bound_copy(self, packet: Publish, queue: Queue) -> Message:
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

    def publish_to_bindings(self, packet: Publish, bindings: list[TopicBinding]) -> i64:
        """Store copies of a plain publish and return the number of queues that got one."""
        self._begin_command()
        copies: i64 = 0
        for binding in bindings:
            queue = self.engine.queues.get(binding.queue)
            if queue is None or not _has_headers(packet, binding.headers):
                continue
            message = self._build_bound_copy(packet, queue)
            if not queue.rules.schema or self._fits_schema(queue, message):
                self.engine.publish(queue, message, None, 0)
            copies += 1
        return copies

    def ack_after_commit(self, session: Session, packet: Publish) -> None:
        self.engine.frame_builder.add_commit_waiter(session, session.make_tag(packet))
        session.expect_commit(packet)

    def rebuild_bindings(self) -> None:
        """Recompute which plain topics are bound, after a queue was created, changed or deleted."""
        bindings: list[TopicBinding] = []
        cluster = self._router.cluster
        for queue in self.engine.queues.values():
            if queue.rules.bindings:
                for binding in json.loads(queue.config_json)["bindings"]:
                    topic_filter: bytes = binding["topic"].encode()
                    if cluster.has_other_cells and self._is_too_deep(queue, topic_filter):
                        continue
                    headers = [(name, value) for name, value in binding["headers"].items()]
                    bindings.append(TopicBinding(queue.name, topic_filter, headers))
        self._router.subscriptions.set_bindings(bindings)
        cluster.on_bindings_changed(bindings)

    def _is_too_deep(self, queue: Queue, topic_filter: bytes) -> bool:
        """Return whether a cluster cannot route by a stored binding, and warn once.

        Older versions accepted such bindings.
        """
        levels = topic_filter.count(b"/") + 1
        if levels <= MAX_BINDING_LEVELS:
            return False
        if topic_filter not in self._ignored_bindings:
            self._ignored_bindings.add(topic_filter)
            self.engine.warn(
                f"queue {queue.name!r} ignores a binding of {levels} levels: "
                f"a cluster routes by at most {MAX_BINDING_LEVELS}. "
                "Change the bindings of the queue"
            )
        return True

    def create_queue(self, name: str) -> Queue:
        """Create a queue, and join the wildcard subscriptions that match it."""
        fault = new_queue_name_error(name)
        if fault:
            raise InvalidQueueName(name, fault)
        if not self.service.creates_on_use(name):
            raise QueueNotCreated(name)
        queue = self.engine.get_or_create_queue(name)
        self.on_queue_created(queue)
        return queue

    def delete_queue(self, queue: Queue) -> None:
        """Delete a queue with its messages.

        Its subscribers stay subscribed, and join again if a queue of that name is created.
        """
        self._begin_command()
        self.queue_subscriptions.on_queue_deleting(queue)
        self.engine.delete_queue(queue)
        if queue.rules.bindings:
            self.rebuild_bindings()

    def on_queue_created(self, queue: Queue) -> None:
        self.queue_subscriptions.rejoin_orphans(queue)
        self.queue_subscriptions.join_wildcards(queue)
        if queue.rules.bindings:
            self.rebuild_bindings()

    def get_validator(self, queue: Queue) -> Validator:
        """Return the schema check of this queue's payloads."""
        schema = queue.rules.schema
        validator = self._validators.get(schema)
        if validator is None:
            if len(self._validators) >= MAX_VALIDATORS:
                self._validators.clear()
            validator = self._validators[schema] = self._make_validator(schema)
        return validator

    def _fits_schema(self, queue: Queue, message: Message) -> bool:
        """Return whether a message fits the schema of its queue.

        A message that does not fit is refused, or goes to the invalid-message queue if there is
        one. A payload that is too large is not checked, because that could take long:
        `Engine.publish` refuses it.
        """
        if len(message.payload) > queue.rules.max_message_size:
            return True
        fault = self.get_validator(queue)(message.payload)
        if not fault:
            return True
        if not queue.rules.invalid_queue_name:
            raise InvalidPayload(queue.name, fault)
        self.engine.dead_letters.write_rejected(queue, message, UNACCEPTABLE, fault)
        return False

    def enqueue_message(self, queue: Queue, message: Message) -> bool:
        """Enqueue a message of another API, under the same rules.

        Return False if it does not fit the schema and went to the invalid-message queue instead.
        """
        if queue.rules.schema and not self._fits_schema(queue, message):
            return False
        self.engine.publish(queue, message, None, 0)
        return True

    def publish_will(self, will: Publish) -> None:
        """Publish a will to a queue. No client is left to receive a refusal, so it is logged."""
        cell = self._router.cluster.cell_for(will.topic, will.payload)
        if cell >= 0:
            self._router.cluster.send_will(cell, will)
            return
        if starts_with(will.topic, ECQ_PREFIX):
            self.exclusive_handler.publish_will(will)
            return
        self._begin_command()
        parsed = parse_queue_topic(will.topic)
        try:
            if parsed.verb != PUBLISH:
                raise InvalidQueueName(
                    parsed.queue, "a will can be published to a queue, but not settle a delivery"
                )
            queue = self.engine.queues.get(parsed.queue) or self.create_queue(parsed.queue)
            message = self.build_message(will)
            if not queue.rules.schema or self._fits_schema(queue, message):
                self.engine.publish(queue, message, None, 0)
        except QueueError as error:
            self.engine.warn(f"a will for {will.topic.decode()} was not stored: {error}")

    # ---- settling

    def _settle(self, packet: Publish, parsed: QueueTopic, session: Session) -> None:
        options = self._options
        read_publish_options(packet.raw_properties, options)
        message_id = options.id
        message_ids = options.all_ids
        if message_ids is not None and len(message_ids) > MAX_IDS:
            raise TooManyIds(MAX_IDS)
        if not message_id:
            message_id = parsed.argument
            if not message_id:
                message_ids = read_message_ids(packet.payload)
                message_id = message_ids[0]
        queue = self._find_queue(parsed)
        if queue is None:
            raise UnknownDelivery(message_id.decode("utf-8", "replace"))
        settler = self._find_settler(queue, options.group, session)
        token = self._token
        token.counter = 0
        position = b""
        if options.token:
            read_token(options.token, token)
            position = options.token.partition(b".")[2]
        if message_ids is None or len(message_ids) == 1:
            try:
                self._settle_one(parsed.verb, settler, message_id, token, position)
            except WrongToken:
                self._count_wrong_token(settler)
                raise
        else:
            self._settle_many(parsed.verb, settler, message_ids, token)
        if packet.qos > 0:
            self.engine.frame_builder.add_commit_waiter(session, session.make_tag(packet))
            session.expect_commit(packet)

    def _find_settler(self, queue: Queue, group_name: str, session: Session) -> Settler:
        """Return the group that a client settles for, and its right to do so."""
        consumer = session.queue_consumers.get(queue.name)
        if (
            consumer is not None
            and consumer.group is not None
            and (not group_name or group_name == consumer.group_name)
        ):
            return Settler(consumer.group, session, True, False)
        group_name = group_name or default_group(session.client_id)
        group = queue.groups.get(group_name)
        if group is None:
            raise UnknownGroup(queue.name, group_name)
        grant = session.grant
        is_operator = grant is not None and grant.allows(QUEUE_ADMIN, queue.name.encode())
        return Settler(group, session, False, is_operator)

    def _settle_one(
        self, verb: i64, settler: Settler, message_id: bytes, token: DeliveryToken, position: bytes
    ) -> None:
        """Settle one delivery; `position` is its position in the log, if the token has it."""
        group = settler.group
        identity = settler.identity
        engine = self.engine
        delay = -1.0
        reason = ""
        if verb == NACK and self._options.delay:
            delay = read_delay("delay", self._options.delay)
        elif verb == REJECT:
            reason = self._read_reason()
        try:
            lease = engine.find_lease(
                group,
                message_id,
                token,
                "" if settler.is_operator and not token.counter else identity,
            )
        except (UnknownDelivery, StaleDelivery) as error:
            is_known = isinstance(error, StaleDelivery)
            if not token.counter and not self._may_settle_late(settler, message_id, is_known):
                raise
            if verb == ACK and engine.ack_late(group, position or message_id, token, identity):
                return
            reclaimed = (
                engine.reclaim_lease(group, position or message_id, token, identity)
                if verb != ACK
                else None
            )
            if reclaimed is None:
                if token.counter and engine.is_token_forged(
                    group, position or message_id, token, identity, is_known
                ):
                    raise WrongToken(message_id.decode("utf-8", "replace")) from None
                raise
            lease = reclaimed
        if verb == ACK:
            engine.ack(lease)
        elif verb == NACK:
            engine.nack(lease, delay, self._options.description.decode())
        elif verb == REJECT:
            engine.dead_letter(lease, reason, self._options.description.decode())
        elif verb == EXTEND:
            engine.extend(lease)
        else:
            engine.release(lease)

    def _may_settle_late(self, settler: Settler, message_id: bytes, is_known: bool) -> bool:
        """Return whether a client may settle a delivery of a previous run without a token.

        An operator may. So may a member of the group that cannot send a token because it uses MQTT
        3.1.1; a member could also receive the message and settle it then. `is_known`: this run
        knows the delivery, and another client holds it.
        """
        if settler.is_operator or (settler.is_member and settler.session.lacks_user_properties):
            return True
        if is_known and not settler.is_member:
            raise NotHolder(message_id.decode("utf-8", "replace")) from None
        if (
            settler.is_member
            and not is_known
            and self.engine.is_from_previous_run(settler.group, message_id)
        ):
            raise TokenNeeded(message_id.decode("utf-8", "replace")) from None
        return False

    def _count_wrong_token(self, settler: Settler) -> None:
        """Count a packet with a token of another client, and log at most one per second."""
        session = settler.session
        session.wrong_tokens += 1
        session.router.counters.wrong_tokens += 1
        connection = session.connection
        if connection is not None and self.engine.now >= self._next_warning_at:
            self._next_warning_at = self.engine.now + WARNING_INTERVAL_SECONDS
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
        reason = self._options.reason.decode() or "rejected"
        if reason in ("rejected", "delivery-error", "DeliveryError"):
            return "rejected"
        if reason in ("unacceptable", "Unacceptable"):
            return "unacceptable"
        raise InvalidQueueConfig(
            f"reason is {reason!r}",
            "Use delivery-error or unacceptable, also spelled DeliveryError or Unacceptable",
        )

    def _settle_many(
        self, verb: i64, settler: Settler, ids: list[bytes], token: DeliveryToken
    ) -> None:
        """Settle as many of a batch as possible; raise the first error with the number of failures.

        An id that was refused is refused again without a search: each search visits all deliveries
        with that id.
        """
        first_error: QueueError | None = None
        failed = 0
        is_wrong_token = False
        refused: set[bytes] = set()
        for message_id in ids:
            if refused and message_id in refused:
                failed += 1
                continue
            try:
                self._settle_one(verb, settler, message_id, token, b"")
            except QueueError as error:
                failed += 1
                refused.add(message_id)
                first_error = first_error or error
                if isinstance(error, WrongToken):
                    is_wrong_token = True
        if is_wrong_token:
            self._count_wrong_token(settler)
        if first_error is not None:
            first_error.remedy = (
                f"{failed} of {len(ids)} could not be settled. {first_error.remedy}"
            )
            raise first_error

    # ---- subscribing

    def subscribe(
        self,
        session: Session,
        topic_filter: bytes,
        options: SubscribeOptions,
    ) -> tuple[int, str]:
        """Join a queue, or all that match; return the granted QoS, or a reason code and text."""
        self._begin_command()
        try:
            return self.queue_subscriptions.subscribe(session, topic_filter, options)
        except QueueError as error:
            return get_suback_reason_code(error), str(error)

    def restore_subscription(
        self, session: Session, topic_filter: bytes, options: SubscribeOptions
    ) -> None:
        """Restore a subscription after a restart; the client is not connected yet."""
        if starts_with(topic_filter, ECQ_PREFIX):
            self.exclusive_handler.restore_subscription(session, options)
            return
        cluster = self._router.cluster
        if not session.is_proxy and cluster.matches_remote(topic_filter):
            cluster.restore_subscription(session, topic_filter, options)
            if not cluster.matches_local(topic_filter):
                return
        self._begin_command()
        try:
            self.queue_subscriptions.subscribe(session, topic_filter, options, immediately=True)
        except QueueError as error:
            self.engine.warn(f"{session.client_id} could not be subscribed again: {error}")

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        """Unsubscribe and return whether the subscription existed."""
        if starts_with(topic_filter, ECQ_PREFIX):
            return self.exclusive_handler.unsubscribe(session, topic_filter)
        self._begin_command()
        if not session.is_proxy and self._router.cluster.matches_remote(topic_filter):
            self._router.cluster.get_proxies(session).unsubscribe(topic_filter)
        return self.queue_subscriptions.unsubscribe(session, topic_filter)

    # ---- sessions connect, disconnect and end

    def on_detached(self, session: Session) -> None:
        """Pause the consumers of a session without connection.

        They keep their leases until the deadlines.
        """
        self._begin_command()
        self.queue_subscriptions.pause(session)

    def on_attached(self, session: Session) -> None:
        self._begin_command()
        self.queue_subscriptions.resume(session)

    def on_session_ended(self, session: Session) -> None:
        self.exclusive_handler.on_session_ended(session)
        if session.queue_consumers or self.queue_subscriptions.has_wildcards():
            self._begin_command()
            self.queue_subscriptions.end_session(session)

    def on_puback(self, lease: Lease, reason: i64) -> None:
        """Ack a delivery by its PUBACK, or nack it if the PUBACK has a failure reason."""
        self._begin_command()
        if reason < 0x80:
            self.engine.ack(lease)
        else:
            self.engine.nack(lease, -1.0, f"the consumer's PUBACK has reason 0x{reason:02x}")

    def on_too_large(self, lease: Lease) -> None:
        """Nack a delivery that exceeds the consumer's packet size; a retry would fail again."""
        self._begin_command()
        self.engine.nack(lease, -1.0, "larger than the consumer's maximum packet size")

    def schedule_dispatch(self, consumer: QueueConsumer) -> None:
        self._turn.schedule_flush()
        self.engine.schedule_dispatch(consumer)


def _has_headers(packet: Publish, headers: list[tuple[str, str]]) -> bool:
    """Return whether a packet has all these user properties."""
    return not headers or all(pair in packet.decode_properties().user for pair in headers)
