"""Messages come in: kept before anybody is told, once each, within the queue's limits."""

from __future__ import annotations

import pytest

from sluice.errors import InvalidQueueName, MessageTooLarge, QueueFull
from sluice.message import fnv1a32
from sluice.queues.model.queue_rules import DEAD_LETTER, DROP_OLDEST, STRICT
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, MemoryKeeper


def test_a_published_message_survives_a_crash(engine: EngineUnderTest) -> None:
    engine.publish(b"kept", key=b"k", props=b"\x26raw")
    engine.crash_and_restart()
    delivery = engine.worker().lease()
    assert (delivery.payload, delivery.message.key, delivery.message.props) == (b"kept", b"k", b"\x26raw")


def test_neither_receipt_nor_delivery_happens_before_the_commit() -> None:
    keeper = MemoryKeeper()
    engine = EngineUnderTest(keeper)
    worker = engine.worker()
    assert keeper.store is not None
    keeper.store.hold()
    first = engine.publish(b"one")
    second = engine.publish(b"two")
    assert engine.author.receipts == [] and worker.payloads() == []
    keeper.store.release(1)
    assert engine.author.receipts == [first] and worker.payloads() == [b"one"]
    keeper.store.release()
    engine.settle_down()
    assert engine.author.receipts == [first, second] and worker.payloads() == [b"one", b"two"]


def test_a_message_whose_commit_was_cut_short_was_never_there() -> None:
    keeper = MemoryKeeper()
    engine = EngineUnderTest(keeper)
    engine.publish(b"kept")
    assert keeper.store is not None
    keeper.store.hold()
    engine.publish(b"lost")
    keeper.cut_power()
    engine.start_again()
    assert engine.author.receipts == [1]
    assert engine.worker().ack_all() == [b"kept"]
    engine.verify()


def test_all_that_arrives_during_a_commit_goes_with_the_next_one() -> None:
    keeper = MemoryKeeper()
    engine = EngineUnderTest(keeper)
    engine.queue()
    assert keeper.store is not None
    keeper.store.hold()
    for number in range(50):
        engine.publish(b"%d" % number)
    assert keeper.store.waiting() == 1
    keeper.store.release(1)
    assert keeper.store.waiting() == 1 and len(engine.author.receipts) == 1
    keeper.store.release()
    engine.settle_down()
    assert len(engine.author.receipts) == 50


