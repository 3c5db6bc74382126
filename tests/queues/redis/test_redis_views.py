"""What people see who look into Redis with its own tools. Every test of this room also compares it, when it is done."""

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
from sluice.queues.log.frame_builder import NoteWriter
from sluice.queues.model.queue_rules import DROP_OLDEST
from sluice.store.redis.views.stats import QueueSum, ask_redis
from sluice.store.redis.keys import retry
from sluice.store.redis.views.dead_letter_fields import fields_of
from tests.support.broker_process import same_build
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest
from tests.queues.redis.redis_backend import RedisKeeper
from tests.support.redis_process import RedisProcess
from tests.store.kit import Past

pytestmark = pytest.mark.skipif(
    os.environ.get("SLUICE_EXPECT") == "interpreted", reason="tried with the compiled build"
)


@pytest.fixture(params=["redis_server", "old_redis_server"])
def server(request: pytest.FixtureRequest) -> RedisProcess:
    """The Redis of this machine, and the oldest that will do."""
    found: RedisProcess = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def keeper(server: RedisProcess, tmp_path: Path) -> RedisKeeper:
    return RedisKeeper(server, tmp_path.name, max_length=4)  # which counts where the engine has one too


@pytest.fixture
def client(server: RedisProcess) -> Any:
    client = server.client()
    yield client
    client.close()


def base_of(engine: EngineUnderTest, queue: str = "tasks") -> str:
    partition = engine.engine.queues[queue].partitions[0]
    keeper = engine.keeper
    assert isinstance(keeper, RedisKeeper)
    return f"{keeper.prefix}:{{{queue}:0}}:{partition.pid}"


def look(engine: EngineUnderTest) -> None:
    keeper = engine.keeper
    assert isinstance(keeper, RedisKeeper)
    keeper.store.look(engine.loop.now)
    keeper.catch_up()


def test_a_delivery_under_way_is_pending_with_its_consumer(engine: EngineUnderTest, client: Any) -> None:
    worker = engine.worker(client="ada")
    for number in range(3):
        engine.publish(b"%d" % number)
    worker.ack(worker.lease())
    look(engine)
    pending = client.xpending_range(base_of(engine), "workers", "-", "+", 10)
    assert [(one["message_id"], one["consumer"]) for one in pending] == [(b"1-1", b"ada"), (b"2-1", b"ada")]
    (group,) = client.xinfo_groups(base_of(engine))
    assert (group["pending"], group["last-delivered-id"]) == (2, b"2-1")
    assert client.xlen(base_of(engine)) == 2


def test_redis_counts_the_attempts_of_a_delivery(engine: EngineUnderTest, client: Any) -> None:
    worker = engine.worker(client="ada")
    engine.publish(b"job")
    for attempt in (1, 2, 3):
        delivery = worker.lease()
        look(engine)
        (pending,) = client.xpending_range(base_of(engine), "workers", "-", "+", 10)
        assert pending["times_delivered"] == attempt
        worker.nack(delivery, delay=1)
        engine.advance(seconds=1)


def test_what_was_not_delivered_yet_is_the_lag_of_its_group(engine: EngineUnderTest, client: Any) -> None:
    engine.group("late")
    for number in range(5):
        engine.publish(b"%d" % number)
    worker = engine.worker(prefetch=2)
    worker.payloads()
    look(engine)
    groups = {one["name"]: one for one in client.xinfo_groups(base_of(engine))}
    assert (groups[b"late"]["pending"], groups[b"workers"]["pending"]) == (0, 2)
    assert (groups[b"late"]["last-delivered-id"], groups[b"workers"]["last-delivered-id"]) == (b"0-0", b"1-1")
    if "lag" in groups[b"late"]:  # Redis 7.0 and later
        assert (groups[b"late"]["lag"], groups[b"workers"]["lag"]) == (5, 3)


