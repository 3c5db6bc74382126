"""Retained messages for new subscriptions come in slices: others are served, and no value comes late."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.wire.encode import encode
from sluice.wire.packets import V5, Pingreq, Pingresp, Publish, Suback, Subscribe, SubscriptionRequest
from tests.broker.kit import Client, House, props, will
from tests.broker.namespaces.kit import QueueHouse


def retain(house: House, count: int, qos: int = 0, payload: bytes = b"old") -> Client:
    writer = house.connect("writer")
    for nth in range(count):
        writer.publish(f"a/{nth}", payload, qos, retain=True)
    writer.take()
    return writer


def slow(house: House) -> None:
    """From now on each look at the clock shows that 4 ms have passed."""
    house.loop.tick = 0.004


def ask(client: Client, *filters: str, qos: int = 0, handling: int = 0) -> None:
    requests = [SubscriptionRequest(one.encode(), qos, False, False, handling) for one in filters]
    client.connection.data_received(encode(Subscribe(client.next_id(), requests), V5))


def arrived(client: Client) -> list[Publish]:
    return [packet for packet in client.take() if isinstance(packet, Publish)]


def topics(messages: list[Publish]) -> list[bytes]:
    return sorted(message.topic for message in messages)


def test_others_are_served_while_retained_messages_are_looked_up() -> None:
    house = House()
    retain(house, 3000)
    reader, other = house.connect("r"), house.connect("o")
    slow(house)
    ask(reader, "+/+")
    other.connection.data_received(encode(Pingreq(), V5))
    served = False
    while not served:
        house.loop.step()
        served = any(isinstance(packet, Pingresp) for packet in other.take())
    first = arrived(reader)
    assert 0 < len(first) < 1500
    house.loop.settle()
    assert topics(first + arrived(reader)) == sorted(b"a/%d" % nth for nth in range(3000))
    assert reader.connection.session is not None and reader.connection.session.retained_sender is None


def test_many_filters_that_match_nothing_visit_the_topics_once() -> None:
    """The work grows with topics and filters, and not with their product."""
    house = House()
    retain(house, 2000)
    retained = house.broker.router.retained
    walk = retained.walk()
    for nth in range(1000):
        walk.add(b"+/+/x%d" % nth)
    assert walk.advance(3 * 2000, [])


def test_sessions_take_turns_with_their_slices() -> None:
    house = House()
    retain(house, 2000)
    readers = [house.connect(f"r{nth}") for nth in range(3)]
    slow(house)
    for reader in readers:
        ask(reader, "#")
    for _ in range(8):
        house.loop.step()
    shares = [len(arrived(reader)) for reader in readers]
    assert min(shares) > 0 and max(shares) < 2000
    house.loop.settle()
    assert [len(arrived(reader)) + share for reader, share in zip(readers, shares, strict=True)] == [2000] * 3


def test_suback_comes_first_and_few_messages_come_in_the_same_turn() -> None:
    house = House()
    retain(house, 3)
    reader = house.connect("r")
    ask(reader, "a/1", "a/+")
    assert reader.connection.session is not None and reader.connection.session.retained_sender is None
    house.loop.settle()
    packets = reader.take()
    assert isinstance(packets[0], Suback)
    assert [packet.topic for packet in packets[1:] if isinstance(packet, Publish)] == [
        b"a/1",
        b"a/0",
        b"a/1",
        b"a/2",
    ]


def test_what_changes_meanwhile_comes_as_a_live_message_and_never_as_an_older_one() -> None:
    house = House()
    writer = retain(house, 1000)
    reader = house.connect("r")
    slow(house)
    ask(reader, "a/+")
    for nth in (0, 500, 999):
        writer.connection.data_received(encode(Publish(b"a/%d" % nth, b"new", 0, True), V5))
    writer.connection.data_received(encode(Publish(b"a/998", b"", 0, True), V5))
    writer.connection.data_received(encode(Publish(b"a/new", b"new", 0, True), V5))
    house.loop.settle()
    last: dict[bytes, bytes] = {}
    messages = arrived(reader)
    for message in messages:
        assert message.retain is (message.payload == b"old")
        assert last.get(message.topic) != b"new", "an older value after a newer one"
        last[message.topic] = message.payload
    assert last[b"a/500"] == last[b"a/999"] == last[b"a/new"] == b"new"
    assert last[b"a/998"] == b""
    assert len([one for one in messages if one.topic == b"a/500"]) == 1
    assert len(last) == 1001


@pytest.mark.parametrize("topic_filter", ["a/+", "a/999"])
def test_value_that_waits_for_the_store_is_not_followed_by_the_older_one(topic_filter: str) -> None:
    """A QoS 2 publish is queued for the session at once, and replaces the retained value once stored."""
    house = QueueHouse()
    writer = house.connect_lasting("w")
    for nth in range(1000):
        writer.publish_fully(f"a/{nth}", b"old", 2, retain=True)
    reader = house.connect_lasting("r")
    reader.subscribe("a/999", qos=2)
    for message in arrived(reader):
        reader.ack(message)
    if topic_filter == "a/+":
        slow(house)
        ask(reader, topic_filter, qos=2)
    house.store.hold()
    publish = Publish(b"a/999", b"new", 2, True)
    publish.packet_id = writer.next_id()
    writer.connection.data_received(encode(publish, V5))
    if topic_filter != "a/+":
        ask(reader, topic_filter, qos=2)
    house.loop.settle()
    house.store.release()
    house.loop.settle()
    values: list[bytes] = []
    while messages := arrived(reader):
        for message in messages:
            if message.topic == b"a/999":
                values.append(message.payload)
            reader.ack(message)
    assert values == [b"new"]


def test_unsubscribe_cancels_what_was_not_sent() -> None:
    house = House()
    retain(house, 1000)
    reader = house.connect("r")
    slow(house)
    ask(reader, "a/+", "b")
    house.loop.step()
    house.loop.tick = 0.0
    session = reader.connection.session
    assert session is not None and session.retained_sender is not None
    house.broker.router.unsubscribe(session, b"a/+")
    house.loop.settle()
    assert 0 < len(arrived(reader)) < 1000
    assert session.retained_sender is None


def test_the_end_of_the_session_cancels_it() -> None:
    house = House()
    retain(house, 1000)
    reader = house.connect("r")
    slow(house)
    ask(reader, "a/+")
    session = reader.connection.session
    assert session is not None and session.retained_sender is not None
    house.broker.turn.flush()
    reader.drop()
    house.loop.settle()
    assert session.retained_sender is None and session.dropped == 0


@pytest.mark.parametrize("handling", [1, 2])
def test_a_repeated_subscription_without_retained_messages_does_not_end_the_first(handling: int) -> None:
    house = House()
    retain(house, 1000)
    reader = house.connect("r")
    slow(house)
    ask(reader, "a/+")
    ask(reader, "a/+", handling=handling)
    house.loop.settle()
    assert topics(arrived(reader)) == sorted(b"a/%d" % nth for nth in range(1000))


def test_a_slow_reader_gets_all_of_them_and_they_do_not_pile_up() -> None:
    house = House(write_buffer_high=4096)
    retain(house, 2000, payload=b"old" * 500)
    reader = house.connect("r")
    reader.transport.jammed = True
    ask(reader, "#")
    for _ in range(200):
        house.loop.settle()
        assert len(reader.transport.pending) < 400_000
        reader.transport.drain()
    assert len(arrived(reader)) == 2000
    assert house.broker.counters.publishes_dropped == 0


def test_acknowledgements_bring_the_rest() -> None:
    house = House(max_queued_messages=20, max_inflight=10)
    retain(house, 200, qos=1)
    reader = house.connect("r")
    reader.subscribe("#", qos=1)
    got: list[bytes] = []
    for _ in range(300):
        for message in reader.messages():
            got.append(message.topic)
            reader.ack(message)
    assert sorted(got) == sorted(b"a/%d" % nth for nth in range(200))
    assert house.broker.counters.publishes_dropped == 0


def test_a_persistent_session_gets_the_rest_when_it_is_back() -> None:
    house = QueueHouse()
    retain(house, 500, qos=1)
    reader = house.connect_lasting("r")
    house.loop.settle()
    slow(house)
    ask(reader, "a/+", qos=1)
    house.broker.turn.flush()
    reader.connection.connection_lost(None)
    house.loop.tick = 0.0
    house.loop.settle()
    reader = house.connect_lasting("r")
    got: set[bytes] = set()
    for _ in range(10):
        for message in reader.messages():
            got.add(message.topic)
            reader.ack(message)
    assert got == {b"a/%d" % nth for nth in range(500)}


@pytest.mark.parametrize(
    "limits", [{"max_queued_messages": 100}, {"max_queued_bytes": 100_000}], ids=["messages", "bytes"]
)
def test_while_the_client_is_away_half_of_the_queue_is_left_for_live_messages(limits: dict[str, Any]) -> None:
    house = QueueHouse(**limits)
    writer = retain(house, 400, qos=1, payload=bytes(1000))
    reader = house.connect_lasting("r", receive_maximum=10)
    reader.subscribe("a/+", qos=1)
    reader.drop()
    house.loop.settle()
    for nth in range(20):
        writer.publish_fully(f"a/live{nth}", b"live", 1)
    reader = house.connect_lasting("r", receive_maximum=10)
    got: list[bytes] = []
    while messages := arrived(reader):
        for message in messages:
            got.append(message.topic)
            reader.ack(message)
    wanted = {b"a/%d" % nth for nth in range(400)} | {b"a/live%d" % nth for nth in range(20)}
    assert set(got) == wanted
    assert house.broker.counters.publishes_dropped == 0


def test_filters_of_a_client_have_so_many_bytes_with_their_levels() -> None:
    house = House(max_subscription_bytes=200_000)
    client = house.connect("c")
    deep = "/".join(["a"] * 100)
    granted = client.subscribe(*[f"{nth}/{deep}" for nth in range(10)])
    assert granted == [0] * 4 + [0x97] * 6
    assert client.subscribe(f"0/{deep}") == [0]  # one that it has
    assert client.unsubscribe(f"1/{deep}") == [0]
    assert client.subscribe(f"9/{deep}", f"8/{deep}", "$share/g/" + deep) == [0, 0x97, 0x97]
    client.unsubscribe(*[f"{nth}/{deep}" for nth in (0, 2, 3, 9)])
    session = client.connection.session
    assert session is not None and session.subscription_bytes == 0
    other = house.connect("d", 4)
    assert other.subscribe(*[f"{nth}/{deep}" for nth in range(5)]) == [0] * 4 + [0x80]


def test_options_of_queue_subscriptions_have_so_many_characters() -> None:
    house = QueueHouse()
    client = house.connect("c")
    long = props(user=[("note", "x" * 9000)])
    client.send(Subscribe(1, [SubscriptionRequest(b"$queue/a", 1), SubscriptionRequest(b"a", 1)], long))
    assert client.first(Suback).reasons == [0x97, 1]
    assert house.engine.queues == {}


def short_of_memory(house: House) -> None:
    router = house.broker.router
    router.no_memory = router.no_room = True
    router.stalled("the broker uses 9 MiB of memory")


def test_without_memory_new_plain_subscriptions_are_refused_and_consumers_are_not() -> None:
    house = QueueHouse()
    client = house.connect("c")
    assert client.subscribe("a") == [0]
    short_of_memory(house)
    client.send(Subscribe(9, [SubscriptionRequest(one, 1) for one in (b"a", b"b", b"$share/g/b")]))
    suback = client.first(Suback)
    assert suback.reasons == [1, 0x97, 0x97]
    assert suback.properties is not None and "9 MiB" in (suback.properties.reason_string or "")
    assert client.subscribe("$queue/jobs", "$admin/+/events", qos=1)[0] == 1
    assert house.connect("d", 4).subscribe("b") == [0x80]
    assert house.broker.router.refused_for_memory == 3


def test_without_memory_new_persistent_sessions_are_refused_and_known_ones_resume() -> None:
    house = QueueHouse()
    house.connect_lasting("known").disconnect()
    house.loop.settle()
    short_of_memory(house)
    assert house.connect_lasting("known").connack.session_present
    assert house.connect_lasting("new").connack.reason == 0x97
    assert house.connect_lasting("older", 4).connack.reason == 3
    assert house.connect("new").connack.reason == 0


def test_a_will_that_is_too_deep_to_be_retained_names_the_limit() -> None:
    client = House(max_topic_levels=4).connect("c", will=will("a/b/c/d/e", retain=True))
    assert client.connack.reason == 0x90
    properties = client.connack.properties
    assert properties is not None and "mqtt.max_topic_levels" in (properties.reason_string or "")
