"""aiomqtt, for programs on asyncio, over every door and in both versions."""

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

from tests.support.broker_process import Broker
from tests.conformance.conftest import Certificates

SECONDS = 10.0
Make = Callable[..., aiomqtt.Client]


@pytest.fixture
def make(house: Broker, certificates: Certificates, door: str, version: int) -> Make:
    def build(client_id: str, lasting: bool = False, **options: Any) -> aiomqtt.Client:
        if version == 4:
            options["clean_session"] = not lasting
        else:
            options["clean_start"] = not lasting
            options["properties"] = Properties(PacketTypes.CONNECT)
            options["properties"].SessionExpiryInterval = 300 if lasting else 0
        return aiomqtt.Client(
            house.address(door).host,
            house.address(door).port,
            identifier=client_id,
            protocol=aiomqtt.ProtocolVersion(version),
            transport="websockets" if door in ("ws", "wss") else "tcp",
            websocket_path="/mqtt" if door in ("ws", "wss") else None,
            tls_context=certificates.client_context() if door in ("mqtts", "wss") else None,
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


async def break_off(client: aiomqtt.Client) -> None:
    """Connect, and cut the line without a DISCONNECT."""
    async with client:
        line: Any = client._client.socket()
        getattr(line, "_socket", line).shutdown(socket.SHUT_RDWR)
        await first(client)


async def test_messages_come_and_go_at_each_qos(make: Make, name: str) -> None:
    async with make(name) as client:
        await client.subscribe(f"{name}/#", qos=2)
        for qos in range(3):
            await client.publish(f"{name}/{qos}", b"%d" % qos, qos=qos)
        got = await first(client, 3)
    assert [(one.topic.value, one.payload, one.qos) for one in got] == [
        (f"{name}/{qos}", b"%d" % qos, qos) for qos in range(3)
    ]


async def test_retained_messages_and_wills(make: Make, name: str) -> None:
    async with make(f"{name}-h") as heir:
        await heir.publish(f"{name}/kept", b"kept", qos=1, retain=True)
        await heir.subscribe(f"{name}/#", qos=1)
        [kept] = await first(heir)
        assert (kept.payload, kept.retain) == (b"kept", True)
        will = aiomqtt.Will(f"{name}/will", b"gone", qos=1)
        with pytest.raises(aiomqtt.MqttError):
            await break_off(make(name, will=will))
        [testament] = await first(heir)
        assert testament.payload == b"gone"
        await heir.publish(f"{name}/kept", b"", qos=1, retain=True)


async def test_a_session_goes_on_where_it_was(make: Make, name: str) -> None:
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