def test_what_is_settled_is_there_until_that_is_kept(engine: EngineUnderTest, client: Any) -> None:
    worker = engine.worker()
    engine.publish(b"job")
    delivery = worker.lease()
    engine.runner.hold()  # the frame stays open
    worker.ack(delivery)
    look(engine)
    assert client.xlen(base_of(engine)) == 1
    engine.runner.release()
    engine.settle_down()
    look(engine)
    assert client.xlen(base_of(engine)) == 0


def test_a_retry_waits_in_the_sorted_set_and_is_pending_again_when_due(make: MakeEngine, client: Any) -> None:
    engine = make()
    worker = engine.worker(client="ada")
    engine.publish(b"job")
    worker.nack(worker.lease(), delay=60, description="no luck")
    base = base_of(engine)
    assert client.zrange(retry(base, "workers"), 0, -1, withscores=True) == [
        (b"0", (engine.loop.now + 60) * 1000)
    ]
    assert b"no luck" in client.hget(f"{base}:retries:workers", "0")
    look(engine)
    assert client.xpending(base, "workers")["pending"] == 0
    worker.is_open = False
    engine.advance(seconds=61)
    look(engine)
    assert client.zcard(retry(base, "workers")) == 0 and not client.exists(f"{base}:retries:workers")
    pending = client.xpending_range(base, "workers", "-", "+", 10)
    assert [one["consumer"] for one in pending] == [b"sluice"]


def test_a_dead_letter_tells_where_it_came_from(make: MakeEngine, client: Any) -> None:
    engine = make(max_retries=0)
    worker = engine.worker()
    engine.publish(b"poison")
    worker.nack(worker.lease())
    engine.settle_down()
    ((_, fields),) = client.xrange(base_of(engine, "dlq/tasks"))
    assert fields[b"originalTopic"] == b"$queue/tasks"
    assert fields[b"partitionId"] == b"0"
    assert fields[b"originalMessageId"]
    assert client.xlen(base_of(engine)) == 0


def test_bytes_that_only_look_like_a_message_are_kept_without_fields() -> None:
    record = bytes(64) + (9).to_bytes(4, "little") + b"\xff\xff\x00\x09\xff"
    assert fields_of(record) == []
    assert fields_of(b"") == []


def test_a_deleted_queue_leaves_no_key_but_its_fence(engine: EngineUnderTest, client: Any) -> None:
    worker = engine.worker()
    engine.publish(b"job")
    worker.nack(worker.lease(), delay=60)
    base = base_of(engine)
    worker.leave()
    engine.engine.delete(engine.engine.queues["tasks"])
    engine.settle_down()
    assert client.keys(f"{base}*".replace("{", "[{]").replace("}", "[}]")) == []


def test_deliveries_of_an_owner_that_died_are_taken_over_and_end_as_usual(
    engine: EngineUnderTest, client: Any
) -> None:
    worker = engine.worker(client="ada")
    for number in range(3):
        engine.publish(b"%d" % number)
    worker.payloads()
    look(engine)
    engine.crash_and_restart()
    base = base_of(engine)
    consumers = {one["consumer"] for one in client.xpending_range(base, "workers", "-", "+", 10)}
    assert consumers == {b"sluice"}
    again = engine.worker(client="bob")
    assert again.ack_all() == [b"0", b"1", b"2"]
    look(engine)
    assert client.xpending(base, "workers")["pending"] == 0


def test_what_a_stranger_took_and_kept_is_taken_back(
    server: RedisProcess, tmp_path: Path, client: Any
) -> None:
    engine = EngineUnderTest(RedisKeeper(server, tmp_path.name, claim_idle_seconds=0.0))
    engine.group("workers")
    engine.publish(b"job")
    engine.settle_down()
    look(engine)
    base = base_of(engine)
    client.xreadgroup("workers", "stranger", {base: ">"})
    assert client.xpending_range(base, "workers", "-", "+", 10)[0]["consumer"] == b"stranger"
    engine.advance(seconds=31)
    look(engine)
    assert client.xpending_range(base, "workers", "-", "+", 10)[0]["consumer"] == b"sluice"
    worker = engine.worker()
    worker.ack_all()
    look(engine)
    assert client.xpending(base, "workers")["pending"] == 0
    engine.runner.close()


