"""SUBSCRIBE and UNSUBSCRIBE: which filters are granted, and to whom they lead: plain topics, queues, exclusive queues.

Each filter is judged by itself and answered in its place; one that is refused stops none of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.broker.permission import MAY_NOT_SUBSCRIBE
from sluice.broker.subscriptions import Subscription
from sluice.errors import ProtocolViolation
from sluice.wire.packets import V5, Subscribe, SubscriptionRequest, Unsubscribe
from sluice.wire.reasons import (
    NO_SUBSCRIPTION_EXISTED,
    NOT_AUTHORIZED,
    QUOTA_EXCEEDED,
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
    SUCCESS,
    TOPIC_FILTER_INVALID,
    UNSPECIFIED_ERROR,
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED,
)
from sluice.wire.topics import fault_of_filter, has_wildcard, split_share

if TYPE_CHECKING:
    from sluice.broker.connection import Connection
    from sluice.broker.session import Session


def subscribe(session: Session, packet: Subscribe, connection: Connection) -> None:
    identifier = 0
    if packet.properties is not None and packet.properties.subscription_ids:
        identifier = packet.properties.subscription_ids[0]
    reasons: list[int] = []
    why = ""
    made: list[tuple[Subscription, bool]] = []
    door = session.router.door
    for request in packet.requests:
        reason, text = _judge(session, request)
        if reason < 0x80 and door is not None and request.topic_filter.startswith(b"$queue/"):
            if not request.topic_filter.startswith(b"$queue/responses/"):
                reason, text = door.subscribe(session, request, reason, packet.properties, identifier)
                reasons.append(reason)
                why = why or text
                continue
            reason, text = door.may_take_responses(session, request.topic_filter, reason)
        elif reason < 0x80 and door is not None and request.topic_filter.startswith(b"$ECQ/"):
            reason, text = door.ecq.subscribe(session, request, packet.properties, identifier)
            reasons.append(reason)
            why = why or text
            continue
        if reason < 0x80:
            if door is not None and request.topic_filter.startswith(b"$admin/"):
                door.watch()
            subscription = Subscription(
                session,
                request.topic_filter,
                reason,
                request.no_local,
                request.retain_as_published,
                request.retain_handling,
                identifier,
            )
            made.append((subscription, session.router.subscribe(subscription)))
        reasons.append(reason)
        why = why or text
    session.answer_filters(connection, 0x90, packet.packet_id, reasons, why)
    for subscription, new in made:
        session.router.send_retained(subscription, new)
        if door is not None and subscription.topic_filter.startswith(b"$queue/responses/"):
            door.takes_responses(subscription)


def _judge(session: Session, request: SubscriptionRequest) -> tuple[int, str]:
    """The granted QoS, or the reason why this filter is refused and the words that go with it."""
    limits = session.router.limits
    topic_filter = request.topic_filter
    fault = fault_of_filter(topic_filter, limits.max_topic_levels)
    if fault:
        return TOPIC_FILTER_INVALID, fault
    group, inner = split_share(topic_filter)
    if group and request.no_local:
        raise ProtocolViolation("a shared subscription asks for no local")  # [MQTT-3.8.3-4]
    if group and not limits.shared_subscriptions:
        return SHARED_SUBSCRIPTIONS_NOT_SUPPORTED, "shared subscriptions are not offered here"
    if has_wildcard(inner) and not limits.wildcard_subscriptions:
        return WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED, "wildcards are not offered here"
    if inner in limits.refused_filters:
        return UNSPECIFIED_ERROR, "the server's configuration refuses this filter to everybody"
    if session.grant is not None and not session.grant.may_subscribe(topic_filter):
        return NOT_AUTHORIZED, MAY_NOT_SUBSCRIBE
    if group and inner.startswith(b"$queue/") and session.router.door is not None:
        return TOPIC_FILTER_INVALID, "a queue is shared by its groups: use $queue/<queue>/$group/<group>"
    if group and inner.startswith(b"$ECQ/") and session.router.door is not None:
        return (
            TOPIC_FILTER_INVALID,
            "an exclusive queue is not shared: its owner subscribes to $ECQ/<client>/#",
        )
    count = len(session.subscriptions) + len(session.queue_requests)
    known = topic_filter in session.subscriptions or topic_filter in session.queue_requests
    if count >= limits.max_subscriptions and not known:
        return (
            QUOTA_EXCEEDED,
            f"the subscriptions of a client are at most {limits.max_subscriptions} here",
        )
    return min(request.qos, int(limits.max_qos)), ""


def unsubscribe(session: Session, packet: Unsubscribe, connection: Connection) -> None:
    reasons: list[int] = []
    for topic_filter in packet.filters:
        known = session.router.unsubscribe(session, topic_filter)
        if not known and session.router.door is not None:
            known = session.router.door.unsubscribe(session, topic_filter)
        reasons.append(SUCCESS if known else NO_SUBSCRIPTION_EXISTED)
    session.answer_filters(connection, 0xB0, packet.packet_id, reasons if session.version == V5 else [], "")
