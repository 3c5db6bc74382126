"""Plain MQTT across nodes: published through one node, received through another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from sluice.client import Client, Will
from sluice.client.message import Message
from tests.cluster.kit import until
from tests.cluster.memory_cluster import (
    CELLS,
    MemoryCluster,
    client_in,
    queue_in,
    topic_in,
    two_nodes,
)


@pytest.fixture
async def net() -> AsyncIterator[MemoryCluster]:
    async with two_nodes() as made:
        yield made


async def next_message(client: Client) -> Message:
    async with asyncio.timeout(30):
        return await anext(aiter(client.messages()))


def count_retained(net: MemoryCluster) -> int:
    cells = [cell for node in net.nodes.values() for cell in node.node.local_cells.values()]
    return sum(cell.broker.router.retained.count for cell in cells)


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_publish_reaches_subscribers_on_every_node(
    net: MemoryCluster, qos: int, version: int
) -> None:
    readers = [net.nodes["ab"[cell % 2]].client(client_in(cell, "reader")) for cell in range(CELLS)]
    for nth, reader in enumerate(readers):
        await reader.connect()
        await reader.subscribe(
            ["sensors/+/temp", "sensors/#"] if nth % 2 else "sensors/1/temp", qos=2
        )
    async with net.nodes["a"].client(client_in(1), version=version) as publisher:
        await publisher.publish("sensors/1/temp", b"21", qos=qos)
        await publisher.publish("sensors/1/temp", b"22", qos=qos)
    for reader in readers:
        first, second = await next_message(reader), await next_message(reader)
        assert (first.payload, second.payload, first.qos) == (b"21", b"22", qos)
        await reader.close()


@pytest.mark.parametrize("qos", [1, 2])
async def test_publish_without_subscribers_is_no_error_for_a_3_1_1_client(
    net: MemoryCluster, qos: int
) -> None:
    async with net.nodes["a"].client(client_in(0), version=4) as client:
        await client.publish(topic_in(1), b"", qos=qos, retain=True)
        await client.publish(topic_in(1), b"", qos=qos, retain=True)
        assert client.is_connected


async def test_publish_without_subscribers_is_reported(net: MemoryCluster) -> None:
    async with (
        net.nodes["a"].client(client_in(0)) as client,
        net.nodes["b"].client(client_in(1)) as other,
    ):
        assert (await client.publish("unused/here", b"x", qos=1)).reason == 0x10
        await other.subscribe("unused/#", qos=1)
        assert (await client.publish("unused/here", b"x", qos=1)).reason == 0
        await other.unsubscribe("unused/#")
        assert (await client.publish("unused/here", b"x", qos=1)).reason == 0x10


@pytest.mark.parametrize("topic_filter", ["exact", "wild"])
async def test_retained_message_is_stored_once_and_found_from_every_node(
    net: MemoryCluster, topic_filter: str
) -> None:
    topics = [topic_in(cell, "kept/") for cell in range(CELLS)]
    async with net.nodes["a"].client(client_in(0)) as publisher:
        for topic in topics:
            await publisher.publish(topic, b"old", qos=1, retain=True)
            await publisher.publish(topic, topic.encode(), qos=1, retain=True)
    async with net.nodes["b"].client(client_in(3)) as reader:
        await reader.subscribe("kept/#" if topic_filter == "wild" else topics, qos=1)
        found = [await next_message(reader) for _ in topics]
        assert sorted(message.topic for message in found) == sorted(topics)
        assert all(
            message.retain and message.payload.decode() == message.topic for message in found
        )
    assert count_retained(net) == CELLS
    async with net.nodes["a"].client(client_in(2)) as publisher:
        for topic in topics:
            await publisher.publish(topic, b"", qos=1, retain=True)
    assert count_retained(net) == 0


async def test_shared_subscription_sends_each_message_to_one_member_of_all_nodes(
    net: MemoryCluster,
) -> None:
    members = [net.nodes["ab"[cell % 2]].client(client_in(cell, "member")) for cell in range(CELLS)]
    for member in members:
        await member.connect()
        await member.subscribe("$share/g/jobs/#", qos=1)
    count = 120
    async with net.nodes["b"].client(client_in(0)) as publisher:
        for n in range(count):
            assert (await publisher.publish(f"jobs/{n % 3}", b"%d" % n, qos=1)).reason == 0
    got: list[list[bytes]] = [[] for _ in members]

    async def gather(nth: int) -> None:
        async for message in members[nth].messages():
            got[nth].append(bytes(message.payload))

    tasks = [asyncio.create_task(gather(nth)) for nth in range(CELLS)]
    await until(lambda: sum(map(len, got)) >= count)
    for task in tasks:
        task.cancel()
    assert sorted(one for some in got for one in some) == sorted(b"%d" % n for n in range(count))
    assert all(got)
    for member in members:
        await member.close()


async def test_session_is_taken_over_from_another_node(net: MemoryCluster) -> None:
    lost: list[object] = []
    first = net.nodes["a"].client(client_in(1), reconnect=False, on_disconnect=lost.append)
    await first.connect()
    async with net.nodes["b"].client(client_in(1)) as second:
        await until(lambda: lost)
        assert "taken over" in str(lost[0])
        await second.publish("still/there", b"", qos=1)
    await first.close()


async def test_will_reaches_subscribers_and_queues_of_other_nodes(net: MemoryCluster) -> None:
    name = queue_in(3)
    async with net.nodes["b"].client(client_in(3)) as reader, reader.consumer(name) as dead_letters:
        await reader.subscribe("wills/#", qos=1)
        for topic in ("wills/one", f"$queue/{name}"):
            dying = net.nodes["a"].client(
                client_in(0), will=Will(topic, b"gone", qos=1), reconnect=False
            )
            await dying.connect()
            net.nodes["a"].cut_clients()
            if topic.startswith("wills"):
                assert (await next_message(reader)).payload == b"gone"
            else:
                async with asyncio.timeout(30):
                    assert (await anext(aiter(dead_letters))).payload == b"gone"
            await dying.close()


async def test_offline_client_gets_messages_published_through_another_node(
    net: MemoryCluster,
) -> None:
    options = {"clean_start": False, "session_expiry": 600}
    async with net.nodes["a"].client(client_in(1), **options) as reader:
        await reader.subscribe("news/#", qos=1)
    async with net.nodes["b"].client(client_in(2)) as publisher:
        await publisher.publish("news/1", b"one", qos=1)
        await net.move(1, "a")
        await publisher.publish("news/2", b"two", qos=2)
    async with net.nodes["b"].client(client_in(1), **options) as reader:
        assert [(await next_message(reader)).payload for _ in range(2)] == [b"one", b"two"]


async def test_message_published_while_a_session_has_no_owner_waits_for_the_next_one(
    net: MemoryCluster,
) -> None:
    options = {"clean_start": False, "session_expiry": 600}
    async with net.nodes["a"].client(client_in(1), **options) as reader:
        await reader.subscribe("news/#", qos=1)
    lost = net.kill("b")
    async with net.nodes["a"].client(client_in(2)) as publisher:
        publishing = asyncio.create_task(publisher.publish("news/1", b"one", qos=1))
        done, _ = await asyncio.wait([publishing], timeout=0.05)
        assert not done
        for cell in lost:
            await net.nodes["a"].open(cell)
        assert (await publishing).reason == 0
    async with net.nodes["a"].client(client_in(1), **options) as reader:
        assert (await next_message(reader)).payload == b"one"


async def test_publish_whose_receiver_moves_before_commit_is_stored_by_the_next_owner(
    net: MemoryCluster,
) -> None:
    options = {"clean_start": False, "session_expiry": 600}
    async with net.nodes["a"].client(client_in(2), **options) as reader:
        await reader.subscribe("news/#", qos=1)
    net.stores[2].hold()
    async with net.nodes["a"].client(client_in(0)) as publisher:
        publishing = asyncio.create_task(publisher.publish("news/1", b"one", qos=1))
        done, _ = await asyncio.wait([publishing], timeout=0.05)
        assert not done
        net.nodes["a"].drop(2)
        await net.nodes["b"].open(2)
        assert (await publishing).reason == 0
    async with net.nodes["a"].client(client_in(2), **options) as reader:
        assert (await next_message(reader)).payload == b"one"


async def test_queue_of_another_node_is_bound_to_plain_topics(net: MemoryCluster) -> None:
    name = queue_in(3)
    config = {"name": name, "bindings": ["sensors/+/temp"]}
    async with net.nodes["a"].client(client_in(0)) as client:
        await client.publish("$admin/queue/create", json.dumps(config), qos=1)
        await until(lambda: net.nodes["a"].node.interest.match(b"sensors/1/temp").cells)
        await client.publish("sensors/1/temp", b"21", qos=1)
        async with client.consumer(name) as copies, asyncio.timeout(30):
            copy = await anext(aiter(copies))
            assert copy.payload == b"21"
            await copy.ack()


async def test_no_local_applies_across_nodes(net: MemoryCluster) -> None:
    async with (
        net.nodes["a"].client(client_in(1)) as client,
        net.nodes["b"].client(client_in(0)) as other,
    ):
        await client.subscribe("talk/#", qos=1, no_local=True)
        await client.publish("talk/1", b"mine", qos=1)
        await other.publish("talk/1", b"theirs", qos=1)
        assert (await next_message(client)).payload == b"theirs"


async def test_client_without_id_is_assigned_one_placed_on_this_node(net: MemoryCluster) -> None:
    async with net.nodes["a"].client("") as client:
        sessions = [
            name
            for cell in net.nodes["a"].node.local_cells.values()
            for name in cell.broker.registry.sessions
        ]
        assert client.client_id in sessions
        await client.subscribe("x", qos=1)
        await client.publish("x", b"1", qos=1)
        assert (await next_message(client)).payload == b"1"
