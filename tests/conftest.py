"""Fixtures for all tests."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
import uvloop

from sluice.pytest_plugin import sluice_broker
from tests.support.broker_process import Broker, StartBroker
from tests.support.external_programs import need_old_redis
from tests.support.redis_process import RedisCluster, RedisProcess

__all__ = ["sluice_broker"]  # as registered by the package's entry point

# A deadline per example measures the load of the machine; the timeout per test is enough.
hypothesis.settings.register_profile("sluice", deadline=None, print_blob=True)
hypothesis.settings.load_profile("sluice")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run tests on the event loop that `sluice serve` uses."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def start_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartBroker]:
    """Start configured brokers: `start_broker(config="[mqtt]\\nmax_qos = 1")`."""
    with ExitStack() as running:

        def start(
            config: str = "", flags: Sequence[str] = (), environ: Mapping[str, str] | None = None
        ) -> Broker:
            broker = Broker(tmp_path_factory.mktemp("broker"), config, flags, environ or {})
            running.callback(broker.stop)
            return broker

        yield start


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with defaults, shared by the tests of a module: use unique topics and client ids."""
    running = Broker(tmp_path_factory.mktemp("broker"), "", (), {})
    yield running
    running.stop()


@pytest.fixture(scope="session")
def redis_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory, if possible: each reply of Redis waits for a sync."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK):
        with tempfile.TemporaryDirectory(prefix="sluice-redis-", dir=memory) as folder:
            yield Path(folder)
    else:
        yield tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="session")
def redis_server(redis_folder: Path) -> Iterator[RedisProcess]:
    """A Redis shared by tests that do not disturb it: use a unique prefix."""
    running = RedisProcess(redis_folder / "single").start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def old_redis_server(redis_folder: Path) -> Iterator[RedisProcess]:
    """The oldest supported Redis, shared in the same way."""
    running = RedisProcess(redis_folder / "old", program=need_old_redis()).start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def redis_cluster(redis_folder: Path) -> Iterator[RedisCluster]:
    """A Redis Cluster of three masters, shared in the same way."""
    running = RedisCluster(redis_folder / "cluster").start()
    yield running
    running.stop()
