"""A broker that lives in the test's own loop: real sockets, a real clock, a store in memory, and the admin service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiomqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from sluice.access.identity import Keyring
from sluice.admin.loop_bridge import Desk
from sluice.admin.service import AdminService
from sluice.broker.acl.access import Anonymous
from sluice.broker.namespaces.admin_topics import AdminTopics
from sluice.broker.broker import Broker
from sluice.broker.sessions.session_store import Keeper
from sluice.broker.limits import Limits
from sluice.broker.net.listener import open_door
from sluice.broker.namespaces.queues.handler import QueueDoor
from sluice.broker.namespaces.responses import Responses
from sluice.clock import steady_time
from sluice.units import Address, parse_address
from sluice.queues.bodies.codec import ZstdCodec
from sluice.queues.config import read_config
from sluice.queues.engine import Engine
from sluice.queues.log.broker_state import Kept
from sluice.queues.model.queue_rules import Rules
from sluice.queues.commit_loop import Runner
from sluice.queues.service import QueueService
from sluice.json_schema import fault_of_schema, validator_of
from sluice.store.memory import MemoryStore
from sluice.wire.topics import matches

Templates = Sequence[tuple[str, Mapping[str, object]]]


class Living:
    """`mqtt` is where it listens; `desk` is what a door gets."""

    def __init__(self, templates: Templates) -> None:
        loop = asyncio.get_running_loop()
        self._templates = templates
        self.broker = Broker(loop, Limits(), Anonymous(True), lambda event, facts: None)
        self.engine = Engine(self._rules_for, lambda: 0.5, codec=ZstdCodec())
        self.runner = Runner(
            self.engine,
            MemoryStore(loop.call_soon),
            steady_time,
            loop.call_later,
            self.broker.turn.send,
            lambda alerts, warnings: None,
        )
        self.door = QueueDoor(
            self.engine,
            self.broker.turn,
            self.broker.router.subscriptions,
            QueueService(self.engine, fault_of_schema),
            validator_of,
        )
        self.service = AdminService(self.engine, self.runner, self.door, self.broker, "memory", "interpreted")
        self.desk = Desk(self.service, loop)
        self.keyring = Keyring()
        self.mqtt = Address("127.0.0.1", 0)

    def _rules_for(self, name: str) -> tuple[Rules, str]:
        given = next(
            (given for pattern, given in self._templates if matches(pattern.encode(), name.encode())), {}
        )
        config = read_config(given, name)
        return config.rules(), config.text()

    async def open(self) -> None:
        broker, runner, router = self.broker, self.runner, self.broker.router
        runner.open(lambda name, text: read_config(json.loads(text), name).rules())
        kept: asyncio.Future[list[Kept]] = asyncio.get_running_loop().create_future()
        runner.restore(kept.set_result)
        router.keeper = Keeper(self.engine.keeping, broker.turn)
        broker.turn.before_flush = runner.end_turn
        runner.frame_taken = router.frame_taken
        router.door = self.door
        runner.on_made = self.door.appeared
        self.door.admin = AdminTopics(router, self.door, broker.scheduler)
        self.door.responses = Responses(router, broker.scheduler)
        router.keeper.restore(await kept, router, broker.registry)
        self._listener = await open_door("mqtt", "127.0.0.1", 0, broker.connect, None, 1 << 20, 5.0)
        self.mqtt = parse_address(self._listener.address)

    async def close(self) -> None:
        self._listener.server.close()
        gone = asyncio.Event()
        self.broker.stop(gone.set)
        await gone.wait()
        self.broker.close()
        self.runner.close()

    def client(self, name: str) -> aiomqtt.Client:
        """An MQTT 5 client."""
        return aiomqtt.Client(
            self.mqtt.host, self.mqtt.port, identifier=name, protocol=aiomqtt.ProtocolVersion.V5
        )


@asynccontextmanager
async def living(templates: Templates = ()) -> AsyncIterator[Living]:
    house = Living(templates)
    await house.open()
    try:
        yield house
    finally:
        await house.close()


def told(pairs: Mapping[str, str], kind: int = PacketTypes.PUBLISH) -> Properties:
    """User properties; `message_id` stands for `message-id`."""
    properties = Properties(kind)
    properties.UserProperty = [(name.replace("_", "-"), value) for name, value in pairs.items()]
    return properties


def facts(message: aiomqtt.Message) -> dict[str, str]:
    """The user properties of a delivery."""
    return dict(getattr(message.properties, "UserProperty", []))


class Worker:
    """A consumer over MQTT that does what it is told with each delivery."""

    def __init__(self, client: aiomqtt.Client, queue: str) -> None:
        self._client = client
        self._queue = queue

    async def join(self, **wishes: str) -> None:
        await self._client.subscribe(
            f"$queue/{self._queue}", qos=1, properties=told(wishes, PacketTypes.SUBSCRIBE)
        )

    async def next(self) -> aiomqtt.Message:
        async with asyncio.timeout(30):
            return await anext(aiter(self._client.messages))

    async def settle(self, verb: str, message: aiomqtt.Message, **wishes: str) -> None:
        """Returns when the broker has answered."""
        await self._client.publish(
            f"$queue/{self._queue}/${verb}",
            qos=1,
            properties=told({"message-id": facts(message)["message-id"], **wishes}),
        )


async def publish(client: aiomqtt.Client, queue: str, payload: Any = b"x", **pairs: str) -> None:
    await client.publish(f"$queue/{queue}", payload, qos=1, properties=told(pairs))
