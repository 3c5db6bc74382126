"""Retained messages are sent in slices, and no older value follows a newer one."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.wire.encode import encode
from sluice.wire.packets import (
    V5,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
)
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client, props, will


def retain(harness: BrokerHarness, count: int, qos: int = 0, payload: bytes = b"old") -> Client:
    writer = harness.connect("writer")
    for nth in range(count):
        writer.publish(f"a/{nth}", payload, qos, retain=True)
    writer.take()
    return writer


def slow_clock(harness: BrokerHarness) -> None:
    """From now on each read of the clock advances it by 4 ms."""
    harness.loop.tick = 0.004


def send_subscribe(client: Client, *filters: str, qos: int = 0, handling: int = 0) -> None:
    requests = [SubscriptionRequest(one.encode(), qos, False, False, handling) for one in filters]
    client.connection.data_received(encode(Subscribe(client.next_id(), requests), V5))


def take_publishes(client: Client) -> list[Publish]:
    return [packet for packet in client.take() if isinstance(packet, Publish)]


def topics(messages: list[Publish]) -> list[bytes]:
    return sorted(message.topic for message in messages)


def test_other_clients_are_served_during_a_retained_lookup() -> None:
    harness = BrokerHarness()
    retain(harness, 3000)
    reader, other = harness.connect("r"), harness.connect("o")
    slow_clock(harness)
    send_subscribe(reader, "+/+")
    other.connection.data_received(encode(Pingreq(), V5))
    served = False
    while not served:
        harness.loop.step()
        served = any(isinstance(packet, Pingresp) for packet in other.take())
    first = take_publishes(reader)
    assert 0 < len(first) < 1500
    harness.loop.settle()
    assert topics(first + take_publishes(reader)) == sorted(b"a/%d" % nth for nth in range(3000))
    assert (
        reader.connection.session is not None
        and not reader.connection.session.retained_lookup.is_running()
    )


def test_many_filters_without_match_visit_the_topics_once() -> None:
    """The work grows with topics plus filters, and not with their product."""
    harness = BrokerHarness()
    retain(harness, 2000)
    retained = harness.broker.router.retained
    walk = retained.start_walk()
    for nth in range(1000):
        walk.add(b"+/+/x%d" % nth)
    assert walk.advance(3 * 2000, [])


def test_sessions_take_turns_with_their_slices() -> None:
    harness = BrokerHarness()
    retain(harness, 2000)
    readers = [harness.connect(f"r{nth}") for nth in range(3)]
    slow_clock(harness)
    for reader in readers:
        send_subscribe(reader, "#")
    for _ in range(8):
        harness.loop.step()
    shares = [len(take_publishes(reader)) for reader in readers]
    assert min(shares) > 0 and max(shares) < 2000
    harness.loop.settle()
    assert [
        len(take_publishes(reader)) + share for reader, share in zip(readers, shares, strict=True)
    ] == [2000] * 3


def test_suback_comes_first_and_few_messages_come_in_the_same_turn() -> None:
    harness = BrokerHarness()
    retain(harness, 3)
    reader = harness.connect("r")
    send_subscribe(reader, "a/1", "a/+")
    assert (
        reader.connection.session is not None
        and not reader.connection.session.retained_lookup.is_running()
    )
    harness.loop.settle()
    packets = reader.take()
    assert isinstance(packets[0], Suback)
    assert [packet.topic for packet in packets[1:] if isinstance(packet, Publish)] == [
        b"a/1",
        b"a/0",
        b"a/1",
        b"a/2",
    ]


def test_value_changed_during_the_lookup_is_sent_live_and_never_followed_by_an_older_one() -> None:
    harness = BrokerHarness()
    writer = retain(harness, 1000)
    reader = harness.connect("r")
    slow_clock(harness)
    send_subscribe(reader, "a/+")
    for nth in (0, 500, 999):
        writer.connection.data_received(encode(Publish(b"a/%d" % nth, b"new", 0, True), V5))
    writer.connection.data_received(encode(Publish(b"a/998", b"", 0, True), V5))
    writer.connection.data_received(encode(Publish(b"a/new", b"new", 0, True), V5))
    harness.loop.settle()
    last: dict[bytes, bytes] = {}
    messages = take_publishes(reader)
    for message in messages:
        assert message.retain is (message.payload == b"old")
        assert last.get(message.topic) != b"new", "an older value after a newer one"
        last[message.topic] = message.payload
    assert last[b"a/500"] == last[b"a/999"] == last[b"a/new"] == b"new"
    assert last[b"a/998"] == b""
    assert len([one for one in messages if one.topic == b"a/500"]) == 1
    assert len(last) == 1001


@pytest.mark.parametrize("topic_filter", ["a/+", "a/999"])
def test_value_not_yet_committed_is_not_followed_by_the_older_one(topic_filter: str) -> None:
    """A QoS 2 publish is queued at once, and replaces the retained value after its commit."""
    harness = BrokerHarness()
    writer = harness.connect_persistent("w")
    for nth in range(1000):
        writer.publish_fully(f"a/{nth}", b"old", 2, retain=True)
    reader = harness.connect_persistent("r")
    reader.subscribe("a/999", qos=2)
    for message in take_publishes(reader):
        reader.ack(message)
    if topic_filter == "a/+":
        slow_clock(harness)
        send_subscribe(reader, topic_filter, qos=2)
    harness.store.hold()
    publish = Publish(b"a/999", b"new", 2, True)
    publish.packet_id = writer.next_id()
    writer.connection.data_received(encode(publish, V5))
    if topic_filter != "a/+":
        send_subscribe(reader, topic_filter, qos=2)
    harness.loop.settle()
    harness.store.release()
    harness.loop.settle()
    values: list[bytes] = []
    while messages := take_publishes(reader):
        for message in messages:
            if message.topic == b"a/999":
                values.append(message.payload)
            reader.ack(message)
    assert values == [b"new"]


def test_unsubscribe_cancels_unsent_retained_messages() -> None:
    harness = BrokerHarness()
    retain(harness, 1000)
    reader = harness.connect("r")
    slow_clock(harness)
    send_subscribe(reader, "a/+", "b")
    harness.loop.step()
    harness.loop.tick = 0.0
    session = reader.connection.session
    assert session is not None and session.retained_lookup.is_running()
    harness.broker.router.unsubscribe(session, b"a/+")
    harness.loop.settle()
    assert 0 < len(take_publishes(reader)) < 1000
    assert not session.retained_lookup.is_running()


def test_end_of_the_session_cancels_unsent_retained_messages() -> None:
    harness = BrokerHarness()
    retain(harness, 1000)
    reader = harness.connect("r")
    slow_clock(harness)
    send_subscribe(reader, "a/+")
    session = reader.connection.session
    assert session is not None and session.retained_lookup.is_running()
    harness.broker.turn.flush()
    reader.drop()
    harness.loop.settle()
    assert not session.retained_lookup.is_running() and session.outbound.dropped_count == 0


@pytest.mark.parametrize("handling", [1, 2])
def test_repeated_subscription_without_retained_messages_does_not_end_the_first(
    handling: int,
) -> None:
    harness = BrokerHarness()
    retain(harness, 1000)
    reader = harness.connect("r")
    slow_clock(harness)
    send_subscribe(reader, "a/+")
    send_subscribe(reader, "a/+", handling=handling)
    harness.loop.settle()
    assert topics(take_publishes(reader)) == sorted(b"a/%d" % nth for nth in range(1000))


def test_slow_reader_gets_all_retained_messages_with_bounded_memory() -> None:
    harness = BrokerHarness(write_buffer_high=4096)
    retain(harness, 2000, payload=b"old" * 500)
    reader = harness.connect("r")
    reader.transport.is_blocked = True
    send_subscribe(reader, "#")
    for _ in range(200):
        harness.loop.settle()
        assert len(reader.transport.pending) < 400_000
        reader.transport.drain()
    assert len(take_publishes(reader)) == 2000
    assert harness.broker.counters.publishes_dropped == 0


def test_acknowledgements_release_the_remaining_retained_messages() -> None:
    harness = BrokerHarness(max_queued_messages=20, max_inflight=10)
    retain(harness, 200, qos=1)
    reader = harness.connect("r")
    reader.subscribe("#", qos=1)
    got: list[bytes] = []
    for _ in range(300):
        for message in reader.messages():
            got.append(message.topic)
            reader.ack(message)
    assert sorted(got) == sorted(b"a/%d" % nth for nth in range(200))
    assert harness.broker.counters.publishes_dropped == 0


def test_persistent_session_gets_the_rest_when_it_returns() -> None:
    harness = BrokerHarness()
    retain(harness, 500, qos=1)
    reader = harness.connect_persistent("r")
    harness.loop.settle()
    slow_clock(harness)
    send_subscribe(reader, "a/+", qos=1)
    harness.broker.turn.flush()
    reader.connection.connection_lost(None)
    harness.loop.tick = 0.0
    harness.loop.settle()
    reader = harness.connect_persistent("r")
    got: set[bytes] = set()
    for _ in range(10):
        for message in reader.messages():
            got.add(message.topic)
            reader.ack(message)
    assert got == {b"a/%d" % nth for nth in range(500)}


@pytest.mark.parametrize(
    "limits",
    [{"max_queued_messages": 100}, {"max_queued_bytes": 100_000}],
    ids=["messages", "bytes"],
)
def test_half_of_an_offline_sessions_queue_is_reserved_for_live_messages(
    limits: dict[str, Any],
) -> None:
    harness = BrokerHarness(**limits)
    writer = retain(harness, 400, qos=1, payload=bytes(1000))
    reader = harness.connect_persistent("r", receive_maximum=10)
    reader.subscribe("a/+", qos=1)
    reader.drop()
    harness.loop.settle()
    for nth in range(20):
        writer.publish_fully(f"a/live{nth}", b"live", 1)
    reader = harness.connect_persistent("r", receive_maximum=10)
    got: list[bytes] = []
    while messages := take_publishes(reader):
        for message in messages:
            got.append(message.topic)
            reader.ack(message)
    wanted = {b"a/%d" % nth for nth in range(400)} | {b"a/live%d" % nth for nth in range(20)}
    assert set(got) == wanted
    assert harness.broker.counters.publishes_dropped == 0


def test_bytes_of_a_clients_filters_and_levels_are_limited() -> None:
    harness = BrokerHarness(max_subscription_bytes=200_000)
    client = harness.connect("c")
    deep = "/".join(["a"] * 100)
    granted = client.subscribe(*[f"{nth}/{deep}" for nth in range(10)])
    assert granted == [0] * 4 + [0x97] * 6
    assert client.subscribe(f"0/{deep}") == [0]  # an existing one
    assert client.unsubscribe(f"1/{deep}") == [0]
    assert client.subscribe(f"9/{deep}", f"8/{deep}", "$share/g/" + deep) == [0, 0x97, 0x97]
    client.unsubscribe(*[f"{nth}/{deep}" for nth in (0, 2, 3, 9)])
    session = client.connection.session
    assert session is not None and session.subscription_bytes == 0
    other = harness.connect("d", 4)
    assert other.subscribe(*[f"{nth}/{deep}" for nth in range(5)]) == [0] * 4 + [0x80]


def test_characters_of_queue_subscription_options_are_limited() -> None:
    harness = BrokerHarness()
    client = harness.connect("c")
    long = props(user=[("note", "x" * 9000)])
    client.send(
        Subscribe(1, [SubscriptionRequest(b"$queue/a", 1), SubscriptionRequest(b"a", 1)], long)
    )
    assert client.first(Suback).reasons == [0x97, 1]
    assert harness.engine.queues == {}


def short_of_memory(harness: BrokerHarness) -> None:
    router = harness.broker.router
    router.is_out_of_memory = router.is_out_of_space = True
    router.set_unavailable("the broker uses 9 MiB of memory")


def test_above_memory_limit_new_plain_subscriptions_are_refused_but_not_consumers() -> None:
    harness = BrokerHarness()
    client = harness.connect("c")
    assert client.subscribe("a") == [0]
    short_of_memory(harness)
    client.send(Subscribe(9, [SubscriptionRequest(one, 1) for one in (b"a", b"b", b"$share/g/b")]))
    suback = client.first(Suback)
    assert suback.reasons == [1, 0x97, 0x97]
    assert suback.properties is not None and "9 MiB" in (suback.properties.reason_string or "")
    assert client.subscribe("$queue/jobs", "$admin/+/events", qos=1)[0] == 1
    assert harness.connect("d", 4).subscribe("b") == [0x80]
    assert harness.broker.router.refused_out_of_memory == 3


def test_above_memory_limit_new_persistent_sessions_are_refused_and_known_ones_resume() -> None:
    harness = BrokerHarness()
    harness.connect_persistent("known").disconnect()
    harness.loop.settle()
    short_of_memory(harness)
    assert harness.connect_persistent("known").connack.session_present
    assert harness.connect_persistent("new").connack.reason == 0x97
    assert harness.connect_persistent("older", 4).connack.reason == 3
    assert harness.connect("new").connack.reason == 0


def test_retained_will_with_too_many_levels_is_refused_with_the_limit() -> None:
    client = BrokerHarness(max_topic_levels=4).connect("c", will=will("a/b/c/d/e", retain=True))
    assert client.connack.reason == 0x90
    properties = client.connack.properties
    assert properties is not None and "mqtt.max_topic_levels" in (properties.reason_string or "")
