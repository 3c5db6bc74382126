"""Opens stores with one of everything, as earlier versions and this one write them.

`full_stores/version-N.tar.xz` was written by a broker with version N of the queues' state,
`version-N.redis.xz` are the keys of the same store in Redis, `version-N.cluster.xz` those of a
cluster of three nodes that were all stopped. `full_store.py` writes and checks them. Each store has
a snapshot and, after it, a log; those of version 7 only have a log, because snapshots of versions
before 8 are refused.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversity.crashes.full_store import CONFIG, NODES, check, restore_keys, write_store
from tests.cluster.real_nodes.node_processes import Nodes
from tests.support.broker_process import Broker
from tests.support.redis_process import RedisProcess

STORES = Path(__file__).with_name("full_stores")
VERSIONS = sorted(int(path.stem.split("-")[1].split(".")[0]) for path in STORES.glob("*.tar.xz"))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    running = RedisProcess(tmp_path / "redis").start()
    yield running
    running.stop()


@pytest.mark.parametrize("version", VERSIONS)
async def test_everything_in_a_store_of_an_earlier_version_is_there(
    version: int, tmp_path: Path
) -> None:
    with tarfile.open(STORES / f"version-{version}.tar.xz") as store:
        store.extractall(tmp_path, filter="data")
    broker = Broker(tmp_path, CONFIG, (), {})
    try:
        await check(broker)
    finally:
        broker.stop()


@pytest.mark.parametrize("version", VERSIONS)
async def test_everything_in_a_redis_store_of_an_earlier_version_is_there(
    version: int, redis: RedisProcess, tmp_path: Path
) -> None:
    restore_keys(redis, STORES / f"version-{version}.redis.xz")
    broker = Broker(tmp_path, CONFIG, ("--store", redis.url), {})
    try:
        await check(broker)
    finally:
        broker.stop()


@pytest.mark.parametrize("version", VERSIONS)
async def test_everything_in_a_cluster_of_an_earlier_version_is_there(
    version: int, redis: RedisProcess, tmp_path: Path
) -> None:
    restore_keys(redis, STORES / f"version-{version}.cluster.xz")
    folder = tmp_path / "cluster"  # also the name of the cluster
    folder.mkdir()
    nodes = Nodes(folder, redis.url, CONFIG)
    try:
        *_, third = [nodes.start(name) for name in NODES]
        await check(third)
    finally:
        nodes.stop()


async def test_everything_outlives_a_kill_without_a_snapshot(tmp_path: Path) -> None:
    def start() -> Broker:
        return Broker(tmp_path, CONFIG, (), {})

    await write_store(start)
    broker = start()
    try:
        await check(broker)
    finally:
        broker.stop()
