"""Groups and their consumers: assignment of partitions, and independent settlement."""

from __future__ import annotations

import pytest

from sluice.errors import UnknownDelivery
from sluice.queues.bulk.start_position import resolve_start
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, Worker


def test_every_group_gets_and_settles_every_message_independently(engine: EngineUnderTest) -> None:
    red, green = engine.worker(group="red"), engine.worker(group="green")
    engine.publish(b"job")
    red.ack(red.lease())
    assert engine.depth() == 1, "one group has not settled it"
    green.nack(green.lease())
    assert red.lease_or_none() is None
    engine.advance(seconds=5)
    assert green.lease().attempt == 2
    assert engine.ledger("red").acked == 1 and engine.ledger("green").delivered == 1


def test_message_is_deleted_when_every_group_has_settled_it(engine: EngineUnderTest) -> None:
    workers = [engine.worker(group=name) for name in ("a", "b", "c")]
    engine.publish(b"job")
    partition = engine.queue().partitions[0]
    for worker in workers:
        assert partition.holds(0)
        worker.ack(worker.lease())
    assert not partition.holds(0) and engine.depth() == 0


def test_new_group_starts_with_the_oldest_stored_message(engine: EngineUnderTest) -> None:
    engine.group("slow")
    worker = engine.worker(group="fast")
    for number in range(5):
        engine.publish(b"%d" % number)
    worker.ack_all()
    slow = engine.worker(group="slow", prefetch=1)
    slow.ack(slow.lease())
    slow.ack(slow.lease())
    assert engine.worker(group="new").ack_all() == [b"2", b"3", b"4"]


def test_new_group_may_start_at_the_end(engine: EngineUnderTest) -> None:
    engine.group("old")
    engine.publish(b"before")
    worker = engine.worker(group="new", start="latest")
    engine.publish(b"after")
    assert worker.ack_all() == [b"after"]
    assert engine.ledger("new").enqueued == 1


def test_new_group_may_start_at_a_sequence(engine: EngineUnderTest) -> None:
    engine.group("old")
    for number in range(10):
        engine.publish(b"%d" % number)
    assert engine.worker(group="new", start="7").ack_all() == [b"7", b"8", b"9"]
    far = engine.worker(group="far", start="99")
    assert far.ack_all() == []
    engine.publish(b"10")
    assert far.ack_all() == [b"10"]


def test_new_group_may_start_at_a_time(engine: EngineUnderTest) -> None:
    engine.group("old")
    for number in range(10):
        engine.publish(b"%d" % number)
        engine.advance(seconds=60)
    assert engine.worker(group="new", start="2027-01-15T08:07:00Z").ack_all() == [b"7", b"8", b"9"]
    assert engine.worker(group="between", start="2027-01-15T10:08:30+02:00").ack_all() == [b"9"]
    assert engine.worker(group="future", start="2031-01-01T00:00:00Z").ack_all() == []
    assert len(engine.worker(group="past", start="2001-01-01T00:00:00Z").ack_all()) == 10


def test_start_positions_are_found_in_every_partition(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=3)
    for number in range(9):
        engine.publish(b"%d" % number)
        engine.advance(seconds=1)
    queue = engine.queue()
    assert resolve_start(queue, "earliest") == [0, 0, 0]
    assert resolve_start(queue, "latest") == [3, 3, 3]
    assert resolve_start(queue, "2") == [2, 2, 2]
    assert sum(resolve_start(queue, "2027-01-15T08:00:04Z")) == 4


def test_messages_without_a_group_wait_for_one(engine: EngineUnderTest) -> None:
    """A first group that starts at `latest` must not cost other groups their messages."""
    engine.publish(b"early")
    watcher = engine.worker(group="watchers", start="latest")
    engine.publish(b"late")
    assert watcher.ack_all() == [b"late"]
    assert engine.depth() == 1
    engine.crash_and_restart()
    assert engine.worker(group="workers").ack_all() == [b"early"]
    assert engine.depth() == 0


def test_dropped_group_deletes_messages_that_only_it_needed(engine: EngineUnderTest) -> None:
    engine.group("a")
    engine.group("b")
    engine.publish(b"1")
    engine.publish(b"2")
    worker = engine.worker(group="a")
    worker.ack(worker.lease())
    engine.engine.lifecycle.delete_group(engine.group("b"))
    engine.run_until_idle()
    assert engine.depth() == 1
    engine.crash_and_restart()
    assert engine.depth() == 1 and list(engine.queue().groups) == ["a"]
    assert engine.worker(group="a").ack_all() == [b"2"]


