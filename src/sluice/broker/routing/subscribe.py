"""SUBSCRIBE and UNSUBSCRIBE: check each filter and subscribe to topics, queues or exclusive queues.

Each filter is checked by itself and gets its own reason code; a refused filter does not affect the
others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.broker.acl import MAY_NOT_SUBSCRIBE
from sluice.broker.ports import ConnectionPort, InputTask
from sluice.broker.sessions import estimate_filter_bytes, read_options
from sluice.errors import ProtocolViolation
from sluice.wire.decode import MAX_FILTERS
from sluice.wire.packets import V5, Subscribe, SubscriptionRequest, Unsubscribe
from sluice.wire.reasons import (
    IMPLEMENTATION_SPECIFIC_ERROR,
    NO_SUBSCRIPTION_EXISTED,
    NOT_AUTHORIZED,
    QUOTA_EXCEEDED,
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
    SUCCESS,
    TOPIC_FILTER_INVALID,
    UNSPECIFIED_ERROR,
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED,
    get_reason_name,
)
from sluice.wire.topics import has_wildcard, split_share, topic_filter_error

if TYPE_CHECKING:
    from sluice.broker.namespace import NamespaceHandler
    from sluice.broker.routing.router import Router
    from sluice.broker.sessions import Session, Subscription

CLUSTER_TIMEOUT: Final = "a node of the cluster does not respond: connect and subscribe again"
TOO_MANY_FILTERS: Final = (
    f"a packet has at most {MAX_FILTERS} topic filters here, and none of these was looked at; "
    "send several packets"
)
# User properties of a SUBSCRIBE; all of them are checked for each queue filter.
MAX_OPTIONS: Final = 64
TOO_MANY_OPTIONS: Final = f"a SUBSCRIBE has at most {MAX_OPTIONS} user properties here; send fewer"
MAX_OPTION_CHARACTERS: Final = 8192
OPTIONS_TOO_LONG: Final = (
    "the user properties of a subscription to queues have at most "
    f"{MAX_OPTION_CHARACTERS} characters here"
)


def handle_subscribe(
    router: Router, session: Session, packet: Subscribe, connection: ConnectionPort
) -> None:
    if packet.count > MAX_FILTERS:
        reasons = [QUOTA_EXCEEDED] * packet.count
        connection.send_suback(0x90, packet.packet_id, reasons, TOO_MANY_FILTERS)
        return
    SubscribeTask(router, session, packet, connection).advance()


class SubscribeTask(InputTask):
    """Carry out a SUBSCRIBE, in several turns if it creates queues or joins many.

    Its connection processes no other packet meanwhile.
    """

    def __init__(
        self, router: Router, session: Session, packet: Subscribe, connection: ConnectionPort
    ) -> None:
        self._router: Router = router
        self._session: Session = session
        self._packet: Subscribe = packet
        self._connection: ConnectionPort = connection
        self._suback: PendingSuback = PendingSuback(router, session, connection, packet)
        self._next: int = 0

    def advance(self) -> None:
        session = self._session
        packet = self._packet
        connection = self._connection
        while True:
            if self._is_joining():
                connection.input_task = self
                return
            if self._next == len(packet.requests):
                break
            request = packet.requests[self._next]
            self._next += 1
            _subscribe_one(self._router, session, packet, request, self._suback)
            if self._next < len(packet.requests) and connection.is_over_time_slice():
                connection.input_task = self
                return
        if not wait_for_cluster(self._router, self._suback):
            self._suback.finish_one()

    def _is_joining(self) -> bool:
        """Return whether the queues of a filter are still being joined.

        A client that has closed its side of the connection does not wait, so that the packets after
        the SUBSCRIBE still take effect.
        """
        session = self._session
        return self._router.namespaces.is_joining(session) and not self._connection.has_eof()


def _subscribe_one(
    router: Router,
    session: Session,
    packet: Subscribe,
    request: SubscriptionRequest,
    suback: PendingSuback,
) -> None:
    granted, text = _check_filter(router, session, request)
    topic_filter = request.topic_filter
    if granted < 0x80 and packet.properties is not None:
        granted, text = _check_options(packet.properties.user, topic_filter, granted)
    if granted >= 0x80:
        suback.add_reason(granted, text)
        return
    namespaces = router.namespaces
    handler = namespaces.find(topic_filter)
    if (
        handler is not namespaces.plain
        and not session.is_proxy
        and router.cluster.matches_remote(topic_filter)
    ):
        _subscribe_remote(router, handler, session, packet, request, granted, suback)
        return
    reason, text = handler.subscribe(session, packet, request, granted, suback.subscriptions)
    suback.add_reason(reason, text)


def wait_for_cluster(router: Router, suback: PendingSuback) -> bool:
    """Return whether the SUBACK waits until the other nodes know the new filters."""
    cluster = router.cluster
    if not cluster.has_other_cells or not suback.subscriptions:
        return False
    cluster.after_interest_known(suback.finish_one, suback.fail)
    return True


def _subscribe_remote(
    router: Router,
    handler: NamespaceHandler,
    session: Session,
    packet: Subscribe,
    request: SubscriptionRequest,
    granted: int,
    suback: PendingSuback,
) -> None:
    """Subscribe to a filter that matches queues of other cells; the SUBACK waits for them."""
    cluster = router.cluster
    topic_filter = request.topic_filter
    # Queues reduce QoS 2 to 1; an exclusive queue refuses it.
    qos = granted if topic_filter.startswith(b"$ECQ/") else min(granted, 1)
    options = read_options(packet, qos)
    if cluster.matches_local(topic_filter):
        reason, text = handler.subscribe(
            session, packet, request, options.qos, suback.subscriptions
        )
        if reason >= 0x80:
            suback.add_reason(reason, text)
            return
    session.queue_requests[topic_filter] = options
    position = suback.add_pending()
    cluster.get_proxies(session).subscribe(
        topic_filter, options, RemoteFilterReply(suback, position, topic_filter).resolve
    )


class PendingSuback:
    """The SUBACK of one SUBSCRIBE; it is sent after all its filters are in effect."""

    def __init__(
        self, router: Router, session: Session, connection: ConnectionPort, packet: Subscribe
    ) -> None:
        self._router: Router = router
        self.session: Session = session
        self.subscriptions: list[tuple[Subscription, bool]] = []
        self._connection: ConnectionPort = connection
        self._packet: Subscribe = packet
        self._reasons: list[int] = []
        self._reason_string: str = ""
        self._pending_count: int = 1

    def add_reason(self, reason: int, reason_string: str) -> None:
        self._reasons.append(reason)
        self._reason_string = self._reason_string or reason_string

    def add_pending(self) -> int:
        """Add a filter without a result yet, and return its position."""
        self._pending_count += 1
        self._reasons.append(0)
        return len(self._reasons) - 1

    def resolve(self, position: int, reason: int, reason_string: str) -> None:
        self._reasons[position] = reason
        self._reason_string = self._reason_string or reason_string
        self.finish_one()

    def finish_one(self) -> None:
        self._pending_count -= 1
        session = self.session
        connection = self._connection
        if self._pending_count or connection.closing or session.connection is not connection:
            return
        if self._reason_string:
            self._log_refusal()
        if session.persistent_id:
            # SUBACK waits for the session record. The record is written last because it names the
            # filters with pending retained messages: usually none, and then no second record
            # follows.
            self._send_retained()
            self._send()
        else:
            self._send()
            self._send_retained()

    def _send(self) -> None:
        packet_id = self._packet.packet_id
        send_suback(
            self._router,
            self.session,
            self._connection,
            0x90,
            packet_id,
            self._reasons,
            self._reason_string,
        )

    def _log_refusal(self) -> None:
        """Log the first refused filter: many clients do not show the reason of a SUBACK."""
        for request, reason in zip(self._packet.requests, self._reasons):
            if reason >= 0x80:
                session = self.session
                facts: dict[str, object] = {
                    "client": session.client_id,
                    "user": session.user,
                    "peer": self._connection.peer(),
                    "filter": request.topic_filter.decode(),
                    "reason": get_reason_name(reason),
                    "why": self._reason_string,
                }
                self._connection.log("subscribe refused", facts)
                return

    def _send_retained(self) -> None:
        router = self._router
        for subscription, is_new in self.subscriptions:
            router.send_retained(subscription, is_new)
            router.namespaces.find(subscription.topic_filter).on_subscribed(subscription)
        self.session.retained_lookup.start()

    def fail(self) -> None:
        """End the connection: other nodes do not learn of the filters in time.

        The client must not rely on the subscriptions.
        """
        connection = self._connection
        if self._pending_count and not connection.closing and self.session.connection is connection:
            connection.end(IMPLEMENTATION_SPECIFIC_ERROR, CLUSTER_TIMEOUT)


class RemoteFilterReply:
    """The result of one filter from other cells."""

    def __init__(self, suback: PendingSuback, position: int, topic_filter: bytes) -> None:
        self._suback: PendingSuback = suback
        self._position: int = position
        self._topic_filter: bytes = topic_filter

    def resolve(self, reason: int, reason_string: str) -> None:
        if reason >= 0x80:
            self._suback.session.queue_requests.pop(self._topic_filter, None)
        self._suback.resolve(self._position, reason, reason_string)


def _check_filter(
    router: Router, session: Session, request: SubscriptionRequest
) -> tuple[int, str]:
    """Return the granted QoS, or the reason code and text of a refusal."""
    limits = router.limits
    topic_filter = request.topic_filter
    fault = topic_filter_error(topic_filter, limits.max_topic_levels)
    if fault:
        return TOPIC_FILTER_INVALID, fault
    share_name, inner = split_share(topic_filter)
    if share_name and request.no_local:
        raise ProtocolViolation("a shared subscription has the no local option")  # [MQTT-3.8.3-4]
    if share_name and not limits.shared_subscriptions:
        return (
            SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
            "shared subscriptions are not supported by this server",
        )
    if has_wildcard(inner) and not limits.wildcard_subscriptions:
        return WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED, "wildcards are not supported by this server"
    if inner in limits.refused_filters:
        return UNSPECIFIED_ERROR, "the server's configuration refuses this filter to all clients"
    handler = router.namespaces.find(inner)
    refusal, fault = handler.filter_error(session, inner, share_name != b"")
    if refusal:
        return refusal, fault
    if session.grant is not None and not session.grant.may_subscribe(topic_filter):
        return NOT_AUTHORIZED, MAY_NOT_SUBSCRIBE
    fault = handler.invalid_filter_error(inner, share_name != b"")
    if fault:
        return TOPIC_FILTER_INVALID, fault
    count = len(session.subscriptions) + len(session.queue_requests)
    is_known = topic_filter in session.subscriptions or topic_filter in session.queue_requests
    if count >= limits.max_subscriptions and not is_known:
        return (
            QUOTA_EXCEEDED,
            f"the subscriptions of a client are at most {limits.max_subscriptions} here",
        )
    if not is_known:
        fault = _memory_error(router, session, inner, topic_filter)
        if fault:
            return QUOTA_EXCEEDED, fault
    return min(request.qos, int(limits.max_qos)), ""


def _check_options(
    user: list[tuple[str, str]], topic_filter: bytes, granted: int
) -> tuple[int, str]:
    """Return the granted QoS, or an error if there are too many user properties.

    The user properties of a filter below `$queue/`, `$ECQ/` or `$admin/` are stored with the
    subscription.
    """
    if len(user) > MAX_OPTIONS:
        return QUOTA_EXCEEDED, TOO_MANY_OPTIONS
    if user and topic_filter.startswith((b"$queue/", b"$ECQ/", b"$admin/")):
        if sum([len(name) + len(value) for name, value in user]) > MAX_OPTION_CHARACTERS:
            return QUOTA_EXCEEDED, OPTIONS_TOO_LONG
    return granted, ""


def _memory_error(router: Router, session: Session, inner: bytes, topic_filter: bytes) -> str:
    """Return why there is no memory for a new filter, or an empty string if there is.

    Consumers and administrators may subscribe while memory is short: they free memory.
    """
    max_bytes = router.limits.max_subscription_bytes
    if session.subscription_bytes + estimate_filter_bytes(topic_filter) > max_bytes:
        return (
            f"the subscriptions of a client have at most {max_bytes} bytes here, "
            "levels of filters included (mqtt.max_subscription_bytes); "
            "use fewer or shorter filters"
        )
    if router.is_out_of_memory and not inner.startswith((b"$queue/", b"$ECQ/", b"$admin/")):
        router.refused_out_of_memory += 1
        return (
            f"no new subscription is accepted: {router.unavailable_reason}; subscribe again later"
        )
    return ""


def handle_unsubscribe(
    router: Router, session: Session, packet: Unsubscribe, connection: ConnectionPort
) -> None:
    reasons: list[int] = []
    if packet.count > MAX_FILTERS:
        if session.version != V5:  # its UNSUBACK has no reason codes
            raise ProtocolViolation(TOO_MANY_FILTERS)
        reasons = [IMPLEMENTATION_SPECIFIC_ERROR] * packet.count
        connection.send_suback(0xB0, packet.packet_id, reasons, TOO_MANY_FILTERS)
        return
    for topic_filter in packet.filters:
        handler = router.namespaces.find(topic_filter)
        is_known = router.unsubscribe(session, topic_filter) or handler.unsubscribe(
            session, topic_filter
        )
        reasons.append(SUCCESS if is_known else NO_SUBSCRIPTION_EXISTED)
    if session.version != V5:
        reasons = []
    send_suback(router, session, connection, 0xB0, packet.packet_id, reasons, "")


def send_suback(
    router: Router,
    session: Session,
    connection: ConnectionPort,
    head: int,
    packet_id: int,
    reasons: list[int],
    reason_string: str,
) -> None:
    """Send a SUBACK or UNSUBACK; for a persistent session, after the change is committed."""
    if session.persistent_id:
        router.session_store.store_session(session)
        session.inbound.send_suback_after_commit(head, packet_id, reasons, reason_string)
        router.apply_backpressure(connection)
    else:
        connection.send_suback(head, packet_id, reasons, reason_string)