def test_a_second_publish_with_the_same_id_is_acknowledged_and_not_stored(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    tags = [engine.publish(b"once", message_id=b"order-7") for _ in range(3)]
    assert engine.author.receipts == tags
    assert worker.ack_all() == [b"once"]
    assert engine.engine.queues["tasks"].duplicates == 2


def test_an_id_may_be_used_again_when_its_window_is_over(make: MakeEngine) -> None:
    engine = make(dedup_window=120.0)
    engine.publish(b"first", message_id=b"id")
    engine.advance(seconds=119)
    engine.publish(b"second", message_id=b"id")
    engine.advance(seconds=2)
    engine.publish(b"third", message_id=b"id")
    assert engine.worker().ack_all() == [b"first", b"third"]


@pytest.mark.parametrize("way", ["crash", "restart"])
def test_the_dedup_window_outlives_the_process(engine: EngineUnderTest, way: str) -> None:
    engine.publish(b"once", message_id=b"id")
    engine.worker().ack_all()
    engine.crash_and_restart() if way == "crash" else engine.restart()
    engine.publish(b"twice", message_id=b"id")
    assert engine.depth() == 0
    engine.advance(minutes=3)
    engine.publish(b"again", message_id=b"id")
    assert engine.depth() == 1


def test_a_duplicate_of_a_message_that_is_still_under_way_is_answered_after_it() -> None:
    keeper = MemoryKeeper()
    engine = EngineUnderTest(keeper)
    engine.queue()
    assert keeper.store is not None
    keeper.store.hold()
    engine.publish(b"x", message_id=b"id")
    engine.publish(b"x", message_id=b"id")
    assert engine.author.receipts == []
    keeper.store.release()
    engine.settle_down()
    assert engine.author.receipts == [1, 2] and engine.depth() == 1


def test_a_message_that_is_too_large_is_refused(make: MakeEngine) -> None:
    engine = make(max_message_size=10)
    engine.publish(b"x" * 10)
    with pytest.raises(MessageTooLarge, match="11 bytes"):
        engine.publish(b"x" * 11)
    assert engine.depth() == 1 and engine.engine.queues["tasks"].refused == 1


def test_a_full_queue_refuses(make: MakeEngine) -> None:
    engine = make(max_depth=3)
    for number in range(3):
        engine.publish(b"%d" % number)
    with pytest.raises(QueueFull, match="full at 3"):
        engine.publish(b"too much")
    worker = engine.worker()
    worker.ack(worker.lease())
    engine.publish(b"fits again")
    assert engine.depth() == 3


def test_a_full_queue_drops_its_oldest_message_if_told_to(make: MakeEngine) -> None:
    engine = make(max_depth=6, overflow=DROP_OLDEST, partitions=3)
    for number in range(20):
        engine.publish(b"%d" % number)
        engine.advance(seconds=0.01)
    assert engine.depth() == 6
    worker = engine.worker()
    assert sorted(worker.ack_all(), key=int) == [b"%d" % number for number in range(14, 20)]


def test_the_oldest_message_that_is_dropped_is_not_one_somebody_works_on(make: MakeEngine) -> None:
    engine = make(max_depth=3, overflow=DROP_OLDEST)
    worker = engine.worker(prefetch=1)
    for payload in (b"at work", b"oldest", b"older", b"new"):
        engine.publish(payload)
    assert engine.depth() == 3
    account = engine.ledger()
    assert (account.delivered, account.purged, account.waiting) == (1, 1, 2)
    worker.ack(worker.lease())
    assert worker.ack_all() == [b"older", b"new"]


def test_a_full_queue_sends_what_is_too_much_to_its_dead_letters_if_told_to(make: MakeEngine) -> None:
    engine = make(max_depth=1, overflow=DEAD_LETTER)
    engine.publish(b"fits")
    tag = engine.publish(b"too much", message_id=b"id")
    engine.publish(b"too much", message_id=b"id")
    assert tag in engine.author.receipts, "it is kept, if elsewhere"
    assert engine.dead_letters() == [b"too much"]
    assert engine.letters()[0].story["dead-reason"] == "overflow"
    engine.reconfigure(dlq_enabled=False)
    with pytest.raises(QueueFull):
        engine.publish(b"and nowhere to go")


def test_higher_priorities_come_first_and_equal_ones_in_order(engine: EngineUnderTest) -> None:
    for payload, priority in ((b"a0", 0), (b"b5", 5), (b"c9", 9), (b"d5", 5), (b"e0", 0), (b"f1", 1)):
        engine.publish(payload, priority=priority)
    assert engine.worker().payloads() == [b"c9", b"b5", b"d5", b"f1", b"a0", b"e0"]


def test_priorities_survive_a_crash(engine: EngineUnderTest) -> None:
    engine.group()
    for priority in range(10):
        engine.publish(b"%d" % priority, priority=priority)
    engine.crash_and_restart()
    assert engine.worker().payloads() == [b"%d" % priority for priority in reversed(range(10))]


def test_a_priority_overtakes_within_its_key_too(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    for payload, priority in ((b"1", 0), (b"2", 0), (b"3", 0), (b"urgent", 7), (b"4", 0)):
        engine.publish(payload, key=b"k", priority=priority)
    assert worker.ack_all() == [b"1", b"urgent", b"2", b"3", b"4"]


def test_a_delayed_message_comes_when_it_is_due(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"later", delay=60)
    engine.publish(b"now")
    assert worker.ack_all() == [b"now"]
    engine.advance(seconds=59.9)
    assert worker.payloads() == []
    engine.advance(seconds=0.1)
    assert worker.ack_all() == [b"later"]


def test_a_delay_survives_a_crash_whether_it_is_over_or_not(engine: EngineUnderTest) -> None:
    engine.group()
    engine.publish(b"soon", delay=60)
    engine.publish(b"late", delay=600)
    engine.loop.now += 90
    engine.crash_and_restart()
    worker = engine.worker()
    assert worker.ack_all() == [b"soon"]
    engine.advance(seconds=511)
    assert worker.ack_all() == [b"late"]


def test_a_time_that_has_passed_is_no_delay(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"late already", delay=-5)
    assert worker.ack_all() == [b"late already"]


def test_a_key_always_goes_to_the_partition_that_fnv_names(make: MakeEngine) -> None:
    assert [fnv1a32(key) for key in (b"", b"a", b"foobar")] == [0x811C9DC5, 0xE40C292C, 0xBF9CF968]
    engine = make(partitions=7)
    worker = engine.worker()
    for number in range(50):
        engine.publish(b"%d" % number, key=b"key-%d" % number)
    for delivery in worker.lease_all():
        assert delivery.partition == fnv1a32(delivery.message.key) % 7


def test_messages_without_a_key_are_spread_evenly(make: MakeEngine) -> None:
    engine = make(partitions=10)
    for number in range(1000):
        engine.send(b"%d" % number)
    assert [int(partition.live) for partition in engine.engine.queues["tasks"].partitions] == [100] * 10


def test_a_strict_queue_has_one_partition_whatever_it_is_told(make: MakeEngine) -> None:
    engine = make(partitions=10, ordering=STRICT)
    assert len(engine.queue().partitions) == 1


@pytest.mark.parametrize("name", ["", "a//b", "/a", "a/", "a+b", "#", "$sys", "dlq", "responses", "x" * 1025])
def test_a_name_that_no_queue_can_have_is_refused(engine: EngineUnderTest, name: str) -> None:
    with pytest.raises(InvalidQueueName):
        engine.queue(name)


def test_messages_expire_after_the_time_of_their_queue(make: MakeEngine) -> None:
    engine = make(message_ttl=60.0)
    engine.group()
    engine.publish(b"old")
    engine.advance(seconds=30)
    engine.publish(b"young")
    engine.advance(seconds=31)
    assert engine.depth() == 1
    assert engine.worker().ack_all() == [b"young"]
    assert engine.ledger().expired == 1 and engine.dead_letters() == []


def test_a_delay_does_not_use_up_the_time_that_the_queue_gives(make: MakeEngine) -> None:
    engine = make(message_ttl=60.0)
    worker = engine.worker()
    engine.publish(b"next week", delay=7 * 86_400)
    engine.publish(b"its own end", delay=120, ttl=100)
    engine.publish(b"beyond what can be counted", delay=36_500 * 86_400)
    engine.advance(seconds=7 * 86_400)
    assert worker.payloads() == [b"next week"]
    worker.leave()
    engine.advance(seconds=61)
    assert engine.depth() == 1 and engine.ledger().expired == 2


def test_a_message_may_live_shorter_than_its_queue_says_but_not_longer(make: MakeEngine) -> None:
    engine = make(message_ttl=60.0)
    engine.group()
    engine.publish(b"short", ttl=10)
    engine.publish(b"long", ttl=600)
    engine.advance(seconds=11)
    assert engine.depth() == 1
    engine.advance(seconds=50)
    assert engine.depth() == 0 and engine.ledger().expired == 2


def test_an_expired_message_becomes_a_dead_letter_if_the_queue_says_so(make: MakeEngine) -> None:
    engine = make(message_ttl=60.0, expired_to_dlq=True)
    engine.group()
    engine.publish(b"cold")
    engine.advance(seconds=61)
    assert engine.dead_letters() == [b"cold"]
    assert engine.letters()[0].story["dead-reason"] == "expired"
    assert engine.ledger().dead == 1 and engine.ledger().expired == 0


def test_one_expired_letter_stands_for_groups_of_which_none_has_seen_it(make: MakeEngine) -> None:
    engine = make(message_ttl=60.0, expired_to_dlq=True)
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
    groups = {letter.payload: letter.story.get("original-group", "") for letter in engine.letters()}
    assert groups == {b"seen by none": "", b"seen by a": "b"}


def test_what_somebody_works_on_does_not_expire_in_his_hands(make: MakeEngine) -> None:
    engine = make(message_ttl=10.0, delivery_timeout=30.0)
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
def test_a_message_released_after_its_expiry_is_removed_at_once(
    make: MakeEngine, to_dlq: bool, failures: int
) -> None:
    engine = make(message_ttl=10.0, delivery_timeout=30.0, expired_to_dlq=to_dlq)
    worker = engine.worker()
    engine.publish(b"late")
    if failures:
        worker.nack(worker.lease(), 0.0)
    delivery = worker.lease()
    engine.advance(seconds=20)
    assert engine.depth() == 1
    worker.is_open = False
    worker.release(delivery)
    account = engine.ledger()
    assert (account.waiting, account.retrying, engine.depth()) == (0, 0, 0)
    assert (account.expired, account.dead) == ((0, 1) if to_dlq else (1, 0))
    assert engine.dead_letters() == ([b"late"] if to_dlq else [])


@pytest.mark.parametrize("to_dlq", [False, True])
def test_a_message_held_by_a_token_of_the_previous_run_is_removed_when_that_fails_after_its_expiry(
    make: MakeEngine, to_dlq: bool
) -> None:
    engine = make(message_ttl=10.0, delivery_timeout=30.0, expired_to_dlq=to_dlq)
    worker = engine.worker()
    engine.publish(b"late")
    delivery = worker.lease()
    engine.crash_and_restart()
    lease = engine.engine.retake(engine.group(), delivery.name, delivery.token, worker.client)
    assert lease is not None
    engine.advance(seconds=20)
    assert engine.depth() == 1
    engine.engine.nack(lease, 5.0, "too late")
    engine.settle_down()
    account = engine.ledger()
    assert (account.waiting, account.retrying, engine.depth()) == (0, 0, 0)
    assert engine.dead_letters() == ([b"late"] if to_dlq else [])


@pytest.mark.parametrize("to_dlq", [False, True])
@pytest.mark.parametrize("is_held", [False, True])
def test_an_expired_message_that_a_seek_brings_back_is_removed_at_once(
    make: MakeEngine, is_held: bool, to_dlq: bool
) -> None:
    engine = make(message_ttl=10.0, delivery_timeout=30.0, retention=600.0, expired_to_dlq=to_dlq)
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


def test_an_expired_message_that_a_new_group_finds_is_removed_at_once(make: MakeEngine) -> None:
    engine = make(message_ttl=10.0, delivery_timeout=30.0, retention=600.0)
    worker = engine.worker()
    engine.publish(b"late")
    delivery = worker.lease()
    engine.advance(seconds=20)
    worker.ack(delivery)
    engine.group("second")
    engine.advance(seconds=0.01)
    assert (engine.ledger("second").waiting, engine.depth()) == (0, 0)


def test_an_expired_message_does_not_wait_for_another_group_when_its_last_group_is_dropped(
    make: MakeEngine,
) -> None:
    engine = make(message_ttl=10.0, delivery_timeout=30.0)
    worker = engine.worker()
    engine.publish(b"late")
    worker.lease()
    engine.advance(seconds=20)
    engine.engine.drop_group(engine.group())
    engine.advance(seconds=0.01)
    assert engine.depth() == 0


def test_expiry_survives_a_crash(make: MakeEngine) -> None:
    engine = make(message_ttl=60.0)
    engine.publish(b"old")
    engine.crash_and_restart()
    engine.advance(seconds=61)
    assert engine.depth() == 0


def test_a_message_that_waits_for_any_group_expires_as_well(make: MakeEngine) -> None:
    engine = make(message_ttl=60.0)
    engine.publish(b"for nobody")
    engine.advance(seconds=61)
    assert engine.depth() == 0
    engine.crash_and_restart()
    assert engine.depth() == 0
