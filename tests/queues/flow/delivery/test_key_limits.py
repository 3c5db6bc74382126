"""Limits of concurrency and rate for each partition key."""

from __future__ import annotations

import pytest

from tests.queues.conftest import MakeEngine
from tests.queues.kit import Delivery, EngineUnderTest, Worker

EACH_ORDERING = pytest.mark.parametrize("ordering", [0, 1])


def publish(engine: EngineUnderTest, keys: bytes, per_key: int) -> None:
    """Publish messages of short keys in turn; the payload is the key and a number."""
    for nth in range(per_key):
        for key in keys:
            engine.publish(b"%c%d" % (key, nth), key=b"%c" % key)


def lease(*workers: Worker) -> list[tuple[Worker, Delivery]]:
    return [(worker, delivery) for worker in workers for delivery in worker.lease_all()]


def payloads(leased: list[tuple[Worker, Delivery]]) -> list[bytes]:
    return sorted(delivery.payload for _, delivery in leased)


@EACH_ORDERING
def test_key_has_no_more_in_flight_than_its_limit(make_engine: MakeEngine, ordering: int) -> None:
    engine = make_engine(
        max_in_flight_per_key=2, batch_size=10, ordering=ordering, partitions=2, prefetch=5
    )
    workers = [engine.worker() for _ in range(3)]
    publish(engine, b"ab", 4)
    held = lease(*workers)
    assert payloads(held) == [b"a0", b"a1", b"b0", b"b1"]
    for worker, delivery in held:
        if delivery.payload == b"a0":
            worker.ack(delivery)
    assert payloads(lease(*workers)) == [b"a2"], "as many of the key as were settled"


@EACH_ORDERING
def test_messages_without_a_key_have_no_limit(make_engine: MakeEngine, ordering: int) -> None:
    engine = make_engine(max_in_flight_per_key=1, max_rate_per_key=1.0, ordering=ordering)
    worker = engine.worker()
    for nth in range(5):
        engine.publish(b"%d" % nth)
    assert len(worker.lease_all()) == 5


def test_limit_above_batch_size_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(max_in_flight_per_key=5, batch_size=1)
    worker = engine.worker()
    publish(engine, b"a", 3)
    assert worker.payloads() == [b"a0"]


def test_failed_message_leaves_room_for_another_of_its_key(make_engine: MakeEngine) -> None:
    engine = make_engine(max_in_flight_per_key=1, batch_size=2, initial_backoff=10.0)
    worker = engine.worker()
    publish(engine, b"a", 3)
    worker.nack(worker.lease())
    second = worker.lease()
    assert second.payload == b"a1", "the failed one is active, but not in flight"
    engine.advance(seconds=10)
    assert worker.lease_or_none() is None
    worker.ack(second)
    assert worker.payloads() == [b"a0"]


@EACH_ORDERING
def test_changed_limit_of_keys_applies_at_once(make_engine: MakeEngine, ordering: int) -> None:
    engine = make_engine(max_in_flight_per_key=1, batch_size=10, ordering=ordering)
    worker = engine.worker()
    publish(engine, b"a", 8)
    first = worker.lease_all()
    assert len(first) == 1
    engine.reconfigure(max_in_flight_per_key=3)
    assert len(worker.lease_all()) == 2
    engine.reconfigure(max_in_flight_per_key=1)
    worker.ack(first[0])
    assert worker.lease_or_none() is None, "two are in flight, more than the new limit"
    engine.reconfigure(max_in_flight_per_key=0)
    assert len(worker.lease_all()) == 5


def test_limit_counts_deliveries_from_before_it_was_set(make_engine: MakeEngine) -> None:
    engine = make_engine(batch_size=10)
    worker = engine.worker(prefetch=2)
    other = engine.worker()
    publish(engine, b"a", 5)
    held = lease(worker, other)
    taken = len(held)
    engine.reconfigure(max_in_flight_per_key=2)
    publish(engine, b"a", 5)
    assert taken >= 2 and not lease(worker, other)


@EACH_ORDERING
def test_rate_spreads_the_deliveries_of_each_key(make_engine: MakeEngine, ordering: int) -> None:
    engine = make_engine(max_rate_per_key=2.0, batch_size=100, ordering=ordering)
    worker, other = engine.worker(), engine.worker()
    publish(engine, b"ab", 10)
    assert payloads(lease(worker, other)) == [b"a0", b"a1", b"b0", b"b1"], "the burst of a second"
    engine.advance(seconds=0.4)
    assert not lease(worker, other)
    engine.advance(seconds=3.6)
    assert len(lease(worker, other)) == 16
    assert engine.group().admission.keys.count_held_keys() == 0


