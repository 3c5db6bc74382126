"""Disks that are full, read-only, slow, or cannot read their data."""

from __future__ import annotations

import asyncio
import errno
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress

from sluice.client import Client, ClientError, PublishRefused
from tests.adversity.connection_floods import healthy_client
from tests.adversity.kit import (
    MIB,
    NO_ADMIN_LISTENERS,
    SECONDS,
    Trial,
    connected_client,
    rss,
    until,
)
from tests.adversity.traffic import Producer, check_nothing_lost, fill
from tests.support.broker_process import Broker

EVERY_BYTE = "[disk]\nmin_free = 0\n"
UNCACHED = "[queues]\ncache_bytes = 0\n"


def refused_start(trial: Trial, environ: Mapping[str, str]) -> str:
    """Return the output of a broker that ends with 1 before it is ready, else an empty string."""
    log = trial.folder / "broker.log"
    before = log.stat().st_size if log.exists() else 0
    try:
        trial.start(EVERY_BYTE, NO_ADMIN_LISTENERS, environ).kill()
    except AssertionError as refusal:
        output = log.read_bytes()[before:].decode()
        return output if "ended with 1 " in str(refusal) else ""
    return ""


async def unreadable(trial: Trial) -> None:
    """Reads that fail for a moment, then permanently, then during a start."""
    shim = trial.shim()
    broker = trial.start(UNCACHED, environ=shim.environ)
    producer = Producer("jobs")
    await fill(broker, producer, trial.size(1000, 50_000))
    async with connected_client(broker, "maker") as line:
        await line.publish("kept", b"still here", qos=1, retain=True)
    shim.order(read_errno=errno.EIO)
    async with connected_client(broker, "reader-1") as line:
        await line.subscribe("$queue/jobs", qos=1, user=[("consumer-group", "reader")])
        await until(lambda: shim.counter("failures") >= 2, "reads fail")
        shim.order(read_errno=0)
        await anext(line.messages())
        trial.note("a read that fails and then succeeds costs only time")
    shim.order(read_errno=errno.EIO)
    with suppress(ClientError):
        async with connected_client(broker, "reader-1") as line:
            await line.subscribe("$queue/jobs", qos=1, user=[("consumer-group", "check")])
            await asyncio.to_thread(broker.await_end, 1, SECONDS)
    trial.expect("cannot be read at byte" in broker.log_text(), "the log does not name the file")
    shim.reset()
    shim.order(read_errno=errno.EIO, good_reads=1 << 40)
    broker = trial.start(UNCACHED, NO_ADMIN_LISTENERS, environ=shim.environ)
    reads = (1 << 40) - shim.counter("good_reads")
    broker.kill()
    for good in (reads - 1, *(trial.draw.randrange(reads) for _ in range(trial.size(0, 8)))):
        shim.order(good_reads=good)
        output = await asyncio.to_thread(refused_start, trial, shim.environ)
        trial.expect(
            "sluice: " in output, f"a start that cannot read after {good} reads says {output!r}"
        )
    trial.note(
        "a disk that cannot be read ends the broker with exit code 1, or stops its start: "
        f"{reads} reads"
    )
    shim.reset()
    broker = trial.start(UNCACHED, NO_ADMIN_LISTENERS, environ=shim.environ)
    await check_nothing_lost(trial, broker, producer, "after failed reads")
    async with connected_client(broker, "looker") as mqtt_client:
        await mqtt_client.subscribe("kept", qos=1)
        trial.expect(
            (await anext(mqtt_client.messages())).payload == b"still here",
            "a retained message is lost",
        )
    broker.stop()


async def slow(trial: Trial) -> None:
    """Every sync takes a third of a second; publishers continue as fast as they may."""
    shim = trial.shim()
    broker = trial.start(environ=shim.environ)
    producers = [Producer(f"jobs-{nth}", size=2000) for nth in range(8)]
    seconds = trial.size(2, 40)
    before = rss(broker)
    shim.order(sync_delay=300_000, write_delay=20_000)
    peak = before
    pulse = 0.0
    async with healthy_client(broker) as other, AsyncExitStack() as lines:
        tasks = []
        for producer in producers:
            mqtt_client = await lines.enter_async_context(
                connected_client(broker, f"p-{producer.queue}", max_buffered=10_000)
            )
            tasks.append(asyncio.create_task(producer.run(mqtt_client, window=1000)))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            await asyncio.to_thread(refusal_of, broker, "/healthz")
            pulse = max(pulse, time.monotonic() - began)
            peak = max(peak, rss(broker))
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    shim.reset()
    confirmed = sum(len(one.confirmed) for one in producers)
    slowest = max(one.slowest for one in producers)
    trial.note(
        f"with 300 ms for each sync {confirmed:,} messages were confirmed in {seconds} s, the "
        f"slowest after {slowest:.1f} s; a plain client waited {other.slowest * 1000:.0f} ms at "
        "most, "
        f"/healthz {pulse * 1000:.0f} ms; memory {before / MIB:.0f} to {peak / MIB:.0f} MiB"
    )
    trial.expect(confirmed > 1000, f"only {confirmed} were confirmed")
    # Recent bodies, and unacknowledged messages: in connections, in the frame being written, and
    # in the next one.
    trial.expect(peak < before + 128 * MIB, f"memory grows: {before} to {peak}")
    trial.expect(other.count > seconds, "the healthy client was blocked")
    for producer in producers[: trial.size(1, 8)]:
        await check_nothing_lost(trial, broker, producer, "after a slow disk")
    broker.stop()


