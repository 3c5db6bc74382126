"""Exactly-once batches, progress by sequences and locations of messages, also with crashes."""

from __future__ import annotations

import random

import pytest

from sluice.errors import PartitionFull, QueueFull
from sluice.message import Message
from sluice.queues.bulk.batches import FENCE_TTL_SECONDS, ONCE_FENCE_TTL_SECONDS
from sluice.queues.bulk.bulk_reading import MessageLocations, collect_locations
from sluice.queues.engine import Engine
from sluice.queues.model.queue_rules import DEAD_LETTER, DROP_OLDEST, REJECT_NEW
from sluice.store.embedded import EmbeddedStore
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest, Loop, MemoryBackend, PlainBackend, RecordingStore
from tests.store.embedded.simulated_disk import Disk, check_power_cut

ROWS = 40


def rows(count: int = ROWS, key: bytes = b"") -> list[Message]:
    return [Message(b"row %d" % nth, b"", key) for nth in range(count)]


def begin(under_test: EngineUnderTest, batch: int, count: int = ROWS) -> None:
    """Write the fence and the first half, in a frame that is held over several turns."""
    under_test.engine.now = under_test.loop.now
    under_test.commit_loop.hold_frame()
    under_test.engine.batches.write_batch_note("app", batch, count)
    under_test.engine.batches.append_range(
        under_test.engine.lifecycle.get_or_create_queue("tasks"),
        rows(count),
        0,
        count // 2,
    )
    under_test.run_until_idle()


def finish(under_test: EngineUnderTest, count: int = ROWS) -> list[bool]:
    """Write the rest; the returned list contains True once the store has all of it."""
    answered: list[bool] = []
    under_test.engine.batches.append_range(
        under_test.engine.lifecycle.get_or_create_queue("tasks"),
        rows(count),
        count // 2,
        count,
    )
    under_test.commit_loop.release_frame()
    under_test.commit_loop.after_commit(lambda: answered.append(True))
    under_test.run_until_idle()
    return answered


def commit(under_test: EngineUnderTest, batch: int, count: int = ROWS) -> list[bool]:
    begin(under_test, batch, count)
    return finish(under_test, count)


def count_rows(under_test: EngineUnderTest) -> int:
    queue = under_test.engine.queues.get("tasks")
    found = 0
    for partition in queue.partitions if queue is not None else []:
        seq = int(partition.first_live(0))
        while seq < partition.next_seq:
            found += under_test.read(partition, seq).payload.startswith(b"row")
            seq = int(partition.first_live(seq + 1))
    return found


def last(under_test: EngineUnderTest, app: str = "app") -> int:
    fence = under_test.engine.batches.fences.get(app)
    return -1 if fence is None else int(fence.batch)


