"""Consumers and their connections: slow, disconnected, reconnected and taken over."""

from __future__ import annotations

import pytest

from sluice.broker.namespaces.queues.memberships import find_memberships
from sluice.wire.packets import V311, Publish
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, payloads, put, settle, take

# ---- slow consumers get no more leases


def fill(harness: BrokerHarness, count: int, size: int = 1) -> None:
    maker = harness.connect("maker")
    for _ in range(count):
        put(maker, "$queue/jobs", b"x" * size)


def test_blocked_connection_gets_no_more_than_it_accepts_and_the_rest_later(
    harness: BrokerHarness,
) -> None:
    harness.limits.write_buffer_high = 50_000
    worker = harness.connect("worker-1", receive_maximum=1000)
    join(worker, "$queue/jobs", prefetch=1000)
    worker.transport.is_blocked = True
    fill(harness, 100, 10_000)
    assert len(worker.transport.pending) < 200_000
    assert harness.queue("jobs").depth == 100
    seen = 0
    for _ in range(100):
        worker.transport.drain()
        harness.loop.settle()
        messages = worker.messages()
        seen += len(messages)
        if not messages:
            break
    assert seen == 100


def test_other_consumers_continue_while_one_is_blocked(harness: BrokerHarness) -> None:
    harness.limits.write_buffer_high = 50_000
    slow, quick = harness.connect("worker-1"), harness.connect("worker-2")
    join(slow, "$queue/jobs", prefetch=1000)
    join(quick, "$queue/jobs", prefetch=1000)
    slow.transport.is_blocked = True
    maker = harness.connect("maker")
    for _ in range(100):
        put(maker, "$queue/jobs", b"x" * 10_000)
    stuck = harness.engine.queues["jobs"].groups["worker"].consumers[0].in_flight
    assert len(take(quick)) == 100 - stuck
    assert stuck < 20, "no more than its socket took"


def test_full_receive_maximum_blocks_deliveries_and_each_puback_releases_one(
    harness: BrokerHarness,
) -> None:
    worker = harness.connect("worker-1", receive_maximum=2)
    join(worker, "$queue/jobs")
    fill(harness, 5)
    messages = worker.messages()
    assert len(messages) == 2
    worker.ack(messages[0])  # frees the packet id; the delivery is not settled yet
    assert len(worker.messages()) == 1
    assert harness.depth("jobs") == 5


def test_receive_maximum_filled_by_plain_messages_is_freed_for_queues(
    harness: BrokerHarness,
) -> None:
    worker = harness.connect("worker-1", receive_maximum=2)
    worker.subscribe("news", qos=2)
    join(worker, "$queue/jobs")
    maker = harness.connect("maker")
    for qos in (1, 2):
        maker.publish_fully("news", b"plain", qos)
    put(maker, "$queue/jobs", b"job")
    plain = worker.messages()
    assert payloads(plain) == [b"plain", b"plain"]
    worker.ack(plain[1])
    assert payloads(worker.messages()) == [b"job"]


def test_client_of_two_queues_gets_the_second_when_the_first_is_settled(
    harness: BrokerHarness,
) -> None:
    worker = harness.connect("worker-1", receive_maximum=1)
    join(worker, "$queue/a")
    join(worker, "$queue/b")
    put(harness.connect("maker"), "$queue/a", b"a")
    put(harness.connect("maker"), "$queue/b", b"b")
    (first,) = worker.messages()
    worker.ack(first)
    (second,) = worker.messages()
    assert {first.payload, second.payload} == {b"a", b"b"}


