"""Sessions: what outlives a connection, for how long, and which connection continues it."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V5, V311, Ack, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.broker.kit import BrokerHarness


def test_session_without_expiry_ends_with_its_connection(harness: BrokerHarness) -> None:
    client = harness.connect("a", session_expiry=0)
    client.subscribe("t")
    client.drop()
    assert harness.sessions() == set()
    assert not harness.connect("a", clean=False).connack.session_present


def test_session_exists_until_its_expiry(harness: BrokerHarness) -> None:
    harness.connect("a", session_expiry=100).drop()
    harness.advance(99)
    again = harness.connect("a", clean=False, session_expiry=100)
    assert again.connack.session_present
    again.drop()
    harness.advance(101)
    assert harness.sessions() == set()
    assert not harness.connect("a", clean=False).connack.session_present
    assert harness.counters.sessions_expired == 1


def test_expiry_of_the_last_connect_is_used(harness: BrokerHarness) -> None:
    harness.connect("a", session_expiry=10).drop()
    harness.advance(1)
    harness.connect("a", clean=False, session_expiry=1000).drop()
    harness.advance(999)
    assert harness.sessions() == {"a"}
    harness.advance(2)
    assert harness.sessions() == set()


def test_session_with_infinite_expiry_never_expires(harness: BrokerHarness) -> None:
    harness.connect("a", session_expiry=0xFFFF_FFFF).drop()
    harness.advance(100 * 365 * 86_400)
    assert harness.connect("a", clean=False).connack.session_present


def test_disconnect_may_change_the_expiry(harness: BrokerHarness) -> None:
    harness.connect("a", session_expiry=10).disconnect(session_expiry=100)
    harness.advance(50)
    harness.connect("a", clean=False, session_expiry=10).disconnect(session_expiry=0)
    assert harness.sessions() == set()


def test_disconnect_cannot_give_an_expiry_to_a_session_without(harness: BrokerHarness) -> None:
    client = harness.connect("a", session_expiry=0)
    client.disconnect(session_expiry=10)
    assert client.fault()[0] == 0x82
    assert harness.sessions() == set()


def test_3_1_1_session_is_persistent_unless_clean(harness: BrokerHarness) -> None:
    harness.connect("a", V311, clean=False).disconnect()
    harness.advance(30 * 86_400)
    assert harness.connect("a", V311, clean=False).connack.session_present
    harness.connect("b", V311, clean=True).disconnect()
    assert not harness.connect("b", V311, clean=False).connack.session_present


def test_server_may_limit_the_expiry_of_3_1_1_sessions() -> None:
    harness = BrokerHarness(max_session_expiry=60)
    harness.connect("a", V311, clean=False).disconnect()
    harness.advance(61)
    assert harness.sessions() == set()


def test_clean_start_ends_the_old_session_and_starts_a_new_one(
    harness: BrokerHarness, version: int
) -> None:
    old = harness.connect_persistent("a", version)
    old.subscribe("t", qos=1)
    old.drop()
    new = harness.connect("a", version, clean=True)
    assert not new.connack.session_present
    harness.connect("b").publish("t", b"x", 1)
    assert new.take() == []
    assert harness.broker.router.subscriptions.count == 0


def test_clean_start_is_not_counted_as_an_expired_session(harness: BrokerHarness) -> None:
    harness.connect("a", session_expiry=10).drop()
    harness.connect("a", session_expiry=0).disconnect()
    harness.advance(20)
    assert harness.counters.sessions_expired == 0


def test_second_connection_takes_over_and_the_first_gets_a_disconnect(
    harness: BrokerHarness,
) -> None:
    first = harness.connect_persistent("a")
    first.subscribe("t")
    second = harness.connect_persistent("a")
    assert first.fault()[0] == 0x8E
    assert second.connack.session_present
    harness.connect("b").publish("t", b"x")
    assert second.payloads() == [b"x"]
    assert harness.counters.clients_connected == 2


def test_3_1_1_connection_is_closed_by_takeover_without_a_packet(harness: BrokerHarness) -> None:
    first = harness.connect("a", V311, clean=False)
    harness.connect("a", V311, clean=False)
    assert first.closed
    assert first.take() == []


def test_takeover_of_a_session_without_expiry_starts_a_new_one(harness: BrokerHarness) -> None:
    first = harness.connect("a", session_expiry=0)
    first.subscribe("t")
    second = harness.connect("a", clean=False)
    assert not second.connack.session_present
    harness.connect("b").publish("t", b"x")
    assert second.take() == []


def test_takeover_resends_unacknowledged_messages(harness: BrokerHarness, version: int) -> None:
    first = harness.connect_persistent("a", version)
    first.subscribe("t", qos=1)
    harness.connect("b").publish("t", b"x", 1)
    [message] = first.messages()
    second = harness.connect_persistent("a", version)
    [again] = second.messages()
    assert (again.packet_id, again.dup, again.payload) == (message.packet_id, True, b"x")


def test_messages_are_queued_in_order_for_an_offline_client(
    harness: BrokerHarness, version: int
) -> None:
    client = harness.connect_persistent("a", version)
    client.subscribe("t/#", qos=2)
    client.disconnect()
    other = harness.connect("b")
    for nth in range(6):
        other.publish("t/x", b"%d" % nth, nth % 3)
    client = harness.connect_persistent("a", version)
    assert client.connack.session_present
    messages = client.messages()
    # QoS 0 is not queued. Messages of QoS 2 are forwarded after their commit.
    for qos, payloads in ((1, [b"1", b"4"]), (2, [b"2", b"5"])):
        assert [message.payload for message in messages if message.qos == qos] == payloads
    assert len(messages) == 4
    assert not any(message.dup for message in messages)  # never sent before: no duplicates


def test_unacknowledged_messages_are_resent_in_their_original_order(
    harness: BrokerHarness, version: int
) -> None:
    client = harness.connect_persistent("a", version)
    client.subscribe("t", qos=2)
    other = harness.connect("b")
    for nth, qos in enumerate((1, 2, 1, 2, 2)):
        other.publish("t", b"%d" % nth, qos)
    sent = client.messages()
    client.send(Ack(PUBACK, sent[0].packet_id))
    client.send(Ack(PUBREC, sent[1].packet_id))
    client.first_ack(PUBREL, int(sent[1].packet_id))
    client.drop()
    other.publish("t", b"new", 1)

    client = harness.connect_persistent("a", version)
    release, *messages = client.take()
    assert isinstance(release, Ack) and (release.kind, release.packet_id) == (
        PUBREL,
        sent[1].packet_id,
    )
    reported = [(one.payload, one.dup) for one in messages if isinstance(one, Publish)]
    assert reported == [(b"2", True), (b"3", True), (b"4", True), (b"new", False)]
    assert [one.packet_id for one in messages if isinstance(one, Publish)][:3] == [
        one.packet_id for one in sent[2:]
    ]


def test_acknowledgement_for_the_old_connection_may_arrive_on_the_new_one(
    harness: BrokerHarness,
) -> None:
    client = harness.connect_persistent("a")
    client.subscribe("t", qos=1)
    harness.connect("b").publish("t", b"x", 1)
    [message] = client.messages()
    client.drop()
    client = harness.connect_persistent("a")
    client.take()
    client.send(Ack(PUBACK, message.packet_id), Ack(PUBACK, message.packet_id))
    client.ping()
    client.drop()
    assert harness.connect_persistent("a").take() == []


def test_qos_2_publish_is_forwarded_once_across_connections(
    harness: BrokerHarness, version: int
) -> None:
    other = harness.connect("b")
    other.subscribe("t", qos=2)
    client = harness.connect_persistent("a", version)
    client.publish("t", b"x", 2, packet_id=7)
    client.drop()
    client = harness.connect_persistent("a", version)
    client.publish("t", b"x", 2, packet_id=7, dup=True)
    client.first_ack(PUBREC, 7, 0)
    client.send(Ack(PUBREL, 7))
    client.first_ack(PUBCOMP, 7, 0)
    assert other.payloads() == [b"x"]


def test_session_may_be_resumed_with_another_protocol_version(harness: BrokerHarness) -> None:
    client = harness.connect_persistent("a", V5)
    client.subscribe("t", qos=1, identifier=5)
    client.drop()
    harness.connect("b").publish("t", b"x", 1, user=[("k", "v")], message_expiry=100)
    client = harness.connect_persistent("a", V311)
    assert client.connack.session_present
    [message] = client.messages()
    assert (message.topic, message.payload, message.raw_properties) == (b"t", b"x", b"")
    client = harness.connect_persistent("a", V5)
    [message] = client.messages()
    assert message.dup
    assert message.decode_properties().user == [("k", "v")]
    assert message.decode_properties().subscription_ids == [5]


def test_subscriptions_survive_with_their_options(harness: BrokerHarness) -> None:
    client = harness.connect_persistent("a")
    client.subscribe("t", qos=1, no_local=True, identifier=9)
    client.disconnect()
    client = harness.connect_persistent("a")
    client.publish("t", b"own", 0)
    harness.connect("b").publish("t", b"other", 1)
    [message] = client.messages()
    assert (message.payload, message.subscription_ids) == (b"other", [9])


@pytest.mark.parametrize("members", [1, 3])
def test_ended_sessions_leave_nothing_behind(harness: BrokerHarness, members: int) -> None:
    for nth in range(members):
        client = harness.connect(f"c{nth}")
        client.subscribe("a/+/c", "x", "$share/g/y", "$share/g/z/#", qos=1)
        harness.connect("b").publish("x", b"x", 1)
        client.drop()
    subscriptions = harness.broker.router.subscriptions
    assert (subscriptions.count, subscriptions.shared_count) == (0, 0)
    assert harness.sessions() == {"b"}
