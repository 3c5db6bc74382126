"""Servers of the tests of plain topics: mosquitto and Sluice, in both versions of MQTT."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from sluice.client import Client
from tests.client.servers import Mosquitto, Server
from tests.support.broker_process import Broker
from tests.support.external_programs import need_program


@pytest.fixture(scope="module", params=["mosquitto", "sluice"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param == "mosquitto":
        mosquitto = Mosquitto(need_program("mosquitto"), tmp_path_factory.mktemp("mosquitto"))
        yield mosquitto
        mosquitto.stop()
    else:
        broker: Broker = request.getfixturevalue("broker")
        yield broker.mqtt


@pytest.fixture
async def watcher(server: Server, version: int) -> AsyncIterator[Client]:
    """A client that publishes orders and receives every dead letter."""
    async with Client(server.host, server.port, version=version) as client:
        await client.subscribe(["dead/#", "invalid/#"], qos=1)
        yield client
