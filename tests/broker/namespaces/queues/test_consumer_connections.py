"""Consumers and their connections: slow ones, ones that go away, come back, or are taken over."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V311, Publish
from tests.broker.namespaces.kit import QueueHouse, facts, join, payloads, put, settle, take

# ---- slow consumers are leased nothing more


def fill(house: QueueHouse, count: int, size: int = 1) -> None:
    maker = house.connect("maker")
    for _ in range(count):
        put(maker, "$queue/jobs", b"x" * size)


def test_a_choked_line_is_given_no_more_than_it_takes_and_the_rest_when_it_flows_again(
    house: QueueHouse,
) -> None:
    house.limits.write_buffer_high = 50_000
    worker = house.connect("worker-1", receive_maximum=1000)
    join(worker, "$queue/jobs", prefetch=1000)
    worker.transport.jammed = True
    fill(house, 100, 10_000)
    assert len(worker.transport.pending) < 200_000
    assert house.queue("jobs").depth == 100
    seen = 0
    for _ in range(100):
        worker.transport.drain()
        house.loop.settle()
        messages = worker.messages()
        seen += len(messages)
        if not messages:
            break
    assert seen == 100


def test_others_go_on_while_one_is_choked(house: QueueHouse) -> None:
    house.limits.write_buffer_high = 50_000
    slow, quick = house.connect("worker-1"), house.connect("worker-2")
    join(slow, "$queue/jobs", prefetch=1000)
    join(quick, "$queue/jobs", prefetch=1000)
    slow.transport.jammed = True
    maker = house.connect("maker")
    for _ in range(100):
        put(maker, "$queue/jobs", b"x" * 10_000)
    stuck = house.engine.queues["jobs"].groups["worker"].consumers[0].held
    assert len(take(quick)) == 100 - stuck
    assert stuck < 20, "no more than its socket took"


def test_a_full_receive_maximum_holds_deliveries_back_and_each_puback_lets_one_through(
    house: QueueHouse,
) -> None:
    worker = house.connect("worker-1", receive_maximum=2)
    join(worker, "$queue/jobs")
    fill(house, 5)
    messages = worker.messages()
    assert len(messages) == 2
    worker.ack(messages[0])  # of the line; the queue hears nothing yet
    assert len(worker.messages()) == 1
    assert house.depth("jobs") == 5


def test_a_receive_maximum_filled_by_plain_messages_opens_again_for_queues(house: QueueHouse) -> None:
    worker = house.connect("worker-1", receive_maximum=2)
    worker.subscribe("news", qos=2)
    join(worker, "$queue/jobs")
    maker = house.connect("maker")
    for qos in (1, 2):
        maker.publish_fully("news", b"plain", qos)
    put(maker, "$queue/jobs", b"job")
    plain = worker.messages()
    assert payloads(plain) == [b"plain", b"plain"]
    worker.ack(plain[1])
    assert payloads(worker.messages()) == [b"job"]


def test_one_client_with_two_queues_gets_the_second_ones_messages_when_the_first_ones_are_done(
    house: QueueHouse,
) -> None:
    worker = house.connect("worker-1", receive_maximum=1)
    join(worker, "$queue/a")
    join(worker, "$queue/b")
    put(house.connect("maker"), "$queue/a", b"a")
    put(house.connect("maker"), "$queue/b", b"b")
    (first,) = worker.messages()
    worker.ack(first)
    (second,) = worker.messages()
    assert {first.payload, second.payload} == {b"a", b"b"}


def test_many_queues_on_a_narrow_line_are_served_in_turn(house: QueueHouse) -> None:
    worker = house.connect("worker-1", receive_maximum=1)
    join(worker, "$queue/#")
    maker = house.connect("maker")
    for name in "abcde":
        for _ in range(3):
            put(maker, f"$queue/{name}", name.encode())
    seen = b""
    for _ in range(15):
        (message,) = worker.messages()
        seen += message.payload
        worker.ack(message)
    assert seen[0:1] == b"a", "when the line was free"
    assert sorted(seen[1:6]) == sorted(seen[6:11]) == list(b"abcde"), "none comes twice before all came once"
    assert worker.messages() == []


def test_room_that_one_queue_cannot_use_goes_to_the_next(house: QueueHouse) -> None:
    maker = house.connect("maker")
    for name in ("a", "b"):
        for _ in range(2):
            put(maker, f"$queue/{name}", name.encode(), wishes={"partition-key": "same"})
    worker = house.connect("worker-1", receive_maximum=2)
    join(worker, "$queue/a")
    join(worker, "$queue/b")
    join(worker, "$queue/c")
    first = worker.messages()
    assert payloads(first) == [b"a", b"b"]
    put(maker, "$queue/c", b"c")
    assert worker.messages() == []
    for message in first:
        worker.ack(message)  # of the line alone: the second message of either key waits for the first
    assert payloads(worker.messages()) == [b"c"]
    settle(worker, "ack", first[0])
    assert payloads(worker.messages()) == [b"a"]


def test_subscribing_over_and_over_on_a_full_line_leaves_nothing_behind(house: QueueHouse) -> None:
    maker = house.connect("maker")
    put(maker, "$queue/a", b"a")
    put(maker, "$queue/b", b"b")
    worker = house.connect("worker-1", receive_maximum=1)
    join(worker, "$queue/a")
    (first,) = worker.messages()
    for _ in range(5):
        join(worker, "$queue/b")
        worker.unsubscribe("$queue/b")
    starving = house.broker.registry.sessions["worker-1"].starving
    assert starving is None or starving.count() <= 1
    worker.ack(first)
    assert worker.messages() == []


# ---- going and coming back


def two_workers(house: QueueHouse, lasting: bool) -> tuple[list[Publish], list[Publish]]:
    """worker-1 holds five messages and vanishes; what worker-2 gets at once and after the deadline."""
    first = house.connect_lasting("worker-1") if lasting else house.connect("worker-1")
    join(first, "$queue/jobs")
    fill(house, 5)
    assert len(take(first)) == 5
    second = house.connect("worker-2")
    join(second, "$queue/jobs")
    first.drop()
    house.advance(1)
    at_once = take(second)
    house.advance(40)
    return at_once, take(second)


def test_without_a_living_session_deliveries_go_to_others_at_once_as_one_attempt(house: QueueHouse) -> None:
    at_once, later = two_workers(house, lasting=False)
    assert [facts(message)["attempt"] for message in at_once] == ["2"] * 5
    # Nobody settles them: they come back after their own deadline.
    assert [facts(message)["attempt"] for message in later] == ["3"] * 5


def test_a_living_session_keeps_its_deliveries_until_the_deadline(house: QueueHouse) -> None:
    at_once, later = two_workers(house, lasting=True)
    assert at_once == []
    assert [facts(message)["attempt"] for message in later] == ["2"] * 5


def test_others_serve_the_partitions_of_a_session_that_waits_for_its_client(house: QueueHouse) -> None:
    first, second = house.connect_lasting("worker-1"), house.connect("worker-2")
    join(first, "$queue/jobs")
    fill(house, 1)
    join(second, "$queue/jobs")
    first.drop()
    fill(house, 20)
    assert len(take(second)) == 20
    house.advance(40)  # the deadline of what worker-1 held: it stays away, and gets nothing for it
    assert len(take(second)) >= 1
    fill(house, 20)
    assert len(take(second)) == 20


@pytest.mark.parametrize("version", [4, 5])
def test_who_comes_back_in_time_gets_its_unacknowledged_deliveries_again_with_dup(
    house: QueueHouse, version: int
) -> None:
    worker = house.connect_lasting("worker-1", version)
    join(worker, "$queue/jobs")
    fill(house, 2)
    first, second = worker.messages()
    if version == 5:
        settle(worker, "ack", first)
    worker.ack(first)
    worker.drop()
    house.advance(10)
    fill(house, 1)
    worker = house.connect_lasting("worker-1", version)
    assert worker.connack.session_present
    messages = worker.messages()
    assert [(message.dup, message.packet_id) for message in messages] == [
        (True, second.packet_id),
        (False, messages[1].packet_id),
    ]
    if version == 5:
        assert facts(messages[0]) == facts(second)
        assert settle(worker, "ack", messages[0]) == (0, "")
        assert settle(worker, "ack", messages[1]) == (0, "")
    for message in messages:
        worker.ack(message)
    assert house.depth("jobs") == 0


def test_who_comes_back_too_late_does_not_get_again_what_others_have(house: QueueHouse) -> None:
    first = house.connect_lasting("worker-1")
    join(first, "$queue/jobs")
    fill(house, 1)
    (lost,) = first.messages()
    second = house.connect("worker-2")
    join(second, "$queue/jobs")
    first.drop()
    house.advance(40)
    (message,) = take(second)
    first = house.connect_lasting("worker-1")
    assert first.take() == []
    assert settle(first, "ack", lost, delivery_token=facts(lost)["delivery-token"])[0] == 0x83
    assert settle(second, "ack", message) == (0, "")


def test_what_was_settled_before_the_line_broke_is_not_said_again(house: QueueHouse) -> None:
    worker = house.connect_lasting("worker-1")
    join(worker, "$queue/jobs")
    fill(house, 1)
    (message,) = worker.messages()  # no PUBACK, but an ack
    settle(worker, "ack", message)
    worker.drop()
    worker = house.connect_lasting("worker-1")
    assert worker.take() == []


def test_a_takeover_hands_the_deliveries_to_the_new_connection(house: QueueHouse) -> None:
    old = house.connect_lasting("worker-1")
    join(old, "$queue/jobs")
    fill(house, 3)
    assert len(old.messages()) == 3
    new = house.connect_lasting("worker-1")
    assert old.closed
    again = new.messages()
    assert [message.dup for message in again] == [True] * 3
    fill(house, 2)
    assert len(new.messages()) == 2


def test_a_takeover_with_a_clean_start_gives_the_deliveries_to_the_group(house: QueueHouse) -> None:
    old = house.connect("worker-1")
    join(old, "$queue/jobs")
    fill(house, 3)
    old.messages()
    new = house.connect("worker-1")
    assert new.take() == []
    join(new, "$queue/jobs")
    assert [facts(message)["attempt"] for message in take(new)] == ["2"] * 3


def test_subscribing_again_on_each_connect_changes_nothing(house: QueueHouse) -> None:
    worker = house.connect_lasting("worker-1")
    join(worker, "$queue/jobs")
    fill(house, 2)
    assert len(worker.messages()) == 2
    worker.drop()
    worker = house.connect_lasting("worker-1")
    join(worker, "$queue/jobs")
    messages = worker.messages()
    assert [message.dup for message in messages] == [True, True]
    assert {facts(message)["attempt"] for message in messages} == {"1"}


def test_another_group_of_the_same_client_takes_the_place_of_the_first(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs", consumer_group="one")
    fill(house, 1)
    take(worker)
    join(worker, "$queue/jobs", consumer_group="two")
    (message,) = take(worker)
    assert facts(message)["consumer-group"] == "two"
    fill(house, 1)
    assert len(take(worker)) == 1


def test_when_a_session_expires_its_deliveries_go_to_others(house: QueueHouse) -> None:
    first, second = house.connect_lasting("worker-1", session_expiry=5), house.connect("worker-2")
    join(first, "$queue/jobs")
    fill(house, 1)
    take(first)
    join(second, "$queue/jobs")
    first.drop()
    house.advance(4)
    assert second.take() == []
    house.advance(2)
    assert len(take(second)) == 1


def test_a_lasting_consumer_is_one_again_after_a_restart(house: QueueHouse) -> None:
    worker = house.connect_lasting("worker-1")
    join(worker, "$queue/jobs", identifier=9, consumer_group="g", prefetch=2, ack_mode="puback")
    join(worker, "$queue/tasks/#")
    fill(house, 5)
    house.crash()
    worker = house.connect_lasting("worker-1")
    messages = worker.messages()
    assert len(messages) == 2
    assert {facts(message)["consumer-group"] for message in messages} == {"g"}
    assert messages[0].subscription_ids == [9]
    for message in messages:
        worker.ack(message)
    assert house.depth("jobs") == 3
    put(worker, "$queue/tasks/new", b"x")
    assert b"x" in payloads(worker.messages())


def test_an_old_lasting_consumer_is_one_again_after_a_restart(house: QueueHouse) -> None:
    worker = house.connect_lasting("old", V311)
    join(worker, "$queue/jobs/$group/g")
    house.crash()
    fill(house, 1)
    worker = house.connect_lasting("old", V311)
    (message,) = worker.messages()
    assert message.topic.startswith(b"$queue/jobs/$msg/")
    worker.ack(message)
    assert house.depth("jobs") == 0


def test_a_lasting_consumer_that_has_not_come_back_after_a_restart_stands_in_nobodys_way(
    house: QueueHouse,
) -> None:
    join(house.connect_lasting("worker-1"), "$queue/jobs")
    house.crash()
    fill(house, 20)
    second = house.connect("worker-2")
    join(second, "$queue/jobs")
    assert len(take(second)) == 20
