"""One large packet, or one read with many packets, does not block other clients."""

from __future__ import annotations

import pytest

from sluice.broker.net.connection import MAX_PUBLISH_USER_PROPERTIES
from sluice.wire.decode import MAX_FILTERS
from sluice.wire.encode import encode
from sluice.wire.packets import (
    V5,
    V311,
    Disconnect,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsuback,
    Unsubscribe,
    build_publish,
)
from sluice.wire.properties import MAX_USER_PROPERTIES
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client, props


def names(count: int) -> list[str]:
    return [f"a/{nth}" for nth in range(count)]


# ---- too much in one packet


@pytest.mark.parametrize(("version", "reason"), [(V5, 0x97), (V311, 0x80)])
def test_filters_per_subscribe_are_limited(version: int, reason: int) -> None:
    harness = BrokerHarness()
    client = harness.connect("c", version)
    assert client.subscribe(*names(MAX_FILTERS)) == [0] * MAX_FILTERS
    other = harness.connect("d", version)
    requests = [SubscriptionRequest(one.encode(), 0) for one in names(MAX_FILTERS + 1)]
    other.send(Subscribe(1, requests))
    suback = other.first(Suback)
    assert suback.reasons == [reason] * (MAX_FILTERS + 1)
    if version == V5:
        assert suback.properties is not None and "several packets" in (
            suback.properties.reason_string or ""
        )
    assert harness.broker.router.subscriptions.count == MAX_FILTERS
    other.ping()


def test_filters_per_unsubscribe_are_limited() -> None:
    harness = BrokerHarness()
    client = harness.connect("c")
    client.subscribe(*names(5))
    client.send(Unsubscribe(2, [one.encode() for one in names(MAX_FILTERS + 1)]))
    unsuback = client.first(Unsuback)
    assert unsuback.reasons == [0x83] * (MAX_FILTERS + 1)
    assert unsuback.properties is not None and "several packets" in (
        unsuback.properties.reason_string or ""
    )
    assert harness.broker.router.subscriptions.count == 5
    assert client.unsubscribe(*names(MAX_FILTERS)) == [0] * 5 + [0x11] * (MAX_FILTERS - 5)


def test_refused_unsubscribe_ends_a_3_1_1_connection() -> None:
    """Its UNSUBACK would confirm the request."""
    client = BrokerHarness().connect("c", V311)
    client.send(Unsubscribe(2, [one.encode() for one in names(MAX_FILTERS + 1)]))
    assert client.closed and client.take() == []


def test_far_too_many_filters_are_refused_without_counting_them() -> None:
    client = BrokerHarness().connect("c")
    requests = [SubscriptionRequest(b"a", 0)] * (12 * MAX_FILTERS)
    client.send(Subscribe(1, requests))
    reason, why = client.fault()
    assert (reason, "several packets" in why) == (0x97, True)


def test_user_properties_per_publish_are_limited() -> None:
    harness = BrokerHarness()
    reader = harness.connect("r")
    reader.subscribe("t")
    client = harness.connect("c")
    client.publish("t", b"", user=[("a", "b")] * MAX_PUBLISH_USER_PROPERTIES)
    [message] = reader.messages()
    assert len(message.decode_properties().user) == MAX_PUBLISH_USER_PROPERTIES
    client.publish("t", b"", user=[("a", "b")] * (MAX_PUBLISH_USER_PROPERTIES + 1))
    reason, why = client.fault()
    assert (reason, "Send fewer" in why) == (0x97, True)
    assert reader.messages() == []


def test_user_properties_of_other_packets_have_a_lower_limit() -> None:
    client = BrokerHarness().connect("c")
    few = props(user=[("a", "b")] * MAX_USER_PROPERTIES)
    client.send(Unsubscribe(1, [b"a"], few))
    assert client.first(Unsuback).reasons == [0x11]
    client.send(Unsubscribe(2, [b"a"], props(user=[("a", "b")] * (MAX_USER_PROPERTIES + 1))))
    assert client.fault()[0] == 0x97


def test_subscribe_with_too_many_options_is_refused() -> None:
    """Each of its filters would be checked against each of them."""
    harness = BrokerHarness()
    client = harness.connect("c")
    requests = [SubscriptionRequest(b"$queue/a", 1), SubscriptionRequest(b"b", 1)]
    client.send(Subscribe(1, requests, props(user=[("a", "b")] * 65)))
    suback = client.first(Suback)
    assert suback.reasons == [0x97, 0x97]
    assert harness.engine.queues == {}
    client.send(Subscribe(1, requests, props(user=[("a", "b")] * 64)))
    assert client.first(Suback).reasons == [1, 1]


# ---- much in one read


def slow_clock(harness: BrokerHarness | BrokerHarness) -> None:
    """From now on each read of the clock advances it by 4 ms."""
    harness.loop.tick = 0.004


