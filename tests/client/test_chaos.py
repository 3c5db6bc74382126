"""Lines that break at random: nothing is lost, and the order of each key is kept.

A few seconds in the suite; `CHAOS_SECONDS=60 python -m pytest tests/client/test_chaos.py` for longer."""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict

import pytest

from sluice.client import Backoff, Client, Delivery
from sluice.worker import Worker
from tests.brokers import Broker
from tests.client.servers import Proxy

SECONDS = float(os.environ.get("CHAOS_SECONDS", "4"))
KEYS = 20
QUICK = Backoff(initial_seconds=0.01, max_seconds=0.05)


@pytest.mark.timeout(SECONDS * 4 + 120)
async def test_nothing_is_lost_and_the_order_of_each_key_is_kept_while_lines_break(broker: Broker) -> None:
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
                await asyncio.gather(*(publisher.send(str(sent), key=str(key)) for key in range(KEYS)))
                sent += 1
                await asyncio.sleep(0.005)
                if loop.time() > next_cut:
                    proxy.cut()
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
        assert numbers == sorted(numbers), f"an earlier one came again after a later one of key {key}"
