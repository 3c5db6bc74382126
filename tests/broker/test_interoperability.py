"""The scenarios by which brokers are compared with one another, told from beginning to end.

Each rule in them has a test of its own elsewhere; here they follow one another as a client meets them, in both
versions of the protocol where both have them.
"""

from __future__ import annotations

from typing import Any

import pytest

from sluice.wire.packets import V5, V311, Ack, Connack, Connect, Publish
from sluice.wire.properties import PUBACK, PUBREC, PUBREL
from tests.broker.kit import Client, House, props, will

TOPICS = ("TopicA", "TopicA/B", "Topic/C", "TopicA/C", "/TopicA")


def speak_at_each_qos(client: Client, topics: tuple[str, str, str], payload: bytes, retain: bool) -> None:
    for qos, topic in enumerate(topics):
        client.publish_fully(topic, payload, qos, retain)


def test_connect_publish_at_each_qos_and_disconnect(house: House, version: int) -> None:
    house.connect("a", version).disconnect()
    client = house.connect("a", version)
    assert not client.connack.session_present
    client.subscribe(TOPICS[0], qos=2)
    for qos in range(3):
        client.publish(TOPICS[0], b"qos %d" % qos, qos)
    arrived = [packet for packet in client.take() if isinstance(packet, Publish)]
    assert [(one.qos, one.payload) for one in arrived] == [(0, b"qos 0"), (1, b"qos 1"), (2, b"qos 2")]
    client.send(Connect("a", version, True, 0))
    assert client.closed


def test_a_wrong_protocol_name_is_no_connection(house: House) -> None:
    peer = house.open()
    peer.version = V311
    peer.feed(b"\x10\x0b\x00\x02hj\x04\x02\x00\x3c\x00\x01a")
    assert peer.only(Connack).reason == 1
    assert peer.closed


def test_retained_messages_are_kept_and_cleared(house: House, version: int) -> None:
    client = house.connect("a", version)
    speak_at_each_qos(client, TOPICS[1:4], b"kept", retain=True)
    client.subscribe("+/+", qos=2)
    assert sorted(message.qos for message in client.messages()) == [0, 1, 2]
    client.disconnect()
    client = house.connect("a", version)
    speak_at_each_qos(client, TOPICS[1:4], b"", retain=True)
    client.subscribe("+/+", qos=2)
    assert client.take() == []


def test_a_will_is_heard_after_the_line_breaks(house: House, version: int) -> None:
    client = house.connect("a", version, keep_alive=2, will=will(TOPICS[2], b"client not disconnected"))
    heir = house.connect("b", version, clean=False)
    heir.subscribe(TOPICS[2], qos=2)
    client.drop()
    assert heir.payloads() == [b"client not disconnected"]


def test_a_client_without_a_name(house: House) -> None:
    assert house.connect("", V311, clean=False).connack.reason == 2
    assert house.connect("", V311, clean=True).connack.reason == 0
    for clean in (False, True):
        connack = house.connect("", V5, clean=clean).connack
        assert connack.reason == 0
        assert connack.properties is not None and connack.properties.assigned_client_id


def test_messages_wait_for_a_client_that_is_away(house: House, version: int) -> None:
    client = house.connect_lasting("a", version)
    client.subscribe("+/+", qos=2)
    client.disconnect()
    speak_at_each_qos(house.connect("b", version), TOPICS[1:4], b"waiting", retain=False)
    client = house.connect_lasting("a", version)
    assert client.connack.session_present
    assert sorted(message.qos for message in client.messages()) == [1, 2]


def test_overlapping_subscriptions(house: House, version: int) -> None:
    client = house.connect("a", version)
    client.subscribe("TopicA/#", qos=2)
    client.subscribe("TopicA/+", qos=1)
    client.publish_fully(TOPICS[3], b"overlapping", 2)
    [message] = client.messages()
    assert message.qos == 2


def test_keep_alive_and_will(house: House, version: int) -> None:
    house.connect("a", version, keep_alive=5, will=will(TOPICS[4], b"keepalive expiry"))
    heir = house.connect("b", version)
    heir.subscribe(TOPICS[4], qos=2)
    house.advance(15)
    assert heir.payloads() == [b"keepalive expiry"]


