"""Topic namespaces: one table from the first levels of a topic to the handler that serves it.

    $queue/responses/   $queue/   $ECQ/   $admin/   $SYS/   and plain topics: all others

A publish and each filter of a SUBSCRIBE are looked up once. The handlers are in `namespaces/`; the
assembly of a broker decides which of them are registered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.ports import ConnectionPort
from sluice.broker.sessions import SubscribeOptions
from sluice.wire.packets import Publish, Subscribe, SubscriptionRequest
from sluice.wire.reasons import SUCCESS, TOPIC_NAME_INVALID
from sluice.wire.topics import DOLLAR, starts_with

if TYPE_CHECKING:
    from sluice.broker.sessions import Session, Subscription, TopicBinding


class NamespaceHandler:
    """Serves the topics of one namespace. A handler overrides what it needs."""

    def publish(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        """Process a PUBLISH, and acknowledge or refuse it."""
        session.inbound.refuse(packet, connection, TOPIC_NAME_INVALID, "no handler for this topic")

    def apply_collected(self) -> None:
        """Apply the publishes that this handler has collected; only `$ECQ` collects.

        Called before a publish to another namespace, and before a later packet is acknowledged.
        """

    def publish_error(self) -> str:
        """Return why no client may publish here, or an empty string."""
        return ""

    def publish_will(self, will: Publish, session: Session | None) -> None:
        """Publish a will. No client is left to receive a refusal, so it is logged."""

    def filter_error(self, session: Session, inner: bytes, is_shared: bool) -> tuple[int, str]:
        """Return the reason code and text for a filter that no access rule can allow."""
        return SUCCESS, ""

    def invalid_filter_error(self, inner: bytes, is_shared: bool) -> str:
        """Return why a filter that the access rules allow is invalid, or an empty string."""
        return ""

    def subscribe(
        self,
        session: Session,
        packet: Subscribe,
        request: SubscriptionRequest,
        granted: int,
        added: list[tuple[Subscription, bool]],
    ) -> tuple[int, str]:
        """Subscribe to one filter; return the granted QoS, or a reason code and text.

        A subscription to topics is appended to `added`, with whether it is new.
        """
        return granted, ""

    def on_subscribed(self, subscription: Subscription) -> None:
        """Called for a subscription to topics after its SUBACK, or when it was restored."""

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        """End a subscription that is not one to topics; return whether it existed."""
        return False

    def restore_subscription(
        self, session: Session, topic_filter: bytes, options: SubscribeOptions
    ) -> None:
        """Restore such a subscription after a restart; the client is not connected yet."""

    def is_joining(self, session: Session) -> bool:
        """Return whether a filter of this session is still being subscribed to."""
        return False

    def on_attached(self, session: Session) -> None:
        """Called when a session has a connection again."""

    def on_detached(self, session: Session) -> None:
        """Called when a session that outlives its connection has lost it."""

    def on_session_ended(self, session: Session) -> None: ...

    def on_stopping(self) -> None:
        """Called when the broker begins to stop."""

    def collect_counters(self) -> dict[str, int]:
        """Return the values of this namespace for `$SYS/broker/`."""
        return {}


class BindingTarget:
    """Stores copies of plain messages. Without queues there are none to store."""

    def publish_to_bindings(self, packet: Publish, bindings: list[TopicBinding]) -> i64:
        """Store copies of a plain publish and return the number of queues that got one."""
        return 0

    def warn(self, text: str) -> None:
        """Report that a copy could not be stored."""


class Namespace:
    """One row of the table, and the next one whose prefix has the same second character."""

    def __init__(self, prefix: bytes, handler: NamespaceHandler, following: Namespace | None):
        self.prefix: bytes = prefix
        self.handler: NamespaceHandler = handler
        self.following: Namespace | None = following


class Namespaces:
    """The table. A prefix is registered before a shorter one that it begins with."""

    def __init__(self) -> None:
        self.plain: NamespaceHandler = NamespaceHandler()
        self.bindings: BindingTarget = BindingTarget()
        self.handlers: list[NamespaceHandler] = []
        self._rows: list[Namespace | None] = [None] * 256  # by the second character
        self._topics: dict[bytes, NamespaceHandler] = {}  # by the whole topic
        self._collecting: NamespaceHandler = self.plain  # served the last publish below `$`

    def serve_plain(self, handler: NamespaceHandler) -> None:
        """Let `handler` serve all topics that no other handler serves."""
        self.plain = self._collecting = handler
        self.handlers.append(handler)

    def register(self, prefix: bytes, handler: NamespaceHandler) -> None:
        """Let `handler` serve the topics that begin with `prefix`."""
        row = Namespace(prefix, handler, None)
        last = self._rows[prefix[1]]
        if last is None:
            self._rows[prefix[1]] = row
        else:
            while last.following is not None:
                last = last.following
            last.following = row
        self.handlers.append(handler)

    def register_topic(self, topic: bytes, handler: NamespaceHandler) -> None:
        """Let `handler`, which serves a prefix, also serve one topic that is not below it."""
        self._topics[topic] = handler

    def bind_queues(self, target: BindingTarget) -> None:
        """Let `target` store the messages of bound topics."""
        self.bindings = target

    def find(self, topic: bytes) -> NamespaceHandler:
        """Return the handler of a topic or a filter."""
        if len(topic) > 1 and topic[0] == DOLLAR:
            row = self._rows[topic[1]]
            while row is not None:
                if starts_with(topic, row.prefix):
                    return row.handler
                row = row.following
            return self._topics.get(topic, self.plain)
        return self.plain

    def publish(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        """Hand a PUBLISH below `$` to its handler, after what another handler has collected."""
        handler = self.find(packet.topic)
        if handler is not self._collecting:
            self._collecting.apply_collected()
            self._collecting = handler
        handler.publish(packet, session, connection)

    def apply_collected(self) -> None:
        """Apply collected publishes, so that a later packet is not acknowledged before them."""
        self._collecting.apply_collected()

    def is_joining(self, session: Session) -> bool:
        return any(handler.is_joining(session) for handler in self.handlers)

    def on_attached(self, session: Session) -> None:
        for handler in self.handlers:
            handler.on_attached(session)

    def on_detached(self, session: Session) -> None:
        for handler in self.handlers:
            handler.on_detached(session)

    def on_stopping(self) -> None:
        for handler in self.handlers:
            handler.on_stopping()

    def on_session_ended(self, session: Session) -> None:
        for handler in self.handlers:
            handler.on_session_ended(session)
