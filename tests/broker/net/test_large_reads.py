"""One packet, or one read full of packets, does not keep the others waiting."""

from __future__ import annotations

import pytest

from sluice.broker.net.connection import PUBLISH_PROPERTIES
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
    publish_with,
)
from sluice.wire.properties import MAX_USER_PROPERTIES
from tests.broker.kit import Client, House, props
from tests.broker.namespaces.kit import QueueHouse


def names(count: int) -> list[str]:
    return [f"a/{nth}" for nth in range(count)]


# ---- too much in one packet


@pytest.mark.parametrize(("version", "reason"), [(V5, 0x97), (V311, 0x80)])
def test_a_subscribe_has_so_many_filters_and_no_more(version: int, reason: int) -> None:
    house = House()
    client = house.connect("c", version)
    assert client.subscribe(*names(MAX_FILTERS)) == [0] * MAX_FILTERS
    other = house.connect("d", version)
    requests = [SubscriptionRequest(one.encode(), 0) for one in names(MAX_FILTERS + 1)]
    other.send(Subscribe(1, requests))
    suback = other.first(Suback)
    assert suback.reasons == [reason] * (MAX_FILTERS + 1)
    if version == V5:
        assert suback.properties is not None and "several packets" in (suback.properties.reason_string or "")
    assert house.broker.router.subscriptions.count == MAX_FILTERS
    other.ping()


def test_an_unsubscribe_has_so_many_filters_and_no_more() -> None:
    house = House()
    client = house.connect("c")
    client.subscribe(*names(5))
    client.send(Unsubscribe(2, [one.encode() for one in names(MAX_FILTERS + 1)]))
    unsuback = client.first(Unsuback)
    assert unsuback.reasons == [0x83] * (MAX_FILTERS + 1)
    assert unsuback.properties is not None and "several packets" in (unsuback.properties.reason_string or "")
    assert house.broker.router.subscriptions.count == 5
    assert client.unsubscribe(*names(MAX_FILTERS)) == [0] * 5 + [0x11] * (MAX_FILTERS - 5)


def test_in_3_1_1_a_refused_unsubscribe_ends_the_connection() -> None:
    """Its UNSUBACK would say that it was done."""
    client = House().connect("c", V311)
    client.send(Unsubscribe(2, [one.encode() for one in names(MAX_FILTERS + 1)]))
    assert client.closed and client.take() == []


def test_filters_beyond_all_measure_are_not_even_counted() -> None:
    client = House().connect("c")
    requests = [SubscriptionRequest(b"a", 0)] * (12 * MAX_FILTERS)
    client.send(Subscribe(1, requests))
    reason, why = client.fault()
    assert (reason, "several packets" in why) == (0x97, True)


def test_a_publish_has_so_many_user_properties_and_no_more() -> None:
    house = House()
    reader = house.connect("r")
    reader.subscribe("t")
    client = house.connect("c")
    client.publish("t", b"", user=[("a", "b")] * PUBLISH_PROPERTIES)
    [message] = reader.messages()
    assert len(message.properties().user) == PUBLISH_PROPERTIES
    client.publish("t", b"", user=[("a", "b")] * (PUBLISH_PROPERTIES + 1))
    reason, why = client.fault()
    assert (reason, "Send fewer" in why) == (0x97, True)
    assert reader.messages() == []


def test_other_packets_have_fewer_user_properties() -> None:
    client = House().connect("c")
    few = props(user=[("a", "b")] * MAX_USER_PROPERTIES)
    client.send(Unsubscribe(1, [b"a"], few))
    assert client.first(Unsuback).reasons == [0x11]
    client.send(Unsubscribe(2, [b"a"], props(user=[("a", "b")] * (MAX_USER_PROPERTIES + 1))))
    assert client.fault()[0] == 0x97


def test_a_subscribe_with_many_options_is_refused() -> None:
    """Each of its filters would be held against each of them."""
    house = QueueHouse()
    client = house.connect("c")
    requests = [SubscriptionRequest(b"$queue/a", 1), SubscriptionRequest(b"b", 1)]
    client.send(Subscribe(1, requests, props(user=[("a", "b")] * 65)))
    suback = client.first(Suback)
    assert suback.reasons == [0x97, 0x97]
    assert house.engine.queues == {}
    client.send(Subscribe(1, requests, props(user=[("a", "b")] * 64)))
    assert client.first(Suback).reasons == [1, 1]


# ---- much in one read


def slow(house: House | QueueHouse) -> None:
    """From now on each look at the clock shows that 4 ms have passed."""
    house.loop.tick = 0.004


