"""The scenarios by which brokers are usually compared, from beginning to end.

Each rule in them has a test of its own elsewhere. Here they follow one another as a client
experiences them, in both versions of the protocol where both have them.
"""

from __future__ import annotations

from typing import Any

import pytest

from sluice.wire.packets import V5, V311, Ack, Connack, Connect, Publish
from sluice.wire.properties import PUBACK, PUBREC, PUBREL
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client, props, will

TOPICS = ("TopicA", "TopicA/B", "Topic/C", "TopicA/C", "/TopicA")


def publish_at_each_qos(
    client: Client, topics: tuple[str, str, str], payload: bytes, retain: bool
) -> None:
    for qos, topic in enumerate(topics):
        client.publish_fully(topic, payload, qos, retain)


def test_connect_publish_at_each_qos_and_disconnect(harness: BrokerHarness, version: int) -> None:
    harness.connect("a", version).disconnect()
    client = harness.connect("a", version)
    assert not client.connack.session_present
    client.subscribe(TOPICS[0], qos=2)
    for qos in range(3):
        client.publish(TOPICS[0], b"qos %d" % qos, qos)
    arrived = [packet for packet in client.take() if isinstance(packet, Publish)]
    assert [(one.qos, one.payload) for one in arrived] == [
        (0, b"qos 0"),
        (1, b"qos 1"),
        (2, b"qos 2"),
    ]
    client.send(Connect("a", version, True, 0))
    assert client.closed


def test_wrong_protocol_name_is_refused(harness: BrokerHarness) -> None:
    peer = harness.open()
    peer.version = V311
    peer.feed(b"\x10\x0b\x00\x02hj\x04\x02\x00\x3c\x00\x01a")
    assert peer.only(Connack).reason == 1
    assert peer.closed


def test_retained_messages_are_stored_and_cleared(harness: BrokerHarness, version: int) -> None:
    client = harness.connect("a", version)
    publish_at_each_qos(client, TOPICS[1:4], b"kept", retain=True)
    client.subscribe("+/+", qos=2)
    assert sorted(message.qos for message in client.messages()) == [0, 1, 2]
    client.disconnect()
    client = harness.connect("a", version)
    publish_at_each_qos(client, TOPICS[1:4], b"", retain=True)
    client.subscribe("+/+", qos=2)
    assert client.take() == []


def test_will_is_received_after_the_connection_breaks(harness: BrokerHarness, version: int) -> None:
    client = harness.connect(
        "a", version, keep_alive=2, will=will(TOPICS[2], b"client not disconnected")
    )
    will_subscriber = harness.connect("b", version, clean=False)
    will_subscriber.subscribe(TOPICS[2], qos=2)
    client.drop()
    assert will_subscriber.payloads() == [b"client not disconnected"]


def test_client_without_id(harness: BrokerHarness) -> None:
    assert harness.connect("", V311, clean=False).connack.reason == 2
    assert harness.connect("", V311, clean=True).connack.reason == 0
    for clean in (False, True):
        connack = harness.connect("", V5, clean=clean).connack
        assert connack.reason == 0
        assert connack.properties is not None and connack.properties.assigned_client_id


def test_messages_are_queued_for_an_offline_client(harness: BrokerHarness, version: int) -> None:
    client = harness.connect_persistent("a", version)
    client.subscribe("+/+", qos=2)
    client.disconnect()
    publish_at_each_qos(harness.connect("b", version), TOPICS[1:4], b"waiting", retain=False)
    client = harness.connect_persistent("a", version)
    assert client.connack.session_present
    assert sorted(message.qos for message in client.messages()) == [1, 2]


def test_overlapping_subscriptions(harness: BrokerHarness, version: int) -> None:
    client = harness.connect("a", version)
    client.subscribe("TopicA/#", qos=2)
    client.subscribe("TopicA/+", qos=1)
    client.publish_fully(TOPICS[3], b"overlapping", 2)
    [message] = client.messages()
    assert message.qos == 2


def test_keep_alive_and_will(harness: BrokerHarness, version: int) -> None:
    harness.connect("a", version, keep_alive=5, will=will(TOPICS[4], b"keepalive expiry"))
    will_subscriber = harness.connect("b", version)
    will_subscriber.subscribe(TOPICS[4], qos=2)
    harness.advance(15)
    assert will_subscriber.payloads() == [b"keepalive expiry"]


