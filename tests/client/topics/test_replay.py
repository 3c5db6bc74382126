"""Dead letters of plain topics go back to their topics."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from sluice.client import (
    Client,
    ConsumerFactory,
    Message,
    Subscription,
    Unsupported,
    replay_dead_letters,
)
from sluice.client import sync as blocking
from tests.client.servers import Server
from tests.support.broker_process import Broker

ORDERS = Subscription("orders", dead_letter_topic="dead/orders")
ENVELOPE = {"header": {"id": 7, "bag": {"shop": "7"}}, "body": {"n": 1}}


def collector(server: Server, version: int) -> Client:
    """A client whose persistent session collects dead letters."""
    return Client(
        server.host,
        server.port,
        version=version,
        client_id=f"collector-{version}",
        clean_start=False,
        session_expiry=60 if version == 5 else 0,
        manual_ack=True,
    )


@pytest.fixture
async def shop(server: Server, version: int) -> AsyncIterator[Client]:
    """A client that publishes orders, and receives those that were replayed."""
    async with Client(server.host, server.port, version=version) as client:
        yield client
    stale = collector(server, version)
    stale.options.clean_start = True
    stale.options.session_expiry = 0
    async with stale:
        pass  # ends the session


async def reject_all(server: Server, version: int, shop: Client, *payloads: bytes) -> None:
    async with ConsumerFactory(server.host, server.port, version=version).create(
        ORDERS
    ) as consumer:
        for payload in payloads:
            await shop.publish("orders", payload, qos=1)
            message = await consumer.receive(30)
            assert message is not None
            await consumer.reject(message, None, "the till is locked")


async def received(client: Client, count: int) -> list[Message]:
    messages = client.messages()
    return [await anext(messages) for _ in range(count)]


async def test_dead_letters_of_a_session_go_back_to_their_topic(
    server: Server, version: int, shop: Client
) -> None:
    payloads = [b"one", b"\xff\x00", json.dumps(ENVELOPE).encode()]
    async with collector(server, version) as client:
        await client.subscribe("dead/orders", qos=1)
    await reject_all(server, version, shop, *payloads)
    await shop.publish("dead/orders", "no dead letter", qos=1)
    await shop.subscribe("orders", qos=1)
    async with collector(server, version) as client:
        result = await replay_dead_letters(client, "dead/orders", idle_seconds=0.5)
    assert (result.replayed, result.skipped) == (3, 1)
    found = await received(shop, 3)
    assert [one.payload for one in found[:2]] == payloads[:2]
    assert json.loads(found[2].payload) == ENVELOPE
    assert all(not dict(one.properties.user) for one in found)


async def test_replay_stops_at_its_limit_and_the_others_stay(
    server: Server, version: int, shop: Client
) -> None:
    async with collector(server, version) as client:
        await client.subscribe("dead/orders", qos=1)
    await reject_all(server, version, shop, b"one", b"two")
    await shop.subscribe("orders", qos=1)
    for expected in (b"one", b"two"):
        async with collector(server, version) as client:
            result = await replay_dead_letters(client, "dead/orders", limit=1, idle_seconds=10)
        assert (result.replayed, result.skipped) == (1, 0)
        [message] = await received(shop, 1)
        assert message.payload == expected


async def test_dead_letters_in_a_queue_are_replayed_from_there(broker: Broker) -> None:
    queued = Subscription("queued/orders", dead_letter_topic="$queue/queued/dead")
    host, port = broker.mqtt.host, broker.mqtt.port
    factory = ConsumerFactory(host, port)
    async with (
        Client(host, port, manual_ack=True) as shop,
        factory.create(queued) as consumer,
    ):
        await shop.publish("queued/orders", "one", qos=1, user={"shop": "7"})
        message = await consumer.receive(30)
        assert message is not None
        await consumer.reject(message)
        result = await replay_dead_letters(shop, "$queue/queued/dead", idle_seconds=0.5)
        assert (result.replayed, result.skipped) == (1, 0)
        again = await consumer.receive(30)
        assert again is not None and again.payload == b"one"
        assert dict(again.properties.user) == {"shop": "7"}
        assert (
            await replay_dead_letters(shop, "$queue/queued/dead", idle_seconds=0.2)
        ).replayed == 0


def test_blocking_replay(broker: Broker) -> None:
    host, port = broker.mqtt.host, broker.mqtt.port
    subscription = Subscription("sync/o", dead_letter_topic="$queue/sync/dead")
    factory = blocking.ConsumerFactory(host, port)
    with blocking.Client(host, port, manual_ack=True) as client:
        with factory.create(subscription) as consumer:
            client.publish("sync/o", "one", qos=1)
            message = consumer.receive(30)
            assert message is not None
            consumer.reject(message)
        client.subscribe("sync/o", qos=1)
        result = blocking.replay_dead_letters(client, "$queue/sync/dead", idle_seconds=0.3)
        assert result.replayed == 1
        assert next(client.messages()).payload == b"one"


async def test_replay_refuses_clients_and_topics_that_would_lose_messages() -> None:
    with pytest.raises(Unsupported, match="manual_ack=True"):
        await replay_dead_letters(Client(), "dead/orders")
    with pytest.raises(Unsupported, match="sluice dlq retry orders --all"):
        await replay_dead_letters(Client(manual_ack=True), "$queue/dlq/orders")
