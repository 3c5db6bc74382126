"""Retained messages: the last message of a topic, for later subscribers."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.broker.sessions.retained_messages import LEVEL_BYTES
from sluice.wire.properties import PUBACK, PUBREC
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client, will


@pytest.fixture
def writer(harness: BrokerHarness) -> Client:
    return harness.connect("writer")


def received_retained(
    harness: BrokerHarness, topic_filter: str, version: int = 5, **options: int
) -> list[tuple[bytes, bytes]]:
    """Return what a new subscriber gets at once."""
    client = harness.connect("", version)
    client.subscribe(topic_filter, **options)  # type: ignore[arg-type]
    messages = client.messages()
    assert all(message.retain for message in messages)
    client.disconnect()
    return sorted((message.topic, message.payload) for message in messages)


def test_retained_message_is_sent_to_later_subscribers(
    harness: BrokerHarness, writer: Client, version: int
) -> None:
    writer.publish("t", b"x", retain=True)
    writer.publish("u", b"x")
    assert received_retained(harness, "t", version) == [(b"t", b"x")]
    assert received_retained(harness, "u", version) == []


def test_last_retained_message_of_a_topic_wins(harness: BrokerHarness, writer: Client) -> None:
    writer.publish("t", b"one", retain=True)
    writer.publish("t", b"two", retain=True)
    writer.publish("t", b"passing")
    assert received_retained(harness, "t") == [(b"t", b"two")]
    assert harness.broker.router.retained.payload_bytes == 3


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_empty_payload_clears_the_retained_message_and_is_forwarded(
    harness: BrokerHarness, writer: Client, qos: int
) -> None:
    reader = harness.connect("reader")
    reader.subscribe("t")
    writer.publish_fully("t", b"x", qos, retain=True)
    writer.publish_fully("t", b"", qos, retain=True)
    assert received_retained(harness, "t") == []
    assert reader.payloads() == [b"x", b""]
    retained = harness.broker.router.retained
    assert (retained.count, retained.payload_bytes) == (0, 0)


def test_clearing_a_missing_retained_message_does_nothing(
    harness: BrokerHarness, writer: Client
) -> None:
    writer.publish("a/b", b"x", retain=True)
    for topic in ("a", "a/b/c", "z"):
        writer.publish(topic, b"", retain=True)
    assert received_retained(harness, "#") == [(b"a/b", b"x")]


@pytest.mark.parametrize("requested", [0, 1, 2])
@pytest.mark.parametrize("published", [0, 1, 2])
def test_retained_message_arrives_with_the_lower_of_both_qos(
    harness: BrokerHarness, writer: Client, published: int, requested: int
) -> None:
    writer.publish_fully("t", b"x", published, retain=True)
    reader = harness.connect("reader")
    reader.subscribe("t", qos=requested)
    [message] = reader.messages()
    assert message.qos == min(published, requested)


def test_retained_message_follows_the_suback(harness: BrokerHarness, writer: Client) -> None:
    writer.publish("t", b"x", retain=True)
    reader = harness.connect("reader")
    reader.feed(b"\x82\x07\x00\x01\x00\x00\x01t\x00")
    assert [int(packet.kind) for packet in reader.take()] == [9, 3]


def test_existing_subscribers_get_it_as_a_new_message(
    harness: BrokerHarness, writer: Client
) -> None:
    reader = harness.connect("reader")
    reader.subscribe("t")
    writer.publish("t", b"x", retain=True)
    [message] = reader.messages()
    assert not message.retain


def test_retain_as_published_keeps_the_flag(harness: BrokerHarness, writer: Client) -> None:
    reader = harness.connect("reader")
    reader.subscribe("t", as_published=True)
    writer.publish("t", b"x", retain=True)
    writer.publish("t", b"y", retain=False)
    assert [message.retain for message in reader.messages()] == [True, False]


@pytest.mark.parametrize(
    ("handling", "first", "second"),
    [(0, [b"x"], [b"x"]), (1, [b"x"], []), (2, [], [])],
    ids=["always", "when new", "never"],
)
def test_retain_handling_decides_when_it_is_sent(
    harness: BrokerHarness, writer: Client, handling: int, first: list[bytes], second: list[bytes]
) -> None:
    writer.publish("t", b"x", retain=True)
    reader = harness.connect("reader")
    reader.subscribe("t", handling=handling)
    assert reader.payloads() == first
    reader.subscribe("t", handling=handling)
    assert reader.payloads() == second
    reader.unsubscribe("t")
    reader.subscribe("t", handling=handling)
    assert reader.payloads() == first


def test_subscription_of_a_resumed_session_is_not_new(
    harness: BrokerHarness, writer: Client
) -> None:
    writer.publish("t", b"x", retain=True)
    reader = harness.connect_persistent("reader")
    reader.subscribe("t", handling=2)
    reader.disconnect()
    reader = harness.connect_persistent("reader")
    assert reader.take() == []
    reader.subscribe("t", handling=1)
    assert reader.take() == []


def test_shared_subscriptions_get_no_retained_messages(
    harness: BrokerHarness, writer: Client
) -> None:
    writer.publish("t", b"x", retain=True)
    assert received_retained(harness, "$share/g/t") == []


@pytest.mark.parametrize(
    ("topic_filter", "topics"),
    [
        ("#", ["/", "a", "a/b", "a/b/c", "b/"]),
        ("+", ["a"]),
        ("a/#", ["a", "a/b", "a/b/c"]),
        ("a/+", ["a/b"]),
        ("+/+", ["/", "a/b", "b/"]),
        ("+/b/#", ["a/b", "a/b/c"]),
        ("b/+", ["b/"]),
        ("$DATA/#", ["$DATA", "$DATA/x"]),
        ("$DATA/+", ["$DATA/x"]),
        ("+/x", []),
        ("nothing", []),
    ],
)
def test_wildcards_match_retained_topics_except_dollar_topics(
    harness: BrokerHarness, writer: Client, topic_filter: str, topics: list[str]
) -> None:
    for topic in ("a", "a/b", "a/b/c", "/", "b/", "$DATA", "$DATA/x"):
        writer.publish(topic, topic.encode(), retain=True)
    assert received_retained(harness, topic_filter) == [
        (topic.encode(), topic.encode()) for topic in sorted(topics)
    ]


def test_retained_message_expires(harness: BrokerHarness, writer: Client) -> None:
    writer.publish("t", b"x", retain=True, message_expiry=10)
    writer.publish("u", b"y", retain=True)
    harness.advance(4)
    reader = harness.connect("reader")
    reader.subscribe("t")
    assert [message.expiry_seconds for message in reader.messages()] == [6]
    harness.advance(6)
    assert received_retained(harness, "#") == [(b"u", b"y")]
    assert harness.broker.router.retained.count == 1


def test_expired_retained_messages_are_deleted_without_a_lookup(
    harness: BrokerHarness, writer: Client
) -> None:
    for nth in range(10):
        writer.publish(f"t/{nth}", b"x", retain=True, message_expiry=nth + 1)
    harness.advance(5.5)
    retained = harness.broker.router.retained
    assert retained.delete_expired(harness.loop.now) == 5
    assert (retained.count, retained.payload_bytes) == (5, 5)


def test_properties_of_retained_messages_are_stored(harness: BrokerHarness, writer: Client) -> None:
    writer.publish("t", b"x", retain=True, content_type="text/plain", user=[("k", "v")])
    reader = harness.connect("reader")
    reader.subscribe("t", identifier=7)
    [message] = reader.messages()
    reported = message.decode_properties()
    assert (reported.content_type, reported.user, reported.subscription_ids) == (
        "text/plain",
        [("k", "v")],
        [7],
    )


def test_retained_topics_are_limited_and_the_refusal_says_so() -> None:
    harness = BrokerHarness(max_retained=2)
    writer, reader = harness.connect("w"), harness.connect("r")
    reader.subscribe("#")
    writer.publish("a", b"1", retain=True)
    writer.publish("b", b"1", retain=True)
    for qos, kind in ((1, PUBACK), (2, PUBREC)):
        packet_id = writer.publish("c", b"1", qos, retain=True)
        refusal = writer.first_ack(kind, packet_id, 0x97)
        assert refusal.properties is not None and refusal.properties.reason_string
    assert reader.payloads() == [b"1", b"1"]
    writer.publish("a", b"2", retain=True)
    assert received_retained(harness, "#") == [(b"a", b"2"), (b"b", b"1")]
    writer.publish("b", b"", retain=True)
    writer.publish("c", b"3", retain=True)
    assert received_retained(harness, "#") == [(b"a", b"2"), (b"c", b"3")]


def retain(harness: BrokerHarness, topic: str, payload: bytes, **properties: Any) -> int:
    """Let a client publish a retained message; return the reason code of its PUBACK."""
    writer = harness.connect("w")
    packet_id = writer.publish(topic, payload, 1, retain=True, **properties)
    ack = writer.first_ack(PUBACK, packet_id)
    if ack.reason == 0x97:
        assert ack.properties is not None
        assert "mqtt.max_retained_bytes" in (ack.properties.reason_string or "")
    return int(ack.reason)


def test_bytes_of_retained_messages_are_limited() -> None:
    harness = BrokerHarness(max_retained_bytes=1000 + 3 * LEVEL_BYTES)
    assert retain(harness, "a", bytes(500)) == 0
    assert retain(harness, "b", bytes(498) + bytes(LEVEL_BYTES)) == 0
    assert retain(harness, "c", b"x") == 0x97
    assert retain(harness, "c" * 100, b"x") == 0x97
    assert retain(harness, "a", bytes(501)) == 0x97
    assert received_retained(harness, "a") == [(b"a", bytes(500))]  # the topic keeps its message
    assert retain(harness, "a", bytes(400)) == 0
    assert retain(harness, "c", bytes(99)) == 0x97  # its level exceeds the limit
    assert retain(harness, "b", bytes(498)) == 0
    assert retain(harness, "c", bytes(99)) == 0
    assert retain(harness, "d", b"x") == 0x97
    assert retain(harness, "b", b"") == 0
    assert retain(harness, "d", bytes(400), user=[("k", "v" * 91)]) == 0
    assert harness.broker.router.retained.total_bytes == 1000 - 1 + 3 * LEVEL_BYTES
    assert retain(harness, "e", b"x") == 0x97


def test_each_level_of_a_retained_topic_counts_until_it_is_empty() -> None:
    harness = BrokerHarness(max_retained_bytes=100 * LEVEL_BYTES)
    retained = harness.broker.router.retained
    deep = "/".join(["a"] * 90)
    assert retain(harness, f"x/{deep}", b"x") == 0
    assert retain(harness, f"y/{deep}", b"x") == 0x97
    assert retain(harness, f"x/{deep[:-1]}b", b"x") == 0  # shares all levels but one
    assert retained.total_bytes == 92 * LEVEL_BYTES + 2 * (len(deep) + 3)
    assert retain(harness, f"x/{deep}", b"") == 0
    assert retain(harness, f"x/{deep[:-1]}b", b"") == 0
    assert retained.total_bytes == 0
    assert retain(harness, f"y/{deep}", b"x") == 0


def test_expired_retained_messages_free_space_for_others() -> None:
    harness = BrokerHarness(max_retained_bytes=1000 + LEVEL_BYTES)
    assert retain(harness, "a", bytes(999), message_expiry=10) == 0
    assert retain(harness, "b", b"x") == 0x97
    harness.advance(11)
    harness.broker.router.retained.delete_expired(harness.loop.now)
    assert harness.broker.router.retained.total_bytes == 0
    assert retain(harness, "b", b"x") == 0


def test_refused_qos_2_publish_may_be_retried_with_its_packet_id() -> None:
    harness = BrokerHarness(max_retained=0)
    writer, reader = harness.connect("w"), harness.connect("r")
    reader.subscribe("t")
    writer.publish("t", b"x", 2, retain=True, packet_id=3)
    writer.first_ack(PUBREC, 3, 0x97)
    writer.publish("t", b"x", 2, packet_id=3)
    writer.first_ack(PUBREC, 3, 0)
    assert reader.payloads() == [b"x"]


def test_server_without_retained_messages_refuses_them() -> None:
    harness = BrokerHarness(retain_available=False)
    client = harness.connect("a")
    client.publish("t", b"x", retain=True)
    assert client.fault()[0] == 0x9A
    refused = harness.connect("b", will=will("t", retain=True))
    assert (refused.connack.reason, refused.closed) == (0x9A, True)


def test_retained_topic_with_too_many_levels_is_refused() -> None:
    harness = BrokerHarness(max_topic_levels=4)
    client = harness.connect("a")
    client.subscribe("#")
    ack = client.first_ack(PUBACK, client.publish("a/b/c/d/e", b"x", 1, retain=True), 0x90)
    assert ack.properties is not None
    assert "at most 4 levels here (mqtt.max_topic_levels)" in (ack.properties.reason_string or "")
    client.first_ack(PUBACK, client.publish("a/b/c/d", b"x", 1, retain=True), 0)
    client.first_ack(PUBACK, client.publish("a/b/c/d/e", b"x", 1), 0)
    assert len(client.messages()) == 2
