"""A broker on the test's loop: real sockets, a real clock, a store in memory, the admin service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiomqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from sluice.access.identity import AdminAuthenticator
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.service import AdminService
from sluice.broker.net.listener import open_listener
from sluice.broker_core import BrokerCore
from sluice.queues.log.broker_state import RestoredRecord
from sluice.queues.service import parse_stored_rules
from sluice.store.memory import MemoryStore
from sluice.units import Address, parse_address
from tests.broker.kit import Templates, make_templates


class LiveBroker:
    """`mqtt` is the address of its listener; `loop_bridge` is for the admin APIs."""

    def __init__(self, templates: Templates) -> None:
        loop = asyncio.get_running_loop()
        core = BrokerCore(loop, make_templates(templates), draw=lambda: 0.5)
        self._core = core
        self.broker = core.broker
        self.engine = core.engine
        self.queue_handler = core.queue_handler
        self.commit_loop = core.attach_store(
            MemoryStore(loop.call_soon), lambda alerts, warnings: None
        )
        self.service = AdminService(
            self.engine,
            self.commit_loop,
            self.queue_handler,
            self.broker,
            "memory",
            "interpreted",
        )
        self.loop_bridge = LoopBridge(self.service, loop)
        self.keyring = AdminAuthenticator()
        self.mqtt = Address("127.0.0.1", 0)

    async def open(self) -> None:
        self.commit_loop.load(parse_stored_rules)
        self._core.start()
        stored: asyncio.Future[list[RestoredRecord]] = asyncio.get_running_loop().create_future()
        self.commit_loop.restore_broker_state(stored.set_result)
        self._core.restore(await stored)
        self._listener = await open_listener(
            "mqtt", "127.0.0.1", 0, self.broker.connect, None, 1 << 20, 5.0
        )
        self.mqtt = parse_address(self._listener.address)

    async def close(self) -> None:
        self._listener.server.close()
        gone = asyncio.Event()
        self.broker.stop(gone.set)
        await gone.wait()
        self.broker.close()
        self.commit_loop.close()

    def client(self, name: str) -> aiomqtt.Client:
        """Return a connected MQTT 5 client."""
        return aiomqtt.Client(
            self.mqtt.host, self.mqtt.port, identifier=name, protocol=aiomqtt.ProtocolVersion.V5
        )


@asynccontextmanager
async def live_broker(templates: Templates = ()) -> AsyncIterator[LiveBroker]:
    harness = LiveBroker(templates)
    await harness.open()
    try:
        yield harness
    finally:
        await harness.close()


def user_properties(pairs: Mapping[str, str], kind: int = PacketTypes.PUBLISH) -> Properties:
    """Build user properties; `message_id` becomes `message-id`."""
    properties = Properties(kind)
    properties.UserProperty = [(name.replace("_", "-"), value) for name, value in pairs.items()]
    return properties


def properties_of(message: aiomqtt.Message) -> dict[str, str]:
    """Return the user properties of a delivery."""
    return dict(getattr(message.properties, "UserProperty", []))


class Worker:
    """A consumer over MQTT; the test settles each delivery."""

    def __init__(self, client: aiomqtt.Client, queue: str) -> None:
        self._client = client
        self._queue = queue

    async def join(self, **options: str) -> None:
        await self._client.subscribe(
            f"$queue/{self._queue}",
            qos=1,
            properties=user_properties(options, PacketTypes.SUBSCRIBE),
        )

    async def next(self) -> aiomqtt.Message:
        async with asyncio.timeout(30):
            return await anext(aiter(self._client.messages))

    async def settle(self, verb: str, message: aiomqtt.Message, **options: str) -> None:
        """Settle a delivery and return when the broker has answered."""
        await self._client.publish(
            f"$queue/{self._queue}/${verb}",
            qos=1,
            properties=user_properties(
                {"message-id": properties_of(message)["message-id"], **options}
            ),
        )


async def publish(client: aiomqtt.Client, queue: str, payload: Any = b"x", **pairs: str) -> None:
    await client.publish(f"$queue/{queue}", payload, qos=1, properties=user_properties(pairs))
