"""Retained messages: the last word on a topic, for those who come later."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.broker.sessions.retained import LEVEL_BYTES
from sluice.wire.properties import PUBACK, PUBREC
from tests.broker.kit import Client, House


@pytest.fixture
def writer(house: House) -> Client:
    return house.connect("writer")


def heard(house: House, topic_filter: str, version: int = 5, **options: int) -> list[tuple[bytes, bytes]]:
    """What a newcomer who subscribes gets at once."""
    client = house.connect("", version)
    client.subscribe(topic_filter, **options)  # type: ignore[arg-type]
    messages = client.messages()
    assert all(message.retain for message in messages)
    client.disconnect()
    return sorted((message.topic, message.payload) for message in messages)


def test_a_retained_message_waits_for_subscribers(house: House, writer: Client, version: int) -> None:
    writer.publish("t", b"x", retain=True)
    writer.publish("u", b"x")
    assert heard(house, "t", version) == [(b"t", b"x")]
    assert heard(house, "u", version) == []


def test_the_last_one_counts(house: House, writer: Client) -> None:
    writer.publish("t", b"one", retain=True)
    writer.publish("t", b"two", retain=True)
    writer.publish("t", b"passing")
    assert heard(house, "t") == [(b"t", b"two")]
    assert house.broker.router.retained.bytes == 3


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_an_empty_payload_clears_it_and_is_passed_on(house: House, writer: Client, qos: int) -> None:
    reader = house.connect("reader")
    reader.subscribe("t")
    writer.publish_fully("t", b"x", qos, retain=True)
    writer.publish_fully("t", b"", qos, retain=True)
    assert heard(house, "t") == []
    assert reader.payloads() == [b"x", b""]
    retained = house.broker.router.retained
    assert (retained.count, retained.bytes) == (0, 0)


def test_clearing_what_is_not_there_does_nothing(house: House, writer: Client) -> None:
    writer.publish("a/b", b"x", retain=True)
    for topic in ("a", "a/b/c", "z"):
        writer.publish(topic, b"", retain=True)
    assert heard(house, "#") == [(b"a/b", b"x")]


@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_it_arrives_with_the_lower_of_both_qos(house: House, writer: Client, kept: int, asked: int) -> None:
    writer.publish_fully("t", b"x", kept, retain=True)
    reader = house.connect("reader")
    reader.subscribe("t", qos=asked)
    [message] = reader.messages()
    assert message.qos == min(kept, asked)


def test_it_follows_the_suback(house: House, writer: Client) -> None:
    writer.publish("t", b"x", retain=True)
    reader = house.connect("reader")
    reader.feed(b"\x82\x07\x00\x01\x00\x00\x01t\x00")
    assert [int(packet.kind) for packet in reader.take()] == [9, 3]


def test_those_who_listen_already_get_it_as_a_new_message(house: House, writer: Client) -> None:
    reader = house.connect("reader")
    reader.subscribe("t")
    writer.publish("t", b"x", retain=True)
    [message] = reader.messages()
    assert not message.retain


def test_retain_as_published_keeps_the_flag(house: House, writer: Client) -> None:
    reader = house.connect("reader")
    reader.subscribe("t", as_published=True)
    writer.publish("t", b"x", retain=True)
    writer.publish("t", b"y", retain=False)
    assert [message.retain for message in reader.messages()] == [True, False]


@pytest.mark.parametrize(
    ("handling", "first", "second"),
    [(0, [b"x"], [b"x"]), (1, [b"x"], []), (2, [], [])],
    ids=["always", "when new", "never"],
)
def test_retain_handling_says_when_it_is_sent(
    house: House, writer: Client, handling: int, first: list[bytes], second: list[bytes]
) -> None:
    writer.publish("t", b"x", retain=True)
    reader = house.connect("reader")
    reader.subscribe("t", handling=handling)
    assert reader.payloads() == first
    reader.subscribe("t", handling=handling)
    assert reader.payloads() == second
    reader.unsubscribe("t")
    reader.subscribe("t", handling=handling)
    assert reader.payloads() == first


def test_a_subscription_of_a_resumed_session_is_not_new(house: House, writer: Client) -> None:
    writer.publish("t", b"x", retain=True)
    reader = house.connect_lasting("reader")
    reader.subscribe("t", handling=2)
    reader.disconnect()
    reader = house.connect_lasting("reader")
    assert reader.take() == []
    reader.subscribe("t", handling=1)
    assert reader.take() == []


def test_shared_subscriptions_get_none(house: House, writer: Client) -> None:
    writer.publish("t", b"x", retain=True)
    assert heard(house, "$share/g/t") == []


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
def test_wildcards_find_them_and_dollar_topics_stay_hidden(
    house: House, writer: Client, topic_filter: str, topics: list[str]
) -> None:
    for topic in ("a", "a/b", "a/b/c", "/", "b/", "$DATA", "$DATA/x"):
        writer.publish(topic, topic.encode(), retain=True)
    assert heard(house, topic_filter) == [(topic.encode(), topic.encode()) for topic in sorted(topics)]


def test_it_expires(house: House, writer: Client) -> None:
    writer.publish("t", b"x", retain=True, message_expiry=10)
    writer.publish("u", b"y", retain=True)
    house.advance(4)
    reader = house.connect("reader")
    reader.subscribe("t")
    assert [message.expiry for message in reader.messages()] == [6]
    house.advance(6)
    assert heard(house, "#") == [(b"u", b"y")]
    assert house.broker.router.retained.count == 1


def test_expired_ones_are_swept_out_whether_or_not_anybody_asks(house: House, writer: Client) -> None:
    for nth in range(10):
        writer.publish(f"t/{nth}", b"x", retain=True, message_expiry=nth + 1)
    house.advance(5.5)
    retained = house.broker.router.retained
    assert retained.sweep(house.loop.now) == 5
    assert (retained.count, retained.bytes) == (5, 5)


def test_its_properties_are_kept(house: House, writer: Client) -> None:
    writer.publish("t", b"x", retain=True, content_type="text/plain", user=[("k", "v")])
    reader = house.connect("reader")
    reader.subscribe("t", identifier=7)
    [message] = reader.messages()
    told = message.properties()
    assert (told.content_type, told.user, told.subscription_ids) == ("text/plain", [("k", "v")], [7])


def test_a_full_store_takes_no_more_topics_and_says_so() -> None:
    house = House(max_retained=2)
    writer, reader = house.connect("w"), house.connect("r")
    reader.subscribe("#")
    writer.publish("a", b"1", retain=True)
    writer.publish("b", b"1", retain=True)
    for qos, kind in ((1, PUBACK), (2, PUBREC)):
        packet_id = writer.publish("c", b"1", qos, retain=True)
        refusal = writer.first_ack(kind, packet_id, 0x97)
        assert refusal.properties is not None and refusal.properties.reason_string
    assert reader.payloads() == [b"1", b"1"]
    writer.publish("a", b"2", retain=True)
    assert heard(house, "#") == [(b"a", b"2"), (b"b", b"1")]
    writer.publish("b", b"", retain=True)
    writer.publish("c", b"3", retain=True)
    assert heard(house, "#") == [(b"a", b"2"), (b"c", b"3")]


def retain(house: House, topic: str, payload: bytes, **properties: Any) -> int:
    """Have a client publish a retained message; the reason of its PUBACK."""
    writer = house.connect("w")
    packet_id = writer.publish(topic, payload, 1, retain=True, **properties)
    ack = writer.first_ack(PUBACK, packet_id)
    if ack.reason == 0x97:
        assert ack.properties is not None
        assert "mqtt.max_retained_bytes" in (ack.properties.reason_string or "")
    return int(ack.reason)


def test_retained_messages_have_so_many_bytes_and_no_more() -> None:
    house = House(max_retained_bytes=1000 + 3 * LEVEL_BYTES)
    assert retain(house, "a", bytes(500)) == 0x10
    assert retain(house, "b", bytes(498) + bytes(LEVEL_BYTES)) == 0x10
    assert retain(house, "c", b"x") == 0x97
    assert retain(house, "c" * 100, b"x") == 0x97
    assert retain(house, "a", bytes(501)) == 0x97
    assert heard(house, "a") == [(b"a", bytes(500))]  # what it had stays
    assert retain(house, "a", bytes(400)) == 0x10
    assert retain(house, "c", bytes(99)) == 0x97  # its level is too much
    assert retain(house, "b", bytes(498)) == 0x10
    assert retain(house, "c", bytes(99)) == 0x10
    assert retain(house, "d", b"x") == 0x97
    assert retain(house, "b", b"") == 0x10
    assert retain(house, "d", bytes(400), user=[("k", "v" * 91)]) == 0x10
    assert house.broker.router.retained.held_bytes == 1000 - 1 + 3 * LEVEL_BYTES
    assert retain(house, "e", b"x") == 0x97


def test_each_level_of_a_retained_topic_counts_until_it_is_empty() -> None:
    house = House(max_retained_bytes=100 * LEVEL_BYTES)
    retained = house.broker.router.retained
    deep = "/".join(["a"] * 90)
    assert retain(house, f"x/{deep}", b"x") == 0x10
    assert retain(house, f"y/{deep}", b"x") == 0x97
    assert retain(house, f"x/{deep[:-1]}b", b"x") == 0x10  # shares all levels but one
    assert retained.held_bytes == 92 * LEVEL_BYTES + 2 * (len(deep) + 3)
    assert retain(house, f"x/{deep}", b"") == 0x10
    assert retain(house, f"x/{deep[:-1]}b", b"") == 0x10
    assert retained.held_bytes == 0
    assert retain(house, f"y/{deep}", b"x") == 0x10


def test_what_has_expired_makes_room_for_other_retained_messages() -> None:
    house = House(max_retained_bytes=1000 + LEVEL_BYTES)
    assert retain(house, "a", bytes(999), message_expiry=10) == 0x10
    assert retain(house, "b", b"x") == 0x97
    house.advance(11)
    house.broker.router.retained.sweep(house.loop.now)
    assert house.broker.router.retained.held_bytes == 0
    assert retain(house, "b", b"x") == 0x10


def test_a_refused_qos_2_publish_may_be_tried_again_under_its_identifier() -> None:
    house = House(max_retained=0)
    writer, reader = house.connect("w"), house.connect("r")
    reader.subscribe("t")
    writer.publish("t", b"x", 2, retain=True, packet_id=3)
    writer.first_ack(PUBREC, 3, 0x97)
    writer.publish("t", b"x", 2, packet_id=3)
    writer.first_ack(PUBREC, 3, 0)
    assert reader.payloads() == [b"x"]


def test_a_server_without_retained_messages_refuses_them() -> None:
    house = House(retain_available=False)
    client = house.connect("a")
    client.publish("t", b"x", retain=True)
    assert client.fault()[0] == 0x9A


def test_a_topic_too_deep_to_be_kept_is_refused() -> None:
    house = House(max_topic_levels=4)
    client = house.connect("a")
    client.subscribe("#")
    ack = client.first_ack(PUBACK, client.publish("a/b/c/d/e", b"x", 1, retain=True), 0x90)
    assert ack.properties is not None
    assert "at most 4 levels here (mqtt.max_topic_levels)" in (ack.properties.reason_string or "")
    client.first_ack(PUBACK, client.publish("a/b/c/d", b"x", 1, retain=True), 0)
    client.first_ack(PUBACK, client.publish("a/b/c/d/e", b"x", 1), 0)
    assert len(client.messages()) == 2
