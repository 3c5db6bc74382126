"""Tests of a real `sluice serve` with its store in Redis."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from sluice.client import Client, ClientError, PublishRefused
from sluice.store.redis.views.stats import read_store_stats
from tests.adversity.crashes.queue_crash import client_of, crash
from tests.cli.shell import Shell
from tests.support.broker_process import Broker, StartBroker
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_process import FailoverPair, RedisProcess

METRICS = (Path(__file__).parents[3] / "docs/metrics.md").read_text("utf-8")
CONFIG = """
[redis]
prefix = "{prefix}"
lease = "2s"
renew = "100ms"
wait = "200ms"
answer_timeout = "1s"
poll = "50ms"
"""


async def test_nothing_confirmed_is_lost_when_broker_and_redis_are_killed_in_turn(
    tmp_path: Path,
) -> None:
    redis = RedisProcess(tmp_path / "redis").start()
    try:
        ledger = await crash(tmp_path, rounds=3, seconds=0.7, seed=5, redis=redis)
    finally:
        redis.stop()
    assert ledger.faults == []
    assert len(ledger.confirmed) > 100
    assert ledger.plain_confirmed


async def test_killed_broker_starts_again_without_waiting_for_its_own_lease(
    start_broker: StartBroker, redis_server: RedisProcess, tmp_path: Path
) -> None:
    config = CONFIG.format(prefix=tmp_path.name).replace('"2s"', '"1h"')
    for _ in range(2):
        broker = start_broker(config, ["--store", redis_server.url])
        broker.kill()
    broker = start_broker(config, ["--store", redis_server.url])
    assert "store taken from an ended process" in broker.log_text()
    broker.stop()


async def take(client: Client, count: int) -> list[bytes]:
    await client.subscribe(
        "$queue/jobs", qos=1, user=[("consumer-group", "g"), ("ack-mode", "puback")]
    )
    found: list[bytes] = []
    async for message in client.messages():
        found.append(message.payload)
        if len(found) == count:
            return found
    raise AssertionError("the connection ended")


async def test_queues_sessions_and_retained_messages_survive_a_broker_restart(
    start_broker: StartBroker, redis_server: RedisProcess, tmp_path: Path
) -> None:
    config = CONFIG.format(prefix=tmp_path.name)
    broker = start_broker(config, ["--store", redis_server.url])
    async with client_of(broker, "lasting", clean_start=False, session_expiry=3600) as client:
        await client.subscribe("news", qos=1)
    async with client_of(broker, "author") as client:
        await client.publish("$queue/jobs", b"job", qos=1)
        await client.publish("state", b"on", qos=1, retain=True)
        await client.publish("news", b"while you were away", qos=1)
    broker.kill()
    broker = start_broker(config, ["--store", redis_server.url])
    async with client_of(broker, "worker") as client:
        assert await take(client, 1) == [b"job"]
    async with client_of(broker, "lasting", clean_start=False, session_expiry=3600) as client:
        await client.subscribe("state", qos=1)
        found = set()
        async for message in client.messages():
            found.add(message.payload)
            if len(found) == 2:
                break
        assert found == {b"while you were away", b"on"}


async def until_ready(broker: Broker, wanted: bool) -> str:
    """Wait until `/readyz` reports the wanted state, and return its text."""
    async with httpx.AsyncClient(timeout=30) as http:
        while True:
            answer = await http.get(f"http://{broker.facts['http']}/readyz")
            if (answer.status_code == 200) == wanted:
                return answer.text
            await asyncio.sleep(0.05)


async def test_publishers_are_refused_while_redis_has_no_memory_and_served_afterwards(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    redis = RedisProcess(tmp_path / "redis").start()
    try:
        broker = start_broker(CONFIG.format(prefix="p"), ["--store", redis.url])
        admin = redis.client()
        async with client_of(broker, "author") as client:
            await client.publish("$queue/jobs", b"0", qos=1)
            admin.config_set("maxmemory", 1)
            first = client.publish_nowait("$queue/jobs", b"1", qos=1)  # waits
            assert "maxmemory" in await until_ready(broker, False)
            with pytest.raises(PublishRefused, match="maxmemory") as refusal:
                await client.publish("$queue/jobs", b"refused", qos=1)
            assert refusal.value.reason == 0x83
            admin.config_set("maxmemory", 0)
            await first
            await until_ready(broker, True)
            await client.publish("$queue/jobs", b"2", qos=1)
            assert sorted(await take(client, 3)) == [b"0", b"1", b"2"]
        broker.stop()
    finally:
        redis.stop()


class Stalling:
    """A broker that reaches its Redis through a proxy that can hold data."""

    def __init__(self, start_broker: StartBroker, redis: RedisProcess, prefix: str) -> None:
        self.line = FaultProxy(redis.port)
        self.broker = start_broker(
            CONFIG.format(prefix=prefix), ["--store", f"redis://127.0.0.1:{self.line.port}"]
        )

    async def stall(self, client: Client) -> Awaitable[object]:
        """Hold Redis until publishers are refused; return a publish that is still pending."""
        self.line.hold()
        early = client.publish_nowait("state/early", b"1", qos=1, retain=True)
        await until_ready(self.broker, False)
        return early

    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.broker.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
        raise AssertionError


@pytest.fixture
def stalling(
    start_broker: StartBroker, redis_server: RedisProcess, tmp_path: Path
) -> Iterator[Stalling]:
    found = Stalling(start_broker, redis_server, tmp_path.name)
    yield found
    found.line.close()


async def test_persistent_work_is_refused_while_redis_stalls_and_the_rest_continues(
    stalling: Stalling,
) -> None:
    broker = stalling.broker
    async with (
        client_of(broker, "author") as author,
        client_of(broker, "old", version=4) as old,
        client_of(broker, "listener") as listener,
        client_of(broker, "lasting", clean_start=False, session_expiry=3600) as lasting,
    ):
        await lasting.subscribe("mail", qos=2)
        await listener.subscribe("#", qos=1)
        early = await stalling.stall(author)
        for topic, qos, retain in (("state/late", 1, True), ("mail", 1, False), ("mail", 2, False)):
            with pytest.raises(PublishRefused, match="accepts no messages") as refusal:
                await author.publish(topic, b"refused", qos=qos, retain=retain)
            assert refusal.value.reason == 0x83
        await author.publish("live", b"passes", qos=1)
        await author.publish("state/zero", b"passes", qos=0, retain=True)
        with pytest.raises(ClientError):  # 3.1.1 has no reason codes: the connection ends
            await old.publish("mail", b"refused", qos=1)
        stalling.line.release()
        await early
        await until_ready(broker, True)
        await author.publish("mail", b"kept", qos=2)
        async for message in lasting.messages():
            assert message.payload == b"kept"
            break
        received = set()
        async for message in listener.messages():
            received.add((message.topic, message.payload))
            if len(received) == 4:
                break
        assert received == {
            ("state/early", b"1"),
            ("live", b"passes"),
            ("state/zero", b"passes"),
            ("mail", b"kept"),
        }
    async with client_of(broker, "later") as later:
        await later.subscribe("state/#", qos=1)
        await later.subscribe("end", qos=1)
        await later.publish("end", b"", qos=1)
        found = []
        async for message in later.messages():
            if message.topic == "end":
                break
            found.append(message.topic)
    assert found == ["state/early"], "refused messages are not retained, and delayed ones are"


async def test_redis_stall_costs_bounded_memory(stalling: Stalling) -> None:
    broker = stalling.broker
    async with client_of(broker, "author") as author:
        early = await stalling.stall(author)
        before = stalling.resident_bytes()
        for nth in range(1000):
            await author.publish(f"state/{nth}", bytes(100_000), qos=0, retain=True)
        with pytest.raises(PublishRefused):  # everything before it has been read
            await author.publish("state/last", b"1", qos=1, retain=True)
        assert stalling.resident_bytes() - before < 50_000_000
        stalling.line.release()
        await early


async def test_every_api_shows_what_redis_shows_of_the_queues(
    start_broker: StartBroker, redis_server: RedisProcess, tmp_path: Path
) -> None:
    broker = start_broker(CONFIG.format(prefix=tmp_path.name), ["--store", redis_server.url])
    async with client_of(broker, "author") as author, client_of(broker, "worker") as worker:
        for _ in range(3):
            await author.publish("$queue/jobs", b"job", qos=1)
        await take(worker, 3)
        async with httpx.AsyncClient(base_url=f"http://{broker.facts['http']}", timeout=30) as http:
            while True:  # pending lists and counters follow within redis.poll
                store_view = (await http.get("/api/v1/store")).json()
                (queue,) = [one for one in store_view["queues"] if one["name"] == "jobs"]
                if queue["counters"]["acked"] == 3 and queue["counters"]["consumed"] == 3:
                    break
                await asyncio.sleep(0.05)
            assert (store_view["kind"], store_view["healthy"], store_view["fault"]) == (
                "redis",
                True,
                "",
            )
            assert store_view["owner"] and store_view["version"] and store_view["frame"] > 0
            assert (queue["partitions"], queue["counters"]["produced"]) == (10, 3)
            assert [(group["name"], group["lag"]) for group in queue["groups"]] == [("g", 0)]
            page = (await http.get("/metrics")).text
            assert "sluice_store_up 1" in page
            documented = re.findall(r"^\| `(sluice_redis_\w+)` \|", METRICS, re.MULTILINE)
            assert sorted(documented) == sorted(
                re.findall(r"^# TYPE (sluice_redis_\w+)", page, re.MULTILINE)
            )
            assert 'sluice_redis_messages_total{queue="$queue/jobs",what="produced"} 3' in page
            assert 'sluice_redis_lag{queue="$queue/jobs",group="g"} 0' in page
    shell = Shell(broker)
    assert (
        json.loads((await shell.run_ok("store", "--json")).stdout)["queues"] == store_view["queues"]
    )
    shown = (await shell.run_ok("store")).stdout
    assert "appendfsync" not in shown and "jobs" in shown and "consumed" in shown
    async with grpc.aio.insecure_channel(broker.facts["grpc"]) as channel:
        store = await QueueAdminStub(channel).GetStore(pb.GetStoreRequest())
    assert {one.name: one.counters["produced"] for one in store.queues}["jobs"] == 3
    assert store.owner == store_view["owner"]
    broker.stop()
    left = await asyncio.to_thread(read_store_stats, redis_server.url, tmp_path.name)
    assert (left.owner, left.queues["jobs"].length) == ("", 0), (
        "settled messages are deleted, and the store has no owner"
    )


async def test_standby_broker_takes_over_the_store_when_its_owner_is_gone(
    start_broker: StartBroker, redis_server: RedisProcess, tmp_path: Path
) -> None:
    config = (
        CONFIG.format(prefix=tmp_path.name)
        + 'partitions = 3\nstandby = true\nrebalance = "100ms"\n'
    )
    owner = start_broker(config, ["--store", redis_server.url])
    async with client_of(owner, "author") as client:
        await client.publish("$queue/jobs", b"job", qos=1)
    waiting = asyncio.create_task(
        asyncio.to_thread(start_broker, config, ["--store", redis_server.url])
    )
    done, _ = await asyncio.wait([waiting], timeout=3)  # longer than the lease
    assert not done, "the owner is alive"
    owner.kill()
    broker = await waiting
    async with client_of(broker, "worker") as client:
        assert await take(client, 1) == [b"job"]
    async with httpx.AsyncClient(timeout=30) as http:
        response = await http.get(f"http://{broker.facts['http']}/api/v1/queues/jobs")
    assert len(response.json()["partitions"]) == 3, "the value of redis.partitions"


async def test_broker_whose_store_was_taken_over_exits_with_a_message(
    start_broker: StartBroker, redis_server: RedisProcess, tmp_path: Path
) -> None:
    broker = start_broker(CONFIG.format(prefix=tmp_path.name), ["--store", redis_server.url])
    redis_server.client().incr(f"{tmp_path.name}:{{log}}:fence")
    broker.await_end(1, seconds=30)
    assert "another broker has taken it over" in broker.log_text()


async def test_failover_that_lost_confirmed_messages_is_reported_until_confirmed(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    pair = FailoverPair(tmp_path / "redis")
    try:
        flags = ["--store", pair.url]
        config = CONFIG.format(prefix="p")
        broker = start_broker(config, flags)
        async with client_of(broker, "author") as client:
            await client.publish("$queue/jobs", b"kept", qos=1)
            pair.wait_until_level()
            pair.fall_behind()
            await client.publish("$queue/jobs", b"lost", qos=1)
        pair.fail_over()
        broker.await_end(1, seconds=30)
        assert re.search(
            r"Redis has lost confirmed frames cell=0 first_frame=\d+ last_frame=\d+ "
            r"queues=.*jobs=1",
            broker.log_text(),
        )
        for _ in range(2):  # a restart does not hide it
            broker = start_broker(config, flags)
            await check_reported(broker, 1)
            shell = Shell(broker)
            output = shell.run("doctor", "jobs").stdout
            assert "sluice losses list" in output
            broker.stop()
        broker = start_broker(config, flags)
        shell = Shell(broker)
        assert "jobs: 1" in shell.run("losses", "list").stdout
        assert shell.run("losses", "confirm", "--cell", "1", "--yes").code == 3
        assert shell.run("losses", "confirm", "--yes").code == 0
        assert shell.run("losses", "confirm", "--yes").code == 3
        await check_reported(broker, 0)
        broker.stop()
        broker = start_broker(config, flags)
        await check_reported(broker, 0)
        async with client_of(broker, "worker") as client:
            assert await take(client, 1) == [b"kept"]
        broker.stop()
    finally:
        pair.stop()


async def check_reported(broker: Broker, count: int) -> None:
    """Check that `/readyz`, metrics, REST and gRPC report the unconfirmed losses."""
    async with httpx.AsyncClient(timeout=30, base_url=f"http://{broker.facts['http']}") as http:
        ready = await http.get("/readyz")
        assert ready.status_code == 200, "the broker accepts work: the loss is over"
        assert len(ready.json()["warnings"]) == count
        metrics = (await http.get("/metrics")).text
        assert f"\nsluice_store_losses_unconfirmed {count}\n" in metrics
        assert re.search(r"^sluice_store_frames_lost_total [1-9]", metrics, re.MULTILINE)
        assert (await http.get("/api/v1/node")).json()["losses"] == count
        assert (await http.get("/api/v1/store")).json()["frames_lost"] > 0
        found = (await http.get("/api/v1/losses")).json()
        assert [one["queues"] for one in found] == [{"jobs": 1}] * count
        async with grpc.aio.insecure_channel(broker.facts["grpc"]) as channel:
            admin = QueueAdminStub(channel)
            listed = (await admin.ListLosses(pb.ListLossesRequest())).losses
            assert [one.last for one in listed] == [one["last"] for one in found]
            if not count:
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await admin.ConfirmLoss(pb.ConfirmLossRequest(cell=0))
                assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
