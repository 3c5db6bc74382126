"""Publishing: commit before acknowledgement, once each, within the limits of the queue."""

from __future__ import annotations

import pytest

from sluice.errors import InvalidQueueName, MessageTooLarge, QueueFull
from sluice.placement import fnv1a32
from sluice.queues.model.queue_rules import DEAD_LETTER, DROP_OLDEST, STRICT
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, MemoryBackend


def test_published_message_survives_a_crash(engine: EngineUnderTest) -> None:
    engine.publish(b"kept", key=b"k", props=b"\x26raw")
    engine.crash_and_restart()
    delivery = engine.worker().lease()
    assert (delivery.payload, delivery.message.key, delivery.message.props) == (
        b"kept",
        b"k",
        b"\x26raw",
    )


def test_neither_acknowledgement_nor_delivery_happens_before_commit() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    worker = engine.worker()
    assert backend.store is not None
    backend.store.hold()
    first = engine.publish(b"one")
    second = engine.publish(b"two")
    assert engine.publisher.receipts == [] and worker.payloads() == []
    backend.store.release(1)
    assert engine.publisher.receipts == [first] and worker.payloads() == [b"one"]
    backend.store.release()
    engine.run_until_idle()
    assert engine.publisher.receipts == [first, second] and worker.payloads() == [b"one", b"two"]


def test_message_with_an_incomplete_commit_never_existed() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    engine.publish(b"kept")
    assert backend.store is not None
    backend.store.hold()
    engine.publish(b"lost")
    backend.cut_power()
    engine.reopen()
    assert engine.publisher.receipts == [1]
    assert engine.worker().ack_all() == [b"kept"]
    engine.verify()


def test_messages_that_arrive_during_a_commit_share_the_next_one() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    engine.queue()
    assert backend.store is not None
    backend.store.hold()
    for number in range(50):
        engine.publish(b"%d" % number)
    assert backend.store.count_pending() == 1
    backend.store.release(1)
    assert backend.store.count_pending() == 1 and len(engine.publisher.receipts) == 1
    backend.store.release()
    engine.run_until_idle()
    assert len(engine.publisher.receipts) == 50


def test_second_publish_with_the_same_id_is_acknowledged_and_not_stored(
    engine: EngineUnderTest,
) -> None:
    worker = engine.worker()
    tags = [engine.publish(b"once", message_id=b"order-7") for _ in range(3)]
    assert engine.publisher.receipts == tags
    assert worker.ack_all() == [b"once"]
    assert engine.engine.queues["tasks"].duplicates == 2


def test_id_may_be_reused_after_its_dedup_window(make_engine: MakeEngine) -> None:
    engine = make_engine(dedup_window=120.0)
    engine.publish(b"first", message_id=b"id")
    engine.advance(seconds=119)
    engine.publish(b"second", message_id=b"id")
    engine.advance(seconds=2)
    engine.publish(b"third", message_id=b"id")
    assert engine.worker().ack_all() == [b"first", b"third"]


@pytest.mark.parametrize("restart", ["crash", "restart"])
def test_dedup_window_survives_a_restart(engine: EngineUnderTest, restart: str) -> None:
    engine.publish(b"once", message_id=b"id")
    engine.worker().ack_all()
    engine.crash_and_restart() if restart == "crash" else engine.restart()
    engine.publish(b"twice", message_id=b"id")
    assert engine.depth() == 0
    engine.advance(minutes=3)
    engine.publish(b"again", message_id=b"id")
    assert engine.depth() == 1


def test_duplicate_of_an_uncommitted_message_is_acknowledged_after_it() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    engine.queue()
    assert backend.store is not None
    backend.store.hold()
    engine.publish(b"x", message_id=b"id")
    engine.publish(b"x", message_id=b"id")
    assert engine.publisher.receipts == []
    backend.store.release()
    engine.run_until_idle()
    assert engine.publisher.receipts == [1, 2] and engine.depth() == 1


def test_oversized_message_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(max_message_size=10)
    engine.publish(b"x" * 10)
    with pytest.raises(MessageTooLarge, match="11 bytes"):
        engine.publish(b"x" * 11)
    assert engine.depth() == 1 and engine.engine.queues["tasks"].refused == 1


