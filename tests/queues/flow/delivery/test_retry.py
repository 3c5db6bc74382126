"""Failures: backoff, number of attempts, and dead letters."""

from __future__ import annotations

import pytest

from sluice.queues.model.queue_rules import QueueRules
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest


def test_backoff_doubles_up_to_its_maximum(make_engine: MakeEngine) -> None:
    engine = make_engine(max_retries=20)
    worker = engine.worker()
    engine.publish(b"job")
    waits: list[float] = []
    for _ in range(9):
        worker.nack(worker.lease())
        start = engine.loop.now
        while not worker.payloads():
            engine.advance(seconds=1)
        waits.append(engine.loop.now - start)
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_backoff_follows_its_settings() -> None:
    rules = QueueRules("q")
    rules.initial_backoff, rules.backoff_multiplier, rules.max_backoff = 1.0, 3.0, 20.0
    assert [rules.backoff_seconds(n, 0.0) for n in range(1, 6)] == [1.0, 3.0, 9.0, 20.0, 20.0]


def test_jitter_subtracts_at_most_its_share() -> None:
    rules = QueueRules("q")
    rules.jitter = 0.5
    assert rules.backoff_seconds(1, 0.0) == 5.0
    assert rules.backoff_seconds(1, 0.999) == pytest.approx(2.5, abs=0.01)


def test_jitter_is_drawn_for_each_retry(make_engine: MakeEngine) -> None:
    # The first number is for the tokens.
    engine = make_engine(jitter=1.0, draw=iter([0.0, 0.5, 0.9]).__next__)
    worker = engine.worker()
    engine.publish(b"job")
    worker.nack(worker.lease())
    engine.advance(seconds=2.6)
    worker.nack(worker.lease())
    engine.advance(seconds=1.1)
    assert worker.lease().attempt == 3


def test_nack_delay_replaces_the_backoff(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"job")
    worker.nack(worker.lease(), delay=100)
    engine.advance(seconds=99)
    assert worker.lease_or_none() is None
    engine.advance(seconds=1)
    worker.nack(worker.lease(), delay=0)
    assert worker.lease().attempt == 3, "0 s means now"


def test_message_is_dead_lettered_after_its_last_retry(make_engine: MakeEngine) -> None:
    engine = make_engine(max_retries=10)
    worker = engine.worker()
    engine.publish(b"poison")
    attempts = []
    for _ in range(11):
        delivery = worker.lease()
        attempts.append(delivery.attempt)
        worker.nack(delivery, description="it burns")
        for _ in range(300):
            if not worker.payloads():
                engine.advance(seconds=1)
    assert attempts == list(range(1, 12))
    assert worker.lease_or_none() is None
    assert engine.dead_letters() == [b"poison"]
    headers = engine.dead_letter_records()[0].history
    assert (headers["dead-reason"], headers["attempts"], headers["dead-description"]) == (
        "max_retries",
        "11",
        "it burns",
    )


def test_without_retries_the_first_failure_dead_letters(make_engine: MakeEngine) -> None:
    engine = make_engine(max_retries=0)
    worker = engine.worker()
    engine.publish(b"poison")
    worker.nack(worker.lease())
    assert engine.dead_letters() == [b"poison"]


def test_deadlines_and_disconnects_count_as_failures(make_engine: MakeEngine) -> None:
    engine = make_engine(max_retries=1, delivery_timeout=30.0)
    worker = engine.worker()
    engine.publish(b"poison")
    engine.advance(seconds=36)
    assert worker.lease().attempt == 2
    worker.leave()
    assert engine.dead_letters() == [b"poison"]


def test_message_is_dead_lettered_three_hours_after_its_first_attempt(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_retries=1_000_000, total_timeout=10_800.0)
    worker = engine.worker()
    engine.publish(b"slow poison")
    started = engine.loop.now
    while not engine.dead_letters():
        for delivery in worker.lease_all():
            worker.nack(delivery)
        engine.advance(seconds=10)
    assert engine.loop.now - started == pytest.approx(10_800, abs=10)
    assert engine.dead_letter_records()[0].history["dead-reason"] == "timeout"
    assert int(engine.dead_letter_records()[0].history["attempts"]) > 30


def test_message_is_dead_lettered_in_time_even_without_a_consumer(make_engine: MakeEngine) -> None:
    engine = make_engine(total_timeout=100.0)
    worker = engine.worker()
    engine.publish(b"job")
    worker.nack(worker.lease())
    worker.leave()
    engine.advance(seconds=99)
    assert engine.dead_letters() == []
    engine.advance(seconds=2)
    assert engine.dead_letters() == [b"job"]
    assert engine.dead_letter_records()[0].history["dead-reason"] == "timeout"


def test_time_before_the_first_attempt_does_not_count(make_engine: MakeEngine) -> None:
    engine = make_engine(total_timeout=100.0)
    engine.group()
    engine.publish(b"job")
    engine.advance(hours=5)
    worker = engine.worker()
    worker.nack(worker.lease(), delay=0)
    assert worker.lease().attempt == 2


