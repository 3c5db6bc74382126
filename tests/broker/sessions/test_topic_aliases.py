"""Topic aliases, in both directions."""

from __future__ import annotations

import pytest

from sluice.wire.packets import Publish
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client


@pytest.fixture
def reader(harness: BrokerHarness) -> Client:
    client = harness.connect("reader")
    client.subscribe("#", qos=2)
    return client


def test_alias_stands_for_its_topic(harness: BrokerHarness, reader: Client) -> None:
    client = harness.connect("a")
    client.publish("one", b"1", topic_alias=1)
    client.publish("two", b"2", topic_alias=64)
    client.publish("", b"3", 1, topic_alias=1)
    client.publish("", b"4", 2, topic_alias=64)
    assert [message.topic for message in reader.messages()] == [b"one", b"two", b"one", b"two"]


def test_alias_may_be_reassigned(harness: BrokerHarness, reader: Client) -> None:
    client = harness.connect("a")
    client.publish("one", topic_alias=1)
    client.publish("two", topic_alias=1)
    client.publish("", topic_alias=1)
    assert [message.topic for message in reader.messages()] == [b"one", b"two", b"two"]


def test_alias_is_not_forwarded(harness: BrokerHarness, reader: Client) -> None:
    harness.connect("a").publish("one", b"1", topic_alias=1)
    [message] = reader.messages()
    assert message.topic_alias == 0


def test_alias_may_be_used_for_a_retained_message(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.publish("one", topic_alias=1)
    client.publish("", b"kept", retain=True, topic_alias=1)
    late = harness.connect("late")
    late.subscribe("one")
    assert late.payloads() == [b"kept"]


@pytest.mark.parametrize("alias", [65, 65_535])
def test_alias_above_the_maximum_ends_the_connection(harness: BrokerHarness, alias: int) -> None:
    client = harness.connect("a")
    client.publish("t", topic_alias=alias)
    assert client.fault()[0] == 0x94


def test_alias_0_ends_the_connection(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.feed(b"\x30\x07\x00\x01t\x03\x23\x00\x00")
    assert client.fault()[0] == 0x94


def test_unassigned_alias_is_a_protocol_error(harness: BrokerHarness, reader: Client) -> None:
    client = harness.connect("a")
    client.publish("", b"x", topic_alias=1)
    assert client.fault()[0] == 0x82
    assert reader.take() == []


def test_publish_without_topic_and_alias_is_a_protocol_error(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.feed(b"\x30\x03\x00\x00\x00")
    assert client.fault()[0] == 0x82


def test_aliases_can_be_disabled() -> None:
    harness = BrokerHarness(topic_alias_maximum=0)
    client = harness.connect("a", topic_alias_maximum=10)
    assert (
        client.connack.properties is not None and not client.connack.properties.topic_alias_maximum
    )
    client.subscribe("t")
    harness.connect("w").publish("t")
    assert [message.topic_alias for message in client.messages()] == [0]
    client.publish("t", topic_alias=1)
    assert client.fault()[0] == 0x94


def test_aliases_end_with_their_connection(harness: BrokerHarness) -> None:
    client = harness.connect_persistent("a", topic_alias_maximum=5)
    client.subscribe("t", qos=1)
    client.publish("t", b"1", topic_alias=1)
    client.disconnect()
    harness.connect("w").publish("t", b"2", 1)
    client = harness.connect_persistent("a", topic_alias_maximum=5)
    [message] = client.messages()
    assert (message.topic, message.topic_alias) == (b"t", 1)
    client.publish("", b"3", topic_alias=1)
    assert client.fault()[0] == 0x82


def test_client_with_alias_maximum_is_sent_each_topic_once(harness: BrokerHarness) -> None:
    client = harness.connect("a", topic_alias_maximum=2)
    client.subscribe("#", qos=2)
    writer = harness.connect("w")
    for nth, topic in enumerate(("one", "two", "one", "three", "two", "three")):
        writer.publish(topic, b"x", nth % 3)
    reported = [(message.topic, message.topic_alias) for message in client.messages()]
    assert reported == [(b"one", 1), (b"two", 2), (b"", 1), (b"three", 0), (b"", 2), (b"three", 0)]


def test_client_without_alias_maximum_gets_no_alias(harness: BrokerHarness, reader: Client) -> None:
    writer = harness.connect("w")
    for _ in range(3):
        writer.publish("t")
    assert [(message.topic, message.topic_alias) for message in reader.messages()] == [
        (b"t", 0)
    ] * 3


def test_resent_message_has_its_full_topic_on_the_new_connection(harness: BrokerHarness) -> None:
    client = harness.connect_persistent("a", topic_alias_maximum=1)
    client.subscribe("t", qos=1)
    writer = harness.connect("w")
    writer.publish("t", b"1", 1)
    writer.publish("t", b"2", 1)
    assert [message.topic for message in client.messages()] == [b"t", b""]
    client.drop()
    client = harness.connect_persistent("a", topic_alias_maximum=1)
    assert [(message.topic, message.topic_alias) for message in client.messages()] == [
        (b"t", 1),
        (b"", 1),
    ]


def test_alias_does_not_make_a_message_too_large(harness: BrokerHarness) -> None:
    client = harness.connect("a", topic_alias_maximum=5, maximum_packet_size=64)
    client.subscribe("#", qos=0)
    writer = harness.connect("w")
    fits = 64 - 2 - 3 - 1
    writer.publish("t", b"x" * fits)
    writer.publish("t", b"y")
    writer.publish("t", b"x" * fits)
    writer.publish("t", b"x" * (fits + 1))
    messages: list[Publish] = client.messages()
    assert [(message.topic, message.topic_alias) for message in messages] == [
        (b"t", 0),
        (b"t", 1),
        (b"t", 0),
    ]


def test_oversized_message_leaves_no_alias_behind(harness: BrokerHarness) -> None:
    client = harness.connect("a", topic_alias_maximum=5, maximum_packet_size=64)
    client.subscribe("#")
    writer = harness.connect("w")
    writer.publish("t", b"x" * 100)
    writer.publish("t", b"y")
    [message] = client.messages()
    assert (message.topic, message.topic_alias) == (b"t", 1)
