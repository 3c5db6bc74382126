"""Keys that are held for repair: later messages of a key wait for the dead letter of an earlier."""

from __future__ import annotations

import pytest

from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, Worker

HOLDS = {"holds_keys": True, "max_retries": 0, "hold_timeout": 600.0}


@pytest.fixture
def engine(make_engine: MakeEngine) -> EngineUnderTest:
    return make_engine(**HOLDS)


def kill_first(engine: EngineUnderTest, worker: Worker) -> None:
    """Publish three messages of a key and one of another; the first one dies."""
    for payload in (b"one", b"two", b"three"):
        engine.publish(payload, key=b"k")
    engine.publish(b"other", key=b"o")
    deliveries = {one.payload: one for one in worker.lease_all()}
    assert set(deliveries) == {b"one", b"other"}
    worker.ack(deliveries[b"other"])
    worker.nack(deliveries[b"one"])
    assert worker.lease_all() == []


def test_later_messages_of_a_key_wait_until_the_dead_letter_is_put_back(
    engine: EngineUnderTest,
) -> None:
    worker = engine.worker()
    kill_first(engine, worker)
    engine.publish(b"four", key=b"k")
    engine.publish(b"another", key=b"o")
    assert worker.ack_all() == [b"another"]
    assert engine.redrive(engine.dead_letter_records()[0])
    repaired = worker.lease()
    assert repaired.payload == b"one" and worker.lease_all() == []
    worker.ack(repaired)
    assert worker.ack_all() == [b"two", b"three", b"four"]