def test_full_queue_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine(max_depth=3)
    for number in range(3):
        engine.publish(b"%d" % number)
    with pytest.raises(QueueFull, match="full at 3"):
        engine.publish(b"too much")
    worker = engine.worker()
    worker.ack(worker.lease())
    engine.publish(b"fits again")
    assert engine.depth() == 3


def test_full_queue_drops_its_oldest_message_if_configured(make_engine: MakeEngine) -> None:
    engine = make_engine(max_depth=6, overflow=DROP_OLDEST, partitions=3)
    for number in range(20):
        engine.publish(b"%d" % number)
        engine.advance(seconds=0.01)
    assert engine.depth() == 6
    worker = engine.worker()
    assert sorted(worker.ack_all(), key=int) == [b"%d" % number for number in range(14, 20)]


def test_dropped_oldest_message_is_not_one_in_flight(make_engine: MakeEngine) -> None:
    engine = make_engine(max_depth=3, overflow=DROP_OLDEST)
    worker = engine.worker(prefetch=1)
    for payload in (b"at work", b"oldest", b"older", b"new"):
        engine.publish(payload)
    assert engine.depth() == 3
    ledger = engine.ledger()
    assert (ledger.delivered, ledger.purged, ledger.waiting) == (1, 1, 2)
    worker.ack(worker.lease())
    assert worker.ack_all() == [b"older", b"new"]


def test_full_queue_dead_letters_its_overflow_if_configured(make_engine: MakeEngine) -> None:
    engine = make_engine(max_depth=1, overflow=DEAD_LETTER)
    engine.publish(b"fits")
    tag = engine.publish(b"too much", message_id=b"id")
    engine.publish(b"too much", message_id=b"id")
    assert tag in engine.publisher.receipts, "it is stored in the dead-letter queue"
    assert engine.dead_letters() == [b"too much"]
    assert engine.dead_letter_records()[0].history["dead-reason"] == "overflow"
    engine.reconfigure(dlq_enabled=False)
    with pytest.raises(QueueFull):
        engine.publish(b"and nowhere to go")


def test_overflow_is_refused_if_its_dead_letter_queue_cannot_be_created(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_depth=1, overflow=DEAD_LETTER, dlq_name="not//a name")
    engine.publish(b"fits")
    with pytest.raises(QueueFull):
        engine.publish(b"too much")
    engine.run_until_idle()
    (warning,) = engine.warnings
    assert warning.startswith(
        "message refused: dead-letter queue not//a name of queue tasks cannot be created: "
    )
    assert engine.engine.queues["tasks"].refused == 1
    assert engine.engine.queues["tasks"].dead_by_reason == {}


def test_higher_priorities_come_first_and_equal_ones_in_order(engine: EngineUnderTest) -> None:
    for payload, priority in (
        (b"a0", 0),
        (b"b5", 5),
        (b"c9", 9),
        (b"d5", 5),
        (b"e0", 0),
        (b"f1", 1),
    ):
        engine.publish(payload, priority=priority)
    assert engine.worker().payloads() == [b"c9", b"b5", b"d5", b"f1", b"a0", b"e0"]


def test_priorities_survive_a_crash(engine: EngineUnderTest) -> None:
    engine.group()
    for priority in range(10):
        engine.publish(b"%d" % priority, priority=priority)
    engine.crash_and_restart()
    assert engine.worker().payloads() == [b"%d" % priority for priority in reversed(range(10))]


