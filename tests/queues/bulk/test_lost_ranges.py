"""What a group that is read in bulk loses is known, after a restart too; and gaps that are no loss are told from it."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from sluice.queues.bulk.bulk_ops import settle_some
from sluice.queues.bulk.lost_ranges import MOST_RANGES, Losses, begin_anew, first_lost
from sluice.queues.model.queue_rules import DROP_OLDEST
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, MemoryKeeper


def fill(bench: EngineUnderTest, first: int, behind: int) -> None:
    for nth in range(first, behind):
        bench.publish(b"%d" % nth)


def tell(bench: EngineUnderTest, end: int, group: str = "spark") -> None:
    assert settle_some(bench.engine, bench.group(group).cursors[0], end, 1000)
    bench.settle_down()


def lost(bench: EngineUnderTest, start: int, end: int = 1000, group: str = "spark") -> int:
    return int(first_lost(bench.group(group).cursors[0], start, end))


def reader(bench: EngineUnderTest) -> None:
    """Eight messages, of which the group is done with four."""
    bench.group("spark")
    fill(bench, 0, 8)
    tell(bench, 4)
    assert lost(bench, 4) == -1


def purge(bench: EngineUnderTest) -> None:
    bench.engine.purge(bench.queue())


def consume(bench: EngineUnderTest) -> None:
    worker = bench.worker(group="spark")
    worker.ack_all()
    worker.leave()


def reject(bench: EngineUnderTest) -> None:
    worker = bench.worker(group="spark", prefetch=1)
    worker.reject(worker.lease())
    worker.leave()


def seek(bench: EngineUnderTest) -> None:
    bench.seek("latest", "spark")


def tell_further(bench: EngineUnderTest) -> None:
    tell(bench, 8)


@pytest.mark.parametrize("how", [purge, consume, reject, seek, tell_further])
def test_what_others_settle_for_a_reader_is_lost(
    how: Callable[[EngineUnderTest], None], engine: EngineUnderTest
) -> None:
    reader(engine)
    how(engine)
    engine.settle_down()
    assert lost(engine, 4) == 4
    engine.crash_and_restart()
    assert lost(engine, 4) == 4
    fill(engine, 8, 10)
    assert lost(engine, 8) == -1
    tell(engine, 8)
    assert lost(engine, 8) == -1, "whoever goes on has lost no more"
    engine.verify()


def test_what_is_pushed_out_or_expires_is_lost(make: MakeEngine) -> None:
    engine = make(max_depth=8, overflow=DROP_OLDEST)
    engine.group("spark")
    fill(engine, 0, 8)
    tell(engine, 2)
    fill(engine, 8, 12)
    assert lost(engine, 2) == 2
    tell(engine, 4)
    assert lost(engine, 4) == -1
    engine.publish(b"late", ttl=5)
    engine.advance(seconds=10)
    assert lost(engine, 5) == 12
    assert lost(engine, 5, 12) == -1


def test_what_another_group_keeps_can_be_read_and_is_not_lost(engine: EngineUnderTest) -> None:
    engine.group("others")
    reader(engine)
    engine.seek("latest", "spark")
    assert lost(engine, 0) == -1
    tell(engine, 8, "others")
    assert lost(engine, 4) == 4
    assert lost(engine, 0) == 0


def test_gaps_that_were_not_for_the_group_are_no_loss(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    fill(engine, 0, 6)
    for nth, delivery in enumerate(worker.lease_all()):
        if nth in (1, 3):
            worker.ack(delivery)
        elif nth == 4:
            worker.reject(delivery)
    tell(engine, 0)
    assert lost(engine, 0) == -1, "it begins with what there is"
    tell(engine, 6)
    [letter] = engine.letters()
    assert engine.redrive(letter)
    engine.settle_down()
    assert worker.lease().payload == b"4"
    engine.crash_and_restart()
    assert lost(engine, 6) == -1
    purge(engine)
    fill(engine, 7, 8)
    assert lost(engine, 6) == -1, "what was put back was for the other group alone"


def test_a_reader_that_begins_anew_forgets_what_was_lost_before(engine: EngineUnderTest) -> None:
    reader(engine)
    purge(engine)
    fill(engine, 8, 10)
    engine.seek("earliest", "spark")
    begin_anew(engine.engine, engine.group("spark").cursors[0], 2)
    engine.settle_down()
    assert lost(engine, 2) == -1
    engine.crash_and_restart()
    assert lost(engine, 2) == -1
    purge(engine)
    assert lost(engine, 2) == 8


def test_what_went_before_the_first_word_of_a_reader_is_no_loss(engine: EngineUnderTest) -> None:
    """It comes with a place of its own to a group that consumers have moved, or that passed by what was for others."""
    engine.group("spark")
    fill(engine, 0, 8)
    consume(engine)
    tell(engine, 4)
    assert lost(engine, 4) == -1
    fill(engine, 8, 9)
    purge(engine)
    assert lost(engine, 4) == 8
    engine.crash_and_restart()
    assert lost(engine, 4) == 8


def test_a_partition_that_is_added_is_watched_from_its_beginning(make: MakeEngine) -> None:
    bench = make(partitions=1)
    bench.group("others")
    reader(bench)
    bench.reconfigure(partitions=2)
    for nth in range(40):
        bench.publish(b"%d" % nth, key=b"%d" % nth)
    for _ in range(2):
        added = bench.group("spark").cursors[1]
        assert (first_lost(added, 0, 1000), bench.group("others").cursors[1].losses) == (-1, None)
        bench.crash_and_restart()
    purge(bench)
    for _ in range(2):
        assert first_lost(bench.group("spark").cursors[1], 0, 1000) == 0
        bench.crash_and_restart()


@pytest.mark.parametrize("how", [consume, seek])
def test_a_value_of_a_compacted_queue_that_stays_is_not_lost_when_it_is_replaced(
    how: Callable[[EngineUnderTest], None], make: MakeEngine
) -> None:
    bench = make(compacted=True, message_ttl=0.0)
    bench.group("spark")
    for key in (b"a", b"b", b"c"):
        bench.publish(b"old", key=key)
    tell(bench, 1)
    how(bench)
    bench.publish(b"new", key=b"b")
    for _ in range(2):
        assert lost(bench, 1) == -1
        bench.crash_and_restart()
    purge(bench)
    for _ in range(2):
        assert lost(bench, 1) == 3, "what is purged is gone"
        bench.crash_and_restart()


def test_losses_are_known_when_only_a_snapshot_is_left_of_them() -> None:
    bench = EngineUnderTest(MemoryKeeper(segment_bytes=2000, snapshot_bytes=1500))
    reader(bench)
    purge(bench)
    for _ in range(200):
        bench.publish(b"x" * 200)
        bench.advance(seconds=1)
    bench.crash_and_restart()
    assert lost(bench, 4) == 4
    assert lost(bench, 8) == -1
    bench.runner.close()


def test_ranges_are_those_that_were_lost() -> None:
    draw = random.Random(7)
    losses, told, gone = Losses(0), 0, set[int]()
    for _ in range(3000):
        if draw.random() < 0.02:
            told += draw.randrange(5)
            losses.tell(told)
        else:
            start = told + draw.randrange(-3, 300)
            end = start + draw.randrange(4)
            losses.lose(start, end)
            gone.update(range(max(start, told), end))
        gone = {seq for seq in gone if seq >= told}
        ranges = losses.ranges()
        assert {seq for start, end in ranges for seq in range(start, end)} == gone
        assert all(one[1] < other[0] for one, other in pairwise(ranges))


def test_there_are_never_too_many_ranges() -> None:
    losses = Losses(0)
    for nth in range(MOST_RANGES + 500):
        losses.lose(10_000 - 3 * nth, 10_001 - 3 * nth)
    for nth in range(500):
        losses.lose(20_000 + 3 * nth, 20_001 + 3 * nth)
    ranges = losses.ranges()
    assert len(ranges) == MOST_RANGES
    assert (ranges[0][0], ranges[-1][1]) == (10_000 - 3 * (MOST_RANGES + 499), 20_000 + 3 * 499 + 1)
