"""A client that reads many queues by a wildcard joins, pauses and leaves them in slices: others are served."""

from __future__ import annotations

import pytest

from sluice.queues.model.ledger import verify
from sluice.wire.encode import encode
from sluice.wire.packets import (
    V5,
    Disconnect,
    Pingreq,
    Pingresp,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsubscribe,
)
from tests.broker.kit import Client, props
from tests.broker.namespaces.kit import QueueHouse, join, put

QUEUES = 60


def build(count: int = QUEUES) -> QueueHouse:
    house = QueueHouse()
    door = house.broker.router.door
    assert door is not None
    for nth in range(count):
        door.open(f"q/{nth}")
    house.loop.settle()
    return house


def slow(house: QueueHouse) -> None:
    """From now on each look at the clock shows that 4 ms have passed."""
    house.loop.tick = 0.004


def ask(client: Client, topic_filter: str = "$queue/#", group: str = "g") -> None:
    properties = props(user=[("consumer-group", group)])
    requests = [SubscriptionRequest(topic_filter.encode(), 1)]
    client.connection.data_received(encode(Subscribe(client.next_id(), requests, properties), V5))


def consumers(house: QueueHouse) -> int:
    assert verify(house.engine) == []
    return sum(int(queue.consumers) for queue in house.engine.queues.values())


def paused(house: QueueHouse) -> int:
    groups = house.engine.groups.values()
    return sum(consumer.paused for group in groups for consumer in group.consumers)


def steps_until_pong(house: QueueHouse, client: Client) -> int:
    client.connection.data_received(encode(Pingreq(), V5))
    for step in range(1, 1000):
        house.loop.step()
        if any(isinstance(packet, Pingresp) for packet in client.take()):
            return step
    raise AssertionError("no answer")


def test_others_are_served_while_queues_are_joined() -> None:
    house = build()
    worker, other = house.connect("w"), house.connect("o")
    slow(house)
    ask(worker)
    assert 0 < consumers(house) < QUEUES // 2
    steps_until_pong(house, other)
    assert consumers(house) < QUEUES
    assert worker.take() == []  # the SUBACK tells that every queue is joined
    house.loop.settle()
    assert [type(packet) for packet in worker.take()] == [Suback]
    assert consumers(house) == QUEUES


def test_packets_behind_a_long_subscribe_wait_for_it() -> None:
    house = build()
    worker = house.connect("w")
    slow(house)
    ask(worker)
    worker.connection.data_received(encode(Unsubscribe(worker.next_id(), [b"$queue/#"]), V5))
    house.loop.settle()
    assert consumers(house) == 0
    assert isinstance(worker.take()[0], Suback)


@pytest.mark.parametrize("expiry", [0, 3600])
def test_disconnect_while_queues_are_joined(expiry: int) -> None:
    """An ended session has no consumers; a persistent one has them all, and they are paused."""
    house = build()
    worker = house.connect("w", session_expiry=expiry)
    slow(house)
    ask(worker)
    assert 0 < consumers(house) < QUEUES
    worker.connection.connection_lost(None)
    house.loop.settle()
    assert consumers(house) == paused(house) == (QUEUES if expiry else 0)
    house.connect("w", clean=False, session_expiry=expiry)
    house.loop.settle()
    assert paused(house) == 0


def test_half_closed_connection_finishes_joining_and_its_disconnect_counts() -> None:
    house = build()
    worker = house.connect("w", session_expiry=3600)
    slow(house)
    ask(worker)
    worker.connection.data_received(encode(Disconnect(0, props(session_expiry=0)), V5))
    worker.connection.eof_received()
    worker.connection.connection_lost(None)
    house.loop.settle()
    assert consumers(house) == 0
    assert "w" not in house.broker.registry.sessions


def test_takeover_with_clean_start_while_queues_are_joined() -> None:
    house = build()
    worker = house.connect("w", session_expiry=3600)
    slow(house)
    ask(worker)
    house.connect("w", clean=True)
    house.loop.settle()
    assert consumers(house) == 0


def test_queues_that_come_and_go_while_queues_are_joined() -> None:
    house = build()
    worker = house.connect("w")
    slow(house)
    ask(worker)
    door = house.broker.router.door
    assert door is not None
    door.open("q/new")
    door.delete(house.engine.queues["q/59"])
    door.delete(house.engine.queues["q/58"])
    door.open("q/58")
    house.loop.settle()
    assert consumers(house) == QUEUES
    assert all(queue.consumers == 1 for queue in house.engine.queues.values())


def test_wrong_start_is_refused_before_any_queue_is_joined() -> None:
    house = build(3)
    worker = house.connect("w")
    reason, _ = join(worker, "$queue/#", start="yesterday")
    assert reason >= 0x80
    assert consumers(house) == 0
    door = house.broker.router.door
    assert door is not None
    door.open("q/later")
    assert consumers(house) == 0


def test_others_are_served_while_an_ended_session_leaves_its_queues() -> None:
    house = build()
    worker, other = house.connect("w"), house.connect("o")
    join(worker, "$queue/#", consumer_group="g")
    put(other, "$queue/q/7", b"held")
    slow(house)
    worker.connection.connection_lost(None)
    assert QUEUES // 2 < consumers(house) < QUEUES
    steps_until_pong(house, other)
    assert consumers(house) > 0
    put(other, "$queue/q/30", b"later")
    house.loop.settle()
    assert consumers(house) == 0
    house.loop.tick = 0.0
    second = house.connect("w2")
    join(second, "$queue/#", consumer_group="g")
    assert sorted(packet.payload for packet in second.messages()) == [b"held", b"later"]


def test_others_are_served_while_consumers_are_paused_and_resumed() -> None:
    house = build()
    worker = house.connect("w", session_expiry=3600)
    join(worker, "$queue/#")
    slow(house)
    worker.connection.connection_lost(None)
    assert 0 < paused(house) < QUEUES // 2
    house.connect("w", clean=False, session_expiry=3600)  # the pause is not finished
    house.loop.settle()
    assert paused(house) == 0
    assert consumers(house) == QUEUES


def test_unsubscribe_of_many_queues_leaves_them_in_slices() -> None:
    """Queues that another filter of the client covers are joined by it."""
    house = build()
    worker = house.connect("w")
    join(worker, "$queue/#", consumer_group="g")
    join(worker, "$queue/+/#", consumer_group="h")
    slow(house)
    worker.connection.data_received(encode(Unsubscribe(worker.next_id(), [b"$queue/#"]), V5))
    left = [
        queue.groups["g"].consumers for queue in house.engine.queues.values() if queue.groups["g"].consumers
    ]
    assert QUEUES // 2 < len(left) < QUEUES
    house.loop.settle()
    assert consumers(house) == QUEUES
    assert all(not queue.groups["g"].consumers for queue in house.engine.queues.values())