def test_what_was_not_answered_is_said_again_after_a_reconnect(house: House, version: int) -> None:
    client = house.connect_lasting("b", version)
    client.subscribe("TopicA/#", qos=2)
    client.publish(TOPICS[1], b"1", 1)
    client.publish(TOPICS[3], b"2", 2)
    client.take()  # read, and not answered
    client.disconnect()
    client = house.connect_lasting("b", version)
    first, second = client.messages()
    assert (first.payload, second.payload, first.dup, second.dup) == (b"1", b"2", True, True)
    client.ack(first)
    client.ack(second)
    client.disconnect()
    assert house.connect_lasting("b", version).take() == []


def test_a_filter_that_nobody_may_subscribe_to(version: int) -> None:
    house = House(refused_filters=[b"test/nosubscribe"])
    assert house.connect("a", version).subscribe("test/nosubscribe", qos=2) == [0x80]


def test_dollar_topics_are_not_for_wildcards(house: House, version: int) -> None:
    client = house.connect("b", version)
    client.subscribe("+/+", qos=2)
    client.publish_fully("$" + TOPICS[1], b"", 1)
    assert client.take() == []


def test_unsubscribe(house: House, version: int) -> None:
    client = house.connect("b", version)
    for topic in TOPICS[:3]:
        client.subscribe(topic, qos=2)
    client.unsubscribe(TOPICS[0])
    writer = house.connect("a", version)
    for topic in TOPICS[:3]:
        writer.publish(topic, topic.encode(), 1)
    assert client.payloads() == [TOPICS[1].encode(), TOPICS[2].encode()]


# ---- 5.0 alone


def test_session_expiry(house: House) -> None:
    house.connect("a", session_expiry=0).disconnect()
    assert not house.connect("a", clean=False, session_expiry=5).connack.session_present
    house.connect("a", clean=False, session_expiry=5).disconnect()
    house.advance(2)
    client = house.connect("a", clean=False, session_expiry=5)
    assert client.connack.session_present
    client.disconnect()
    house.advance(6)
    client = house.connect("a", clean=False, session_expiry=1)
    assert not client.connack.session_present
    client.disconnect(session_expiry=5)
    house.advance(3)
    client = house.connect("a", clean=False, session_expiry=1)
    assert client.connack.session_present
    client.disconnect(session_expiry=0)
    assert not house.connect("a", clean=False).connack.session_present


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_user_properties_payload_format_and_content_type(house: House, qos: int) -> None:
    told: dict[str, Any] = {"user": [("a", "2"), ("c", "3")], "payload_format": 1, "content_type": "My name"}
    client = house.connect("a")
    client.subscribe(TOPICS[0], qos=2)
    client.publish(TOPICS[0], b"", qos, **told)
    assert client.first(Publish).properties() == props(**told)


def test_messages_expire_while_they_wait(house: House) -> None:
    client = house.connect("b", session_expiry=99_999)
    client.subscribe(TOPICS[0], qos=2)
    client.disconnect(session_expiry=999_999_999)
    writer = house.connect("a")
    for expiry in (1, 6):
        for qos in (1, 2):
            writer.publish(TOPICS[0], b"%d" % expiry, qos, message_expiry=expiry)
    house.advance(3)
    client = house.connect("b", clean=False)
    assert [(one.payload, one.qos, one.expiry) for one in client.messages()] == [(b"6", 1, 3), (b"6", 2, 3)]


def test_subscribe_options(house: House) -> None:
    one, other = house.connect("a"), house.connect("b")
    for client in (one, other):
        client.subscribe(TOPICS[0], qos=2, no_local=True)
    one.publish_fully(TOPICS[0], b"noLocal", 1)
    assert (one.take(), other.payloads()) == ([], [b"noLocal"])
    one.subscribe(TOPICS[0], qos=2, as_published=True)
    for retain in (False, True):
        one.publish_fully(TOPICS[0], b"x", 1, retain)
    assert [message.retain for message in one.messages()] == [False, True]