def test_unacknowledged_messages_are_resent_after_reconnect(
    harness: BrokerHarness, version: int
) -> None:
    client = harness.connect_persistent("b", version)
    client.subscribe("TopicA/#", qos=2)
    client.publish(TOPICS[1], b"1", 1)
    client.publish(TOPICS[3], b"2", 2)
    client.take()  # received, and not acknowledged
    client.disconnect()
    client = harness.connect_persistent("b", version)
    first, second = client.messages()
    assert (first.payload, second.payload, first.dup, second.dup) == (b"1", b"2", True, True)
    client.ack(first)
    client.ack(second)
    client.disconnect()
    assert harness.connect_persistent("b", version).take() == []


def test_forbidden_filter_is_refused(version: int) -> None:
    harness = BrokerHarness(refused_filters=[b"test/nosubscribe"])
    assert harness.connect("a", version).subscribe("test/nosubscribe", qos=2) == [0x80]


def test_dollar_topics_do_not_match_wildcards(harness: BrokerHarness, version: int) -> None:
    client = harness.connect("b", version)
    client.subscribe("+/+", qos=2)
    client.publish_fully("$" + TOPICS[1], b"", 1)
    assert client.take() == []


def test_unsubscribe(harness: BrokerHarness, version: int) -> None:
    client = harness.connect("b", version)
    for topic in TOPICS[:3]:
        client.subscribe(topic, qos=2)
    client.unsubscribe(TOPICS[0])
    writer = harness.connect("a", version)
    for topic in TOPICS[:3]:
        writer.publish(topic, topic.encode(), 1)
    assert client.payloads() == [TOPICS[1].encode(), TOPICS[2].encode()]


# ---- MQTT 5.0 only


def test_session_expiry(harness: BrokerHarness) -> None:
    harness.connect("a", session_expiry=0).disconnect()
    assert not harness.connect("a", clean=False, session_expiry=5).connack.session_present
    harness.connect("a", clean=False, session_expiry=5).disconnect()
    harness.advance(2)
    client = harness.connect("a", clean=False, session_expiry=5)
    assert client.connack.session_present
    client.disconnect()
    harness.advance(6)
    client = harness.connect("a", clean=False, session_expiry=1)
    assert not client.connack.session_present
    client.disconnect(session_expiry=5)
    harness.advance(3)
    client = harness.connect("a", clean=False, session_expiry=1)
    assert client.connack.session_present
    client.disconnect(session_expiry=0)
    assert not harness.connect("a", clean=False).connack.session_present


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_user_properties_payload_format_and_content_type(harness: BrokerHarness, qos: int) -> None:
    reported: dict[str, Any] = {
        "user": [("a", "2"), ("c", "3")],
        "payload_format": 1,
        "content_type": "My name",
    }
    client = harness.connect("a")
    client.subscribe(TOPICS[0], qos=2)
    client.publish(TOPICS[0], b"", qos, **reported)
    assert client.first(Publish).decode_properties() == props(**reported)


def test_messages_expire_while_queued(harness: BrokerHarness) -> None:
    client = harness.connect("b", session_expiry=99_999)
    client.subscribe(TOPICS[0], qos=2)
    client.disconnect(session_expiry=999_999_999)
    writer = harness.connect("a")
    for expiry in (1, 6):
        for qos in (1, 2):
            writer.publish(TOPICS[0], b"%d" % expiry, qos, message_expiry=expiry)
    harness.advance(3)
    client = harness.connect("b", clean=False)
    assert [(one.payload, one.qos, one.expiry_seconds) for one in client.messages()] == [
        (b"6", 1, 3),
        (b"6", 2, 3),
    ]


def test_subscribe_options(harness: BrokerHarness) -> None:
    one, other = harness.connect("a"), harness.connect("b")
    for client in (one, other):
        client.subscribe(TOPICS[0], qos=2, no_local=True)
    one.publish_fully(TOPICS[0], b"noLocal", 1)
    assert (one.take(), other.payloads()) == ([], [b"noLocal"])
    one.subscribe(TOPICS[0], qos=2, as_published=True)
    for retain in (False, True):
        one.publish_fully(TOPICS[0], b"x", 1, retain)
    assert [message.retain for message in one.messages()] == [False, True]


