"""Retained messages across partitions and moves: a value is never replaced by an older one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice.client.errors import ClientError
from sluice.cluster.plain.bridge_frames import (
    PUBLISH,
    PUBLISH_ONCE,
    read_message,
    read_targets,
    unpack_fields,
)
from sluice.cluster.plain.fanout import Fanout
from tests.cluster.kit import until
from tests.cluster.memory_cluster import MemoryCluster, client_in, topic_in, two_nodes

TIMEOUT_SECONDS = 30.0


@pytest.fixture
async def net() -> AsyncIterator[MemoryCluster]:
    async with two_nodes() as made:
        yield made


def retained(net: MemoryCluster, node: str, topic: str) -> bytes | None:
    found = net.nodes[node].node.local_cells[1].find_retained(topic.encode())
    return found[0].payload if found else None


async def in_time(work: Any) -> Any:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        return await work


async def test_publish_pending_on_a_partitioned_node_does_not_replace_a_newer_value(
    net: MemoryCluster,
) -> None:
    topic = topic_in(1)
    writer = client_in(0)
    a, b = net.nodes["a"], net.nodes["b"]
    client = a.client(writer, reconnect=False)
    await client.connect()
    await client.publish(topic, b"1", qos=1, retain=True)
    net.cut_off("a")
    old = asyncio.create_task(client.publish(topic, b"2", qos=1, retain=True))
    await until(lambda: a.node._parked, "the publish waits for cell 1")
    a.drop(0)  # node a is evicted and loses its cells
    with pytest.raises(ClientError):
        await in_time(old)  # never acknowledged
    await b.open(0)
    async with b.client(writer) as elsewhere:
        await in_time(elsewhere.publish(topic, b"3", qos=1, retain=True))
    assert retained(net, "b", topic) == b"3"
    net.unreachable.clear()
    await until(lambda: not a.node._parked, "the link is back")
    async with a.client(client_in(2)) as other:  # uses the same link, after it
        await in_time(other.publish(topic_in(1, "other"), b"", qos=1, retain=True))
    assert retained(net, "b", topic) == b"3"


async def test_publish_of_a_closed_connection_is_not_sent_late(net: MemoryCluster) -> None:
    topic = topic_in(1)
    a, b = net.nodes["a"], net.nodes["b"]
    b.drop(1)
    client = a.client(client_in(0), reconnect=False)
    await client.connect()
    old = asyncio.create_task(client.publish(topic, b"old", qos=1, retain=True))
    await until(lambda: a.node._parked)
    a.cut_clients()
    with pytest.raises(ClientError):
        await in_time(old)
    await b.open(1)
    await until(lambda: not a.node._parked)
    async with a.client(client_in(2)) as other:
        await in_time(other.publish(topic_in(1, "other"), b"", qos=1, retain=True))
    assert retained(net, "b", topic) is None


async def test_resent_older_publish_reaches_subscribers_and_not_the_retained_value(
    net: MemoryCluster,
) -> None:
    topic = topic_in(1)
    a, b = net.nodes["a"], net.nodes["b"]
    async with (
        a.client(client_in(0)) as client,
        a.client(client_in(1), clean_start=False) as reader,
    ):
        await in_time(reader.subscribe(topic, qos=1))
        net.lost_frames = {PUBLISH, PUBLISH_ONCE}
        first = asyncio.create_task(client.publish(topic, b"1", qos=1, retain=True))
        await until(lambda: any(bridge._publishes for bridge in a.node._bridges.values()))
        b.drop(1)
        await a.open(1)
        await in_time(reader.subscribe(topic, qos=1))
        await in_time(client.publish(topic, b"2", qos=1, retain=True))
        assert retained(net, "a", topic) == b"2"
        net.lost_frames = set()
        net.cut_streams()
        await in_time(first)
        assert retained(net, "a", topic) == b"2"
        seen: list[bytes] = []
        async with asyncio.timeout(TIMEOUT_SECONDS):
            async for message in reader.messages():
                seen.append(message.payload)
                if b"1" in seen:
                    break


async def test_publishes_of_one_client_do_not_overtake_those_waiting_for_a_cell(
    net: MemoryCluster,
) -> None:
    topic = topic_in(1)
    a, b = net.nodes["a"], net.nodes["b"]
    sent: list[bytes] = []
    overtaken: list[bytes] = []

    def watch(kind: int, body: bytes) -> None:
        if kind not in (PUBLISH, PUBLISH_ONCE):
            return
        body = body[26:] if kind == PUBLISH_ONCE else body
        _, mark = unpack_fields(">IQ", body)
        _, at = read_targets(body, 12)
        sent.append(read_message(body, at, 0.0).payload)
        for parked in a.node._parked:
            if isinstance(parked.request, Fanout) and parked.request.dedup_id < mark:
                overtaken.append(parked.request.message.payload)

    net.watch_frame = watch
    numbers = [b"%d" % nth for nth in range(8)]
    answers: list[asyncio.Task[Any]] = []
    async with a.client(client_in(0)) as client:

        async def publish_all() -> None:
            for number in numbers:
                work = client.publish(topic, number, qos=1, retain=True)
                answers.append(asyncio.create_task(work))
                await until(
                    lambda: (
                        a.node.local_cells[0].pending_publishes == len(answers) and a.node._parked
                    )
                )

        await b.reopen_after(1, publish_all)
        await in_time(asyncio.gather(*answers))
        assert not overtaken
        last = [number for nth, number in enumerate(sent) if number not in sent[nth + 1 :]]
        assert last == numbers, "in the order of the last sending"
        assert retained(net, "b", topic) == numbers[-1]
