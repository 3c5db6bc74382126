"""More than fits: a huge backlog, messages that make handlers fail, not enough memory."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from sluice.client import ClientError, Delivery, PublishRefused
from sluice.worker import Worker
from tests.adversity.connection_floods import healthy_client
from tests.adversity.kit import MIB, SECONDS, Trial, ask, connected_client, rss, stats, until
from tests.adversity.traffic import Producer, check_nothing_lost
from tests.support.broker_process import Broker

DEEP = """
[[queues.templates]]
match = "jobs"
[queues.templates.config.limits]
max_queue_depth = 10000000
dedup_window = "1s"
"""
ODD_PAYLOADS = [
    b"",
    b"\x00" * 100,
    b"\xff\xfe\xfd",
    b"\xc3\x28",
    b"{" * 5000,
    b'{"a":',
    b"[" * 100_000,
    b"1e999999",
    b'{"__proto__": {"x": 1}}',
    b"\x1b[2J\x1b]0;owned\x07",
    b"<script>alert(1)</script>",
    b"'; DROP TABLE jobs; --",
    b"../../../../etc/passwd\x00",
    b"\r\n\r\nHTTP/1.1 200 OK\r\n",
    b"$ack",
    b"SLF1" + b"\x00" * 60,  # looks like the beginning of a frame of the log
    "\u202egnirts\u2066".encode(),
    b"x" * 1_000_000,
]


async def backlog(trial: Trial) -> None:
    """A huge backlog that is not consumed."""
    count = trial.size(5000, 1_000_000)
    broker = trial.start(DEEP)
    producer = Producer("jobs", size=1000)
    before = rss(broker)
    peak = 0
    began = time.monotonic()
    async with connected_client(broker, "filler-0", max_buffered=10_000) as mqtt_client:
        for _ in range(10):
            await producer.run(mqtt_client, count // 10, 1000)
            peak = max(peak, rss(broker))
    took = time.monotonic() - began
    broker.kill()
    began = time.monotonic()
    broker = trial.start(DEEP)
    started = time.monotonic() - began
    again = rss(broker)
    began = time.monotonic()
    async with healthy_client(broker) as other:
        await drain_all(trial, broker, producer)
    drained = time.monotonic() - began
    trial.note(
        f"{count:,} messages of 1 kB in {took:.0f} s, memory {before / MIB:.0f} to "
        f"{peak / MIB:.0f} "
        f"MiB; start after kill -9 in {started:.1f} s with {again / MIB:.0f} MiB; all consumed in "
        f"{drained:.0f} s, while another client waited {other.slowest * 1000:.0f} ms at most"
    )
    trial.expect(
        peak < before + 64 * MIB + 60 * count, f"memory grows by {(peak - before) / MIB:.0f} MiB"
    )
    figures = await stats(broker, "jobs")
    trial.expect(figures["total_messages"] == 0, f"{figures['total_messages']} are left")
    broker.stop()


async def drain_all(trial: Trial, broker: Broker, producer: Producer) -> None:
    missing = set(producer.confirmed)
    async with connected_client(broker, "drain-1", max_buffered=10_000) as mqtt_client:
        user = [("consumer-group", "drain"), ("ack-mode", "puback"), ("prefetch", "1000")]
        await mqtt_client.subscribe("$queue/jobs", qos=1, user=user)
        messages = mqtt_client.messages()
        while missing:
            try:
                async with asyncio.timeout(SECONDS):
                    message = await anext(messages)
            except TimeoutError:
                break
            missing.discard(int(message.payload))
    trial.expect(not missing, f"{len(missing)} were never delivered")


async def poison(trial: Trial) -> None:
    """Messages that always make their handler fail, among good ones; all kinds of odd payloads."""
    config = """
