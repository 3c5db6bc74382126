"""Publishers and consumers that record confirmed and received messages."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from sluice.client import Client, ClientError, Confirm, PublishRefused
from tests.adversity.kit import SECONDS, Trial, connected_client
from tests.support.broker_process import Broker


class Producer:
    """Publishes numbered messages to a queue; `confirmed` has the acknowledged ones."""

    def __init__(self, queue: str, size: int = 1000, keys: int = 10) -> None:
        self.queue = queue
        self.confirmed: set[int] = set()
        self.refused = 0
        self.sent = 0
        self.slowest = 0.0
        self._size = size
        self._keys = keys

    def send(self, mqtt_client: Client) -> Confirm:
        number = self.sent
        self.sent += 1
        user = [
            ("message-id", f"{self.queue}-{number}"),
            ("partition-key", str(number % self._keys)),
        ]
        return mqtt_client.publish_nowait(
            f"$queue/{self.queue}", str(number).encode().ljust(self._size), qos=1, user=user
        )

    async def run(self, mqtt_client: Client, count: int = 1 << 60, window: int = 100) -> None:
        """Publish until `count` were sent, one is refused, or the connection is lost."""
        waiting: deque[tuple[int, float, Confirm]] = deque()
        last = self.sent + count
        while self.sent < last or waiting:
            while self.sent < last and len(waiting) < window:
                number, since = self.sent, time.monotonic()
                waiting.append((number, since, self.send(mqtt_client)))
            number, since, confirm = waiting.popleft()
            try:
                await confirm
            except PublishRefused:
                self.refused += 1
                last = 0
                continue
            self.slowest = max(self.slowest, time.monotonic() - since)
            self.confirmed.add(number)


async def fill(broker: Broker, producer: Producer, count: int, window: int = 500) -> None:
    async with connected_client(
        broker, f"filler-{producer.queue}", max_buffered=10_000
    ) as mqtt_client:
        await producer.run(mqtt_client, count, window)


async def check_nothing_lost(
    trial: Trial, broker: Broker, producer: Producer, when: str
) -> list[int]:
    """Check that every confirmed message is delivered, and return the deliveries."""
    got: list[int] = []
    end = time.monotonic() + SECONDS
    async with connected_client(broker, "checker-1", max_buffered=10_000) as mqtt_client:
        user = [("consumer-group", "check"), ("ack-mode", "puback"), ("prefetch", "1000")]
        await mqtt_client.subscribe(f"$queue/{producer.queue}", qos=1, user=user)
        missing = set(producer.confirmed)
        messages = mqtt_client.messages()
        while missing and time.monotonic() < end:
            try:
                async with asyncio.timeout(SECONDS / 4):
                    message = await anext(messages)
            except (TimeoutError, ClientError):
                break
            got.append(int(message.payload))
            missing.discard(got[-1])
    trial.expect(
        not missing, f"{len(missing)} of {len(producer.confirmed)} confirmed are missing {when}"
    )
    return got