async def check_refusals(trial: Trial, mqtt_client: Client) -> None:
    """Check that everything that would have to be stored is refused, and nothing else."""
    for topic, retain in (
        ("$queue/jobs", False),
        ("state", True),
        ("lasting", False),
        ("$ECQ/w/owner/k", False),
    ):
        try:
            await mqtt_client.publish(topic, b"x" * 100, qos=1, retain=retain)
            trial.expect(False, f"a publish to {topic} was accepted")
        except PublishRefused as refusal:
            trial.expect(refusal.reason == 0x97, f"{topic}: {refusal}")
    await mqtt_client.publish("state", b"", qos=1, retain=True)


def refusal_of(broker: Broker, path: str) -> str:
    """Return the message of the admin API when it answers 503."""
    try:
        with urllib.request.urlopen(
            f"http://{broker.address('http')}{path}", timeout=SECONDS
        ) as answer:
            return f"{answer.status}"
    except urllib.error.HTTPError as refusal:
        return refusal.read().decode() if refusal.code == 503 else f"{refusal.code}"


async def until_taken(mqtt_client: Client) -> None:
    """Wait until a publish is accepted: the broker checks free space once a second."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            await mqtt_client.publish("$queue/later", b"x", qos=1)
            return
        except PublishRefused:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.1)


async def full(trial: Trial) -> None:
    """A disk that becomes nearly full, then full at any moment; and a start on it."""
    shim = trial.shim()
    broker = trial.start(environ=shim.environ)
    producer = Producer("jobs", size=20_000)
    async with connected_client(broker, "sleeper", lasting=True) as line:
        await line.subscribe("lasting", qos=1)
    shim.order(room=70 * MIB)
    async with connected_client(broker, "maker", max_buffered=10_000) as line:
        await producer.run(line, window=50)
        trial.expect(producer.refused > 0, "no publish was refused")
        await check_refusals(trial, line)
        await line.publish("news", b"plain messages continue", qos=1)
    await check_nothing_lost(trial, broker, producer, "on a nearly full disk")
    ready = await asyncio.to_thread(refusal_of, broker, "/readyz")
    trial.expect("MiB are free" in ready, f"/readyz says {ready!r}")
    shim.order(room=200 * MIB)
    async with connected_client(broker, "maker") as line:
        await until_taken(line)
        trial.note(
            f"with less than 64 MiB free {producer.refused} of {producer.sent:,} were refused with "
            "0x97, and nothing else; with more, all continued"
        )
    broker.stop()
    shim.reset()
    broker = trial.start(EVERY_BYTE, NO_ADMIN_LISTENERS, environ=shim.environ)
    confirmed = 0
    for _ in range(trial.size(1, 12)):
        producer = Producer(f"to-the-end-{confirmed}", size=20_000)
        # Anywhere in a frame, and where a segment is full and its index and a snapshot are written.
        room = trial.draw.choice((3 * MIB, 3 * MIB, 66 * MIB))
        shim.order(room=trial.draw.randrange(room - 3 * MIB, room))
        with suppress(ClientError):
            async with connected_client(broker, "maker", max_buffered=10_000) as mqtt_client:
                await producer.run(mqtt_client)
        await asyncio.to_thread(broker.await_end, 1, SECONDS)
        confirmed += len(producer.confirmed)
        trial.expect(
            "No space left on device" in broker.log_text(),
            "the log does not report that the disk is full",
        )
        output = await asyncio.to_thread(refused_start, trial, shim.environ)
        trial.expect("Free space on that disk" in output, f"a start on a full disk says {output!r}")
        shim.reset()
        broker = trial.start(EVERY_BYTE, NO_ADMIN_LISTENERS, environ=shim.environ)
        await check_nothing_lost(trial, broker, producer, "after the disk was full")
    trial.note(
        "completely full: exit code 1, a start refused with a remedy, "
        f"{confirmed:,} confirmed and all recovered"
    )
    broker.stop()


async def read_only(trial: Trial) -> None:
    """A disk that is read-only before the start, and one that becomes so while the broker runs."""
    shim = trial.shim()
    words = {errno.EROFS: "Read-only file system", errno.EACCES: "Permission denied"}
    for number in [errno.EROFS, errno.EACCES][: trial.size(1, 2)]:
        word = words[number]
        shim.order(create_errno=number)
        output = await asyncio.to_thread(refused_start, trial, shim.environ)
        trial.expect(
            word in output and "--data DIR" in output,
            f"a start on a read-only disk says {output!r}",
        )
    shim.reset()
    broker = trial.start(flags=NO_ADMIN_LISTENERS, environ=shim.environ)
    producer = Producer("jobs")
    await fill(broker, producer, trial.size(500, 5000))
    failures = [{"write_errno": errno.EROFS}, {"sync_errno": errno.EIO}, {"write_errno": errno.EIO}]
    for orders in failures[: trial.size(1, 3)]:
        shim.order(**orders)
        with suppress(ClientError):
            async with connected_client(broker, "maker", max_buffered=10_000) as mqtt_client:
                await producer.run(mqtt_client)
        await asyncio.to_thread(broker.await_end, 1, SECONDS)
        shim.reset()
        broker = trial.start(flags=NO_ADMIN_LISTENERS, environ=shim.environ)
    await check_nothing_lost(trial, broker, producer, "after failed writes and syncs")
    trial.note(
        "a start is refused with a remedy; a failed write or sync ends the broker with exit code "
        "1, "
        f"and all {len(producer.confirmed):,} confirmed messages are recovered"
    )
    broker.stop()
