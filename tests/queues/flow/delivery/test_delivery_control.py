"""Pauses, the breaker, and limits of concurrency and rate."""

from __future__ import annotations

import pytest

from sluice.queues.model import BREAKER_NAMES
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, Worker


def fail_all(engine: EngineUnderTest, worker: Worker, count: int) -> None:
    """Publish messages and nack each of them."""
    for nth in range(count):
        engine.publish(b"job %d" % nth)
    for delivery in worker.lease_all():
        worker.nack(delivery)


def breaker_state(engine: EngineUnderTest) -> str:
    return BREAKER_NAMES[engine.group().admission.breaker.state]


# ---- pause


def test_paused_group_gets_nothing_and_settles_what_it_has(engine: EngineUnderTest) -> None:
    worker = engine.worker(prefetch=1)
    other = engine.worker(group="others")
    engine.publish(b"first")
    held = worker.lease()
    engine.engine.delivery_control.pause_group(engine.group(), "ann", "the printer is on fire")
    engine.publish(b"second")
    worker.ack(held)
    assert worker.lease_or_none() is None
    assert other.payloads() == [b"first", b"second"], "only one group is paused"
    engine.engine.delivery_control.resume_group(engine.group())
    engine.run_until_idle()
    assert worker.payloads() == [b"second"]


def test_paused_queue_gives_nothing_to_present_and_future_groups(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.engine.delivery_control.pause_queue(engine.queue(), "ann", "")
    late = engine.worker(group="late")
    engine.publish(b"job")
    assert worker.lease_or_none() is None and late.lease_or_none() is None
    engine.engine.delivery_control.resume_queue(engine.queue())
    engine.run_until_idle()
    assert worker.payloads() == late.payloads() == [b"job"]


def test_retry_that_comes_due_waits_for_the_end_of_the_pause(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"job")
    worker.nack(worker.lease())
    engine.engine.delivery_control.pause_group(engine.group(), "ann", "")
    engine.advance(seconds=60)
    assert worker.lease_or_none() is None
    engine.engine.delivery_control.resume_group(engine.group())
    engine.run_until_idle()
    assert worker.lease().attempt == 2


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_pauses_survive_a_crash(engine: EngineUnderTest, with_snapshot: bool) -> None:
    engine.group()
    engine.queue("other")
    engine.engine.delivery_control.pause_group(engine.group(), "ann", "the printer is on fire")
    engine.engine.delivery_control.pause_queue(engine.queue("other"), "bob", "")
    engine.run_until_idle()
    if with_snapshot:
        engine.take_snapshot()
    engine.crash_and_restart()
    pause = engine.group().admission.pause
    assert (pause.by, pause.reason) == ("ann", "the printer is on fire")
    assert pause.paused_at == pytest.approx(engine.loop.now, abs=1)
    worker = engine.worker()
    other = engine.worker(queue="other")
    engine.publish(b"job")
    engine.publish(b"job", queue="other")
    assert worker.lease_or_none() is None and other.lease_or_none() is None
    engine.engine.delivery_control.resume_group(engine.group())
    engine.run_until_idle()
    assert worker.payloads() == [b"job"]
    engine.crash_and_restart()
    assert not engine.group().admission.pause.is_active()


# ---- limits


def test_group_has_no_more_in_flight_than_its_limit(make_engine: MakeEngine) -> None:
    engine = make_engine(max_in_flight=3, partitions=4)
    workers = [engine.worker() for _ in range(3)]
    for nth in range(10):
        engine.publish(b"%d" % nth, key=b"key %d" % nth)
    held = [(worker, delivery) for worker in workers for delivery in worker.lease_all()]
    assert len(held) == 3
    for worker, delivery in held[:2]:
        worker.ack(delivery)
    assert sum(len(worker.lease_all()) for worker in workers) == 2, "as many as were settled"


def test_changed_limit_applies_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_in_flight=1)
    worker = engine.worker()
    for nth in range(5):
        engine.publish(b"%d" % nth)
    assert len(worker.lease_all()) == 1
    engine.reconfigure(max_in_flight=3)
    assert len(worker.lease_all()) == 2
    engine.reconfigure(max_in_flight=0)
    assert len(worker.lease_all()) == 2


def test_rate_limit_spreads_deliveries_over_time(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rate=2.0)
    worker = engine.worker()
    other = engine.worker()
    for nth in range(10):
        engine.publish(b"%d" % nth)
    assert len(worker.lease_all()) + len(other.lease_all()) == 2, "the burst of one second"
    engine.advance(seconds=0.4)
    assert not worker.lease_all() and not other.lease_all()
    engine.advance(seconds=3.6)
    assert len(worker.lease_all()) + len(other.lease_all()) == 8


def test_burst_is_what_may_be_delivered_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rate=1.0, max_rate_burst=5.0, delivery_timeout=600.0)
    worker = engine.worker()
    for nth in range(20):
        engine.publish(b"%d" % nth)
    assert len(worker.lease_all()) == 5
    engine.advance(seconds=2)
    assert len(worker.lease_all()) == 2
    engine.advance(seconds=60)
    assert len(worker.lease_all()) == 13, "waiting messages take every token at once"


def test_raised_burst_does_not_count_for_the_time_before(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rate=1.0)
    worker = engine.worker()
    engine.advance(seconds=60)
    engine.reconfigure(max_rate=1.0, max_rate_burst=50.0)
    for nth in range(10):
        engine.publish(b"%d" % nth)
    assert len(worker.lease_all()) == 1


def test_retries_count_against_the_rate(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rate=1.0)
    worker = engine.worker()
    engine.publish(b"job")
    worker.nack(worker.lease(), delay=0)
    assert worker.lease_or_none() is None
    engine.advance(seconds=1)
    assert worker.lease().attempt == 2


