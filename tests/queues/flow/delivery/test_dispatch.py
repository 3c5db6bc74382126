"""Dispatch within a group: no member with capacity waits while a message could go to it."""

from __future__ import annotations

import pytest

from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, Worker


def fill(engine: EngineUnderTest, count: int, key: str = "") -> None:
    """Publish `count` messages; `{}` in the key is their number."""
    for number in range(count):
        engine.publish(b"%d" % number, key=key.format(number).encode())
    engine.run_until_idle()


def settle_all(worker: Worker) -> int:
    """Ack all deliveries until no more arrive; return their number."""
    done = 0
    while True:
        some = worker.lease_all()
        for delivery in some:
            worker.ack(delivery)
        if not some:
            return done
        done += len(some)


@pytest.mark.parametrize(
    "settings",
    [{"partitions": 10}, {"partitions": 10, "ordering": 0}, {"partitions": 1, "ordering": 0}],
    ids=["keyless", "no order", "no order, one partition"],
)
def test_one_busy_consumer_does_not_delay_messages_without_a_key(
    make_engine: MakeEngine, settings: dict[str, int]
) -> None:
    engine = make_engine(**settings)
    busy, idle = engine.worker(prefetch=1), engine.worker(prefetch=1)
    fill(engine, 41)
    slow = busy.lease()
    assert settle_all(idle) == 40
    busy.ack(slow)
    assert engine.depth() == 0


def test_keyed_messages_move_to_a_member_with_capacity_after_a_second(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=4)
    busy, idle = engine.worker(prefetch=1), engine.worker(prefetch=1)
    fill(engine, 40, key="k{}")
    held = busy.lease()
    served = settle_all(idle)
    assert 0 < served < 39
    engine.advance(seconds=0.9)
    assert settle_all(idle) == 0, "partitions stay where they are for a while"
    engine.advance(seconds=0.2)
    assert served + settle_all(idle) == 39
    busy.ack(held)
    assert engine.depth() == 0


def test_time_until_a_partition_moves_is_a_setting(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2, rebalance_after=10.0)
    busy, idle = engine.worker(prefetch=1), engine.worker(prefetch=1)
    fill(engine, 20, key="k{}")
    busy.lease()
    settle_all(idle)
    engine.advance(seconds=9)
    assert settle_all(idle) == 0
    engine.advance(seconds=2)
    assert settle_all(idle) > 0


def test_next_message_of_a_key_waits_for_its_predecessor_after_a_move(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=1)
    first, second = engine.worker(prefetch=1), engine.worker(prefetch=1)
    for number in range(3):
        engine.publish(b"a%d" % number, key=b"a")
    engine.publish(b"b0", key=b"b")
    held = first.lease()
    assert held.payload == b"a0"
    engine.advance(seconds=2)
    other = second.lease()
    assert other.payload == b"b0", "the partition has moved, and key a is still with the first"
    second.ack(other)
    assert second.lease_or_none() is None
    first.ack(held)
    engine.run_until_idle()
    assert [one.payload for one in (*first.lease_all(), *second.lease_all())] == [b"a1"]


def test_partition_stays_while_no_other_member_has_capacity(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2)
    first, second = engine.worker(prefetch=1), engine.worker(prefetch=1)
    fill(engine, 20, key="k{}")
    before = first.partitions(), second.partitions()
    first.lease(), second.lease()
    engine.advance(seconds=20)
    assert (first.partitions(), second.partitions()) == before


def test_relieved_consumer_gets_its_share_of_the_partitions_back(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=4)
    busy, idle = engine.worker(prefetch=1), engine.worker(prefetch=1)
    fill(engine, 40, key="k{}")
    held = busy.lease()
    engine.advance(seconds=2)
    while len(busy.partitions()) > 1:
        settle_all(idle)
        engine.advance(seconds=2)
    busy.ack(held)
    engine.run_until_idle()
    assert len(busy.partitions()) == len(idle.partitions()) == 2


def test_idle_member_takes_partitions_of_an_overloaded_one(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2)
    slow, idle = engine.worker(prefetch=1), engine.worker(prefetch=1)
    fill(engine, 60, key="k{}")
    settle_all(idle)
    for _ in range(4):
        slow.ack(slow.lease())  # it makes progress, and its backlog stays
        engine.advance(seconds=0.4)
    assert idle.lease_or_none() is not None


