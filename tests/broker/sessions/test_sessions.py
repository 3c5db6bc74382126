"""Sessions: what outlives a connection, for how long, and who goes on with it."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V5, V311, Ack, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.broker.kit import House


def test_a_session_without_expiry_ends_with_its_connection(house: House) -> None:
    client = house.connect("a", session_expiry=0)
    client.subscribe("t")
    client.drop()
    assert house.sessions() == set()
    assert not house.connect("a", clean=False).connack.session_present


def test_a_session_is_there_until_its_expiry_and_not_after(house: House) -> None:
    house.connect("a", session_expiry=100).drop()
    house.advance(99)
    again = house.connect("a", clean=False, session_expiry=100)
    assert again.connack.session_present
    again.drop()
    house.advance(101)
    assert house.sessions() == set()
    assert not house.connect("a", clean=False).connack.session_present
    assert house.counters.sessions_expired == 1


def test_the_expiry_of_the_last_connect_is_the_one_that_counts(house: House) -> None:
    house.connect("a", session_expiry=10).drop()
    house.advance(1)
    house.connect("a", clean=False, session_expiry=1000).drop()
    house.advance(999)
    assert house.sessions() == {"a"}
    house.advance(2)
    assert house.sessions() == set()


def test_a_session_that_never_expires_does_not(house: House) -> None:
    house.connect("a", session_expiry=0xFFFF_FFFF).drop()
    house.advance(100 * 365 * 86_400)
    assert house.connect("a", clean=False).connack.session_present


def test_disconnect_may_change_the_expiry(house: House) -> None:
    house.connect("a", session_expiry=10).disconnect(session_expiry=100)
    house.advance(50)
    house.connect("a", clean=False, session_expiry=10).disconnect(session_expiry=0)
    assert house.sessions() == set()


def test_disconnect_may_not_give_an_expiry_to_a_session_that_had_none(house: House) -> None:
    client = house.connect("a", session_expiry=0)
    client.disconnect(session_expiry=10)
    assert client.fault()[0] == 0x82
    assert house.sessions() == set()


def test_a_3_1_1_session_lasts_unless_it_was_clean(house: House) -> None:
    house.connect("a", V311, clean=False).disconnect()
    house.advance(30 * 86_400)
    assert house.connect("a", V311, clean=False).connack.session_present
    house.connect("b", V311, clean=True).disconnect()
    assert not house.connect("b", V311, clean=False).connack.session_present


def test_the_server_may_limit_how_long_3_1_1_sessions_last() -> None:
    house = House(max_session_expiry=60)
    house.connect("a", V311, clean=False).disconnect()
    house.advance(61)
    assert house.sessions() == set()


def test_clean_start_ends_the_old_session_and_begins_another(house: House, version: int) -> None:
    old = house.connect_lasting("a", version)
    old.subscribe("t", qos=1)
    old.drop()
    new = house.connect("a", version, clean=True)
    assert not new.connack.session_present
    house.connect("b").publish("t", b"x", 1)
    assert new.take() == []
    assert house.broker.router.subscriptions.count == 0


def test_a_clean_start_is_not_counted_as_an_expired_session(house: House) -> None:
    house.connect("a", session_expiry=10).drop()
    house.connect("a", session_expiry=0).disconnect()
    house.advance(20)
    assert house.counters.sessions_expired == 0


def test_a_second_connection_takes_over_and_the_first_is_told(house: House) -> None:
    first = house.connect_lasting("a")
    first.subscribe("t")
    second = house.connect_lasting("a")
    assert first.fault()[0] == 0x8E
    assert second.connack.session_present
    house.connect("b").publish("t", b"x")
    assert second.payloads() == [b"x"]
    assert house.counters.clients_connected == 2


def test_a_3_1_1_connection_that_is_taken_over_is_just_closed(house: House) -> None:
    first = house.connect("a", V311, clean=False)
    house.connect("a", V311, clean=False)
    assert first.closed
    assert first.take() == []


def test_taking_over_a_session_without_expiry_begins_a_new_one(house: House) -> None:
    first = house.connect("a", session_expiry=0)
    first.subscribe("t")
    second = house.connect("a", clean=False)
    assert not second.connack.session_present
    house.connect("b").publish("t", b"x")
    assert second.take() == []


def test_a_takeover_carries_on_what_was_not_acknowledged(house: House, version: int) -> None:
    first = house.connect_lasting("a", version)
    first.subscribe("t", qos=1)
    house.connect("b").publish("t", b"x", 1)
    [message] = first.messages()
    second = house.connect_lasting("a", version)
    [again] = second.messages()
    assert (again.packet_id, again.dup, again.payload) == (message.packet_id, True, b"x")


def test_messages_wait_for_a_client_that_is_away_in_their_order(house: House, version: int) -> None:
    client = house.connect_lasting("a", version)
    client.subscribe("t/#", qos=2)
    client.disconnect()
    other = house.connect("b")
    for nth in range(6):
        other.publish("t/x", b"%d" % nth, nth % 3)
    client = house.connect_lasting("a", version)
    assert client.connack.session_present
    messages = client.messages()
    assert [message.payload for message in messages] == [b"1", b"2", b"4", b"5"]  # QoS 0 does not wait
    assert [message.qos for message in messages] == [1, 2, 1, 2]
    assert not any(message.dup for message in messages)  # never sent before: no duplicates


def test_everything_unacknowledged_is_said_again_in_the_order_it_was_first_said(
    house: House, version: int
) -> None:
    client = house.connect_lasting("a", version)
    client.subscribe("t", qos=2)
    other = house.connect("b")
    for nth, qos in enumerate((1, 2, 1, 2, 2)):
        other.publish("t", b"%d" % nth, qos)
    sent = client.messages()
    client.send(Ack(PUBACK, sent[0].packet_id))
    client.send(Ack(PUBREC, sent[1].packet_id))
    client.first_ack(PUBREL, int(sent[1].packet_id))
    client.drop()
    other.publish("t", b"new", 1)

    client = house.connect_lasting("a", version)
    release, *messages = client.take()
    assert isinstance(release, Ack) and (release.kind, release.packet_id) == (PUBREL, sent[1].packet_id)
    told = [(one.payload, one.dup) for one in messages if isinstance(one, Publish)]
    assert told == [(b"2", True), (b"3", True), (b"4", True), (b"new", False)]
    assert [one.packet_id for one in messages if isinstance(one, Publish)][:3] == [
        one.packet_id for one in sent[2:]
    ]


def test_an_acknowledgement_from_the_old_connection_may_come_on_the_new_one(house: House) -> None:
    client = house.connect_lasting("a")
    client.subscribe("t", qos=1)
    house.connect("b").publish("t", b"x", 1)
    [message] = client.messages()
    client.drop()
    client = house.connect_lasting("a")
    client.take()
    client.send(Ack(PUBACK, message.packet_id), Ack(PUBACK, message.packet_id))
    client.ping()
    client.drop()
    assert house.connect_lasting("a").take() == []


def test_a_qos_2_publish_is_passed_on_once_across_connections(house: House, version: int) -> None:
    other = house.connect("b")
    other.subscribe("t", qos=2)
    client = house.connect_lasting("a", version)
    client.publish("t", b"x", 2, packet_id=7)
    client.drop()
    client = house.connect_lasting("a", version)
    client.publish("t", b"x", 2, packet_id=7, dup=True)
    client.first_ack(PUBREC, 7, 0)
    client.send(Ack(PUBREL, 7))
    client.first_ack(PUBCOMP, 7, 0)
    assert other.payloads() == [b"x"]


def test_a_session_may_go_on_in_another_version_of_the_protocol(house: House) -> None:
    client = house.connect_lasting("a", V5)
    client.subscribe("t", qos=1, identifier=5)
    client.drop()
    house.connect("b").publish("t", b"x", 1, user=[("k", "v")], message_expiry=100)
    client = house.connect_lasting("a", V311)
    assert client.connack.session_present
    [message] = client.messages()
    assert (message.topic, message.payload, message.raw) == (b"t", b"x", b"")
    client = house.connect_lasting("a", V5)
    [message] = client.messages()
    assert message.dup
    assert message.properties().user == [("k", "v")]
    assert message.properties().subscription_ids == [5]


def test_subscriptions_survive_and_keep_their_options(house: House) -> None:
    client = house.connect_lasting("a")
    client.subscribe("t", qos=1, no_local=True, identifier=9)
    client.disconnect()
    client = house.connect_lasting("a")
    client.publish("t", b"own", 0)
    house.connect("b").publish("t", b"other", 1)
    [message] = client.messages()
    assert (message.payload, message.subscription_ids) == (b"other", [9])


@pytest.mark.parametrize("members", [1, 3])
def test_nothing_is_left_of_sessions_that_have_ended(house: House, members: int) -> None:
    for nth in range(members):
        client = house.connect(f"c{nth}")
        client.subscribe("a/+/c", "x", "$share/g/y", "$share/g/z/#", qos=1)
        house.connect("b").publish("x", b"x", 1)
        client.drop()
    subscriptions = house.broker.router.subscriptions
    assert (subscriptions.count, subscriptions.shared_count) == (0, 0)
    assert house.sessions() == {"b"}
