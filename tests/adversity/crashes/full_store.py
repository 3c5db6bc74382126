"""Fills a store with one of everything that outlives a broker, and checks all of it later.

`fill` runs against any version of Sluice, over MQTT and REST; `check` against the current one, on a
broker that opened the same store. No item depends on the date, so that `check` may run years later.
As a program, it writes fixtures with the code of a checkout:

    PYTHONPATH=src python -m tests.adversity.crashes.full_store CHECKOUT OUT

In the checkout, set the default of `snapshot_bytes` to 1024 (`store/*/store.py`), so that the
fixtures have a snapshot.
"""

from __future__ import annotations

import asyncio
import base64
import json
import lzma
import sys
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.client import Client, Delivery, Message, PublishRefused
from sluice.wire.packets import (
    V5,
    Ack,
    Connack,
    Connect,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
)
from sluice.wire.properties import PUBCOMP, PUBREC, PUBREL
from tests.cluster.real_nodes.node_processes import Nodes
from tests.conformance.raw_connection import RawConnection, connect_raw
from tests.support.broker_process import Broker
from tests.support.external_programs import need_old_redis
from tests.support.redis_process import RedisProcess

CONFIG = '[ecq]\nretention = "0s"\n'
NEVER = 0xFFFF_FFFF
LONG = "18000d"  # no fixture is older than that
KEEP: dict[str, Any] = {
    "limits": {"message_ttl": "18250d"},
    "retry_policy": {"max_retries": 1, "initial_backoff": "0s", "total_timeout": "36500d"},
    "performance": {"delivery_timeout": "365d"},
}
SECONDS = 20.0
NODES = ("one", "two", "three")
LARGE = b"abcdefgh" * 256  # is compressed


def client_of(
    broker: Broker, name: str, clean_start: bool = True, expiry: int = 0, version: int = V5
) -> Client:
    return Client(
        broker.mqtt.host,
        broker.mqtt.port,
        client_id=name,
        version=version,
        reconnect=False,
        clean_start=clean_start,
        session_expiry=expiry if version == V5 else 0,
    )


def rest(broker: Broker, method: str, path: str, **body: Any) -> Any:
    url = f"http://{broker.address('http')}/api/v1/{path}"
    answer = httpx.request(method, url, json=body or None, timeout=SECONDS, trust_env=False)
    assert answer.status_code < 300, (method, path, answer.text)
    return answer.json() if answer.content else None


async def receive(client: Client, count: int) -> list[Message]:
    taken: list[Message] = []
    async with asyncio.timeout(SECONDS):
        while len(taken) < count:
            taken.append(await anext(client.messages()))
    return taken


async def deliveries(
    broker: Broker,
    queue: str,
    group: str,
    count: int,
    settle: Callable[[Delivery], Awaitable[object]],
) -> dict[str, Delivery]:
    """Take `count` deliveries of a group and settle each; return the last of each message."""
    taken: dict[str, Delivery] = {}
    async with client_of(broker, f"{group}-1") as client:
        consumer = client.consumer(queue, group=group)
        async with asyncio.timeout(SECONDS):
            for _ in range(count):
                one = await anext(aiter(consumer))
                taken[one.payload.decode()] = one
                await settle(one)
        await client.drain()
    return taken


async def ack(one: Delivery) -> None:
    await one.ack(confirm=True)


async def raw_session(raw: RawConnection, name: str, resume: bool) -> bool:
    connect = Connect(name, V5, not resume, 0)
    connect.properties.session_expiry = NEVER
    await raw.send(connect)
    return (await raw.expect(Connack)).session_present


async def raw_subscribe(raw: RawConnection, topic: str, user: list[tuple[str, str]]) -> None:
    subscribe = Subscribe(1, [SubscriptionRequest(topic.encode(), 2)])
    if user:
        subscribe.properties = Connect("", V5, True, 0).properties
        subscribe.properties.user = user
    await raw.send(subscribe)
    await raw.expect(Suback)


# ---- writing


async def fill(broker: Broker) -> None:
    """Write everything that goes into the snapshot."""
    async with client_of(broker, "maker") as maker:
        await make_queues(maker)
        await make_plain_state(broker, maker)
    await settle_jobs(broker)
    await read_values(broker)