# ---- breaker


def test_breaker_opens_after_failures_in_a_row_and_probes_with_one_message(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(breaker_failures=3, breaker_open_for=30.0)
    worker = engine.worker()
    fail_all(engine, worker, 3)
    assert breaker_state(engine) == "open"
    assert "opened after 3 failures" in engine.warnings[-1]
    engine.publish(b"new")
    engine.advance(seconds=29)
    assert worker.lease_or_none() is None, "neither the new message nor the retries"
    engine.advance(seconds=1)
    probe = worker.lease()
    assert worker.lease_or_none() is None, "one message decides"
    worker.ack(probe)
    assert breaker_state(engine) == "closed"
    assert len(worker.lease_all()) == 3


def test_failed_probe_opens_the_breaker_again(make_engine: MakeEngine) -> None:
    engine = make_engine(breaker_failures=2, breaker_open_for=30.0)
    worker = engine.worker()
    fail_all(engine, worker, 2)
    engine.advance(seconds=30)
    worker.nack(worker.lease())
    assert breaker_state(engine) == "open"
    engine.advance(seconds=29)
    assert worker.lease_or_none() is None
    engine.advance(seconds=1)
    worker.ack(worker.lease())
    assert len(worker.lease_all()) == 1


def test_failures_while_the_breaker_is_open_use_up_no_attempts(make_engine: MakeEngine) -> None:
    engine = make_engine(breaker_failures=2, breaker_open_for=30.0, max_retries=1)
    worker = engine.worker()
    for nth in range(4):
        engine.publish(b"%d" % nth)
    held = worker.lease_all()
    for delivery in held:
        worker.nack(delivery)
    assert breaker_state(engine) == "open"
    engine.advance(seconds=30)
    worker.ack(worker.lease())
    engine.advance(seconds=5)
    attempts = sorted(delivery.attempt for delivery in worker.lease_all())
    assert attempts == [1, 1, 2], "the first two failures counted, one of them was the probe"
    assert engine.engine.queues.get("dlq/tasks") is None


def test_success_between_failures_keeps_the_breaker_closed(make_engine: MakeEngine) -> None:
    engine = make_engine(breaker_failures=2)
    worker = engine.worker()
    for nth in range(6):
        engine.publish(b"%d" % nth)
    for nth, delivery in enumerate(worker.lease_all()):
        if nth % 2:
            worker.ack(delivery)
        else:
            worker.nack(delivery)
    assert breaker_state(engine) == "closed"


def test_failures_outside_the_window_keep_the_breaker_closed(make_engine: MakeEngine) -> None:
    engine = make_engine(breaker_failures=2, breaker_window=10.0)
    worker = engine.worker()
    engine.publish(b"first")
    engine.publish(b"second")
    first, second = worker.lease_all()
    worker.nack(first, delay=3600)
    engine.advance(seconds=11)
    worker.nack(second)
    assert breaker_state(engine) == "closed"


def test_consumers_that_go_away_do_not_open_the_breaker(make_engine: MakeEngine) -> None:
    engine = make_engine(breaker_failures=2)
    worker = engine.worker()
    for nth in range(5):
        engine.publish(b"%d" % nth)
    worker.lease_all()
    worker.leave()
    assert breaker_state(engine) == "closed"


def test_probe_that_is_rejected_or_released_is_replaced(make_engine: MakeEngine) -> None:
    engine = make_engine(breaker_failures=1, breaker_open_for=30.0, dlq_enabled=False)
    worker = engine.worker()
    fail_all(engine, worker, 1)
    engine.publish(b"second")
    engine.publish(b"third")
    engine.advance(seconds=30)
    worker.reject(worker.lease())
    worker.release(worker.lease())
    worker.ack(worker.lease())
    assert breaker_state(engine) == "closed"


def test_probe_that_ends_with_a_seek_is_replaced(make_engine: MakeEngine) -> None:
    engine = make_engine(breaker_failures=1, breaker_open_for=30.0, partitions=1)
    worker = engine.worker()
    fail_all(engine, worker, 1)
    engine.advance(seconds=30)
    assert worker.lease().attempt == 2
    engine.engine.lifecycle.seek_group(engine.group(), [0])
    engine.run_until_idle()
    worker.ack(worker.lease())
    assert breaker_state(engine) == "closed"


def test_open_breaker_survives_a_crash(make_engine: MakeEngine) -> None:
    engine = make_engine(breaker_failures=2, breaker_open_for=30.0)
    fail_all(engine, engine.worker(), 2)
    engine.crash_and_restart()
    worker = engine.worker()
    engine.advance(seconds=20)
    assert worker.lease_or_none() is None
    engine.advance(seconds=10)
    worker.ack(worker.lease())
    assert breaker_state(engine) == "closed"


def test_breaker_that_is_switched_off_delivers_again(make_engine: MakeEngine) -> None:
    engine = make_engine(breaker_failures=1)
    worker = engine.worker()
    fail_all(engine, worker, 1)
    engine.publish(b"second")
    engine.reconfigure(breaker_failures=0)
    assert worker.payloads() == [b"second"]


def test_breaker_that_was_switched_off_is_closed_after_a_restart(make_engine: MakeEngine) -> None:
    engine = make_engine(breaker_failures=1)
    fail_all(engine, engine.worker(), 1)
    assert breaker_state(engine) == "open"
    engine.reconfigure(breaker_failures=0)
    engine.reconfigure(breaker_failures=1)
    assert breaker_state(engine) == "closed"
    engine.crash_and_restart()
    assert breaker_state(engine) == "closed"
