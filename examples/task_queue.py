"""A task queue: six jobs, two workers of one group, and one job that fails until it is a dead letter.

`python examples/task_queue.py [mqtt://localhost:1883]` (or SLUICE_MQTT). It ends by itself.
"""

import asyncio
import json
import os
import sys

from sluice.client import Client, Message, PublishRefused

QUEUE = "$queue/examples/jobs"
DEAD_LETTERS = "$queue/dlq/examples/jobs"
CONFIG = {"name": "examples/jobs", "retry_policy": {"max_retries": 2, "initial_backoff": "100ms"}}
JOBS = ["cat.png", "dog.png", "broken.png", "cow.png", "hen.png", "fox.png"]


async def create_queue(client: Client) -> None:
    try:
        await client.publish("$admin/queue/create", json.dumps(CONFIG), qos=1)
        print("created the queue")
    except PublishRefused as refusal:  # it is there from the last time
        print(refusal.reason_string)


async def settle(client: Client, verb: str, message: Message, **more: str) -> None:
    """Say what became of a delivery. The token proves that it is still ours: a late answer is refused."""
    told = dict(message.properties.user)
    named = {name: told[name] for name in ("message-id", "delivery-token")}
    await client.publish(f"{message.topic}/{verb}", qos=1, user={**named, **more})


def resize(image: str) -> None:
    if image == "broken.png":
        raise ValueError("not an image")


async def work(url: str, name: str, ready: asyncio.Barrier, done: asyncio.Queue[str]) -> None:
    """Workers called jobs-1 and jobs-2 are the group jobs: each job goes to one of them."""
    async with Client.from_url(url, client_id=name) as client:
        await client.subscribe(QUEUE, qos=1, user={"prefetch": "1"})
        await ready.wait()
        async for message in client.messages():
            image = message.payload.decode()
            attempt = dict(message.properties.user)["attempt"]
            try:
                resize(image)
            except ValueError as fault:
                print(f"{name}: {image} failed, attempt {attempt}")
                await settle(client, "$nack", message, description=str(fault))
            else:
                print(f"{name}: {image} done")
                await settle(client, "$ack", message)
                done.put_nowait(image)


async def next_dead_letter(client: Client) -> str:
    await client.subscribe(DEAD_LETTERS, qos=1)
    letter = await anext(client.messages())
    story = dict(letter.properties.user)
    await settle(client, "$ack", letter)
    return f"{letter.payload.decode()}, {story['dead-reason']}, {story['dead-description']}"


async def main(url: str) -> None:
    ready = asyncio.Barrier(3)
    done: asyncio.Queue[str] = asyncio.Queue()
    async with Client.from_url(url, client_id="jobs-office") as client, asyncio.TaskGroup() as team:
        await create_queue(client)
        workers = [team.create_task(work(url, f"jobs-{number}", ready, done)) for number in (1, 2)]
        await ready.wait()
        for image in JOBS:
            await client.publish(QUEUE, image, qos=1)  # returns when the job is on disk
        print(f"published {len(JOBS)} jobs")
        async with asyncio.timeout(30):
            finished = [await done.get() for image in JOBS if image != "broken.png"]
            print(f"dead letter: {await next_dead_letter(client)}")
        print(f"{len(finished)} jobs done, 1 dead")
        for worker in workers:
            worker.cancel()


asyncio.run(
    main(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SLUICE_MQTT", "mqtt://localhost:1883"))
)
