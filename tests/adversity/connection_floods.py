"""Too many connections, connections that do not read, and connections that do not speak MQTT."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import cast

from sluice.client import Client
from sluice.wire.packets import Publish, Subscribe
from sluice.wire.packets import SubscriptionRequest as Request
from tests.adversity.kit import MIB, SECONDS, Trial, ask, connected_client, descriptors, rss
from tests.adversity.traffic import Producer, check_nothing_lost, fill
from tests.broker.net.test_protocol_errors import FAULTS
from tests.conformance.raw_connection import RawConnection, connect_raw
from tests.support.broker_process import Broker
from tests.support.external_programs import need_program

HUNDRED = 100


class HealthyClient:
    """An unrelated client that publishes to itself all the time, and must not be affected."""

    def __init__(self) -> None:
        self.count = 0
        self.slowest = 0.0
        self.ended = False

    async def run(self, mqtt_client: Client) -> None:
        await mqtt_client.subscribe("bystander", qos=0)
        messages = mqtt_client.messages()
        while not self.ended:
            began = time.monotonic()
            await mqtt_client.publish("bystander", b"x", qos=0)
            async with asyncio.timeout(SECONDS):
                await anext(messages)
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.count += 1
            await asyncio.sleep(0.005)


@asynccontextmanager
async def healthy_client(broker: Broker) -> AsyncIterator[HealthyClient]:
    """Run a healthy client during the block, and raise its error if it fails."""
    one = HealthyClient()
    async with connected_client(broker, "bystander") as mqtt_client:
        task = asyncio.create_task(one.run(mqtt_client))
        try:
            yield one
        finally:
            one.ended = True
            await task


async def wait_until_idle(broker: Broker) -> tuple[int, int]:
    """Return descriptors and memory after every connection has ended."""
    for _ in range(int(SECONDS * 10)):
        if not (await ask(broker, "/api/v1/node"))["connections"]:
            break
        await asyncio.sleep(0.1)
    return descriptors(broker), rss(broker)


async def churn(trial: Trial) -> None:
    """Clients connect, subscribe, publish and vanish without DISCONNECT, a hundred at a time."""
    broker = trial.start()
    count = trial.size(10, 100) * HUNDRED
    answered = 0

    async def visit(number: int) -> None:
        nonlocal answered
        async with connect_raw(broker.mqtt) as line:
            await line.connect(f"churn-{number}")
            filters = [Request(b"news/#", 1), Request(b"$queue/churn", 1)]
            await line.send(Subscribe(1, filters[: 1 + number % 2]))
            await line.next()
            await line.send(Publish(b"news/%d" % (number % 7), b"x" * 200, 1, False, False, 2))
            if number % 2:
                await line.send(Publish(b"$queue/churn", b"x" * 200, 1, False, False, 3))
            if trial.draw.random() < 0.5:
                await line.next()
            if trial.draw.random() < 0.2:
                await line.send(b"\x30\x7f\x00")  # half a packet
            answered += 1

    async def visits(first: int, many: int) -> None:
        for start in range(first, first + many, HUNDRED):
            await asyncio.gather(*(visit(number) for number in range(start, start + HUNDRED)))

    await visits(0, 5 * HUNDRED)  # one-time allocations, and what the allocator keeps
    before = await wait_until_idle(broker)
    began = time.monotonic()
    await visits(count, count)
    took = time.monotonic() - began
    after = await wait_until_idle(broker)
    trial.note(
        f"{count:,} connections in {took:.1f} s; descriptors {before[0]} before and {after[0]} "
        "after, "
        f"memory {before[1] / MIB:.0f} and {after[1] / MIB:.0f} MiB"
    )
    node = await ask(broker, "/api/v1/node")
    trial.expect(answered == count + 5 * HUNDRED, f"only {answered} connections were served")
    trial.expect(node["sessions"] == 0 and node["subscriptions"] == 0, f"left over: {node}")
    trial.expect(after[0] <= before[0] + 3, f"descriptors grow: {before[0]} to {after[0]}")
    trial.expect(after[1] < before[1] + 24 * MIB, f"memory grows: {before[1]} to {after[1]}")
    broker.stop()


async def connection_flood(trial: Trial) -> None:
    """More connections than descriptors: the log needs some of them, and must get them."""
    limit = 200
    flags = ("--http", "off", "--grpc", "off")
    broker = trial.start(
        "[queues]\ncache_bytes = 0\n",
        flags,
        under=[need_program("prlimit"), f"--nofile={limit}:{limit}"],
    )
    producer = Producer("jobs", size=100_000)
    async with connected_client(broker, "filler-0") as maker, AsyncExitStack() as lines:
        # Silent connections to the WebSocket listener count as no client, and take other
        # descriptors.
        for address in (broker.mqtt, broker.ws):
            for _ in range(2 * limit):
                with suppress(OSError):
                    await lines.enter_async_context(connect_raw(address))
        used = descriptors(broker)
        # The log rolls, and a snapshot is written.
        await producer.run(maker, trial.size(800, 3000), 20)
        await maker.subscribe("$queue/jobs", qos=1, user=[("consumer-group", "early")])
        await anext(maker.messages())  # opens the file of its segment
    trial.note(
        f"{4 * limit} connections and {limit} descriptors, {used} in use: the log rolled and was "
        "read"
    )
    await check_nothing_lost(trial, broker, producer, "with all descriptors in use")
    lines_of_log = broker.log_text().count("\n")
    trial.expect(lines_of_log < 100, f"{lines_of_log} lines of log")
    broker.stop()


async def slow_consumers(trial: Trial) -> None:
    """Consumers of a queue, and subscribers of a topic, that do not read at all."""
    broker = trial.start("[mqtt]\nmax_queued_bytes = 1_000_000\n")
    producer = Producer("jobs", size=5000)
    count = trial.size(4000, 20_000)
    async with AsyncExitStack() as lines:
        for nth in range(10):
            mqtt_client = await lines.enter_async_context(connect_raw(broker.mqtt))
            sock = mqtt_client.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await mqtt_client.connect(f"jam-{nth}")
            await mqtt_client.send(
                Subscribe(1, [Request(b"$queue/jobs/$group/jam", 1), Request(b"news", nth % 3)])
            )
            await mqtt_client.next()
            cast(asyncio.Transport, mqtt_client.writer.transport).pause_reading()
        before = rss(broker)
        async with healthy_client(broker) as other:
            async with connected_client(broker, "maker") as maker:
                for _ in range(count):
                    await maker.publish("news", b"x" * 5000, qos=0)
            await fill(broker, producer, count)
        after = rss(broker)
        trial.note(
            f"{2 * count:,} messages of 5 kB for 10 that do not read: memory {before / MIB:.0f} to "
            f"{after / MIB:.0f} MiB; another client waited {other.slowest * 1000:.0f} ms at most"
        )
        trial.expect(after < before + 100 * MIB, f"memory grows: {before} to {after}")
        trial.expect(other.count > 10, "the healthy client was blocked")
    await check_nothing_lost(trial, broker, producer, "with slow consumers")
    broker.stop()


async def malformed(trial: Trial) -> None:
    """Garbage, partial packets, huge lengths, and clients that send one byte a second."""
    broker = trial.start('[mqtt]\nconnect_timeout = "1s"\n')
    count = trial.size(5, 300) * HUNDRED
    draw = random.Random(trial.seed)
    seeds = [fault[1] for fault in FAULTS]

    async def knock(nth: int) -> None:
        data = bytearray(draw.choice(seeds) if nth % 3 else draw.randbytes(draw.randrange(1, 200)))
        for _ in range(draw.randrange(4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        if nth % 2:
            name = b"knock-%d" % nth
            data[:0] = b"\x10%c\x00\x04MQTT\x05\x02\x00\x3c\x00\x00%c%s" % (
                13 + len(name),
                len(name),
                name,
            )
        addresses = (
            broker.mqtt,
            broker.mqtt,
            broker.mqtt,
            broker.ws,
            broker.address("http"),
            broker.address("grpc"),
        )
        async with connect_raw(
            addresses[nth % 11] if nth % 11 < len(addresses) else broker.mqtt
        ) as line:
            line.writer.write(bytes(data))
            if nth % 5 == 0:
                line.writer.write_eof()
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.1 if nth % 7 == 0 else 0.01):
                    await line.reader.read(65_536)

    await ask(broker, "/readyz")  # the libraries of HTTP and gRPC are loaded on first use
    async with connect_raw(broker.address("grpc")) as grpc_client:
        grpc_client.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        async with asyncio.timeout(SECONDS):
            await grpc_client.reader.readexactly(9)  # the settings of the server
    log_before = len(broker.log_text())
    async with healthy_client(broker) as other:
        slow: list[RawConnection] = []
        async with AsyncExitStack() as lines:
            for nth in range(200):  # slowloris: a CONNECT that never ends
                mqtt_client = await lines.enter_async_context(connect_raw(broker.mqtt))
                slow.append(mqtt_client)
                mqtt_client.writer.write(b"\x10\xff\xff\x7f" if nth % 2 else b"\x10")
            before = rss(broker)
            for start in range(0, count, 50):
                await asyncio.gather(*(knock(nth) for nth in range(start, start + 50)))
            after = rss(broker)
            for mqtt_client in slow:
                async with asyncio.timeout(SECONDS):
                    await mqtt_client.wait_closed()
    log = len(broker.log_text()) - log_before
    trial.note(
        f"{count:,} bad connections: memory {before / MIB:.0f} to {after / MIB:.0f} MiB, "
        f"{log / 1000:.0f} kB of log, another client waited {other.slowest * 1000:.0f} ms at most"
    )
    trial.expect(after < before + 32 * MIB, f"memory grows: {before} to {after}")
    trial.expect(
        "Traceback" not in broker.log_text(),
        "an exception in the log: " + broker.log_text()[-3000:],
    )
    trial.expect(log < 50_000, f"{log} bytes of log")
    left, _ = await wait_until_idle(broker)
    trial.expect(left < 60, f"{left} descriptors stay open")
    broker.stop()
