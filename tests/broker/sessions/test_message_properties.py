"""What is passed on of a message's properties, what counts down on the way, and what stays behind."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.wire.packets import V311, Publish
from sluice.wire.properties import PUBACK
from tests.broker.kit import House, props

ALL: dict[str, Any] = {
    "payload_format": 1,
    "content_type": "application/json",
    "response_topic": "answers/7",
    "correlation_data": b"\x00\xff7",
    "user": [("a", "1"), ("b", ""), ("a", "2"), ("", "\u00e4")],
}


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_properties_pass_unaltered_and_in_order(house: House, qos: int) -> None:
    reader = house.connect("r")
    reader.subscribe("t", qos=qos)
    house.connect("w").publish("t", b"x", qos, **ALL)
    [message] = reader.messages()
    assert message.properties() == props(**ALL)


def test_properties_pass_unaltered_beside_those_of_the_hop(house: House) -> None:
    reader = house.connect("r", topic_alias_maximum=5)
    reader.subscribe("t", qos=1, identifier=9)
    house.connect("w").publish("t", b"x", 1, message_expiry=10, topic_alias=3, **ALL)
    [message] = reader.messages()
    wanted = props(**ALL, message_expiry=10, topic_alias=1, subscription_ids=[9])
    assert message.properties() == wanted


def test_properties_stay_behind_on_the_way_to_3_1_1(house: House) -> None:
    reader = house.connect("r", V311)
    reader.subscribe("t", qos=1)
    house.connect("w").publish("t", b"x", 1, message_expiry=10, **ALL)
    assert bytes(reader.transport.sent) == b"\x32\x06\x00\x01t\x00\x01x"


def test_a_3_1_1_message_arrives_without_properties(house: House) -> None:
    reader = house.connect("r")
    reader.subscribe("t")
    house.connect("w", V311).publish("t", b"x")
    [message] = reader.messages()
    assert message.properties() == props()


def test_the_expiry_interval_counts_down_while_a_message_waits(house: House) -> None:
    reader = house.connect_lasting("r")
    reader.subscribe("t", qos=1)
    reader.drop()
    writer = house.connect("w")
    writer.publish("t", b"short", 1, message_expiry=5)
    writer.publish("t", b"long", 1, message_expiry=60)
    writer.publish("t", b"eternal", 1)
    house.advance(10)
    reader = house.connect_lasting("r")
    assert [(one.payload, one.expiry) for one in reader.messages()] == [(b"long", 50), (b"eternal", -1)]
    assert house.counters.publishes_dropped == 1
    assert house.broker.registry.sessions["r"].held_bytes == len(b"long" + b"eternal") + 2


def test_a_message_that_expires_in_a_full_window_is_not_sent(house: House) -> None:
    reader = house.connect("r", receive_maximum=1)
    reader.subscribe("t", qos=1)
    writer = house.connect("w")
    writer.publish("t", b"1", 1)
    writer.publish("t", b"2", 1, message_expiry=5)
    writer.publish("t", b"3", 1, message_expiry=50)
    [first] = reader.messages()
    house.advance(6)
    reader.ack(first)
    [message] = reader.messages()
    assert (message.payload, message.expiry) == (b"3", 44)


def test_a_message_that_waits_for_a_slow_line_counts_down_too() -> None:
    house = House(write_buffer_high=1024)
    reader = house.connect("r")
    reader.subscribe("t", qos=1)
    reader.transport.jammed = True
    writer = house.connect("w")
    writer.publish("t", b"x" * 2000, 1)
    writer.publish("t", b"short", 1, message_expiry=5)
    writer.publish("t", b"long", 1, message_expiry=60)
    house.advance(7)  # and nothing else happens meanwhile
    reader.transport.drain()
    house.loop.settle()
    reader.transport.drain()
    assert [(one.payload[:5], one.expiry) for one in reader.messages()] == [(b"xxxxx", -1), (b"long", 53)]


def test_a_message_that_is_delivered_at_once_keeps_its_interval(house: House) -> None:
    reader = house.connect("r")
    reader.subscribe("t")
    house.connect("w").publish("t", b"", message_expiry=0xFFFF_FFFF)
    assert [message.expiry for message in reader.messages()] == [0xFFFF_FFFF]


def test_a_client_may_do_without_reason_strings() -> None:
    house = House(max_retained=0)
    for wish, told in ((1, True), (0, False)):
        client = house.connect("a", request_problem=wish)
        refusal = client.first_ack(PUBACK, client.publish("t", b"x", 1, retain=True), 0x97)
        assert (refusal.properties is not None) is told
        client.disconnect()


def test_a_message_with_subscription_identifiers_is_a_protocol_error(house: House) -> None:
    client = house.connect("a")
    client.publish("t", subscription_ids=[1])
    assert client.fault()[0] == 0x82


def test_a_response_topic_with_a_wildcard_is_refused(house: House) -> None:
    client = house.connect("a")
    client.publish("t", response_topic="a/#")
    assert client.fault()[0] == 0x90


def test_a_request_finds_its_way_back(house: House) -> None:
    asker, answerer = house.connect("asker"), house.connect("answerer")
    asker.subscribe("answers/asker")
    answerer.subscribe("ask")
    asker.publish("ask", b"?", response_topic="answers/asker", correlation_data=b"42")
    request = answerer.only(Publish).properties()
    assert request.response_topic is not None
    answerer.publish(request.response_topic, b"!", correlation_data=request.correlation_data)
    answer = asker.only(Publish)
    assert (answer.payload, answer.properties().correlation_data) == (b"!", b"42")
