"""A client joins, pauses and leaves many queues by a wildcard in slices; others are served."""

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
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import join, put
from tests.broker.peers import Client, props

QUEUES = 60


def build(count: int = QUEUES) -> BrokerHarness:
    harness = BrokerHarness()
    queue_handler = harness.core.queue_handler
    for nth in range(count):
        queue_handler.create_queue(f"q/{nth}")
    harness.loop.settle()
    return harness


def slow_clock(harness: BrokerHarness) -> None:
    """From now on each read of the clock advances it by 4 ms."""
    harness.loop.tick = 0.004


def send_subscribe(client: Client, topic_filter: str = "$queue/#", group: str = "g") -> None:
    properties = props(user=[("consumer-group", group)])
    requests = [SubscriptionRequest(topic_filter.encode(), 1)]
    client.connection.data_received(encode(Subscribe(client.next_id(), requests, properties), V5))


def consumers(harness: BrokerHarness) -> int:
    assert verify(harness.engine.queues) == []
    return sum(int(queue.consumer_count) for queue in harness.engine.queues.values())


def paused(harness: BrokerHarness) -> int:
    groups = harness.engine.groups.values()
    return sum(consumer.is_paused for group in groups for consumer in group.consumers)


def steps_until_pong(harness: BrokerHarness, client: Client) -> int:
    client.connection.data_received(encode(Pingreq(), V5))
    for step in range(1, 1000):
        harness.loop.step()
        if any(isinstance(packet, Pingresp) for packet in client.take()):
            return step
    raise AssertionError("no answer")


def test_other_clients_are_served_while_queues_are_joined() -> None:
    harness = build()
    worker, other = harness.connect("w"), harness.connect("o")
    slow_clock(harness)
    send_subscribe(worker)
    assert 0 < consumers(harness) < QUEUES // 2
    steps_until_pong(harness, other)
    assert consumers(harness) < QUEUES
    assert worker.take() == []  # the SUBACK confirms that every queue is joined
    harness.loop.settle()
    assert [type(packet) for packet in worker.take()] == [Suback]
    assert consumers(harness) == QUEUES


def test_packets_after_a_long_subscribe_wait_for_it() -> None:
    harness = build()
    worker = harness.connect("w")
    slow_clock(harness)
    send_subscribe(worker)
    worker.connection.data_received(encode(Unsubscribe(worker.next_id(), [b"$queue/#"]), V5))
    harness.loop.settle()
    assert consumers(harness) == 0
    assert isinstance(worker.take()[0], Suback)


@pytest.mark.parametrize("expiry", [0, 3600])
def test_client_that_disconnects_while_joining_queues_leaves_them(expiry: int) -> None:
    """An ended session has no consumers; a persistent one has all of them, paused."""
    harness = build()
    worker = harness.connect("w", session_expiry=expiry)
    slow_clock(harness)
    send_subscribe(worker)
    assert 0 < consumers(harness) < QUEUES
    worker.connection.connection_lost(None)
    harness.loop.settle()
    assert consumers(harness) == paused(harness) == (QUEUES if expiry else 0)
    harness.connect("w", clean=False, session_expiry=expiry)
    harness.loop.settle()
    assert paused(harness) == 0


def test_half_closed_connection_finishes_joining_and_its_disconnect_counts() -> None:
    harness = build()
    worker = harness.connect("w", session_expiry=3600)
    slow_clock(harness)
    send_subscribe(worker)
    worker.connection.data_received(encode(Disconnect(0, props(session_expiry=0)), V5))
    worker.connection.eof_received()
    worker.connection.connection_lost(None)
    harness.loop.settle()
    assert consumers(harness) == 0
    assert "w" not in harness.broker.registry.sessions


def test_takeover_with_clean_start_while_queues_are_joined() -> None:
    harness = build()
    worker = harness.connect("w", session_expiry=3600)
    slow_clock(harness)
    send_subscribe(worker)
    harness.connect("w", clean=True)
    harness.loop.settle()
    assert consumers(harness) == 0


def test_queues_created_and_deleted_while_queues_are_joined() -> None:
    harness = build()
    worker = harness.connect("w")
    slow_clock(harness)
    send_subscribe(worker)
    queue_handler = harness.core.queue_handler
    queue_handler.create_queue("q/new")
    queue_handler.delete_queue(harness.engine.queues["q/59"])
    queue_handler.delete_queue(harness.engine.queues["q/58"])
    queue_handler.create_queue("q/58")
    harness.loop.settle()
    assert consumers(harness) == QUEUES
    assert all(queue.consumer_count == 1 for queue in harness.engine.queues.values())


def test_invalid_start_is_refused_before_any_queue_is_joined() -> None:
    harness = build(3)
    worker = harness.connect("w")
    reason, _ = join(worker, "$queue/#", start="yesterday")
    assert reason >= 0x80
    assert consumers(harness) == 0
    queue_handler = harness.core.queue_handler
    queue_handler.create_queue("q/later")
    assert consumers(harness) == 0


def test_other_clients_are_served_while_an_ended_session_leaves_its_queues() -> None:
    harness = build()
    worker, other = harness.connect("w"), harness.connect("o")
    join(worker, "$queue/#", consumer_group="g")
    put(other, "$queue/q/7", b"held")
    slow_clock(harness)
    worker.connection.connection_lost(None)
    assert QUEUES // 2 < consumers(harness) < QUEUES
    steps_until_pong(harness, other)
    assert consumers(harness) > 0
    put(other, "$queue/q/30", b"later")
    harness.loop.settle()
    assert consumers(harness) == 0
    harness.loop.tick = 0.0
    second = harness.connect("w2")
    join(second, "$queue/#", consumer_group="g")
    assert sorted(packet.payload for packet in second.messages()) == [b"held", b"later"]


def test_other_clients_are_served_while_consumers_are_paused_and_resumed() -> None:
    harness = build()
    worker = harness.connect("w", session_expiry=3600)
    join(worker, "$queue/#")
    slow_clock(harness)
    worker.connection.connection_lost(None)
    assert 0 < paused(harness) < QUEUES // 2
    harness.connect("w", clean=False, session_expiry=3600)  # the pause is not finished
    harness.loop.settle()
    assert paused(harness) == 0
    assert consumers(harness) == QUEUES


def test_unsubscribe_of_many_queues_leaves_them_in_slices() -> None:
    """Queues that another filter of the client matches are joined by it."""
    harness = build()
    worker = harness.connect("w")
    join(worker, "$queue/#", consumer_group="g")
    join(worker, "$queue/+/#", consumer_group="h")
    slow_clock(harness)
    worker.connection.data_received(encode(Unsubscribe(worker.next_id(), [b"$queue/#"]), V5))
    left = [
        queue.groups["g"].consumers
        for queue in harness.engine.queues.values()
        if queue.groups["g"].consumers
    ]
    assert QUEUES // 2 < len(left) < QUEUES
    harness.loop.settle()
    assert consumers(harness) == QUEUES
    assert all(not queue.groups["g"].consumers for queue in harness.engine.queues.values())
