"""Batches that count once, progress by sequences, and where messages are; with crashes in the midst of it."""

from __future__ import annotations

import random

import pytest

from sluice.errors import QueueFull
from sluice.message import Message
from sluice.queues.batches import (
    FORGET_SECONDS,
    Places,
    append_some,
    check_room,
    collect,
    note_batch,
    settle_some,
)
from sluice.queues.engine import Engine
from sluice.queues.rules import DEAD_LETTER, DROP_OLDEST
from sluice.store.embedded import EmbeddedStore
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, ListenedStore, Loop, MemoryKeeper, Plain
from tests.store.disk import Disk

ROWS = 40


def rows(count: int = ROWS, key: bytes = b"") -> list[Message]:
    return [Message(b"row %d" % nth, b"", key) for nth in range(count)]


def begin(bench: EngineUnderTest, batch: int, count: int = ROWS) -> None:
    """The fence and the first half, in a frame that is held over several turns."""
    bench.engine.now = bench.loop.now
    bench.runner.hold()
    note_batch(bench.engine, "app", batch, count)
    append_some(bench.engine, bench.engine.ensure("tasks"), rows(count), 0, count // 2)
    bench.settle_down()


def finish(bench: EngineUnderTest, count: int = ROWS) -> list[bool]:
    """The rest; the answer is in the list once the store has it all."""
    answered: list[bool] = []
    append_some(bench.engine, bench.engine.ensure("tasks"), rows(count), count // 2, count)
    bench.runner.release()
    bench.runner.when_kept(lambda: answered.append(True))
    bench.settle_down()
    return answered


def commit(bench: EngineUnderTest, batch: int, count: int = ROWS) -> list[bool]:
    begin(bench, batch, count)
    return finish(bench, count)


def count_rows(bench: EngineUnderTest) -> int:
    queue = bench.engine.queues.get("tasks")
    found = 0
    for partition in queue.partitions if queue is not None else []:
        seq = int(partition.first_live(0))
        while seq < partition.next:
            found += bench.read(partition, seq).payload.startswith(b"row")
            seq = int(partition.first_live(seq + 1))
    return found


def last(bench: EngineUnderTest, app: str = "app") -> int:
    fence = bench.engine.batches.last(app)
    return -1 if fence is None else int(fence.batch)


def test_a_batch_is_seen_as_a_whole_and_not_before_it_is_kept(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    begin(engine, 7)
    engine.publish(b"from somebody else")
    assert worker.payloads() == []
    assert engine.author.receipts == []
    assert finish(engine) == [True]
    assert len(worker.payloads()) == ROWS + 1
    assert len(engine.author.receipts) == 1
    assert last(engine) == 7


def test_the_last_batch_of_an_application_is_known_after_a_restart(engine: EngineUnderTest) -> None:
    commit(engine, 7)
    engine.crash_and_restart()
    assert last(engine) == 7
    assert count_rows(engine) == ROWS


def test_it_is_known_when_only_a_snapshot_is_left_of_it(make: MakeEngine) -> None:
    engine = make()
    worker = engine.worker()
    commit(engine, 7)
    worker.ack_all()
    for _ in range(200):
        engine.publish(b"x" * 20_000)
        worker.ack_all()
        engine.advance(seconds=2)
    assert min(engine.store.segment_sizes()) > 1, "the segment of the batch should be gone"
    engine.crash_and_restart()
    assert last(engine) == 7


def test_an_application_that_has_sent_nothing_for_long_is_forgotten(engine: EngineUnderTest) -> None:
    commit(engine, 7)
    engine.advance(seconds=FORGET_SECONDS / 2)
    note_batch(engine.engine, "other", 3, 0)
    engine.advance(seconds=FORGET_SECONDS / 2 + 1)
    engine.engine.batches.forget_old(engine.loop.now)
    assert last(engine) == -1
    assert last(engine, "other") == 3


def test_ids_within_the_dedup_window_are_stored_once(engine: EngineUnderTest) -> None:
    engine.publish(b"first", message_id=b"a")
    queue = engine.queue()
    messages = [
        Message(b"again", b"", b"", b"a"),
        Message(b"new", b"", b"", b"b"),
        Message(b"new", b"", b"", b"b"),
    ]
    assert append_some(engine.engine, queue, messages, 0, 3) == 1
    assert engine.depth() == 2
    assert queue.duplicates == 2


def test_a_full_queue_refuses_the_whole_batch(make: MakeEngine) -> None:
    engine = make(max_depth=ROWS)
    engine.publish(b"one")
    with pytest.raises(QueueFull):
        check_room(engine.queue(), ROWS)
    check_room(engine.queue(), ROWS - 1)


def test_a_queue_that_drops_its_oldest_takes_a_batch_of_its_own_size(make: MakeEngine) -> None:
    engine = make(max_depth=ROWS, overflow=DROP_OLDEST)
    engine.publish(b"old")
    check_room(engine.queue(), ROWS)
    with pytest.raises(QueueFull):
        check_room(engine.queue(), ROWS + 1)
    commit(engine, 1)
    assert engine.depth() == ROWS
    assert count_rows(engine) == ROWS


def test_what_a_queue_has_no_room_for_goes_to_the_dead_letters_if_it_says_so(make: MakeEngine) -> None:
    engine = make(max_depth=10, overflow=DEAD_LETTER)
    check_room(engine.queue(), ROWS)
    commit(engine, 1)
    assert engine.depth() == 10
    assert len(engine.dead_letters()) == ROWS - 10


# ---- crashes


def check_whole(bench: EngineUnderTest, answered: list[bool], earlier: int) -> bool:
    """All of the last batch is there or nothing of it, and the fence says which."""
    found = count_rows(bench)
    assert found in (earlier, earlier + ROWS), found
    is_there = found == earlier + ROWS
    assert last(bench) == (2 if is_there else 1)
    if answered:
        assert is_there
    bench.verify()
    return is_there


@pytest.mark.parametrize("kept", range(8))
def test_a_power_cut_leaves_all_of_a_batch_or_nothing(kept: int) -> None:
    keeper = MemoryKeeper(segment_bytes=2000, snapshot_bytes=1500)
    bench = EngineUnderTest(keeper, partitions=3)
    commit(bench, 1)
    assert keeper.store is not None
    keeper.store.hold()
    for nth in range(3):
        bench.publish(b"before %d" % nth)
        keeper.store.release(nth % 2)
        bench.settle_down()
    begin(bench, 2)
    bench.publish(b"meanwhile")
    answered = finish(bench)
    keeper.store.release(kept // 4)
    bench.settle_down()
    keeper.cut_power(keep_unsynced=kept % 4)
    bench.start_again()
    check_whole(bench, answered, ROWS)
    bench.runner.close()


class DiskKeeper(Plain):
    """The embedded store on a disk whose power is cut."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.failures: list[Exception] = []
        self.store: ListenedStore | None = None

    def open(self, loop: Loop, engine: Engine) -> ListenedStore:
        store = EmbeddedStore(
            "/disk",
            loop.call_soon,
            self.failures.append,
            segment_bytes=4000,
            snapshot_bytes=3000,
            files=self.disk,
        )
        self.store = ListenedStore(store)
        return self.store

    def crash(self) -> None:
        assert self.store is not None
        self.store.close()

    def is_busy(self) -> bool:
        assert self.store is not None
        return self.store.owed > 0 and not self.failures


def test_a_power_cut_at_any_change_to_any_file_leaves_all_of_a_batch_or_nothing() -> None:
    seen: set[bool] = set()
    cut = 0
    while True:
        disk = Disk(random.Random(cut))
        keeper = DiskKeeper(disk)
        bench = EngineUnderTest(keeper, partitions=3)
        commit(bench, 1)
        disk.cut_after(cut)
        bench.publish(b"before")
        begin(bench, 2)
        bench.publish(b"meanwhile")
        answered = finish(bench)
        for nth in range(30):
            bench.publish(b"after %d" % nth)
        failed = bool(keeper.failures)
        keeper.crash()
        if not failed:
            break
        disk.cut_after(None)
        disk.reboot()
        keeper.failures.clear()
        bench.start_again()
        seen.add(check_whole(bench, answered, ROWS))
        bench.runner.close()
        cut += 1
    assert seen == {True, False}
    assert cut > 10


# ---- progress


def advance(bench: EngineUnderTest, end: int, group: str = "spark") -> int:
    """How many portions it took."""
    cursor = bench.group(group).cursors[0]
    portions = 1
    while not settle_some(bench.engine, cursor, end, 16):
        bench.settle_down()
        portions += 1
    bench.settle_down()
    return portions


def test_a_group_is_done_with_everything_below_a_sequence_in_portions(engine: EngineUnderTest) -> None:
    for nth in range(100):
        engine.publish(b"%d" % nth)
    group = engine.group("spark")
    assert advance(engine, 60) > 3
    assert group.cursors[0].floor == 60
    assert engine.depth() == 40
    assert engine.ledger("spark").acked == 60
    assert advance(engine, 30) == 1, "never backwards"
    assert group.cursors[0].floor == 60
    engine.crash_and_restart()
    assert engine.group("spark").cursors[0].floor == 60
    assert engine.depth() == 40


def test_what_failed_and_waits_for_its_retry_is_settled_too(engine: EngineUnderTest) -> None:
    for nth in range(5):
        engine.publish(b"%d" % nth, key=b"k")
    worker = engine.worker(group="spark")
    worker.nack(worker.lease())
    worker.leave()
    advance(engine, 3)
    engine.advance(minutes=10)
    assert engine.worker(group="spark").ack_all() == [b"3", b"4"]


def test_progress_passes_over_what_is_gone_already(engine: EngineUnderTest) -> None:
    engine.publish(b"kept")
    engine.group("spark")
    for nth in range(5):
        engine.publish(b"%d" % nth, ttl=5)
    engine.publish(b"last")
    engine.advance(seconds=10)
    assert advance(engine, 6) == 1
    assert engine.group("spark").cursors[0].floor == 6


def test_another_group_keeps_what_one_is_done_with(engine: EngineUnderTest) -> None:
    worker = engine.worker(group="workers", prefetch=0)
    for nth in range(5):
        engine.publish(b"%d" % nth)
    advance(engine, 5)
    assert engine.depth() == 5
    worker.prefetch = 10
    engine.engine.feed(worker)
    assert len(worker.ack_all()) == 5
    assert engine.depth() == 0


# ---- places


def places_of(
    bench: EngineUnderTest, start: int, end: int, most: int = 10_000, most_bytes: int = 1 << 40
) -> list[int]:
    partition = bench.queue().partitions[0]
    found: list[int] = []
    while start < end:
        places = Places()
        reached = int(collect(partition, start, end, 0, most, most_bytes, places))
        data = places.value()
        for at in range(0, len(data), 20):
            seq = int.from_bytes(data[at : at + 8], "little")
            assert int.from_bytes(data[at + 8 : at + 16], "little") == partition.address(seq)
            found.append(seq)
        assert reached > start
        start = reached
    return found


def test_places_are_told_in_portions_and_without_gaps(engine: EngineUnderTest) -> None:
    for nth in range(1300):
        engine.send(b"%d" % nth)
    engine.settle_down()
    assert places_of(engine, 0, 1300) == list(range(1300))
    assert places_of(engine, 511, 1025, most=100) == list(range(511, 1025))
    assert places_of(engine, 5, 9, most_bytes=1) == [5, 6, 7, 8]
    advance(engine, 1030)
    assert places_of(engine, 0, 1300) == list(range(1030, 1300))
    assert places_of(engine, 0, 1000) == []
