"""gmqtt, an independent asyncio client, over TCP and TLS in both versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import gmqtt
import pytest

from tests.conformance.conftest import Certificates
from tests.support.broker_process import Broker

SECONDS = 10.0


class Client:
    def __init__(self, client_id: str, **options: Any) -> None:
        self.gmqtt = gmqtt.Client(client_id, **options)
        self.messages: asyncio.Queue[tuple[str, bytes, int, dict[str, Any]]] = asyncio.Queue()
        self.subscribed: asyncio.Queue[Any] = asyncio.Queue()
        self.present = False
        self.gmqtt.on_message = self._on_message
        self.gmqtt.on_subscribe = lambda _, mid, qos, properties: self.subscribed.put_nowait(qos)
        self.gmqtt.on_connect = self._on_connect

    def _on_connect(self, client: Any, flags: int, reason: int, properties: Any) -> None:
        self.present = bool(flags & 1)

    def _on_message(
        self, client: Any, topic: str, payload: bytes, qos: int, properties: dict[str, Any]
    ) -> int:
        self.messages.put_nowait((topic, bytes(payload), qos, properties))
        return 0

    async def subscribe(self, topic: str, qos: int = 2) -> None:
        self.gmqtt.subscribe(topic, qos)
        await asyncio.wait_for(self.subscribed.get(), SECONDS)

    async def message(self) -> tuple[str, bytes, int, dict[str, Any]]:
        return await asyncio.wait_for(self.messages.get(), SECONDS)


Make = Callable[..., Awaitable[Client]]


@pytest.fixture(params=["mqtt", "mqtts"])
async def make(
    request: pytest.FixtureRequest,
    listening_broker: Broker,
    certificates: Certificates,
    version: int,
) -> AsyncIterator[Make]:
    made: list[Client] = []

    async def connect(client_id: str, lasting: bool = False, **options: Any) -> Client:
        if version == 5:
            options["session_expiry_interval"] = 300 if lasting else 0
        client = Client(client_id, clean_session=not lasting, **options)
        client.gmqtt.set_config({"reconnect_retries": 0})
        made.append(client)
        address = listening_broker.address(request.param)
        context = certificates.client_context() if request.param == "mqtts" else False
        await asyncio.wait_for(
            client.gmqtt.connect(address.host, address.port, ssl=context, version=version), SECONDS
        )
        return client

    yield connect
    for client in made:
        if client.gmqtt.is_connected:
            await client.gmqtt.disconnect()


async def test_messages_are_exchanged_at_each_qos(make: Make, name: str) -> None:
    client = await make(name)
    await client.subscribe(f"{name}/#")
    for qos in range(3):
        client.gmqtt.publish(f"{name}/{qos}", b"%d" % qos, qos=qos)
    got = [await client.message() for _ in range(3)]
    assert [one[:3] for one in got] == [(f"{name}/{qos}", b"%d" % qos, qos) for qos in range(3)]


async def test_retained_messages_and_wills(make: Make, name: str) -> None:
    subscriber = await make(f"{name}-h")
    subscriber.gmqtt.publish(f"{name}/kept", b"kept", qos=1, retain=True)
    await subscriber.subscribe(f"{name}/#", 1)
    assert (await subscriber.message())[1] == b"kept"
    client = await make(name, will_message=gmqtt.Message(f"{name}/will", b"gone", qos=1))
    client.gmqtt._connection._transport.abort()
    assert (await subscriber.message())[1] == b"gone"
    subscriber.gmqtt.publish(f"{name}/kept", b"", qos=1, retain=True)
    assert (await subscriber.message())[1] == b""


async def test_session_is_resumed(make: Make, name: str) -> None:
    client = await make(name, lasting=True)
    await client.subscribe(name)
    await client.gmqtt.disconnect(session_expiry_interval=300)
    writer = await make(f"{name}-w")
    for qos in (1, 2):
        writer.gmqtt.publish(name, b"%d" % qos, qos=qos)
    await writer.subscribe(f"{name}/done")  # acknowledged after the publishes
    client = await make(name, lasting=True)
    assert client.present
    assert [(await client.message())[1] for _ in range(2)] == [b"1", b"2"]


@pytest.mark.parametrize("version", [5], indirect=True, ids=["5.0"])
async def test_properties(make: Make, name: str) -> None:
    client = await make(name)
    client.gmqtt.subscribe(name, 1, subscription_identifier=9)
    await asyncio.wait_for(client.subscribed.get(), SECONDS)
    client.gmqtt.publish(
        name,
        b"x",
        qos=1,
        user_property=[("k", "v"), ("k", "w")],
        content_type="text/plain",
        response_topic="answers",
        correlation_data=b"7",
        message_expiry_interval=60,
    )
    *_, properties = await client.message()
    assert properties["user_property"] == [("k", "v"), ("k", "w")]
    assert properties["content_type"] == ["text/plain"]
    assert properties["response_topic"] == ["answers"]
    assert properties["correlation_data"] == [b"7"]
    assert properties["subscription_identifier"] == [9]
    assert properties["message_expiry_interval"] == [60]
