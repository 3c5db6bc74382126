"""Settlements of deliveries, and which clients may settle them."""

from __future__ import annotations

import pytest

from sluice.errors import StaleDelivery, UnknownDelivery
from sluice.queues.model.ledger import verify
from tests.queues.conftest import MakeEngine
from tests.queues.kit import NO_TOKEN, Delivery, EngineUnderTest


def test_acked_message_is_gone(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"job")
    worker.ack(worker.lease())
    assert engine.depth() == 0 and engine.ledger().acked == 1
    engine.crash_and_restart()
    assert engine.depth() == 0
    assert engine.worker().lease_or_none() is None


def test_message_is_delivered_to_one_consumer_of_a_group_at_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=4)
    workers = [engine.worker() for _ in range(3)]
    for number in range(100):
        engine.publish(b"%d" % number)
    got = [payload for worker in workers for payload in worker.payloads()]
    assert sorted(got, key=int) == [b"%d" % number for number in range(100)]


def test_consumer_gets_no_more_than_its_capacity(engine: EngineUnderTest) -> None:
    worker = engine.worker(prefetch=3)
    for number in range(10):
        engine.publish(b"%d" % number)
    assert len(worker.payloads()) == 3
    worker.ack(worker.lease())
    assert len(worker.payloads()) == 3
    worker.is_open = False
    worker.ack(worker.lease())
    assert len(worker.payloads()) == 2, "its connection is full: it gets no more deliveries"


def test_delivery_not_settled_in_time_is_redelivered(make_engine: MakeEngine) -> None:
    engine = make_engine(delivery_timeout=30.0)
    worker = engine.worker()
    engine.publish(b"job")
    first = worker.lease()
    assert first.attempt == 1
    engine.advance(seconds=29.9)
    assert worker.revoked == []
    engine.advance(seconds=0.2)
    assert worker.revoked == [first.seq]
    assert worker.lease_or_none() is None, "it waits its backoff"
    engine.advance(seconds=5)
    second = worker.lease()
    assert (
        second.payload == b"job"
        and second.attempt == 2
        and second.token.counter != first.token.counter
    )


def test_extend_restarts_the_deadline(make_engine: MakeEngine) -> None:
    engine = make_engine(delivery_timeout=30.0)
    worker = engine.worker()
    engine.publish(b"long")
    engine.publish(b"short")
    long, short = worker.lease_all()
    for _ in range(5):
        engine.advance(seconds=20)
        worker.extend(long)
    engine.advance(seconds=29)
    worker.ack(long)
    assert engine.ledger().acked == 1
    assert short.seq in worker.revoked, "an extended delivery does not hide later deadlines"
    assert long.seq not in worker.revoked


def test_extended_delivery_does_not_delay_the_deadline_of_another(make_engine: MakeEngine) -> None:
    engine = make_engine(delivery_timeout=30.0)
    worker = engine.worker()
    engine.publish(b"long")
    engine.publish(b"short")
    long, short = worker.lease_all()
    engine.advance(seconds=20)
    worker.extend(long)
    engine.advance(seconds=11)
    assert worker.revoked == [short.seq]
    engine.advance(seconds=20)
    assert worker.revoked == [short.seq, long.seq]


def test_released_message_is_redelivered_at_once_and_not_counted(engine: EngineUnderTest) -> None:
    worker = engine.worker(prefetch=1)
    engine.publish(b"job")
    for _ in range(30):
        delivery = worker.lease()
        assert delivery.attempt == 1
        worker.release(delivery)
    worker.ack(worker.lease())
    assert engine.engine.queues["tasks"].retried == 0 and engine.dead_letters() == []


def test_release_keeps_earlier_failures(engine: EngineUnderTest) -> None:
    worker = engine.worker(prefetch=1)
    engine.publish(b"job")
    worker.nack(worker.lease(), delay=0.0)
    worker.release(worker.lease())
    assert worker.lease().attempt == 2


