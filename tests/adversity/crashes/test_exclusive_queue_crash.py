"""`kill -9` of a real server while values of exclusive queues are written and read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sluice.client import Client, ClientError, Confirm
from tests.adversity.crashes.queue_crash import client_of
from tests.support.broker_process import Broker

KEYS = 20
WINDOW = 50
TIMEOUT_SECONDS = 60.0


class WriteLog:
    """Values confirmed to the writer, and values received by the owner."""

    def __init__(self) -> None:
        self.sent = 0
        self.confirmed: dict[str, int] = {}  # by key, the highest number
        self.got: dict[str, int] = {}
        self.settled = 0  # acknowledgements up to this sequence are on disk
        self.faults: list[str] = []
        self.changed = asyncio.Event()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not true():
                self.changed.clear()
                await self.changed.wait()

    def is_complete(self) -> bool:
        return all(self.got.get(key, -1) >= number for key, number in self.confirmed.items())


async def write(client: Client, write_log: WriteLog) -> None:
    waiting: deque[tuple[str, int, Confirm]] = deque()
    while True:
        while len(waiting) < WINDOW:
            write_log.sent += 1
            key = f"k/{write_log.sent % KEYS}"
            confirm = client.publish_nowait(f"$ECQ/w/owner/{key}", b"%d" % write_log.sent, qos=1)
            waiting.append((key, write_log.sent, confirm))
        key, number, confirm = waiting.popleft()
        await confirm
        write_log.confirmed[key] = number
        write_log.changed.set()


async def read(client: Client, write_log: WriteLog) -> None:
    """Read values, which are acknowledged when they are returned.

    A later confirmed publish proves that the acknowledgement is on disk.
    """
    await client.subscribe("$ECQ/owner/#", qos=1)
    before = 0
    nth = 0
    async for message in client.messages():
        seq = int(dict(message.properties.user)["sequence"])
        key, number = message.topic.removeprefix("$ECQ/owner/"), int(message.payload)
        if seq <= before:
            write_log.faults.append(f"{seq} came after {before}")
        if seq <= write_log.settled:
            write_log.faults.append(
                f"{seq} came again, and up to {write_log.settled} was acknowledged"
            )
        if number < write_log.got.get(key, 0):
            write_log.faults.append(f"{key} went back from {write_log.got[key]} to {number}")
        before = seq
        write_log.got[key] = number
        write_log.changed.set()
        nth += 1
        if nth % 20 == 0:
            await client.publish("$queue/marks", b"", qos=1)
            write_log.settled = seq


async def test_accepted_values_survive_a_kill_and_acknowledged_ones_are_not_redelivered(
    tmp_path: Path,
) -> None:
    write_log = WriteLog()
    for mark in (300, 600):
        broker = Broker(tmp_path, "", (), {})
        tasks = [
            asyncio.create_task(run_until_killed(broker, who, write_log))
            for who in ("writer", "owner")
        ]
        try:
            await write_log.until(lambda mark=mark: write_log.sent > mark and write_log.settled > 0)  # type: ignore[misc]
        finally:
            broker.kill()
        await asyncio.gather(*tasks)
    broker = Broker(tmp_path, "", (), {})
    task = asyncio.create_task(run_until_killed(broker, "owner", write_log))
    await write_log.until(write_log.is_complete)
    broker.stop()
    await task
    assert write_log.faults == []
    assert len(write_log.confirmed) == KEYS and write_log.settled > 0


async def run_until_killed(broker: Broker, who: str, write_log: WriteLog) -> None:
    """Run until the connection is lost."""
    try:
        async with client_of(broker, who) as client:
            await (write(client, write_log) if who == "writer" else read(client, write_log))
    except ClientError:
        pass
