"""Queues in a Redis Cluster: a frame spans several nodes, and is still atomic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.store.redis.connection import ClusterChannel
from sluice.store.redis.keys import RedisKeys, fence_key
from sluice.store.redis.scripts import STAMP_UNIT
from sluice.store.redis.views.stats import read_store_stats
from tests.queues.conftest import MakeEngine
from tests.queues.redis.redis_backend import RedisBackend
from tests.store.kit import StoreUnderTest, message, note
from tests.support.redis_process import RedisCluster

pytestmark = pytest.mark.skipif(
    os.environ.get("SLUICE_EXPECT") == "interpreted", reason="tested with the compiled build"
)


@pytest.fixture
def backend(redis_cluster: RedisCluster, tmp_path: Path) -> RedisBackend:
    return RedisBackend(redis_cluster, tmp_path.name)


@pytest.fixture
def client(redis_cluster: RedisCluster) -> Iterator[Any]:
    client = redis_cluster.client()
    yield client
    client.close()


@pytest.fixture
def store(redis_cluster: RedisCluster, tmp_path: Path) -> Iterator[StoreUnderTest]:
    under_test = StoreUnderTest(None, redis=redis_cluster.url, prefix=tmp_path.name).open()
    yield under_test
    under_test.store.close()


def test_queues_work_and_survive_and_redis_shows_their_state(
    make_engine: MakeEngine, client: Any, redis_cluster: RedisCluster, tmp_path: Path
) -> None:
    engine = make_engine(partitions=6, max_retries=1)
    worker = engine.worker(client="ada", prefetch=10)
    for number in range(60):
        engine.publish(b"%d" % number, key=b"k%d" % (number % 9))
    for delivery in worker.lease_all()[:6]:
        worker.ack(delivery)
    for delivery in worker.lease_all()[:3]:
        worker.nack(delivery, delay=30)
    engine.backend.check()
    nodes = {client.get_node_from_key(f"{{tasks:{number}}}").name for number in range(6)}
    assert len(nodes) == 3, "partitions are on all nodes"
    reported = read_store_stats(redis_cluster.url, tmp_path.name)
    assert reported.is_cluster and reported.queues["tasks"].counters["produced"] == 60
    assert reported.queues["tasks"].groups["workers"].retrying == 3
    engine.crash_and_restart()
    engine.backend.check()
    engine.advance(seconds=31)
    again = engine.worker(client="bob", prefetch=100)
    done = len(again.ack_all())
    assert done == 54
    assert engine.depth() == 0


def test_value_whose_removal_was_interrupted_is_deleted_at_the_next_start(
    make_engine: MakeEngine, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(is_compacted=True, message_ttl=0.0)
    for key in (b"a", b"b", b"b"):
        engine.publish(b"value", key=key)
    base = RedisKeys(tmp_path.name).base_key("tasks:0", 1)
    assert [entry for entry, _ in client.xrange(base)] == [b"0-1", b"2-1"], (
        "replaced values are deleted at once"
    )
    execute = ClusterChannel.execute

    def execute_without_views(link: ClusterChannel, commands: Any, acks: Any = None) -> list[Any]:
        return (
            [b"OK"]
            if any("XDEL" in command for _, command in commands)
            else execute(link, commands)
        )

    monkeypatch.setattr(ClusterChannel, "execute", execute_without_views)
    engine.publish(b"value", key=b"b")
    monkeypatch.setattr(ClusterChannel, "execute", execute)
    assert [entry for entry, _ in client.xrange(base)] == [b"0-1", b"2-1", b"3-1"]
    engine.crash_and_restart()
    assert [entry for entry, _ in client.xrange(base)] == [b"0-1", b"3-1"]


def test_bodies_whose_frame_never_reached_the_log_are_deleted_at_the_next_start(
    store: StoreUnderTest, client: Any
) -> None:
    store.commit(message(0, b"kept", pid=3))
    base = RedisKeys(store.prefix).base_key("3", 3)
    client.xadd(base, {"record": b"torn"}, id="1-1")
    store.reopen()
    assert store.report.torn_bytes == 4
    assert [entry for entry, _ in client.xrange(base)] == [b"0-1"]
    address = store.commit(message(1, b"the real one", pid=3))
    assert store.bodies(address) == [b"the real one"]
    assert [entry for entry, _ in client.xrange(base)] == [b"0-1", b"1-1"]


def test_stream_left_by_a_torn_frame_is_not_taken_for_a_new_partition(
    store: StoreUnderTest, client: Any
) -> None:
    client.xadd(RedisKeys(store.prefix).base_key("8", 8), {"record": b"torn"}, id="0-1")
    address = store.commit(message(0, b"the real one", pid=8))
    assert store.bodies(address) == [b"the real one"]
    assert store.reopen().bodies(address) == [b"the real one"]


class CutOff(Exception):
    pass


def test_crash_between_any_two_steps_of_a_frame_leaves_all_of_it_or_nothing(
    redis_cluster: RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = ClusterChannel.execute
    for cut in range(4):
        prefix = f"{tmp_path.name}-{cut}"
        store = StoreUnderTest(None, redis=redis_cluster.url, prefix=prefix).open()
        store.commit(*[message(0, b"old", pid=pid) for pid in range(1, 5)])
        remaining = cut

        def execute_some(link: ClusterChannel, commands: Any, acks: Any = None) -> list[Any]:
            nonlocal remaining
            if remaining == 0:
                raise CutOff
            remaining -= 1
            return execute(link, commands)

        frame = [message(1, b"new", pid=pid) for pid in range(1, 5)]
        monkeypatch.setattr(ClusterChannel, "execute", execute_some)
        try:
            store.try_commit(*frame, note(9, b"n"))
        finally:
            monkeypatch.setattr(ClusterChannel, "execute", execute)
        store.reopen()
        bodies = [record.body for record in store.loaded.records]
        assert bodies == [b"old"] * 4 + ([b"new"] * 4 + [b"n"] if cut >= 2 else [])
        store.failures.clear()
        addresses = store.commit(*[message(2, b"next", pid=pid) for pid in range(1, 5)])
        assert store.bodies(addresses) == [b"next"] * 4
        store.store.close()


def test_paused_former_owner_is_refused_in_every_partition(
    store: StoreUnderTest, redis_cluster: RedisCluster, client: Any
) -> None:
    store.commit(message(0, b"before", pid=3))
    keys = RedisKeys(store.prefix)
    client.delete(keys.lease)
    owner = StoreUnderTest(None, redis=redis_cluster.url, prefix=store.prefix).open()
    assert int(client.get(fence_key(keys.base_key("3", 3)))) // STAMP_UNIT == int(
        client.get(keys.fence)
    )
    assert not store.try_commit(message(1, b"late", pid=3))
    assert [record.body for record in owner.reopen().loaded.records] == [b"before"]
    owner.store.close()


def test_restarted_redis_node_is_waited_for(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path / "cluster").start()
    try:
        store = StoreUnderTest(None, redis=cluster.url).open()
        store.commit(*[message(0, b"old", pid=pid) for pid in range(1, 7)])
        cluster.nodes[1].kill()
        commits: list[int] = []
        store.start_commit(
            *[message(1, b"new", pid=pid) for pid in range(1, 7)], done=lambda: commits.append(1)
        )
        cluster.nodes[1].start()
        store.loop.turn_until(lambda: bool(commits or store.failures))
        assert not store.failures
        assert [record.body for record in store.reopen().loaded.records] == [b"old"] * 6 + [
            b"new"
        ] * 6
        store.store.close()
    finally:
        cluster.stop()
