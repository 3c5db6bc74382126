"""Route one publish to its recipients: retained message, subscribers, shared subscriptions.

The router knows sessions and subscriptions, and nothing of sockets or encoded packets. `publish` is
called once per message and costs one lookup and one call per recipient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.limits import Limits
from sluice.broker.namespace import Namespaces
from sluice.broker.ports import NO_RETAINED_LOOKUP, ConnectionPort
from sluice.broker.routing.cluster_port import ClusterPort
from sluice.broker.routing.commit_forwarder import CommitForwarder, DeferredPublish
from sluice.broker.routing.retained_sender import RetainedSender
from sluice.broker.sessions import (
    Recipient,
    RetainedMessages,
    Route,
    SessionServices,
    SharedSubscription,
    Subscription,
    SubscriptionTree,
    estimate_filter_bytes,
)
from sluice.broker.turn import Turn
from sluice.metrics import Counters
from sluice.queues.commit_loop import CommitListener
from sluice.wire.packets import Publish
from sluice.wire.topics import DOLLAR, SHARE_PREFIX, has_wildcard

if TYPE_CHECKING:
    from sluice.broker.sessions import Delivery, Session, VolatileSessionStore


class StoredPublish(DeferredPublish):
    """A publish whose copies for persistent sessions are in the frame; others get it later."""

    def __init__(
        self, router: Router, message: Publish, origin: Session | None, route: Route
    ) -> None:
        self._router: Router = router
        self.message: Publish = message
        self.origin: Session | None = origin
        self.route: Route = route  # the copies were made by this route

    def forward(self) -> None:
        self._router.forward_committed(self)


class Router:
    def __init__(
        self, limits: Limits, turn: Turn, counters: Counters, session_store: VolatileSessionStore
    ) -> None:
        self.limits = limits
        self.turn = turn
        self.counters = counters
        self.subscriptions = SubscriptionTree()
        self.session_store = session_store
        self.retained = RetainedMessages(
            limits.max_retained, limits.max_retained_bytes, session_store.delete_retained
        )
        self.forwarder = CommitForwarder(self)
        self.session_services = SessionServices(
            limits, turn, counters, session_store, self.forwarder
        )
        # Counts records given to the store; a publish that raises it is acknowledged after the
        # commit.
        self.stored_count: i64 = 0
        # Why the store accepts nothing; messages that must be stored are refused meanwhile.
        self.unavailable_reason: str = ""
        self.is_out_of_space: bool = False  # the store is out of space
        self.is_out_of_memory: bool = False  # out of memory, not disk; `is_out_of_space` is set too
        self.refused_out_of_memory: int = 0
        # Not read until the open frame, which their publishes made too large, is submitted.
        self.throttled_connections: list[ConnectionPort] = []
        self.cluster: ClusterPort = ClusterPort()
        self.namespaces: Namespaces = Namespaces()

    def join_cluster(self, port: ClusterPort) -> None:
        """Reach the other cells of a cluster through `port` from now on."""
        self.cluster = port

    def publish(self, message: Publish, origin: Session | None) -> i64:
        """Publish; return the number of recipients, or -1 if no message can be retained."""
        route = self.subscriptions.find_route(message.topic)
        recipient_count: i64 = 0
        # First: a queue may refuse the message.
        if route.bindings:
            recipient_count = self.namespaces.bindings.publish_to_bindings(message, route.bindings)
            self.stored_count += recipient_count
        if message.retain and self.cluster.stores_retained(message.topic):
            if not self.retained.put(message, message.topic.startswith(b"$SYS/")):
                return -1
            if self.session_store.is_durable and not message.topic.startswith(b"$SYS/"):
                self.session_store.store_retained(message)
                self.stored_count += 1
        qos = message.qos
        stored_deliveries: list[Delivery] | None = None  # for persistent sessions
        for recipient in route.recipients:
            receiver = recipient.session
            if receiver is origin and recipient.no_local:
                own_recipient = recipient.without_no_local
                if own_recipient is None:
                    continue
                recipient = own_recipient
            delivery = receiver.outbound.deliver(
                message,
                qos if qos < recipient.qos else recipient.qos,
                recipient.retain_as_published and message.retain,
                recipient.extra_properties,
                None,
            )
            recipient_count += 1
            if receiver.persistent_id and delivery is not None:
                if stored_deliveries is None:
                    stored_deliveries = []
                stored_deliveries.append(delivery)
        # In a cluster, one member of all cells is chosen elsewhere.
        if route.shares and (not self.cluster.has_other_cells or message.topic[0] == DOLLAR):
            for share in route.shares:
                if self.deliver_to_share(message, share, None):
                    recipient_count += 1
        if stored_deliveries is not None:
            self._store_pending(message, stored_deliveries)
        return recipient_count

    def publish_after_commit(self, message: Publish, origin: Session | None) -> i64:
        """Publish a QoS 2 message that must arrive exactly once, even if the broker is killed.

        The message is written into the open frame, together with the packet id or dedup id that
        identifies a duplicate. No client sees it before that frame is committed; see
        `forward_committed`.
        """
        route = self.subscriptions.find_route(message.topic)
        recipient_count: i64 = 0
        # First: a queue may refuse the message.
        if route.bindings:
            recipient_count = self.namespaces.bindings.publish_to_bindings(message, route.bindings)
        if message.retain and self.cluster.stores_retained(message.topic):
            if not self.retained.reserve(message):
                return -1
            self.session_store.store_retained(message)
        stored_deliveries: list[Delivery] = []
        for recipient in route.recipients:
            effective = _effective_recipient(recipient, origin)
            if effective is None:
                continue
            recipient_count += 1
            if effective.session.persistent_id and effective.qos > 0:
                delivery = effective.session.outbound.deliver_after_commit(
                    message,
                    effective.qos,
                    effective.retain_as_published and message.retain,
                    effective.extra_properties,
                    None,
                )
                if delivery is not None:
                    stored_deliveries.append(delivery)
        # Else one member of all cells is chosen.
        if not self.cluster.has_other_cells or message.topic[0] == DOLLAR:
            for share in route.shares:
                if self.deliver_to_share_after_commit(message, share):
                    recipient_count += 1
        if stored_deliveries:
            self._store_pending(message, stored_deliveries)
        self.forwarder.defer_publish(StoredPublish(self, message, origin, route))
        self.stored_count += 1
        return recipient_count

    def forward_committed(self, publish: StoredPublish) -> None:
        """Forward a committed publish to the recipients for which no copy was stored."""
        message = publish.message
        if message.retain:
            self.retained.commit_reservation(message)
        route = self.subscriptions.find_route(message.topic)
        for recipient in route.recipients:
            effective = _effective_recipient(recipient, publish.origin)
            if effective is None:
                continue
            receiver = effective.session
            if receiver.persistent_id:
                if (
                    effective.qos > 0
                    if route is publish.route
                    else _is_stored_for(publish, receiver)
                ):
                    continue
            qos = message.qos
            delivery = receiver.outbound.deliver(
                message,
                qos if qos < effective.qos else effective.qos,
                effective.retain_as_published and message.retain,
                effective.extra_properties,
                None,
            )
            if delivery is not None and delivery.persistent_id:  # it has subscribed since
                self._store_pending(message, [delivery])

    def _store_pending(self, message: Publish, deliveries: list[Delivery]) -> None:
        self.session_store.store_pending(message, deliveries)
        self.stored_count += 1

    def store_qos2_delivery(self, message: Publish, delivery: Delivery | None) -> None:
        """Store a QoS 2 delivery to a persistent session whose message is not stored otherwise.

        Its packet id must survive a crash, and so must the message that was sent under it.
        """
        if delivery is not None and delivery.persistent_id and delivery.qos == 2:
            self._store_pending(message, [delivery])

    def deliver_to_share(
        self, message: Publish, share: SharedSubscription, excluded: Session | None
    ) -> bool:
        """Deliver `message` to one member of a shared subscription."""
        member = share.pick_member(message.qos, excluded)
        if member is None:
            return False
        qos = message.qos
        delivery = member.session.outbound.deliver(
            message,
            qos if qos < member.qos else member.qos,
            member.retain_as_published and message.retain,
            member.extra_properties,
            share,
        )
        if delivery is not None and delivery.persistent_id:
            self._store_pending(message, [delivery])
        return True

    def deliver_to_share_after_commit(self, message: Publish, share: SharedSubscription) -> bool:
        """Deliver to one member of a share after the open frame is committed."""
        member = share.pick_member(message.qos, None)
        if member is None:
            return False
        qos = message.qos
        delivery = member.session.outbound.deliver_after_commit(
            message,
            qos if qos < member.qos else member.qos,
            member.retain_as_published and message.retain,
            member.extra_properties,
            share,
        )
        if delivery is not None and delivery.persistent_id:
            self._store_pending(message, [delivery])
        self.stored_count += 1
        return True

    def subscribe(self, subscription: Subscription) -> bool:
        """Add a subscription and return whether it is new."""
        session = subscription.session
        if subscription.topic_filter not in session.subscriptions:
            session.subscription_bytes += estimate_filter_bytes(subscription.topic_filter)
        session.subscriptions[subscription.topic_filter] = subscription
        is_new = self.subscriptions.add(subscription)
        if is_new:
            self.cluster.change_interest(subscription.topic_filter, 1)
        return is_new

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        """Remove a subscription and return whether it existed."""
        if session.subscriptions.pop(topic_filter, None) is None:
            return False
        session.subscription_bytes -= estimate_filter_bytes(topic_filter)
        session.retained_lookup.cancel(topic_filter)
        self.cluster.change_interest(topic_filter, -1)
        return self.subscriptions.remove(session, topic_filter)

    def send_retained(self, subscription: Subscription, is_new: bool) -> None:
        """Send the retained messages for a new subscription (MQTT 5.0 section 3.3.1.3).

        A filter without wildcards is served at once; `RetainedSender` serves the others in slices.
        """
        if subscription.retain_handling == 2 or (subscription.retain_handling == 1 and not is_new):
            return
        topic_filter = subscription.topic_filter
        if topic_filter.startswith(SHARE_PREFIX):
            return
        if self.cluster.has_other_cells:
            self.cluster.send_retained(subscription)
            return
        session = subscription.session
        if not session.retained_lookup.is_running():
            if session.outbound.has_capacity() and not has_wildcard(topic_filter):
                message = self.retained.find(topic_filter, self.turn.now)
                # A QoS 2 publish that waits for its commit is already queued for the earlier
                # subscriptions.
                if message is not None and (is_new or not self.retained.is_reserved(topic_filter)):
                    self.deliver_retained(subscription, [message])
                return
            session.retained_lookup = RetainedSender(session, self)
        session.retained_lookup.add(topic_filter)

    def resume_retained(self, session: Session, pending_filters: list[bytes]) -> None:
        """After a restart, look up the pending retained filters of a session again."""
        sender = RetainedSender(session, self)
        sender.is_in_session_record = True
        for topic_filter in pending_filters:
            sender.add(topic_filter)
        session.retained_lookup = sender
        sender.resume()

    def deliver_retained(self, subscription: Subscription, messages: list[Publish]) -> None:
        extra = subscription.encode_extra_properties()
        for message in messages:
            qos = message.qos
            delivery = subscription.session.outbound.deliver(
                message, qos if qos < subscription.qos else subscription.qos, True, extra, None
            )
            if delivery is not None and delivery.persistent_id:
                self._store_pending(message, [delivery])

    def end_session(self, session: Session) -> None:
        """Remove the state of a session that has ended; shared messages go to other members."""
        if session.persistent_id:
            self.session_store.delete_session(session)
        session.retained_lookup = NO_RETAINED_LOOKUP
        for topic_filter in list(session.subscriptions):
            self.unsubscribe(session, topic_filter)
        self.namespaces.on_session_ended(session)
        reassignable: list[Delivery] = session.end_and_collect()
        for delivery in reassignable:
            self.reassign_shared(delivery, session)
        session.proxies.on_session_ended()

    def reassign_shared(self, delivery: Delivery, excluded: Session) -> None:
        """Give a delivery of the ended session `excluded` to another member of its share."""
        share = delivery.share
        expires_at = delivery.message.expires_at
        if isinstance(share, SharedSubscription) and (
            expires_at == 0.0 or expires_at > self.turn.now
        ):
            is_delivered = self.deliver_to_share(delivery.message, share, excluded)
            if not is_delivered:
                self.cluster.forward_shared(delivery.message, share)

    def ack_after_commit(self, session: Session, packet: Publish) -> None:
        """Acknowledge `packet` after the records of this publish are committed."""
        self.namespaces.apply_collected()
        inbound = session.inbound
        self.session_store.notify_after_commit(inbound, inbound.make_tag(packet))
        inbound.expect_commit(packet)

    def needs_store(self, message: Publish, origin: Session) -> bool:
        """Return whether a publish needs the store, which accepts nothing at the moment.

        Queues with a binding to the topic decide for themselves. If the store is only out of space,
        a retained message can still be deleted and a packet id recorded.
        """
        if not self.session_store.is_durable:
            return False
        if message.retain and (message.payload or not self.is_out_of_space):
            return True
        if message.qos == 2 and origin.persistent_id and not self.is_out_of_space:
            return True
        if message.qos == 0:
            return False
        route = self.subscriptions.find_route(message.topic)
        for target in route.recipients:
            if target.session.persistent_id and target.qos > 0:
                return True
        for share in route.shares:
            for member in share.members:
                if member.session.persistent_id and member.qos > 0:
                    return True
        return False

    def is_store_saturated(self) -> bool:
        """Return whether the store accepts nothing and the open frame is too large."""
        return self.unavailable_reason != "" and self.session_store.is_saturated()

    def set_unavailable(self, reason: str) -> None:
        """Set why the store accepts nothing; an empty reason means that it accepts records again.

        Connections that were paused are read again, so that their publishes are refused.
        """
        self.unavailable_reason = reason
        if reason:
            self.release_backpressure()

    def apply_backpressure(self, connection: ConnectionPort) -> None:
        """Stop reading from the publisher if the open frame is too large (`is_saturated`)."""
        if self.session_store.is_saturated() and connection.throttle():
            self.throttled_connections.append(connection)

    def release_backpressure(self) -> None:
        """Read from the paused publishers again: the large frame was submitted."""
        if self.throttled_connections:
            throttled = self.throttled_connections
            self.throttled_connections = []
            for connection in throttled:
                connection.unthrottle()


class BackpressureListener(CommitListener):
    def __init__(self, router: Router) -> None:
        self._router: Router = router

    def on_frame_closed(self) -> None:
        """Read again from connections that were throttled because the open frame was too large."""
        self._router.release_backpressure()


def _effective_recipient(recipient: Recipient, origin: Session | None) -> Recipient | None:
    """Return the recipient for a message of `origin`, or None if "no local" excludes it."""
    return (
        recipient.without_no_local
        if recipient.session is origin and recipient.no_local
        else recipient
    )


def _is_stored_for(publish: StoredPublish, receiver: Session) -> bool:
    """Return whether a copy was stored for `receiver`; its subscriptions may have changed since."""
    for recipient in publish.route.recipients:
        if recipient.session is receiver:
            effective = _effective_recipient(recipient, publish.origin)
            return effective is not None and effective.qos > 0
    return False
