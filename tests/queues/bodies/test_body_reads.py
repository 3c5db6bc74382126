"""Bodies on disk: read back when the cache has none, compressed, damaged, moved by compaction."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.queues.bodies.codec import ZstdCodec
from sluice.queues.commit_loop.housekeeping import SNAPSHOT_BYTES_PER_DELAY_SECOND
from sluice.queues.model.containers.message_columns import Block
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EmbeddedBackend, EngineUnderTest, MemoryBackend, StoreBackend


@pytest.mark.parametrize("cache_bytes", [0, 1, 5_000, 1 << 20])
def test_backlog_larger_than_the_cache_is_read_back_in_order(
    make_engine: MakeEngine, cache_bytes: int
) -> None:
    engine = make_engine(cache_bytes=cache_bytes)
    for number in range(300):
        engine.send(b"%d:" % number + b"x" * 100)
    got = engine.worker(prefetch=10).ack_all()
    assert [int(payload.split(b":")[0]) for payload in got] == list(range(300))
    assert engine.engine.body_cache.used_bytes <= cache_bytes


def test_backlog_is_read_once_however_small_the_cache(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=10, cache_bytes=1 << 20, max_depth=10_000)
    engine.group()
    for number in range(4000):
        engine.send(b"%d" % number + b"x" * 1000, key=b"k%d" % (number * 7919 % 256))
    workers = [engine.worker(prefetch=20) for _ in range(4)]
    done = 0
    while done < 4000:
        for worker in workers:
            for delivery in worker.lease_all():
                worker.ack(delivery)
                done += 1
        engine.run_until_idle()
    requested = sum(len(addresses) for addresses in engine.store.reads)
    assert requested < 4400, "a few are evicted and read again"
    assert engine.engine.body_cache.used_bytes == engine.engine.body_cache.prefetched_bytes == 0


def test_backlog_of_few_keys_is_read_in_one_pass_by_all_partitions(make_engine: MakeEngine) -> None:
    """Most messages are parked: read-ahead must fetch them before unscanned ones."""
    engine = make_engine(partitions=10, cache_bytes=4 << 20, max_depth=10_000)
    engine.group()
    for number in range(6_000):
        engine.send(b"%d" % number + b"x" * 1000, key=b"k%d" % (number * 7919 % 64))
    worker = engine.worker(prefetch=100)
    done = 0
    while done < 6_000:
        for delivery in worker.lease_all():
            worker.ack(delivery)
            done += 1
        engine.run_until_idle()
    requested = [address for addresses in engine.store.reads for address in addresses]
    assert len(requested) < 6_600, "a few are evicted and read again"
    passes = sum(max(addresses) - min(addresses) for addresses in engine.store.reads)
    assert passes < 2 * (max(requested) - min(requested)), "one pass serves all partitions"


def test_prefetched_bodies_are_dropped_with_their_consumer(make_engine: MakeEngine) -> None:
    engine = make_engine(max_depth=10_000)
    engine.group()
    for number in range(500):
        engine.send(b"%d" % number + b"x" * 100)
    worker = engine.worker(prefetch=10)
    assert engine.engine.body_cache.prefetched_bytes > 0
    worker.leave()
    engine.run_until_idle()
    assert engine.engine.body_cache.prefetched_bytes == 0
    assert len(engine.worker().ack_all()) == 500


def test_consumer_that_keeps_up_never_causes_a_read(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    for number in range(200):
        engine.publish(b"%d" % number)
        worker.ack(worker.lease())
    assert engine.store.reads == [] and engine.engine.body_cache.used_bytes == 0


def test_cache_does_not_remember_empty_partitions(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    for number in range(200):
        engine.publish(b"%d" % number)
        worker.ack(worker.lease())
    assert len(engine.engine.body_cache._partitions) <= 1


def test_damaged_message_is_reported_and_given_up() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    engine.group()
    for number in range(3):
        engine.publish(b"%d" % number, key=b"k")
    assert backend.store is not None
    backend.store.damage(int(engine.queue().partitions[0].address(1)))
    assert engine.worker().ack_all() == [b"0", b"2"]
    assert any("damaged" in warning and "tasks" in warning for warning in engine.warnings)
    assert engine.ledger().purged == 1 and engine.depth() == 0
    engine.verify()


def test_damaged_message_cannot_be_dead_lettered_and_is_given_up() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend, message_ttl=60.0, expired_to_dlq=True)
    engine.group()
    engine.publish(b"1")
    assert backend.store is not None
    backend.store.damage(int(engine.queue().partitions[0].address(0)))
    engine.advance(seconds=61)
    assert engine.depth() == 0 and engine.dead_letters() == [] and len(engine.warnings) == 1


def test_payloads_are_compressed_where_configured(make_engine: MakeEngine) -> None:
    engine = make_engine(compress=True)
    text = b"all work and no play makes jack a dull boy\n" * 100
    noise = bytes((number * 7919 >> 3) & 0xFF for number in range(300))
    engine.group()
    engine.publish(text)
    engine.publish(b"short")
    engine.publish(noise)
    assert engine.engine.queues["tasks"].bytes < len(text) // 4
    engine.crash_and_restart()
    assert engine.worker().ack_all() == [text, b"short", noise]


def test_uncompressed_payload_is_not_decompressed() -> None:
    codec = ZstdCodec()
    assert codec.decompress(codec.compress(b"abc" * 100)) == b"abc" * 100
    with pytest.raises(ValueError):  # noqa: PT011 (the library's message differs between versions)
        codec.decompress(b"not compressed")


@pytest.fixture(params=["memory", "embedded"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> StoreBackend:
    """A store with segments of a few kilobytes."""
    if request.param == "memory":
        return MemoryBackend(4000, 4000)
    return EmbeddedBackend(tmp_path / "store", 4000, 4000)


def test_segments_are_freed_as_messages_are_settled(small: StoreBackend) -> None:
    engine = EngineUnderTest(small)
    worker = engine.worker()
    for number in range(500):
        engine.publish(b"%d" % number + b"x" * 100)
        worker.ack_all()
    assert len(engine.store.segment_sizes()) < 5
    engine.crash_and_restart()
    assert engine.depth() == 0 and engine.ledger().acked == 500
    engine.verify()
    engine.commit_loop.close()


@pytest.mark.parametrize(
    ("size", "extra_seconds"),
    [
        (0, 0.0),
        (SNAPSHOT_BYTES_PER_DELAY_SECOND - 1, 0.0),
        (3 * SNAPSHOT_BYTES_PER_DELAY_SECOND, 3.0),
    ],
)
def test_empty_segment_is_freed_later_where_a_snapshot_is_large(
    small: StoreBackend, size: int, extra_seconds: float
) -> None:
    """An empty segment is deleted with a snapshot; a large snapshot is not written every second."""
    engine = EngineUnderTest(small)
    worker = engine.worker()
    for number in range(30):
        engine.publish(b"%d" % number + b"x" * 500)
    engine.advance(seconds=10)
    segments_before = len(engine.store.segment_sizes())
    engine.commit_loop.housekeeping._snapshot_bytes = size
    worker.ack_all()
    engine.advance(seconds=extra_seconds + 0.9)
    assert len(engine.store.segment_sizes()) == segments_before > 3
    engine.advance(seconds=0.2)
    assert len(engine.store.segment_sizes()) <= 2
    engine.commit_loop.close()


def test_few_old_messages_do_not_pin_their_segments(small: StoreBackend) -> None:
    engine = EngineUnderTest(small, message_ttl=0.0)
    sleeper = engine.worker(group="sleeper", queue="slow")
    sleeper.is_open = False
    worker = engine.worker()
    for number in range(1500):
        if number % 100 == 0:
            engine.publish(b"pin %d" % number, queue="slow")
        engine.publish(b"%d" % number + b"x" * 100)
        worker.ack_all()
    sizes = engine.store.segment_sizes()
    assert sum(sizes.values()) < 30_000, "fifteen small messages, and the newest segments"
    engine.verify()
    engine.crash_and_restart()
    engine.verify()
    assert engine.worker(group="sleeper", queue="slow").ack_all() == [
        b"pin %d" % number for number in range(0, 1500, 100)
    ]
    engine.commit_loop.close()


def test_retention_ends_in_time_for_a_message_moved_by_compaction(
    small: StoreBackend,
) -> None:
    engine = EngineUnderTest(small, retention=600.0, message_ttl=0.0, delivery_timeout=3600.0)
    worker = engine.worker()
    engine.queue("filler", retention=0.0)
    filler = engine.worker(queue="filler")
    engine.publish(b"old")
    for number in range(60):
        engine.publish(b"%d" % number + b"x" * 100, queue="filler")
    settled = filler.lease_all()
    engine.advance(seconds=300)
    engine.publish(b"young")
    for number in range(100):
        engine.publish(b"%d" % number + b"x" * 100, queue="filler")
    worker.ack_all()
    for delivery in settled:
        filler.ack(delivery)
    engine.advance(seconds=10)
    engine.restart()
    partition = engine.queue().partitions[0]
    assert partition.address(0) > partition.address(1), "compaction has moved the older one"
    engine.advance(seconds=300)
    assert (partition.holds(0), partition.holds(1)) == (False, True)
    engine.commit_loop.close()


def test_message_just_moved_by_compaction_can_be_read(small: StoreBackend) -> None:
    engine = EngineUnderTest(small, cache_bytes=0, message_ttl=0.0)
    engine.publish(b"pin")
    partition = engine.queue().partitions[0]
    found: list[bytes | None] = []
    engine.commit_loop.read([int(partition.address(0))], found.extend)
    engine.run_until_idle()
    data = found[0]
    assert data is not None and engine.engine.rewrite_record(data, partition.address(0))
    worker = engine.worker()
    assert worker.ack_all() == [b"pin"], "and it is not taken for damaged meanwhile"
    assert engine.warnings == []
    engine.commit_loop.close()


def test_messages_survive_any_number_of_snapshots_and_restarts(small: StoreBackend) -> None:
    engine = EngineUnderTest(small, partitions=3, retention=0.0)
    engine.group("a")
    engine.group("b")
    for number in range(200):
        engine.publish(b"%d" % number + b"x" * 50, key=b"k%d" % (number % 7), priority=number % 3)
        if number % 20 == 0:
            worker = engine.worker(group="a", prefetch=3)
            for delivery in worker.lease_all():
                worker.nack(delivery) if number % 40 else worker.ack(delivery)
            engine.crash_and_restart()
            engine.verify()
    unsettled = engine.ledger("a").waiting + engine.ledger("a").retrying
    worker = engine.worker(group="a")
    engine.advance(minutes=5)
    done = worker.ack_all()
    engine.advance(minutes=10)
    done += worker.ack_all()
    assert len(done) == unsettled
    assert len(engine.worker(group="b").ack_all()) == 200
    engine.verify()
    engine.commit_loop.close()


def test_stuck_message_does_not_pin_the_columns_of_later_ones(engine: EngineUnderTest) -> None:
    worker = engine.worker(prefetch=600)
    engine.publish(b"stuck", key=b"s")
    stuck = worker.lease()
    for _ in range(10):
        for number in range(512):
            engine.send(b"%d" % number)
        worker.extend(stuck)
        worker.ack_all()
    partition = engine.queue().partitions[0]
    cursor = engine.group().cursors[0]
    blocks: list[Block] = partition._blocks
    assert sum(len(block.address) for block in blocks) <= 1024 and cursor.settled_seqs == set()
    worker.ack(stuck)
    assert cursor.low_watermark == 5121 and len(partition._blocks) <= 1


def test_message_that_expires_before_its_commit_is_not_reported_as_damaged() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend, expired_to_dlq=True)
    engine.group()
    assert backend.store is not None
    backend.store.hold()
    engine.publish(b"in the frame in commit", ttl=1)
    engine.publish(b"in the next frame", ttl=1)
    engine.advance(seconds=2)
    backend.store.release()
    engine.run_until_idle()
    engine.advance(seconds=1)
    assert engine.dead_letters() == [b"in the frame in commit", b"in the next frame"]
    assert engine.warnings == [] and len(engine.publisher.receipts) == 2
    engine.verify()


def test_damaged_message_found_by_compaction_is_reported_and_given_up() -> None:
    backend = MemoryBackend(4000, 4000)
    engine = EngineUnderTest(backend, message_ttl=0.0)
    engine.group()
    engine.publish(b"pin", queue="slow")
    assert backend.store is not None
    backend.store.damage(int(engine.queue("slow").partitions[0].address(0)))
    worker = engine.worker()
    for number in range(300):
        engine.publish(b"%d" % number + b"x" * 100)
        worker.ack_all()
    assert engine.depth("slow") == 0 and len(engine.warnings) == 1
    assert len(engine.store.segment_sizes()) < 5
    engine.verify()
