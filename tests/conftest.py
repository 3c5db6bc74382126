"""What every test may ask for."""

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

__all__ = ["sluice_broker"]  # as users get it by the package's entry point

# A deadline per example measures how busy the machine is; the timeout per test is the guard.
hypothesis.settings.register_profile("sluice", deadline=None, print_blob=True)
hypothesis.settings.load_profile("sluice")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop that `sluice serve` runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def start_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartBroker]:
    """Start brokers with a configuration of the test's own: `start_broker(config="[mqtt]\\nmax_qos = 1")`."""
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
    """A broker as it comes, shared by the tests of one module: use topics and client ids of your own."""
    running = Broker(tmp_path_factory.mktemp("broker"), "", (), {})
    yield running
    running.stop()


@pytest.fixture(scope="session")
def redis_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Every answer of Redis waits for a sync: where there is no disk below, that costs nothing."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK):
        with tempfile.TemporaryDirectory(prefix="sluice-redis-", dir=memory) as folder:
            yield Path(folder)
    else:
        yield tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="session")
def redis_server(redis_folder: Path) -> Iterator[RedisProcess]:
    """A Redis for the tests that do it no harm: use a prefix of your own."""
    running = RedisProcess(redis_folder / "single").start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def old_redis_server(redis_folder: Path) -> Iterator[RedisProcess]:
    """The oldest that will do, likewise."""
    running = RedisProcess(redis_folder / "old", program=need_old_redis()).start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def redis_cluster(redis_folder: Path) -> Iterator[RedisCluster]:
    """Three masters, likewise."""
    running = RedisCluster(redis_folder / "cluster").start()
    yield running
    running.stop()
