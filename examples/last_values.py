"""Both sides of an exclusive compacted queue: a writer of values, and the client that owns them.

`python examples/last_values.py [mqtt://localhost:1883]` (or SLUICE_MQTT). The owner is offline
while the values are written, and gets the last one of each key. It ends by itself.
"""

import asyncio
import os
import sys

from sluice.client import Client

OWNER = "examples-car"  # a client id: only this client can read its values


async def write(url: str) -> None:
    """Publish values; each replaces the older one of its key."""
    async with Client.from_url(url) as client:
        for speed in (80, 95, 110):
            await client.publish(f"$ECQ/w/{OWNER}/speed", str(speed), qos=1)
        await client.publish(f"$ECQ/w/{OWNER}/lights/left", "on", qos=1)
        await client.publish(f"$ECQ/w/{OWNER}/window", "open", qos=1)
        await client.publish(f"$ECQ/w/{OWNER}/window", b"", qos=1)  # deletes the key


async def read(url: str, count: int) -> None:
    """Receive values as their owner. Handing out the next one acknowledges the one before."""
    async with Client.from_url(url, client_id=OWNER) as client:
        await client.subscribe(f"$ECQ/{OWNER}/#", qos=1)
        messages = client.messages()
        async with asyncio.timeout(30):
            for _ in range(count):
                message = await anext(messages)
                key = message.topic.removeprefix(f"$ECQ/{OWNER}/")
                sequence = dict(message.properties.user)["sequence"]
                print(f"{key} = {message.payload.decode() or '(deleted)'}, sequence {sequence}")


async def main(url: str) -> None:
    await write(url)
    await read(url, 3)
    print("again, after a reconnect")
    await write(url)
    await read(url, 3)


asyncio.run(
    main(
        sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SLUICE_MQTT", "mqtt://localhost:1883")
    )
)
