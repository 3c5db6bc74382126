"""aiomqtt, for asyncio programs, over every listener and in both versions."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import aiomqtt
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.conformance.conftest import Certificates
from tests.support.broker_process import Broker

SECONDS = 10.0
Make = Callable[..., aiomqtt.Client]


@pytest.fixture
def make(listening_broker: Broker, certificates: Certificates, listener: str, version: int) -> Make:
    def build(client_id: str, lasting: bool = False, **options: Any) -> aiomqtt.Client:
        if version == 4:
            options["clean_session"] = not lasting
        else:
            options["clean_start"] = not lasting
            options["properties"] = Properties(PacketTypes.CONNECT)
            options["properties"].SessionExpiryInterval = 300 if lasting else 0
        return aiomqtt.Client(
            listening_broker.address(listener).host,
            listening_broker.address(listener).port,
            identifier=client_id,
            protocol=aiomqtt.ProtocolVersion(version),
            transport="websockets" if listener in ("ws", "wss") else "tcp",
            websocket_path="/mqtt" if listener in ("ws", "wss") else None,
            tls_context=certificates.client_context() if listener in ("mqtts", "wss") else None,
            **options,
        )

    return build


async def first(client: aiomqtt.Client, count: int = 1) -> list[aiomqtt.Message]:
    got: list[aiomqtt.Message] = []
    async with asyncio.timeout(SECONDS):
        async for message in client.messages:
            got.append(message)
            if len(got) == count:
                break
    return got


async def abort_connection(client: aiomqtt.Client) -> None:
    """Connect, and break the connection without a DISCONNECT."""
    async with client:
        connection: Any = client._client.socket()
        getattr(connection, "_socket", connection).shutdown(socket.SHUT_RDWR)
        await first(client)


async def test_messages_are_exchanged_at_each_qos(make: Make, name: str) -> None:
    async with make(name) as client:
        await client.subscribe(f"{name}/#", qos=2)
        for qos in range(3):
            await client.publish(f"{name}/{qos}", b"%d" % qos, qos=qos)
        got = await first(client, 3)
    assert [(one.topic.value, one.payload, one.qos) for one in got] == [
        (f"{name}/{qos}", b"%d" % qos, qos) for qos in range(3)
    ]


async def test_retained_messages_and_wills(make: Make, name: str) -> None:
    async with make(f"{name}-h") as subscriber:
        await subscriber.publish(f"{name}/kept", b"kept", qos=1, retain=True)
        await subscriber.subscribe(f"{name}/#", qos=1)
        [stored] = await first(subscriber)
        assert (stored.payload, stored.retain) == (b"kept", True)
        will = aiomqtt.Will(f"{name}/will", b"gone", qos=1)
        with pytest.raises(aiomqtt.MqttError):
            await abort_connection(make(name, will=will))
        [message] = await first(subscriber)
        assert message.payload == b"gone"
        await subscriber.publish(f"{name}/kept", b"", qos=1, retain=True)


async def test_session_is_resumed(make: Make, name: str) -> None:
    async with make(name, lasting=True) as client:
        await client.subscribe(name, qos=2)
    async with make(f"{name}-w") as writer:
        for qos in (1, 2):
            await writer.publish(name, b"%d" % qos, qos=qos)
    async with make(name, lasting=True) as client:
        assert [one.payload for one in await first(client, 2)] == [b"1", b"2"]
    async with make(name) as client:
        pass  # a clean start ends the session


@pytest.mark.parametrize("version", [5], indirect=True, ids=["5.0"])
async def test_properties(make: Make, name: str) -> None:
    async with make(name) as client:
        await client.subscribe(name, options=SubscribeOptions(qos=1, retainAsPublished=True))
        sent = Properties(PacketTypes.PUBLISH)
        sent.UserProperty = [("k", "v")]
        sent.ResponseTopic = "answers"
        sent.CorrelationData = b"7"
        await client.publish(name, b"x", qos=1, properties=sent)
        [message] = await first(client)
    got: Any = message.properties
    assert got.UserProperty == [("k", "v")]
    assert (got.ResponseTopic, got.CorrelationData) == ("answers", b"7")
