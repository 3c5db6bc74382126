"""Lost ranges of bulk readers: exact, persistent, and distinct from gaps that are no loss."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from sluice.queues.bulk.bulk_reading import first_lost
from sluice.queues.model.containers.lost_ranges import MAX_RANGES, LostRanges
from sluice.queues.model.queue_rules import DROP_OLDEST
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, MemoryBackend


def fill(under_test: EngineUnderTest, first: int, end: int) -> None:
    for nth in range(first, end):
        under_test.publish(b"%d" % nth)


def report_progress(under_test: EngineUnderTest, end: int, group: str = "spark") -> None:
    assert under_test.engine.bulk_progress.settle_range(
        under_test.group(group).cursors[0], end, 1000
    )
    under_test.run_until_idle()


def lost_ranges(
    under_test: EngineUnderTest, start: int, end: int = 1000, group: str = "spark"
) -> int:
    return int(first_lost(under_test.group(group).cursors[0], start, end))


def start_reader(under_test: EngineUnderTest) -> None:
    """Publish eight messages, of which the group has settled four."""
    under_test.group("spark")
    fill(under_test, 0, 8)
    report_progress(under_test, 4)
    assert lost_ranges(under_test, 4) == -1


def purge(under_test: EngineUnderTest) -> None:
    under_test.engine.removal.purge_queue(under_test.queue())


def consume(under_test: EngineUnderTest) -> None:
    worker = under_test.worker(group="spark")
    worker.ack_all()
    worker.leave()


def reject(under_test: EngineUnderTest) -> None:
    worker = under_test.worker(group="spark", prefetch=1)
    worker.reject(worker.lease())
    worker.leave()


def seek(under_test: EngineUnderTest) -> None:
    under_test.seek("latest", "spark")


def report_further_progress(under_test: EngineUnderTest) -> None:
    report_progress(under_test, 8)


@pytest.mark.parametrize("settle", [purge, consume, reject, seek, report_further_progress])
def test_messages_settled_by_consumers_are_lost_to_a_bulk_reader(
    settle: Callable[[EngineUnderTest], None], engine: EngineUnderTest
) -> None:
    start_reader(engine)
    settle(engine)
    engine.run_until_idle()
    assert lost_ranges(engine, 4) == 4
    engine.crash_and_restart()
    assert lost_ranges(engine, 4) == 4
    fill(engine, 8, 10)
    assert lost_ranges(engine, 8) == -1
    report_progress(engine, 8)
    assert lost_ranges(engine, 8) == -1, "a reader that goes on has lost no more"
    engine.verify()


def test_evicted_and_expired_messages_are_lost(make_engine: MakeEngine) -> None:
    engine = make_engine(max_depth=8, overflow=DROP_OLDEST)
    engine.group("spark")
    fill(engine, 0, 8)
    report_progress(engine, 2)
    fill(engine, 8, 12)
    assert lost_ranges(engine, 2) == 2
    report_progress(engine, 4)
    assert lost_ranges(engine, 4) == -1
    engine.publish(b"late", ttl=5)
    engine.advance(seconds=10)
    assert lost_ranges(engine, 5) == 12
    assert lost_ranges(engine, 5, 12) == -1


def test_messages_stored_for_another_group_can_be_read_and_are_not_lost(
    engine: EngineUnderTest,
) -> None:
    engine.group("others")
    start_reader(engine)
    engine.seek("latest", "spark")
    assert lost_ranges(engine, 0) == -1
    report_progress(engine, 8, "others")
    assert lost_ranges(engine, 4) == 4
    assert lost_ranges(engine, 0) == 0


def test_gaps_not_meant_for_the_group_are_no_loss(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    fill(engine, 0, 6)
    for nth, delivery in enumerate(worker.lease_all()):
        if nth in (1, 3):
            worker.ack(delivery)
        elif nth == 4:
            worker.reject(delivery)
    report_progress(engine, 0)
    assert lost_ranges(engine, 0) == -1, "it begins with the stored messages"
    report_progress(engine, 6)
    [dead_letter] = engine.dead_letter_records()
    assert engine.redrive(dead_letter)
    engine.run_until_idle()
    assert worker.lease().payload == b"4"
    engine.crash_and_restart()
    assert lost_ranges(engine, 6) == -1
    purge(engine)
    fill(engine, 7, 8)
    assert lost_ranges(engine, 6) == -1, "the redriven message was for the other group only"


def test_reader_that_restarts_forgets_earlier_losses(engine: EngineUnderTest) -> None:
    start_reader(engine)
    purge(engine)
    fill(engine, 8, 10)
    engine.seek("earliest", "spark")
    engine.engine.bulk_progress.start_tracking(engine.group("spark").cursors[0], 2)
    engine.run_until_idle()
    assert lost_ranges(engine, 2) == -1
    engine.crash_and_restart()
    assert lost_ranges(engine, 2) == -1
    purge(engine)
    assert lost_ranges(engine, 2) == 8


def test_deletions_before_the_first_progress_of_a_reader_are_no_loss(
    engine: EngineUnderTest,
) -> None:
    """The reader has its own position in a group that consumers have moved."""
    engine.group("spark")
    fill(engine, 0, 8)
    consume(engine)
    report_progress(engine, 4)
    assert lost_ranges(engine, 4) == -1
    fill(engine, 8, 9)
    purge(engine)
    assert lost_ranges(engine, 4) == 8
    engine.crash_and_restart()
    assert lost_ranges(engine, 4) == 8


def test_added_partition_is_tracked_from_its_start(make_engine: MakeEngine) -> None:
    under_test = make_engine(partitions=1)
    under_test.group("others")
    start_reader(under_test)
    under_test.reconfigure(partitions=2)
    for nth in range(40):
        under_test.publish(b"%d" % nth, key=b"%d" % nth)
    for _ in range(2):
        added = under_test.group("spark").cursors[1]
        assert (first_lost(added, 0, 1000), under_test.group("others").cursors[1].lost_ranges) == (
            -1,
            None,
        )
        under_test.crash_and_restart()
    purge(under_test)
    for _ in range(2):
        assert first_lost(under_test.group("spark").cursors[1], 0, 1000) == 0
        under_test.crash_and_restart()


@pytest.mark.parametrize("settle", [consume, seek])
def test_value_of_a_compacted_queue_is_not_lost_when_replaced(
    settle: Callable[[EngineUnderTest], None], make_engine: MakeEngine
) -> None:
    under_test = make_engine(is_compacted=True, message_ttl=0.0)
    under_test.group("spark")
    for key in (b"a", b"b", b"c"):
        under_test.publish(b"old", key=key)
    report_progress(under_test, 1)
    settle(under_test)
    under_test.publish(b"new", key=b"b")
    for _ in range(2):
        assert lost_ranges(under_test, 1) == -1
        under_test.crash_and_restart()
    purge(under_test)
    for _ in range(2):
        assert lost_ranges(under_test, 1) == 3, "what is purged is lost"
        under_test.crash_and_restart()


def test_lost_ranges_are_known_from_a_snapshot_alone() -> None:
    under_test = EngineUnderTest(MemoryBackend(segment_bytes=2000, snapshot_bytes=1500))
    start_reader(under_test)
    purge(under_test)
    for _ in range(200):
        under_test.publish(b"x" * 200)
        under_test.advance(seconds=1)
    under_test.crash_and_restart()
    assert lost_ranges(under_test, 4) == 4
    assert lost_ranges(under_test, 8) == -1
    under_test.commit_loop.close()


def test_lost_ranges_are_exact() -> None:
    draw = random.Random(7)
    tracked, reported, lost = LostRanges(0), 0, set[int]()
    for _ in range(3000):
        if draw.random() < 0.02:
            reported += draw.randrange(5)
            tracked.acknowledge(reported)
        else:
            start = reported + draw.randrange(-3, 300)
            end = start + draw.randrange(4)
            tracked.add(start, end)
            lost.update(range(max(start, reported), end))
        lost = {seq for seq in lost if seq >= reported}
        ranges = tracked.ranges()
        assert {seq for start, end in ranges for seq in range(start, end)} == lost
        assert all(one[1] < other[0] for one, other in pairwise(ranges))


def test_number_of_lost_ranges_is_bounded() -> None:
    tracked = LostRanges(0)
    for nth in range(MAX_RANGES + 500):
        tracked.add(10_000 - 3 * nth, 10_001 - 3 * nth)
    for nth in range(500):
        tracked.add(20_000 + 3 * nth, 20_001 + 3 * nth)
    ranges = tracked.ranges()
    assert len(ranges) == MAX_RANGES
    assert (ranges[0][0], ranges[-1][1]) == (10_000 - 3 * (MAX_RANGES + 499), 20_000 + 3 * 499 + 1)
