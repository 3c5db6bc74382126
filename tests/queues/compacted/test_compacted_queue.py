"""Shared compacted queues: the last message of each key, for existing and new groups."""

from __future__ import annotations

import random

import pytest

from sluice.errors import InvalidQueueConfig, MissingKey, QueueFull, UnknownDelivery
from sluice.message import Message
from sluice.queues.model.containers.message_columns import BLOCK_SIZE
from sluice.queues.model.queue_rules import (
    ANY_ORDER,
    DEAD_LETTER,
    DROP_OLDEST,
    PER_KEY,
    REJECT_NEW,
    STRICT,
)
from sluice.queues.service.queue_config import read_config
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, rules_of


@pytest.fixture
def compacted(make_engine: MakeEngine) -> EngineUnderTest:
    return make_engine(is_compacted=True, message_ttl=0.0)


def fill(engine: EngineUnderTest, **values: bytes) -> None:
    for key, value in values.items():
        engine.publish(value, key=key.encode())


def test_late_group_gets_the_last_message_of_each_key(compacted: EngineUnderTest) -> None:
    fill(compacted, a=b"1", b=b"2")
    fill(compacted, a=b"3")
    assert compacted.worker().ack_all() == [b"2", b"3"]
    fill(compacted, b=b"4")
    assert compacted.worker(group="late").ack_all() == [b"3", b"4"]
    assert compacted.worker(group="later").ack_all() == [b"3", b"4"]
    assert compacted.depth() == 2


def test_key_of_any_length_is_known_after_a_crash(compacted: EngineUnderTest) -> None:
    for size in (10, 40_000):
        for value in (b"1", b"2"):
            compacted.publish(value, key=b"k" * size)
    compacted.crash_and_restart()
    assert compacted.depth() == 2
    compacted.publish(b"3", key=b"k" * 40_000)
    assert compacted.worker().ack_all() == [b"2", b"3"]


def test_each_group_has_its_own_position(compacted: EngineUnderTest) -> None:
    red, blue = compacted.worker(group="red"), compacted.worker(group="blue")
    fill(compacted, a=b"1", b=b"2")
    assert red.ack_all() == [b"1", b"2"]
    fill(compacted, a=b"3")
    assert red.ack_all() == [b"3"]
    assert blue.ack_all() == [b"2", b"3"]


@pytest.mark.parametrize("end", ["stop", "crash"])
def test_settled_messages_are_not_redelivered_to_the_group(
    compacted: EngineUnderTest, end: str
) -> None:
    worker = compacted.worker()
    fill(compacted, a=b"1", b=b"2", c=b"3")
    worker.ack(worker.lease())
    compacted.restart() if end == "stop" else compacted.crash_and_restart()
    assert compacted.worker().ack_all() == [b"2", b"3"]
    assert compacted.depth() == 3
    fill(compacted, b=b"4")
    assert compacted.depth() == 3
    assert compacted.worker(group="late").ack_all() == [b"1", b"3", b"4"]


@pytest.mark.parametrize("ordering", [ANY_ORDER, PER_KEY, STRICT])
def test_message_replaced_while_in_flight_is_gone(make_engine: MakeEngine, ordering: int) -> None:
    engine = make_engine(is_compacted=True, ordering=ordering)
    worker = engine.worker()
    fill(engine, a=b"1")
    old = worker.lease()
    fill(engine, a=b"2")
    with pytest.raises(UnknownDelivery):
        worker.ack(old)
    assert worker.ack_all() == [b"2"]
    assert worker.in_flight == 0
    ledger = engine.ledger()
    assert (ledger.acked, ledger.purged) == (1, 1)


def test_message_waiting_for_retry_is_replaced_too(compacted: EngineUnderTest) -> None:
    worker = compacted.worker()
    fill(compacted, a=b"1")
    worker.nack(worker.lease())
    fill(compacted, a=b"2")
    compacted.advance(minutes=1)
    assert worker.ack_all() == [b"2"]
    compacted.crash_and_restart()
    assert compacted.worker().ack_all() == []