def test_burst_of_a_key_is_what_may_be_delivered_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rate_per_key=1.0, max_rate_per_key_burst=5.0, batch_size=100)
    worker = engine.worker()
    publish(engine, b"a", 20)
    assert len(worker.lease_all()) == 5
    engine.advance(seconds=2)
    assert len(worker.lease_all()) == 2


def test_changed_rate_of_keys_applies_to_what_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rate_per_key=0.01, batch_size=100)
    worker = engine.worker()
    publish(engine, b"a", 6)
    assert len(worker.lease_all()) == 1
    engine.reconfigure(max_rate_per_key=2.0)
    engine.advance(seconds=1.01)
    assert len(worker.lease_all()) == 2
    engine.reconfigure(max_rate_per_key=0.0)
    assert len(worker.lease_all()) == 3


def test_raised_rate_of_keys_does_not_count_for_the_time_before(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rate_per_key=0.1, batch_size=100)
    worker = engine.worker()
    publish(engine, b"a", 9)
    assert len(worker.lease_all()) == 1
    engine.reconfigure(max_rate_per_key=0.01)
    engine.advance(seconds=9)
    engine.reconfigure(max_rate_per_key=0.1)
    engine.advance(seconds=9)
    assert worker.lease_or_none() is None
    engine.advance(seconds=1)
    assert len(worker.lease_all()) == 1


def test_retries_count_against_the_rate_of_their_key(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rate_per_key=1.0)
    worker = engine.worker()
    publish(engine, b"a", 1)
    worker.nack(worker.lease(), delay=0)
    assert worker.lease_or_none() is None
    engine.advance(seconds=1)
    assert worker.lease().attempt == 2


@EACH_ORDERING
def test_key_goes_on_when_its_next_message_is_withdrawn(
    make_engine: MakeEngine, ordering: int
) -> None:
    engine = make_engine(max_in_flight_per_key=1, batch_size=10, ordering=ordering, partitions=1)
    worker = engine.worker()
    publish(engine, b"a", 4)
    first = worker.lease()
    partition = engine.queue().partitions[0]
    engine.engine.delivery_control.pause_group(engine.group(), "ann", "")
    worker.ack(first)  # the second is next
    engine.engine.removal.remove_for_all_groups(partition, 1, 3)
    engine.engine.delivery_control.resume_group(engine.group())
    engine.run_until_idle()
    assert worker.payloads() == [b"a2"]


def test_priorities_hold_among_the_messages_of_a_limited_key(make_engine: MakeEngine) -> None:
    engine = make_engine(max_in_flight_per_key=1, batch_size=10, ordering=0, partitions=1)
    worker = engine.worker()
    for nth, priority in enumerate((0, 0, 1, 9)):
        engine.publish(b"%d" % nth, key=b"a", priority=priority)
    order = []
    for _ in range(4):
        delivery = worker.lease()
        order.append(delivery.payload)
        worker.ack(delivery)
    assert order == [b"0", b"3", b"2", b"1"]


def test_limits_of_keys_hold_after_a_restart(make_engine: MakeEngine) -> None:
    engine = make_engine(max_in_flight_per_key=1, max_rate_per_key=0.5, batch_size=10)
    publish(engine, b"ab", 3)
    assert len(engine.worker().lease_all()) == 2
    engine.crash_and_restart()
    worker = engine.worker()
    held = worker.lease_all()
    assert len(held) == 2, "one of each key: the burst is available again"
    worker.ack(held[0])
    assert worker.lease_or_none() is None
    engine.advance(seconds=2)
    assert len(worker.lease_all()) == 1


def test_idle_keys_take_no_memory(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rate_per_key=1.0, max_in_flight_per_key=1, partitions=1)
    worker = engine.worker()
    for nth in range(3000):
        engine.publish(b"job", key=b"key %d" % nth)
        worker.ack(worker.lease())
        engine.advance(seconds=0.01)
    assert engine.group().admission.keys.count_keys() <= 1200


def test_repaired_message_of_a_held_key_passes_those_that_wait_for_the_limit(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(
        max_in_flight_per_key=1,
        batch_size=10,
        holds_keys=True,
        max_retries=0,
        hold_timeout=600.0,
        partitions=1,
    )
    worker = engine.worker()
    publish(engine, b"a", 4)
    worker.nack(worker.lease())
    publish(engine, b"a", 1)
    assert worker.lease_or_none() is None, "its key is held for repair"
    assert engine.redrive(engine.dead_letter_records()[0])
    repaired = worker.lease()
    assert repaired.payload == b"a0"
    assert worker.lease_or_none() is None
    worker.ack(repaired)
    assert len(worker.ack_all()) == 4
