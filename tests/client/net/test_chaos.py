"""Connections that break at random, and a broker that is killed: no loss, and order per key.

It takes a few seconds in the suite; for longer runs:
`CHAOS_SECONDS=60 python -m pytest tests/client/net/test_chaos.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from pathlib import Path

import pytest

from sluice.client import Backoff, Client, Delivery
from sluice.worker import Worker
from tests.client.servers import Proxy
from tests.support.broker_process import Broker

SECONDS = float(os.environ.get("CHAOS_SECONDS", "4"))
KEYS = 20
QUICK = Backoff(initial_seconds=0.01, max_seconds=0.05)


@pytest.mark.timeout(SECONDS * 4 + 120)
async def test_nothing_is_lost_and_key_order_holds_while_connections_break(broker: Broker) -> None:
    proxy = Proxy(broker.mqtt)
    await proxy.start()
    url = f"mqtt://127.0.0.1:{proxy.port}"
    app = Worker(url, name="chaos", backoff=QUICK)
    seen: dict[str, list[int]] = defaultdict(list)
    changed = asyncio.Event()

    @app.task("chaos", concurrency=10)
    async def event(delivery: Delivery) -> None:
        seen[delivery.key or ""].append(int(delivery.payload))
        await asyncio.sleep(0.001)
        changed.set()

    chance = random.Random(7)
    sent = cuts = 0
    loop = asyncio.get_running_loop()
    try:
        serving = asyncio.create_task(app.serve())
        async with Client.from_url(url, client_id="chaos-publisher", backoff=QUICK) as client:
            publisher = client.publisher("chaos")
            end = loop.time() + SECONDS
            next_cut = loop.time() + 0.2
            while loop.time() < end:
                await asyncio.gather(
                    *(publisher.send(str(sent), key=str(key)) for key in range(KEYS))
                )
                sent += 1
                await asyncio.sleep(0.005)
                if loop.time() > next_cut:
                    proxy.disconnect()
                    cuts += 1
                    next_cut = loop.time() + chance.uniform(0.05, 0.6)
            async with asyncio.timeout(90):
                while not all(set(range(sent)) <= set(seen[str(key)]) for key in range(KEYS)):
                    changed.clear()
                    await changed.wait()
        app.stop()
        await serving
    finally:
        await proxy.stop()
    assert cuts > 3
    for key, numbers in seen.items():
        first_seen = list(dict.fromkeys(numbers))
        assert first_seen == list(range(sent)), key
        assert numbers == sorted(numbers), f"an earlier message came after a later one of key {key}"


async def test_worker_and_publisher_survive_a_broker_kill(tmp_path: Path) -> None:
    """`kill -9` under load: the broker has every confirmed message, and the rest is resent."""
    harness = Broker(tmp_path, "", (), {})
    proxy = Proxy(harness.mqtt)
    await proxy.start()
    url = f"mqtt://127.0.0.1:{proxy.port}"
    app = Worker(url, name="survivor", backoff=QUICK)
    seen: dict[str, list[int]] = defaultdict(list)
    changed = asyncio.Event()

    @app.task("events", concurrency=10)
    async def event(delivery: Delivery) -> None:
        seen[delivery.key or ""].append(int(delivery.payload))
        changed.set()

    async def until_seen(count: int) -> None:
        while not all(set(range(count)) <= set(seen[str(key)]) for key in range(KEYS)):
            changed.clear()
            await changed.wait()

    serving = asyncio.create_task(app.serve())
    try:
        async with Client.from_url(url, client_id="publisher", backoff=QUICK) as client:
            publisher = client.publisher("events")

            async def send(number: int) -> None:
                await asyncio.gather(
                    *(publisher.send(str(number), key=str(key)) for key in range(KEYS))
                )

            for number in range(5):
                await send(number)
            await until_seen(3)
            sending = asyncio.create_task(send(5))
            await asyncio.sleep(0)
            harness.kill()
            harness = await asyncio.to_thread(Broker, tmp_path, "", (), {})
            proxy.redirect_to(harness.mqtt)
            await sending
            await send(6)
            async with asyncio.timeout(45):
                await until_seen(7)
        app.stop()
        await serving
    finally:
        await proxy.stop()
        harness.stop()
    for key, numbers in seen.items():
        assert list(dict.fromkeys(numbers)) == list(range(7)), key
