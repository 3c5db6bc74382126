"""Reply queues `$queue/responses/<id>`: responses on their way to the requesting client.

A response goes to one consumer. If that consumer has not subscribed yet, the response waits in
memory, for a limited time and up to a limit. Responses do not survive a restart: the requesting
client has lost its connection too, and repeats its request.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from mypy_extensions import i64

from sluice.broker.router import Router
from sluice.broker.scheduler import Scheduler
from sluice.broker.sessions.session import Session
from sluice.broker.sessions.subscriptions import Subscription
from sluice.clock import Deadline
from sluice.errors import InvalidQueueConfig, ResponsesFull
from sluice.queues.names import REPLY_QUEUE_PREFIX
from sluice.wire.packets import Publish
from sluice.wire.topics import matches

RESPONSES_PREFIX: Final = b"$queue/responses/"
RESPONSE_TTL_SECONDS: Final = 30.0
MAX_PENDING: Final = 10_000
MAX_PENDING_BYTES: Final = 67_108_864


class _PendingResponse:
    def __init__(self, message: Publish, expires_at: float) -> None:
        self.message: Publish = message
        self.expires_at: float = expires_at
        self.is_removed: bool = False


class Responses(Deadline):
    def __init__(self, router: Router, scheduler: Scheduler) -> None:
        self._router = router
        self._scheduler = scheduler
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
            delivery = target.session.deliver(
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

    def on_subscribed(self, subscription: Subscription) -> None:
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
                delivery = subscription.session.deliver(pending.message, qos, False, extra, None)
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