def test_topic_aliases_from_the_client(harness: BrokerHarness) -> None:
    client = harness.connect("a", session_expiry=99_999)
    client.subscribe(TOPICS[0], qos=2)
    client.publish(TOPICS[0], b"1", 1, topic_alias=1)
    client.publish("", b"2", 1, topic_alias=1)
    assert [one.topic for one in client.take() if isinstance(one, Publish)] == [
        TOPICS[0].encode()
    ] * 2
    client.disconnect()
    client = harness.connect("a", clean=False)
    client.take()
    client.publish("", b"4", 1, topic_alias=1)
    assert client.fault()[0] in (0x82, 0x94)


def test_topic_aliases_from_the_server(harness: BrokerHarness) -> None:
    for maximum, reported in ((1, [(b"TopicA", 1), (b"", 1), (b"", 1)]), (0, [(b"TopicA", 0)] * 3)):
        client = harness.connect("a", topic_alias_maximum=maximum)
        client.subscribe(TOPICS[0], qos=2)
        for qos in range(3):
            client.publish(TOPICS[0], b"x", qos)
        assert [
            (one.topic, one.topic_alias) for one in client.take() if isinstance(one, Publish)
        ] == reported


def test_maximum_packet_size(harness: BrokerHarness) -> None:
    client = harness.connect("a", maximum_packet_size=64)
    client.subscribe(TOPICS[0], qos=2)
    client.publish(TOPICS[0], b"." * 32)
    client.publish(TOPICS[0], b"." * 64, 1)
    arrived = client.take()
    assert [len(one.payload) for one in arrived if isinstance(one, Publish)] == [32]
    client.ping()


def test_server_keep_alive() -> None:
    connack = BrokerHarness(max_keep_alive=60).connect("a", keep_alive=120).connack
    assert connack.properties is not None and connack.properties.server_keep_alive == 60


def test_receive_maximum_of_the_client(harness: BrokerHarness) -> None:
    client = harness.connect("a", receive_maximum=2)
    client.subscribe(TOPICS[0], qos=2)
    for nth in range(3):
        client.publish(TOPICS[0], b"%d" % nth, 1)
    packets = client.take()
    assert len([one for one in packets if isinstance(one, Ack)]) == 3
    first, second = (one for one in packets if isinstance(one, Publish))
    client.send(Ack(PUBACK, first.packet_id))
    [third] = client.messages()
    client.send(Ack(PUBACK, second.packet_id), Ack(PUBACK, third.packet_id))
    assert client.take() == []


def test_receive_maximum_of_the_server(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    assert client.connack.properties is not None and client.connack.properties.receive_maximum
    for _ in range(client.connack.properties.receive_maximum):
        client.publish(TOPICS[0], b"", 2)
    assert not client.closed
    client.publish(TOPICS[0], b"", 2)
    assert client.fault()[0] == 0x93


@pytest.mark.parametrize(("delay", "expiry", "received_after"), [(3, 5, 3), (5, 0, 0), (5, 2, 2)])
def test_will_delay(harness: BrokerHarness, delay: int, expiry: int, received_after: int) -> None:
    client = harness.connect("a", will=will(TOPICS[0]), will_delay=delay, session_expiry=expiry)
    will_subscriber = harness.connect("b")
    will_subscriber.subscribe(TOPICS[0], qos=2)
    client.drop()
    if received_after:
        harness.advance(received_after - 0.1)
        assert will_subscriber.take() == []
        harness.advance(0.2)
    assert will_subscriber.payloads() == [b"gone"]


def test_shared_subscriptions(harness: BrokerHarness) -> None:
    one, other = harness.connect("a"), harness.connect("b")
    for client in (one, other):
        client.subscribe("$share/sharename/x", TOPICS[0], qos=2)
    other.publish(TOPICS[0], b"to both")
    other.publish("x", b"to one")
    assert sorted(one.payloads() + other.payloads()) == [b"to both", b"to both", b"to one"]


def test_qos_2_exchange_may_be_interrupted_at_each_step(
    harness: BrokerHarness, version: int
) -> None:
    client = harness.connect_persistent("a", version)
    client.subscribe("t", qos=2)
    harness.connect("b").publish("t", b"x", 2)
    [message] = client.messages()
    packet_id = int(message.packet_id)
    client.drop()
    client = harness.connect_persistent("a", version)  # before PUBREC: the message is resent
    assert client.messages()[0].dup
    client.send(Ack(PUBREC, packet_id))
    client.drop()
    client = harness.connect_persistent("a", version)  # before PUBCOMP: the PUBREL is resent
    release = client.only(Ack)
    assert (release.kind, release.packet_id) == (PUBREL, packet_id)
    client.ack(message)
    client.drop()
    assert harness.connect_persistent("a", version).take() == []
