"""Settlements after a crash count once, and never against the new holder."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice.errors import StaleDelivery
from sluice.queues.flow.delivery.delivery_tokens import DeliveryToken
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.ledger import verify
from sluice.queues.model.queue_rules import ANY_ORDER, STRICT
from sluice.queues.names import format_message_id
from tests.queues.conftest import MakeEngine
from tests.queues.kit import NO_TOKEN, Delivery, EngineUnderTest, MemoryBackend


def reclaim(engine: EngineUnderTest, old: Delivery) -> Lease | None:
    group = engine.engine.queues["tasks"].groups["workers"]
    engine.engine.now = engine.loop.now
    return engine.engine.lease_lookup.reclaim_lease(group, old.name, old.token, "w")


def settle_late(
    engine: EngineUnderTest, old: Delivery, settlement: Callable[[Lease], None]
) -> None:
    lease = reclaim(engine, old)
    assert lease is not None
    settlement(lease)
    engine.run_until_idle()
    assert verify(engine.engine.queues) == []


def nack(engine: EngineUnderTest, old: Delivery, delay: float = -1.0) -> None:
    settle_late(engine, old, lambda lease: engine.engine.settlement.nack(lease, delay, "no luck"))


def reject(engine: EngineUnderTest, old: Delivery) -> None:
    settle_late(
        engine,
        old,
        lambda lease: engine.engine.settlement.dead_letter(
            lease, "unacceptable", "makes no sense", True
        ),
    )


def release(engine: EngineUnderTest, old: Delivery) -> None:
    settle_late(engine, old, lambda lease: engine.engine.settlement.release(lease))


def extend(engine: EngineUnderTest, old: Delivery) -> None:
    settle_late(engine, old, lambda lease: engine.engine.settlement.extend(lease))


def lease_before_crash(engine: EngineUnderTest) -> Delivery:
    engine.publish(b"job", key=b"k")
    engine.publish(b"next", key=b"k")
    old = engine.worker("w").lease()
    engine.crash_and_restart()
    return old


def test_reject_after_a_crash_dead_letters_the_message(engine: EngineUnderTest) -> None:
    old = lease_before_crash(engine)
    reject(engine, old)
    (dead_letter,) = engine.dead_letter_records()
    assert (
        dead_letter.payload == b"job" and dead_letter.history["rejectionReason"] == "Unacceptable"
    )
    assert (
        dead_letter.history["dead-description"] == "makes no sense"
        and dead_letter.history["attempts"] == "1"
    )
    assert reclaim(engine, old) is None, "a repetition finds nothing"
    assert engine.ledger().dead == 1
    assert engine.worker("w").payloads() == [b"next"]
    engine.crash_and_restart()
    assert engine.dead_letters() == [b"job"] and engine.worker("w").payloads() == [b"next"]


def test_nack_after_a_crash_counts_and_its_key_waits_for_the_retry(engine: EngineUnderTest) -> None:
    old = lease_before_crash(engine)
    nack(engine, old, delay=60.0)
    worker = engine.worker("w")
    assert worker.lease_or_none() is None
    engine.advance(seconds=61)
    again = worker.lease()
    assert again.payload == b"job" and again.attempt == 2
    assert engine.group().nacked == 1


def test_nack_without_delay_after_a_crash_waits_the_backoff_of_its_attempt(
    engine: EngineUnderTest,
) -> None:
    engine.publish(b"job")
    worker = engine.worker("w")
    worker.nack(worker.lease(), delay=0.0)
    old = worker.lease()
    engine.crash_and_restart()
    nack(engine, old)
    worker = engine.worker("w")
    engine.advance(seconds=9)
    assert worker.lease_or_none() is None, "the second backoff is ten seconds"
    engine.advance(seconds=2)
    assert worker.lease().attempt == 3


@pytest.mark.parametrize("stop", ["crash", "restart"])
def test_nack_with_a_confirmation_lost_in_a_crash_is_not_counted_twice(
    engine: EngineUnderTest, stop: str
) -> None:
    engine.publish(b"job")
    worker = engine.worker("w")
    old = worker.lease()
    worker.nack(old, delay=60.0)
    engine.restart() if stop == "restart" else engine.crash_and_restart()
    nack(engine, old, delay=0.0)
    worker = engine.worker("w")
    assert worker.lease_or_none() is None, "the first delay still applies"
    engine.advance(seconds=61)
    assert worker.lease().attempt == 2


def test_last_nack_after_a_crash_dead_letters_the_message(make_engine: MakeEngine) -> None:
    engine = make_engine(max_retries=0)
    engine.publish(b"poison")
    old = engine.worker("w").lease()
    engine.crash_and_restart()
    nack(engine, old)
    assert engine.dead_letters() == [b"poison"] and engine.depth() == 0


def test_release_after_a_crash_changes_nothing_and_is_no_failure(engine: EngineUnderTest) -> None:
    old = lease_before_crash(engine)
    release(engine, old)
    release(engine, old)
    again = engine.worker("other").lease()
    assert again.payload == b"job" and again.attempt == 1


def test_extend_after_a_crash_renews_the_lease(make_engine: MakeEngine) -> None:
    engine = make_engine(delivery_timeout=30.0)
    old = lease_before_crash(engine)
    extend(engine, old)
    other = engine.worker("other")
    assert other.lease_or_none() is None
    engine.advance(seconds=20)
    extend(engine, old)
    engine.advance(seconds=20)
    assert other.lease_or_none() is None
    group = engine.group()
    engine.engine.settlement.ack(
        engine.engine.lease_lookup.find_lease(group, old.name, old.token, "w")
    )
    engine.run_until_idle()
    assert engine.ledger().acked == 1 and other.payloads() == [b"next"]
    assert verify(engine.engine.queues) == []


@pytest.mark.parametrize("settle", [reject, nack, release])
def test_after_a_late_extend_every_settlement_counts(
    engine: EngineUnderTest, settle: Callable[[EngineUnderTest, Delivery], None]
) -> None:
    old = lease_before_crash(engine)
    extend(engine, old)
    settle(engine, old)
    engine.advance(seconds=6)
    again = engine.worker("w").lease()
    assert again.payload == (b"next" if settle is reject else b"job")
    assert again.attempt == (2 if settle is nack else 1)


def test_late_extended_and_unsettled_message_is_redelivered_after_its_deadline(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(delivery_timeout=30.0)
    old = lease_before_crash(engine)
    extend(engine, old)
    worker = engine.worker("other")
    engine.advance(seconds=36)
    assert worker.lease().attempt == 2
    assert reclaim(engine, old) is None


def test_late_settlement_is_refused_while_another_consumer_has_the_message(
    engine: EngineUnderTest,
) -> None:
    old = lease_before_crash(engine)
    other = engine.worker("other")
    redelivery = other.lease()
    assert reclaim(engine, old) is None
    other.nack(redelivery, delay=50.0)
    assert reclaim(engine, old) is None, "it has failed at another consumer since"
    with pytest.raises(StaleDelivery):
        engine.engine.lease_lookup.find_lease(engine.group(), old.name, old.token, "w")
    assert verify(engine.engine.queues) == []


@pytest.mark.parametrize("settle", [reject, nack, release, extend])
def test_consumer_with_a_redelivery_may_settle_it_by_its_old_token(
    engine: EngineUnderTest, settle: Callable[[EngineUnderTest, Delivery], None]
) -> None:
    old = lease_before_crash(engine)
    worker = engine.worker("w")
    again = worker.lease()
    assert again.payload == b"job"
    settle(engine, old)
    assert engine.ledger().dead == (1 if settle is reject else 0)
    assert engine.group().nacked == (1 if settle is nack else 0)


@pytest.mark.parametrize("ordering", [STRICT, ANY_ORDER])
def test_late_settlement_does_not_overtake_an_earlier_message_of_its_key(
    make_engine: MakeEngine, ordering: int
) -> None:
    engine = make_engine(ordering=ordering, batch_size=1)
    engine.publish(b"first", key=b"k")
    engine.publish(b"second", key=b"k")
    engine.group()
    engine.restart()
    group = engine.group()
    pid = group.cursors[0].partition.pid
    lease = engine.engine.lease_lookup.reclaim_lease(
        group, format_message_id(pid, 1), NO_TOKEN, "w"
    )
    assert (lease is None) == (ordering == STRICT), "as if the ack of the first had been lost"
    assert verify(engine.engine.queues) == []
    assert engine.worker("other").payloads() == [b"first"]


def test_many_late_settlements_leave_the_rest_in_order(make_engine: MakeEngine) -> None:
    engine = make_engine(batch_size=3)
    for number in range(12):
        engine.publish(b"%d" % number, key=b"k" if number % 2 else b"other")
    held = engine.worker("w").lease_all()
    assert [one.payload for one in held] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    engine.crash_and_restart()
    release(engine, held[3])
    nack(engine, held[0], delay=60.0)
    reject(engine, held[1])
    extend(engine, held[2])
    worker = engine.worker("w")
    assert worker.payloads() == [b"3", b"4", b"5", b"7"]
    done = worker.ack_all()
    for _ in range(2):
        engine.advance(seconds=36)  # 2 was not settled in time, and 0 waits for its retry
        done += worker.ack_all()
    assert sorted(done, key=int) == [b"%d" % n for n in range(12) if n != 1]
    assert engine.ledger().dead == 1 and verify(engine.engine.queues) == []


def test_uncommitted_message_cannot_be_settled_by_a_token_of_a_previous_run() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    engine.group()
    assert backend.store is not None
    backend.store.hold()
    engine.publish(b"job")
    queue = engine.engine.queues["tasks"]
    name = format_message_id(queue.partitions[0].pid, 0)
    group = queue.groups["workers"]
    for token in (NO_TOKEN, DeliveryToken(5, 1, 1)):
        assert not engine.engine.lease_lookup.ack_late(group, name, token, "w")
        assert engine.engine.lease_lookup.reclaim_lease(group, name, token, "w") is None
    backend.store.release()
    assert engine.worker("w").ack_all() == [b"job"]
