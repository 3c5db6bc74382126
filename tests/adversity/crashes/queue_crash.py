"""Kill a real `sluice serve` under load, restart it, and compare acknowledgements with deliveries.

    scripts/crash --rounds 50 [--seconds 1.0] [--seed 1] [--redis]

Publishers write into a queue with ids and keys, and to a plain topic that a persistent session
subscribes to; consumers of one group ack, and sometimes nack. After each kill the next round
continues with the same data: publishers resend unconfirmed messages under the same ids. Sometimes a
start is killed as well, before it is ready. At the end everything is drained. The ledger knows
which messages were sent, confirmed, delivered, acked, and confirmed as acked, and reports

* a message that was confirmed to its publisher and never delivered,
* a delivery of a message whose ack had been confirmed,
* a delivery that overtakes an earlier message of its key which is not done.

With `--redis` the store is a Redis of its own, which is killed in every other round before the
broker is: the broker must continue when Redis is back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from sluice.client import Client, ClientError, Confirm, Message
from sluice.client.protocol.pending import PendingOperation
from tests.support.broker_process import Broker
from tests.support.redis_process import RedisProcess

PUBLISHERS = 3
CONSUMERS = 3
KEYS = 5  # of each publisher
WINDOW = 50  # unacknowledged publishes of one publisher
NACK_SHARE = 0.02
KILLED_STARTS = 0.2  # of all rounds
SIZE = 1000  # bytes of a message: fifty rounds fill several segments
DRAIN_SECONDS = 30.0
CONFIG = """
[[queues.templates]]
match = "crash"
[queues.templates.config.retry_policy]
max_retries = 1000000
[queues.templates.config.limits]
max_queue_depth = 10000000
dedup_window = "1h"
"""
REDIS_CONFIG = """
[redis]
lease = "1s"
renew = "100ms"
poll = "50ms"
"""


class Ledger:
    """The history of every message.

    Names are `<key>/<number>`, numbers count up within a key.
    """

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.confirmed: set[str] = set()
        self.delivered: set[str] = set()
        self.acked: set[str] = set()  # an ack was sent
        self.settled: set[str] = set()  # and confirmed
        # By key: a lower bound of the numbers that are confirmed and not acked.
        self.lowest_unsettled: dict[str, int] = {}
        # the persistent session is subscribed and must get every plain message
        self.listening = False
        self.plain_confirmed: set[str] = set()
        self.plain_received: set[str] = set()
        self.redelivered = 0
        self.faults: list[str] = []

    def deliver(self, name: str) -> None:
        if name in self.settled:
            self.faults.append(f"{name} was delivered after its ack had been confirmed")
        if name in self.delivered:
            self.redelivered += 1
        self.delivered.add(name)
        key, _, number = name.rpartition("/")
        at = self.lowest_unsettled.get(key, 0)
        while at < int(number):
            before = f"{key}/{at}"
            if before not in self.acked and before in self.confirmed:
                self.faults.append(f"{name} overtook {before}")
                return
            if before not in self.acked:
                return  # not confirmed: it may not be stored at all
            at += 1
            self.lowest_unsettled[key] = at

    def check_end(self) -> None:
        for name in sorted(self.confirmed - self.delivered):
            self.faults.append(f"{name} was confirmed and never delivered")
        for name in sorted(self.plain_confirmed - self.plain_received):
            self.faults.append(f"{name} was confirmed and never reached the persistent session")

    def is_drained(self) -> bool:
        """Return whether no more deliveries are expected.

        An ack may be stored without having been confirmed.
        """
        return (
            self.sent <= self.confirmed
            and self.sent <= self.acked
            and self.plain_confirmed <= self.plain_received
        )


class Publisher:
    """Continues from round to round: resends unconfirmed messages first, in order."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self._name = name
        self._ledger = ledger
        self._counts = [0] * KEYS
        self._unconfirmed: deque[str] = deque()
        self._plain = 0

    async def run(self, client: Client, fresh: bool) -> None:
        """Publish until the connection is lost; without `fresh`, only unconfirmed messages."""
        waiting: deque[tuple[str, Confirm]] = deque()
        for name in list(self._unconfirmed):
            waiting.append((name, self._publish(client, name)))
        turn = 0
        while fresh or waiting:
            while fresh and len(waiting) < WINDOW:
                turn += 1
                key = turn % KEYS
                name = f"{self._name}-{key}/{self._counts[key]}"
                self._counts[key] += 1
                self._unconfirmed.append(name)
                self._ledger.sent.add(name)
                waiting.append((name, self._publish(client, name)))
            name, confirm = waiting.popleft()
            await confirm
            self._ledger.confirmed.add(name)
            self._unconfirmed.remove(name)
            if fresh and turn % 10 == 0 and self._ledger.listening:
                await self._publish_plain(client)

    def _publish(self, client: Client, name: str) -> Confirm:
        user = [("message-id", name), ("partition-key", name.rpartition("/")[0])]
        return client.publish_nowait("$queue/crash", name.encode().ljust(SIZE), qos=1, user=user)

    async def _publish_plain(self, client: Client) -> None:
        self._plain += 1
        name = f"plain-{self._name}/{self._plain}"
        await client.publish("plain/news", name.encode(), qos=1 + self._plain % 2)
        self._ledger.plain_confirmed.add(name)


