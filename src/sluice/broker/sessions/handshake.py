"""CONNECT to CONNACK: who it is, what both sides agree on, and which session goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.broker.cluster_port import WITHOUT_PROPERTIES
from sluice.broker.acl.access import Caller, Verdict
from sluice.broker.net.connection import NO_LIMIT, Connection
from sluice.broker.limits import too_deep
from sluice.broker.net.rate_limiter import Meter
from sluice.broker.acl.grants import fault_of_will, review
from sluice.clock import Deadline
from sluice.queues.names import is_speakable
from sluice.wire.encode import encode, write_connack
from sluice.wire.packets import V5, Connack, Connect
from sluice.wire.properties import Properties
from sluice.wire.reasons import (
    BAD_AUTHENTICATION_METHOD,
    BAD_USER_NAME_OR_PASSWORD,
    CLIENT_IDENTIFIER_NOT_VALID,
    NOT_AUTHORIZED,
    PACKET_TOO_LARGE,
    QOS_NOT_SUPPORTED,
    QUOTA_EXCEEDED,
    RETAIN_NOT_SUPPORTED,
    SERVER_UNAVAILABLE,
    SUCCESS,
    TOPIC_NAME_INVALID,
)

if TYPE_CHECKING:
    from sluice.broker.broker import Broker


class Handshake:
    def __init__(self, broker: Broker) -> None:
        self._broker: Broker = broker

    def welcome(self, connection: Connection, packet: Connect) -> None:
        """Answer a CONNECT: with a session, or with a refusal and the end of the connection."""
        asked = packet.properties
        connection.peer_limit = asked.maximum_packet_size or NO_LIMIT
        reason, why = self._judge_at_once(packet, connection)
        if reason != SUCCESS:
            self.refuse(connection, reason, why)
            return
        client_id = packet.client_id or self._broker.make_client_id()
        answer = Answer(self, connection, packet, client_id)
        if connection.trusted:
            answer.give(Verdict(user=packet.username or ""))  # as its own cell knows it
            return
        caller = Caller(client_id, connection.address(), connection.transport)
        self._broker.access.admit(packet, caller, answer.give)
        if not answer.given:
            connection.ask()

    def answer(self, connection: Connection, packet: Connect, client_id: str, verdict: Verdict) -> None:
        """It is known who this is."""
        asked = packet.properties
        reason, why = self._judge(packet, client_id, verdict, connection.trusted)
        if reason != SUCCESS:
            self.refuse(connection, reason, why)
            return
        limits = self._broker.limits
        keep_alive = packet.keep_alive
        if limits.max_keep_alive and not 0 < keep_alive <= limits.max_keep_alive:
            keep_alive = limits.max_keep_alive if packet.version == V5 else keep_alive
        if packet.version == V5:
            wanted = asked.session_expiry or 0
        else:
            wanted = 0 if packet.clean else limits.max_session_expiry
        expiry = min(wanted, limits.max_session_expiry)

        if expiry and self._broker.router.is_swamped():
            why = f"no session can be kept at the moment: {self._broker.router.unavailable}"
            self.refuse(connection, SERVER_UNAVAILABLE, why)
            return
        if expiry and self._broker.router.no_memory and not self._is_known(client_id, connection):
            self._broker.router.refused_for_memory += 1
            why = (
                f"no new persistent session is accepted: {self._broker.router.unavailable}; "
                "connect later, or with session expiry 0"
            )
            self.refuse(connection, QUOTA_EXCEEDED, why)
            return
        connack = Connack(False, SUCCESS, Properties())
        if packet.version == V5:
            properties = self._describe()
            properties.session_expiry = expiry if expiry != wanted else None
            properties.server_keep_alive = keep_alive if keep_alive != packet.keep_alive else None
            properties.assigned_client_id = None if packet.client_id else client_id
            properties.response_information = response_information(client_id, asked)
            connack.properties = properties
            if connection.peer_limit != NO_LIMIT and len(encode(connack, V5)) > connection.peer_limit:
                self.refuse(connection, PACKET_TOO_LARGE, "")  # [MQTT-3.1.2-24]
                return

        connection.keep_alive = keep_alive * 1.5
        connection.explain = asked.request_problem != 0
        connection.alias_limit = min(asked.topic_alias_maximum or 0, int(limits.topic_alias_maximum))
        connection.is_simple = (
            packet.version == V5 and connection.peer_limit == NO_LIMIT and connection.alias_limit == 0
        )
        session, connack.session_present = self._broker.registry.open(connection, client_id, packet.clean)
        session.version = packet.version
        session.foreign = connection.trusted
        session.lacks_properties = packet.version != V5 or (
            connection.trusted and WITHOUT_PROPERTIES in packet.properties.user
        )
        session.grant = verdict.grant
        session.belong_to(verdict.user)
        if verdict.grant is not None and connack.session_present:
            review(session, verdict.grant)
        session.expiry = expiry
        session.will = packet.will
        session.will_delay = packet.will_delay
        session.window = min(asked.receive_maximum or 65_535, int(limits.max_inflight))
        connection.session = session
        connection.proof = verdict.proof
        if not connection.trusted:
            self._broker.crowd.entered(connection, verdict.user)
        if (limits.max_publish_rate or limits.max_publish_byte_rate) and not connection.trusted:
            connection.meter = Meter(self._broker, connection)
        if verdict.expires_at:
            self._broker.wake_at(verdict.expires_at, ProofRunsOut(connection))
        if expiry or session.sid:
            self._broker.router.keep_session(session, 0)

        write_connack(connection.output(), connack, packet.version)
        self._broker.counters.packets_sent += 1
        if connection.keep_alive:
            self._broker.scheduler.wake_at(self._broker.turn.now + connection.keep_alive, connection)
        session.attach(connection)

    def _is_known(self, client_id: str, connection: Connection) -> bool:
        """Return whether a persistent session is there already, here or in the cell that is its home:
        it costs nothing more to go on with it."""
        session = self._broker.registry.sessions.get(client_id)
        return connection.trusted or (session is not None and session.expiry > 0)

    def _judge_at_once(self, packet: Connect, connection: Connection) -> tuple[int, str]:
        """What can be said before anybody looks at who it is."""
        if self._broker.stopping:
            # CONNACK knows no "shutting down" [MQTT-3.2.2-8].
            return SERVER_UNAVAILABLE, "this server is shutting down: connect to another one, or later"
        if packet.properties.auth_method is not None:
            return (
                BAD_AUTHENTICATION_METHOD,
                "enhanced authentication is not offered here: use user name and password",
            )
        fault = self._broker.crowd.fault_of_address(connection)
        if fault:
            return QUOTA_EXCEEDED, fault
        return SUCCESS, ""

    def _judge(self, packet: Connect, client_id: str, verdict: Verdict, trusted: bool) -> tuple[int, str]:
        limits = self._broker.limits
        if verdict.reason != SUCCESS:
            return verdict.reason, verdict.why
        if trusted:
            return SUCCESS, ""  # its own cell has looked at all of the rest
        if not is_speakable(verdict.user):  # of a certificate or a JWT; other cells are told it in a CONNECT
            return BAD_USER_NAME_OR_PASSWORD, "the user name has control characters: use another name"
        before = self._broker.registry.sessions.get(client_id)
        is_named = verdict.grant is not None or verdict.user != ""  # else nobody has a name here any more
        if before is not None and before.user is not None and before.user != verdict.user and is_named:
            return (
                CLIENT_IDENTIFIER_NOT_VALID,
                "this client id has a session of another user: choose another id",
            )
        if before is None or before.connection is None:  # a takeover makes it no fuller
            fault = self._broker.crowd.fault_of_user(verdict.user)
            if fault:
                return QUOTA_EXCEEDED, fault
            fault = self._broker.crowd.fault_of_number()
            if fault:
                return QUOTA_EXCEEDED, fault
        if not packet.client_id and not packet.clean and packet.version != V5:
            return CLIENT_IDENTIFIER_NOT_VALID, "a lasting session needs a client id"  # 3.1.1 [MQTT-3.1.3-8]
        will = packet.will
        if will is not None:
            if will.qos > limits.max_qos:
                return QOS_NOT_SUPPORTED, f"QoS {will.qos} is not offered here, not for a will either"
            if will.retain and not limits.retain_available:
                return RETAIN_NOT_SUPPORTED, "retained messages are not offered here, not for a will either"
            if will.retain and will.topic.count(b"/") >= limits.max_topic_levels:
                return TOPIC_NAME_INVALID, f"the will: {too_deep(limits.max_topic_levels)}"
            fault = fault_of_will(will, verdict.grant)
            if fault:
                return NOT_AUTHORIZED, fault
        return SUCCESS, ""

    def _describe(self) -> Properties:
        """What a 5.0 client must know of this server; what is not said has the specification's default."""
        properties = Properties()
        limits = self._broker.limits
        properties.receive_maximum = int(limits.receive_maximum)
        properties.maximum_packet_size = int(limits.max_packet_size)
        properties.topic_alias_maximum = int(limits.topic_alias_maximum)
        properties.maximum_qos = int(limits.max_qos) if limits.max_qos < 2 else None
        properties.retain_available = None if limits.retain_available else 0
        properties.wildcard_available = None if limits.wildcard_subscriptions else 0
        properties.shared_available = None if limits.shared_subscriptions else 0
        return properties

    def refuse(self, connection: Connection, reason: int, why: str) -> None:
        """Say no to a CONNECT, in the words of the version that was asked for, and close."""
        self._broker.refused(connection, reason, why)
        version = V5 if connection.version == V5 else 4
        connack = Connack(False, reason, connection.explained(why, 2))
        write_connack(connection.output(), connack, version)
        self._broker.counters.packets_sent += 1
        connection.end(SUCCESS, "", answered=True)


