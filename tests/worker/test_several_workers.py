"""Several workers on one queue: none is idle while jobs wait, and a stop holds no jobs back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice.testing import VirtualBroker
from sluice.worker import Worker
from sluice.worker.adaptive_prefetch import AHEAD_FACTOR, MAX_WAIT_SECONDS


def make_worker(name: str, slow: asyncio.Event, done: list[bytes], concurrency: int = 1) -> Worker:
    """Return a worker whose job `slow` waits for the event; other jobs end at once."""
    app = Worker(name=name)

    @app.task("jobs", group="workers", concurrency=concurrency)
    async def job(payload: bytes) -> None:
        if payload.startswith(b"slow"):
            await slow.wait()
        done.append(payload)

    return app


@pytest.mark.parametrize(
    "config",
    [{}, {"ordering": "none"}, {"ordering": "none", "partitions": 1}],
    ids=["default", "no order", "no order, one partition"],
)
async def test_one_slow_job_does_not_block_the_jobs_behind_it(
    sluice_broker: VirtualBroker, config: dict[str, Any]
) -> None:
    slow, done = asyncio.Event(), list[bytes]()
    async with sluice_broker.client() as client:
        await client.declare_queue("jobs", **config)
    async with (
        sluice_broker.working(make_worker("a", slow, done)),
        sluice_broker.working(make_worker("b", slow, done)),
    ):
        async with sluice_broker.client() as client:
            await client.publisher("jobs").send(b"slow")
            await client.publisher("jobs").send_many([b"short"] * 40)
        await sluice_broker.advance(seconds=2, handlers=False)
        assert done == [b"short"] * 40
        slow.set()
        await sluice_broker.settle()
    assert sluice_broker.depth("jobs") == 0


async def test_stopping_worker_leaves_its_partitions_and_waiting_jobs_to_others_at_once(
    sluice_broker: VirtualBroker,
) -> None:
    slow, done = asyncio.Event(), list[bytes]()
    async with (
        sluice_broker.working(make_worker("stopping", slow, done)) as stopping,
        sluice_broker.client() as client,
    ):
        await client.publisher("jobs").send(b"slow", key="k")
        await sluice_broker.advance(seconds=0.1, handlers=False)
        async with sluice_broker.working(make_worker("staying", slow, done)):
            for number in range(20):
                await client.publisher("jobs").send(b"short", key=f"k{number}")
            stop = asyncio.create_task(stopping.stop(60.0))
            await sluice_broker.advance(seconds=0.5, handlers=False)
            assert done == [b"short"] * 20
            slow.set()
            await stop
            await sluice_broker.settle()
    assert done[-1] == b"slow"
    assert sluice_broker.ledger("jobs", "workers").acked == 21


async def test_short_jobs_are_prefetched_and_released_when_a_long_one_arrives(
    sluice_broker: VirtualBroker,
) -> None:
    slow, done = asyncio.Event(), list[bytes]()
    async with sluice_broker.client() as client:
        await client.publisher("jobs").send_many([b"short"] * (AHEAD_FACTOR * 4))
        async with sluice_broker.working(make_worker("a", slow, done)) as first:
            await sluice_broker.settle()
            (executor,) = first.executors
            await client.publisher("jobs").send(b"slow")
            await sluice_broker.advance(seconds=0.01, handlers=False)
            await client.publisher("jobs").send_many([b"behind"] * 20)
            await sluice_broker.advance(seconds=3 * MAX_WAIT_SECONDS, handlers=False)
            assert executor.consumer.buffered == 0, "a buffered job is kept from idle workers"
            async with sluice_broker.working(make_worker("b", slow, done)):
                await sluice_broker.advance(seconds=0.1, handlers=False)
                assert done.count(b"behind") == 20
                slow.set()
                await sluice_broker.settle()