def test_after_the_last_group_messages_wait_for_the_next(engine: EngineUnderTest) -> None:
    worker = engine.worker(group="a")
    engine.publish(b"1")
    engine.publish(b"2")
    worker.ack(worker.lease())
    engine.engine.lifecycle.delete_group(engine.group("a"))
    engine.run_until_idle()
    assert engine.depth() == 1 and worker.in_flight == 0 and worker.revoked == [1]
    engine.crash_and_restart()
    assert engine.depth() == 1
    assert engine.worker(group="b").ack_all() == [b"2"]


def test_partitions_are_assigned_evenly_with_few_moves(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=10)
    workers: list[Worker] = []
    for count in range(1, 13):
        before = {worker.client: set(worker.partitions()) for worker in workers}
        workers.append(engine.worker())
        sizes = [len(worker.partitions()) for worker in workers]
        assert sum(sizes) == 10 and max(sizes) - min(sizes) <= 1
        moved = sum(
            len(before[worker.client] - set(worker.partitions())) for worker in workers[:-1]
        )
        assert count == 1 or moved == 10 // count, (
            "the new consumer gets its share, and nothing else moves"
        )
    workers[0].leave()
    assert sum(len(worker.partitions()) for worker in workers[1:]) == 10


def test_consumers_above_the_partition_count_stand_by_and_take_over(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=2)
    first, second, standby = (engine.worker() for _ in range(3))
    assert [len(one.partitions()) for one in (first, second, standby)] == [1, 1, 0]
    for number in range(8):
        engine.publish(b"%d" % number, key=b"k%d" % number)
    assert standby.payloads() == [], "messages with a key stay with the consumer of their partition"
    held = len(first.lease_all())
    first.leave()
    assert len(standby.payloads()) == held, "and the deliveries of the other, at once"


def test_exclusive_consumer_is_served_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=4)
    common = engine.worker()
    exclusive = engine.worker(exclusive=True)
    second = engine.worker(exclusive=True)
    assert [len(one.partitions()) for one in (common, exclusive, second)] == [0, 4, 0]
    exclusive.leave()
    assert len(second.partitions()) == 4
    second.leave()
    assert len(common.partitions()) == 4


def test_consumers_of_the_highest_priority_are_served(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=4)
    low = engine.worker(priority=1)
    high = [engine.worker(priority=5) for _ in range(2)]
    assert [len(one.partitions()) for one in (low, *high)] == [0, 2, 2]
    for worker in high:
        worker.leave()
    assert len(low.partitions()) == 4


def test_partitions_of_a_stalled_consumer_move_and_return(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=4, delivery_timeout=30.0)
    stalled = engine.worker("stalled")
    healthy = engine.worker("healthy")
    for number in range(8):
        engine.publish(b"%d" % number)
    late = stalled.lease_all()
    healthy.ack_all()
    engine.advance(seconds=31)
    assert stalled.is_stalled and stalled.partitions() == [] and len(healthy.partitions()) == 4
    engine.advance(seconds=5)
    assert len(healthy.ack_all()) == 4
    with pytest.raises(UnknownDelivery):  # too late, but the consumer is alive
        stalled.ack(late[0])
    assert not stalled.is_stalled and len(stalled.partitions()) == 2


def test_late_ack_of_a_stalled_consumer_proves_it_alive(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2, delivery_timeout=30.0)
    worker = engine.worker("w")
    other = engine.worker("other")
    engine.publish(b"1")
    engine.publish(b"2")
    late = worker.lease()
    other.ack_all()
    engine.advance(seconds=31)
    assert worker.is_stalled
    worker.ack(late)
    assert not worker.is_stalled and len(worker.partitions()) == 1


def test_stalled_consumer_that_settles_its_deliveries_is_served_again(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=2, delivery_timeout=30.0)
    worker = engine.worker("w")
    engine.publish(b"first")
    engine.publish(b"second")
    assert len(worker.lease_all()) == 2
    engine.advance(seconds=20)
    for number in range(2):
        engine.publish(b"%d" % number)
    newer = worker.lease_all()
    other = engine.worker("other")
    engine.advance(seconds=11)
    assert worker.is_stalled and worker.partitions() == [] and len(other.partitions()) == 2
    worker.ack(newer[0])
    assert not worker.is_stalled and len(worker.partitions()) == 1