class Answer:
    """The answer to one CONNECT, which may come after a while."""

    def __init__(self, handshake: Handshake, connection: Connection, packet: Connect, client_id: str) -> None:
        self._handshake: Handshake = handshake
        self._connection: Connection = connection
        self._packet: Connect = packet
        self._client_id: str = client_id
        self._verdict: Verdict | None = None
        self.given: bool = False

    def give(self, verdict: Verdict) -> None:
        if self.given:
            return
        self.given = True
        self._verdict = verdict
        if self._connection.asking is None:
            self._say()
        elif not self._connection.closing:  # else nobody waits for it any more
            self._connection.asked(self._say)

    def _say(self) -> None:
        if self._verdict is not None:
            self._handshake.answer(self._connection, self._packet, self._client_id, self._verdict)


class ProofRunsOut(Deadline):
    """Who came in with something that is valid for a time stays for that time."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection = connection

    def due(self, now: float) -> float:
        self._connection.end(NOT_AUTHORIZED, "the token of this client has expired: connect with a new one")
        return 0.0

    def lapsed(self) -> bool:
        return self._connection.closing


def response_information(client_id: str, asked: Properties) -> str | None:
    """Where this client may have answers sent to, if it asks and its name can stand in a topic."""
    if not asked.request_response or len(client_id) > 1024 or "+" in client_id or "#" in client_id:
        return None
    return f"responses/{client_id}"