def test_redis_adds_up_a_queue_over_its_partitions(
    make: MakeEngine, server: RedisProcess, keeper: RedisKeeper
) -> None:
    engine = make(partitions=3)
    engine.group("late")
    for number in range(9):
        engine.publish(b"%d" % number)
    worker = engine.worker(client="ada", prefetch=4)
    for delivery in worker.lease_all()[:2]:
        worker.ack(delivery)
    worker.nack(worker.lease(), delay=60)
    look(engine)
    command = [sys.executable, "-m", "sluice.store.redis.views.stats", server.url, keeper.prefix]
    printed = subprocess.run(command, env=same_build(), capture_output=True, text=True, check=True).stdout
    told = ask_redis(server.url, keeper.prefix)
    assert json.loads(printed) == asdict(told)
    assert told.owner and told.frame > 0
    queue: QueueSum = told.queues["tasks"]
    assert (queue.partitions, queue.length) == (3, 9)
    held = int(engine.ledger().delivered)
    counted = {
        "produced": 9,
        "consumed": 3 + held,
        "acked": 2,
        "retried": 1,
        "dead": 0,
        "expired": 0,
        "purged": 0,
    }
    assert queue.counters == counted
    late, workers = queue.groups["late"], queue.groups["workers"]
    assert (late.lag, late.pending) == (9, 0)
    assert workers.retrying == 1 and workers.pending == int(engine.ledger().delivered)
    assert workers.lag == 9 - 3 - workers.pending


def test_a_stream_that_is_long_enough_loses_its_oldest_messages_and_the_books_know(
    make: MakeEngine, client: Any
) -> None:
    engine = make(overflow=DROP_OLDEST)
    engine.engine.max_length = 4
    engine.group("workers")
    for number in range(10):
        engine.publish(b"%d" % number)
    assert client.xlen(base_of(engine)) == 4
    assert engine.ledger().purged == 6
    engine.crash_and_restart()
    assert engine.worker().ack_all() == [b"6", b"7", b"8", b"9"]


def test_a_stream_that_is_long_enough_refuses_where_its_queue_says_so(
    engine: EngineUnderTest, client: Any
) -> None:
    engine.engine.max_length = 4
    worker = engine.worker(prefetch=2)
    for number in range(4):
        engine.publish(b"%d" % number)
    with pytest.raises(PartitionFull, match="may hold 4"):
        engine.publish(b"4")
    for delivery in worker.lease_all():
        worker.ack(delivery)
    engine.publish(b"4")
    assert client.xlen(base_of(engine)) <= 4


def test_what_is_kept_for_its_retention_goes_before_anything_is_refused(
    make: MakeEngine, client: Any
) -> None:
    engine = make(retention=3600.0)
    engine.engine.max_length = 4
    worker = engine.worker()
    for number in range(10):
        engine.publish(b"%d" % number)
        assert worker.ack_all() == [b"%d" % number]
    assert client.xlen(base_of(engine)) == 4
    assert engine.worker(group="late").ack_all() == [b"6", b"7", b"8", b"9"]


def test_a_note_that_is_not_known_changes_nothing_and_is_kept(engine: EngineUnderTest) -> None:
    engine.publish(b"job")
    note = NoteWriter(31)
    note.number(7)
    engine.engine.note(note, True)
    engine.settle_down()
    keeper = engine.keeper
    assert isinstance(keeper, RedisKeeper)
    keeper.crash()
    past = Past()
    keeper.store.open(past)
    assert past.records[-1].body == note.value()
    keeper.store.close()
    engine.keeper.open(engine.loop, engine.engine).open(Past())
    keeper.opened()