def test_consumers_without_a_partition_share_it_in_turn_with_its_holder(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=1, ordering=0)
    workers = [engine.worker(prefetch=100) for _ in range(4)]
    fill(engine, 40)
    assert [len(worker.lease_all()) for worker in workers] == [10, 10, 10, 10]


def test_lower_priority_gets_only_what_exceeds_the_capacity_of_the_higher(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=2)
    high = engine.worker(prefetch=3, priority=1)
    low = engine.worker(prefetch=10, priority=0)
    fill(engine, 3)
    assert low.payloads() == []
    fill(engine, 2)
    assert len(high.payloads()) == 3 and len(low.payloads()) == 2


def test_exclusive_consumer_gets_all_messages(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2)
    sole = engine.worker(prefetch=1, exclusive=True)
    other = engine.worker(prefetch=10)
    fill(engine, 5)
    engine.advance(seconds=5)
    assert len(sole.payloads()) == 1 and other.payloads() == []


def test_due_retry_goes_to_a_member_with_capacity(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=1)
    failing, other = engine.worker(prefetch=1), engine.worker(prefetch=1)
    engine.publish(b"first")
    engine.publish(b"second")
    engine.run_until_idle()
    failing.nack(failing.lease())
    other.ack(other.lease())
    held = None
    engine.publish(b"third")
    engine.run_until_idle()
    held = failing.lease_or_none() or other.lease()
    engine.advance(seconds=6)
    assert held.payload == b"third"
    assert [one.payload for one in (*failing.lease_all(), *other.lease_all())] == [b"first"]


def test_message_that_arrives_after_capacity_is_freed_is_delivered(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=3)
    first, second = engine.worker(prefetch=1), engine.worker(prefetch=1)
    fill(engine, 6)
    held = first.lease(), second.lease()
    for worker, delivery in zip((first, second), held):
        worker.ack(delivery)
    assert settle_all(first) + settle_all(second) == 4


# ---- draining


def test_draining_consumer_gives_up_its_partitions_at_once_and_keeps_its_deliveries(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=4)
    stopping, staying = engine.worker(prefetch=1), engine.worker(prefetch=1)
    fill(engine, 20, key="k{}")
    held = stopping.lease()
    engine.engine.dispatch.set_prefetch(stopping, 0)
    engine.run_until_idle()
    assert stopping.partitions() == [] and len(staying.partitions()) == 4
    assert settle_all(staying) == 19
    stopping.ack(held)
    assert engine.depth() == 0


def test_draining_consumer_does_not_get_its_released_messages_back(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2)
    stopping, staying = engine.worker(prefetch=10), engine.worker(prefetch=1)
    fill(engine, 8)
    engine.engine.dispatch.set_prefetch(stopping, 0)
    for delivery in stopping.lease_all():
        stopping.release(delivery)
    assert stopping.payloads() == []
    assert settle_all(staying) == 8


def test_group_with_only_draining_consumers_delivers_nothing_until_one_resumes(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=2)
    worker = engine.worker(prefetch=5)
    engine.engine.dispatch.set_prefetch(worker, 0)
    fill(engine, 3)
    assert worker.payloads() == []
    engine.engine.dispatch.set_prefetch(worker, 5)
    assert len(worker.payloads()) == 3


# ---- partitions that stay


def test_messages_without_a_key_move_no_partition(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=4)
    slow, quick = engine.worker(prefetch=1), engine.worker(prefetch=10)
    before = slow.partitions(), quick.partitions()
    fill(engine, 40)
    held = slow.lease()
    for _ in range(5):
        for delivery in quick.lease_all():
            quick.ack(delivery)
        slow.ack(held)
        engine.advance(seconds=1.5)
        fill(engine, 20)
        held = slow.lease()
    assert (slow.partitions(), quick.partitions()) == before


def test_partition_without_deliverable_messages_does_not_move(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=1, ordering=2)
    holder, idle = engine.worker(prefetch=1), engine.worker(prefetch=1)
    fill(engine, 5)
    held = holder.lease()
    engine.advance(seconds=20)
    assert holder.partitions() == [0] and idle.payloads() == []
    holder.ack(held)
    assert holder.lease().payload == b"1"
