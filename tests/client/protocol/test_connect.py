"""Connecting, subscribing and disconnecting, without a network."""

from __future__ import annotations

import pytest

from sluice.client import Backoff
from sluice.client.errors import ClientClosed, ServerDisconnected, SubscribeRefused, Unsupported
from sluice.client.options import Options, Will
from sluice.client.protocol.client_protocol import (
    ConnectDenied,
    Connected,
    ConnectionEnded,
    State,
    SubscriptionLost,
)
from sluice.client.protocol.keepalive import KeepAlive, KeepAliveAction
from sluice.client.protocol.pending import PendingSubscription
from sluice.wire.packets import (
    V5,
    V311,
    Connack,
    Connect,
    Disconnect,
    Pingreq,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from tests.client.protocol_kit import ProtocolPair, make_properties, make_subscribe


def connect_of(pair: ProtocolPair) -> Connect:
    assert isinstance(pair.connect_packet, Connect)
    return pair.connect_packet


def test_connect_carries_every_option() -> None:
    will = Will("will/t", "gone", qos=1, retain=True, delay_seconds=7)
    will.properties = make_properties(content_type="text/plain")
    pair = ProtocolPair(
        client_id="me",
        clean_start=False,
        session_expiry=100,
        keep_alive=33,
        username="user",
        password="secret",
        will=will,
        receive_maximum=12,
        topic_alias_maximum=5,
        maximum_packet_size=5_000,
        user_properties={"team": "blue"},
    )
    pair.connect()
    sent = connect_of(pair)
    assert (sent.client_id, sent.version, sent.clean_start, sent.keep_alive) == (
        "me",
        V5,
        False,
        33,
    )
    assert (sent.username, sent.password) == ("user", b"secret")
    assert sent.properties == make_properties(
        session_expiry=100,
        receive_maximum=12,
        topic_alias_maximum=5,
        maximum_packet_size=5_000,
        user=[("team", "blue")],
    )
    assert sent.will is not None
    assert (sent.will.topic, sent.will.payload, sent.will.qos, sent.will.retain) == (
        b"will/t",
        b"gone",
        1,
        True,
    )
    assert sent.will_delay == 7
    assert sent.will.decode_properties().content_type == "text/plain"


@pytest.mark.parametrize(
    ("version", "clean_start", "clean_again"),
    [(V5, True, False), (V5, False, False), (V311, True, True), (V311, False, False)],
)
def test_reconnect_resumes_the_session(version: int, clean_start: bool, clean_again: bool) -> None:
    pair = ProtocolPair(version=version, clean_start=clean_start)
    pair.connect()
    assert connect_of(pair).clean_start is clean_start
    pair.disconnect()
    pair.connect()
    assert connect_of(pair).clean_start is clean_again


def test_assigned_client_id_is_reused() -> None:
    pair = ProtocolPair(client_id="")
    pair.connect(assigned_client_id="server-gave-this")
    pair.disconnect()
    pair.connect()
    assert connect_of(pair).client_id == "server-gave-this"


def test_server_properties_are_available() -> None:
    event = ProtocolPair().connect(
        maximum_qos=1, receive_maximum=9, retain_available=0, server_keep_alive=5
    )
    assert (event.server.maximum_qos, event.server.receive_maximum) == (1, 9)
    assert (event.server.retain_available, event.server.keep_alive) == (False, 5)
    assert event.server.shared_available


@pytest.mark.parametrize(
    ("version", "connack", "reason", "text"),
    [
        (V5, Connack(False, 0x87, make_properties(reason_string="go away")), 0x87, "go away"),
        (V311, Connack(False, 0x86), 0x86, "Check username and password"),
        (V311, Connack(False, 0x84), 0x84, "Connect with version=4"),
    ],
)
def test_refused_connection_raises_the_reason(
    version: int, connack: Connack, reason: int, text: str
) -> None:
    pair = ProtocolPair(version=version)
    pair.protocol.open()
    (event,) = pair.server_sends(connack)
    assert isinstance(event, ConnectDenied)
    assert event.error.reason == reason
    assert text in str(event.error)


def test_server_without_5_0_is_understood() -> None:
    pair = ProtocolPair(version=V5)
    pair.protocol.open()
    (event,) = pair.protocol.receive(b"\x20\x02\x00\x01")
    assert isinstance(event, ConnectDenied)
    assert event.error.reason == 0x84


@pytest.mark.parametrize(
    "packet", [Publish(b"t", b"", 0), Suback(1, [0]), Connect("x", V5, True, 0)]
)
def test_first_packet_other_than_connack_ends_the_connection(
    packet: Publish | Suback | Connect,
) -> None:
    pair = ProtocolPair()
    pair.protocol.open()
    (event,) = pair.server_sends(packet)
    assert isinstance(event, ConnectionEnded)


def test_a_second_connack_ends_the_connection() -> None:
    pair = ProtocolPair()
    pair.connect()
    (event,) = pair.server_sends(Connack(False, 0, make_properties()))
    assert isinstance(event, ConnectionEnded)
    assert pair.sent_packet(Disconnect).reason == 0x82


def test_disconnect_of_the_server_is_raised_with_its_reason() -> None:
    pair = ProtocolPair()
    pair.connect()
    (event,) = pair.server_sends(
        Disconnect(0x8B, make_properties(reason_string="maintenance")), Publish(b"t", b"", 0)
    )
    assert isinstance(event, ConnectionEnded)
    assert isinstance(event.error, ServerDisconnected)
    assert (event.error.reason, event.error.reason_string) == (0x8B, "maintenance")
    assert not event.error.final


@pytest.mark.parametrize(
    ("reason", "final"), [(0x8E, True), (0x87, True), (0x8B, False), (0x89, False)]
)
def test_only_a_reason_that_would_repeat_is_final(reason: int, final: bool) -> None:
    assert ServerDisconnected(reason, None).final is final


def test_disconnect_can_request_the_will_and_another_expiry() -> None:
    pair = ProtocolPair()
    pair.connect()
    pair.protocol.disconnect(0x04, 10)
    sent = pair.sent_packet(Disconnect)
    assert sent.reason == 0x04
    assert sent.properties == make_properties(session_expiry=10)


def test_nothing_is_published_after_disconnect() -> None:
    pair = ProtocolPair()
    pair.connect()
    pair.protocol.disconnect()
    pair.publish(0)
    assert [type(packet) for packet in pair.sent_packets()] == [Disconnect]


def test_output_wakes_its_listener_once_per_turn() -> None:
    pair = ProtocolPair()
    pair.connect()
    woken = []
    pair.protocol.write_buffer.wake = lambda: woken.append(1)
    pair.publish(0)
    pair.publish(1)
    pair.protocol.ping()
    assert len(woken) == 1
    assert [type(packet) for packet in pair.sent_packets()] == [Publish, Publish, Pingreq]
    pair.publish(0)
    assert len(woken) == 2


def test_subscribe_completes_with_its_suback() -> None:
    pair = ProtocolPair()
    pair.connect()
    asking = make_subscribe(b"a/#", b"b")
    pair.protocol.send_subscription(asking)
    sent = pair.sent_packet(Subscribe)
    pair.server_sends(
        Suback(sent.packet_id, [1, 0x87], make_properties(reason_string="b is secret"))
    )
    assert asking.done
    assert asking.reasons() == [1, 0x87]
    refusal = asking.refusal()
    assert isinstance(refusal, SubscribeRefused)
    assert (refusal.reason, refusal.reasons, refusal.reason_string) == (
        0x87,
        [1, 0x87],
        "b is secret",
    )
    assert "'b'" in str(refusal)
    assert list(pair.protocol.subscriptions) == [b"a/#"]


@pytest.mark.parametrize("version", [V311, V5])
def test_unsubscribe_completes_with_its_unsuback(version: int) -> None:
    pair = ProtocolPair(version=version)
    pair.connect()
    pair.protocol.send_subscription(make_subscribe(b"a"))
    pair.server_sends(Suback(pair.sent_packet(Subscribe).packet_id, [1]))
    asking = PendingSubscription(Unsubscribe(0, [b"a"]))
    pair.protocol.send_subscription(asking)
    pair.server_sends(Unsuback(pair.sent_packet(Unsubscribe).packet_id, [0]))
    assert asking.reasons() == [0]
    assert asking.refusal() is None
    assert pair.protocol.subscriptions == {}


def test_lost_session_is_resubscribed_with_its_properties_before_any_publish() -> None:
    pair = ProtocolPair()
    pair.connect()
    pair.protocol.send_subscription(
        make_subscribe(b"a", b"b", properties=make_properties(subscription_ids=[3]))
    )
    pair.server_sends(Suback(pair.sent_packet(Subscribe).packet_id, [1, 1]))
    pair.protocol.send_subscription(make_subscribe(b"c"))
    pair.server_sends(Suback(pair.sent_packet(Subscribe).packet_id, [0]))
    pair.publish(1)
    pair.disconnect()
    pair.connect(session_present=False)
    first, second, last = pair.sent_packets()
    assert isinstance(first, Subscribe)
    assert isinstance(second, Subscribe)
    assert isinstance(last, Publish)
    assert [request.topic_filter for request in first.requests] == [b"a", b"b"]
    assert first.properties is not None
    assert first.properties.subscription_ids == [3]
    assert [request.topic_filter for request in second.requests] == [b"c"]


def test_resumed_session_is_not_resubscribed() -> None:
    pair = ProtocolPair(session_expiry=60)
    pair.connect()
    pair.protocol.send_subscription(make_subscribe(b"a"))
    pair.server_sends(Suback(pair.sent_packet(Subscribe).packet_id, [1]))
    pair.disconnect()
    pair.connect(session_present=True)
    assert pair.sent_packets() == []


@pytest.mark.parametrize("session_present", [True, False])
def test_unanswered_subscribe_is_sent_again(session_present: bool) -> None:
    pair = ProtocolPair(session_expiry=60)
    pair.connect()
    asking = make_subscribe(b"a")
    pair.protocol.send_subscription(asking)
    pair.disconnect()
    pair.connect(session_present=session_present)
    pair.server_sends(Suback(pair.sent_packet(Subscribe).packet_id, [1]))
    assert asking.done


def test_interrupted_resubscription_is_made_once_on_the_next_connection() -> None:
    pair = ProtocolPair()
    pair.connect()
    pair.protocol.send_subscription(make_subscribe(b"a"))
    pair.server_sends(Suback(pair.sent_packet(Subscribe).packet_id, [1]))
    pair.disconnect()
    pair.connect()
    pair.disconnect()
    pair.connect()
    pair.sent_packet(Subscribe)


def test_refused_resubscription_is_reported() -> None:
    pair = ProtocolPair()
    pair.connect()
    pair.protocol.send_subscription(make_subscribe(b"a"))
    pair.server_sends(Suback(pair.sent_packet(Subscribe).packet_id, [1]))
    pair.disconnect()
    pair.connect()
    (event,) = pair.server_sends(Suback(pair.sent_packet(Subscribe).packet_id, [0x87]))
    assert isinstance(event, SubscriptionLost)
    assert event.error.reason == 0x87
    assert pair.protocol.subscriptions == {}


def test_cancelled_request_is_not_sent_on_the_next_connection() -> None:
    pair = ProtocolPair()
    pair.connect()
    pair.disconnect()
    asking = make_subscribe(b"a")
    pair.protocol.send_subscription(asking)
    pair.protocol.abandon(asking)
    pair.connect()
    assert pair.sent_packets() == []


@pytest.mark.parametrize(
    ("limit", "topic_filter", "properties", "advice"),
    [
        ({"wildcard_available": 0}, b"a/#", None, "each topic by its name"),
        ({"shared_available": 0}, b"$share/g/a", None, "without"),
        (
            {"subscription_ids_available": 0},
            b"a",
            make_properties(subscription_ids=[1]),
            "identifier out",
        ),
        ({}, b"a/#/b", None, "# must stand alone"),
        ({}, b"", None, "empty"),
    ],
)
def test_impossible_subscription_is_refused_with_a_remedy(
    limit: dict[str, object], topic_filter: bytes, properties: object, advice: str
) -> None:
    pair = ProtocolPair()
    pair.connect(False, **limit)
    with pytest.raises(Unsupported, match=advice):
        pair.protocol.send_subscription(make_subscribe(topic_filter, properties=properties))  # type: ignore[arg-type]
    assert pair.sent_packets() == []


def test_suback_with_a_wrong_number_of_filters_ends_the_connection() -> None:
    pair = ProtocolPair()
    pair.connect()
    asking = make_subscribe(b"a", b"b")
    pair.protocol.send_subscription(asking)
    (event,) = pair.server_sends(Suback(pair.sent_packet(Subscribe).packet_id, [1]))
    assert isinstance(event, ConnectionEnded)
    assert asking.error is not None


def test_protocol_failure_fails_all_waiters() -> None:
    pair = ProtocolPair()
    pair.connect(receive_maximum=1)
    asking = make_subscribe(b"a")
    pair.protocol.send_subscription(asking)
    waiting = [pair.publish(1), pair.publish(2)]
    error = ClientClosed("closed")
    pair.protocol.fail(error)
    assert [outgoing.error for outgoing in waiting] == [error, error]
    assert asking.error is error
    assert not pair.protocol.is_awaiting_answers
    assert pair.protocol.outbound.unconfirmed_bytes == 0


def test_packets_may_arrive_byte_by_byte() -> None:
    pair = ProtocolPair()
    pair.protocol.open()
    events = []
    for byte in b"\x20\x03\x00\x00\x00":
        events += pair.protocol.receive(bytes([byte]))
    assert [type(event) for event in events] == [Connected]
    assert pair.protocol.state is State.CONNECTED


@pytest.mark.parametrize(
    "options",
    [
        {"version": 3},
        {"keep_alive": 70_000},
        {"receive_maximum": 0},
        {"version": V311, "clean_start": False},
        {"version": V311, "password": "x"},
        {"max_buffered": 0},
    ],
)
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(Unsupported):
        Options(**options)  # type: ignore[arg-type]


def test_reconnect_delays_double_up_to_their_limit_with_half_jittered() -> None:
    policy = Backoff(initial_seconds=1, multiplier=2, max_seconds=5)
    assert [policy.delay(attempt, 1.0) for attempt in range(5)] == [1, 2, 4, 5, 5]
    assert [policy.delay(attempt, 0.0) for attempt in range(5)] == [0.5, 1, 2, 2.5, 2.5]
    assert policy.delay(100_000, 1.0) == 5


def test_silence_is_answered_with_a_ping_and_more_silence_ends_the_connection() -> None:
    keep_alive = KeepAlive(10, now=0)
    assert keep_alive.next_check_at() == 10
    assert keep_alive.check(9.9) is KeepAliveAction.WAIT
    assert keep_alive.check(10) is KeepAliveAction.PING
    assert keep_alive.next_check_at() == 15
    assert keep_alive.check(14.9) is KeepAliveAction.WAIT
    assert keep_alive.check(15) is KeepAliveAction.TIMED_OUT


def test_only_packets_from_the_server_count_as_alive() -> None:
    keep_alive = KeepAlive(10, now=0)
    keep_alive.check(10)
    keep_alive.on_received(11)
    keep_alive.sent_at = 10
    assert keep_alive.check(15) is KeepAliveAction.WAIT
    keep_alive.sent_at = 20  # we send and receive nothing
    assert keep_alive.check(21) is KeepAliveAction.PING


def test_client_that_does_not_read_does_not_time_out_the_server() -> None:
    keep_alive = KeepAlive(10, now=0)
    assert keep_alive.check(10) is KeepAliveAction.PING
    keep_alive.sent_at = 10
    keep_alive.reset_silence(15)
    assert keep_alive.check(15) is KeepAliveAction.WAIT
    keep_alive.reset_silence(20)
    assert keep_alive.check(20) is KeepAliveAction.PING