async def make_queues(maker: Client) -> None:
    await maker.declare_queue("jobs", partitions=3, **KEEP)
    jobs = maker.publisher("jobs")
    for name in ("done", "rejected", "worn", "failed", "released", "held"):
        await jobs.send(name.encode(), id=f"job-{name}", key=name)
    await maker.publish(
        "$queue/jobs",
        b"rich",
        qos=1,
        user=[("message-id", "job-rich"), ("priority", "7"), ("tenant", "a"), ("tenant", "b")],
        content_type="text/plain",
        response_topic="answers/1",
        correlation_data=b"\x00\xff",
        payload_format=1,
    )
    await jobs.send(b"delayed", id="job-delayed", delay=LONG)
    await maker.publish(
        "$queue/jobs",
        b"dated",
        qos=1,
        user=[("message-id", "job-dated"), ("deliver-at", "2070-01-01T00:00:00Z")],
    )
    await maker.declare_queue("prices", type="compacted", **KEEP)
    prices = maker.publisher("prices")
    for key, value in (("plums", b"1"), ("apples", b"10"), ("pears", b"7"), ("apples", b"12")):
        await prices.send(value, key=key)
    await maker.declare_queue("gated", partitions=1, **KEEP)
    for nth in range(3):
        await maker.publisher("gated").send(b"%d" % nth, key="k")
    await maker.declare_queue("gated", partitions=4)
    for nth in range(3, 6):
        await maker.publisher("gated").send(b"%d" % nth, key="k")
    await maker.declare_queue("strict", ordering="strict", **KEEP)
    for nth in range(3):
        await maker.publisher("strict").send(b"%d" % nth)
    await maker.declare_queue("copies", bindings=["bound/+"], **KEEP)
    await maker.publish("bound/first", b"copied", qos=1)
    await maker.declare_queue("checked", schema={"type": "object"}, **KEEP)
    await maker.publish("$queue/checked", b'{"a": 1}', qos=1)
    await maker.declare_queue("chained", dlq_config={"topic": "dlq/dlq/chained"}, **KEEP)
    await maker.publisher("chained").send(b"chained")
    limits = {**KEEP["limits"], "retention": "36500d"}
    await maker.declare_queue("replayed", **{**KEEP, "limits": limits})
    await maker.publisher("replayed").send(b"old news")
    performance = {**KEEP["performance"], "compression": "zstd"}
    await maker.declare_queue("packed", **{**KEEP, "performance": performance})
    await maker.publisher("packed").send(LARGE)
    for key, value in (("a", b"1"), ("b", b"2")):
        await maker.publish(f"$ECQ/w/car-1/{key}", value, qos=1)


async def make_plain_state(broker: Broker, maker: Client) -> None:
    await maker.publish("kept/plain", b"still here", qos=1, retain=True, user={"unit": "C"})
    await maker.publish("kept/cleared", b"x", qos=1, retain=True)
    await maker.publish("kept/cleared", b"", qos=1, retain=True)
    for name, topic, version in (("sleeper", "mail/#", V5), ("sleeper-311", "mail/+", 4)):
        async with client_of(broker, name, False, NEVER, version) as sleeper:
            if version == V5:
                await sleeper.subscribe(topic, qos=2, identifier=7, retain_as_published=True)
            else:
                await sleeper.subscribe(topic, qos=1)
    async with client_of(broker, "sharer", False, NEVER) as sharer:
        await sharer.subscribe("$share/team/shared/#", qos=1)
    await maker.publish("mail/one", b"first", qos=1, user={"from": "maker"})
    await maker.publish("mail/two", b"second", qos=2, retain=True)
    await maker.publish("shared/one", b"for one of us", qos=1)
    async with connect_raw(broker.mqtt) as raw:  # QoS 2: two publishes without their PUBREL
        await raw_session(raw, "half-in", False)
        await maker.declare_queue("once", **KEEP)
        await raw.send(Publish(b"half/in", b"in", 2, packet_id=7))
        assert (await raw.expect(Ack)).kind == PUBREC
        await raw.send(Publish(b"$queue/once", b"once", 2, packet_id=8))
        assert (await raw.expect(Ack)).kind == PUBREC