[[queues.templates]]
match = "mixed"
[queues.templates.config.retry_policy]
max_retries = 3
initial_backoff = "20ms"
max_backoff = "50ms"
"""
    broker = trial.start(config)
    good = trial.size(500, 20_000)
    bad = trial.size(100, 2000)
    url = f"mqtt://{broker.mqtt.host}:{broker.mqtt.port}"
    app = Worker(url, name="mixed")
    done: Counter[bytes] = Counter()
    tried: Counter[bytes] = Counter()

    @app.task("mixed", concurrency=20)
    async def handle(delivery: Delivery) -> None:
        if not delivery.payload.startswith(b"good"):
            tried[delivery.payload] += 1
            raise ValueError(delivery.payload[:20])
        done[delivery.payload] += 1

    serving = asyncio.create_task(app.serve())
    poisons = [b"bad-%d" % nth for nth in range(bad)] + ODD_PAYLOADS
    async with connected_client(broker, "maker", max_buffered=10_000) as mqtt_client:
        publisher = mqtt_client.publisher("mixed")
        mixed = [b"good-%d" % nth for nth in range(good)] + poisons
        trial.draw.shuffle(mixed)
        for start in range(0, len(mixed), 200):
            await asyncio.gather(
                *(
                    publisher.send(one, key=str(trial.draw.randrange(50)))
                    for one in mixed[start : start + 200]
                )
            )
    await until(lambda: len(done) == good, f"{good} good messages are done", 3 * SECONDS)
    dead = 0
    end = time.monotonic() + 2 * SECONDS
    while dead < len(poisons) and time.monotonic() < end:
        with suppress(Exception):
            dead = (await stats(broker, "dlq$mixed"))["total_messages"]
        await asyncio.sleep(0.1)
    app.stop()
    await serving
    trial.note(
        f"{good:,} good messages done among {len(poisons):,} poisoned ones, which were "
        "dead-lettered after 4 attempts each"
    )
    trial.expect(dead == len(poisons), f"{dead} of {len(poisons)} are dead letters")
    trial.expect(set(done.values()) == {1}, "a good message was handled twice")
    trial.expect(all(tried[one] == 4 for one in poisons), f"tries: {Counter(tried.values())}")
    log = len(broker.log_text())
    trial.expect(log < 50_000, f"{log} bytes of log")
    trial.expect(await ask(broker, "/api/v1/verify") == [], "the ledgers do not add up")
    broker.stop()


def limit_memory(broker: Broker, room: int) -> None:
    """Limit the address space of the broker to its current size plus `room` bytes."""
    status = Path(f"/proc/{broker.process.pid}/status").read_text()
    ceiling = int(status.split("VmSize:")[1].split()[0]) * 1024 + room
    resource.prlimit(broker.process.pid, resource.RLIMIT_AS, (ceiling, ceiling))


class FloodPublishers:
    """Publishers as fast as allowed, on topics of every kind."""

    def __init__(self, broker: Broker, seconds: float) -> None:
        self.confirmed = 0
        self.refused: Counter[int] = Counter()
        self._broker = broker
        self._end = time.monotonic() + seconds

    async def push(self, nth: int, topic: str, size: int, retain: bool) -> None:
        number = 0
        async with connected_client(self._broker, f"push-{nth}", max_buffered=1000) as mqtt_client:
            while time.monotonic() < self._end:
                names = [topic.format(number + more) for more in range(20)]
                number += 20
                many = [
                    mqtt_client.publish_nowait(name, b"x" * size, qos=1, retain=retain)
                    for name in names
                ]
                for one in many:
                    try:
                        await one
                        self.confirmed += 1
                    except PublishRefused as refusal:
                        self.refused[refusal.reason] += 1


async def memory(trial: Trial) -> None:
    """A memory limit, and publishers, sessions and readers that need more."""
    config = "[mqtt]\nmax_queued_bytes = 4_000_000\nmax_retained = 200\n"
    shim = trial.shim()
    broker = trial.start(config, environ=shim.environ)
    shim.order(sync_delay=20_000)  # a disk that is slower than the publishers
    room = 160 * MIB
    limit_memory(broker, room)
    before = rss(broker)
    pushers = FloodPublishers(broker, trial.size(2, 40))
    for nth in range(10):
        async with connected_client(broker, f"sleeper-{nth}", lasting=True) as line:
            await line.subscribe("news/#", qos=1)
    await asyncio.gather(
        *(pushers.push(nth, "$queue/many-{}", 50_000, False) for nth in range(8)),
        *(pushers.push(10 + nth, "news/{}", 20_000, False) for nth in range(4)),
        *(pushers.push(20 + nth, f"state-{nth}/{{}}", 2000, True) for nth in range(4)),
    )
    after = rss(broker)
    trial.note(
        f"{room // MIB} MiB to grow, 16 publishers on a slow disk: {pushers.confirmed:,} "
        "confirmed, "
        f"{pushers.refused[0x97]:,} refused with 0x97, memory {before / MIB:.0f} to "
        f"{after / MIB:.0f} MiB"
    )
    trial.expect("MemoryError" not in broker.log_text(), "the broker ran out of memory")
    trial.expect(set(pushers.refused) == {0x97}, f"refused with {pushers.refused}")
    producer = Producer("jobs", size=50_000)
    ended = 0
    for _ in range(trial.size(1, 8)):
        limit_memory(broker, trial.draw.randrange(1, 24) * MIB)
        with suppress(ClientError):
            async with connected_client(broker, "filler", max_buffered=10_000) as line:
                await producer.run(line, 2000, 1000)
        if broker.process.poll() is None:
            try:
                async with (
                    asyncio.timeout(SECONDS),
                    connected_client(broker, "knocker") as mqtt_client,
                ):
                    await mqtt_client.publish("$queue/jobs-2", b"x", qos=1)
                    broker.kill()
            except (TimeoutError, ClientError, OSError):
                await asyncio.to_thread(broker.await_end, 1, SECONDS)
        if broker.process.returncode == 1:
            ended += 1
            trial.expect(
                "it is out of memory" in broker.log_text(), "the log does not name the cause"
            )
        broker = trial.start(config, environ=shim.environ)
    shim.reset()
    await check_nothing_lost(trial, broker, producer, "after running out of memory")
    trial.note(
        f"with less than 24 MiB to grow it ended with exit code 1 {ended} times; all confirmed "
        "messages were recovered"
    )
    broker.stop()
