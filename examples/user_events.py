"""Events of users, in order for each user and in parallel across users, even if one of them fails.

`python examples/user_events.py [mqtt://localhost:1883]` (or SLUICE_MQTT). Bob's second event fails
twice: only his later events wait for it.
"""

import asyncio
import logging
import os
import sys
from collections import defaultdict

from sluice.client import Client, Delivery, OutgoingMessage
from sluice.worker import Retry, Worker

QUEUE = "examples/user-events"
USERS = ["ann", "bob", "cid"]
EVENTS = ["signed up", "paid", "left"]

logging.getLogger("sluice.worker").setLevel(logging.CRITICAL)


async def main(url: str) -> None:
    app = Worker(url, name="crm")
    seen: dict[str, list[str]] = defaultdict(list)
    all_seen = asyncio.Event()

    @app.task(QUEUE, concurrency=10)
    async def event(what: str, delivery: Delivery) -> None:
        user = delivery.key or ""
        if (user, what) == ("bob", "paid") and delivery.attempt < 3:
            raise Retry("the bank does not answer", delay=0.1)
        seen[user].append(what)
        print(f"{user} {what}, attempt {delivery.attempt}")
        if sum(map(len, seen.values())) == len(USERS) * len(EVENTS):
            all_seen.set()

    async with Client.from_url(url, client_id="shop-1") as client:
        running = asyncio.create_task(app.serve())
        await client.publisher(QUEUE).send_many(
            OutgoingMessage(what, key=user) for what in EVENTS for user in USERS
        )
        async with asyncio.timeout(30):
            await all_seen.wait()
        app.stop()
        await running
    print("in order:", all(events == EVENTS for events in seen.values()))


asyncio.run(
    main(
        sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SLUICE_MQTT", "mqtt://localhost:1883")
    )
)
