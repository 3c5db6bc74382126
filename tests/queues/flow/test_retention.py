"""Retention of settled messages, and seeks of groups to them."""

from __future__ import annotations

import tracemalloc

import pytest

from sluice.queues.recovery.snapshot import write_state
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, MemoryBackend


def test_settled_messages_are_stored_for_their_retention_and_no_longer(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(retention=600.0)
    worker = engine.worker()
    for number in range(5):
        engine.publish(b"%d" % number)
        worker.ack_all()
        engine.advance(seconds=100)
    partition = engine.queue().partitions[0]
    assert engine.depth() == 0 and partition.live_count == 5
    engine.advance(seconds=210)
    assert partition.live_count == 3
    engine.advance(seconds=610)
    assert partition.live_count == 0
    engine.crash_and_restart()
    assert engine.queue().partitions[0].live_count == 0


def test_unsettled_messages_are_stored_however_old(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=60.0, message_ttl=0.0)
    engine.group()
    engine.publish(b"old")
    engine.advance(hours=5)
    assert engine.worker().ack_all() == [b"old"]


def test_messages_before_the_start_of_the_first_group_are_deleted_after_retention(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(retention=600.0, partitions=2)
    for number in range(6):
        engine.publish(b"%d" % number)
    engine.group(start="latest")
    assert engine.depth() == 0
    engine.advance(seconds=590)
    assert sum(partition.live_count for partition in engine.queue().partitions) == 6
    engine.advance(seconds=20)
    assert sum(partition.live_count for partition in engine.queue().partitions) == 0
    engine.crash_and_restart()
    assert sum(partition.live_count for partition in engine.queue().partitions) == 0


def test_retention_continues_after_a_restart(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=600.0)
    engine.publish(b"old")
    engine.worker().ack_all()
    engine.crash_and_restart()
    assert engine.queue().partitions[0].live_count == 1 and engine.depth() == 0
    engine.advance(seconds=700)
    assert engine.queue().partitions[0].live_count == 0


@pytest.mark.parametrize("publishes", [False, True], ids=["alone", "with-others-after-it"])
def test_retention_of_a_delayed_message_counts_from_its_arrival_after_a_restart_too(
    make_engine: MakeEngine, publishes: bool
) -> None:
    engine = make_engine(retention=600.0, partitions=1)
    engine.group()
    engine.publish(b"delayed", delay=300)
    for _ in range(2):
        engine.advance(seconds=200)
        engine.take_snapshot()
        engine.crash_and_restart()
    worker = engine.worker()
    if publishes:
        engine.publish(b"late")
    assert b"delayed" in worker.ack_all()
    partition = engine.queue().partitions[0]
    engine.advance(seconds=190)
    assert partition.holds(0), "590 s after its arrival"
    engine.advance(seconds=21)
    assert not partition.holds(0), "611 s after it"


def test_group_seeks_back_to_a_sequence(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=600.0)
    worker = engine.worker()
    for number in range(6):
        engine.publish(b"%d" % number)
    worker.ack_all()
    engine.seek("3")
    assert engine.depth() == 3
    assert worker.ack_all() == [b"3", b"4", b"5"]
    ledger = engine.ledger()
    assert (ledger.enqueued, ledger.acked) == (9, 9)


def test_group_seeks_back_to_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=6000.0, partitions=3)
    worker = engine.worker()
    for number in range(6):
        engine.publish(b"%d" % number)
        engine.advance(seconds=5)
    worker.ack_all()
    engine.seek("2027-01-15T08:00:12Z")
    assert sorted(worker.ack_all()) == [b"3", b"4", b"5"]


def test_group_seeks_to_the_beginning_without_affecting_another(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=600.0)
    red, green = engine.worker(group="red"), engine.worker(group="green")
    for number in range(3):
        engine.publish(b"%d" % number)
    red.ack_all()
    green.ack_all()
    engine.seek("earliest", "red")
    assert red.ack_all() == [b"0", b"1", b"2"] and green.ack_all() == []


def test_seek_forward_counts_skipped_messages_as_purged(engine: EngineUnderTest) -> None:
    worker = engine.worker(prefetch=2)
    for number in range(6):
        engine.publish(b"%d" % number)
    assert len(worker.lease_all()) == 2
    engine.seek("4")
    assert worker.revoked == [0, 1]
    assert worker.ack_all() == [b"4", b"5"]
    ledger = engine.ledger()
    assert (ledger.purged, ledger.acked, engine.depth()) == (4, 2, 0)


def test_group_seeks_to_the_end(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    worker.is_open = False
    for number in range(6):
        engine.publish(b"%d" % number)
    engine.seek("latest")
    worker.is_open = True
    engine.publish(b"new")
    assert worker.ack_all() == [b"new"]


def test_seek_includes_messages_waiting_for_retry(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=600.0)
    worker = engine.worker()
    engine.publish(b"a", key=b"k")
    engine.publish(b"b", key=b"k", message_id=b"id")
    worker.nack(worker.lease())
    engine.seek("earliest")
    assert worker.ack_all() == [b"a", b"b"]
    engine.advance(minutes=1)
    assert worker.ack_all() == [] and engine.ledger().acked == 2


def test_seek_survives_a_crash(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=600.0)
    worker = engine.worker()
    for number in range(6):
        engine.publish(b"%d" % number)
    worker.ack_all()
    worker.leave()
    engine.seek("2")
    for _ in range(2):
        engine.crash_and_restart()
        engine.verify()
    worker = engine.worker()
    assert worker.ack_all() == [b"2", b"3", b"4", b"5"]
    ledger = engine.ledger()
    assert (ledger.enqueued, ledger.acked) == (10, 10)


def test_replay_includes_priority_and_delayed_messages(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=6000.0)
    worker = engine.worker()
    engine.publish(b"plain")
    engine.publish(b"urgent", priority=9)
    engine.publish(b"delayed", delay=10)
    worker.ack_all()
    engine.advance(seconds=11)
    worker.ack_all()
    engine.publish(b"still delayed", delay=1000)
    engine.seek("earliest")
    assert worker.ack_all() == [b"urgent", b"delayed", b"plain"], (
        "a delayed message that is due comes out of order"
    )
    engine.advance(seconds=1001)
    assert worker.ack_all() == [b"still delayed"]


def test_new_group_reads_retained_messages(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=600.0)
    engine.publish(b"old")
    engine.worker(group="first").ack_all()
    assert engine.depth() == 0
    second = engine.worker(group="second")
    assert engine.depth() == 1
    assert second.ack_all() == [b"old"]


def test_retention_can_be_enabled_and_disabled(make_engine: MakeEngine) -> None:
    engine = make_engine()
    worker = engine.worker()
    engine.publish(b"gone")
    worker.ack_all()
    engine.reconfigure(retention=600.0)
    engine.publish(b"kept")
    worker.ack_all()
    partition = engine.queue().partitions[0]
    assert partition.live_count == 1
    engine.crash_and_restart()
    assert engine.queue().partitions[0].live_count == 1
    engine.reconfigure(retention=0.0)
    assert engine.queue().partitions[0].live_count == 0
    engine.crash_and_restart()
    assert engine.queue().partitions[0].live_count == 0 and engine.depth() == 0


def test_purge_deletes_retained_messages_too(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=600.0)
    worker = engine.worker()
    engine.publish(b"settled")
    worker.ack_all()
    worker.is_open = False
    engine.publish(b"waiting")
    assert engine.engine.removal.purge_queue(engine.queue()) == 1
    engine.run_until_idle()
    assert engine.queue().partitions[0].live_count == 0 and engine.depth() == 0
    engine.crash_and_restart()
    assert engine.queue().partitions[0].live_count == 0


def test_snapshot_of_many_delayed_messages_needs_little_more_memory_than_it_writes() -> None:
    engine = EngineUnderTest(MemoryBackend(), message_ttl=0.0)
    engine.queue()
    for _ in range(20_000):
        engine.send(b"x", delay=3600)
    engine.run_until_idle()
    tracemalloc.start()
    try:
        write_state(engine.engine)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000 * 64, "16 bytes of each are written"
