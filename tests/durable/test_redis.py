"""A real `sluice serve` with its store in Redis: what is kept, what is refused, what goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from sluice.client import Client, PublishRefused
from tests.brokers import Broker, StartBroker
from tests.durable.crash import client_of, crash
from tests.redis_process import RedisProcess

CONFIG = """
[redis]
prefix = "{prefix}"
lease = "2s"
renew = "100ms"
wait = "200ms"
answer_timeout = "1s"
poll = "50ms"
"""


async def test_nothing_confirmed_is_lost_when_broker_and_redis_are_killed_in_turns(tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path / "redis").start()
    try:
        ledger = await crash(tmp_path, rounds=3, seconds=0.7, seed=5, redis=redis)
    finally:
        redis.stop()
    assert ledger.faults == []
    assert len(ledger.confirmed) > 100
    assert ledger.plain_confirmed


async def take(client: Client, count: int) -> list[bytes]:
    await client.subscribe("$queue/jobs", qos=1, user=[("consumer-group", "g"), ("ack-mode", "puback")])
    found: list[bytes] = []
    async for message in client.messages():
        found.append(message.payload)
        if len(found) == count:
            return found
    raise AssertionError("the line ended")


async def test_queues_sessions_and_retained_messages_outlive_the_broker(
    start_broker: StartBroker, redis_server: RedisProcess, tmp_path: Path
) -> None:
    config = CONFIG.format(prefix=tmp_path.name)
    broker = start_broker(config, ["--store", redis_server.url])
    async with client_of(broker, "lasting", clean_start=False, session_expiry=3600) as client:
        await client.subscribe("news", qos=1)
    async with client_of(broker, "author") as client:
        await client.publish("$queue/jobs", b"job", qos=1)
        await client.publish("state", b"on", qos=1, retain=True)
        await client.publish("news", b"while you were away", qos=1)
    broker.kill()
    broker = start_broker(config, ["--store", redis_server.url])
    async with client_of(broker, "worker") as client:
        assert await take(client, 1) == [b"job"]
    async with client_of(broker, "lasting", clean_start=False, session_expiry=3600) as client:
        await client.subscribe("state", qos=1)
        found = set()
        async for message in client.messages():
            found.add(message.payload)
            if len(found) == 2:
                break
        assert found == {b"while you were away", b"on"}


async def until_ready(broker: Broker, wanted: bool) -> str:
    """What `/readyz` says, once it says that the broker is ready or is not."""
    async with httpx.AsyncClient(timeout=30) as http:
        while True:
            answer = await http.get(f"http://{broker.facts['http']}/readyz")
            if (answer.status_code == 200) == wanted:
                return answer.text
            await asyncio.sleep(0.05)


async def test_publishers_are_refused_while_redis_has_no_memory_and_served_when_it_has(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    redis = RedisProcess(tmp_path / "redis").start()
    try:
        broker = start_broker(CONFIG.format(prefix="p"), ["--store", redis.url])
        admin = redis.client()
        async with client_of(broker, "author") as client:
            await client.publish("$queue/jobs", b"0", qos=1)
            admin.config_set("maxmemory", 1)
            first = client.publish_nowait("$queue/jobs", b"1", qos=1)  # waits
            assert "maxmemory" in await until_ready(broker, False)
            with pytest.raises(PublishRefused, match="maxmemory") as refusal:
                await client.publish("$queue/jobs", b"refused", qos=1)
            assert refusal.value.reason == 0x83
            admin.config_set("maxmemory", 0)
            await first
            await until_ready(broker, True)
            await client.publish("$queue/jobs", b"2", qos=1)
            assert sorted(await take(client, 3)) == [b"0", b"1", b"2"]
        broker.stop()
    finally:
        redis.stop()


async def test_a_broker_that_stands_by_takes_the_store_when_its_owner_is_gone(
    start_broker: StartBroker, redis_server: RedisProcess, tmp_path: Path
) -> None:
    config = CONFIG.format(prefix=tmp_path.name) + 'partitions = 3\nstandby = true\nrebalance = "100ms"\n'
    owner = start_broker(config, ["--store", redis_server.url])
    async with client_of(owner, "author") as client:
        await client.publish("$queue/jobs", b"job", qos=1)
    waiting = asyncio.create_task(asyncio.to_thread(start_broker, config, ["--store", redis_server.url]))
    done, _ = await asyncio.wait([waiting], timeout=3)  # longer than the lease
    assert not done, "there is an owner that lives"
    owner.kill()
    broker = await waiting
    async with client_of(broker, "worker") as client:
        assert await take(client, 1) == [b"job"]
    async with httpx.AsyncClient(timeout=30) as http:
        told = await http.get(f"http://{broker.facts['http']}/api/v1/queues/jobs")
    assert len(told.json()["partitions"]) == 3, "as redis.partitions says"


async def test_a_broker_whose_store_was_taken_ends_and_says_so(
    start_broker: StartBroker, redis_server: RedisProcess, tmp_path: Path
) -> None:
    broker = start_broker(CONFIG.format(prefix=tmp_path.name), ["--store", redis_server.url])
    redis_server.client().incr(f"{tmp_path.name}:{{log}}:fence")
    broker.await_end(1, seconds=30)
    assert "another broker has taken it over" in broker.log_text()