def test_key_goes_on_when_the_dead_letter_is_purged(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    kill_first(engine, worker)
    engine.engine.removal.purge_queue(engine.engine.lifecycle.get_queue("dlq/tasks"))
    assert worker.ack_all() == [b"two", b"three"]


def test_key_goes_on_when_the_dead_letter_is_consumed(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    kill_first(engine, worker)
    assert engine.worker(group="repair", queue="dlq/tasks").ack_all() == [b"one"]
    assert worker.ack_all() == [b"two", b"three"]


def test_key_goes_on_after_the_timeout(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    kill_first(engine, worker)
    engine.advance(seconds=599)
    assert worker.lease_all() == []
    engine.advance(seconds=2)
    assert worker.ack_all() == [b"two", b"three"]
    assert engine.dead_letters() == [b"one"]
    assert any("held for repair until hold_timeout" in one for one in engine.warnings)


def test_changed_timeout_applies_to_held_keys(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    kill_first(engine, worker)
    engine.reconfigure(hold_timeout=0.0)
    engine.advance(days=2)
    assert worker.lease_all() == []
    engine.reconfigure(hold_timeout=60.0)
    engine.advance(seconds=1)
    assert worker.ack_all() == [b"two", b"three"]


def test_repaired_message_that_dies_again_holds_its_key_again(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    kill_first(engine, worker)
    engine.redrive(engine.dead_letter_records()[0])
    worker.reject(worker.lease())
    assert worker.lease_all() == []
    engine.redrive(engine.dead_letter_records()[0])
    assert worker.ack_all() == [b"one", b"two", b"three"]


def test_other_groups_go_on(engine: EngineUnderTest) -> None:
    other = engine.worker(group="others")
    worker = engine.worker()
    kill_first(engine, worker)
    assert other.ack_all() == [b"one", b"other", b"two", b"three"]
    engine.redrive(engine.dead_letter_records()[0], to_all=True)
    assert other.ack_all() == [b"one"]
    assert worker.ack_all() == [b"one", b"two", b"three"]


@pytest.mark.parametrize("snapshot", [False, True])
def test_hold_and_repair_survive_crashes(engine: EngineUnderTest, snapshot: bool) -> None:
    kill_first(engine, engine.worker())
    if snapshot:
        engine.take_snapshot()
    engine.crash_and_restart()
    worker = engine.worker()
    assert worker.lease_all() == []
    engine.redrive(engine.dead_letter_records()[0])
    if snapshot:
        engine.take_snapshot()
    engine.crash_and_restart()
    worker = engine.worker()
    repaired = worker.lease()
    assert repaired.payload == b"one" and worker.lease_all() == []
    worker.ack(repaired)
    assert worker.ack_all() == [b"two", b"three"]
    engine.crash_and_restart()
    engine.publish(b"four", key=b"k")
    assert engine.worker().ack_all() == [b"four"]


@pytest.mark.parametrize("end", ["purge", "timeout"])
def test_released_key_is_not_held_again_by_a_crash(engine: EngineUnderTest, end: str) -> None:
    kill_first(engine, engine.worker())
    if end == "purge":
        engine.engine.removal.purge_queue(engine.engine.lifecycle.get_queue("dlq/tasks"))
    else:
        engine.advance(seconds=601)
    engine.run_until_idle()
    engine.crash_and_restart()
    assert engine.worker().ack_all() == [b"two", b"three"]


def test_messages_of_the_key_in_flight_are_settled_and_their_retries_wait(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(**{**HOLDS, "batch_size": 3, "max_retries": 2})
    worker = engine.worker()
    for number in range(5):
        engine.publish(b"%d" % number, key=b"k")
    first, second, third = worker.lease_all()
    worker.reject(first)
    worker.ack(second)
    worker.nack(third, delay=0.0)
    engine.advance(minutes=1)
    assert worker.lease_all() == []
    engine.redrive(engine.dead_letter_records()[0])
    worker.ack(worker.lease())
    assert worker.ack_all() == [b"2", b"3", b"4"]


def test_many_messages_of_a_held_key_do_not_stop_other_keys(engine: EngineUnderTest) -> None:
    worker = engine.worker(prefetch=1)
    engine.publish(b"one", key=b"k")
    worker.reject(worker.lease())
    for _ in range(5000):
        engine.send(b"waits", key=b"k")
    engine.send(b"other", key=b"o")
    assert worker.ack_all() == [b"other"]
    engine.redrive(engine.dead_letter_records()[0])
    assert worker.lease().payload == b"one"


def test_strict_queue_is_held_as_a_whole(make_engine: MakeEngine) -> None:
    engine = make_engine(**HOLDS, ordering=2)
    worker = engine.worker()
    engine.publish(b"one")
    engine.publish(b"two")
    worker.reject(worker.lease())
    assert worker.lease_all() == []
    engine.redrive(engine.dead_letter_records()[0])
    assert worker.ack_all() == [b"one", b"two"]


def test_key_is_held_in_all_partitions(make_engine: MakeEngine) -> None:
    engine = make_engine(**HOLDS)
    worker = engine.worker()
    engine.publish(b"one", key=b"key-1")
    worker.reject(worker.lease())
    engine.reconfigure(partitions=7)
    for key in (b"key-1", b"key-2", b"key-3"):
        engine.publish(b"next of " + key, key=key)
    assert sorted(worker.ack_all()) == [b"next of key-2", b"next of key-3"]
    engine.redrive(engine.dead_letter_records()[0])
    assert worker.ack_all() == [b"one", b"next of key-1"]


@pytest.mark.parametrize("what", ["continue", "seek", "group", "queue"])
def test_hold_ends_with_its_reason(engine: EngineUnderTest, what: str) -> None:
    worker = engine.worker()
    kill_first(engine, worker)
    if what == "continue":
        engine.reconfigure(holds_keys=False)
        assert worker.ack_all() == [b"two", b"three"]
    elif what == "seek":
        engine.seek("earliest")
        assert worker.ack_all() == [b"two", b"three"]
    elif what == "group":
        engine.engine.lifecycle.delete_group(engine.group())
        assert engine.worker(start="latest").ack_all() == []
    else:
        engine.engine.lifecycle.delete_queue(engine.engine.lifecycle.get_queue("tasks"))
        engine.publish(b"new", key=b"k")
        assert engine.worker().ack_all() == [b"new"]
    engine.advance(hours=1)
    engine.engine.removal.purge_queue(engine.engine.lifecycle.get_queue("dlq/tasks"))
    engine.run_until_idle()
    engine.crash_and_restart()
    engine.publish(b"last", key=b"k")
    assert b"last" in engine.worker().ack_all()
