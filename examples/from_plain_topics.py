"""From plain publish and subscribe to a queue, without changing the devices.

`python examples/from_plain_topics.py [mqtt://localhost:1883]` (or SLUICE_MQTT). Before: a
subscriber that is offline misses messages. After: a queue is bound to the same topic filter and
stores a copy; the devices and the old subscriber work as before, and a consumer of the queue misses
nothing.
"""

import asyncio
import os
import sys

from sluice.client import Client

FILTER = "examples/sensors/+/temperature"
QUEUE = "examples/temperatures"


async def device(url: str, name: str, value: float) -> None:
    """Publish like a device that knows nothing of queues and speaks MQTT 3.1.1."""
    async with Client.from_url(url, client_id=f"device-{name}", version=4) as client:
        await client.publish(f"examples/sensors/{name}/temperature", str(value), qos=1)


async def main(url: str) -> None:
    async with Client.from_url(url, client_id="migration-1") as client:
        await client.declare_queue(QUEUE, bindings=[FILTER])

    async with Client.from_url(url, client_id="old-subscriber") as old:
        await old.subscribe(FILTER, qos=1)
        await device(url, "kitchen", 21.5)
        print(f"the old subscriber hears {(await anext(old.messages())).payload.decode()}")
    await device(url, "cellar", 11.0)  # no subscriber is connected now

    async with (
        asyncio.timeout(30),
        Client.from_url(url, client_id="archive-1") as client,
        client.consumer(QUEUE, group="archive") as readings,
    ):
        for _ in range(2):
            reading = await anext(readings)
            print(f"the queue has {reading.headers['original-topic']} {reading.text}")
            await reading.ack()


asyncio.run(
    main(
        sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SLUICE_MQTT", "mqtt://localhost:1883")
    )
)
