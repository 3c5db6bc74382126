"""Batches that count once, progress by sequences, and where messages are; with crashes in the midst of it."""

from __future__ import annotations

import random

import pytest

from sluice.errors import PartitionFull, QueueFull
from sluice.message import Message
from sluice.queues.bulk.bulk_ops import (
    FORGET_ONCE_SECONDS,
    FORGET_SECONDS,
    Load,
    Places,
    append_some,
    collect,
    note_batch,
    settle_some,
)
from sluice.queues.engine import Engine
from sluice.queues.model.queue_rules import DEAD_LETTER, DROP_OLDEST, REJECT
from sluice.store.embedded import EmbeddedStore
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, ListenedStore, Loop, MemoryKeeper, Plain
from tests.store.embedded.simulated_disk import Disk, check_power_cut

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


def test_an_application_of_one_batch_is_forgotten_after_a_day(engine: EngineUnderTest) -> None:
    note_batch(engine.engine, "once/import", 0, 0)
    note_batch(engine.engine, "import", 0, 0)
    engine.advance(seconds=FORGET_ONCE_SECONDS - 1)
    engine.engine.batches.forget_old(engine.loop.now)
    assert (last(engine, "once/import"), last(engine, "import")) == (0, 0)
    engine.advance(seconds=2)
    engine.engine.batches.forget_old(engine.loop.now)
    assert (last(engine, "once/import"), last(engine, "import")) == (-1, 0)


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


def check_room(bench: EngineUnderTest, messages: list[Message]) -> None:
    load = Load(bench.engine, bench.queue(), len(messages))
    half = len(messages) // 2
    if load.looks:
        load.add(messages, 0, half)
        load.add(messages, half, len(messages))
    load.check()


def test_a_full_queue_refuses_the_whole_batch(make: MakeEngine) -> None:
    engine = make(max_depth=ROWS)
    engine.publish(b"one")
    with pytest.raises(QueueFull):
        check_room(engine, rows())
    check_room(engine, rows(ROWS - 1))


def test_a_queue_that_drops_its_oldest_takes_a_batch_of_its_own_size(make: MakeEngine) -> None:
    engine = make(max_depth=ROWS, overflow=DROP_OLDEST)
    engine.publish(b"old")
    check_room(engine, rows())
    with pytest.raises(QueueFull):
        check_room(engine, rows(ROWS + 1))
    commit(engine, 1)
    assert engine.depth() == ROWS
    assert count_rows(engine) == ROWS


def test_what_a_queue_has_no_room_for_goes_to_the_dead_letters_if_it_says_so(make: MakeEngine) -> None:
    engine = make(max_depth=10, overflow=DEAD_LETTER)
    check_room(engine, rows())
    commit(engine, 1)
    assert engine.depth() == 10
    assert len(engine.dead_letters()) == ROWS - 10


# ---- full compacted queues


def pairs(*told: str) -> list[Message]:
    """`a1` is the value 1 of key a; `a` alone ends it."""
    return [Message(one[1:].encode(), b"", one[:1].encode()) for one in told]


def append_all(bench: EngineUnderTest, messages: list[Message]) -> None:
    bench.engine.now = bench.loop.now
    append_some(bench.engine, bench.queue(), messages, 0, len(messages))
    bench.settle_down()


def make_full(make: MakeEngine, overflow: int) -> EngineUnderTest:
    engine = make(compacted=True, message_ttl=0.0, max_depth=4, overflow=overflow)
    for key in (b"a", b"b", b"c", b"d"):
        engine.publish(b"0", key=key)
    return engine


@pytest.mark.parametrize("overflow", [REJECT, DROP_OLDEST, DEAD_LETTER])
def test_rows_of_keys_that_are_there_take_their_place_in_a_full_queue(
    make: MakeEngine, overflow: int
) -> None:
    engine = make_full(make, overflow)
    brought = pairs("d1", "d2", "b1", "d3")
    check_room(engine, brought)
    append_all(engine, brought)
    assert engine.depth() == 4
    assert engine.worker().ack_all() == [b"0", b"0", b"1", b"3"]
    assert engine.dead_letters() == []


@pytest.mark.parametrize("overflow", [REJECT, DROP_OLDEST, DEAD_LETTER])
@pytest.mark.parametrize("is_heard", [False, True])
def test_rows_end_keys_of_a_full_queue(make: MakeEngine, overflow: int, is_heard: bool) -> None:
    engine = make_full(make, overflow)
    worker = engine.worker() if is_heard else None
    if worker is not None:
        assert len(worker.ack_all()) == 4
    check_room(engine, pairs("d", "x"))
    append_all(engine, pairs("d", "x"))
    if worker is not None:
        assert worker.ack_all() == [b""]
    assert engine.depth() == 3
    assert engine.dead_letters() == []


