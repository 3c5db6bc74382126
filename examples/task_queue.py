"""A task queue: twenty jobs, five workers of one group, and one job that becomes a dead letter.

`python examples/task_queue.py [mqtt://localhost:1883]` (or SLUICE_MQTT). It ends by itself. The
five workers share this process to keep the example short; `sluice worker module:app` runs each in a
process of its own.
"""

import asyncio
import logging
import os
import sys

from sluice.client import Client, Delivery
from sluice.worker import Worker

QUEUE = "examples/jobs"
JOBS = [f"image-{number}.png" for number in range(19)] + ["broken.png"]

# The failure is intended: do not show its traceback.
logging.getLogger("sluice.worker").setLevel(logging.CRITICAL)


def make_worker(url: str, number: int, done: asyncio.Queue[str]) -> Worker:
    """Create one of five workers; each job goes to one of them."""
    app = Worker(url, name="resizers")

    @app.task(QUEUE, concurrency=2, prefetch=2)
    async def resize(image: str, delivery: Delivery) -> None:
        if image == "broken.png":
            print(f"worker {number}: {image} failed, attempt {delivery.attempt}")
            raise ValueError("not an image")
        await asyncio.sleep(0.01)  # simulates the work
        print(f"worker {number}: {image} done")
        done.put_nowait(image)

    return app


async def main(url: str) -> None:
    done: asyncio.Queue[str] = asyncio.Queue()
    async with Client.from_url(url, client_id="office-1") as client:
        await client.declare_queue(
            QUEUE, retry_policy={"max_retries": 2, "initial_backoff": "100ms"}
        )
        workers = [make_worker(url, number, done) for number in range(1, 6)]
        running = [asyncio.create_task(worker.serve()) for worker in workers]
        await client.publisher(QUEUE).send_many(JOBS)  # returns when all of them are on disk
        print(f"published {len(JOBS)} jobs")
        async with asyncio.timeout(30):
            finished = [await done.get() for image in JOBS if image != "broken.png"]
            failed = await anext(client.consumer(f"dlq/{QUEUE}"))
            print(
                f"dead letter: {failed.text}, {failed.headers['dead-reason']},"
                f" {failed.headers['dead-description']}"
            )
            await failed.ack()
        print(f"{len(finished)} jobs done, 1 dead")
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)


asyncio.run(
    main(
        sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SLUICE_MQTT", "mqtt://localhost:1883")
    )
)
