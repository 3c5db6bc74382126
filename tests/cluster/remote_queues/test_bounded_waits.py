"""Requests for a cell without an owner are answered, or their connection closed, in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice.client import Client
from sluice.client.errors import ClientError, PublishRefused, SubscribeRefused
from sluice.cluster.plain.bridge_frames import INTEREST_ACK, PUBLISH_ACK
from tests.cluster.kit import until
from tests.cluster.memory_cluster import MemoryCluster, client_in, queue_in, topic_in, two_nodes

BOUND = 0.4
TIMEOUT_SECONDS = 30.0


@pytest.fixture
async def net() -> AsyncIterator[MemoryCluster]:
    """Two nodes; cell 1 has no owner until a test opens it."""
    async with two_nodes() as made:
        for one in made.nodes.values():
            one.node.answer_seconds = BOUND
        made.nodes["b"].drop(1)
        yield made


def publisher(net: MemoryCluster, **options: Any) -> Client:
    return net.nodes["a"].client(client_in(0), **options)


def connections_of(net: MemoryCluster) -> int:
    """Return how many connections the publisher's session has had."""
    return (
        net.nodes["a"]
        .node.local_cells[0]
        .broker.registry.sessions[client_in(0)]
        .inbound.get_epoch()
    )


async def in_time(work: Any) -> Any:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        return await work


@pytest.mark.parametrize("qos", [1, 2])
async def test_publish_to_queue_of_cell_without_owner_is_refused_with_a_remedy(
    net: MemoryCluster, qos: int
) -> None:
    name = queue_in(1)
    async with publisher(net) as client:
        with pytest.raises(
            PublishRefused, match=r"publish again.*sluice cluster status"
        ) as refused:
            await in_time(client.publish(f"$queue/{name}", b"early", qos=qos))
        assert refused.value.reason == 0x83
        await net.nodes["b"].open(1)
        await in_time(client.publish(f"$queue/{name}", b"late", qos=qos))
    assert net.nodes["b"].engine(1).queues[name].depth == 1, (
        "the refused message does not arrive late"
    )


async def test_publish_of_3_1_1_client_to_cell_without_owner_ends_its_connection(
    net: MemoryCluster,
) -> None:
    name = queue_in(1)
    async with publisher(net, version=4, clean_start=False) as client:
        first = connections_of(net)
        publishing = asyncio.create_task(client.publish(f"$queue/{name}", b"work", qos=1))
        await until(lambda: connections_of(net) > first, "a new connection")
        await net.nodes["b"].open(1)
        await in_time(publishing)
    assert net.nodes["b"].engine(1).queues[name].depth == 1


@pytest.mark.parametrize("retain", [False, True])
async def test_plain_publish_to_cell_without_owner_is_refused_with_a_remedy(
    net: MemoryCluster, retain: bool
) -> None:
    async with publisher(net) as client:
        topic = topic_in(1)
        if not retain:  # a subscriber whose session is there
            net.nodes["a"].node.interest.apply_changes(1, {topic.encode(): 1})
        with pytest.raises(PublishRefused, match="publish again") as refused:
            await in_time(client.publish(topic, b"on", qos=1, retain=retain))
        assert refused.value.reason == 0x83


async def test_settlement_in_cell_without_owner_is_refused(net: MemoryCluster) -> None:
    name = queue_in(1)
    await net.nodes["b"].open(1)
    async with publisher(net, manual_ack=True) as client:
        await client.subscribe(f"$queue/{name}/$group/g", qos=1)
        await client.publish(f"$queue/{name}", b"one", qos=1)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            reported = dict((await anext(aiter(client.messages()))).properties.user)
        net.nodes["b"].drop(1)
        settle = [("message-id", reported["message-id"]), ("consumer-group", "g")]
        with pytest.raises(PublishRefused) as refused:
            await in_time(client.publish(f"$queue/{name}/$ack", b"", qos=1, user=settle))
        assert refused.value.reason == 0x83


async def test_settlement_of_3_1_1_client_in_cell_without_owner_is_not_confirmed(
    net: MemoryCluster,
) -> None:
    name = queue_in(1)
    async with publisher(net, version=4, clean_start=False) as client:
        first = connections_of(net)
        settling = asyncio.create_task(client.publish(f"$queue/{name}/$ack/1", b"", qos=1))
        await until(lambda: connections_of(net) > first, "a new connection")
        assert not settling.done()
        settling.cancel()


async def test_subscription_to_queue_of_cell_without_owner_is_refused_and_can_be_repeated(
    net: MemoryCluster,
) -> None:
    name = queue_in(1)
    async with publisher(net) as client:
        with pytest.raises(SubscribeRefused, match="subscribe again") as refused:
            await in_time(client.subscribe(f"$queue/{name}", qos=1))
        assert refused.value.reasons == [0x83]
        await net.nodes["b"].open(1)
        await in_time(client.publish(f"$queue/{name}", b"work", qos=1))
        session = net.nodes["b"].node.local_cells[1].broker.registry.sessions[client_in(0)]
        assert not session.queue_requests, "the refused subscription does not join later"
        await in_time(client.subscribe(f"$queue/{name}", qos=1))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert (await anext(aiter(client.messages()))).payload == b"work"


async def test_publish_that_another_node_never_answers_is_refused(net: MemoryCluster) -> None:
    net.lost_frames = {PUBLISH_ACK}
    async with publisher(net) as client:
        with pytest.raises(PublishRefused, match="publish again") as refused:
            await in_time(client.publish(topic_in(3), b"on", qos=1, retain=True))
        assert refused.value.reason == 0x83


async def test_subscription_that_another_node_never_confirms_ends_the_connection(
    net: MemoryCluster,
) -> None:
    net.lost_frames = {INTEREST_ACK}
    async with publisher(net, reconnect=False) as client:
        with pytest.raises(ClientError, match="subscribe again"):
            await in_time(client.subscribe("news", qos=1))


async def test_retained_message_arrives_when_its_cell_gets_an_owner_however_late(
    net: MemoryCluster,
) -> None:
    topic = topic_in(1)
    await net.nodes["b"].open(1)
    async with publisher(net) as client:
        await client.publish(topic, b"on", qos=1, retain=True)
        net.nodes["b"].drop(1)
        async with net.nodes["a"].client(client_in(2)) as reader:
            await in_time(reader.subscribe(topic, qos=1))
            with pytest.raises(PublishRefused):  # longer than any other request waits
                await in_time(client.publish(f"$queue/{queue_in(1)}", b"", qos=1))
            with pytest.raises(PublishRefused):
                await in_time(client.publish(f"$queue/{queue_in(1)}", b"", qos=1))
            await net.nodes["b"].open(1)
            async with asyncio.timeout(TIMEOUT_SECONDS):
                message = await anext(aiter(reader.messages()))
            assert (message.payload, message.retain) == (b"on", True)


async def test_retained_lookup_ends_when_the_subscription_is_gone(net: MemoryCluster) -> None:
    topic = topic_in(1)
    node = net.nodes["a"].node
    async with net.nodes["a"].client(client_in(2)) as reader:
        await in_time(reader.subscribe(topic, qos=1))
        assert node._parked
        await in_time(reader.unsubscribe(topic))
        await until(lambda: not node._parked)
