"""Reply queues `$queue/responses/<id>`: responses on their way to the requesting client.

A response goes to one consumer. If that consumer has not subscribed yet, the response waits in
memory, for a limited time and up to a limit. Responses do not survive a restart: the requesting
client has lost its connection too, and repeats its request.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.broker.namespace import NamespaceHandler
from sluice.broker.namespaces.plain_topics import PlainTopics
from sluice.broker.namespaces.reason_mapping import get_reason_code
from sluice.broker.namespaces.remote_requests import (
    forward_publish,
    restore_remote,
    unsubscribe_remote,
)
from sluice.broker.ports import ConnectionPort
from sluice.broker.routing import DeferredPublish
from sluice.broker.sessions import SubscribeOptions, Subscription
from sluice.broker.turn import Scheduler
from sluice.clock import Deadline
from sluice.errors import InvalidQueueConfig, QueueError, ResponsesFull
from sluice.queues.names import REPLY_QUEUE_PREFIX
from sluice.wire.packets import Publish, Subscribe, SubscriptionRequest
from sluice.wire.properties import PUBACK, PUBREC
from sluice.wire.reasons import NOT_AUTHORIZED
from sluice.wire.topics import matches

if TYPE_CHECKING:
    from sluice.broker.routing import Router
    from sluice.broker.sessions import Session

RESPONSES_PREFIX: Final = b"$queue/responses/"
RESPONSE_TTL_SECONDS: Final = 30.0
MAX_PENDING: Final = 10_000
MAX_PENDING_BYTES: Final = 67_108_864


class _PendingResponse:
    def __init__(self, message: Publish, expires_at: float) -> None:
        self.message: Publish = message
        self.expires_at: float = expires_at
        self.is_removed: bool = False


class ResponseTopics(PlainTopics):
    """Serves `$queue/responses/`; one subscriber takes the responses of a filter."""

    def __init__(
        self, router: Router, queue_handler: NamespaceHandler, pending: PendingResponses
    ) -> None:
        super().__init__(router)
        self._queue_handler: NamespaceHandler = queue_handler
        self._pending: PendingResponses = pending

    def publish(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        """Deliver a response, or hold it in memory, and acknowledge it at once.

        QoS 2 of a persistent session is forwarded after its packet id is committed.
        """
        if forward_publish(self._router, packet, session, connection):
            return
        try:
            if packet.qos == 2 and session.persistent_id:
                self._pending.check_capacity(packet)
                self._router.forwarder.defer_publish(StoredResponse(packet, self._pending))
                self._router.ack_after_commit(session, packet)
                return
            self._pending.publish(packet)
        except QueueError as error:
            session.inbound.refuse(packet, connection, get_reason_code(error), str(error))
            return
        if packet.qos > 0:
            connection.send_ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, 0, "")

    def publish_will(self, will: Publish, session: Session | None) -> None:
        self._queue_handler.publish_will(will, session)  # refuses it

    def invalid_filter_error(self, inner: bytes, is_shared: bool) -> str:
        if inner.startswith((b"$queue/responses/+", b"$queue/responses/#")) and not is_shared:
            # A response has one consumer: this filter would take the responses of all clients.
            return "name whose responses they are: $queue/responses/<id> or $queue/responses/<id>/#"
        return self._queue_handler.invalid_filter_error(inner, is_shared)

    def subscribe(
        self,
        session: Session,
        packet: Subscribe,
        request: SubscriptionRequest,
        granted: int,
        added: list[tuple[Subscription, bool]],
    ) -> tuple[int, str]:
        """Subscribe if no other client consumes these responses."""
        if self._pending.is_free_for(session, request.topic_filter):
            return super().subscribe(session, packet, request, granted, added)
        return (
            NOT_AUTHORIZED,
            "another client takes these responses already: use a correlation id of your own",
        )

    def on_subscribed(self, subscription: Subscription) -> None:
        self._pending.deliver_to(subscription)

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        return unsubscribe_remote(self._router, session, topic_filter)

    def restore_subscription(
        self, session: Session, topic_filter: bytes, options: SubscribeOptions
    ) -> None:
        restore_remote(self._router, session, topic_filter, options)


class StoredResponse(DeferredPublish):
    """A QoS 2 response whose packet id is in the open frame."""

    def __init__(self, message: Publish, pending: PendingResponses) -> None:
        self._message: Publish = message
        self._pending: PendingResponses = pending

    def forward(self) -> None:
        self._pending.publish_committed(self._message)


class PendingResponses(Deadline):
    """Responses that wait for their consumer."""

    def __init__(self, router: Router, scheduler: Scheduler) -> None:
        self._router: Router = router
        self._scheduler: Scheduler = scheduler
        # In order of arrival, which is also the order of expiry.
        self._by_expiry: deque[_PendingResponse] = deque()
        self._by_topic: dict[bytes, list[_PendingResponse]] = {}
        self._pending_bytes: i64 = 0
        self._is_timer_set: bool = False
        self.pending_count: i64 = 0

    def publish(self, message: Publish) -> None:
        """Deliver a response, or hold it until its consumer subscribes, up to the limit."""
        route = self._router.subscriptions.find_route(message.topic)
        if route.recipients:
            target = route.recipients[0]
            qos = message.qos
            delivery = target.session.outbound.deliver(
                message,
                qos if qos < target.qos else target.qos,
                False,
                target.extra_properties,
                None,
            )
            self._router.store_qos2_delivery(message, delivery)
            return
        self.check_capacity(message)
        size = _size_of(message)
        now = self._router.turn.now
        pending = _PendingResponse(message, now + RESPONSE_TTL_SECONDS)
        self._by_expiry.append(pending)
        self._by_topic.setdefault(message.topic, []).append(pending)
        self.pending_count += 1
        self._pending_bytes += size
        if not self._is_timer_set:
            self._is_timer_set = True
            self._scheduler.wake_at(pending.expires_at, self)

    def publish_committed(self, message: Publish) -> None:
        """Publish a committed response; the limit was not reached when it arrived."""
        try:
            self.publish(message)
        except ResponsesFull:
            self._router.counters.publishes_dropped += 1

    def check_capacity(self, message: Publish) -> None:
        """Raise ResponsesFull if `message` would have to wait and the limit is reached."""
        if self._router.subscriptions.find_route(message.topic).recipients:
            return
        if (
            self.pending_count >= MAX_PENDING
            or self._pending_bytes + _size_of(message) > MAX_PENDING_BYTES
        ):
            raise ResponsesFull(int(self.pending_count))

    def is_free_for(self, session: Session, topic_filter: bytes) -> bool:
        """Return whether no other session consumes these responses; the first one gets them."""
        targets = self._router.subscriptions.find_route(topic_filter).recipients
        return all(target.session is session for target in targets)

    def deliver_to(self, subscription: Subscription) -> None:
        """Deliver the pending responses to a new subscription."""
        topic_filter = subscription.topic_filter
        exact = self._by_topic.get(topic_filter)
        topics = [topic_filter] if exact is not None else []
        if exact is None and self._by_topic:
            topics = [topic for topic in self._by_topic if matches(topic_filter, topic)]
        extra = subscription.encode_extra_properties()
        for topic in topics:
            for pending in self._by_topic.pop(topic):
                self._release(pending)
                qos = min(pending.message.qos, subscription.qos)
                delivery = subscription.session.outbound.deliver(
                    pending.message, qos, False, extra, None
                )
                self._router.store_qos2_delivery(pending.message, delivery)

    def _release(self, pending: _PendingResponse) -> None:
        pending.is_removed = True
        self.pending_count -= 1
        self._pending_bytes -= _size_of(pending.message)

    def fire(self, now: float) -> float:
        """Drop expired responses."""
        by_expiry = self._by_expiry
        while by_expiry and (by_expiry[0].is_removed or by_expiry[0].expires_at <= now):
            pending = by_expiry.popleft()
            if not pending.is_removed:
                self._release(pending)
                remaining = self._by_topic.get(pending.message.topic)
                if remaining is not None:
                    remaining.remove(pending)
                    if not remaining:
                        del self._by_topic[pending.message.topic]
        self._is_timer_set = len(by_expiry) > 0
        return by_expiry[0].expires_at if by_expiry else 0.0


def refuse_reserved_name(config: object) -> None:
    """Refuse a queue name below `responses/`: the queue would never receive a message."""
    name = config.get("name") if isinstance(config, dict) else None
    if isinstance(name, str) and name.removeprefix("$queue/").startswith(REPLY_QUEUE_PREFIX):
        raise InvalidQueueConfig(
            f"name {name!r} cannot be a queue: responses/ is reserved for reply queues",
            "Choose a name such as tasks/image",
        )


def _size_of(message: Publish) -> i64:
    return len(message.payload) + len(message.raw_properties) + len(message.topic)
