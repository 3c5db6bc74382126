"""The admin service's access to the broker: turns, commits and reads as awaitables.

Everything here runs on the broker's loop. A change starts a turn of its own, so that resulting
deliveries leave at once, and is answered when the store has committed it. The module knows
nothing about what the operations mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from sluice.broker.broker import Broker
from sluice.broker.namespaces import QueueHandler
from sluice.errors import UnknownQueue
from sluice.message import Message
from sluice.queues.commit_loop import CommitLoop, read_messages
from sluice.queues.engine import Engine
from sluice.queues.log import PURGED
from sluice.queues.model import Queue
from sluice.queues.service import MessageLocation, QueueInspector, stored_messages

BATCH_SIZE: Final = 256  # items processed before the loop is yielded
READ_BATCH_BYTES: Final = 1 << 20  # about the size of one read


class BrokerFacade:
    def __init__(
        self, engine: Engine, commit_loop: CommitLoop, queue_handler: QueueHandler, broker: Broker
    ) -> None:
        self.engine = engine
        self.commit_loop = commit_loop
        self.queue_handler = queue_handler
        self.broker = broker
        self.inspector = queue_handler.service.inspector

    def sync_clock(self) -> float:
        """Set the engine's clock and return the time by which its figures are read."""
        self.engine.now = self.broker.turn.begin()
        return self.engine.now

    def begin_change(self) -> float:
        """Begin a turn for a change, so that its end dispatches and commits; return its time."""
        now = self.sync_clock()
        self.broker.turn.schedule_flush()
        return now

    async def yield_to_loop(self) -> None:
        """Let the broker work. Afterwards anything may have changed: queues may be gone."""
        await asyncio.sleep(0)
        self.sync_clock()

    async def wait_committed(self) -> None:
        """Wait until everything that was decided so far is committed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done() -> None:
            if not waiter.done():
                waiter.set_result(None)

        self.commit_loop.after_commit(done)
        await waiter

    async def read_messages(self, locations: list[MessageLocation]) -> list[Message | None]:
        """Return the messages at these locations; None for a missing or damaged one."""
        if not locations:
            return []
        waiter: asyncio.Future[list[Message | None]] = asyncio.get_running_loop().create_future()

        def done(found: list[Message | None]) -> None:
            if not waiter.done():
                waiter.set_result(found)

        read_messages(self.commit_loop, locations, done)
        found = await waiter
        self.sync_clock()
        return found

    def purge(self, location: MessageLocation) -> bool:
        """Purge one message; return False if a consumer has it."""
        return self.engine.removal.remove_for_all_groups(*location, PURGED)

    def get_queue(self, name: str) -> Queue:
        """Return a queue by its name or its topic, for commands."""
        queue = self.engine.queues.get(strip_queue_prefix(name))
        if queue is None:
            raise UnknownQueue(strip_queue_prefix(name))
        return queue

    def is_current(self, queue: Queue) -> bool:
        return self.engine.queues.get(queue.name) is queue

    def inspect(self, name: str) -> QueueInspector:
        """Return the inspector of a queue, by its name or its topic."""
        return self.inspector.get(strip_queue_prefix(name))


def strip_queue_prefix(name: str) -> str:
    return name.removeprefix("$queue/")


def split_into_batches(locations: Iterator[MessageLocation]) -> Iterator[list[MessageLocation]]:
    """Split locations into batches, bounded in messages and bytes, for one read each."""
    batch: list[MessageLocation] = []
    size = 0
    for location in locations:
        batch.append(location)
        size += stored_messages.stored_size(location)
        if len(batch) >= BATCH_SIZE or size >= READ_BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
