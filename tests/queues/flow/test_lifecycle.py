"""Queues are created, changed and deleted at run time, and survive a restart."""

from __future__ import annotations

import json
import sys

import pytest

from sluice.errors import QueueExists, TooManyFollowed, UnknownQueue
from sluice.queues.model.queue_rules import STRICT, QueueRules
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest


def test_queue_and_its_configuration_survive_a_crash(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=7, max_retries=4, delivery_timeout=12.5)
    created = engine.queue("a/b").created_at
    engine.queue("line", ordering=STRICT)
    engine.crash_and_restart()
    queue = engine.engine.lifecycle.get_queue("a/b")
    assert (len(queue.partitions), queue.rules.max_retries, queue.rules.delivery_timeout) == (
        7,
        4,
        12.5,
    )
    assert queue.created_at == created and json.loads(queue.config_json)["max_retries"] == 4
    assert len(engine.engine.lifecycle.get_queue("line").partitions) == 1


def test_queue_is_created_once(engine: EngineUnderTest) -> None:
    engine.queue("a")
    with pytest.raises(QueueExists):
        engine.engine.lifecycle.create_queue(QueueRules("a"), "{}")
    with pytest.raises(UnknownQueue):
        engine.engine.lifecycle.get_queue("b")


def test_deleted_queue_is_gone_with_its_messages(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    for number in range(3):
        engine.publish(b"%d" % number, message_id=b"%d" % number)
    worker.nack(worker.lease())
    held = len(worker.inbox)
    assert held == 2
    engine.engine.lifecycle.delete_queue(engine.queue())
    engine.run_until_idle()
    assert (
        engine.engine.queues == {} and engine.engine.partitions == {} and engine.engine.groups == {}
    )
    assert worker.in_flight == 0 and worker.group is None and len(worker.revoked) == 2
    assert engine.engine.body_cache.used_bytes == 0
    engine.advance(hours=5)
    engine.crash_and_restart()
    assert engine.engine.queues == {}
    engine.publish(b"new", message_id=b"0")
    assert engine.worker().ack_all() == [b"new"]


def test_recreated_queue_of_the_same_name_is_another_queue(engine: EngineUnderTest) -> None:
    engine.publish(b"old")
    first = engine.worker().lease()
    engine.engine.lifecycle.delete_queue(engine.queue())
    engine.publish(b"new")
    second = engine.worker().lease()
    assert second.payload == b"new" and second.name != first.name
    engine.crash_and_restart()
    assert engine.worker().ack_all() == [b"new"]


def test_deleting_many_queues_leaves_nothing_behind(make_engine: MakeEngine) -> None:
    engine = make_engine(message_ttl=604_800.0)
    for number in range(1500):
        engine.send(b"x", queue=f"temporary/{number}")
        engine.engine.lifecycle.delete_queue(
            engine.engine.lifecycle.get_queue(f"temporary/{number}")
        )
    engine.run_until_idle()
    assert len(engine.engine.timers._expiries) < 1100
    assert engine.engine.wake_at == 0.0 or engine.engine.queues == {}


def test_shorter_delivery_timeout_applies_to_the_next_delivery_when_nothing_is_in_flight(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(delivery_timeout=1800.0)
    worker = engine.worker()
    engine.publish(b"one")
    worker.ack(worker.lease())
    engine.reconfigure(delivery_timeout=5.0)
    engine.publish(b"two")
    late = worker.lease()
    engine.advance(seconds=6)
    assert worker.revoked == [late.seq]


def test_new_delivery_timeout_applies_to_deliveries_in_flight(make_engine: MakeEngine) -> None:
    engine = make_engine(delivery_timeout=300.0)
    worker = engine.worker()
    engine.publish(b"1")
    engine.advance(seconds=10)
    engine.publish(b"2")
    engine.reconfigure(delivery_timeout=20.0)
    engine.publish(b"3")
    engine.advance(seconds=11)
    assert worker.revoked == [0]
    engine.advance(seconds=10)
    assert worker.revoked == [0, 1, 2]


def test_new_limits_apply_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_depth=2)
    engine.publish(b"1")
    engine.publish(b"2")
    engine.reconfigure(max_depth=3)
    engine.publish(b"3")
    assert engine.depth() == 3
    engine.crash_and_restart()
    assert engine.engine.lifecycle.get_queue("tasks").rules.max_depth == 3


def test_added_partitions_are_assigned_at_once_and_survive_a_crash(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2)
    workers = [engine.worker() for _ in range(4)]
    engine.reconfigure(partitions=8)
    assert [len(worker.partitions()) for worker in workers] == [2, 2, 2, 2]
    for number in range(80):
        engine.publish(b"%d" % number)
    engine.crash_and_restart()
    assert len(engine.queue().partitions) == 8
    assert len(engine.worker().ack_all()) == 80


def test_purge_leaves_messages_in_flight(engine: EngineUnderTest) -> None:
    worker = engine.worker(prefetch=1)
    for number in range(5):
        engine.publish(b"%d" % number, key=b"k")
    held = worker.lease()
    worker.is_open = False
    assert engine.engine.removal.purge_queue(engine.queue()) == 4
    assert engine.depth() == 1
    worker.ack(held)
    ledger = engine.ledger()
    assert (ledger.acked, ledger.purged, engine.depth()) == (1, 4, 0)
    engine.crash_and_restart()
    assert engine.depth() == 0 and engine.ledger().purged == 4


def test_purge_deletes_messages_waiting_for_retry_and_frees_their_key(
    engine: EngineUnderTest,
) -> None:
    worker = engine.worker()
    engine.publish(b"1", key=b"k")
    engine.publish(b"2", key=b"k")
    worker.nack(worker.lease())
    assert engine.engine.removal.purge_queue(engine.queue()) == 2
    engine.publish(b"3", key=b"k")
    assert worker.ack_all() == [b"3"]


def test_purge_without_groups_survives_a_crash(engine: EngineUnderTest) -> None:
    for number in range(3):
        engine.publish(b"%d" % number)
    assert engine.engine.removal.purge_queue(engine.queue()) == 3
    engine.publish(b"after")
    engine.crash_and_restart()
    assert engine.depth() == 1
    assert engine.worker().ack_all() == [b"after"]


def test_low_watermark_of_a_group_skips_messages_deleted_before_it(engine: EngineUnderTest) -> None:
    """Otherwise all settled messages after a gap would be remembered forever."""
    for number in range(6):
        engine.publish(b"%d" % number, ttl=5 if number in (2, 3) else 0)
    engine.advance(seconds=6)
    worker = engine.worker()
    assert worker.ack_all() == [b"0", b"1", b"4", b"5"]
    cursor = engine.group().cursors[0]
    assert cursor.low_watermark == 6 and cursor.settled_seqs == set()


def test_cost_of_raising_partitions_is_linear(make_engine: MakeEngine) -> None:
    """Count calls of Python functions; compiled code makes none."""
    engine = make_engine(partitions=2)
    for nth in range(5):
        engine.group(f"g{nth}")
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        engine.reconfigure(partitions=402)
    finally:
        sys.setprofile(None)
    assert calls < 40 * 5 * 400


def test_partitions_are_not_raised_above_the_limit_of_all_groups(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2)
    for nth in range(10):
        engine.group(f"g{nth}")
    engine.engine.lifecycle.max_partitions = 100
    with pytest.raises(TooManyFollowed, match=r"10 groups .* 500") as refused:
        engine.reconfigure(partitions=51)
    assert "queues.max_partitions" in refused.value.remedy
    assert len(engine.queue().partitions) == 2
    engine.reconfigure(partitions=50)
    assert len(engine.queue().partitions) == 50