async def settle_jobs(broker: Broker) -> None:
    """Settle deliveries of `jobs` in every way; `held` stays in flight."""
    worn = 0
    rest(broker, "POST", "queues/jobs/groups", name="audit", start="earliest")

    async def settle(one: Delivery) -> None:
        nonlocal worn
        match one.payload:
            case b"done":
                await one.ack(confirm=True)
            case b"rejected":
                await one.reject(description="no good", confirm=True)
            case b"worn":
                worn += 1
                await one.nack(description=f"failure {worn}", delay=0, confirm=True)
            case b"failed":
                await one.nack(description="try later", delay=18_000 * 86_400, confirm=True)

    async def ack_done(one: Delivery) -> None:
        if one.payload == b"done":
            await one.ack(confirm=True)

    await deliveries(broker, "jobs", "workers", 8, settle)
    await deliveries(broker, "jobs", "audit", 7, ack_done)

    async def reject(one: Delivery) -> None:
        await one.reject(confirm=True)

    await deliveries(broker, "chained", "workers", 1, reject)
    await deliveries(broker, "replayed", "readers", 1, ack)
    await deliveries(broker, "strict", "workers", 1, ack)


async def read_values(broker: Broker) -> None:
    async def ack_apples(one: Delivery) -> None:
        if one.key == "apples":
            await one.ack(confirm=True)

    await deliveries(broker, "prices", "shop", 3, ack_apples)
    async with client_of(broker, "car-1", False, NEVER) as car:
        await car.subscribe("$ECQ/car-1/#", qos=1)
        await receive(car, 2)
        await car.publish("any", b"", qos=1)  # after both PUBACKs


async def fill_log(broker: Broker) -> None:
    """Write everything that stays in the log after the snapshot, until the broker is killed."""
    async with client_of(broker, "maker") as maker:
        for key, value in (("b", b"3"), ("c", b"4"), ("a", b"")):
            await maker.publish(f"$ECQ/w/car-1/{key}", value, qos=1)
        await maker.publisher("prices").send(b"", key="plums")
        await maker.publisher("jobs").send(b"waiting", id="job-waiting", key="done")
        await maker.declare_queue("gone", **KEEP)
        await maker.publisher("gone").send(b"never again")
        await maker.publish("mail/three", b"third", qos=1)
        async with connect_raw(broker.mqtt) as raw:
            await raw_session(raw, "half-out", False)
            await raw_subscribe(raw, "out/#", [])
            for qos, payload in ((2, b"released"), (2, b"received"), (1, b"sent")):
                await maker.publish("out/x", payload, qos=qos)
                sent = await raw.expect(Publish)
                if payload == b"released":
                    await raw.send(Ack(PUBREC, sent.packet_id))
                    assert (await raw.expect(Ack)).kind == PUBREL
        async with connect_raw(broker.mqtt) as raw:
            await raw_session(raw, "keeper-1", False)
            await maker.declare_queue("kept", **KEEP)
            await raw_subscribe(raw, "$queue/kept", [("consumer-group", "keepers")])
            await maker.publisher("kept").send(b"leased")
            await raw.expect(Publish)
    rest(broker, "DELETE", "queues/gone")


# ---- checking


async def check(broker: Broker) -> None:
    """Check everything. The deliveries that it settles are settled afterwards."""
    check_statistics(broker)
    await check_plain_state(broker)
    await check_flights(broker)
    await check_jobs(broker)
    await check_other_queues(broker)
    await check_values(broker)
    assert rest(broker, "GET", "verify") == []


def check_statistics(broker: Broker) -> None:
    names = {one["name"] for one in rest(broker, "GET", "queues")}
    assert names == {
        *("jobs", "dlq/jobs", "prices", "gated", "strict", "copies", "checked", "chained"),
        *("dlq/dlq/chained", "replayed", "packed", "once", "kept"),
    }
    groups = {one["name"]: one["ledger"] for one in rest(broker, "GET", "queues/jobs/groups")}
    workers, audit = groups["workers"], groups["audit"]
    assert (workers["acked"], workers["dead"], workers["retrying"]) == (1, 2, 1), workers
    assert (audit["acked"], audit["dead"], audit["retrying"]) == (1, 0, 0), audit


