"""The broker of the test kit: real broker, real queues and memory store, on virtual time.

Tests do not sleep: `settle` runs everything that can happen now, `advance` goes from one deadline
to the next and settles after each. Handlers run on the test's own loop, in real time.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Unpack, cast

from sluice.broker.net import MemoryTransport, connect_in_memory
from sluice.broker_core import BrokerCore
from sluice.client import Client
from sluice.client.queues import SendOptions
from sluice.errors import UnknownGroup, UnknownQueue
from sluice.message import Message, decode_headers
from sluice.queues.commit_loop import read_messages
from sluice.queues.model import Alert, Ledger, Partition, Queue, build_ledger, verify
from sluice.queues.names import format_message_id
from sluice.queues.schedules import Schedule
from sluice.queues.service import QueueTemplates, Template, make_timing
from sluice.store.memory import MemoryStore
from sluice.testing.virtual_time import VirtualTime
from sluice.units import parse_duration
from sluice.wire.topics import matches
from sluice.worker import Running, Worker

QUIET_ROUNDS: Final = 20  # iterations of the loop without activity after which nothing will happen
HANDLER_TIMEOUT_SECONDS: Final = 20.0  # for handlers that wait for something outside the test


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A stored message. `headers` has the headers that Sluice added, such as a reason."""

    id: str
    payload: bytes
    key: str
    headers: dict[str, str]

    @property
    def original_id(self) -> str:
        """Return the id that a dead letter had before."""
        return self.headers.get("original-message-id", "")

    @property
    def reason(self) -> str:
        return self.headers.get("dead-reason", "")

    @property
    def description(self) -> str:
        return self.headers.get("dead-description", "")

    @property
    def attempts(self) -> int:
        return int(self.headers.get("attempts", 0))

    def json(self) -> Any:
        return json.loads(self.payload)