@pytest.mark.parametrize(
    ("brought", "new"),
    [
        (("a1", "b1", "a2", "c1", "d1", "d2"), 0),
        (("e1", "e2", "e3", "a1", "b1"), 1),
        (("e1", "f1", "e2", "f2", "f3"), 2),
        (("a", "e1", "f1", "e2", "e3"), 1),
        (("e1", "a", "e2", "e3", "e4"), 1),
        (("x", "y", "z", "x", "y"), 0),
    ],
)
def test_only_keys_that_are_new_need_room(make: MakeEngine, brought: tuple[str, ...], new: int) -> None:
    engine = make_full(make, REJECT)
    if not new:
        check_room(engine, pairs(*brought))
        return
    with pytest.raises(QueueFull, match=rf"has room for 0 keys, and the batch brings {new}\."):
        check_room(engine, pairs(*brought))
    engine.queue().rules.max_depth += new
    check_room(engine, pairs(*brought))
    append_all(engine, pairs(*brought))
    assert engine.queue().refused == 1
    assert engine.depth() <= 4 + new


def test_while_groups_have_not_heard_of_the_end_of_a_key_its_place_is_taken(make: MakeEngine) -> None:
    engine = make_full(make, REJECT)
    check_room(engine, pairs("a", "e1"))
    engine.group("slow")
    check_room(engine, pairs("a", "a1"))
    with pytest.raises(QueueFull, match="brings 1"):
        check_room(engine, pairs("a", "e1"))


def test_of_a_batch_with_more_keys_than_a_queue_can_have_none_pushes_out_another(make: MakeEngine) -> None:
    engine = make_full(make, DROP_OLDEST)
    check_room(engine, pairs("e1", "f1", "e2", "g1", "h1", "h2"))
    with pytest.raises(QueueFull, match="room for 4 keys, and the batch brings 5"):
        check_room(engine, pairs("e1", "f1", "g1", "h1", "i1"))


# ---- partitions that may not get longer


def test_a_batch_goes_only_into_partitions_that_may_become_so_long(make: MakeEngine) -> None:
    engine = make(partitions=2)
    engine.engine.max_length = 5
    for _ in range(3):
        engine.publish(b"old", key=b"k")
    check_room(engine, rows(2, b"k"))
    with pytest.raises(
        PartitionFull, match=r"room for 2 messages, because .* may hold 5, and the batch brings 3"
    ):
        check_room(engine, rows(3, b"k"))
    check_room(engine, rows(4))
    with pytest.raises(PartitionFull):
        check_room(engine, rows(5))


def test_what_is_kept_for_its_retention_makes_room_for_a_batch(make: MakeEngine) -> None:
    engine = make(retention=3600.0)
    engine.engine.max_length = 5
    worker = engine.worker()
    for _ in range(5):
        engine.publish(b"old")
    worker.ack_all()
    engine.publish(b"waits")
    check_room(engine, rows(4))
    append_all(engine, rows(4))
    assert engine.queue().partitions[0].live == 5
    with pytest.raises(PartitionFull, match="room for 0"):
        check_room(engine, rows(1))


@pytest.mark.parametrize(("overflow", "length"), [(REJECT, 8), (DROP_OLDEST, 5), (DEAD_LETTER, 5)])
def test_a_batch_that_has_begun_is_appended_by_the_rules_of_its_queue(
    make: MakeEngine, overflow: int, length: int
) -> None:
    engine = make(overflow=overflow)
    engine.engine.max_length = 5
    for _ in range(4):
        engine.publish(b"old")
    append_all(engine, rows(4))
    assert engine.queue().partitions[0].live == length
    assert len(engine.dead_letters()) == (3 if overflow == DEAD_LETTER else 0)


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


@pytest.mark.parametrize("sync", [True, False], ids=["always", "interval"])
@pytest.mark.parametrize("kept", range(8))
def test_a_power_cut_leaves_all_of_a_batch_or_nothing(kept: int, sync: bool) -> None:
    keeper = MemoryKeeper(segment_bytes=2000, snapshot_bytes=1500)
    bench = EngineUnderTest(keeper, partitions=3, sync=sync)
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
            sync_seconds=1000.0,  # no sync but those that commits ask for
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


@pytest.mark.parametrize("sync", [True, False], ids=["always", "interval"])
def test_a_power_cut_at_any_change_to_any_file_leaves_all_of_a_batch_or_nothing(sync: bool) -> None:
    seen: set[bool] = set()
    cut = 0
    while True:
        disk = Disk(random.Random(cut))
        keeper = DiskKeeper(disk)
        bench = EngineUnderTest(keeper, partitions=3, sync=sync)
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
        check_power_cut(keeper.failures)
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
    engine.engine.set_prefetch(worker, 10)
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