async def check_plain_state(broker: Broker) -> None:
    async with client_of(broker, "reader") as reader:
        await reader.subscribe("kept/#", qos=1)
        (kept,) = await receive(reader, 1)
        assert (kept.topic, kept.payload, kept.retain) == ("kept/plain", b"still here", True)
        assert kept.properties.user == [("unit", "C")]
        async with client_of(broker, "sleeper", False, NEVER) as sleeper:
            assert sleeper.session_present
            mail = {one.topic: one for one in await receive(sleeper, 3)}
            assert {name: (one.payload, one.qos, one.retain) for name, one in mail.items()} == {
                "mail/one": (b"first", 1, False),
                "mail/two": (b"second", 2, True),
                "mail/three": (b"third", 1, False),
            }
            assert mail["mail/one"].properties.user == [("from", "maker")]
            assert all(one.subscription_ids == [7] for one in mail.values())
            await reader.publish("mail/four", b"fourth", qos=1)  # its subscription is there, too
            assert [one.payload for one in await receive(sleeper, 1)] == [b"fourth"]
        async with client_of(broker, "sleeper-311", False, version=4) as old:
            assert [one.payload for one in await receive(old, 4)] == [
                *(b"first", b"second", b"third", b"fourth")
            ]
        async with client_of(broker, "sharer", False, NEVER) as sharer:
            assert [one.payload for one in await receive(sharer, 1)] == [b"for one of us"]


async def check_flights(broker: Broker) -> None:
    async with client_of(broker, "watcher") as watcher, connect_raw(broker.mqtt) as raw:
        await watcher.subscribe("half/#", qos=1)
        assert await raw_session(raw, "half-in", True)
        for packet_id, topic, payload in ((7, b"half/in", b"in"), (8, b"$queue/once", b"once")):
            await raw.send(Publish(topic, payload, 2, dup=True, packet_id=packet_id))
            assert (await raw.expect(Ack)).kind == PUBREC
            await raw.send(Ack(PUBREL, packet_id))
            assert (await raw.expect(Ack)).kind == PUBCOMP
        await watcher.publish("half/end", b"end", qos=1)
        # Published once, before the crash.
        assert [one.payload for one in await receive(watcher, 1)] == [b"end"]
        assert rest(broker, "GET", "queues/once")["stats"]["total_messages"] == 1
    async with connect_raw(broker.mqtt) as raw:
        assert await raw_session(raw, "half-out", True)
        packets = [await raw.next() for _ in range(3)]
        (release,) = [one for one in packets if isinstance(one, Ack)]
        assert release.kind == PUBREL
        await raw.send(Ack(PUBCOMP, release.packet_id))
        sent = [one for one in packets if isinstance(one, Publish)]
        assert [(one.payload, one.qos) for one in sent] == [(b"received", 2), (b"sent", 1)]
    async with connect_raw(broker.mqtt) as raw:
        assert await raw_session(raw, "keeper-1", True)
        assert (await raw.expect(Publish)).payload == b"leased"


async def check_jobs(broker: Broker) -> None:
    jobs = await deliveries(broker, "jobs", "workers", 4, ack)
    assert {name: one.attempt for name, one in jobs.items()} == {
        "released": 1,
        "held": 1,
        "rich": 1,
        "waiting": 1,
    }
    rich = jobs["rich"]
    tenants = [value for name, value in rich.user_properties if name == "tenant"]
    assert (rich.id, tenants) == ("job-rich", ["a", "b"])
    properties = rich.properties
    assert (properties.content_type, properties.response_topic) == ("text/plain", "answers/1")
    assert (properties.correlation_data, properties.payload_format) == (b"\x00\xff", 1)
    for name in ("job-failed", "job-delayed", "job-dated"):
        rest(broker, "POST", f"queues/jobs/messages/{name}/reschedule", delay="0s")
    jobs = await deliveries(broker, "jobs", "workers", 3, ack)
    assert {name: one.attempt for name, one in jobs.items()} == {
        "failed": 2,
        "delayed": 1,
        "dated": 1,
    }
    audit = await deliveries(broker, "jobs", "audit", 9, ack)
    assert audit.keys() == {
        *("rejected", "worn", "failed", "released", "held", "rich", "waiting", "delayed", "dated")
    }
    dead = await deliveries(broker, "dlq/jobs", "clinic", 2, ack)
    headers = {name: one.headers for name, one in dead.items()}
    assert {name: one["dead-reason"] for name, one in headers.items()} == {
        "rejected": "rejected",
        "worn": "max_retries",
    }
    assert headers["rejected"]["dead-description"] == "no good"
    history = [one[1] for one in json.loads(headers["worn"]["history"])]
    assert history.count("nacked") == 2, history
    assert headers["worn"]["original-message-id"] == "job-worn"


