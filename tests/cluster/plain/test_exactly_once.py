"""Plain QoS 2 from a persistent session to a cell of another node: once, also if a node dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sluice.client import Client
from tests.cluster.kit import until
from tests.cluster.memory_cluster import MemoryCluster, client_in, queue_in, two_nodes

LASTING: dict[str, Any] = {"clean_start": False, "session_expiry": 600}


async def read_all(net: MemoryCluster, client_id: str, end: str) -> list[bytes]:
    """Return the pending messages of a persistent client, up to an end marker published now."""
    async with net.nodes["a"].client("", max_inflight=1) as speaker:
        await speaker.publish(end, b"last", qos=2)
    got: list[bytes] = []
    async with asyncio.timeout(30), net.nodes["a"].client(client_id, **LASTING) as reader:
        async for message in reader.messages():
            if message.payload == b"last":
                return got
            got.append(bytes(message.payload))
    return got


async def lose(net: MemoryCluster, name: str, stored: bool) -> None:
    """Kill a node and open all its cells at the other one."""
    for cell in net.kill(name, stored):
        await net.nodes["a"].open(cell)


async def hold(net: MemoryCluster, cell: int) -> Callable[[], bool]:
    """Hold the store of a cell; return a check whether it was given a frame since."""
    store = net.stores[cell]
    await net.nodes[net.owners[cell] or ""].hosts[cell].flush()
    store.hold()
    before = store.count_unsynced()
    return lambda: store.count_unsynced() > before


@pytest.mark.parametrize("stored", [True, False])
async def test_receiver_node_dies_before_it_has_replied(stored: bool) -> None:
    async with two_nodes() as net:
        async with net.nodes["a"].client(client_in(1, "away"), **LASTING) as away:
            await away.subscribe("news/#", qos=2)
        async with net.nodes["a"].client(client_in(0), **LASTING) as publisher:
            is_given = await hold(net, 1)
            publishing = asyncio.create_task(publisher.publish("news/1", b"once", qos=2))
            await until(is_given)
            await lose(net, "b", stored)
            assert (await publishing).reason == 0
            await publisher.publish("news/1", b"next", qos=2)
        assert await read_all(net, client_in(1, "away"), "news/end") == [b"once", b"next"]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("cell", [0, 1])
async def test_connected_receiver_gets_the_message_after_its_cell_has_stored_it(
    cell: int, stored: bool
) -> None:
    """The publisher's session is in cell 1, the receiver's there or at the other node."""
    async with (
        two_nodes() as net,
        net.nodes["a"].client(client_in(cell, "reader"), **LASTING) as reader,
        net.nodes["a"].client(client_in(1, "publisher"), **LASTING) as publisher,
    ):
        await reader.subscribe("news/#", qos=2)
        sent = net.nodes[net.owners[cell] or ""].hosts[cell].broker.counters
        before = sent.publishes_sent
        is_given = await hold(net, cell)
        publishing = asyncio.create_task(publisher.publish("news/1", b"once", qos=2))
        await until(is_given)
        early = sent.publishes_sent - before
        if cell == 1:
            await lose(net, "b", stored)
        else:
            net.stores[0].release(-1)
        assert (await publishing).reason == 0
        await publisher.publish("news/1", b"next", qos=2)
        messages = reader.messages()
        async with asyncio.timeout(30):
            assert [bytes((await anext(messages)).payload) for _ in range(2)] == [b"once", b"next"]
        assert early == 0


async def publish_from_b(net: MemoryCluster, publisher: Client, steps: Callable[[], Any]) -> None:
    publishing = asyncio.create_task(publisher.publish("news/1", b"once", qos=2))
    await steps()
    assert (await publishing).reason == 0
    await publisher.publish("news/1", b"next", qos=2)


@pytest.mark.parametrize("stored", [True, False])
async def test_publisher_node_dies_before_it_has_forwarded_the_message(stored: bool) -> None:
    async with two_nodes() as net:
        async with net.nodes["a"].client(client_in(0, "away"), **LASTING) as away:
            await away.subscribe("news/#", qos=2)
        async with net.nodes["a"].client(client_in(1, "near"), **LASTING) as near:
            await near.subscribe("news/#", qos=2)
        async with net.nodes["a"].client(client_in(1), **LASTING) as publisher:
            is_given = await hold(net, 1)

            async def die() -> None:
                await until(is_given)
                await lose(net, "b", stored)

            await publish_from_b(net, publisher, die)
        assert await read_all(net, client_in(0, "away"), "news/end") == [b"once", b"next"]
        assert await read_all(net, client_in(1, "near"), "news/end") == [b"once", b"next"]


@pytest.mark.parametrize("qos", [1, 2])
async def test_publisher_node_dies_before_it_has_received_the_reply(qos: int) -> None:
    """To receivers of any QoS, including shared subscriptions and retained messages."""
    async with two_nodes() as net:
        async with net.nodes["a"].client(client_in(0, "away"), **LASTING) as away:
            await away.subscribe("news/#", qos=qos)
        async with net.nodes["a"].client(client_in(2, "member"), **LASTING) as member:
            await member.subscribe("$share/g/news/#", qos=qos)
        async with (
            net.nodes["a"].client(client_in(4, "here")) as here,
            net.nodes["a"].client(client_in(1), **LASTING) as publisher,
        ):
            await here.subscribe("news/#", qos=qos)
            is_given = await hold(net, 0)

            async def die() -> None:
                await until(is_given)
                await lose(net, "b", True)
                net.stores[0].release(-1)

            await publish_from_b(net, publisher, die)
            messages = here.messages()
            assert [bytes((await anext(messages)).payload) for _ in range(2)] == [b"once", b"next"]
        assert await read_all(net, client_in(0, "away"), "news/end") == [b"once", b"next"]
        assert await read_all(net, client_in(2, "member"), "news/end") == [b"once", b"next"]


async def test_queue_of_another_cell_stores_it_once_when_the_publishers_node_dies() -> None:
    name = queue_in(0)
    async with two_nodes() as net, net.nodes["a"].client(client_in(1), **LASTING) as publisher:
        await publisher.publish(f"$queue/{name}", b"first", qos=2)
        is_given = await hold(net, 0)
        publishing = asyncio.create_task(publisher.publish(f"$queue/{name}", b"once", qos=2))
        await until(is_given)
        await lose(net, "b", True)
        net.stores[0].release(-1)
        assert (await publishing).reason == 0
        assert net.nodes["a"].engine(0).queues[name].depth == 2


async def test_dedup_ids_are_forgotten_when_their_publishes_are_complete() -> None:
    async with two_nodes() as net:
        async with net.nodes["a"].client(client_in(1, "away"), **LASTING) as away:
            await away.subscribe("news/#", qos=2)
        async with net.nodes["a"].client(client_in(0), max_inflight=10, **LASTING) as publisher:
            await asyncio.gather(
                *(publisher.publish("news/1", b"%d" % n, qos=2) for n in range(200))
            )
            there = net.nodes["b"].engine(1).broker_state.dedup
            here = net.nodes["a"].engine(0).broker_state.dedup
            assert 0 < there.count_inbox() <= 20
            assert here.outbox == {}
            await net.move(1, "a")
            assert net.nodes["a"].engine(1).broker_state.dedup.count_inbox() == there.count_inbox()
        got = await read_all(net, client_in(1, "away"), "news/end")
        assert sorted(got, key=int) == [b"%d" % n for n in range(200)]