def test_consumer_that_settles_other_deliveries_in_time_is_not_stalled(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=2, delivery_timeout=30.0)
    worker = engine.worker("w")
    engine.worker("other")
    forgotten = b""
    for number in range(20):
        engine.publish(b"%d" % number)
        for delivery in worker.lease_all():
            forgotten = forgotten or delivery.payload
            if delivery.payload != forgotten:
                worker.ack(delivery)
        engine.advance(seconds=3)
    assert worker.revoked and not worker.is_stalled


def test_all_deliveries_of_a_stalled_consumer_time_out_and_it_stays_stalled(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=2, delivery_timeout=30.0)
    worker = engine.worker("w")
    for number in range(10):
        engine.publish(b"%d" % number)
    engine.worker("other", prefetch=0)
    engine.advance(seconds=31)
    assert len(worker.revoked) == 10 and worker.is_stalled and worker.in_flight == 0


def test_stalled_consumer_is_served_when_there_is_no_other(make_engine: MakeEngine) -> None:
    engine = make_engine(delivery_timeout=30.0)
    worker = engine.worker()
    engine.publish(b"job")
    engine.advance(seconds=36)
    assert worker.is_stalled and worker.payloads() == [b"job"]


def test_paused_consumer_keeps_its_deliveries_and_gets_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2, delivery_timeout=30.0)
    paused, other = engine.worker(), engine.worker()
    for number in range(4):
        engine.publish(b"%d" % number)
    held = paused.lease_all()
    engine.engine.dispatch.set_paused(paused, True)
    engine.publish(b"4")
    engine.publish(b"5")
    assert paused.payloads() == [] and len(other.partitions()) == 2
    other.ack_all()
    paused.ack(held[0])
    assert paused.partitions() == [], "an ack does not restore the connection"
    engine.advance(seconds=31)
    assert paused.partitions() == [] and paused.in_flight == 0
    engine.engine.dispatch.set_paused(paused, False)
    assert len(paused.partitions()) == 1


def test_late_group_gets_the_backlog_in_order(make_engine: MakeEngine) -> None:
    engine = make_engine(cache_bytes=10_000)
    for number in range(2000):
        engine.send(b"%d" % number, key=b"k%d" % (number % 3))
    done = engine.worker(prefetch=1000).ack_all()
    for remainder in range(3):
        of_key = [int(payload) for payload in done if int(payload) % 3 == remainder]
        assert of_key == list(range(remainder, 2000, 3))


def test_finished_group_does_not_count_expiry_of_another_again(make_engine: MakeEngine) -> None:
    engine = make_engine(message_ttl=60.0)
    engine.group("slow")
    done = engine.worker(group="done")
    engine.publish(b"1", key=b"k")
    engine.publish(b"2", key=b"l", ttl=30)
    first, second = done.lease_all()
    done.ack(second)
    done.release(first)
    done.is_open = False
    engine.advance(seconds=61)
    assert (engine.ledger("done").acked, engine.ledger("done").expired) == (1, 1)
    assert engine.ledger("slow").expired == 2


def test_consumer_is_served_from_all_its_partitions_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=4)
    engine.group()
    for number in range(400):
        engine.publish(b"%d" % number)
    worker = engine.worker(prefetch=40)
    for _ in range(5):
        held = worker.lease_all()
        assert [sum(one.partition == number for one in held) for number in range(4)] == [
            10,
            10,
            10,
            10,
        ]
        for delivery in held:
            worker.ack(delivery)


def test_partition_may_use_the_capacity_that_others_leave(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=4, batch_size=1000)
    engine.group("late")
    worker = engine.worker(prefetch=40)
    for number in range(60):
        engine.publish(b"%d" % number, key=b"one")
    assert len(worker.lease_all()) == 40
    assert len(engine.worker(prefetch=40, group="late").lease_all()) == 40
    for prefetch in (1, 2, 3):
        assert (
            len(engine.worker(prefetch=prefetch, group=f"narrow {prefetch}").lease_all())
            == prefetch
        )


def test_full_consumer_that_settles_is_served_from_its_other_partitions(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=3)
    worker = engine.worker(prefetch=1)
    for number in range(3):
        engine.publish(b"%d" % number)
    for _ in range(3):
        worker.ack(worker.lease())
    assert sorted(worker.got) == [b"0", b"1", b"2"]
