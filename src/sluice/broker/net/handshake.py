"""CONNECT to CONNACK: authenticate the client, negotiate the limits and open the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sluice.broker.acl import AuthResult, PeerInfo, will_error
from sluice.broker.limits import topic_depth_error
from sluice.broker.net.connection import Connection
from sluice.broker.net.rate_limiter import RateLimiter
from sluice.broker.ports import NO_PACKET_LIMIT
from sluice.broker.routing import (
    CLIENT_CLAIM,
    NO_USER_PROPERTIES,
    TAKEN_OVER,
    ClientClaim,
    enforce_grant,
)
from sluice.clock import Deadline
from sluice.queues.names import is_printable
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
    SERVER_BUSY,
    SERVER_UNAVAILABLE,
    SUCCESS,
    TOPIC_NAME_INVALID,
)

if TYPE_CHECKING:
    from sluice.broker.broker import Broker


OTHER_USER: Final = "this client id has a session of another user: choose another id"
OTHER_SESSION: Final = "a client with this id is connected here: try again later"


class Handshake:
    def __init__(self, broker: Broker) -> None:
        self._broker: Broker = broker

    def handle_connect(self, connection: Connection, packet: Connect) -> None:
        """Answer a CONNECT with a session, or refuse it and end the connection."""
        requested = packet.properties
        connection.max_outgoing_packet = requested.maximum_packet_size or NO_PACKET_LIMIT
        reason, reason_string = self._check_before_auth(packet, connection)
        if reason != SUCCESS:
            self.refuse(connection, reason, reason_string)
            return
        client_id = packet.client_id or self._broker.make_client_id()
        pending = PendingConnect(self, connection, packet, client_id)
        if connection.is_from_cluster:
            pending.resolve(AuthResult(user=packet.username or ""))  # authenticated by its own cell
            return
        peer = PeerInfo(client_id, connection.address(), connection.transport)
        self._broker.access.authenticate(packet, peer, pending.resolve)
        if not pending.is_resolved:
            connection.await_auth()

    def needs_claim(
        self, connection: Connection, packet: Connect, client_id: str, auth_result: AuthResult
    ) -> bool:
        """Return whether the client id must be claimed at its own cell before the CONNACK."""
        if connection.is_from_cluster or self._broker.router.cluster.owns_client(client_id):
            return False
        reason, _ = self._check_after_auth(packet, client_id, auth_result, False)
        return reason == SUCCESS  # a refused client takes nothing over

    def claim(
        self,
        connection: Connection,
        packet: Connect,
        client_id: str,
        auth_result: AuthResult,
        on_done: Callable[[int, str], None],
    ) -> ClientClaim:
        is_named = auth_result.grant is not None or auth_result.user != ""
        return self._broker.router.cluster.claim_client(
            connection, client_id, auth_result.user, is_named, self._window(packet), on_done
        )

    def _window(self, packet: Connect) -> int:
        return min(
            packet.properties.receive_maximum or 65_535, int(self._broker.limits.max_inflight)
        )

    def _check_claim(
        self, connection: Connection, packet: Connect, client_id: str, user: str
    ) -> tuple[int, str]:
        """Check a CONNECT of another cell: a claim to a client id of this one, or a session proxy.

        A session proxy has no claim. If it finds a client here, one of the two sessions has lost
        the client id and soon learns it; until then the proxy has to call again.
        """
        claims = [value for name, value in packet.properties.user if name == CLIENT_CLAIM]
        existing = self._broker.registry.sessions.get(client_id)
        if not claims:
            if existing is not None and existing.connection is not None and not existing.is_proxy:
                return SERVER_BUSY, OTHER_SESSION
            return SUCCESS, ""
        words = claims[0].split()
        connection.claim_token = words[0] if words else ""
        if existing is None:
            return SUCCESS, ""
        if existing.user is not None and existing.user != user and "named" in words:
            return CLIENT_IDENTIFIER_NOT_VALID, OTHER_USER
        holder = existing.connection
        # Without a holder it is a stored session of the client, and newer than the claim.
        if "again" in words and (holder is None or holder.claim_token != connection.claim_token):
            return CLIENT_IDENTIFIER_NOT_VALID, TAKEN_OVER
        return SUCCESS, ""

    def finish_connect(
        self,
        connection: Connection,
        packet: Connect,
        client_id: str,
        auth_result: AuthResult,
        claim: ClientClaim | None,
    ) -> None:
        """Complete a CONNECT after authentication, and after its claim if it needs one."""
        requested = packet.properties
        reason, reason_string = self._check_after_auth(
            packet, client_id, auth_result, connection.is_from_cluster
        )
        if reason == SUCCESS and connection.is_from_cluster:
            reason, reason_string = self._check_claim(
                connection, packet, client_id, auth_result.user
            )
        if reason != SUCCESS:
            self.refuse(connection, reason, reason_string)
            return
        broker = self._broker
        limits = broker.limits
        keep_alive = packet.keep_alive
        if (
            limits.max_keep_alive
            and not 0 < keep_alive <= limits.max_keep_alive
            and not connection.is_from_cluster  # the link notices a silent node
        ):
            keep_alive = limits.max_keep_alive if packet.version == V5 else keep_alive
        if packet.version == V5:
            requested_expiry = requested.session_expiry or 0
        else:
            requested_expiry = 0 if packet.clean_start else limits.max_session_expiry
        expiry = min(requested_expiry, limits.max_session_expiry)

        if expiry and self._broker.router.is_store_saturated():
            reason_string = (
                f"no session can be stored at the moment: {self._broker.router.unavailable_reason}"
            )
            self.refuse(connection, SERVER_UNAVAILABLE, reason_string)
            return
        if (
            expiry
            and self._broker.router.is_out_of_memory
            and not self._has_persistent_session(client_id, connection)
        ):
            self._broker.router.refused_out_of_memory += 1
            reason_string = (
                f"no new persistent session is accepted: {self._broker.router.unavailable_reason}; "
                "connect later, or with session expiry 0"
            )
            self.refuse(connection, QUOTA_EXCEEDED, reason_string)
            return
        connack = Connack(False, SUCCESS, Properties())
        if packet.version == V5:
            properties = self._build_connack_properties()
            properties.session_expiry = expiry if expiry != requested_expiry else None
            properties.server_keep_alive = keep_alive if keep_alive != packet.keep_alive else None
            properties.assigned_client_id = None if packet.client_id else client_id
            properties.response_information = build_response_information(client_id, requested)
            connack.properties = properties
            if (
                connection.max_outgoing_packet != NO_PACKET_LIMIT
                and len(encode(connack, V5)) > connection.max_outgoing_packet
            ):
                self.refuse(connection, PACKET_TOO_LARGE, "")  # [MQTT-3.1.2-24]
                return

        connection.keep_alive = keep_alive * 1.5
        connection.wants_reason_strings = requested.request_problem != 0
        connection.max_outgoing_aliases = min(
            requested.topic_alias_maximum or 0, int(limits.topic_alias_maximum)
        )
        connection.has_fast_path = (
            packet.version == V5
            and connection.max_outgoing_packet == NO_PACKET_LIMIT
            and connection.max_outgoing_aliases == 0
        )
        session, connack.session_present = self._broker.registry.open_session(
            connection, client_id, packet.clean_start
        )
        session.version = packet.version
        session.is_proxy = connection.is_from_cluster
        session.lacks_user_properties = packet.version != V5 or (
            connection.is_from_cluster and NO_USER_PROPERTIES in packet.properties.user
        )
        session.grant = auth_result.grant
        session.set_user(auth_result.user)
        if auth_result.grant is not None and connack.session_present:
            enforce_grant(self._broker.router, session, auth_result.grant)
        session.expiry_seconds = expiry
        session.will = packet.will
        session.will_delay = packet.will_delay
        session.outbound.window = self._window(packet)
        connection.session = session
        if claim is not None:
            self._broker.router.cluster.adopt_claim(session, claim)
        connection.credential_id = auth_result.credential_id
        if not connection.is_from_cluster:
            self._broker.connection_limits.on_session_opened(connection, auth_result.user)
        if (
            limits.max_publish_rate or limits.max_publish_byte_rate
        ) and not connection.is_from_cluster:
            connection.rate_limiter = RateLimiter(
                limits, broker.counters, broker.turn, broker.scheduler, connection
            )
        if auth_result.expires_at:
            self._broker.wake_at(auth_result.expires_at, CredentialExpiry(connection))
        if expiry or session.persistent_id:
            self._broker.router.session_store.store_session(session)

        write_connack(connection.get_output(), connack, packet.version)
        self._broker.counters.packets_sent += 1
        if connection.keep_alive:
            self._broker.scheduler.wake_at(
                self._broker.turn.now + connection.keep_alive, connection
            )
        self._broker.registry.on_connected(session, connection)

    def _has_persistent_session(self, client_id: str, connection: Connection) -> bool:
        """Return whether the client continues a persistent session of this or its home cell.

        Continuing it needs no additional memory.
        """
        session = self._broker.registry.sessions.get(client_id)
        return connection.is_from_cluster or (session is not None and session.expiry_seconds > 0)

    def _check_before_auth(self, packet: Connect, connection: Connection) -> tuple[int, str]:
        """Check what does not depend on the client's identity."""
        if self._broker.stopping:
            # CONNACK has no reason code for shutting down [MQTT-3.2.2-8].
            return (
                SERVER_UNAVAILABLE,
                "this server is shutting down: connect to another one, or later",
            )
        if packet.properties.auth_method is not None:
            return (
                BAD_AUTHENTICATION_METHOD,
                "enhanced authentication is not supported: use user name and password",
            )
        fault = self._broker.connection_limits.address_limit_error(connection)
        if fault:
            return QUOTA_EXCEEDED, fault
        return SUCCESS, ""

    def _check_after_auth(
        self, packet: Connect, client_id: str, auth_result: AuthResult, is_from_cluster: bool
    ) -> tuple[int, str]:
        limits = self._broker.limits
        if auth_result.reason != SUCCESS:
            return auth_result.reason, auth_result.reason_string
        if is_from_cluster:
            return SUCCESS, ""  # its own cell has checked the rest
        # The name may come from a certificate or a JWT; other cells receive it in a CONNECT.
        if not is_printable(auth_result.user):
            return (
                BAD_USER_NAME_OR_PASSWORD,
                "the user name has control characters: use another name",
            )
        existing = self._broker.registry.sessions.get(client_id)
        # False: authentication is switched off, and no client has a user name.
        is_named = auth_result.grant is not None or auth_result.user != ""
        if (
            existing is not None
            and existing.user is not None
            and existing.user != auth_result.user
            and is_named
        ):
            return CLIENT_IDENTIFIER_NOT_VALID, OTHER_USER
        # A takeover adds no connection, unless the earlier one is on another node.
        if existing is None or existing.connection is None or existing.is_proxy:
            fault = self._broker.connection_limits.user_limit_error(auth_result.user)
            if fault:
                return QUOTA_EXCEEDED, fault
            fault = self._broker.connection_limits.total_limit_error()
            if fault:
                return QUOTA_EXCEEDED, fault
        if not packet.client_id and not packet.clean_start and packet.version != V5:
            # MQTT 3.1.1 [MQTT-3.1.3-8]
            return CLIENT_IDENTIFIER_NOT_VALID, "a persistent session needs a client id"
        will = packet.will
        if will is not None:
            if will.qos > limits.max_qos:
                return (
                    QOS_NOT_SUPPORTED,
                    f"QoS {will.qos} is not supported by this server, including for wills",
                )
            if will.retain and not limits.retain_available:
                return (
                    RETAIN_NOT_SUPPORTED,
                    "retained messages are not supported by this server, including for wills",
                )
            if will.retain and will.topic.count(b"/") >= limits.max_topic_levels:
                return TOPIC_NAME_INVALID, f"the will: {topic_depth_error(limits.max_topic_levels)}"
            namespace = self._broker.router.namespaces.find(will.topic)
            fault = namespace.publish_error() or will_error(will, auth_result.grant)
            if fault:
                return NOT_AUTHORIZED, fault
        return SUCCESS, ""

    def _build_connack_properties(self) -> Properties:
        """Return what a 5.0 client must know; an absent property has its standard default."""
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

    def refuse(self, connection: Connection, reason: int, reason_string: str) -> None:
        """Refuse a CONNECT with a CONNACK of the client's version, and close the connection."""
        self._broker.on_refused(connection, reason, reason_string)
        version = V5 if connection.version == V5 else 4
        connack = Connack(False, reason, connection.build_reason_properties(reason_string, 2))
        write_connack(connection.get_output(), connack, version)
        self._broker.counters.packets_sent += 1
        connection.end(SUCCESS, "", was_answered=True)