def test_retries_survive_a_crash_with_their_failures_and_times(make_engine: MakeEngine) -> None:
    engine = make_engine(max_retries=3, total_timeout=1000.0)
    worker = engine.worker()
    engine.publish(b"job", message_id=b"id")
    worker.nack(worker.lease(), description="first")
    engine.advance(seconds=5)
    worker.nack(worker.lease(), description="second")
    first_at = engine.loop.now - 5
    engine.crash_and_restart()
    ledger = engine.ledger()
    assert (ledger.retrying, ledger.waiting) == (1, 0)
    worker = engine.worker()
    engine.advance(seconds=9)
    assert worker.lease_or_none() is None
    engine.advance(seconds=1.1)
    delivery = worker.lease()
    assert delivery.attempt == 3 and delivery.lease.description == "second"
    assert delivery.lease.first_delivered_at == pytest.approx(first_at, abs=0.01)
    worker.nack(delivery)
    engine.crash_and_restart()
    worker = engine.worker()
    engine.advance(seconds=21)
    worker.nack(worker.lease())
    assert engine.dead_letters() == [b"job"]
    assert engine.dead_letter_records()[0].history["attempts"] == "4"


def test_thousand_concurrent_failures_keep_order_and_lose_no_message(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=4)
    worker = engine.worker(prefetch=5000)
    for number in range(1000):
        engine.send(b"%d" % number)
    for delivery in worker.lease_all():
        worker.under_test.engine.settlement.nack(delivery.lease, -1.0, "")
    engine.advance(seconds=6)
    assert sorted(worker.ack_all(), key=int) == [b"%d" % number for number in range(1000)]


@pytest.mark.parametrize("ahead", [90.0, 86_400.0])
def test_clock_set_forward_over_a_restart_dead_letters_nothing(
    make_engine: MakeEngine, ahead: float
) -> None:
    engine = make_engine(max_retries=3, total_timeout=60.0)
    worker = engine.worker()
    engine.publish(b"job")
    worker.nack(worker.lease())
    engine.loop.now += ahead
    engine.crash_and_restart()
    worker = engine.worker()
    engine.advance(seconds=6)
    delivery = worker.lease()
    assert (delivery.payload, delivery.attempt) == (b"job", 2)
    assert engine.dead_letters() == []
    worker.nack(delivery)
    engine.crash_and_restart()
    worker = engine.worker()
    engine.advance(seconds=11)
    assert worker.lease().attempt == 3, "nor over the next restart"


def test_total_timeout_counts_from_the_restart_for_earlier_attempts(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_retries=100, total_timeout=60.0)
    worker = engine.worker()
    engine.publish(b"job")
    worker.nack(worker.lease(), delay=50.0)
    engine.advance(seconds=50)
    engine.crash_and_restart()
    worker = engine.worker()
    attempts = 1
    while not engine.dead_letters():
        delivery = worker.lease_or_none()
        if delivery is not None:
            attempts += 1
            worker.nack(delivery, delay=5.0)
        engine.advance(seconds=5)
        assert attempts < 20
    assert engine.dead_letter_records()[0].history["dead-reason"] == "timeout"
    assert attempts > 10


@pytest.mark.parametrize("jump", [0.0, 86_400.0, -86_400.0])
def test_total_timeout_continues_after_a_restart(make_engine: MakeEngine, jump: float) -> None:
    """Downtime of the broker and jumps of the clock do not count."""
    engine = make_engine(max_retries=1000, total_timeout=100.0)
    worker = engine.worker()
    engine.publish(b"job")
    running = 0.0
    while running < 40.0:
        worker.nack(worker.lease(), delay=5.0)
        engine.advance(seconds=5)
        running += 5.0
    worker.nack(worker.lease(), delay=5.0)
    for _ in range(2):
        engine.loop.now += jump
        engine.crash_and_restart()
        worker = engine.worker()
        engine.advance(seconds=5.1)
        worker.nack(worker.lease(), delay=5.0)
    spent = 40.0 + 2 * 5.1
    engine.advance(seconds=100.0 - spent - 1.0)
    assert engine.dead_letters() == []
    engine.advance(seconds=1.1)
    assert engine.dead_letter_records()[0].history["dead-reason"] == "timeout"


def test_total_timeout_continues_after_a_snapshot(make_engine: MakeEngine) -> None:
    engine = make_engine(max_retries=1000, total_timeout=100.0)
    worker = engine.worker()
    engine.publish(b"job")
    worker.nack(worker.lease())
    engine.advance(seconds=40)
    engine.take_snapshot()
    for _ in range(2):
        engine.loop.now += 86_400.0
        engine.crash_and_restart()
    engine.advance(seconds=59)
    assert engine.dead_letters() == []
    engine.advance(seconds=1.1)
    assert engine.dead_letter_records()[0].history["dead-reason"] == "timeout"


def test_retry_is_not_delayed_when_the_clock_is_set_back(make_engine: MakeEngine) -> None:
    engine = make_engine(max_retries=3)
    worker = engine.worker()
    engine.publish(b"job", key=b"k")
    engine.publish(b"next", key=b"k")
    worker.nack(worker.lease())
    engine.loop.now -= 9 * 3600
    engine.crash_and_restart()
    worker = engine.worker()
    assert worker.lease_or_none() is None
    engine.advance(seconds=6)
    delivery = worker.lease()
    assert (delivery.payload, delivery.attempt) == (b"job", 2)
    assert delivery.lease.first_delivered_at <= engine.loop.now