def test_tombstone_deletes_its_key_and_is_delivered_to_existing_groups_only(
    compacted: EngineUnderTest,
) -> None:
    red, blue = compacted.worker(group="red"), compacted.worker(group="blue")
    fill(compacted, a=b"1", b=b"2")
    assert red.ack_all() == [b"1", b"2"]
    fill(compacted, a=b"")
    assert red.ack_all() == [b""]
    assert compacted.depth() == 2
    assert compacted.worker(group="late").ack_all() == [b"2"]
    assert blue.ack_all() == [b"2", b""]
    assert compacted.depth() == 1
    compacted.crash_and_restart()
    assert compacted.depth() == 1
    assert compacted.worker(group="latest").ack_all() == [b"2"]


def test_tombstone_without_a_group_deletes_its_key_at_once(compacted: EngineUnderTest) -> None:
    fill(compacted, a=b"1", b=b"2")
    fill(compacted, a=b"", c=b"")
    assert compacted.depth() == 1
    compacted.crash_and_restart()
    assert compacted.worker().ack_all() == [b"2"]


def test_undelivered_tombstone_is_deleted_with_the_last_group(
    compacted: EngineUnderTest,
) -> None:
    group = compacted.group("red")
    fill(compacted, a=b"1", b=b"2")
    fill(compacted, a=b"")
    compacted.engine.lifecycle.delete_group(group)
    compacted.run_until_idle()
    assert compacted.depth() == 1
    compacted.crash_and_restart()
    assert compacted.worker().ack_all() == [b"2"]


def test_group_can_seek_back_to_stored_values(compacted: EngineUnderTest) -> None:
    worker = compacted.worker()
    fill(compacted, a=b"1", b=b"2", c=b"3")
    fill(compacted, a=b"4")
    assert worker.ack_all() == [b"2", b"3", b"4"]
    compacted.seek("earliest")
    assert worker.ack_all() == [b"2", b"3", b"4"]
    compacted.seek("2")
    assert worker.ack_all() == [b"3", b"4"]
    compacted.seek("latest")
    assert worker.ack_all() == []


def test_message_requires_a_key_and_allows_no_priority_or_delay(compacted: EngineUnderTest) -> None:
    with pytest.raises(MissingKey, match="without a key"):
        compacted.publish(b"x")
    with pytest.raises(InvalidQueueConfig, match="neither delays nor priorities"):
        compacted.publish(b"x", key=b"a", priority=3)
    with pytest.raises(InvalidQueueConfig, match="neither delays nor priorities"):
        compacted.publish(b"x", key=b"a", delay=3.0)
    assert compacted.depth() == 0


def test_bound_message_uses_its_topic_as_key(compacted: EngineUnderTest) -> None:
    queue = compacted.queue()
    for topic, value in ((b"t/1", b"1"), (b"t/2", b"2"), (b"t/1", b"3")):
        message = Message(value)
        message.topic = topic
        compacted.engine.publishing.publish(queue, message, None, 0)
    assert compacted.worker().ack_all() == [b"2", b"3"]


def test_full_queue_accepts_the_next_message_of_an_existing_key(make_engine: MakeEngine) -> None:
    engine = make_engine(is_compacted=True, max_depth=2)
    fill(engine, a=b"1", b=b"2")
    fill(engine, a=b"3")
    with pytest.raises(QueueFull, match="full at 2 keys") as refusal:
        fill(engine, c=b"4")
    assert "empty payload" in refusal.value.remedy and "consumers" not in refusal.value.remedy
    assert engine.worker().ack_all() == [b"2", b"3"]
    with pytest.raises(QueueFull):
        fill(engine, c=b"5")
    engine.reconfigure(overflow=DROP_OLDEST)
    fill(engine, c=b"6")
    assert engine.worker(group="late").ack_all() == [b"3", b"6"]


