"""Tests of a real `sluice serve` whose store in Redis is replicated."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from sluice.client import PublishRefused
from tests.adversity.crashes.queue_crash import client_of
from tests.adversity.crashes.redis_promises import Row, run_round
from tests.support.broker_process import Broker, StartBroker
from tests.support.redis_topologies import ReplicatedRedis

CONFIG = """
[redis]
renew = "100ms"
wait = "500ms"
replica_timeout = "200ms"
min_replicas = 1
"""


async def page(broker: Broker, path: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        return await http.get(f"http://{broker.facts['http']}{path}")


async def until_ready(broker: Broker, wanted: bool) -> str:
    while True:
        answer = await page(broker, "/readyz")
        if (answer.status_code == 200) == wanted:
            return answer.text
        await asyncio.sleep(0.05)


async def test_publishers_wait_and_are_then_refused_while_replicas_are_missing(
    start_broker: StartBroker, redis_folder: Path, tmp_path: Path
) -> None:
    servers = ReplicatedRedis(redis_folder / tmp_path.name, sentinels=0).start()
    try:
        broker = start_broker(CONFIG, ["--store", servers.url])
        async with client_of(broker, "author") as author:
            await author.publish("$queue/jobs", b"stored", qos=1)
            servers.replicas[0].pause()
            held = author.publish_nowait("$queue/jobs", b"held", qos=1)
            assert "0 of 1 replicas of Redis" in await until_ready(broker, False)
            assert not held.done
            with pytest.raises(PublishRefused, match="0 of 1 replicas") as refusal:
                await author.publish("$queue/jobs", b"refused", qos=1)
            assert refusal.value.reason == 0x83
            servers.replicas[0].resume()
            await held
            await until_ready(broker, True)
        metrics = (await page(broker, "/metrics")).text
        assert "\nsluice_store_replicas 1\n" in metrics
        assert re.search(r"^sluice_store_replica_timeouts_total [1-9]", metrics, re.MULTILINE)
        queue = (await page(broker, "/api/v1/queues/jobs")).json()
        assert queue["stats"]["enqueued"] == 2
        broker.stop()
    finally:
        servers.stop()


async def test_nothing_confirmed_is_lost_when_a_replica_is_promoted_under_load(
    redis_folder: Path, tmp_path: Path
) -> None:
    row = Row("short", ["kill"], replicas=2, sentinels=1, settings="min_replicas = 1")
    folder = redis_folder / tmp_path.name
    folder.mkdir()
    done = await run_round(row, "kill", folder, 0.3)
    assert done.faults() == []
    assert len(done.confirmed) > 50