def test_aliases_from_the_client(house: House) -> None:
    client = house.connect("a", session_expiry=99_999)
    client.subscribe(TOPICS[0], qos=2)
    client.publish(TOPICS[0], b"1", 1, topic_alias=1)
    client.publish("", b"2", 1, topic_alias=1)
    assert [one.topic for one in client.take() if isinstance(one, Publish)] == [TOPICS[0].encode()] * 2
    client.disconnect()
    client = house.connect("a", clean=False)
    client.take()
    client.publish("", b"4", 1, topic_alias=1)
    assert client.fault()[0] in (0x82, 0x94)


def test_aliases_from_the_server(house: House) -> None:
    for maximum, told in ((1, [(b"TopicA", 1), (b"", 1), (b"", 1)]), (0, [(b"TopicA", 0)] * 3)):
        client = house.connect("a", topic_alias_maximum=maximum)
        client.subscribe(TOPICS[0], qos=2)
        for qos in range(3):
            client.publish(TOPICS[0], b"x", qos)
        assert [(one.topic, one.alias) for one in client.take() if isinstance(one, Publish)] == told


def test_maximum_packet_size(house: House) -> None:
    client = house.connect("a", maximum_packet_size=64)
    client.subscribe(TOPICS[0], qos=2)
    client.publish(TOPICS[0], b"." * 32)
    client.publish(TOPICS[0], b"." * 64, 1)
    arrived = client.take()
    assert [len(one.payload) for one in arrived if isinstance(one, Publish)] == [32]
    client.ping()


def test_server_keep_alive() -> None:
    connack = House(max_keep_alive=60).connect("a", keep_alive=120).connack
    assert connack.properties is not None and connack.properties.server_keep_alive == 60


def test_flow_control_towards_the_client(house: House) -> None:
    client = house.connect("a", receive_maximum=2)
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


def test_flow_control_towards_the_server(house: House) -> None:
    client = house.connect("a")
    assert client.connack.properties is not None and client.connack.properties.receive_maximum
    for _ in range(client.connack.properties.receive_maximum):
        client.publish(TOPICS[0], b"", 2)
    assert not client.closed
    client.publish(TOPICS[0], b"", 2)
    assert client.fault()[0] == 0x93


@pytest.mark.parametrize(("delay", "expiry", "heard_after"), [(3, 5, 3), (5, 0, 0), (5, 2, 2)])
def test_will_delay(house: House, delay: int, expiry: int, heard_after: int) -> None:
    client = house.connect("a", will=will(TOPICS[0]), will_delay=delay, session_expiry=expiry)
    heir = house.connect("b")
    heir.subscribe(TOPICS[0], qos=2)
    client.drop()
    if heard_after:
        house.advance(heard_after - 0.1)
        assert heir.take() == []
        house.advance(0.2)
    assert heir.payloads() == [b"gone"]


def test_shared_subscriptions(house: House) -> None:
    one, other = house.connect("a"), house.connect("b")
    for client in (one, other):
        client.subscribe("$share/sharename/x", TOPICS[0], qos=2)
    other.publish(TOPICS[0], b"to both")
    other.publish("x", b"to one")
    assert sorted(one.payloads() + other.payloads()) == [b"to both", b"to both", b"to one"]


def test_a_qos_2_exchange_may_be_broken_at_each_step(house: House, version: int) -> None:
    client = house.connect_lasting("a", version)
    client.subscribe("t", qos=2)
    house.connect("b").publish("t", b"x", 2)
    [message] = client.messages()
    packet_id = int(message.packet_id)
    client.drop()
    client = house.connect_lasting("a", version)  # before PUBREC: the message again
    assert client.messages()[0].dup
    client.send(Ack(PUBREC, packet_id))
    client.drop()
    client = house.connect_lasting("a", version)  # before PUBCOMP: the PUBREL again
    release = client.only(Ack)
    assert (release.kind, release.packet_id) == (PUBREL, packet_id)
    client.ack(message)
    client.drop()
    assert house.connect_lasting("a", version).take() == []