def test_priority_overtakes_within_its_key_too(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    for payload, priority in ((b"1", 0), (b"2", 0), (b"3", 0), (b"urgent", 7), (b"4", 0)):
        engine.publish(payload, key=b"k", priority=priority)
    assert worker.ack_all() == [b"1", b"urgent", b"2", b"3", b"4"]


def test_delayed_message_is_delivered_when_due(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"later", delay=60)
    engine.publish(b"now")
    assert worker.ack_all() == [b"now"]
    engine.advance(seconds=59.9)
    assert worker.payloads() == []
    engine.advance(seconds=0.1)
    assert worker.ack_all() == [b"later"]


def test_delay_survives_a_crash_whether_it_is_over_or_not(engine: EngineUnderTest) -> None:
    engine.group()
    engine.publish(b"soon", delay=60)
    engine.publish(b"late", delay=600)
    engine.loop.now += 90
    engine.crash_and_restart()
    worker = engine.worker()
    assert worker.ack_all() == [b"soon"]
    engine.advance(seconds=511)
    assert worker.ack_all() == [b"late"]


def test_time_in_the_past_is_no_delay(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"late already", delay=-5)
    assert worker.ack_all() == [b"late already"]


def test_key_is_mapped_to_its_partition_by_fnv(make_engine: MakeEngine) -> None:
    assert [fnv1a32(key) for key in (b"", b"a", b"foobar")] == [0x811C9DC5, 0xE40C292C, 0xBF9CF968]
    engine = make_engine(partitions=7)
    worker = engine.worker()
    for number in range(50):
        engine.publish(b"%d" % number, key=b"key-%d" % number)
    for delivery in worker.lease_all():
        assert delivery.partition == fnv1a32(delivery.message.key) % 7


def test_messages_without_a_key_are_spread_evenly(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=10)
    for number in range(1000):
        engine.send(b"%d" % number)
    assert [
        int(partition.live_count) for partition in engine.engine.queues["tasks"].partitions
    ] == [100] * 10


def test_strict_queue_has_one_partition_with_any_configuration(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=10, ordering=STRICT)
    assert len(engine.queue().partitions) == 1


@pytest.mark.parametrize(
    "name", ["", "a//b", "/a", "a/", "a+b", "#", "$sys", "dlq", "responses", "x" * 1025]
)
def test_invalid_queue_name_is_refused(engine: EngineUnderTest, name: str) -> None:
    with pytest.raises(InvalidQueueName):
        engine.queue(name)


def test_messages_expire_after_the_ttl_of_their_queue(make_engine: MakeEngine) -> None:
    engine = make_engine(message_ttl=60.0)
    engine.group()
    engine.publish(b"old")
    engine.advance(seconds=30)
    engine.publish(b"young")
    engine.advance(seconds=31)
    assert engine.depth() == 1
    assert engine.worker().ack_all() == [b"young"]
    assert engine.ledger().expired == 1 and engine.dead_letters() == []


def test_delay_does_not_count_against_the_ttl_of_the_queue(make_engine: MakeEngine) -> None:
    engine = make_engine(message_ttl=60.0)
    worker = engine.worker()
    engine.publish(b"next week", delay=7 * 86_400)
    engine.publish(b"its own end", delay=120, ttl=100)
    engine.publish(b"beyond what can be counted", delay=36_500 * 86_400)
    engine.advance(seconds=7 * 86_400)
    assert worker.payloads() == [b"next week"]
    worker.leave()
    engine.advance(seconds=61)
    assert engine.depth() == 1 and engine.ledger().expired == 2


def test_message_ttl_may_be_shorter_than_the_queue_ttl_but_not_longer(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(message_ttl=60.0)
    engine.group()
    engine.publish(b"short", ttl=10)
    engine.publish(b"long", ttl=600)
    engine.advance(seconds=11)
    assert engine.depth() == 1
    engine.advance(seconds=50)
    assert engine.depth() == 0 and engine.ledger().expired == 2


def test_expired_message_becomes_a_dead_letter_if_configured(make_engine: MakeEngine) -> None:
    engine = make_engine(message_ttl=60.0, expired_to_dlq=True)
    engine.group()
    engine.publish(b"cold")
    engine.advance(seconds=61)
    assert engine.dead_letters() == [b"cold"]
    assert engine.dead_letter_records()[0].history["dead-reason"] == "expired"
    assert engine.ledger().dead == 1 and engine.ledger().expired == 0


def test_one_expired_dead_letter_stands_for_all_groups_that_have_not_seen_it(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(message_ttl=60.0, expired_to_dlq=True)
    engine.group("a")
    engine.group("b")
    engine.publish(b"seen by none")
    engine.publish(b"seen by a")
    worker = engine.worker(group="a")
    first, second = worker.lease_all()
    worker.release(first)
    worker.is_open = False
    worker.ack(second)
    engine.advance(seconds=61)
    groups = {
        dead_letter.payload: dead_letter.history.get("original-group", "")
        for dead_letter in engine.dead_letter_records()
    }
    assert groups == {b"seen by none": "", b"seen by a": "b"}


def test_message_in_flight_does_not_expire(make_engine: MakeEngine) -> None:
    engine = make_engine(message_ttl=10.0, delivery_timeout=30.0)
    worker = engine.worker()
    engine.publish(b"done")
    engine.publish(b"failed")
    done, failed = worker.lease_all()
    engine.advance(seconds=20)
    worker.ack(done)
    worker.nack(failed)
    assert (engine.ledger().acked, engine.ledger().expired, engine.depth()) == (1, 1, 0)


@pytest.mark.parametrize("failures", [0, 1])
@pytest.mark.parametrize("to_dlq", [False, True])
def test_message_released_after_its_expiry_is_deleted_at_once(
    make_engine: MakeEngine, to_dlq: bool, failures: int
) -> None:
    engine = make_engine(message_ttl=10.0, delivery_timeout=30.0, expired_to_dlq=to_dlq)
    worker = engine.worker()
    engine.publish(b"late")
    if failures:
        worker.nack(worker.lease(), 0.0)
    delivery = worker.lease()
    engine.advance(seconds=20)
    assert engine.depth() == 1
    worker.is_open = False
    worker.release(delivery)
    ledger = engine.ledger()
    assert (ledger.waiting, ledger.retrying, engine.depth()) == (0, 0, 0)
    assert (ledger.expired, ledger.dead) == ((0, 1) if to_dlq else (1, 0))
    assert engine.dead_letters() == ([b"late"] if to_dlq else [])


@pytest.mark.parametrize("to_dlq", [False, True])
def test_message_held_by_a_token_of_a_previous_run_is_deleted_when_it_fails_after_expiry(
    make_engine: MakeEngine, to_dlq: bool
) -> None:
    engine = make_engine(message_ttl=10.0, delivery_timeout=30.0, expired_to_dlq=to_dlq)
    worker = engine.worker()
    engine.publish(b"late")
    delivery = worker.lease()
    engine.crash_and_restart()
    lease = engine.engine.lease_lookup.reclaim_lease(
        engine.group(), delivery.name, delivery.token, worker.client
    )
    assert lease is not None
    engine.advance(seconds=20)
    assert engine.depth() == 1
    engine.engine.settlement.nack(lease, 5.0, "too late")
    engine.run_until_idle()
    ledger = engine.ledger()
    assert (ledger.waiting, ledger.retrying, engine.depth()) == (0, 0, 0)
    assert engine.dead_letters() == ([b"late"] if to_dlq else [])


@pytest.mark.parametrize("to_dlq", [False, True])
@pytest.mark.parametrize("is_held", [False, True])
def test_expired_message_revived_by_a_seek_is_deleted_at_once(
    make_engine: MakeEngine, is_held: bool, to_dlq: bool
) -> None:
    engine = make_engine(
        message_ttl=10.0, delivery_timeout=30.0, retention=600.0, expired_to_dlq=to_dlq
    )
    worker = engine.worker()
    engine.publish(b"late")
    delivery = worker.lease()
    engine.advance(seconds=20)
    if not is_held:
        worker.ack(delivery)
    worker.is_open = False
    engine.seek("earliest")
    engine.advance(seconds=0.01)
    assert (engine.ledger().waiting, engine.depth()) == (0, 0)
    assert engine.dead_letters() == ([b"late"] if to_dlq else [])


def test_expired_message_found_by_a_new_group_is_deleted_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(message_ttl=10.0, delivery_timeout=30.0, retention=600.0)
    worker = engine.worker()
    engine.publish(b"late")
    delivery = worker.lease()
    engine.advance(seconds=20)
    worker.ack(delivery)
    engine.group("second")
    engine.advance(seconds=0.01)
    assert (engine.ledger("second").waiting, engine.depth()) == (0, 0)


def test_expired_message_is_deleted_when_its_last_group_is_dropped(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(message_ttl=10.0, delivery_timeout=30.0)
    worker = engine.worker()
    engine.publish(b"late")
    worker.lease()
    engine.advance(seconds=20)
    engine.engine.lifecycle.delete_group(engine.group())
    engine.advance(seconds=0.01)
    assert engine.depth() == 0


def test_expiry_survives_a_crash(make_engine: MakeEngine) -> None:
    engine = make_engine(message_ttl=60.0)
    engine.publish(b"old")
    engine.crash_and_restart()
    engine.advance(seconds=61)
    assert engine.depth() == 0


def test_message_without_a_group_expires_too(make_engine: MakeEngine) -> None:
    engine = make_engine(message_ttl=60.0)
    engine.publish(b"without a group")
    engine.advance(seconds=61)
    assert engine.depth() == 0
    engine.crash_and_restart()
    assert engine.depth() == 0
