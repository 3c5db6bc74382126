"""Tests of the memory limit: messages are refused above it, and accepted again below."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx
import pytest

from sluice.app import make_authenticators, make_limits
from sluice.broker_host import BrokerHost
from sluice.client import Client, PublishRefused
from sluice.config.settings import Settings
from sluice.errors import MemoryFull, NoRoom
from sluice.process.memory_watermark import (
    MemoryWatermark,
    parse_memory_limit,
    read_available_bytes,
    read_resident_bytes,
)
from tests.support.broker_process import StartBroker

MIB = 1 << 20


class Memory:
    """A simulated size of the process."""

    def __init__(self) -> None:
        self.used = 0
        self.free_when_trimmed = 0
        self.trims = 0

    def read(self) -> int:
        return self.used

    def trim(self) -> None:
        self.trims += 1
        self.used -= self.free_when_trimmed
        self.free_when_trimmed = 0


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def watermark(memory: Memory) -> MemoryWatermark:
    return MemoryWatermark(1000 * MIB, memory.read, memory.trim)


def test_limit_has_hysteresis(memory: Memory, watermark: MemoryWatermark) -> None:
    received: list[str] = []
    watermark.register(received.append, lambda: 0)
    for used, is_refusing in (
        (999, False),
        (1000, True),
        (960, True),
        (1001, True),
        (951, True),
        (949, False),
        (999, False),
        (1000, True),
    ):
        memory.used = used * MIB
        watermark.check()
        assert bool(watermark.reason) == is_refusing, used
    assert [bool(reason) for reason in received] == [True, False, True]
    assert received[0] == "the broker uses 1,000 MiB of memory, and limits.memory is 1,000 MiB"


def test_memory_returned_by_the_allocator_is_no_reason_to_refuse(
    memory: Memory, watermark: MemoryWatermark
) -> None:
    memory.used, memory.free_when_trimmed = 1500 * MIB, 800 * MIB
    watermark.check()
    assert (watermark.reason, watermark.used, memory.trims) == ("", 700 * MIB, 1)


def test_allocator_is_trimmed_periodically_while_above_the_limit(
    memory: Memory, watermark: MemoryWatermark
) -> None:
    memory.used = 1500 * MIB
    for _ in range(20):
        watermark.check()
    assert memory.trims == 4
    memory.free_when_trimmed = 1000 * MIB
    for _ in range(5):
        watermark.check()
    assert watermark.reason == ""


def test_late_listener_is_notified_at_once_and_a_removed_one_is_not_counted(
    memory: Memory, watermark: MemoryWatermark
) -> None:
    memory.used = 1500 * MIB
    watermark.check()
    received: list[str] = []
    watermark.register(received.append, lambda: 7)
    assert len(received) == 1
    watermark.uploads_refused = 2
    assert watermark.refused == 9
    watermark.remove(received.append)
    watermark.remove(received.append)
    assert watermark.refused == 9


def test_without_a_limit_memory_is_measured_and_nothing_refused(memory: Memory) -> None:
    watermark = MemoryWatermark(0, memory.read, memory.trim)
    memory.used = 10**15
    watermark.check()
    assert (watermark.used, watermark.reason, memory.trims) == (10**15, "", 0)


def test_each_change_is_logged_once(
    memory: Memory, watermark: MemoryWatermark, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for used in (1500, 1600, 1500, 100, 100):
        memory.used = used * MIB
        watermark.check()
    assert [one.getMessage() for one in caplog.records] == [
        "memory limit exceeded: publishers are refused",
        "memory is below the limit again",
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80%", 800), ("12.5 %", 125), ("100%", 1000), ("0", 0), ("off", 0), ("None", 0),
        ("64MiB", 64 * MIB), ("2 gib", 2 << 30), (f"{64 * MIB}", 64 * MIB),
    ],
)  # fmt: skip
def test_limit_is_a_share_a_size_or_off(text: str, size: int) -> None:
    assert parse_memory_limit(text, lambda: 1000) == size


@pytest.mark.parametrize("text", ["", "80", "0%", "101%", "1GB", "-1", "1MiB", "much", "80%%"])
def test_invalid_limits_are_refused_with_the_allowed_values(text: str) -> None:
    with pytest.raises(ValueError, match=r'must be a share such as "80%"'):
        parse_memory_limit(text, lambda: 1000)


def test_setting_accepts_numbers_and_is_checked_at_start() -> None:
    assert Settings.model_validate({"limits": {"memory": 0}}).limits.memory == "0"
    with pytest.raises(ValueError, match=r"limits\.memory[\s\S]*must be a share"):
        Settings.model_validate({"limits": {"memory": "1 potato"}})


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_container_memory_counts_if_less_than_the_machines(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", "MemFree: 1 kB\nMemTotal: 1000 kB\n")
    assert read_available_bytes(groups, proc) == 1000 << 10
    write(proc / "self/cgroup", "0::/a/b\n")
    write(groups / "a/b/memory.max", "max\n")
    assert read_available_bytes(groups, proc) == 1000 << 10
    write(groups / "a/memory.max", "5000\n")
    assert read_available_bytes(groups, proc) == 5000
    write(groups / "a/b/memory.max", "4000\n")
    assert read_available_bytes(groups, proc) == 4000
    write(proc / "self/cgroup", "3:cpu,memory:/docker/x\n")
    write(groups / "memory/memory.limit_in_bytes", "3000\n")
    assert read_available_bytes(groups, proc) == 3000
    assert read_available_bytes(tmp_path / "none", tmp_path / "none") == 0


def test_memory_of_this_process_is_measured() -> None:
    assert 1 * MIB < read_resident_bytes() < read_available_bytes()


async def test_store_refusal_comes_first_and_neither_ends_the_other(
    memory: Memory, watermark: MemoryWatermark
) -> None:
    settings = Settings(store="memory")
    harness = BrokerHost(
        settings,
        make_limits(settings),
        make_authenticators(settings)[0],
        lambda: None,
        watermark=watermark,
    )
    broker = harness.broker
    await harness.open()
    runner = harness._commit_loop
    assert runner is not None
    engine = runner.engine

    def refusal() -> type[Exception] | None:
        try:
            engine.publishing.check_store_available()
        except NoRoom as error:
            return type(error)
        return None

    memory.used = 2000 * MIB
    watermark.check()
    assert refusal() is MemoryFull
    assert broker.router.is_out_of_space and broker.router.unavailable_reason
    harness.on_low_space("10 MiB are free")
    assert refusal() is NoRoom
    memory.used = 0
    watermark.check()
    assert refusal() is NoRoom
    memory.used = 2000 * MIB
    watermark.check()
    harness.on_low_space("")
    assert refusal() is MemoryFull
    memory.used = 0
    watermark.check()
    assert refusal() is None
    assert (
        broker.router.unavailable_reason,
        broker.router.is_out_of_space,
        broker.router.is_out_of_memory,
    ) == ("", False, False)
    assert watermark.refused == 2
    await harness.close()
    memory.used = 2000 * MIB
    watermark.check()
    assert (refusal(), watermark.refused) == (None, 2)


async def fill_up(client: Client) -> tuple[int, PublishRefused]:
    """Retain messages of 1 MiB until one is refused; return the number accepted, and the error."""
    for count in range(600):
        try:
            await client.publish(f"full/{count}", bytes(MIB), qos=1, retain=True)
        except PublishRefused as refusal:
            return count, refusal
        if count % 8 == 0:
            await asyncio.sleep(0.02)  # the broker measures once a second
    raise AssertionError("nothing was refused")


async def test_broker_refuses_above_its_limit_and_accepts_again_below_it(
    start_broker: StartBroker,
) -> None:
    """Retained messages fill the memory up to the limit, and their removal is still accepted."""
    broker = start_broker('store = "memory"\n[limits]\nmemory = "220MiB"\n')
    root = f"http://{broker.address('http')}"
    async with (
        Client(broker.mqtt.host, broker.mqtt.port, client_id="filler") as client,
        httpx.AsyncClient(base_url=root, timeout=30) as web,
    ):
        await client.subscribe("$queue/before", qos=1)
        await client.publish("$queue/before", b"x", qos=1)
        waiting = await anext(client.messages())
        count, refusal = await fill_up(client)
        assert refusal.reason == 0x97
        assert "limits.memory is 220 MiB" in str(refusal)
        with pytest.raises(PublishRefused):
            await client.publish("$queue/jobs", b"x", qos=1)
        await client.publish("plain", b"x", qos=1)
        answer = await web.get("/readyz")
        assert (answer.status_code, answer.json()["error"]) == (503, "memory_full")
        answer = await web.post("/api/v1/queues/jobs/messages", json={"payload": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        properties = dict(waiting.properties.user)
        await client.publish(f"$queue/before/$ack/{properties['message-id']}", b"", qos=1)
        for nth in range(count):
            await client.publish(f"full/{nth}", b"", qos=1, retain=True)
        async with asyncio.timeout(40):
            while (await web.get("/readyz")).status_code != 200:  # noqa: ASYNC110 (polls another process or thread)
                await asyncio.sleep(0.1)
        await client.publish("$queue/jobs", b"x", qos=1)
        page = (await web.get("/metrics")).text
    figures = dict(
        line.split(" ") for line in page.splitlines() if line.startswith("sluice_memory")
    )
    assert int(figures["sluice_memory_refused_total"]) >= 3
    assert (
        int(figures["sluice_memory_bytes"]) < int(figures["sluice_memory_limit_bytes"]) == 220 * MIB
    )
    log = broker.log.read_text()
    assert log.count("memory limit exceeded") == log.count("memory is below the limit again") == 1