async def consume(client: Client, ledger: Ledger, draw: random.Random) -> None:
    await client.subscribe("$queue/crash", qos=1, user=[("consumer-group", "crash")])
    async for message in client.messages():
        name = message.payload.rstrip().decode()
        ledger.deliver(name)
        verb = "nack" if draw.random() < NACK_SHARE else "ack"
        if verb == "ack":
            ledger.acked.add(name)
        properties = [("message-id", name), ("delivery-token", token_of(message)), ("delay", "0s")]
        confirm = client.publish_nowait(f"$queue/crash/${verb}", qos=1, user=properties)
        if verb == "ack":
            confirm.add_done_callback(Settled(ledger, name))


class Settled:
    """Called when an ack is confirmed: a successful one must hold from now on."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self._name = name

    def __call__(self, confirm: PendingOperation) -> None:
        assert isinstance(confirm, Confirm)
        with suppress(ClientError):
            if confirm.result().reason == 0:
                self._ledger.settled.add(self._name)


def token_of(message: Message) -> str:
    return dict(message.properties.user)["delivery-token"]


async def listen_with_pauses(client: Client, ledger: Ledger) -> None:
    """The lasting session: it gets messages published while it was offline."""
    await client.subscribe("plain/#", qos=2)
    ledger.listening = True
    async for message in client.messages():
        ledger.plain_received.add(message.payload.decode())


class BrokerKilledAtStart(Broker):
    """A server that is killed a given time after its start, in any state."""

    class Killed(Exception):
        pass

    def __init__(self, folder: Path, config: str, seconds: float) -> None:
        self._seconds = seconds
        super().__init__(folder, config, (), {})

    def _read_ready_line(self) -> str:
        time.sleep(self._seconds)
        raise BrokerKilledAtStart.Killed


class CrashRun:
    def __init__(
        self, folder: Path, seed: int, redis: RedisProcess | None = None, killed_starts: float = 0.0
    ) -> None:
        self._folder = folder
        self._killed_starts = killed_starts if redis is None else 0.0
        self._redis = redis
        self._rounds = 0
        self._draw = random.Random(seed)
        self.ledger = Ledger()
        self._publishers = [Publisher(f"p{nth}", self.ledger) for nth in range(PUBLISHERS)]

    def start(self) -> Broker:
        if self._redis is None:
            return Broker(self._folder, CONFIG, (), {})
        return Broker(self._folder, CONFIG + REDIS_CONFIG, ("--store", self._redis.url), {})

    def kill_a_start(self) -> None:
        """Kill a server before it is ready, which must not affect the next one."""
        with suppress(BrokerKilledAtStart.Killed):
            BrokerKilledAtStart(self._folder, CONFIG, self._draw.uniform(0.2, 2.5))

    async def round(self, seconds: float) -> None:
        """Run load, and kill the server in the middle of it."""
        if self._draw.random() < self._killed_starts:
            self.kill_a_start()
        broker = self.start()
        tasks = [asyncio.create_task(one) for one in self._start_clients(broker, True)]
        try:
            await asyncio.sleep(seconds * self._draw.uniform(0.2, 1.0))
            self._rounds += 1
            if self._redis is not None and self._rounds % 2 == 0:
                await self._kill_redis(self._redis)
        finally:
            broker.kill()
        await self._end(tasks)

    async def _kill_redis(self, redis: RedisProcess) -> None:
        """Kill and restart Redis; the broker must continue."""
        redis.kill()
        redis.start()
        before = len(self.ledger.confirmed)
        until = time.monotonic() + DRAIN_SECONDS
        while len(self.ledger.confirmed) < before + WINDOW:
            if time.monotonic() > until:
                self.ledger.faults.append("the broker did not continue after Redis was back")
                return
            await asyncio.sleep(0.02)

    async def drain(self) -> None:
        """Start for the last time and consume all remaining messages."""
        broker = self.start()
        tasks = [asyncio.create_task(one) for one in self._start_clients(broker, False)]
        until = time.monotonic() + DRAIN_SECONDS
        while not self.ledger.is_drained() and time.monotonic() < until:
            await asyncio.sleep(0.02)
            for task in tasks:
                if task.done() and task.exception() is not None:
                    self.ledger.faults.append(f"a client failed while draining: {task.exception()}")
                    until = 0.0
        self.ledger.check_end()
        await self._check_empty(broker, until)
        for task in tasks:
            task.cancel()
        await self._end(tasks)
        broker.stop()

    async def _check_empty(self, broker: Broker, until: float) -> None:
        async with client_of(broker, "auditor") as client:
            await client.subscribe("$admin/queue/crash/stats")
            async for message in client.messages():
                stats = json.loads(message.payload)
                if not stats["total_messages"]:
                    break
                if time.monotonic() > until:
                    self.ledger.faults.append(
                        f"the queue ends with {stats['depth']} messages in it"
                    )
                    break
            if stats["dead"]:
                self.ledger.faults.append(f"the queue has dead-lettered {stats['dead']}")

    def _start_clients(self, broker: Broker, fresh: bool) -> list[Coroutine[Any, Any, None]]:
        cast = [self._publish(broker, one, nth, fresh) for nth, one in enumerate(self._publishers)]
        cast += [self._consume(broker, nth) for nth in range(CONSUMERS)]
        cast.append(self._listen(broker))
        return cast

    async def _publish(self, broker: Broker, publisher: Publisher, nth: int, fresh: bool) -> None:
        async with client_of(broker, f"publisher-{nth}") as client:
            await publisher.run(client, fresh)

    async def _consume(self, broker: Broker, nth: int) -> None:
        draw = random.Random(self._draw.random())
        async with client_of(broker, f"consumer-{nth}") as client:
            await consume(client, self.ledger, draw)

    async def _listen(self, broker: Broker) -> None:
        async with client_of(broker, "sleeper", clean_start=False, session_expiry=3600) as client:
            await listen_with_pauses(client, self.ledger)

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until all clients notice the lost connection.

        Any other error is a fault of the test or the server.
        """
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Exception) and not isinstance(found, ClientError):
                raise found


