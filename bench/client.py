"""Measure the client library: pipelined publishes with PUBACKs, and their deliveries.

sluice serve &
python bench/client.py [mqtt://127.0.0.1:1883] [MESSAGES]
"""

from __future__ import annotations

import asyncio
import sys
import time

from sluice.client import Client, Confirm

WINDOW = 1000


async def measure(url: str, topic: str, qos: int, count: int) -> None:
    """Publish `count` messages of 100 B and receive them in the same process.

    At most `WINDOW` are in flight: for a subscriber further behind, the server would queue and then
    drop messages.
    """
    async with Client.from_url(url, client_id="bench-1") as client:
        await client.subscribe(topic, qos=qos)
        wall, cpu = time.perf_counter(), time.process_time()
        window = asyncio.Semaphore(WINDOW)
        receiving = asyncio.create_task(receive(client, count, window))
        last: Confirm | None = None
        for _ in range(count):
            await window.acquire()
            last = client.publish_nowait(topic, b"x" * 100, qos=qos)
        if last is not None:
            await last
        confirmed = time.perf_counter() - wall
        await receiving
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(
            f"QoS {qos}: {count / confirmed:9,.0f} confirmed/s, {count / wall:9,.0f} received/s, "
            f"{cpu / count * 1e6:5.1f} us of this process per message"
        )


async def receive(client: Client, count: int, window: asyncio.Semaphore) -> None:
    messages = client.messages()
    for _ in range(count):
        await anext(messages)
        window.release()


async def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "mqtt://127.0.0.1:1883"
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 50_000
    for qos in (0, 1, 2):
        await measure(url, f"bench/client/{qos}", qos, count if qos < 2 else count // 4)


if __name__ == "__main__":
    asyncio.run(main())