def test_batch_becomes_visible_as_a_whole_after_commit(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    begin(engine, 7)
    engine.publish(b"from another client")
    assert worker.payloads() == []
    assert engine.publisher.receipts == []
    assert finish(engine) == [True]
    assert len(worker.payloads()) == ROWS + 1
    assert len(engine.publisher.receipts) == 1
    assert last(engine) == 7


def test_last_batch_of_an_application_is_known_after_a_restart(engine: EngineUnderTest) -> None:
    commit(engine, 7)
    engine.crash_and_restart()
    assert last(engine) == 7
    assert count_rows(engine) == ROWS


def test_last_batch_is_known_from_a_snapshot_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
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


def test_idle_application_is_forgotten(engine: EngineUnderTest) -> None:
    commit(engine, 7)
    engine.advance(seconds=FENCE_TTL_SECONDS / 2)
    engine.engine.batches.write_batch_note("other", 3, 0)
    engine.advance(seconds=FENCE_TTL_SECONDS / 2 + 1)
    engine.engine.batches.fences.drop_expired(engine.loop.now)
    assert last(engine) == -1
    assert last(engine, "other") == 3


def test_application_of_one_batch_is_forgotten_after_a_day(engine: EngineUnderTest) -> None:
    engine.engine.batches.write_batch_note("once/import", 0, 0)
    engine.engine.batches.write_batch_note("import", 0, 0)
    engine.advance(seconds=ONCE_FENCE_TTL_SECONDS - 1)
    engine.engine.batches.fences.drop_expired(engine.loop.now)
    assert (last(engine, "once/import"), last(engine, "import")) == (0, 0)
    engine.advance(seconds=2)
    engine.engine.batches.fences.drop_expired(engine.loop.now)
    assert (last(engine, "once/import"), last(engine, "import")) == (-1, 0)


def test_ids_within_the_dedup_window_are_stored_once(engine: EngineUnderTest) -> None:
    engine.publish(b"first", message_id=b"a")
    queue = engine.queue()
    messages = [
        Message(b"again", b"", b"", b"a"),
        Message(b"new", b"", b"", b"b"),
        Message(b"new", b"", b"", b"b"),
    ]
    assert engine.engine.batches.append_range(queue, messages, 0, 3) == 1
    assert engine.depth() == 2
    assert queue.duplicates == 2


def check_capacity(under_test: EngineUnderTest, messages: list[Message]) -> None:
    admission = under_test.engine.batches.begin(under_test.queue(), len(messages))
    half = len(messages) // 2
    if admission.needs_messages:
        admission.add(messages, 0, half)
        admission.add(messages, half, len(messages))
    admission.check()


def test_full_queue_refuses_the_whole_batch(make_engine: MakeEngine) -> None:
    engine = make_engine(max_depth=ROWS)
    engine.publish(b"one")
    with pytest.raises(QueueFull):
        check_capacity(engine, rows())
    check_capacity(engine, rows(ROWS - 1))


def test_queue_with_drop_oldest_accepts_a_batch_of_its_own_size(make_engine: MakeEngine) -> None:
    engine = make_engine(max_depth=ROWS, overflow=DROP_OLDEST)
    engine.publish(b"old")
    check_capacity(engine, rows())
    with pytest.raises(QueueFull):
        check_capacity(engine, rows(ROWS + 1))
    commit(engine, 1)
    assert engine.depth() == ROWS
    assert count_rows(engine) == ROWS


def test_overflow_of_a_batch_goes_to_the_dead_letters_if_configured(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_depth=10, overflow=DEAD_LETTER)
    check_capacity(engine, rows())
    commit(engine, 1)
    assert engine.depth() == 10
    assert len(engine.dead_letters()) == ROWS - 10


# ---- full compacted queues


def pairs(*specs: str) -> list[Message]:
    """Return messages: `a1` is the value 1 of key a; `a` alone is its tombstone."""
    return [Message(one[1:].encode(), b"", one[:1].encode()) for one in specs]


def append_all(under_test: EngineUnderTest, messages: list[Message]) -> None:
    under_test.engine.now = under_test.loop.now
    under_test.engine.batches.append_range(under_test.queue(), messages, 0, len(messages))
    under_test.run_until_idle()


def make_full(make_engine: MakeEngine, overflow: int) -> EngineUnderTest:
    engine = make_engine(is_compacted=True, message_ttl=0.0, max_depth=4, overflow=overflow)
    for key in (b"a", b"b", b"c", b"d"):
        engine.publish(b"0", key=key)
    return engine


@pytest.mark.parametrize("overflow", [REJECT_NEW, DROP_OLDEST, DEAD_LETTER])
def test_rows_of_existing_keys_replace_their_values_in_a_full_queue(
    make_engine: MakeEngine, overflow: int
) -> None:
    engine = make_full(make_engine, overflow)
    batch = pairs("d1", "d2", "b1", "d3")
    check_capacity(engine, batch)
    append_all(engine, batch)
    assert engine.depth() == 4
    assert engine.worker().ack_all() == [b"0", b"0", b"1", b"3"]
    assert engine.dead_letters() == []


@pytest.mark.parametrize("overflow", [REJECT_NEW, DROP_OLDEST, DEAD_LETTER])
@pytest.mark.parametrize("has_worker", [False, True])
def test_tombstone_rows_delete_keys_of_a_full_queue(
    make_engine: MakeEngine, overflow: int, has_worker: bool
) -> None:
    engine = make_full(make_engine, overflow)
    worker = engine.worker() if has_worker else None
    if worker is not None:
        assert len(worker.ack_all()) == 4
    check_capacity(engine, pairs("d", "x"))
    append_all(engine, pairs("d", "x"))
    if worker is not None:
        assert worker.ack_all() == [b""]
    assert engine.depth() == 3
    assert engine.dead_letters() == []


@pytest.mark.parametrize(
    ("batch", "new"),
    [
        (("a1", "b1", "a2", "c1", "d1", "d2"), 0),
        (("e1", "e2", "e3", "a1", "b1"), 1),
        (("e1", "f1", "e2", "f2", "f3"), 2),
        (("a", "e1", "f1", "e2", "e3"), 1),
        (("e1", "a", "e2", "e3", "e4"), 1),
        (("x", "y", "z", "x", "y"), 0),
    ],
)
def test_only_new_keys_need_capacity(
    make_engine: MakeEngine, batch: tuple[str, ...], new: int
) -> None:
    engine = make_full(make_engine, REJECT_NEW)
    if not new:
        check_capacity(engine, pairs(*batch))
        return
    with pytest.raises(QueueFull, match=rf"has space for 0 keys, and the batch has {new}\."):
        check_capacity(engine, pairs(*batch))
    engine.queue().rules.max_depth += new
    check_capacity(engine, pairs(*batch))
    append_all(engine, pairs(*batch))
    assert engine.queue().refused == 1
    assert engine.depth() <= 4 + new


def test_tombstone_occupies_capacity_until_every_group_has_settled_it(
    make_engine: MakeEngine,
) -> None:
    engine = make_full(make_engine, REJECT_NEW)
    check_capacity(engine, pairs("a", "e1"))
    engine.group("slow")
    check_capacity(engine, pairs("a", "a1"))
    with pytest.raises(QueueFull, match="the batch has 1"):
        check_capacity(engine, pairs("a", "e1"))


def test_batch_with_more_keys_than_capacity_evicts_no_other_key(make_engine: MakeEngine) -> None:
    engine = make_full(make_engine, DROP_OLDEST)
    check_capacity(engine, pairs("e1", "f1", "e2", "g1", "h1", "h2"))
    with pytest.raises(QueueFull, match="space for 4 keys, and the batch has 5"):
        check_capacity(engine, pairs("e1", "f1", "g1", "h1", "i1"))


# ---- partitions that may not get longer


def test_batch_is_refused_by_partitions_that_would_become_too_long(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=2)
    engine.engine.publishing.max_partition_length = 5
    for _ in range(3):
        engine.publish(b"old", key=b"k")
    check_capacity(engine, rows(2, b"k"))
    with pytest.raises(
        PartitionFull, match=r"space for 2 messages, because .* may hold 5, and the batch has 3"
    ):
        check_capacity(engine, rows(3, b"k"))
    check_capacity(engine, rows(4))
    with pytest.raises(PartitionFull):
        check_capacity(engine, rows(5))


def test_retained_settled_messages_make_room_for_a_batch(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=3600.0)
    engine.engine.publishing.max_partition_length = 5
    worker = engine.worker()
    for _ in range(5):
        engine.publish(b"old")
    worker.ack_all()
    engine.publish(b"waits")
    check_capacity(engine, rows(4))
    append_all(engine, rows(4))
    assert engine.queue().partitions[0].live_count == 5
    with pytest.raises(PartitionFull, match="space for 0"):
        check_capacity(engine, rows(1))


@pytest.mark.parametrize(
    ("overflow", "length"), [(REJECT_NEW, 8), (DROP_OLDEST, 5), (DEAD_LETTER, 5)]
)
def test_started_batch_is_appended_by_the_rules_of_its_queue(
    make_engine: MakeEngine, overflow: int, length: int
) -> None:
    engine = make_engine(overflow=overflow)
    engine.engine.publishing.max_partition_length = 5
    for _ in range(4):
        engine.publish(b"old")
    append_all(engine, rows(4))
    assert engine.queue().partitions[0].live_count == length
    assert len(engine.dead_letters()) == (3 if overflow == DEAD_LETTER else 0)


# ---- crashes


def check_atomic(under_test: EngineUnderTest, answered: list[bool], rows_before: int) -> bool:
    """Check that all or nothing of the last batch is stored, and that the fence agrees."""
    found = count_rows(under_test)
    assert found in (rows_before, rows_before + ROWS), found
    is_stored = found == rows_before + ROWS
    assert last(under_test) == (2 if is_stored else 1)
    if answered:
        assert is_stored
    under_test.verify()
    return is_stored


@pytest.mark.parametrize("sync", [True, False], ids=["always", "interval"])
@pytest.mark.parametrize("committed", range(8))
def test_power_cut_leaves_all_of_a_batch_or_nothing(committed: int, sync: bool) -> None:
    backend = MemoryBackend(segment_bytes=2000, snapshot_bytes=1500)
    under_test = EngineUnderTest(backend, partitions=3, sync=sync)
    commit(under_test, 1)
    assert backend.store is not None
    backend.store.hold()
    for nth in range(3):
        under_test.publish(b"before %d" % nth)
        backend.store.release(nth % 2)
        under_test.run_until_idle()
    begin(under_test, 2)
    under_test.publish(b"meanwhile")
    answered = finish(under_test)
    backend.store.release(committed // 4)
    under_test.run_until_idle()
    backend.cut_power(keep_unsynced=committed % 4)
    under_test.reopen()
    check_atomic(under_test, answered, ROWS)
    under_test.commit_loop.close()


class DiskBackend(PlainBackend):
    """The embedded store on a disk whose power is cut."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.failures: list[Exception] = []
        self.store: RecordingStore | None = None

    def open(self, loop: Loop, engine: Engine) -> RecordingStore:
        store = EmbeddedStore(
            "/disk",
            loop.call_soon,
            self.failures.append,
            segment_bytes=4000,
            snapshot_bytes=3000,
            # no sync except those that commits request
            sync_seconds=1000.0,
            files=self.disk,
        )
        self.store = RecordingStore(store)
        return self.store

    def crash(self) -> None:
        assert self.store is not None
        self.store.close()

    def is_busy(self) -> bool:
        assert self.store is not None
        return self.store.pending > 0 and not self.failures


@pytest.mark.parametrize("sync", [True, False], ids=["always", "interval"])
def test_power_cut_at_any_file_change_leaves_all_of_a_batch_or_nothing(sync: bool) -> None:
    seen: set[bool] = set()
    cut = 0
    while True:
        disk = Disk(random.Random(cut))
        backend = DiskBackend(disk)
        under_test = EngineUnderTest(backend, partitions=3, sync=sync)
        commit(under_test, 1)
        disk.cut_after(cut)
        under_test.publish(b"before")
        begin(under_test, 2)
        under_test.publish(b"meanwhile")
        answered = finish(under_test)
        for nth in range(30):
            under_test.publish(b"after %d" % nth)
        failed = bool(backend.failures)
        backend.crash()
        check_power_cut(backend.failures)
        if not failed:
            break
        disk.cut_after(None)
        disk.reboot()
        backend.failures.clear()
        under_test.reopen()
        seen.add(check_atomic(under_test, answered, ROWS))
        under_test.commit_loop.close()
        cut += 1
    assert seen == {True, False}
    assert cut > 10


# ---- progress


def advance(under_test: EngineUnderTest, end: int, group: str = "spark") -> int:
    """Settle up to `end`; return the number of portions."""
    cursor = under_test.group(group).cursors[0]
    portions = 1
    while not under_test.engine.bulk_progress.settle_range(cursor, end, 16):
        under_test.run_until_idle()
        portions += 1
    under_test.run_until_idle()
    return portions


def test_progress_settles_everything_below_a_sequence_in_slices(engine: EngineUnderTest) -> None:
    for nth in range(100):
        engine.publish(b"%d" % nth)
    group = engine.group("spark")
    assert advance(engine, 60) > 3
    assert group.cursors[0].low_watermark == 60
    assert engine.depth() == 40
    assert engine.ledger("spark").acked == 60
    assert advance(engine, 30) == 1, "never backwards"
    assert group.cursors[0].low_watermark == 60
    engine.crash_and_restart()
    assert engine.group("spark").cursors[0].low_watermark == 60
    assert engine.depth() == 40


def test_failed_messages_waiting_for_retry_are_settled_too(engine: EngineUnderTest) -> None:
    for nth in range(5):
        engine.publish(b"%d" % nth, key=b"k")
    worker = engine.worker(group="spark")
    worker.nack(worker.lease())
    worker.leave()
    advance(engine, 3)
    engine.advance(minutes=10)
    assert engine.worker(group="spark").ack_all() == [b"3", b"4"]


def test_progress_skips_deleted_messages(engine: EngineUnderTest) -> None:
    engine.publish(b"committed")
    engine.group("spark")
    for nth in range(5):
        engine.publish(b"%d" % nth, ttl=5)
    engine.publish(b"last")
    engine.advance(seconds=10)
    assert advance(engine, 6) == 1
    assert engine.group("spark").cursors[0].low_watermark == 6


def test_messages_settled_by_one_group_stay_for_another(engine: EngineUnderTest) -> None:
    worker = engine.worker(group="workers", prefetch=0)
    for nth in range(5):
        engine.publish(b"%d" % nth)
    advance(engine, 5)
    assert engine.depth() == 5
    engine.engine.dispatch.set_prefetch(worker, 10)
    assert len(worker.ack_all()) == 5
    assert engine.depth() == 0


# ---- locations


def locations_of(
    under_test: EngineUnderTest,
    start: int,
    end: int,
    max_count: int = 10_000,
    max_bytes: int = 1 << 40,
) -> list[int]:
    partition = under_test.queue().partitions[0]
    found: list[int] = []
    while start < end:
        locations = MessageLocations()
        reached = int(collect_locations(partition, start, end, 0, max_count, max_bytes, locations))
        data = locations.value()
        for at in range(0, len(data), 20):
            seq = int.from_bytes(data[at : at + 8], "little")
            assert int.from_bytes(data[at + 8 : at + 16], "little") == partition.address(seq)
            found.append(seq)
        assert reached > start
        start = reached
    return found


def test_positions_are_returned_in_slices_without_gaps(engine: EngineUnderTest) -> None:
    for nth in range(1300):
        engine.send(b"%d" % nth)
    engine.run_until_idle()
    assert locations_of(engine, 0, 1300) == list(range(1300))
    assert locations_of(engine, 511, 1025, max_count=100) == list(range(511, 1025))
    assert locations_of(engine, 5, 9, max_bytes=1) == [5, 6, 7, 8]
    advance(engine, 1030)
    assert locations_of(engine, 0, 1300) == list(range(1030, 1300))
    assert locations_of(engine, 0, 1000) == []
