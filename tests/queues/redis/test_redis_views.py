"""Views of the queues in Redis for its own tools. Each test also compares them at its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import PartitionFull
from sluice.queues.log.notes import NoteWriter
from sluice.queues.model.queue_rules import DROP_OLDEST
from sluice.store.redis.keys import retry_schedule_key
from sluice.store.redis.log.plan_builder import read_dead_letter_fields
from sluice.store.redis.views.stats import QueueStats, read_store_stats
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest
from tests.queues.redis.redis_backend import RedisBackend
from tests.store.kit import RecordingLoader
from tests.support.broker_process import same_build
from tests.support.redis_process import RedisProcess

pytestmark = pytest.mark.skipif(
    os.environ.get("SLUICE_EXPECT") == "interpreted", reason="tested with the compiled build"
)


@pytest.fixture(params=["redis_server", "old_redis_server"])
def server(request: pytest.FixtureRequest) -> RedisProcess:
    """The Redis of this machine, and the oldest supported one."""
    found: RedisProcess = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def backend(server: RedisProcess, tmp_path: Path) -> RedisBackend:
    # The engine sets the same limit where a test needs it.
    return RedisBackend(server, tmp_path.name, max_length=4)


@pytest.fixture
def client(server: RedisProcess) -> Any:
    client = server.client()
    yield client
    client.close()


def base_of(engine: EngineUnderTest, queue: str = "tasks") -> str:
    partition = engine.engine.queues[queue].partitions[0]
    backend = engine.backend
    assert isinstance(backend, RedisBackend)
    return f"{backend.prefix}:{{{queue}:0}}:{partition.pid}"


def update_views(engine: EngineUnderTest) -> None:
    backend = engine.backend
    assert isinstance(backend, RedisBackend)
    backend.store.poll_views(engine.loop.now)
    backend.catch_up()


def test_delivery_in_flight_is_pending_with_its_consumer(
    engine: EngineUnderTest, client: Any
) -> None:
    worker = engine.worker(client="ada")
    for number in range(3):
        engine.publish(b"%d" % number)
    worker.ack(worker.lease())
    update_views(engine)
    pending = client.xpending_range(base_of(engine), "workers", "-", "+", 10)
    assert [(one["message_id"], one["consumer"]) for one in pending] == [
        (b"1-1", b"ada"),
        (b"2-1", b"ada"),
    ]
    (group,) = client.xinfo_groups(base_of(engine))
    assert (group["pending"], group["last-delivered-id"]) == (2, b"2-1")
    assert client.xlen(base_of(engine)) == 2


def test_redis_counts_the_attempts_of_a_delivery(engine: EngineUnderTest, client: Any) -> None:
    worker = engine.worker(client="ada")
    engine.publish(b"job")
    for attempt in (1, 2, 3):
        delivery = worker.lease()
        update_views(engine)
        (pending,) = client.xpending_range(base_of(engine), "workers", "-", "+", 10)
        assert pending["times_delivered"] == attempt
        worker.nack(delivery, delay=1)
        engine.advance(seconds=1)


def test_undelivered_messages_are_the_lag_of_their_group(
    engine: EngineUnderTest, client: Any
) -> None:
    engine.group("late")
    for number in range(5):
        engine.publish(b"%d" % number)
    worker = engine.worker(prefetch=2)
    worker.payloads()
    update_views(engine)
    groups = {one["name"]: one for one in client.xinfo_groups(base_of(engine))}
    assert (groups[b"late"]["pending"], groups[b"workers"]["pending"]) == (0, 2)
    assert (groups[b"late"]["last-delivered-id"], groups[b"workers"]["last-delivered-id"]) == (
        b"0-0",
        b"1-1",
    )
    if "lag" in groups[b"late"]:  # Redis 7.0 and later
        assert (groups[b"late"]["lag"], groups[b"workers"]["lag"]) == (5, 3)


def test_settled_message_is_visible_until_the_settlement_is_committed(
    engine: EngineUnderTest, client: Any
) -> None:
    worker = engine.worker()
    engine.publish(b"job")
    delivery = worker.lease()
    engine.commit_loop.hold_frame()  # the frame stays open
    worker.ack(delivery)
    update_views(engine)
    assert client.xlen(base_of(engine)) == 1
    engine.commit_loop.release_frame()
    engine.run_until_idle()
    update_views(engine)
    assert client.xlen(base_of(engine)) == 0


def test_retry_waits_in_the_sorted_set_and_is_pending_again_when_due(
    make_engine: MakeEngine, client: Any
) -> None:
    engine = make_engine()
    worker = engine.worker(client="ada")
    engine.publish(b"job")
    worker.nack(worker.lease(), delay=60, description="no luck")
    base = base_of(engine)
    assert client.zrange(retry_schedule_key(base, "workers"), 0, -1, withscores=True) == [
        (b"0", (engine.loop.now + 60) * 1000)
    ]
    assert b"no luck" in client.hget(f"{base}:retries:workers", "0")
    update_views(engine)
    assert client.xpending(base, "workers")["pending"] == 0
    worker.is_open = False
    engine.advance(seconds=61)
    update_views(engine)
    assert client.zcard(retry_schedule_key(base, "workers")) == 0 and not client.exists(
        f"{base}:retries:workers"
    )
    pending = client.xpending_range(base, "workers", "-", "+", 10)
    assert [one["consumer"] for one in pending] == [b"sluice"]


def test_dead_letter_shows_its_origin(make_engine: MakeEngine, client: Any) -> None:
    engine = make_engine(max_retries=0)
    worker = engine.worker()
    engine.publish(b"poison")
    worker.nack(worker.lease())
    engine.run_until_idle()
    ((_, fields),) = client.xrange(base_of(engine, "dlq/tasks"))
    assert fields[b"originalTopic"] == b"$queue/tasks"
    assert fields[b"partitionId"] == b"0"
    assert fields[b"originalMessageId"]
    assert client.xlen(base_of(engine)) == 0


def test_body_that_only_looks_like_a_message_is_stored_without_fields() -> None:
    record = bytes(64) + (9).to_bytes(4, "little") + b"\xff\xff\x00\x09\xff"
    assert read_dead_letter_fields(record) == []
    assert read_dead_letter_fields(b"") == []


def test_deleted_queue_leaves_no_key_but_its_fence(engine: EngineUnderTest, client: Any) -> None:
    worker = engine.worker()
    engine.publish(b"job")
    worker.nack(worker.lease(), delay=60)
    base = base_of(engine)
    worker.leave()
    engine.engine.lifecycle.delete_queue(engine.engine.queues["tasks"])
    engine.run_until_idle()
    assert client.keys(f"{base}*".replace("{", "[{]").replace("}", "[}]")) == []


def test_deliveries_of_a_dead_owner_are_taken_over_and_end_normally(
    engine: EngineUnderTest, client: Any
) -> None:
    worker = engine.worker(client="ada")
    for number in range(3):
        engine.publish(b"%d" % number)
    worker.payloads()
    update_views(engine)
    engine.crash_and_restart()
    base = base_of(engine)
    consumers = {one["consumer"] for one in client.xpending_range(base, "workers", "-", "+", 10)}
    assert consumers == {b"sluice"}
    again = engine.worker(client="bob")
    assert again.ack_all() == [b"0", b"1", b"2"]
    update_views(engine)
    assert client.xpending(base, "workers")["pending"] == 0


def test_entry_claimed_by_a_foreign_redis_client_is_reclaimed(
    server: RedisProcess, tmp_path: Path, client: Any
) -> None:
    engine = EngineUnderTest(RedisBackend(server, tmp_path.name, claim_idle_seconds=0.0))
    engine.group("workers")
    engine.publish(b"job")
    engine.run_until_idle()
    update_views(engine)
    base = base_of(engine)
    client.xreadgroup("workers", "foreign", {base: ">"})
    assert client.xpending_range(base, "workers", "-", "+", 10)[0]["consumer"] == b"foreign"
    engine.advance(seconds=31)
    update_views(engine)
    assert client.xpending_range(base, "workers", "-", "+", 10)[0]["consumer"] == b"sluice"
    worker = engine.worker()
    worker.ack_all()
    update_views(engine)
    assert client.xpending(base, "workers")["pending"] == 0
    engine.commit_loop.close()


def test_redis_adds_up_a_queue_over_its_partitions(
    make_engine: MakeEngine, server: RedisProcess, backend: RedisBackend
) -> None:
    engine = make_engine(partitions=3)
    engine.group("late")
    for number in range(9):
        engine.publish(b"%d" % number)
    worker = engine.worker(client="ada", prefetch=4)
    for delivery in worker.lease_all()[:2]:
        worker.ack(delivery)
    worker.nack(worker.lease(), delay=60)
    update_views(engine)
    command = [sys.executable, "-m", "sluice.store.redis.views.stats", server.url, backend.prefix]
    printed = subprocess.run(
        command, env=same_build(), capture_output=True, text=True, check=True
    ).stdout
    reported = read_store_stats(server.url, backend.prefix)
    assert json.loads(printed) == asdict(reported)
    assert reported.owner and reported.frame > 0
    queue: QueueStats = reported.queues["tasks"]
    assert (queue.partitions, queue.length) == (3, 9)
    held = int(engine.ledger().delivered)
    expected = {
        "produced": 9,
        "consumed": 3 + held,
        "acked": 2,
        "retried": 1,
        "dead": 0,
        "expired": 0,
        "purged": 0,
        "cancelled": 0,
    }
    assert queue.counters == expected
    late, workers = queue.groups["late"], queue.groups["workers"]
    assert (late.lag, late.pending) == (9, 0)
    assert workers.retrying == 1 and workers.pending == int(engine.ledger().delivered)
    assert workers.lag == 9 - 3 - workers.pending
    assert workers.consumers == 1  # one client, which serves three partitions


def test_stream_at_its_maximum_length_drops_the_oldest_and_the_ledger_agrees(
    make_engine: MakeEngine, client: Any
) -> None:
    engine = make_engine(overflow=DROP_OLDEST)
    engine.engine.publishing.max_partition_length = 4
    engine.group("workers")
    for number in range(10):
        engine.publish(b"%d" % number)
    assert client.xlen(base_of(engine)) == 4
    assert engine.ledger().purged == 6
    engine.crash_and_restart()
    assert engine.worker().ack_all() == [b"6", b"7", b"8", b"9"]


def test_stream_at_its_maximum_length_refuses_where_configured(
    engine: EngineUnderTest, client: Any
) -> None:
    engine.engine.publishing.max_partition_length = 4
    worker = engine.worker(prefetch=2)
    for number in range(4):
        engine.publish(b"%d" % number)
    with pytest.raises(PartitionFull, match="may hold 4"):
        engine.publish(b"4")
    for delivery in worker.lease_all():
        worker.ack(delivery)
    engine.publish(b"4")
    assert client.xlen(base_of(engine)) <= 4


def test_settled_retained_messages_are_deleted_before_anything_is_refused(
    make_engine: MakeEngine, client: Any
) -> None:
    engine = make_engine(retention=3600.0)
    engine.engine.publishing.max_partition_length = 4
    worker = engine.worker()
    for number in range(10):
        engine.publish(b"%d" % number)
        assert worker.ack_all() == [b"%d" % number]
    assert client.xlen(base_of(engine)) == 4
    assert engine.worker(group="late").ack_all() == [b"6", b"7", b"8", b"9"]


def test_unknown_note_changes_nothing_and_is_stored(engine: EngineUnderTest) -> None:
    engine.publish(b"job")
    note = NoteWriter(31)
    note.write_int(7)
    engine.engine.frame_builder.add_note(note, 0, True)
    engine.run_until_idle()
    backend = engine.backend
    assert isinstance(backend, RedisBackend)
    backend.crash()
    loader = RecordingLoader()
    backend.store.open(loader)
    assert loader.records[-1].body == note.to_bytes()
    backend.store.close()
    engine.backend.open(engine.loop, engine.engine).open(RecordingLoader())
    backend.opened()


def test_rescheduled_retry_has_its_new_time(engine: EngineUnderTest, client: Any) -> None:
    worker = engine.worker()
    engine.publish(b"job")
    worker.nack(worker.lease(), delay=60)
    partition = engine.engine.queues["tasks"].partitions[0]
    due = engine.loop.now + 600.0
    engine.engine.commands.reschedule(partition, 0, b"0-0", due, "ann")
    engine.run_until_idle()
    update_views(engine)
    assert client.zrange(
        retry_schedule_key(base_of(engine), "workers"), 0, -1, withscores=True
    ) == [(b"0", round(due * 1000))]