@pytest.mark.parametrize("overflow", [REJECT_NEW, DROP_OLDEST, DEAD_LETTER])
@pytest.mark.parametrize("grouped", [False, True])
def test_tombstone_for_a_missing_key_changes_nothing(
    make_engine: MakeEngine, overflow: int, grouped: bool
) -> None:
    engine = make_engine(is_compacted=True, max_depth=2, overflow=overflow)
    engine.queue("dlq/tasks", is_compacted=False)
    worker = engine.worker() if grouped else None
    fill(engine, a=b"1", b=b"2")
    fill(engine, c=b"")
    assert engine.depth() == 2
    assert engine.dead_letters() == []
    if worker is not None:
        assert worker.ack_all() == [b"1", b"2"]
        fill(engine, c=b"")
        assert worker.ack_all() == []
    engine.crash_and_restart()
    assert engine.worker(group="late").ack_all() == [b"1", b"2"]


@pytest.mark.parametrize("overflow", [REJECT_NEW, DROP_OLDEST, DEAD_LETTER])
@pytest.mark.parametrize("grouped", [False, True])
def test_full_queue_accepts_a_tombstone_of_an_existing_key_and_evicts_no_other(
    make_engine: MakeEngine, overflow: int, grouped: bool
) -> None:
    engine = make_engine(is_compacted=True, max_depth=2, overflow=overflow)
    worker = engine.worker() if grouped else None
    fill(engine, a=b"1", b=b"2")
    fill(engine, b=b"")
    fill(engine, b=b"")
    if worker is not None:
        assert worker.ack_all() == [b"1", b""]
    assert engine.depth() == 1
    assert engine.dead_letters() == []
    assert engine.worker(group="late").ack_all() == [b"1"]


