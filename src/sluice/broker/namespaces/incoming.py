"""Incoming PUBLISH packets: the checks that are the same in all namespaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.broker.acl import MAY_NOT_PUBLISH, Grant
from sluice.broker.limits import Limits, topic_depth_error
from sluice.broker.namespace import Namespaces
from sluice.broker.namespaces.plain_topics import PlainTopics
from sluice.broker.ports import ConnectionPort
from sluice.broker.turn import Turn
from sluice.errors import ProtocolViolation
from sluice.metrics import Counters
from sluice.wire.packets import Publish
from sluice.wire.reasons import (
    NOT_AUTHORIZED,
    QOS_NOT_SUPPORTED,
    RETAIN_NOT_SUPPORTED,
    TOPIC_NAME_INVALID,
)
from sluice.wire.topics import DOLLAR

if TYPE_CHECKING:
    from sluice.broker.sessions import Session


class IncomingPublishes:
    def __init__(
        self,
        limits: Limits,
        turn: Turn,
        counters: Counters,
        namespaces: Namespaces,
        plain: PlainTopics,
    ) -> None:
        self._plain: PlainTopics = plain
        self._counters: Counters = counters
        self._limits: Limits = limits
        self._turn: Turn = turn
        self._namespaces: Namespaces = namespaces

    def receive(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        """Check limits, QoS 2 and access rules, then hand the packet to its namespace."""
        limits = self._limits
        if packet.topic_alias:
            connection.resolve_alias(packet)
        if packet.subscription_ids is not None:
            # [MQTT-3.3.4-6]
            raise ProtocolViolation("a client's PUBLISH has a subscription identifier")
        qos = packet.qos
        if qos > limits.max_qos:
            raise ProtocolViolation(
                "this QoS is not supported by this server", reason=QOS_NOT_SUPPORTED
            )
        if packet.retain:
            if not limits.retain_available:
                raise ProtocolViolation(
                    "retained messages are not supported by this server",
                    reason=RETAIN_NOT_SUPPORTED,
                )
            if packet.topic.count(b"/") >= limits.max_topic_levels:
                session.inbound.refuse(
                    packet,
                    connection,
                    TOPIC_NAME_INVALID,
                    topic_depth_error(limits.max_topic_levels),
                )
                return
        if packet.expiry_seconds >= 0:
            packet.expires_at = self._turn.now + float(packet.expiry_seconds)
        if qos == 2 and not session.inbound.begin_receipt(packet, connection):
            return
        grant = session.grant
        if grant is not None and not grant.may_publish(packet):
            self._refuse(packet, grant, session, connection)
            return
        if packet.topic[0] == DOLLAR:
            self._namespaces.publish(packet, session, connection)
        else:
            self._plain.publish_plain(packet, session, connection)

    def _refuse(
        self, packet: Publish, grant: Grant, session: Session, connection: ConnectionPort
    ) -> None:
        """Refuse a publish that is not allowed.

        QoS 0 has no acknowledgement: the message is dropped, and the first one to each topic is
        logged.
        """
        if grant.is_new_refusal(packet.topic):
            facts: dict[str, object] = {
                "client": session.client_id,
                "user": grant.user,
                "peer": connection.peer(),
                "topic": packet.topic.decode(),
            }
            connection.log("publish not allowed", facts)
        if packet.qos == 0:
            self._counters.publishes_dropped += 1
        else:
            session.inbound.refuse(packet, connection, NOT_AUTHORIZED, MAY_NOT_PUBLISH)
