"""The `[ecq]` section of a configuration and its effects, and the server's periodic check."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest

from sluice.access.authenticator import Authenticator
from sluice.app import make_authenticators, make_limits
from sluice.broker_host import BrokerHost
from sluice.client import Client, PublishRefused
from sluice.config.settings import Settings
from tests.support.broker_process import Broker, StartBroker

TIMEOUT_SECONDS = 30.0


def client_of(port: int, client_id: str) -> Client:
    return Client("127.0.0.1", port, client_id=client_id, reconnect=False)


async def keys_of(broker: Broker, client: str) -> set[str]:
    async with httpx.AsyncClient(
        base_url=f"http://{broker.facts['http']}", trust_env=False
    ) as http:
        answer = await http.get(f"/api/v1/ecq/{client}/values")
        if answer.status_code == 404:
            return set()  # deleted, with the last value
        return {value["key"] for value in answer.raise_for_status().json()}


async def test_sizes_and_keys_are_limited_as_configured(start_broker: StartBroker) -> None:
    broker = start_broker(config="[ecq]\nmax_message_size = 10\nmax_keys = 2\n")
    async with client_of(broker.mqtt.port, "writer") as writer:
        await writer.publish("$ECQ/w/car-1/a", b"x" * 10, qos=1)
        with pytest.raises(PublishRefused, match="max_message_size"):
            await writer.publish("$ECQ/w/car-1/a", b"x" * 11, qos=1)
        await writer.publish("$ECQ/w/car-1/b", b"2", qos=1)
        with pytest.raises(PublishRefused, match="max_keys"):
            await writer.publish("$ECQ/w/car-1/c", b"3", qos=1)
    assert await keys_of(broker, "car-1") == {"a", "b"}


async def test_values_are_expired_as_often_and_as_old_as_configured(
    start_broker: StartBroker,
) -> None:
    frequent = start_broker(config='[ecq]\nretention = "1s"\nsweep_interval = "1s"\n')
    rare = start_broker(config='[ecq]\nretention = "1s"\nsweep_interval = "1h"\n')
    lasting = start_broker(config='[ecq]\nretention = "1h"\nsweep_interval = "1s"\n')
    for broker in (rare, lasting, frequent):
        async with client_of(broker.mqtt.port, "writer") as writer:
            await writer.publish("$ECQ/w/car-1/a", b"1", qos=1)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while await keys_of(frequent, "car-1"):
            pass
    assert await keys_of(rare, "car-1") == {"a"}
    assert await keys_of(lasting, "car-1") == {"a"}


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[tuple[BrokerHost, int]]:
    """Run a server in this process, whose parts are accessible; yield it and its port."""
    loop = asyncio.get_running_loop()
    authenticator: Authenticator = make_authenticators(settings)[0]
    harness = BrokerHost(settings, make_limits(settings), authenticator, lambda: None)
    core = harness.broker
    await harness.open()
    # Duck typing: it has no asyncio base class.
    connect = cast(Callable[[], asyncio.Protocol], core.connect)
    server = await loop.create_server(connect, "127.0.0.1", 0)
    try:
        yield harness, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        core.close()
        await harness.close()


@pytest.mark.parametrize("fault", ["a subscribe that was missed", "an offer that was missed"])
async def test_unserved_subscriber_is_served_after_the_check_interval(fault: str) -> None:
    configured: dict[str, Any] = {"store": "memory", "ecq": {"check_interval": "1s"}}
    async with running(Settings(**configured)) as (host, port), client_of(port, "car-1") as owner:
        await owner.subscribe("$ECQ/car-1/#", qos=1)
        reader = host.broker.registry.sessions["car-1"].exclusive_subscriber
        assert reader is not None
        if fault == "a subscribe that was missed":
            host.engine.exclusive.unsubscribe(reader)
        else:
            reader.is_reading = True  # as if a read was issued and never completes
        async with client_of(port, "writer") as writer:
            await writer.publish("$ECQ/w/car-1/speed", b"80", qos=1)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            async for message in owner.messages():
                assert message.payload == b"80"
                break
