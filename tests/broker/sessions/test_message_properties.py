"""Properties of messages: which are forwarded, which count down, and which are dropped."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.wire.packets import V311, Publish
from sluice.wire.properties import PUBACK
from tests.broker.kit import BrokerHarness
from tests.broker.peers import props

ALL: dict[str, Any] = {
    "payload_format": 1,
    "content_type": "application/json",
    "response_topic": "answers/7",
    "correlation_data": b"\x00\xff7",
    "user": [("a", "1"), ("b", ""), ("a", "2"), ("", "\u00e4")],
}


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_properties_are_forwarded_unaltered_and_in_order(harness: BrokerHarness, qos: int) -> None:
    reader = harness.connect("r")
    reader.subscribe("t", qos=qos)
    harness.connect("w").publish("t", b"x", qos, **ALL)
    [message] = reader.messages()
    assert message.decode_properties() == props(**ALL)


def test_properties_are_forwarded_unaltered_beside_those_of_the_connection(
    harness: BrokerHarness,
) -> None:
    reader = harness.connect("r", topic_alias_maximum=5)
    reader.subscribe("t", qos=1, identifier=9)
    harness.connect("w").publish("t", b"x", 1, message_expiry=10, topic_alias=3, **ALL)
    [message] = reader.messages()
    wanted = props(**ALL, message_expiry=10, topic_alias=1, subscription_ids=[9])
    assert message.decode_properties() == wanted


def test_properties_are_dropped_for_3_1_1_subscribers(harness: BrokerHarness) -> None:
    reader = harness.connect("r", V311)
    reader.subscribe("t", qos=1)
    harness.connect("w").publish("t", b"x", 1, message_expiry=10, **ALL)
    assert bytes(reader.transport.sent) == b"\x32\x06\x00\x01t\x00\x01x"


def test_a_3_1_1_message_arrives_without_properties(harness: BrokerHarness) -> None:
    reader = harness.connect("r")
    reader.subscribe("t")
    harness.connect("w", V311).publish("t", b"x")
    [message] = reader.messages()
    assert message.decode_properties() == props()


def test_expiry_interval_counts_down_while_a_message_is_queued(harness: BrokerHarness) -> None:
    reader = harness.connect_persistent("r")
    reader.subscribe("t", qos=1)
    reader.drop()
    writer = harness.connect("w")
    writer.publish("t", b"short", 1, message_expiry=5)
    writer.publish("t", b"long", 1, message_expiry=60)
    writer.publish("t", b"eternal", 1)
    harness.advance(10)
    reader = harness.connect_persistent("r")
    assert [(one.payload, one.expiry_seconds) for one in reader.messages()] == [
        (b"long", 50),
        (b"eternal", -1),
    ]
    assert harness.counters.publishes_dropped == 1
    assert (
        harness.broker.registry.sessions["r"].outbound.buffered_bytes
        == len(b"long" + b"eternal") + 2
    )


def test_message_that_expires_in_a_full_window_is_not_sent(harness: BrokerHarness) -> None:
    reader = harness.connect("r", receive_maximum=1)
    reader.subscribe("t", qos=1)
    writer = harness.connect("w")
    writer.publish("t", b"1", 1)
    writer.publish("t", b"2", 1, message_expiry=5)
    writer.publish("t", b"3", 1, message_expiry=50)
    [first] = reader.messages()
    harness.advance(6)
    reader.ack(first)
    [message] = reader.messages()
    assert (message.payload, message.expiry_seconds) == (b"3", 44)


def test_expiry_interval_counts_down_while_the_connection_is_blocked() -> None:
    harness = BrokerHarness(write_buffer_high=1024)
    reader = harness.connect("r")
    reader.subscribe("t", qos=1)
    reader.transport.is_blocked = True
    writer = harness.connect("w")
    writer.publish("t", b"x" * 2000, 1)
    writer.publish("t", b"short", 1, message_expiry=5)
    writer.publish("t", b"long", 1, message_expiry=60)
    harness.advance(7)  # nothing else happens meanwhile
    reader.transport.drain()
    harness.loop.settle()
    reader.transport.drain()
    assert [(one.payload[:5], one.expiry_seconds) for one in reader.messages()] == [
        (b"xxxxx", -1),
        (b"long", 53),
    ]


def test_message_delivered_at_once_has_its_full_interval(harness: BrokerHarness) -> None:
    reader = harness.connect("r")
    reader.subscribe("t")
    harness.connect("w").publish("t", b"", message_expiry=0xFFFF_FFFF)
    assert [message.expiry_seconds for message in reader.messages()] == [0xFFFF_FFFF]


def test_client_may_disable_reason_strings() -> None:
    harness = BrokerHarness(max_retained=0)
    for requested, reported in ((1, True), (0, False)):
        client = harness.connect("a", request_problem=requested)
        refusal = client.first_ack(PUBACK, client.publish("t", b"x", 1, retain=True), 0x97)
        assert (refusal.properties is not None) is reported
        client.disconnect()


def test_a_message_with_subscription_identifiers_is_a_protocol_error(
    harness: BrokerHarness,
) -> None:
    client = harness.connect("a")
    client.publish("t", subscription_ids=[1])
    assert client.fault()[0] == 0x82


def test_response_topic_with_a_wildcard_is_refused(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.publish("t", response_topic="a/#")
    assert client.fault()[0] == 0x90


def test_response_reaches_the_requester(harness: BrokerHarness) -> None:
    requester, answerer = harness.connect("asker"), harness.connect("answerer")
    requester.subscribe("answers/asker")
    answerer.subscribe("ask")
    requester.publish("ask", b"?", response_topic="answers/asker", correlation_data=b"42")
    request = answerer.only(Publish).decode_properties()
    assert request.response_topic is not None
    answerer.publish(request.response_topic, b"!", correlation_data=request.correlation_data)
    answer = requester.only(Publish)
    assert (answer.payload, answer.decode_properties().correlation_data) == (b"!", b"42")
