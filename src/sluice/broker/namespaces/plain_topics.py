"""Plain topics: everything that no other namespace serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.namespace import NamespaceHandler
from sluice.broker.namespaces.reason_mapping import get_reason_code
from sluice.broker.ports import ConnectionPort
from sluice.broker.sessions import RETAINED_FULL, Subscription
from sluice.errors import QueueError, make_store_refusal
from sluice.wire.packets import Publish, Subscribe, SubscriptionRequest
from sluice.wire.properties import PUBACK, PUBREC
from sluice.wire.reasons import NO_MATCHING_SUBSCRIBERS, QUOTA_EXCEEDED

if TYPE_CHECKING:
    from sluice.broker.routing import Router
    from sluice.broker.sessions import Session


class PlainTopics(NamespaceHandler):
    """Serves plain topics, and the part of other namespaces that is like them."""

    def __init__(self, router: Router) -> None:
        self._router: Router = router

    def publish(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        self.publish_plain(packet, session, connection)

    def publish_plain(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        """Publish to a plain topic. No subclass overrides this, so compiled calls are direct.

        The message has reached its recipients when this method returns, so the acknowledgement is
        sent at once. If a part of it must be stored (for a queue, a persistent session or as a
        retained message), the acknowledgement waits for the commit. QoS 2 of a persistent session
        waits as a whole: see `Router.publish_after_commit`.
        """
        router = self._router
        if router.unavailable_reason and not self._can_skip_store(packet, session, connection):
            return
        if router.cluster.has_other_cells:
            router.cluster.publish(packet, session, connection)
            return
        stored_before = router.stored_count
        try:
            if packet.qos == 2 and session.persistent_id:
                recipient_count = router.publish_after_commit(packet, session)
            else:
                recipient_count = router.publish(packet, session)
        except QueueError as error:
            session.inbound.refuse(packet, connection, get_reason_code(error), str(error))
            return
        if recipient_count < 0:
            session.inbound.refuse(packet, connection, QUOTA_EXCEEDED, RETAINED_FULL)
        elif packet.qos > 0 and (
            router.stored_count != stored_before or (packet.qos == 2 and session.persistent_id)
        ):
            router.ack_after_commit(session, packet)
            router.apply_backpressure(connection)
        elif packet.qos == 1 and recipient_count:
            connection.send_puback(packet.packet_id)
        elif packet.qos > 0:
            reason: i64 = NO_MATCHING_SUBSCRIBERS if recipient_count == 0 else 0
            connection.send_ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, reason, "")
        elif router.stored_count != stored_before:
            router.apply_backpressure(connection)

    def _can_skip_store(
        self, packet: Publish, session: Session, connection: ConnectionPort
    ) -> bool:
        """Return whether `packet` can be published while the store accepts nothing.

        Refuse a packet that would have to be stored. QoS 0 has no acknowledgement: it goes to
        connected recipients and is not retained.
        """
        router = self._router
        if not router.needs_store(packet, session):
            return True
        if packet.qos == 0:
            packet.retain = False
            router.counters.publishes_dropped += 1
            return True
        if router.is_out_of_memory:
            router.refused_out_of_memory += 1
        error = make_store_refusal(
            router.unavailable_reason, router.is_out_of_space, router.is_out_of_memory
        )
        session.inbound.refuse(packet, connection, get_reason_code(error), str(error))
        return False

    def publish_will(self, will: Publish, session: Session | None) -> None:
        router = self._router
        if router.cluster.has_other_cells and session is not None:
            router.cluster.publish_will(will, session)
            return
        try:
            if router.publish(will, session) < 0:
                will.retain = False  # retained limit reached: deliver without retaining
                router.publish(will, session)
        except QueueError as error:
            # A queue with a binding to the topic is full, and no client is left to be notified.
            router.namespaces.bindings.warn(
                f"a will for {will.topic.decode()} was not stored: {error}"
            )

    def subscribe(
        self,
        session: Session,
        packet: Subscribe,
        request: SubscriptionRequest,
        granted: int,
        added: list[tuple[Subscription, bool]],
    ) -> tuple[int, str]:
        identifiers = packet.properties.subscription_ids if packet.properties is not None else None
        subscription = Subscription(
            session,
            request.topic_filter,
            granted,
            request.no_local,
            request.retain_as_published,
            request.retain_handling,
            identifiers[0] if identifiers else 0,
        )
        added.append((subscription, self._router.subscribe(subscription)))
        return granted, ""
