"""Finished jobs are skipped, with each kind of deduplication store."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from sluice.client import Delivery
from sluice.testing import VirtualBroker
from sluice.worker import (
    DeduplicationStore,
    MemoryDeduplication,
    RedisDeduplication,
    SqliteDeduplication,
    Worker,
)
from tests.client.servers import free_port
from tests.support.external_programs import need_redis


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = need_redis()
    port = free_port()
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        cwd=tmp_path_factory.mktemp("redis"),
        stdout=subprocess.DEVNULL,
    )
    try:
        with redis.Redis(port=port) as client:
            deadline = time.monotonic() + 30
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    assert time.monotonic() < deadline and process.poll() is None
                    time.sleep(0.02)  # redis-server does not report when it listens
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def done(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DeduplicationStore]:
    log: DeduplicationStore
    if request.param == "memory":
        log = MemoryDeduplication()
    elif request.param == "sqlite":
        log = SqliteDeduplication(tmp_path / "done.db")
    else:
        log = RedisDeduplication(request.getfixturevalue("redis_url"), prefix=f"{tmp_path}:")
    yield log
    await log.close()


async def test_redelivered_job_that_was_done_is_skipped(
    sluice_broker: VirtualBroker, done: DeduplicationStore
) -> None:
    app, did = Worker(name="w"), []

    @app.task("jobs", deduplicate=done)
    async def job(delivery: Delivery) -> None:
        did.append(delivery.text)
        if delivery.text == "fails" and len(did) < 3:
            raise ValueError("not done")

    async with sluice_broker.working(app):
        for _ in range(2):  # beyond the dedup window the queue accepts the id again
            await sluice_broker.publish("jobs", "pay", id="pay-1")
            await sluice_broker.advance(minutes=3)
        assert did == ["pay"]
        await sluice_broker.publish("jobs", "fails", id="fails-1")
        await sluice_broker.advance(minutes=3)
    assert did == ["pay", "fails", "fails"]
    assert sluice_broker.ledger("jobs", "w").acked == 3


async def test_done_jobs_are_known_to_the_next_process(tmp_path: Path) -> None:
    first = SqliteDeduplication(tmp_path / "done.db")
    await first.add("job-1")
    await first.close()
    second = SqliteDeduplication(tmp_path / "done.db")
    assert await second.has("job-1") and not await second.has("job-2")
    await second.close()


async def test_sqlite_forgets_after_its_ttl(tmp_path: Path) -> None:
    now = 0.0
    log = SqliteDeduplication(tmp_path / "done.db", keep="1h", clock=lambda: now)
    await log.add("job-1")
    now = 3599.0
    assert await log.has("job-1")
    now = 3601.0
    assert not await log.has("job-1")
    await log.close()


async def test_memory_forgets_the_oldest_above_its_limit() -> None:
    log = MemoryDeduplication(limit=2)
    for name in ("a", "b", "c"):
        await log.add(name)
    assert [await log.has(name) for name in ("a", "b", "c")] == [False, True, True]
