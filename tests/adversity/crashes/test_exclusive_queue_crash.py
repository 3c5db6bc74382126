"""`kill -9` of a real server while values of exclusive queues are written and read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sluice.client import Client, ClientError, Confirm
from tests.support.broker_process import Broker
from tests.adversity.crashes.queue_crash import client_of

KEYS = 20
WINDOW = 50
PATIENCE_SECONDS = 60.0


class Book:
    """What the writer was told, and what the owner got."""

    def __init__(self) -> None:
        self.sent = 0
        self.confirmed: dict[str, int] = {}  # by key, the highest number
        self.got: dict[str, int] = {}
        self.settled = 0  # acknowledgements up to here are on disk
        self.faults: list[str] = []
        self.changed = asyncio.Event()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true():
                self.changed.clear()
                await self.changed.wait()

    def is_complete(self) -> bool:
        return all(self.got.get(key, -1) >= number for key, number in self.confirmed.items())


async def write(client: Client, book: Book) -> None:
    waiting: deque[tuple[str, int, Confirm]] = deque()
    while True:
        while len(waiting) < WINDOW:
            book.sent += 1
            key = f"k/{book.sent % KEYS}"
            confirm = client.publish_nowait(f"$ECQ/w/owner/{key}", b"%d" % book.sent, qos=1)
            waiting.append((key, book.sent, confirm))
        key, number, confirm = waiting.popleft()
        await confirm
        book.confirmed[key] = number
        book.changed.set()


async def read(client: Client, book: Book) -> None:
    """Acknowledged as it is handed out. A publish that is answered behind it proves that this is on disk."""
    await client.subscribe("$ECQ/owner/#", qos=1)
    before = 0
    nth = 0
    async for message in client.messages():
        seq = int(dict(message.properties.user)["sequence"])
        key, number = message.topic.removeprefix("$ECQ/owner/"), int(message.payload)
        if seq <= before:
            book.faults.append(f"{seq} came behind {before}")
        if seq <= book.settled:
            book.faults.append(f"{seq} came again, and up to {book.settled} was acknowledged")
        if number < book.got.get(key, 0):
            book.faults.append(f"{key} went back from {book.got[key]} to {number}")
        before = seq
        book.got[key] = number
        book.changed.set()
        nth += 1
        if nth % 20 == 0:
            await client.publish("$queue/marks", b"", qos=1)
            book.settled = seq


async def test_no_accepted_value_is_lost_and_no_acknowledged_one_comes_again_when_the_server_is_killed(
    tmp_path: Path,
) -> None:
    book = Book()
    for mark in (300, 600):
        broker = Broker(tmp_path, "", (), {})
        tasks = [asyncio.create_task(quietly(broker, who, book)) for who in ("writer", "owner")]
        try:
            await book.until(lambda mark=mark: book.sent > mark and book.settled > 0)  # type: ignore[misc]
        finally:
            broker.kill()
        await asyncio.gather(*tasks)
    broker = Broker(tmp_path, "", (), {})
    task = asyncio.create_task(quietly(broker, "owner", book))
    await book.until(book.is_complete)
    broker.stop()
    await task
    assert book.faults == []
    assert len(book.confirmed) == KEYS and book.settled > 0


async def quietly(broker: Broker, who: str, book: Book) -> None:
    """Until the line breaks."""
    try:
        async with client_of(broker, who) as client:
            await (write(client, book) if who == "writer" else read(client, book))
    except ClientError:
        pass
