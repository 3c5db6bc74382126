"""A broker without sockets and without waiting: bytes in, packets out, hours pass at once.

    harness = BrokerHarness([("tasks", {"partitions": 1})])
    worker = harness.connect("w-1")
    await harness.call(harness.admin.create_queue({"name": "other"}))
    harness.advance(10)

It is the only such kit: a broker on a loop and a clock that tests move, with queues, the admin
service, and a store in memory or in files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from sluice.admin.service import AdminService
from sluice.broker.acl import AccessControl
from sluice.broker.limits import Limits
from sluice.broker_core import BrokerCore
from sluice.queues.model.effects import Alert
from sluice.queues.model.ledger import verify
from sluice.queues.model.queue import Queue
from sluice.queues.service.templates import QueueTemplates, Template
from sluice.wire.packets import (
    V5,
    V311,
    Connack,
    Connect,
    Publish,
)
from sluice.wire.topics import matches
from tests.broker.backends import Backend, Kept, MemoryBackend
from tests.broker.loop import MIDDAY
from tests.broker.namespaces.kit import join, put
from tests.broker.peers import Client, Peer, props

T = TypeVar("T")
Templates = Sequence[tuple[str, Mapping[str, object]]]


def make_templates(templates: Templates) -> QueueTemplates:
    """Return templates from (pattern, configuration) pairs."""
    return QueueTemplates(matches, [Template(match, config) for match, config in templates])


class BrokerHarness:
    """A broker, wired as in every other place, with test doubles for its environment.

    `templates` are (pattern, configuration) pairs for new queues; further keywords are limits of
    the broker. A new broker recovers from what the store has after `crash`, `kill` and `restart`,
    at the same time of the same clock.
    """

    def __init__(
        self,
        templates: Templates = (),
        *,
        access: AccessControl | None = None,
        queues: bool = True,
        backend: Backend | None = None,
        segment_bytes: int = 1 << 20,
        **limits: Any,
    ) -> None:
        self.limits = Limits()
        for name, value in limits.items():
            assert hasattr(self.limits, name)
            setattr(self.limits, name, value)
        self.log: list[tuple[str, dict[str, object]]] = []
        self.alerts: list[Alert] = []
        self.warnings: list[str] = []
        self.queues_enabled = queues
        self.access = access
        self._templates = make_templates(templates)
        self._backend: Backend = backend or MemoryBackend(segment_bytes)
        self._start(MIDDAY)

    def _start(self, now: float) -> None:
        self.loop = loop = self._backend.make_loop()
        loop.now = now
        self.store: Any = self._backend.open(loop, self._call_soon)
        core = BrokerCore(
            loop,
            self._templates,
            limits=self.limits,
            access=self.access,
            log=lambda event, facts: self.log.append((event, facts)),
            clock=loop.clock,
            draw=lambda: 0.5,
            queues_enabled=self.queues_enabled,
        )
        self.core = core
        self.broker, self.engine, self.queue_handler = core.broker, core.engine, core.queue_handler
        core.open(self.store, self._report)
        self.commit_loop = core.commit_loop
        self.admin = AdminService(
            self.engine,
            self.commit_loop,
            self.queue_handler,
            self.broker,
            self._backend.name,
            "interpreted",
        )
        loop.settle()

    def _call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        self.loop.call_soon(partial(callback, *arguments))  # type: ignore[arg-type]

    def _report(self, alerts: list[Alert], warnings: list[str]) -> None:
        self.alerts += alerts
        self.warnings += warnings

    # ---- the end of a broker, and the next one

    def crash(self) -> None:
        """Cut the power and start again: unsynced records and all connections are lost."""
        self._crash("synced")

    def kill(self) -> None:
        """`kill -9` and start again: committed records are kept by the system, synced or not."""
        self._crash("answered")

    def kill_after_writes(self) -> None:
        """Like `kill`, when all writes have reached the system, also those without an answer."""
        self._crash("written")

    def _crash(self, kept: Kept) -> None:
        self._backend.crash(kept)
        self._start(self.loop.now)

    def restart(self) -> None:
        """Stop normally and start again."""
        self.close()
        self._start(self.loop.now)

    def close(self) -> None:
        """Stop normally; the ledgers must add up."""
        self.loop.settle()
        assert verify(self.engine.queues) == []
        self.commit_loop.close()

    # ---- requests

    def set_templates(self, *templates: Template, auto_create: bool = True) -> None:
        """Use other queue templates from now on, as after a reload."""
        self._templates.replace(templates, auto_create)

    async def call(self, operation: Coroutine[Any, Any, T]) -> T:
        """Turn the broker's loop until the admin service has answered."""
        task = asyncio.ensure_future(operation)
        while not task.done():
            await asyncio.sleep(0)
            self.loop.settle()
        self.loop.settle()
        return task.result()

    def queue(self, name: str) -> Queue:
        return self.engine.queues[name]

    def depth(self, name: str) -> int:
        queue = self.engine.queues.get(name)
        return 0 if queue is None else int(queue.depth)

    @property
    def counters(self) -> Any:
        return self.broker.counters

    def advance(self, seconds: float) -> None:
        self.loop.advance(seconds)

    def open(self) -> Peer:
        """Open a socket without sending anything."""
        return Peer(self)

    def connect(
        self,
        client_id: str = "",
        version: int = V5,
        clean: bool = True,
        keep_alive: int = 0,
        will: Publish | None = None,
        will_delay: int = 0,
        username: str | None = None,
        password: bytes | None = None,
        **properties: Any,
    ) -> Client:
        """Connect a client and take its CONNACK, with any reason code."""
        client = Client(self)
        client.version = version
        packet = Connect(client_id, version, clean, keep_alive)
        packet.will, packet.will_delay = will, will_delay
        packet.username, packet.password = username, password
        packet.properties = props(**properties)
        client.send(packet)
        client.connack = client.first(Connack)
        return client

    def connect_persistent(self, client_id: str, version: int = V5, **properties: Any) -> Client:
        """Connect a client with a persistent session, new or resumed."""
        if version == V311:
            return self.connect(client_id, V311, clean=False)
        properties.setdefault("session_expiry", 3600)
        return self.connect(client_id, clean=False, **properties)

    def sessions(self) -> set[str]:
        return set(self.broker.registry.sessions)

    # ---- queues

    def worker(self, client: str = "w-1", queue: str = "tasks", **options: Any) -> Client:
        """Return a connected consumer."""
        worker = self.connect(client)
        assert join(worker, f"$queue/{queue}", **options)[0] < 0x80
        return worker

    def publish(self, payload: bytes = b"x", queue: str = "tasks", **options: object) -> None:
        """Publish with a separate client; `options` such as `message_id` become user properties."""
        author = self.connect("author")
        reported: dict[str, object] = {
            name.replace("_", "-"): value for name, value in options.items()
        }
        assert put(author, f"$queue/{queue}", payload, options=reported)[0] < 0x80
        author.disconnect()
