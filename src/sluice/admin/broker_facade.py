"""How the admin service takes hold of the broker: turns, commits and reads, as things to wait for.

Everything here runs on the broker's loop. A change is begun in a turn of its own, so that deliveries which follow from
it leave at once, and is answered when the store has it. It knows no queue's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from sluice.broker.broker import Broker
from sluice.broker.namespaces.queues.handler import QueueDoor
from sluice.errors import UnknownQueue
from sluice.message import Message
from sluice.queues.engine import Engine
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.flow.removal import purge_some
from sluice.queues.commit_loop import Runner

Place = tuple[Partition, int]

AT_ONCE: Final = 256  # things done before others get their turn of the loop
READ_BYTES: Final = 1 << 20  # what one read brings, about


class Hands:
    def __init__(self, engine: Engine, runner: Runner, door: QueueDoor, broker: Broker) -> None:
        self.engine = engine
        self.runner = runner
        self.door = door
        self.broker = broker

    def look(self) -> float:
        """The time by which the engine's figures are read."""
        self.engine.now = self.broker.turn.begin()
        return self.engine.now

    def begin(self) -> float:
        """Something is about to be changed: this turn has a time, and an end at which it is offered and committed."""
        now = self.look()
        self.broker.turn.schedule()
        return now

    async def breathe(self) -> None:
        """Let the broker work. Afterwards nothing is sure to be as it was: queues may be gone."""
        await asyncio.sleep(0)
        self.look()

    async def kept(self) -> None:
        """Wait until all that was decided so far is in the store."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done() -> None:
            if not waiter.done():
                waiter.set_result(None)

        self.runner.when_kept(done)
        await waiter

    async def read(self, places: list[Place]) -> list[Message | None]:
        """The messages at these places; None for what is gone or damaged."""
        if not places:
            return []
        waiter: asyncio.Future[list[Message | None]] = asyncio.get_running_loop().create_future()

        def done(found: list[Message | None]) -> None:
            if not waiter.done():
                waiter.set_result(found)

        self.runner.look(places, done)
        found = await waiter
        self.look()
        return found

    def purge_some(self, partition: Partition, start: int, end: int, most: int) -> int:
        """Empty a stretch of a partition; where to go on."""
        return int(purge_some(self.engine, partition, start, end, most))

    def queue(self, name: str) -> Queue:
        """By its name, or by its topic."""
        queue = self.engine.queues.get(plain(name))
        if queue is None:
            raise UnknownQueue(plain(name))
        return queue

    def lives(self, queue: Queue) -> bool:
        return self.engine.queues.get(queue.name) is queue


def plain(name: str) -> str:
    return name.removeprefix("$queue/")


def slices(places: Iterator[Place]) -> Iterator[list[Place]]:
    """Portions that can be read at once: neither too many messages nor too many bytes."""
    some: list[Place] = []
    size = 0
    for partition, seq in places:
        some.append((partition, seq))
        size += size_of(partition, seq)
        if len(some) >= AT_ONCE or size >= READ_BYTES:
            yield some
            some = []
            size = 0
    if some:
        yield some


def size_of(partition: Partition, seq: int) -> int:
    """Bytes that the store keeps of a message."""
    block = partition.block(seq)
    return 0 if block is None else int(block.size[block.at(seq)])