async def check_other_queues(broker: Broker) -> None:
    order: list[bytes] = []

    async def note_and_ack(one: Delivery) -> None:
        order.append(one.payload)
        await one.ack(confirm=True)

    await deliveries(broker, "gated", "workers", 6, note_and_ack)
    assert order == [b"0", b"1", b"2", b"3", b"4", b"5"]
    order.clear()
    await deliveries(broker, "strict", "workers", 2, note_and_ack)
    assert order == [b"1", b"2"]
    assert (await deliveries(broker, "replayed", "late", 1, ack)).keys() == {"old news"}
    assert (await deliveries(broker, "dlq/dlq/chained", "clinic", 1, ack)).keys() == {"chained"}
    assert (await deliveries(broker, "packed", "any", 1, ack)).keys() == {LARGE.decode()}
    async with client_of(broker, "maker") as maker:
        await maker.publish("bound/second", b"copied later", qos=1)
        with pytest.raises(PublishRefused) as refused:
            await maker.publish("$queue/checked", b"[]", qos=1)
        assert refused.value.reason == 0x99  # by the schema
    copies = await deliveries(broker, "copies", "any", 2, ack)
    assert {name: one.headers["original-topic"] for name, one in copies.items()} == {
        "copied": "bound/first",
        "copied later": "bound/second",
    }


async def check_values(broker: Broker) -> None:
    shop = await deliveries(broker, "prices", "shop", 2, ack)
    assert {one.key: name for name, one in shop.items()} == {"pears": "7", "plums": ""}
    late = await deliveries(broker, "prices", "late", 2, ack)
    assert {one.key: name for name, one in late.items() if name} == {"apples": "12", "pears": "7"}
    async with client_of(broker, "car-1", False, NEVER) as car:
        assert car.session_present
        values = await receive(car, 3)
        assert [(one.topic, one.payload) for one in values] == [
            ("$ECQ/car-1/b", b"3"),
            ("$ECQ/car-1/c", b"4"),
            ("$ECQ/car-1/a", b""),
        ]


# ---- fixtures


Start = Callable[[], Broker]


async def write_store(start: Start) -> None:
    """Fill the store of a broker, which is restarted once, and killed at the end."""
    broker = start()
    try:
        await fill(broker)
        broker.stop()
        broker = start()
        await fill_log(broker)
    finally:
        broker.kill()


async def write_cluster(nodes: Nodes) -> None:
    """Fill the stores of a cluster of three nodes, and stop all of them."""
    try:
        first, second, _ = [nodes.start(name) for name in NODES]
        await fill(first)
        await fill_log(second)
    finally:
        nodes.stop()


async def write_fixtures(checkout: Path, out: Path) -> None:
    """Write the embedded store `OUT.tar.xz`, and the keys of a store and of a cluster in Redis."""
    environ = {"PYTHONPATH": str(checkout / "src")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        await write_store(lambda: Broker(folder, CONFIG, (), environ))
        with tarfile.open(f"{out}.tar.xz", "w:xz") as archive:
            archive.add(folder / "data", "data")
        # The oldest Redis: later ones read its dumps.
        redis = RedisProcess(folder / "redis", program=need_old_redis()).start()
        flags = ("--store", redis.url)
        cluster = folder / "cluster"
        cluster.mkdir()
        try:
            await write_store(lambda: Broker(folder, CONFIG, flags, environ))
            dump_keys(redis, Path(f"{out}.redis.xz"))
            redis.client().flushall()
            await write_cluster(Nodes(cluster, redis.url, CONFIG, environ=environ))
            dump_keys(redis, Path(f"{out}.cluster.xz"))
        finally:
            redis.stop()


def dump_keys(redis: RedisProcess, out: Path) -> None:
    client = redis.client()
    lines = []
    for key in sorted(client.scan_iter()):
        value = client.dump(key)
        if value is not None and client.ttl(key) < 0:  # not the lease of the broker
            lines.append(base64.b64encode(key) + b" " + base64.b64encode(value))
    out.write_bytes(lzma.compress(b"\n".join(lines)))


def restore_keys(redis: RedisProcess, fixture: Path) -> None:
    client = redis.client()
    for line in lzma.decompress(fixture.read_bytes()).splitlines():
        key, value = line.split()
        client.restore(base64.b64decode(key), 0, base64.b64decode(value), replace=True)


if __name__ == "__main__":
    asyncio.run(write_fixtures(Path(sys.argv[1]), Path(sys.argv[2])))