class PendingConnect:
    """The outcome of one CONNECT, which may arrive later."""

    def __init__(
        self, handshake: Handshake, connection: Connection, packet: Connect, client_id: str
    ) -> None:
        self._handshake: Handshake = handshake
        self._connection: Connection = connection
        self._packet: Connect = packet
        self._client_id: str = client_id
        self._auth_result: AuthResult | None = None
        self._claim: ClientClaim | None = None
        self._claim_reason: int = SUCCESS
        self._claim_reason_string: str = ""
        self.is_resolved: bool = False

    def resolve(self, auth_result: AuthResult) -> None:
        if self.is_resolved:
            return
        self.is_resolved = True
        self._auth_result = auth_result
        if self._connection.auth_buffer is None:
            self._finish()
        elif not self._connection.closing:  # else the client is gone
            self._connection.finish_auth(self._finish)

    def _finish(self) -> None:
        auth_result, handshake = self._auth_result, self._handshake
        connection, packet, client_id = self._connection, self._packet, self._client_id
        if auth_result is None:
            return
        if handshake.needs_claim(connection, packet, client_id, auth_result):
            connection.await_auth()
            self._claim = handshake.claim(
                connection, packet, client_id, auth_result, self._on_claimed
            )
        else:
            handshake.finish_connect(connection, packet, client_id, auth_result, None)

    def _on_claimed(self, reason: int, reason_string: str) -> None:
        connection, claim = self._connection, self._claim
        if not connection.closing and not connection.lost:
            self._claim_reason, self._claim_reason_string = reason, reason_string
            connection.finish_auth(self._finish_claimed)
        if claim is not None and connection.session is None:
            claim.release()  # the client is gone or refused

    def _finish_claimed(self) -> None:
        auth_result = self._auth_result
        if self._claim_reason != SUCCESS:
            self._handshake.refuse(self._connection, self._claim_reason, self._claim_reason_string)
        elif auth_result is not None:
            self._handshake.finish_connect(
                self._connection, self._packet, self._client_id, auth_result, self._claim
            )


class CredentialExpiry(Deadline):
    """End a connection when its credential expires."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection = connection

    def fire(self, now: float) -> float:
        self._connection.end(
            NOT_AUTHORIZED, "the token of this client has expired: connect with a new one"
        )
        return 0.0

    def is_obsolete(self) -> bool:
        return self._connection.closing


def build_response_information(client_id: str, properties: Properties) -> str | None:
    """Return the topic prefix for responses, if requested and if the client id fits in a topic."""
    if (
        not properties.request_response
        or len(client_id) > 1024
        or "+" in client_id
        or "#" in client_id
    ):
        return None
    return f"responses/{client_id}"