def make_publishes(count: int) -> bytes:
    return b"".join(
        encode(build_publish(b"t", b"%d" % nth + bytes(500), 0, False, None), V5)
        for nth in range(count)
    )


def has_pong(client: Client) -> bool:
    return any(isinstance(packet, Pingresp) for packet in client.take())


def test_other_clients_are_served_while_a_large_read_is_processed() -> None:
    harness = BrokerHarness()
    reader, sender, other = harness.connect("r"), harness.connect("s"), harness.connect("o")
    reader.subscribe("t")
    slow_clock(harness)
    before = harness.broker.counters.publishes_received
    sender.connection.data_received(make_publishes(400))
    other.connection.data_received(encode(Pingreq(), V5))
    assert not sender.transport.reading
    while not has_pong(other):
        harness.loop.step()
    assert harness.broker.counters.publishes_received - before < 100
    harness.loop.settle()
    assert sender.transport.reading
    assert [int(one[:-500]) for one in reader.payloads()] == list(range(400))


def test_clients_that_send_much_take_turns() -> None:
    harness = BrokerHarness()
    senders = [harness.connect(f"s{nth}") for nth in range(5)]
    other = harness.connect("o")
    slow_clock(harness)
    before = harness.broker.counters.publishes_received
    for sender in senders:
        sender.connection.data_received(make_publishes(200))
    first = harness.broker.counters.publishes_received - before
    harness.loop.step()
    other.connection.data_received(encode(Pingreq(), V5))
    while not has_pong(other):
        harness.loop.step()
    assert harness.broker.counters.publishes_received - before < 2 * first
    harness.loop.settle()
    assert harness.broker.counters.publishes_received - before == 1000


def test_data_that_arrives_meanwhile_is_processed_in_order() -> None:
    harness = BrokerHarness()
    reader, sender = harness.connect("r"), harness.connect("s")
    reader.subscribe("t")
    slow_clock(harness)
    whole = make_publishes(300) + encode(build_publish(b"t", b"last", 0, False, None), V5)
    sender.connection.data_received(whole[:100_000])
    sender.connection.data_received(whole[100_000:150_001])  # a transport may have read it already
    sender.connection.data_received(whole[150_001:])
    harness.loop.settle()
    assert [one.rstrip(b"\0") for one in reader.payloads()] == [
        *(b"%d" % nth for nth in range(300)),
        b"last",
    ]


def test_data_read_before_the_peer_closed_is_processed() -> None:
    harness = BrokerHarness()
    reader, sender = harness.connect("r"), harness.connect("s")
    reader.subscribe("t")
    slow_clock(harness)
    sender.connection.data_received(make_publishes(300) + encode(Disconnect(), V5))
    assert sender.connection.eof_received() is False
    sender.drop()
    harness.loop.settle()
    assert len(reader.payloads()) == 300
    assert sender.connection.lost


def test_paused_connection_is_not_read_after_it_caught_up() -> None:
    harness = BrokerHarness()
    sender = harness.connect("s")
    slow_clock(harness)
    sender.connection.data_received(make_publishes(100))
    assert sender.connection.throttle()
    harness.loop.settle()
    assert not sender.transport.reading
    sender.connection.unthrottle()
    assert sender.transport.reading


def test_protocol_error_in_buffered_data_ends_the_connection() -> None:
    harness = BrokerHarness()
    sender = harness.connect("s")
    slow_clock(harness)
    sender.connection.data_received(make_publishes(100) + b"\x00\x00")
    harness.loop.settle()
    assert sender.fault()[0] == 0x81
    assert harness.broker.counters.publishes_received == 100


def test_other_clients_are_served_while_many_queues_are_created() -> None:
    harness = BrokerHarness()
    client, other = harness.connect("c"), harness.connect("o")
    requests = [SubscriptionRequest(b"$queue/q%d" % nth, 1) for nth in range(200)]
    slow_clock(harness)
    client.connection.data_received(encode(Subscribe(7, requests), V5) + encode(Pingreq(), V5))
    other.connection.data_received(encode(Pingreq(), V5))
    while not has_pong(other):
        harness.loop.step()
    assert 0 < len(harness.engine.queues) < 100
    harness.loop.settle()
    packets = client.take()
    assert [type(packet) for packet in packets if not isinstance(packet, Publish)] == [
        Suback,
        Pingresp,
    ]
    assert isinstance(packets[0], Suback) and packets[0].reasons == [1] * 200


def test_client_that_disconnects_during_its_subscribe_does_no_harm() -> None:
    harness = BrokerHarness()
    client = harness.connect("c")
    requests = [SubscriptionRequest(b"$queue/q%d" % nth, 1) for nth in range(200)]
    slow_clock(harness)
    client.connection.data_received(encode(Subscribe(7, requests), V5))
    client.drop()
    harness.loop.tick = 0.0
    harness.connect("d").ping()
    assert len(harness.engine.queues) < 200
