"""Ordering: per key, across failures, changes of the partition count, and restarts."""

from __future__ import annotations

import random

import pytest

from sluice.errors import InvalidQueueConfig
from sluice.placement import fnv1a32
from sluice.queues.model.queue_rules import ANY_ORDER, PER_KEY, STRICT
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, Worker


def test_one_message_of_a_key_is_in_flight_at_a_time(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    for number in range(5):
        engine.publish(b"a%d" % number, key=b"a")
        engine.publish(b"b%d" % number, key=b"b")
    assert worker.payloads() == [b"a0", b"b0"]
    worker.ack(worker.lease())
    assert worker.payloads() == [b"b0", b"a1"]


def test_later_messages_of_a_key_wait_for_a_retry_while_other_keys_flow(
    engine: EngineUnderTest,
) -> None:
    worker = engine.worker()
    for number in range(3):
        engine.publish(b"a%d" % number, key=b"a")
        engine.publish(b"b%d" % number, key=b"b")
    worker.nack(worker.lease())
    assert worker.ack_all() == [b"b0", b"b1", b"b2"]
    engine.advance(seconds=4.9)
    assert worker.payloads() == []
    engine.advance(seconds=0.2)
    assert worker.ack_all() == [b"a0", b"a1", b"a2"]


def test_next_message_of_a_key_follows_when_the_previous_is_dead_lettered(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_retries=0)
    worker = engine.worker()
    engine.publish(b"a0", key=b"a")
    engine.publish(b"a1", key=b"a")
    worker.nack(worker.lease())
    assert worker.payloads() == [b"a1"]


def test_order_survives_a_crash_during_a_retry(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    for number in range(3):
        engine.publish(b"a%d" % number, key=b"a")
    worker.nack(worker.lease())
    engine.crash_and_restart()
    worker = engine.worker()
    assert worker.payloads() == []
    engine.advance(seconds=5.1)
    assert worker.ack_all() == [b"a0", b"a1", b"a2"]


def test_order_survives_a_partition_move(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2)
    first = engine.worker()
    for number in range(3):
        engine.publish(b"%d" % number, key=b"k")
    held = first.lease()
    second, third = engine.worker(), engine.worker()
    first.leave()
    others = second.lease_all() + third.lease_all()
    assert [one.payload for one in others] == [b"0"] and others[0].attempt == held.attempt + 1


def test_batch_size_limits_the_messages_of_a_key_in_flight(make_engine: MakeEngine) -> None:
    engine = make_engine(batch_size=3)
    worker = engine.worker()
    for number in range(6):
        engine.publish(b"%d" % number, key=b"k")
    assert worker.payloads() == [b"0", b"1", b"2"]
    first, second, third = worker.lease_all()
    worker.nack(second)
    worker.ack(first)
    worker.ack(third)
    assert worker.ack_all() == [b"3", b"4", b"5"], "first deliveries stay in order"
    engine.advance(seconds=5)
    assert worker.ack_all() == [b"1"], "and a retry may come after its successors"


def test_strict_queue_delivers_one_message_at_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine(ordering=STRICT)
    workers = [engine.worker() for _ in range(3)]
    for number in range(5):
        engine.publish(b"%d" % number, key=b"key-%d" % number)
    assert [worker.payloads() for worker in workers].count([b"0"]) == 1
    worker = next(one for one in workers if one.payloads())
    worker.nack(worker.lease())
    assert all(one.payloads() == [] for one in workers)
    engine.advance(seconds=5)
    assert worker.ack_all() == [b"%d" % number for number in range(5)]


def test_without_ordering_nothing_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(ordering=ANY_ORDER, partitions=2)
    worker = engine.worker()
    for number in range(10):
        engine.publish(b"%d" % number, key=b"k")
    assert len(worker.payloads()) == 10


def test_messages_without_a_key_do_not_wait_for_one_another(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    for number in range(10):
        engine.publish(b"%d" % number)
    assert len(worker.payloads()) == 10


def test_hot_key_does_not_hide_others_and_is_skipped_up_to_a_limit(make_engine: MakeEngine) -> None:
    engine = make_engine(cache_bytes=1 << 26)
    worker = engine.worker(prefetch=10)
    for number in range(4000):
        engine.send(b"hot-%d" % number, key=b"hot")
    engine.send(b"cold", key=b"cold")
    assert worker.payloads() == [b"hot-0", b"cold"]
    for number in range(4000, 6000):
        engine.send(b"hot-%d" % number, key=b"hot")
    engine.send(b"too far", key=b"far")
    assert worker.payloads() == [b"hot-0", b"cold"]
    done = worker.ack_all()
    assert [one for one in done if one.startswith(b"hot")] == [
        b"hot-%d" % number for number in range(6000)
    ]


def test_added_partitions_keep_the_order_of_each_key(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2)
    worker = engine.worker()
    sent: dict[bytes, list[bytes]] = {}

    def publish(count: int) -> None:
        for _ in range(count):
            key = b"key-%d" % random.randrange(20)
            payload = b"%s:%d" % (key, len(sent.setdefault(key, [])))
            sent[key].append(payload)
            engine.publish(payload, key=key)

    publish(60)
    engine.reconfigure(partitions=5)
    publish(60)
    engine.reconfigure(partitions=9)
    publish(60)
    got: dict[bytes, list[bytes]] = {}
    queue = engine.engine.queues["tasks"]
    assert len(queue.partitions) == 9 and len(queue.partition_gates) == 2
    while True:
        deliveries = worker.lease_all()
        if not deliveries:
            break
        random.shuffle(deliveries)
        for delivery in deliveries:
            got.setdefault(delivery.message.key, []).append(delivery.payload)
            worker.ack(delivery)
    assert got == sent
    assert queue.partition_gates == [] and engine.depth() == 0


def test_partition_gate_survives_a_crash(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=1)
    key = next(b"%d" % number for number in range(100) if fnv1a32(b"%d" % number) % 4 != 0)
    engine.group()
    engine.publish(b"old", key=key)
    engine.reconfigure(partitions=4)
    engine.publish(b"new", key=key)
    for restart in (engine.crash_and_restart, engine.restart):
        restart()
        worker = engine.worker()
        delivery = worker.lease()
        assert delivery.payload == b"old" and worker.lease_or_none() is None
    worker.ack(delivery)
    assert worker.ack_all() == [b"new"]


def test_partition_gate_opens_when_the_older_messages_expire(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=1, message_ttl=60.0)
    key = next(b"%d" % number for number in range(100) if fnv1a32(b"%d" % number) % 4 != 0)
    worker = engine.worker()
    worker.is_open = False
    engine.publish(b"old", key=key)
    engine.advance(seconds=30)
    engine.reconfigure(partitions=4)
    engine.publish(b"new", key=key)
    engine.advance(seconds=31)
    worker.is_open = True
    engine.engine.dispatch_schedule.add(worker)
    assert worker.ack_all() == [b"new"]


def test_partitions_cannot_be_reduced(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=4)
    engine.queue()
    with pytest.raises(InvalidQueueConfig, match="fewer"):
        engine.reconfigure(partitions=3)
    with pytest.raises(InvalidQueueConfig, match="fewer"):
        engine.reconfigure(ordering=STRICT)
    assert len(engine.queue().partitions) == 4


def test_changed_ordering_applies_to_waiting_messages(make_engine: MakeEngine) -> None:
    engine = make_engine(ordering=PER_KEY)
    worker = engine.worker()
    for number in range(6):
        engine.publish(b"%d" % number, key=b"k")
    assert worker.payloads() == [b"0"]
    engine.reconfigure(batch_size=3)
    assert worker.payloads() == [b"0", b"1", b"2"]
    engine.reconfigure(ordering=ANY_ORDER)
    assert len(worker.payloads()) == 6
    engine.reconfigure(ordering=PER_KEY, batch_size=1)
    engine.publish(b"6", key=b"k")
    assert len(worker.payloads()) == 6, "six of the key are active: the next one waits for all"
    for delivery in worker.lease_all():
        assert worker.payloads() == []
        worker.ack(delivery)
    assert worker.ack_all() == [b"6"]


def test_smaller_batch_size_lets_the_larger_batch_finish(make_engine: MakeEngine) -> None:
    engine = make_engine(batch_size=4)
    worker = engine.worker()
    for number in range(8):
        engine.publish(b"%d" % number, key=b"k")
    in_flight = worker.lease_all()
    assert len(in_flight) == 4
    engine.reconfigure(batch_size=1)
    for delivery in in_flight[:3]:
        worker.ack(delivery)
        assert worker.payloads() == []
    worker.ack(in_flight[3])
    assert worker.payloads() == [b"4"]


@pytest.mark.parametrize("seed", range(5))
def test_every_key_is_in_order_with_random_failures(make_engine: MakeEngine, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(partitions=3, max_retries=1000, total_timeout=1e9, message_ttl=0.0)
    workers: list[Worker] = [engine.worker(prefetch=7) for _ in range(3)]
    done: dict[bytes, list[int]] = {}
    for number in range(200):
        engine.send(b"%d" % number, key=b"key-%d" % rng.randrange(8))
    for _ in range(5000):
        for worker in workers:
            for delivery in worker.lease_all():
                if rng.random() < 0.4:
                    worker.nack(delivery, delay=rng.choice((-1.0, 0.0, 1.0)))
                else:
                    done.setdefault(delivery.message.key, []).append(int(delivery.payload))
                    worker.ack(delivery)
        if engine.depth() == 0:
            break
        engine.advance(seconds=1)
    assert engine.depth() == 0
    assert all(order == sorted(order) for order in done.values())
    assert sum(len(order) for order in done.values()) == 200


def test_priority_message_behind_a_gate_does_not_block_older_ones_of_its_key(
    make_engine: MakeEngine,
) -> None:
    """It waits for a gate that waits for the older messages: a deadlock if it blocked them."""
    engine = make_engine(partitions=2)
    key = next(
        key
        for key in (b"%d" % number for number in range(999))
        if _partitions_of(key, 2, 3, 5) == [1, 2, 1]
    )
    worker = engine.worker()
    worker.is_open = False
    engine.publish(b"old", key=key)
    engine.reconfigure(partitions=3)
    engine.publish(b"newer", key=key)
    engine.reconfigure(partitions=5)
    engine.publish(b"urgent", key=key, priority=9)
    worker.is_open = True
    engine.engine.dispatch_schedule.add(worker)
    assert worker.ack_all() == [b"old", b"newer", b"urgent"]


def _partitions_of(key: bytes, *counts: int) -> list[int]:
    """Return the partition of a key for each partition count."""
    return [int(fnv1a32(key) % count) for count in counts]