def test_messages_settled_by_every_group_are_deleted_after_retention(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(is_compacted=True, retention=3600.0)
    worker = engine.worker()
    fill(engine, a=b"1", b=b"2")
    assert worker.ack_all() == [b"1", b"2"]
    engine.advance(minutes=30)
    fill(engine, b=b"3")
    engine.advance(minutes=40)
    assert engine.depth() == 1
    engine.crash_and_restart()
    assert engine.depth() == 1
    assert engine.worker(group="late").ack_all() == [b"3"]


def test_key_whose_message_has_expired_can_be_used_again(make_engine: MakeEngine) -> None:
    engine = make_engine(is_compacted=True)
    for round_ in range(200):
        engine.publish(b"%d" % round_, key=b"%d" % round_, ttl=5)
        engine.advance(seconds=10)
    queue = engine.queue()
    assert engine.depth() == 0
    assert len(queue.last_values) < 100
    engine.publish(b"new", key=b"0")
    assert engine.worker().ack_all() == [b"new"]


def test_key_has_one_message_when_partitions_are_added(make_engine: MakeEngine) -> None:
    engine = make_engine(is_compacted=True, partitions=2)
    keys = [b"key-%d" % number for number in range(20)]
    for key in keys:
        engine.publish(b"old " + key, key=key)
    engine.reconfigure(partitions=7)
    for key in keys:
        engine.publish(b"new " + key, key=key)
    assert engine.depth() == 20
    engine.crash_and_restart()
    assert sorted(engine.worker().ack_all()) == sorted(b"new " + key for key in keys)


def test_message_that_fails_too_often_becomes_a_dead_letter_and_can_be_redriven(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(is_compacted=True, max_retries=0)
    engine.settings_of["dlq/tasks"] = {"is_compacted": False}
    worker = engine.worker()
    fill(engine, a=b"1")
    worker.nack(worker.lease())
    (dead_letter,) = engine.dead_letter_records()
    assert dead_letter.payload == b"1"
    assert engine.redrive(dead_letter)
    assert worker.ack_all() == [b"1"]
    assert engine.depth() == 1


def test_last_messages_survive_many_snapshots_and_the_disk_holds_no_garbage(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(is_compacted=True, cache_bytes=0, partitions=3, message_ttl=0.0)
    rng = random.Random(5)
    expected: dict[bytes, bytes] = {}
    for step in range(4000):
        key = b"%d" % rng.randrange(500)
        expected[key] = b"%d:" % step + b"x" * 2000
        engine.send(expected[key], key=key)
        if step % 25 == 0:
            engine.run_until_idle()
    for _ in range(10):
        engine.advance(minutes=1)
    live = int(engine.queue().bytes)
    assert sum(engine.store.segment_sizes().values()) <= 2 * live + (1 << 20)
    engine.crash_and_restart()
    assert sorted(engine.worker(prefetch=10).ack_all()) == sorted(expected.values())
    for key in expected:
        engine.send(b"new", key=key)
    engine.run_until_idle()
    assert engine.depth() == len(expected)


@pytest.mark.parametrize("is_completed", [True, False])
def test_incremental_snapshot_has_the_state_of_its_start(
    make_engine: MakeEngine, is_completed: bool
) -> None:
    """The log has the changes made meanwhile; a crash falls back to the previous one."""
    under_test = make_engine(is_compacted=True, cache_bytes=0, partitions=2, message_ttl=0.0)
    under_test.engine.lifecycle.create_queue(
        rules_of("other", {"is_compacted": True}), "{}"
    )  # without keys
    rng = random.Random(7)
    expected: dict[bytes, bytes] = {}

    def change(count: int) -> None:
        for _ in range(count):
            key = b"%d" % int(60 * rng.random() ** 3)
            if rng.random() < 0.1:
                under_test.send(b"", key=key)
                expected.pop(key, None)
            else:
                expected[key] = b"%d" % rng.getrandbits(60)
                under_test.send(expected[key], key=key)
        under_test.run_until_idle()

    under_test.commit_loop.housekeeping.snapshot_batch_size = 1
    for _ in range(3):
        change(3 * BLOCK_SIZE)
        housekeeping = under_test.commit_loop.housekeeping
        housekeeping._start_snapshot()
        snapshot = housekeeping._open_snapshot
        while housekeeping._open_snapshot is snapshot and snapshot is not None:
            change(rng.randrange(30))
            if not is_completed:
                break
            under_test.advance(seconds=0.002)
        under_test.crash_and_restart()
        under_test.commit_loop.housekeeping.snapshot_batch_size = 1
        under_test.verify()
        assert sorted(under_test.worker(group=f"late-{rng.random()}").ack_all()) == sorted(
            expected.values()
        )
    assert under_test.warnings == []


def test_compacted_queue_has_no_message_ttl_by_default() -> None:
    assert read_config({"name": "state", "type": "compacted"}).rules().message_ttl == 0.0
    assert (
        read_config({"name": "state", "type": "compacted", "limits": {"message_ttl": "1h"}})
        .rules()
        .message_ttl
    )
    assert read_config({"name": "state"}).rules().message_ttl == 604_800.0


def test_memory_grows_with_live_keys_and_not_with_writes(
    compacted: EngineUnderTest,
) -> None:
    """Some keys are written all the time, others rarely; also for a late group."""
    for number in range(14 * BLOCK_SIZE):
        compacted.send(
            b"%d" % number, key=b"cold-%d" % number if number % 700 == 0 else b"%d" % (number % 5)
        )
        if number % 500 == 0:
            compacted.run_until_idle()
    compacted.run_until_idle()
    cold = [b"%d" % number for number in range(0, 14 * BLOCK_SIZE, 700)]
    for _ in range(2):
        partition = compacted.queue().partitions[0]
        assert compacted.depth() == len(cold) + 5 == partition.live_count
        assert len(partition._blocks) + len(partition._sparse_blocks) <= 10
        compacted.verify()
        compacted.crash_and_restart()
    got = compacted.worker(group="late").ack_all()
    assert got[: len(cold) - 1] == cold[:-1] and len(got) == len(cold) + 5
    compacted.verify()
