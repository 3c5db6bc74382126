"""Connecting, subscribing and ending, without a network."""

from __future__ import annotations

import pytest

from sluice.client.errors import ClientClosed, ServerDisconnected, SubscribeRefused, Unsupported
from sluice.client.protocol.pending import Asking
from sluice.client.protocol.keepalive import KeepAlive, Verdict
from sluice.client.options import Backoff, Options, Will, reconnect_delay
from sluice.client.protocol.client_protocol import Connected, Ended, Refused, State, SubscriptionLost
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
from tests.client.protocol_kit import Line, make_properties, make_subscribe


def connect_of(line: Line) -> Connect:
    assert isinstance(line.connect_packet, Connect)
    return line.connect_packet


def test_connect_says_everything_it_was_told() -> None:
    will = Will("will/t", "gone", qos=1, retain=True, delay_seconds=7)
    will.properties = make_properties(content_type="text/plain")
    line = Line(
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
    line.connect()
    said = connect_of(line)
    assert (said.client_id, said.version, said.clean, said.keep_alive) == ("me", V5, False, 33)
    assert (said.username, said.password) == ("user", b"secret")
    assert said.properties == make_properties(
        session_expiry=100,
        receive_maximum=12,
        topic_alias_maximum=5,
        maximum_packet_size=5_000,
        user=[("team", "blue")],
    )
    assert said.will is not None
    assert (said.will.topic, said.will.payload, said.will.qos, said.will.retain) == (
        b"will/t",
        b"gone",
        1,
        True,
    )
    assert said.will_delay == 7
    assert said.will.properties().content_type == "text/plain"


@pytest.mark.parametrize(
    ("version", "clean_start", "clean_again"),
    [(V5, True, False), (V5, False, False), (V311, True, True), (V311, False, False)],
)
def test_a_reconnect_asks_for_the_session_it_left(version: int, clean_start: bool, clean_again: bool) -> None:
    line = Line(version=version, clean_start=clean_start)
    line.connect()
    assert connect_of(line).clean is clean_start
    line.cut()
    line.connect()
    assert connect_of(line).clean is clean_again


def test_an_assigned_client_id_is_used_again() -> None:
    line = Line(client_id="")
    line.connect(assigned_client_id="server-gave-this")
    line.cut()
    line.connect()
    assert connect_of(line).client_id == "server-gave-this"


def test_what_the_server_says_about_itself_is_known() -> None:
    event = Line().connect(maximum_qos=1, receive_maximum=9, retain_available=0, server_keep_alive=5)
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
def test_a_refused_connection_tells_why(version: int, connack: Connack, reason: int, text: str) -> None:
    line = Line(version=version)
    line.protocol.open()
    (event,) = line.say(connack)
    assert isinstance(event, Refused)
    assert event.error.reason == reason
    assert text in str(event.error)


def test_a_server_that_knows_no_5_0_is_understood() -> None:
    line = Line(version=V5)
    line.protocol.open()
    (event,) = line.protocol.receive(b"\x20\x02\x00\x01")
    assert isinstance(event, Refused)
    assert event.error.reason == 0x84


@pytest.mark.parametrize("packet", [Publish(b"t", b"", 0), Suback(1, [0]), Connect("x", V5, True, 0)])
def test_anything_but_a_connack_first_ends_the_connection(packet: Publish | Suback | Connect) -> None:
    line = Line()
    line.protocol.open()
    (event,) = line.say(packet)
    assert isinstance(event, Ended)


def test_a_second_connack_ends_the_connection() -> None:
    line = Line()
    line.connect()
    (event,) = line.say(Connack(False, 0, make_properties()))
    assert isinstance(event, Ended)
    assert line.heard_one(Disconnect).reason == 0x82


def test_a_disconnect_of_the_server_surfaces_with_its_reason() -> None:
    line = Line()
    line.connect()
    (event,) = line.say(Disconnect(0x8B, make_properties(reason_string="maintenance")), Publish(b"t", b"", 0))
    assert isinstance(event, Ended)
    assert isinstance(event.error, ServerDisconnected)
    assert (event.error.reason, event.error.reason_string) == (0x8B, "maintenance")
    assert not event.error.final


@pytest.mark.parametrize(("reason", "final"), [(0x8E, True), (0x87, True), (0x8B, False), (0x89, False)])
def test_only_a_reason_that_would_come_again_is_final(reason: int, final: bool) -> None:
    assert ServerDisconnected(reason, None).final is final


def test_goodbye_can_ask_for_the_will_and_for_another_expiry() -> None:
    line = Line()
    line.connect()
    line.protocol.disconnect(0x04, 10)
    said = line.heard_one(Disconnect)
    assert said.reason == 0x04
    assert said.properties == make_properties(session_expiry=10)


def test_nothing_is_published_behind_the_goodbye() -> None:
    line = Line()
    line.connect()
    line.protocol.disconnect()
    line.publish(0)
    assert [type(packet) for packet in line.heard()] == [Disconnect]


def test_output_wakes_its_listener_once_per_turn() -> None:
    line = Line()
    line.connect()
    woken = []
    line.protocol.output.wake = lambda: woken.append(1)
    line.publish(0)
    line.publish(1)
    line.protocol.ping()
    assert len(woken) == 1
    assert [type(packet) for packet in line.heard()] == [Publish, Publish, Pingreq]
    line.publish(0)
    assert len(woken) == 2


def test_a_subscribe_is_answered_by_its_suback() -> None:
    line = Line()
    line.connect()
    asking = make_subscribe(b"a/#", b"b")
    line.protocol.ask(asking)
    sent = line.heard_one(Subscribe)
    line.say(Suback(sent.packet_id, [1, 0x87], make_properties(reason_string="b is secret")))
    assert asking.done
    assert asking.reasons() == [1, 0x87]
    refusal = asking.refusal()
    assert isinstance(refusal, SubscribeRefused)
    assert (refusal.reason, refusal.reasons, refusal.reason_string) == (0x87, [1, 0x87], "b is secret")
    assert "'b'" in str(refusal)
    assert list(line.protocol.subscriptions) == [b"a/#"]


@pytest.mark.parametrize("version", [V311, V5])
def test_an_unsubscribe_is_answered_by_its_unsuback(version: int) -> None:
    line = Line(version=version)
    line.connect()
    line.protocol.ask(make_subscribe(b"a"))
    line.say(Suback(line.heard_one(Subscribe).packet_id, [1]))
    asking = Asking(Unsubscribe(0, [b"a"]))
    line.protocol.ask(asking)
    line.say(Unsuback(line.heard_one(Unsubscribe).packet_id, [0]))
    assert asking.reasons() == [0]
    assert asking.refusal() is None
    assert line.protocol.subscriptions == {}


def test_a_lost_session_is_subscribed_again_with_the_same_properties_and_before_anything_is_published() -> (
    None
):
    line = Line()
    line.connect()
    line.protocol.ask(make_subscribe(b"a", b"b", properties=make_properties(subscription_ids=[3])))
    line.say(Suback(line.heard_one(Subscribe).packet_id, [1, 1]))
    line.protocol.ask(make_subscribe(b"c"))
    line.say(Suback(line.heard_one(Subscribe).packet_id, [0]))
    line.publish(1)
    line.cut()
    line.connect(session_present=False)
    first, second, last = line.heard()
    assert isinstance(first, Subscribe)
    assert isinstance(second, Subscribe)
    assert isinstance(last, Publish)
    assert [request.topic_filter for request in first.requests] == [b"a", b"b"]
    assert first.properties is not None
    assert first.properties.subscription_ids == [3]
    assert [request.topic_filter for request in second.requests] == [b"c"]


def test_a_kept_session_is_not_subscribed_again() -> None:
    line = Line(session_expiry=60)
    line.connect()
    line.protocol.ask(make_subscribe(b"a"))
    line.say(Suback(line.heard_one(Subscribe).packet_id, [1]))
    line.cut()
    line.connect(session_present=True)
    assert line.heard() == []


@pytest.mark.parametrize("session_present", [True, False])
def test_an_unanswered_subscribe_is_asked_again(session_present: bool) -> None:
    line = Line(session_expiry=60)
    line.connect()
    asking = make_subscribe(b"a")
    line.protocol.ask(asking)
    line.cut()
    line.connect(session_present=session_present)
    line.say(Suback(line.heard_one(Subscribe).packet_id, [1]))
    assert asking.done


def test_a_renewal_cut_short_is_made_once_on_the_next_connection() -> None:
    line = Line()
    line.connect()
    line.protocol.ask(make_subscribe(b"a"))
    line.say(Suback(line.heard_one(Subscribe).packet_id, [1]))
    line.cut()
    line.connect()
    line.cut()
    line.connect()
    line.heard_one(Subscribe)


def test_a_renewal_that_is_refused_is_not_silent() -> None:
    line = Line()
    line.connect()
    line.protocol.ask(make_subscribe(b"a"))
    line.say(Suback(line.heard_one(Subscribe).packet_id, [1]))
    line.cut()
    line.connect()
    (event,) = line.say(Suback(line.heard_one(Subscribe).packet_id, [0x87]))
    assert isinstance(event, SubscriptionLost)
    assert event.error.reason == 0x87
    assert line.protocol.subscriptions == {}


def test_a_question_nobody_waits_for_is_not_asked_on_the_next_connection() -> None:
    line = Line()
    line.connect()
    line.cut()
    asking = make_subscribe(b"a")
    line.protocol.ask(asking)
    line.protocol.abandon(asking)
    line.connect()
    assert line.heard() == []


@pytest.mark.parametrize(
    ("limit", "topic_filter", "properties", "advice"),
    [
        ({"wildcard_available": 0}, b"a/#", None, "each topic by its name"),
        ({"shared_available": 0}, b"$share/g/a", None, "without"),
        ({"subscription_ids_available": 0}, b"a", make_properties(subscription_ids=[1]), "identifier out"),
        ({}, b"a/#/b", None, "# must stand alone"),
        ({}, b"", None, "empty"),
    ],
)
def test_a_subscription_no_answer_could_grant_is_refused_with_advice(
    limit: dict[str, object], topic_filter: bytes, properties: object, advice: str
) -> None:
    line = Line()
    line.connect(False, **limit)
    with pytest.raises(Unsupported, match=advice):
        line.protocol.ask(make_subscribe(topic_filter, properties=properties))  # type: ignore[arg-type]
    assert line.heard() == []


def test_a_suback_for_another_number_of_filters_ends_the_connection() -> None:
    line = Line()
    line.connect()
    asking = make_subscribe(b"a", b"b")
    line.protocol.ask(asking)
    (event,) = line.say(Suback(line.heard_one(Subscribe).packet_id, [1]))
    assert isinstance(event, Ended)
    assert asking.error is not None


def test_failing_the_protocol_tells_everybody_who_waits() -> None:
    line = Line()
    line.connect(receive_maximum=1)
    asking = make_subscribe(b"a")
    line.protocol.ask(asking)
    waiting = [line.publish(1), line.publish(2)]
    error = ClientClosed("closed")
    line.protocol.fail(error)
    assert [outgoing.error for outgoing in waiting] == [error, error]
    assert asking.error is error
    assert not line.protocol.awaiting
    assert line.protocol.outbox.held_bytes == 0


def test_bytes_may_arrive_one_at_a_time() -> None:
    line = Line()
    line.protocol.open()
    events = []
    for byte in b"\x20\x03\x00\x00\x00":
        events += line.protocol.receive(bytes([byte]))
    assert [type(event) for event in events] == [Connected]
    assert line.protocol.state is State.CONNECTED


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
def test_options_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(Unsupported):
        Options(**options)  # type: ignore[arg-type]


def test_reconnect_delays_double_up_to_their_limit_and_half_is_drawn_by_lot() -> None:
    policy = Backoff(initial_seconds=1, multiplier=2, max_seconds=5)
    assert [reconnect_delay(attempt, policy, 1.0) for attempt in range(5)] == [1, 2, 4, 5, 5]
    assert [reconnect_delay(attempt, policy, 0.0) for attempt in range(5)] == [0.5, 1, 2, 2.5, 2.5]
    assert reconnect_delay(100_000, policy, 1.0) == 5


def test_silence_is_answered_with_a_ping_and_more_silence_is_the_end() -> None:
    keep_alive = KeepAlive(10, now=0)
    assert keep_alive.next_look() == 10
    assert keep_alive.judge(9.9) is Verdict.FINE
    assert keep_alive.judge(10) is Verdict.PING
    assert keep_alive.next_look() == 15
    assert keep_alive.judge(14.9) is Verdict.FINE
    assert keep_alive.judge(15) is Verdict.DEAD


def test_a_server_that_answers_is_alive_and_one_that_we_only_talk_to_is_pinged() -> None:
    keep_alive = KeepAlive(10, now=0)
    keep_alive.judge(10)
    keep_alive.heard(11)
    keep_alive.sent_at = 10
    assert keep_alive.judge(15) is Verdict.FINE
    keep_alive.sent_at = 20  # we talk, nobody answers
    assert keep_alive.judge(21) is Verdict.PING


def test_a_client_that_does_not_read_does_not_blame_the_server_but_is_still_heard() -> None:
    keep_alive = KeepAlive(10, now=0)
    assert keep_alive.judge(10) is Verdict.PING
    keep_alive.sent_at = 10
    keep_alive.excuse(15)
    assert keep_alive.judge(15) is Verdict.FINE
    keep_alive.excuse(20)
    assert keep_alive.judge(20) is Verdict.PING
