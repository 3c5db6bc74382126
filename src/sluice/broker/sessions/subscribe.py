"""SUBSCRIBE and UNSUBSCRIBE: which filters are granted, and to whom they lead: plain topics, queues, exclusive queues.

Each filter is judged by itself and answered in its place; one that is refused stops none of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.broker.namespaces.compacted.handler import READ_SO, fault_of_reading
from sluice.broker.acl.grants import MAY_NOT_SUBSCRIBE
from sluice.broker.sessions.subscriptions import Subscription, cost_of_filter
from sluice.errors import ProtocolViolation
from sluice.wire.decode import MAX_FILTERS
from sluice.wire.packets import V5, Subscribe, SubscriptionRequest, Unsubscribe
from sluice.wire.properties import Properties
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
)
from sluice.wire.topics import fault_of_filter, has_wildcard, split_share

if TYPE_CHECKING:
    from sluice.broker.net.connection import Connection
    from sluice.broker.sessions.session import Session

NOT_KNOWN: Final = "a node of the cluster does not answer: connect and subscribe again"
TOO_MANY_FILTERS: Final = (
    f"a packet has at most {MAX_FILTERS} topic filters here, and none of these was looked at; "
    "send several packets"
)
MAX_OPTIONS: Final = 64  # user properties of a SUBSCRIBE: each filter for a queue is asked about all of them
TOO_MANY_OPTIONS: Final = f"a SUBSCRIBE has at most {MAX_OPTIONS} user properties here; send fewer"
MAX_OPTION_CHARACTERS: Final = 8192
TOO_LONG_OPTIONS: Final = (
    f"the user properties of a subscription to queues have at most {MAX_OPTION_CHARACTERS} characters here"
)
NOT_SHARED: Final = "an exclusive queue is not shared: its owner subscribes to $ECQ/<client>/#"


def subscribe(session: Session, packet: Subscribe, connection: Connection) -> None:
    if packet.count > MAX_FILTERS:
        reasons = [QUOTA_EXCEEDED] * packet.count
        connection.answer_filters(0x90, packet.packet_id, reasons, TOO_MANY_FILTERS)
        return
    Subscribing(session, packet, connection).go_on()


class Subscribing:
    """A SUBSCRIBE that is carried out, in several turns where it takes long, because it creates queues or joins many.
    Its connection reads nothing else meanwhile."""

    def __init__(self, session: Session, packet: Subscribe, connection: Connection) -> None:
        self._session: Session = session
        self._packet: Subscribe = packet
        self._connection: Connection = connection
        self._answer: Answer = Answer(session, connection, packet.packet_id)
        self._next: int = 0

    def go_on(self) -> None:
        session = self._session
        packet = self._packet
        connection = self._connection
        while True:
            if self._is_joining():
                connection.unfinished = self
                return
            if self._next == len(packet.requests):
                break
            request = packet.requests[self._next]
            self._next += 1
            _subscribe_one(session, packet, request, self._answer)
            if self._next < len(packet.requests) and connection.is_late():
                connection.unfinished = self
                return
        if not abroad_waits(session, self._answer):
            self._answer.done()

    def _is_joining(self) -> bool:
        """Return whether the queues of a filter are still being joined. A client that has closed its side
        of the connection is not made to wait, so that the packets behind the SUBSCRIBE still count."""
        door = self._session.router.door
        return (
            door is not None and door.members.is_joining(self._session) and not self._connection.is_hurried()
        )


def _subscribe_one(session: Session, packet: Subscribe, request: SubscriptionRequest, answer: Answer) -> None:
    identifier = 0
    if packet.properties is not None and packet.properties.subscription_ids:
        identifier = packet.properties.subscription_ids[0]
    door = session.router.door
    reason, text = _judge(session, request)
    topic_filter = request.topic_filter
    if reason < 0x80 and packet.properties is not None:
        reason, text = _judge_options(packet.properties.user, topic_filter, reason)
    abroad = session.router.abroad
    if (
        reason < 0x80
        and door is not None
        and abroad is not None
        and not session.foreign
        and abroad.is_far(topic_filter)
    ):
        _subscribe_far(session, request, reason, packet.properties, identifier, answer)
        return
    if reason < 0x80 and door is not None and topic_filter.startswith(b"$queue/"):
        if not topic_filter.startswith(b"$queue/responses/"):
            reason, text = door.subscribe(session, request, reason, packet.properties, identifier)
            answer.add(reason, text)
            return
        reason, text = door.may_take_responses(session, topic_filter, reason)
    elif reason < 0x80 and door is not None and topic_filter.startswith(b"$ECQ/"):
        reason, text = door.ecq.subscribe(session, request, packet.properties, identifier)
        answer.add(reason, text)
        return
    if reason < 0x80:
        _subscribe_plain(session, request, reason, identifier, answer)
    answer.add(reason, text)


def abroad_waits(session: Session, answer: Answer) -> bool:
    """Whether other nodes must hear of the new filters before the client may rely on them."""
    abroad = session.router.abroad
    if abroad is None or not answer.made:
        return False
    abroad.when_known(answer.done, answer.give_up)
    return True


def _subscribe_plain(
    session: Session, request: SubscriptionRequest, granted: int, identifier: int, answer: Answer
) -> None:
    door = session.router.door
    if door is not None and request.topic_filter.startswith(b"$admin/"):
        door.watch()
    subscription = Subscription(
        session,
        request.topic_filter,
        granted,
        request.no_local,
        request.retain_as_published,
        request.retain_handling,
        identifier,
    )
    answer.made.append((subscription, session.router.subscribe(subscription)))


def _subscribe_far(
    session: Session,
    request: SubscriptionRequest,
    granted: int,
    properties: Properties | None,
    identifier: int,
    answer: Answer,
) -> None:
    """A filter that means queues of other cells, perhaps besides some of this one: the answer waits for them all."""
    door = session.router.door
    abroad = session.router.abroad
    assert door is not None and abroad is not None
    topic_filter = request.topic_filter
    qos = min(granted, 1)
    wishes = [str(identifier)]
    for name, value in properties.user if properties is not None else []:
        wishes.append(name)
        wishes.append(value)
    if abroad.is_near(topic_filter):
        if topic_filter.startswith((b"$admin/", b"$queue/responses/")):
            _subscribe_plain(session, request, qos, identifier, answer)
        else:
            reason, text = door.subscribe(session, request, granted, properties, identifier)
            if reason >= 0x80:
                answer.add(reason, text)
                return
    session.queue_requests[topic_filter] = (qos, wishes)
    nth = answer.wait()
    abroad.legs_of(session).subscribe(topic_filter, qos, wishes, FarAnswer(answer, nth, topic_filter).give)


class Answer:
    """The answer to one SUBSCRIBE, which leaves when all that it promises is so."""

    def __init__(self, session: Session, connection: Connection, packet_id: int) -> None:
        self.session: Session = session
        self.made: list[tuple[Subscription, bool]] = []
        self._connection: Connection = connection
        self._packet_id: int = packet_id
        self._reasons: list[int] = []
        self._why: str = ""
        self._waiting: int = 1

    def add(self, reason: int, why: str) -> None:
        self._reasons.append(reason)
        self._why = self._why or why

    def wait(self) -> int:
        """One of the filters is not decided yet; its place."""
        self._waiting += 1
        self._reasons.append(0)
        return len(self._reasons) - 1

    def decide(self, nth: int, reason: int, why: str) -> None:
        self._reasons[nth] = reason
        self._why = self._why or why
        self.done()

    def done(self) -> None:
        self._waiting -= 1
        session = self.session
        connection = self._connection
        if self._waiting or connection.closing or session.connection is not connection:
            return
        if session.sid:
            # SUBACK waits for the session record. The record is written last because it names the
            # filters whose retained messages are still owed: mostly none, and then no second one follows.
            self._send_retained()
            session.answer_filters(connection, 0x90, self._packet_id, self._reasons, self._why)
        else:
            session.answer_filters(connection, 0x90, self._packet_id, self._reasons, self._why)
            self._send_retained()

    def _send_retained(self) -> None:
        session = self.session
        door = session.router.door
        for subscription, new in self.made:
            session.router.send_retained(subscription, new)
            if door is not None and subscription.topic_filter.startswith(b"$queue/responses/"):
                door.takes_responses(subscription)
        if session.retained_sender is not None:
            session.retained_sender.start()

    def give_up(self) -> None:
        """End the connection: other nodes do not hear of the filters in time, so the client must not
        rely on them."""
        connection = self._connection
        if self._waiting and not connection.closing and self.session.connection is connection:
            connection.end(IMPLEMENTATION_SPECIFIC_ERROR, NOT_KNOWN)


class FarAnswer:
    """What other cells say to one of its filters."""

    def __init__(self, answer: Answer, nth: int, topic_filter: bytes) -> None:
        self._answer: Answer = answer
        self._nth: int = nth
        self._topic_filter: bytes = topic_filter

    def give(self, reason: int, why: str) -> None:
        if reason >= 0x80:
            self._answer.session.queue_requests.pop(self._topic_filter, None)
        self._answer.decide(self._nth, reason, why)


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
    if inner.startswith(b"$ECQ/") and session.router.door is not None:
        # What no rule can allow is told so, and not that a rule is missing.
        if group:
            return TOPIC_FILTER_INVALID, NOT_SHARED
        fault_of_form = fault_of_reading(inner, session.client_id)
        if fault_of_form:
            return fault_of_form, READ_SO
    if session.grant is not None and not session.grant.may_subscribe(topic_filter):
        return NOT_AUTHORIZED, MAY_NOT_SUBSCRIBE
    if group and inner.startswith(b"$queue/") and session.router.door is not None:
        return TOPIC_FILTER_INVALID, "a queue is shared by its groups: use $queue/<queue>/$group/<group>"
    if inner.startswith((b"$queue/responses/+", b"$queue/responses/#")) and session.router.door is not None:
        # Answers have one consumer: this one would take them from all who have asked.
        return (
            TOPIC_FILTER_INVALID,
            "name whose responses they are: $queue/responses/<id> or $queue/responses/<id>/#",
        )
    count = len(session.subscriptions) + len(session.queue_requests)
    known = topic_filter in session.subscriptions or topic_filter in session.queue_requests
    if count >= limits.max_subscriptions and not known:
        return (
            QUOTA_EXCEEDED,
            f"the subscriptions of a client are at most {limits.max_subscriptions} here",
        )
    if not known:
        fault = _fault_of_room(session, inner, topic_filter)
        if fault:
            return QUOTA_EXCEEDED, fault
    return min(request.qos, int(limits.max_qos)), ""


def _judge_options(user: list[tuple[str, str]], topic_filter: bytes, granted: int) -> tuple[int, str]:
    """Return what is granted, or why there are too many user properties. With a filter below `$queue/`,
    `$ECQ/` or `$admin/` they are stored as long as the subscription."""
    if len(user) > MAX_OPTIONS:
        return QUOTA_EXCEEDED, TOO_MANY_OPTIONS
    if user and topic_filter.startswith((b"$queue/", b"$ECQ/", b"$admin/")):
        if sum([len(name) + len(value) for name, value in user]) > MAX_OPTION_CHARACTERS:
            return QUOTA_EXCEEDED, TOO_LONG_OPTIONS
    return granted, ""


def _fault_of_room(session: Session, inner: bytes, topic_filter: bytes) -> str:
    """Return why there is no memory for a new filter; the empty string when there is.

    Consumers, and those who administer, may subscribe while memory is short: they make room."""
    router = session.router
    most = router.limits.max_subscription_bytes
    if session.subscription_bytes + cost_of_filter(topic_filter) > most:
        return (
            f"the subscriptions of a client have at most {most} bytes here, levels of filters included "
            "(mqtt.max_subscription_bytes); use fewer or shorter filters"
        )
    if router.no_memory and not inner.startswith((b"$queue/", b"$ECQ/", b"$admin/")):
        router.refused_for_memory += 1
        return f"no new subscription is accepted: {router.unavailable}; subscribe again later"
    return ""


def unsubscribe(session: Session, packet: Unsubscribe, connection: Connection) -> None:
    reasons: list[int] = []
    if packet.count > MAX_FILTERS:
        if session.version != V5:  # its UNSUBACK has no word for a refusal
            raise ProtocolViolation(TOO_MANY_FILTERS)
        reasons = [IMPLEMENTATION_SPECIFIC_ERROR] * packet.count
        connection.answer_filters(0xB0, packet.packet_id, reasons, TOO_MANY_FILTERS)
        return
    for topic_filter in packet.filters:
        known = session.router.unsubscribe(session, topic_filter)
        if not known and session.router.door is not None:
            known = session.router.door.unsubscribe(session, topic_filter)
        reasons.append(SUCCESS if known else NO_SUBSCRIPTION_EXISTED)
    session.answer_filters(connection, 0xB0, packet.packet_id, reasons if session.version == V5 else [], "")
