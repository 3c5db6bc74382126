"""From `$share` to a queue: what changes, and why.

`python examples/from_shared_subscription.py [mqtt://localhost:1883]` (or SLUICE_MQTT). A shared
subscription divides the messages among connected workers. Messages that arrive while none is
connected are lost, and so are those that a worker took and did not finish. The queue keeps both.
"""

import asyncio
import os
import sys
from contextlib import suppress

from sluice.client import Client

BEFORE = "examples/share/jobs"
AFTER = "examples/queued-jobs"


async def before(url: str) -> None:
    async with Client.from_url(url, client_id="publisher-1") as publisher:
        await publisher.publish(BEFORE, "early", qos=1)  # no worker yet: lost
        async with Client.from_url(url, client_id="worker-1") as worker:
            await worker.subscribe(f"$share/workers/{BEFORE}", qos=1)
            await publisher.publish(BEFORE, "in time", qos=1)
            print(f"$share: {(await anext(worker.messages())).payload.decode()}")
            # The worker dies now: the message was acknowledged on delivery, and no worker will
            # finish it.


async def after(url: str) -> None:
    async with Client.from_url(url, client_id="publisher-1") as publisher:
        # Only the topic changes here.
        await publisher.publish(f"$queue/{AFTER}", "early", qos=1)
    with suppress(RuntimeError):
        async with Client.from_url(url, client_id="workers-1") as worker:
            job = await anext(worker.consumer(AFTER))
            print(f"$queue: {job.text}, attempt {job.attempt}, and the worker dies")
            raise RuntimeError("out of memory")
    async with Client.from_url(url, client_id="workers-2") as worker:
        job = await anext(worker.consumer(AFTER))
        await job.ack()
        print(f"$queue: {job.text}, attempt {job.attempt}, done by another")


async def main(url: str) -> None:
    async with asyncio.timeout(30):
        await before(url)
        await after(url)


asyncio.run(
    main(
        sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SLUICE_MQTT", "mqtt://localhost:1883")
    )
)
