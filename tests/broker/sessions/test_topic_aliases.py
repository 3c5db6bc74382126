"""Topic aliases, both ways."""

from __future__ import annotations

import pytest

from sluice.wire.packets import Publish
from tests.broker.kit import Client, House


@pytest.fixture
def reader(house: House) -> Client:
    client = house.connect("reader")
    client.subscribe("#", qos=2)
    return client


def test_an_alias_stands_for_the_topic_it_was_given(house: House, reader: Client) -> None:
    client = house.connect("a")
    client.publish("one", b"1", topic_alias=1)
    client.publish("two", b"2", topic_alias=64)
    client.publish("", b"3", 1, topic_alias=1)
    client.publish("", b"4", 2, topic_alias=64)
    assert [message.topic for message in reader.messages()] == [b"one", b"two", b"one", b"two"]


def test_an_alias_may_be_given_another_topic(house: House, reader: Client) -> None:
    client = house.connect("a")
    client.publish("one", topic_alias=1)
    client.publish("two", topic_alias=1)
    client.publish("", topic_alias=1)
    assert [message.topic for message in reader.messages()] == [b"one", b"two", b"two"]


def test_an_alias_is_not_passed_on(house: House, reader: Client) -> None:
    house.connect("a").publish("one", b"1", topic_alias=1)
    [message] = reader.messages()
    assert message.alias == 0


def test_an_alias_may_stand_for_a_retained_message(house: House) -> None:
    client = house.connect("a")
    client.publish("one", topic_alias=1)
    client.publish("", b"kept", retain=True, topic_alias=1)
    late = house.connect("late")
    late.subscribe("one")
    assert late.payloads() == [b"kept"]


@pytest.mark.parametrize("alias", [65, 65_535])
def test_an_alias_beyond_the_agreed_maximum_ends_the_connection(house: House, alias: int) -> None:
    client = house.connect("a")
    client.publish("t", topic_alias=alias)
    assert client.fault()[0] == 0x94


def test_alias_0_ends_the_connection(house: House) -> None:
    client = house.connect("a")
    client.feed(b"\x30\x07\x00\x01t\x03\x23\x00\x00")
    assert client.fault()[0] == 0x94


def test_an_alias_that_was_never_given_a_topic_is_a_protocol_error(house: House, reader: Client) -> None:
    client = house.connect("a")
    client.publish("", b"x", topic_alias=1)
    assert client.fault()[0] == 0x82
    assert reader.take() == []


def test_no_topic_and_no_alias_is_a_protocol_error(house: House) -> None:
    client = house.connect("a")
    client.feed(b"\x30\x03\x00\x00\x00")
    assert client.fault()[0] == 0x82


def test_aliases_can_be_switched_off() -> None:
    house = House(topic_alias_maximum=0)
    client = house.connect("a", topic_alias_maximum=10)
    assert client.connack.properties is not None and not client.connack.properties.topic_alias_maximum
    client.subscribe("t")
    house.connect("w").publish("t")
    assert [message.alias for message in client.messages()] == [0]
    client.publish("t", topic_alias=1)
    assert client.fault()[0] == 0x94


def test_aliases_end_with_their_connection(house: House) -> None:
    client = house.connect_lasting("a", topic_alias_maximum=5)
    client.subscribe("t", qos=1)
    client.publish("t", b"1", topic_alias=1)
    client.disconnect()
    house.connect("w").publish("t", b"2", 1)
    client = house.connect_lasting("a", topic_alias_maximum=5)
    [message] = client.messages()
    assert (message.topic, message.alias) == (b"t", 1)
    client.publish("", b"3", topic_alias=1)
    assert client.fault()[0] == 0x82


def test_a_client_that_takes_aliases_is_sent_each_topic_once(house: House) -> None:
    client = house.connect("a", topic_alias_maximum=2)
    client.subscribe("#", qos=2)
    writer = house.connect("w")
    for nth, topic in enumerate(("one", "two", "one", "three", "two", "three")):
        writer.publish(topic, b"x", nth % 3)
    told = [(message.topic, message.alias) for message in client.messages()]
    assert told == [(b"one", 1), (b"two", 2), (b"", 1), (b"three", 0), (b"", 2), (b"three", 0)]


def test_a_client_that_takes_no_aliases_gets_none(house: House, reader: Client) -> None:
    writer = house.connect("w")
    for _ in range(3):
        writer.publish("t")
    assert [(message.topic, message.alias) for message in reader.messages()] == [(b"t", 0)] * 3


def test_what_is_sent_again_is_spelt_out_for_the_new_connection(house: House) -> None:
    client = house.connect_lasting("a", topic_alias_maximum=1)
    client.subscribe("t", qos=1)
    writer = house.connect("w")
    writer.publish("t", b"1", 1)
    writer.publish("t", b"2", 1)
    assert [message.topic for message in client.messages()] == [b"t", b""]
    client.drop()
    client = house.connect_lasting("a", topic_alias_maximum=1)
    assert [(message.topic, message.alias) for message in client.messages()] == [(b"t", 1), (b"", 1)]


def test_an_alias_does_not_make_a_message_too_large(house: House) -> None:
    client = house.connect("a", topic_alias_maximum=5, maximum_packet_size=64)
    client.subscribe("#", qos=0)
    writer = house.connect("w")
    fits = 64 - 2 - 3 - 1
    writer.publish("t", b"x" * fits)
    writer.publish("t", b"y")
    writer.publish("t", b"x" * fits)
    writer.publish("t", b"x" * (fits + 1))
    messages: list[Publish] = client.messages()
    assert [(message.topic, message.alias) for message in messages] == [(b"t", 0), (b"t", 1), (b"t", 0)]


def test_a_message_that_was_too_large_leaves_no_alias_behind(house: House) -> None:
    client = house.connect("a", topic_alias_maximum=5, maximum_packet_size=64)
    client.subscribe("#")
    writer = house.connect("w")
    writer.publish("t", b"x" * 100)
    writer.publish("t", b"y")
    [message] = client.messages()
    assert (message.topic, message.alias) == (b"t", 1)
