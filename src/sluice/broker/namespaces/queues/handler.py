"""Handler of `$queue/`: publishes, settlements and subscriptions of queues.

The handler finds the queue and the verb of a topic, and acknowledges; the engine makes every
decision about messages. One table maps errors to reason codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.broker.acl import QUEUE_CONSUME, QUEUE_PUBLISH, AccessControl
from sluice.broker.namespace import NamespaceHandler
from sluice.broker.namespaces.queues.bindings import BoundQueues
from sluice.broker.namespaces.queues.command_topics import CommandTopics
from sluice.broker.namespaces.queues.memberships import find_memberships
from sluice.broker.namespaces.queues.message_builder import MessageBuilder, ThenStep
from sluice.broker.namespaces.queues.queue_options import read_then
from sluice.broker.namespaces.queues.queue_subscriptions import QueueSubscriptions
from sluice.broker.namespaces.queues.schema_checks import SchemaChecks
from sluice.broker.namespaces.queues.settlement_topics import SettlementTopics
from sluice.broker.namespaces.reason_mapping import get_reason_code, get_suback_reason_code
from sluice.broker.namespaces.remote_requests import (
    forward_will,
    restore_remote,
    unsubscribe_remote,
)
from sluice.broker.ports import ConnectionPort
from sluice.broker.queue_topics import (
    ACK,
    CANCEL,
    INVALID,
    PUBLISH,
    RESCHEDULE,
    QueueTopic,
    parse_queue_topic,
)
from sluice.broker.sessions import SubscribeOptions, read_options
from sluice.broker.turn import Turn
from sluice.errors import InvalidQueueName, QueueError, QueueNotCreated
from sluice.message import Message
from sluice.queues.commit_loop import CommitListener
from sluice.queues.engine import Engine
from sluice.queues.model import Queue
from sluice.queues.names import new_queue_name_error, queue_name_error
from sluice.queues.service import QueueService
from sluice.wire.packets import V5, Publish, Subscribe, SubscriptionRequest
from sluice.wire.reasons import TOPIC_NAME_INVALID

if TYPE_CHECKING:
    from sluice.broker.routing import Router
    from sluice.broker.sessions import Session, Subscription

# Parsed topics; longer topics than MAX_CACHED_TOPIC_BYTES are not cached.
MAX_CACHED_TOPICS: Final = 65_536
MAX_CACHED_TOPIC_BYTES: Final = 256
NOT_SHARED: Final = "a queue is shared by its groups: use $queue/<queue>/$group/<group>"


class QueueHandler(NamespaceHandler):
    def __init__(
        self,
        engine: Engine,
        router: Router,
        service: QueueService,
        schemas: SchemaChecks,
        access: AccessControl,
    ) -> None:
        self.engine: Engine = engine
        self.access: AccessControl = access
        self.service: QueueService = service
        self.schemas: SchemaChecks = schemas
        self._router: Router = router
        self._turn: Turn = router.turn
        self._topic_cache: dict[bytes, QueueTopic] = {}
        self._builder: MessageBuilder = MessageBuilder(engine)
        self._settlements: SettlementTopics = SettlementTopics(engine, router.counters)
        self._commands: CommandTopics = CommandTopics(engine)
        self.bindings: BoundQueues = BoundQueues(engine, router, self._builder, schemas)
        self.queue_subscriptions: QueueSubscriptions = QueueSubscriptions(
            engine, self._create_for_subscriber, router.turn, self._begin_engine_call
        )

    def _begin_engine_call(self) -> None:
        """Prepare the engine for a call: set its time, and schedule the end of the turn."""
        turn = self._turn
        self.engine.now = turn.now
        turn.schedule_flush()

    # ---- publishing

    def publish(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        """Publish to a queue, settle deliveries, or cancel or reschedule messages."""
        topic = packet.topic
        self._begin_engine_call()
        parsed = self._topic_cache.get(topic)
        if parsed is None:
            parsed = self._parse_topic(topic)
            if not session.is_proxy:
                parsed.cell = self._router.cluster.cell_for(topic, packet.payload)
        verb = parsed.verb
        then: ThenStep | None = None
        if verb == ACK and b"then" in packet.raw_properties:
            try:
                then = self._read_then(packet, session)
            except QueueError as error:
                session.inbound.refuse(packet, connection, get_reason_code(error), str(error))
                return
        is_command = ACK <= verb <= RESCHEDULE
        if parsed.cell >= 0:
            self._router.cluster.get_proxies(session).publish(
                parsed.cell, packet, is_command, connection
            )
            return
        try:
            if verb == PUBLISH:
                self._enqueue(packet, parsed, session, connection)
            elif verb == CANCEL or verb == RESCHEDULE:
                self._commands.execute(packet, parsed, self._find_queue(parsed), session)
            elif is_command:
                self._settlements.settle(packet, parsed, self._find_queue(parsed), session, then)
            else:
                text = (
                    parsed.argument.decode()
                    if verb == INVALID
                    else "publish to $queue/<queue>; a group topic is only for SUBSCRIBE"
                )
                session.inbound.refuse(packet, connection, TOPIC_NAME_INVALID, text)
                return
        except QueueError as error:
            if not is_command or session.version == V5:
                session.inbound.refuse(packet, connection, get_reason_code(error), str(error))
            elif packet.qos > 0:
                # MQTT 3.1.1 cannot report that a command failed, which is no reason to end the
                # connection.
                self._settlements.ack_after_commit(packet, session)

    def _read_then(self, packet: Publish, session: Session) -> ThenStep | None:
        """Return the messages that an ack publishes, checked against the rights of its client."""
        packets = read_then(packet)
        if not packets:
            return None
        step = ThenStep(self, packets, session)
        step.check_rights()
        return step

    def is_in_other_cell(self, topic: bytes) -> bool:
        return self._router.cluster.cell_for(topic, b"") >= 0

    def find_or_create(self, name: str, session: Session) -> Queue:
        """Return a queue to which a client publishes."""
        queue = self.engine.queues.get(name)
        return self._create_for_client(QUEUE_PUBLISH, name, session) if queue is None else queue

    def _parse_topic(self, topic: bytes) -> QueueTopic:
        parsed = parse_queue_topic(topic)
        if parsed.verb == PUBLISH or (ACK <= parsed.verb <= RESCHEDULE and not parsed.argument):
            error_text = queue_name_error(parsed.queue)
            if error_text:
                parsed = QueueTopic(INVALID, parsed.queue, error_text.encode())
            if len(topic) <= MAX_CACHED_TOPIC_BYTES:
                if len(self._topic_cache) >= MAX_CACHED_TOPICS:
                    self._topic_cache.clear()
                self._topic_cache[topic] = parsed
        return parsed

    def _enqueue(
        self, packet: Publish, parsed: QueueTopic, session: Session, connection: ConnectionPort
    ) -> None:
        engine = self.engine
        message = self._builder.build_message(packet)
        queue = self._find_queue(parsed)
        if queue is None:
            queue = self._create_for_client(QUEUE_PUBLISH, parsed.queue, session)
        if self.bindings.queue_bindings:
            self.bindings.copy_to_bound_queues(queue, message)
        if queue.rules.schema and not self.schemas.check_payload(queue, message):
            if packet.qos > 0:
                self._ack_after_commit(session, packet)
        elif packet.qos > 0:
            inbound = session.inbound
            engine.publishing.publish(queue, message, inbound, inbound.make_tag(packet))
            inbound.expect_commit(packet)
        else:
            engine.publishing.publish(queue, message, None, 0)
        self._router.apply_backpressure(connection)

    def _find_queue(self, parsed: QueueTopic) -> Queue | None:
        """Return the queue of a topic.

        It is cached with the topic: with many queues, a dict lookup is mostly a CPU cache miss.
        """
        queue = parsed.cached_queue
        if queue is None or queue.is_deleted:
            queue = parsed.cached_queue = self.engine.queues.get(parsed.queue)
        return queue

    def _ack_after_commit(self, session: Session, packet: Publish) -> None:
        inbound = session.inbound
        self.engine.frame_builder.add_commit_waiter(inbound, inbound.make_tag(packet))
        inbound.expect_commit(packet)

    def build_message(self, packet: Publish) -> Message:
        """Convert a PUBLISH to a message."""
        return self._builder.build_message(packet)

    def enqueue_message(self, queue: Queue, message: Message) -> bool:
        """Enqueue a message of another API, under the same rules.

        Return False if it does not fit the schema and went to the invalid-message queue instead.
        """
        self.bindings.copy_to_bound_queues(queue, message)
        if queue.rules.schema and not self.schemas.check_payload(queue, message):
            return False
        self.engine.publishing.publish(queue, message, None, 0)
        return True

    def publish_will(self, will: Publish, session: Session | None) -> None:
        """Publish a will to a queue. No client is left to receive a refusal, so it is logged."""
        if forward_will(self._router, will):
            return
        self._begin_engine_call()
        parsed = parse_queue_topic(will.topic)
        try:
            if parsed.verb != PUBLISH:
                raise InvalidQueueName(
                    parsed.queue, "a will can be published to a queue, but not settle a delivery"
                )
            queue = self.engine.queues.get(parsed.queue)
            if queue is None:
                queue = self._create_for_client(QUEUE_PUBLISH, parsed.queue, session)
            message = self._builder.build_message(will)
            self.bindings.copy_to_bound_queues(queue, message)
            if not queue.rules.schema or self.schemas.check_payload(queue, message):
                self.engine.publishing.publish(queue, message, None, 0)
        except QueueError as error:
            self.engine.state.warn(f"a will for {will.topic.decode()} was not stored: {error}")

    # ---- queues

    def _create_for_subscriber(self, name: str, session: Session) -> Queue:
        return self._create_for_client(QUEUE_CONSUME, name, session)

    def _create_for_client(self, action: int, name: str, session: Session | None) -> Queue:
        """Create a queue by the first use of a client.

        The rules see the client that uses it, also if it is connected to another node.
        """
        if session is None:
            return self.create_queue(name)
        user = session.user or ""
        is_allowed = self.access.creates_queue(action, name, user, session.client_id)
        if is_allowed is False:
            raise QueueNotCreated(name, "the access rule of this client has auto_create = false")
        return self.create_queue(name, is_allowed is True)

    def create_queue(self, name: str, is_allowed: bool = False) -> Queue:
        """Create a queue by its first use, and join the wildcard subscriptions that match it.

        Unless `is_allowed`, the server's settings decide whether a use creates it.
        """
        fault = new_queue_name_error(name)
        if fault:
            raise InvalidQueueName(name, fault)
        if not is_allowed and not self.service.creates_on_use(name):
            raise QueueNotCreated(name, "queues.auto_create is false for it")
        queue = self.engine.lifecycle.get_or_create_queue(name)
        self.on_queue_created(queue)
        return queue

    def delete_queue(self, queue: Queue) -> None:
        """Delete a queue with its messages.

        Its subscribers stay subscribed, and join again if a queue of that name is created.
        """
        self._begin_engine_call()
        self.queue_subscriptions.on_queue_deleting(queue)
        self.engine.lifecycle.delete_queue(queue)
        if queue.rules.bindings:
            self.bindings.rebuild()

    def expire_groups(self, unused_seconds: float) -> None:
        """Delete groups that have had no consumer for so long."""
        self._begin_engine_call()
        self.engine.lifecycle.expire_groups(unused_seconds)

    def on_queue_created(self, queue: Queue) -> None:
        self.queue_subscriptions.rejoin_orphans(queue)
        self.queue_subscriptions.join_wildcards(queue)
        if queue.rules.bindings:
            self.bindings.rebuild()

    def rebuild_bindings(self) -> None:
        """Recompute which plain topics are bound, after a queue was changed."""
        self.bindings.rebuild()

    # ---- subscribing

    def invalid_filter_error(self, inner: bytes, is_shared: bool) -> str:
        return NOT_SHARED if is_shared else ""

    def subscribe(
        self,
        session: Session,
        packet: Subscribe,
        request: SubscriptionRequest,
        granted: int,
        added: list[tuple[Subscription, bool]],
    ) -> tuple[int, str]:
        """Join a queue, or all that match; return the granted QoS, or a reason code and text."""
        self._begin_engine_call()
        try:
            return self.queue_subscriptions.subscribe(
                session, request.topic_filter, read_options(packet, min(granted, 1))
            )
        except QueueError as error:
            return get_suback_reason_code(error), str(error)

    def restore_subscription(
        self, session: Session, topic_filter: bytes, options: SubscribeOptions
    ) -> None:
        if not restore_remote(self._router, session, topic_filter, options):
            return
        self._begin_engine_call()
        try:
            self.queue_subscriptions.subscribe(session, topic_filter, options, immediately=True)
        except QueueError as error:
            self.engine.state.warn(f"{session.client_id} could not be subscribed again: {error}")

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        self._begin_engine_call()
        is_known = unsubscribe_remote(self._router, session, topic_filter)
        return self.queue_subscriptions.unsubscribe(session, topic_filter) or is_known

    def is_joining(self, session: Session) -> bool:
        return self.queue_subscriptions.is_joining(session)

    # ---- sessions connect, disconnect and end

    def on_detached(self, session: Session) -> None:
        """Pause the consumers of a session without connection.

        They keep their leases until the deadlines.
        """
        if find_memberships(session) is not None:
            self._begin_engine_call()
            self.queue_subscriptions.pause(session)

    def on_attached(self, session: Session) -> None:
        if find_memberships(session) is not None:
            self._begin_engine_call()
            self.queue_subscriptions.resume(session)

    def on_session_ended(self, session: Session) -> None:
        if find_memberships(session) is not None or self.queue_subscriptions.has_wildcards():
            self._begin_engine_call()
            self.queue_subscriptions.end_session(session)

    # ---- the whole broker

    def on_stopping(self) -> None:
        self.engine.dispatch.is_closing = True

    def collect_counters(self) -> dict[str, int]:
        queues = list(self.engine.queues.values())
        return {
            "queues/count": len(queues),
            "queues/messages/waiting": sum(int(queue.depth) for queue in queues),
            "queues/messages/inflight": sum(
                int(group.in_flight)
                for queue in queues
                if queue.deadlines.first
                for group in queue.groups.values()
            ),
            "queues/messages/dead": sum(sum(queue.dead_by_reason.values()) for queue in queues),
        }


class CreatedQueueListener(CommitListener):
    def __init__(self, queue_handler: QueueHandler) -> None:
        self._queue_handler: QueueHandler = queue_handler

    def on_queue_created(self, queue: Queue) -> None:
        """Serve subscribers that were waiting for a queue of this name."""
        self._queue_handler.on_queue_created(queue)