def test_late_ack_of_the_last_holder_counts_while_the_message_waits(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(delivery_timeout=30.0)
    worker = engine.worker()
    engine.publish(b"job")
    delivery = worker.lease()
    engine.advance(seconds=31)
    worker.ack(delivery)
    assert engine.depth() == 0 and engine.ledger().acked == 1
    engine.advance(minutes=10)
    assert worker.lease_or_none() is None


def test_late_ack_counts_while_the_message_waits_for_a_consumer(make_engine: MakeEngine) -> None:
    engine = make_engine(delivery_timeout=30.0)
    worker = engine.worker(prefetch=1)
    engine.publish(b"job", key=b"k")
    engine.publish(b"next", key=b"k")
    delivery = worker.lease()
    worker.is_open = False
    engine.advance(seconds=40)
    worker.ack(delivery)
    worker.is_open = True
    engine.engine.dispatch_schedule.add(worker)
    worker.ack(worker.lease())
    assert engine.ledger().acked == 2


def test_late_settlement_is_refused_when_another_consumer_has_the_lease(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(delivery_timeout=30.0)
    slow = engine.worker("slow")
    engine.publish(b"job")
    late = slow.lease()
    fast = engine.worker("fast")
    engine.advance(seconds=36)
    current = fast.lease()
    for settle in (slow.ack, slow.nack, slow.reject, slow.extend, slow.release):
        with pytest.raises(StaleDelivery):
            settle(late)
    assert engine.ledger().delivered == 1 and engine.depth() == 1, "it changes nothing"
    fast.ack(current)
    with pytest.raises(UnknownDelivery):
        slow.ack(late)


def test_nack_release_and_extend_are_refused_after_the_deadline(make_engine: MakeEngine) -> None:
    engine = make_engine(delivery_timeout=30.0)
    worker = engine.worker()
    engine.publish(b"job")
    late = worker.lease()
    engine.advance(seconds=31)
    for settle in (worker.nack, worker.extend, worker.release):
        with pytest.raises(StaleDelivery):
            settle(late)
    assert engine.engine.queues["tasks"].retried == 1


def test_late_reject_of_the_last_holder_counts_while_the_message_waits(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(delivery_timeout=30.0)
    worker = engine.worker()
    engine.publish(b"poison")
    delivery = worker.lease()
    engine.advance(seconds=31)
    worker.reject(delivery, "unacceptable", "makes no sense")
    assert engine.dead_letters() == [b"poison"] and engine.depth() == 0


def test_without_a_token_only_the_holder_may_settle(engine: EngineUnderTest) -> None:
    worker = engine.worker("w")
    engine.publish(b"job")
    delivery = worker.lease()
    group = engine.group()
    with pytest.raises(StaleDelivery):
        engine.engine.lease_lookup.find_lease(group, delivery.name, NO_TOKEN, "another client")
    assert (
        engine.engine.lease_lookup.find_lease(group, delivery.name, NO_TOKEN, "w").seq
        == delivery.seq
    )
    assert (
        engine.engine.lease_lookup.find_lease(group, delivery.name, NO_TOKEN, "").seq
        == delivery.seq
    )
    with pytest.raises(UnknownDelivery):
        engine.engine.lease_lookup.find_lease(group, b"no such id", NO_TOKEN, "w")
    with pytest.raises(UnknownDelivery):
        engine.engine.lease_lookup.find_lease(group, b"ffff-ffff", NO_TOKEN, "w")


def test_message_is_identified_by_the_id_of_its_publisher(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"job", message_id=b"order-7")
    delivery = worker.lease()
    assert delivery.name == b"order-7"
    worker.nack(delivery, delay=0.0)
    worker.ack(worker.lease())
    assert engine.group().leases_by_message_id == {}


def test_two_messages_with_one_id_are_distinguished_by_their_tokens(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(dedup_window=1.0)
    worker = engine.worker()
    engine.publish(b"first", message_id=b"id")
    engine.advance(seconds=2)
    engine.publish(b"second", message_id=b"id")
    engine.advance(seconds=2)
    engine.publish(b"third", message_id=b"id")
    first, second, third = worker.lease_all()
    worker.nack(second, delay=1000)
    worker.ack(first)
    worker.ack(third)
    ledger = engine.ledger()
    assert (ledger.acked, ledger.retrying) == (2, 1)
    engine.advance(seconds=1000)
    assert worker.lease().payload == b"second"


def test_publisher_id_that_looks_like_a_broker_id_does_not_hide_it(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"ours")
    ours = worker.lease()
    engine.publish(b"theirs", message_id=ours.name)
    theirs = worker.lease()
    worker.ack(ours)
    worker.ack(theirs)
    assert engine.depth() == 0


def test_leaving_consumer_returns_its_deliveries_at_once_as_failures(
    engine: EngineUnderTest,
) -> None:
    leaving = engine.worker()
    for number in range(3):
        engine.publish(b"%d" % number)
    assert len(leaving.lease_all()) == 3
    staying = engine.worker()
    leaving.leave()
    deliveries = staying.lease_all()
    assert [one.payload for one in deliveries] == [b"0", b"1", b"2"]
    assert [one.attempt for one in deliveries] == [2, 2, 2]


def test_leased_message_is_redelivered_after_a_crash(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"job")
    worker.lease()
    engine.crash_and_restart()
    delivery = engine.worker().lease()
    assert delivery.payload == b"job" and delivery.attempt == 1


def test_token_from_before_a_crash_settles_nothing(engine: EngineUnderTest) -> None:
    worker = engine.worker("w")
    engine.publish(b"job")
    old = worker.lease()
    engine.crash_and_restart()
    again = engine.worker("w")
    with pytest.raises((StaleDelivery, UnknownDelivery)):
        again.ack(old)
    again.lease()
    with pytest.raises(StaleDelivery):
        again.ack(old)


def ack_late(engine: EngineUnderTest, old: Delivery) -> bool:
    """Acknowledge a delivery of a previous run; return whether that counts."""
    group = engine.engine.queues["tasks"].groups["workers"]
    counted = engine.engine.lease_lookup.ack_late(group, old.name, old.token, "w")
    engine.run_until_idle()
    return counted


def test_work_done_across_a_crash_counts_once_and_the_ledger_balances(
    engine: EngineUnderTest,
) -> None:
    worker = engine.worker("w")
    engine.publish(b"done", key=b"k")
    engine.publish(b"next", key=b"k")
    old = worker.lease()
    engine.crash_and_restart()
    assert ack_late(engine, old)
    assert not ack_late(engine, old)
    assert engine.ledger().acked == 1
    assert engine.worker("w").payloads() == [b"next"]
    assert verify(engine.engine.queues) == []
    engine.crash_and_restart()
    assert engine.worker("w").payloads() == [b"next"]


def test_late_settlement_does_not_count_while_another_consumer_has_the_message(
    engine: EngineUnderTest,
) -> None:
    worker = engine.worker("w")
    engine.publish(b"job")
    old = worker.lease()
    engine.crash_and_restart()
    again = engine.worker("other").lease()
    assert not ack_late(engine, old)
    assert engine.ledger().acked == 0
    assert not ack_late(engine, again), "a token of this run is settled by its lease"
    assert verify(engine.engine.queues) == []


def test_settling_twice_is_refused(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"job")
    delivery = worker.lease()
    worker.ack(delivery)
    with pytest.raises(UnknownDelivery):
        worker.ack(delivery)
    # Acknowledging the lease itself again changes nothing either.
    engine.engine.settlement.ack(delivery.lease)
    assert engine.ledger().acked == 1