def client_of(broker: Broker, client_id: str, **options: Any) -> Client:
    return Client(
        broker.mqtt.host,
        broker.mqtt.port,
        client_id=client_id,
        reconnect=False,
        max_buffered=10_000,
        **options,
    )


async def crash(
    folder: Path,
    rounds: int,
    seconds: float,
    seed: int,
    say: bool = False,
    redis: RedisProcess | None = None,
    killed_starts: float = 0.0,
) -> Ledger:
    """Run the rounds; `killed_starts` is the share of rounds with a killed start."""
    arena = CrashRun(folder, seed, redis, killed_starts)
    ledger = arena.ledger
    for nth in range(rounds):
        await arena.round(seconds)
        if say:
            print(
                f"round {nth + 1}: {len(ledger.confirmed)} confirmed, {len(ledger.settled)} "
                "settled, "
                f"{ledger.redelivered} redelivered, {len(ledger.plain_confirmed)} plain, "
                f"{len(ledger.faults)} faults",
                flush=True,
            )
        if ledger.faults:
            break
    await arena.drain()
    return ledger


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Kill sluice serve under load and check its guarantees."
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="maximum duration of a round before the kill"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--redis", action="store_true", help="store messages in Redis, and kill that too"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluice-crash-") as folder:
        redis = RedisProcess(Path(folder) / "redis").start() if arguments.redis else None
        try:
            ledger = asyncio.run(
                crash(
                    Path(folder),
                    arguments.rounds,
                    arguments.seconds,
                    arguments.seed,
                    True,
                    redis,
                    KILLED_STARTS,
                )
            )
        finally:
            if redis is not None:
                redis.stop()
    for fault in ledger.faults[:50]:
        print(f"FAULT: {fault}")
    print(
        f"{arguments.rounds} rounds, seed {arguments.seed}: {len(ledger.confirmed)} messages "
        "confirmed, "
        f"{ledger.redelivered} redelivered, {len(ledger.plain_confirmed)} plain ones, "
        f"{len(ledger.faults)} faults"
    )
    return 1 if ledger.faults else 0


if __name__ == "__main__":
    sys.exit(main())
