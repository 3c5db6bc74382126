"""Tests of stores that follow a failover by Sentinels or a Redis Cluster, without a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.errors import FramesLost, StoreError
from sluice.store.redis.connection import RedisServer
from sluice.store.redis.keys import RedisKeys
from sluice.store.redis.options import RedisOptions
from tests.store.kit import StoreUnderTest, message
from tests.support.redis_process import RedisProcess, free_port
from tests.support.redis_topologies import (
    MASTER,
    ReplicatedCluster,
    ReplicatedRedis,
    until,
)

OPTIONS = RedisOptions(
    answer_seconds=1.0,
    wait_seconds=20.0,
    lease_seconds=60.0,
    renew_seconds=0.1,
    min_replicas=1,
    replica_timeout_seconds=0.3,
)


@pytest.fixture
def servers(redis_folder: Path, tmp_path: Path) -> Iterator[ReplicatedRedis]:
    """A master with two replicas: after a failover one of them is still there."""
    made = ReplicatedRedis(redis_folder / tmp_path.name, replicas=2, sentinels=1)
    try:
        yield made.start()
    finally:
        made.stop()


def open_store(url: str, options: RedisOptions = OPTIONS) -> StoreUnderTest:
    return StoreUnderTest(None, redis=url, options=options).open()


def read_all(store: StoreUnderTest) -> list[int]:
    return [record.seq for record in store.reopen().loaded.records]


@pytest.mark.parametrize("deed", ["kill", "pause", "isolate"])
def test_store_follows_the_promotion_of_a_replica(servers: ReplicatedRedis, deed: str) -> None:
    store = open_store(servers.url)
    for seq in range(20):
        store.commit(message(seq))
    master = servers.master
    if deed == "kill":
        master.kill()
    elif deed == "pause":
        master.pause()
    else:
        servers.isolate_master()  # the store still reaches it
    for seq in range(20, 40):
        store.commit(message(seq))
    promoted = servers.promoted().client()
    assert promoted.hget(RedisKeys("sluice").log, "frame") == b"40"
    assert read_all(store) == list(range(40))
    store.store.close()


def test_isolated_master_is_left_without_a_required_replica_too(
    servers: ReplicatedRedis,
) -> None:
    options = RedisOptions(answer_seconds=1.0, wait_seconds=20.0, renew_seconds=0.05)
    store = open_store(servers.url, options)
    store.commit(message(0))
    servers.wait_until_level()
    servers.isolate_master()
    promoted = servers.promoted().client()
    seq = 1
    while promoted.hget(RedisKeys("sluice").log, "frame") == b"1" and not store.failures:
        if not store.try_commit(message(seq)):
            break
        seq += 1
    # What the old master alone confirmed meanwhile is lost, and that is noticed.
    assert not store.failures or isinstance(store.failures[0], FramesLost)
    store.store.close()


def test_sentinel_that_does_not_answer_is_not_needed(servers: ReplicatedRedis) -> None:
    one, rest = servers.url.split("://")
    store = open_store(f"{one}://127.0.0.1:{free_port()},{rest}")
    store.commit(message(0))
    store.store.close()


def test_unknown_master_is_named_in_the_refusal(servers: ReplicatedRedis) -> None:
    with pytest.raises(StoreError, match="no Sentinel names the master other"):
        open_store(servers.url.replace(MASTER, "other"))


def test_unreachable_sentinels_are_reported() -> None:
    url = f"redis+sentinel://127.0.0.1:{free_port()}/{MASTER}"
    with pytest.raises(StoreError, match=f"no Sentinel names the master {MASTER}"):
        open_store(url)


def test_several_hosts_without_sentinels_are_a_redis_cluster_only(
    redis_server: RedisProcess,
) -> None:
    with pytest.raises(StoreError, match="not a Redis Cluster") as refusal:
        open_store(f"redis://127.0.0.1:{redis_server.port},127.0.0.1:1")
    assert "redis+sentinel://" in refusal.value.remedy


def test_store_follows_a_failover_in_a_redis_cluster(redis_folder: Path, tmp_path: Path) -> None:
    cluster = ReplicatedCluster(redis_folder / tmp_path.name)
    try:
        cluster.start()
        store = open_store(cluster.url)
        for seq in range(20):
            store.commit(*(message(seq, b"%d" % seq, pid) for pid in range(6)))
        killed = cluster.master_of(RedisKeys("sluice").log)
        killed.kill()
        acknowledged: list[bool] = []
        store.start_commit(message(20, b"20"), done=lambda: acknowledged.append(True))
        until(lambda: cluster.master_of(RedisKeys("sluice").log) != killed, "no promotion")
        assert not acknowledged, "the promoted node has no replica yet"
        killed.start()
        store.loop.turn_until(lambda: bool(acknowledged or store.failures))
        for seq in range(21, 30):
            address = store.commit(*(message(seq, b"%d" % seq, pid) for pid in range(6)))
        assert store.bodies(address) == [b"29"] * 6
        # A start does not depend on the first host of the address.
        server = RedisServer(cluster.url, 1.0)
        server.detect()
        assert server.is_cluster
        server.close()
        expected = [seq for seq in range(30) for _ in range(1 if seq == 20 else 6)]
        assert read_all(store) == expected
        store.store.close()
    finally:
        cluster.stop()