def many(count: int) -> bytes:
    return b"".join(
        encode(publish_with(b"t", b"%d" % nth + bytes(500), 0, False, None), V5) for nth in range(count)
    )


def answered(client: Client) -> bool:
    return any(isinstance(packet, Pingresp) for packet in client.take())


def test_others_are_served_while_a_large_read_is_worked_off() -> None:
    house = House()
    reader, sender, other = house.connect("r"), house.connect("s"), house.connect("o")
    reader.subscribe("t")
    slow(house)
    before = house.broker.counters.publishes_received
    sender.connection.data_received(many(400))
    other.connection.data_received(encode(Pingreq(), V5))
    assert not sender.transport.reading
    while not answered(other):
        house.loop.step()
    assert house.broker.counters.publishes_received - before < 100
    house.loop.settle()
    assert sender.transport.reading
    assert [int(one[:-500]) for one in reader.payloads()] == list(range(400))


def test_several_that_send_much_take_turns() -> None:
    house = House()
    senders = [house.connect(f"s{nth}") for nth in range(5)]
    other = house.connect("o")
    slow(house)
    before = house.broker.counters.publishes_received
    for sender in senders:
        sender.connection.data_received(many(200))
    first = house.broker.counters.publishes_received - before
    house.loop.step()
    other.connection.data_received(encode(Pingreq(), V5))
    while not answered(other):
        house.loop.step()
    assert house.broker.counters.publishes_received - before < 2 * first
    house.loop.settle()
    assert house.broker.counters.publishes_received - before == 1000


def test_what_comes_meanwhile_is_kept_in_order() -> None:
    house = House()
    reader, sender = house.connect("r"), house.connect("s")
    reader.subscribe("t")
    slow(house)
    whole = many(300) + encode(publish_with(b"t", b"last", 0, False, None), V5)
    sender.connection.data_received(whole[:100_000])
    sender.connection.data_received(whole[100_000:150_001])  # a transport may have had it already
    sender.connection.data_received(whole[150_001:])
    house.loop.settle()
    assert [one.rstrip(b"\0") for one in reader.payloads()] == [*(b"%d" % nth for nth in range(300)), b"last"]


def test_what_was_read_before_the_peer_has_closed_is_worked_off() -> None:
    house = House()
    reader, sender = house.connect("r"), house.connect("s")
    reader.subscribe("t")
    slow(house)
    sender.connection.data_received(many(300) + encode(Disconnect(), V5))
    assert sender.connection.eof_received() is False
    sender.drop()
    house.loop.settle()
    assert len(reader.payloads()) == 300
    assert sender.connection.lost


def test_a_connection_that_is_held_meanwhile_is_not_read_when_it_has_caught_up() -> None:
    house = House()
    sender = house.connect("s")
    slow(house)
    sender.connection.data_received(many(100))
    assert sender.connection.hold()
    house.loop.settle()
    assert not sender.transport.reading
    sender.connection.unhold()
    assert sender.transport.reading


def test_a_fault_in_what_was_left_over_ends_the_connection() -> None:
    house = House()
    sender = house.connect("s")
    slow(house)
    sender.connection.data_received(many(100) + b"\x00\x00")
    house.loop.settle()
    assert sender.fault()[0] == 0x81
    assert house.broker.counters.publishes_received == 100


def test_others_are_served_while_many_queues_are_created() -> None:
    house = QueueHouse()
    client, other = house.connect("c"), house.connect("o")
    requests = [SubscriptionRequest(b"$queue/q%d" % nth, 1) for nth in range(200)]
    slow(house)
    client.connection.data_received(encode(Subscribe(7, requests), V5) + encode(Pingreq(), V5))
    other.connection.data_received(encode(Pingreq(), V5))
    while not answered(other):
        house.loop.step()
    assert 0 < len(house.engine.queues) < 100
    house.loop.settle()
    packets = client.take()
    assert [type(packet) for packet in packets if not isinstance(packet, Publish)] == [Suback, Pingresp]
    assert isinstance(packets[0], Suback) and packets[0].reasons == [1] * 200


def test_a_subscribe_whose_client_goes_half_way_does_no_harm() -> None:
    house = QueueHouse()
    client = house.connect("c")
    requests = [SubscriptionRequest(b"$queue/q%d" % nth, 1) for nth in range(200)]
    slow(house)
    client.connection.data_received(encode(Subscribe(7, requests), V5))
    client.drop()
    house.loop.tick = 0.0
    house.connect("d").ping()
    assert len(house.engine.queues) < 200