class VirtualBroker:
    """A broker with virtual time.

    `queues` contains configurations by queue name or pattern, like the templates of a server.
    `seed` initializes randomness, so that a failing test fails again.
    """

    def __init__(
        self, queues: Mapping[str, Mapping[str, object]] | None = None, seed: int = 0
    ) -> None:
        self.time = VirtualTime()
        self.alerts: list[Alert] = []
        self.warnings: list[str] = []
        self._queue_templates = QueueTemplates(
            matches, [Template(match, config) for match, config in (queues or {}).items()]
        )
        self._draw = random.Random(seed).random
        self._connections: list[MemoryTransport] = []
        self._running_workers: list[Running] = []
        self._count = 0
        self._build()

    # Clients and workers

    def client(self, client_id: str = "", **options: Any) -> Client:
        """Return a client of this broker; the options are those of `Client`."""
        self._count += 1
        named = client_id or f"test-{self._count}"
        return Client(**{"dial": self.dial, "keep_alive": 0, "client_id": named, **options})

    @asynccontextmanager
    async def working(self, worker: Worker) -> AsyncIterator[Running]:
        """Run the worker on this broker during the block.

        Long jobs are extended by the virtual clock.
        """
        client = worker.make_client(dial=self.dial, keep_alive=0)
        async with client:
            running = await worker.start(client, self.time.call_later)
            self._running_workers.append(running)
            try:
                yield running
            finally:
                self._running_workers.remove(running)
                await running.stop(0.0)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Also accept connections on a free port of 127.0.0.1, for clients in other processes.

        `settle` cannot wait for such clients.
        """
        loop = asyncio.get_running_loop()
        # It is not a subclass of Protocol, and behaves like one.
        make = cast(Callable[[], asyncio.Protocol], self._broker.connect)
        server = await loop.create_server(make, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()

    async def dial(self, protocol: asyncio.Protocol) -> None:
        """Connect a client or worker to this broker: `Client(dial=broker.dial)`."""
        self._connections.append(
            connect_in_memory(
                protocol,
                self._broker.connect(),
                self.time.call_soon,
                {"peername": ("127.0.0.1", 0)},
            )
        )

    def disconnect_clients(self) -> None:
        """Break all connections without DISCONNECT."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.break_connection(ConnectionResetError("the test cut the connection"))

    async def publish(self, queue: str, payload: object, **options: Unpack[SendOptions]) -> str:
        """Publish as another client and return the message id."""
        async with self.client("test-office") as client:
            return await client.publisher(queue).send(payload, **options)

    async def schedule(
        self,
        name: str,
        queue: str,
        payload: bytes | str = b"",
        *,
        cron: str = "",
        every: str = "",
        time_zone: str = "",
        missed: str = "skip",
    ) -> None:
        """Publish to a queue at times of the virtual clock: `advance("30d")` runs 30 daily ones."""
        schedules = self._engine.schedules
        self._engine.now = self.time.now
        timing = make_timing(
            cron, every, time_zone, "", missed, self.time.now, schedules.min_interval_ms
        )
        body = payload.encode() if isinstance(payload, str) else payload
        schedules.add(Schedule(name, queue, timing, Message(body)))
        self._commit_loop.end_turn()
        await self.settle()

    # Time

    async def settle(self, handlers: bool = True) -> None:
        """Return when nothing more happens without a change of time.

        With `handlers`, also wait for running jobs of workers.
        """
        quiet = 0
        deadline = time.monotonic() + HANDLER_TIMEOUT_SECONDS
        while quiet < QUIET_ROUNDS:
            before = self.time.activity
            await asyncio.sleep(0)
            if self.time.activity != before:
                quiet = 0
            elif handlers and not all(running.is_idle for running in self._running_workers):
                quiet = 0
                # A handler waits for something outside: a thread, a file.
                await asyncio.sleep(0.001)
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"a handler has been running for {HANDLER_TIMEOUT_SECONDS:g} s: let it "
                        "end, or settle with handlers=False"
                    )
            else:
                quiet += 1

    async def advance(
        self,
        duration: str = "0s",
        *,
        seconds: float = 0.0,
        minutes: float = 0.0,
        hours: float = 0.0,
        days: float = 0.0,
        handlers: bool = True,
    ) -> None:
        """Advance the clock ("3h", or hours=3); everything due meanwhile happens in order."""
        total = parse_duration(duration) + seconds + 60 * minutes + 3600 * hours + 86_400 * days
        end = self.time.now + total
        await self.settle(handlers)
        while (due := self.time.next_due()) is not None and due <= end:
            self.time.fire_next()
            self.time.run_ready()
            await self.settle(handlers)
        self.time.now = end

    # Inspection

    def messages(self, queue: str) -> list[StoredMessage]:
        """Return the messages of a queue that not every group has settled, oldest first."""
        found: list[tuple[int, StoredMessage]] = []
        for partition in self._find_queue(queue).partitions:
            seq = int(partition.first_live(0))
            while seq < partition.next_seq:
                message = self._read(partition, seq)
                found.append(
                    (int(message.enqueued_at_ms), _to_stored_message(partition, seq, message))
                )
                seq = int(partition.first_live(seq + 1))
        return [message for _, message in sorted(found, key=lambda pair: pair[0])]

    def dead_letters(self, queue: str) -> list[StoredMessage]:
        name = f"dlq/{self._find_queue(queue).name}"
        return self.messages(name) if name in self._engine.queues else []

    def depth(self, queue: str) -> int:
        return int(self._find_queue(queue).depth)

    def ledger(self, queue: str, group: str) -> Ledger:
        """Return the ledger of a group: enqueued, waiting, delivered, retrying, acked, dead ..."""
        stored_queue = self._find_queue(queue)
        if group not in stored_queue.groups:
            raise UnknownGroup(queue, group)
        return build_ledger(stored_queue, stored_queue.groups[group])

    def _find_queue(self, name: str) -> Queue:
        """Return a queue; an unknown one is probably misspelled in the test."""
        found = self._engine.queues.get(name)
        if found is None:
            raise UnknownQueue(name)
        return found

    def faults(self) -> list[str]:
        """Return inconsistencies in the ledgers: none, unless Sluice has a bug."""
        return verify(self._engine.queues)

    def _read(self, partition: Partition, seq: int) -> Message:
        found: list[Message | None] = []
        read_messages(self._commit_loop, [(partition, seq)], found.extend)
        self.time.run_ready()
        assert found[0] is not None
        return found[0]

    # Construction

    def _build(self) -> None:
        clock = self.time
        core = BrokerCore(clock, self._queue_templates, clock=clock.clock, draw=self._draw)
        core.open(MemoryStore(clock.call_soon), self._report)
        self._broker = core.broker
        self._engine = core.engine
        self._commit_loop = core.commit_loop
        clock.run_ready()

    def _report(self, alerts: list[Alert], warnings: list[str]) -> None:
        self.alerts += alerts
        self.warnings += warnings


def _to_stored_message(partition: Partition, seq: int, message: Message) -> StoredMessage:
    name = message.id or format_message_id(partition.pid, seq)
    return StoredMessage(
        id=name.decode(),
        payload=message.payload,
        key=message.key.decode(),
        headers=dict(decode_headers(message.headers)),
    )
