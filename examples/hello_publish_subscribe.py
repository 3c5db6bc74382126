"""Publish a message and receive it.

`python examples/hello_publish_subscribe.py [mqtt://localhost:1883]` (or SLUICE_MQTT).
"""

import asyncio
import os
import sys

from sluice.client import Client


async def main(url: str) -> None:
    async with Client.from_url(url) as client:
        await client.subscribe("greetings/#", qos=1)
        await client.publish("greetings/world", "hello", qos=1)
        async for message in client.messages():
            print(message.topic, message.payload.decode())
            break


asyncio.run(
    main(
        sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SLUICE_MQTT", "mqtt://localhost:1883")
    )
)