def test_many_queues_on_a_small_window_are_served_in_turn(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1", receive_maximum=1)
    join(worker, "$queue/#")
    maker = harness.connect("maker")
    for name in "abcde":
        for _ in range(3):
            put(maker, f"$queue/{name}", name.encode())
    seen = b""
    for _ in range(15):
        (message,) = worker.messages()
        seen += message.payload
        worker.ack(message)
    assert seen[0:1] == b"a", "when the connection had capacity"
    assert sorted(seen[1:6]) == sorted(seen[6:11]) == list(b"abcde"), (
        "none comes twice before all came once"
    )
    assert worker.messages() == []


def test_capacity_that_one_queue_cannot_use_goes_to_the_next(harness: BrokerHarness) -> None:
    maker = harness.connect("maker")
    for name in ("a", "b"):
        for _ in range(2):
            put(maker, f"$queue/{name}", name.encode(), options={"partition-key": "same"})
    worker = harness.connect("worker-1", receive_maximum=2)
    join(worker, "$queue/a")
    join(worker, "$queue/b")
    join(worker, "$queue/c")
    first = worker.messages()
    assert payloads(first) == [b"a", b"b"]
    put(maker, "$queue/c", b"c")
    assert worker.messages() == []
    for message in first:
        # Frees the packet id only: the second message of either key waits for the first.
        worker.ack(message)
    assert payloads(worker.messages()) == [b"c"]
    settle(worker, "ack", first[0])
    assert payloads(worker.messages()) == [b"a"]


def test_repeated_subscribing_with_a_full_window_leaves_nothing_behind(
    harness: BrokerHarness,
) -> None:
    maker = harness.connect("maker")
    put(maker, "$queue/a", b"a")
    put(maker, "$queue/b", b"b")
    worker = harness.connect("worker-1", receive_maximum=1)
    join(worker, "$queue/a")
    (first,) = worker.messages()
    for _ in range(5):
        join(worker, "$queue/b")
        worker.unsubscribe("$queue/b")
    memberships = find_memberships(harness.broker.registry.sessions["worker-1"])
    assert memberships is None or memberships.blocked.count() <= 1
    worker.ack(first)
    assert worker.messages() == []


# ---- disconnecting and reconnecting


def two_workers(harness: BrokerHarness, lasting: bool) -> tuple[list[Publish], list[Publish]]:
    """Let worker-1 hold five messages and vanish.

    Return what worker-2 gets at once and after the deadline.
    """
    first = harness.connect_persistent("worker-1") if lasting else harness.connect("worker-1")
    join(first, "$queue/jobs")
    fill(harness, 5)
    assert len(take(first)) == 5
    second = harness.connect("worker-2")
    join(second, "$queue/jobs")
    first.drop()
    harness.advance(1)
    at_once = take(second)
    harness.advance(40)
    return at_once, take(second)


def test_without_a_session_deliveries_go_to_others_at_once_as_one_attempt(
    harness: BrokerHarness,
) -> None:
    at_once, later = two_workers(harness, lasting=False)
    assert [delivery_properties(message)["attempt"] for message in at_once] == ["2"] * 5
    # No consumer settles them: they are redelivered after their own deadline.
    assert [delivery_properties(message)["attempt"] for message in later] == ["3"] * 5


def test_live_session_keeps_its_deliveries_until_the_deadline(harness: BrokerHarness) -> None:
    at_once, later = two_workers(harness, lasting=True)
    assert at_once == []
    assert [delivery_properties(message)["attempt"] for message in later] == ["2"] * 5


def test_other_consumers_serve_the_partitions_of_an_offline_session(harness: BrokerHarness) -> None:
    first, second = harness.connect_persistent("worker-1"), harness.connect("worker-2")
    join(first, "$queue/jobs")
    fill(harness, 1)
    join(second, "$queue/jobs")
    first.drop()
    fill(harness, 20)
    assert len(take(second)) == 20
    # The deadline of worker-1's deliveries: it stays away, and gets nothing more.
    harness.advance(40)
    assert len(take(second)) >= 1
    fill(harness, 20)
    assert len(take(second)) == 20


@pytest.mark.parametrize("version", [4, 5])
def test_client_that_returns_in_time_gets_its_unacknowledged_deliveries_with_dup(
    harness: BrokerHarness, version: int
) -> None:
    worker = harness.connect_persistent("worker-1", version)
    join(worker, "$queue/jobs")
    fill(harness, 2)
    first, second = worker.messages()
    if version == 5:
        settle(worker, "ack", first)
    worker.ack(first)
    worker.drop()
    harness.advance(10)
    fill(harness, 1)
    worker = harness.connect_persistent("worker-1", version)
    assert worker.connack.session_present
    messages = worker.messages()
    assert [(message.dup, message.packet_id) for message in messages] == [
        (True, second.packet_id),
        (False, messages[1].packet_id),
    ]
    if version == 5:
        assert delivery_properties(messages[0]) == delivery_properties(second)
        assert settle(worker, "ack", messages[0]) == (0, "")
        assert settle(worker, "ack", messages[1]) == (0, "")
    for message in messages:
        worker.ack(message)
    assert harness.depth("jobs") == 0


def test_client_that_returns_too_late_does_not_get_deliveries_of_others(
    harness: BrokerHarness,
) -> None:
    first = harness.connect_persistent("worker-1")
    join(first, "$queue/jobs")
    fill(harness, 1)
    (lost,) = first.messages()
    second = harness.connect("worker-2")
    join(second, "$queue/jobs")
    first.drop()
    harness.advance(40)
    (message,) = take(second)
    first = harness.connect_persistent("worker-1")
    assert first.take() == []
    assert (
        settle(first, "ack", lost, delivery_token=delivery_properties(lost)["delivery-token"])[0]
        == 0x83
    )
    assert settle(second, "ack", message) == (0, "")


def test_settled_delivery_is_not_resent_after_a_reconnect(harness: BrokerHarness) -> None:
    worker = harness.connect_persistent("worker-1")
    join(worker, "$queue/jobs")
    fill(harness, 1)
    (message,) = worker.messages()  # no PUBACK, but an ack
    settle(worker, "ack", message)
    worker.drop()
    worker = harness.connect_persistent("worker-1")
    assert worker.take() == []


def test_takeover_moves_the_deliveries_to_the_new_connection(harness: BrokerHarness) -> None:
    old = harness.connect_persistent("worker-1")
    join(old, "$queue/jobs")
    fill(harness, 3)
    assert len(old.messages()) == 3
    new = harness.connect_persistent("worker-1")
    assert old.closed
    again = new.messages()
    assert [message.dup for message in again] == [True] * 3
    fill(harness, 2)
    assert len(new.messages()) == 2


def test_takeover_with_clean_start_releases_the_deliveries_to_the_group(
    harness: BrokerHarness,
) -> None:
    old = harness.connect("worker-1")
    join(old, "$queue/jobs")
    fill(harness, 3)
    old.messages()
    new = harness.connect("worker-1")
    assert new.take() == []
    join(new, "$queue/jobs")
    assert [delivery_properties(message)["attempt"] for message in take(new)] == ["2"] * 3


def test_subscribing_again_on_each_connect_changes_nothing(harness: BrokerHarness) -> None:
    worker = harness.connect_persistent("worker-1")
    join(worker, "$queue/jobs")
    fill(harness, 2)
    assert len(worker.messages()) == 2
    worker.drop()
    worker = harness.connect_persistent("worker-1")
    join(worker, "$queue/jobs")
    messages = worker.messages()
    assert [message.dup for message in messages] == [True, True]
    assert {delivery_properties(message)["attempt"] for message in messages} == {"1"}


def test_another_group_of_the_same_client_replaces_the_first(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", consumer_group="one")
    fill(harness, 1)
    take(worker)
    join(worker, "$queue/jobs", consumer_group="two")
    (message,) = take(worker)
    assert delivery_properties(message)["consumer-group"] == "two"
    fill(harness, 1)
    assert len(take(worker)) == 1


def test_deliveries_of_an_expired_session_go_to_others(harness: BrokerHarness) -> None:
    first, second = (
        harness.connect_persistent("worker-1", session_expiry=5),
        harness.connect("worker-2"),
    )
    join(first, "$queue/jobs")
    fill(harness, 1)
    take(first)
    join(second, "$queue/jobs")
    first.drop()
    harness.advance(4)
    assert second.take() == []
    harness.advance(2)
    assert len(take(second)) == 1


def test_persistent_consumer_consumes_again_after_a_restart(harness: BrokerHarness) -> None:
    worker = harness.connect_persistent("worker-1")
    join(worker, "$queue/jobs", identifier=9, consumer_group="g", prefetch=2, ack_mode="puback")
    join(worker, "$queue/tasks/#")
    fill(harness, 5)
    harness.crash()
    worker = harness.connect_persistent("worker-1")
    messages = worker.messages()
    assert len(messages) == 2
    assert {delivery_properties(message)["consumer-group"] for message in messages} == {"g"}
    assert messages[0].subscription_ids == [9]
    for message in messages:
        worker.ack(message)
    assert harness.depth("jobs") == 3
    put(worker, "$queue/tasks/new", b"x")
    assert b"x" in payloads(worker.messages())


def test_persistent_3_1_1_consumer_consumes_again_after_a_restart(harness: BrokerHarness) -> None:
    worker = harness.connect_persistent("old", V311)
    join(worker, "$queue/jobs/$group/g")
    harness.crash()
    fill(harness, 1)
    worker = harness.connect_persistent("old", V311)
    (message,) = worker.messages()
    assert message.topic.startswith(b"$queue/jobs/$msg/")
    worker.ack(message)
    assert harness.depth("jobs") == 0


def test_offline_persistent_consumer_blocks_no_other_after_a_restart(
    harness: BrokerHarness,
) -> None:
    join(harness.connect_persistent("worker-1"), "$queue/jobs")
    harness.crash()
    fill(harness, 20)
    second = harness.connect("worker-2")
    join(second, "$queue/jobs")
    assert len(take(second)) == 20
