"""Batches of messages that are committed as one, each once: their targets, checks and fences.

It runs on the broker's loop, in portions, and appends what others have decoded and checked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from sluice.admin.broker_facade import BrokerFacade, strip_queue_prefix
from sluice.admin.bulk.bulk_views import (
    Batch,
    CommitResult,
    DeadLetterRepair,
    LocatedRepair,
    QueueTarget,
)
from sluice.errors import InvalidBatch, InvalidQueueName
from sluice.message import Message
from sluice.queues.flow import check_message
from sluice.queues.model import Partition, Queue
from sluice.queues.names import REPLY_QUEUE_PREFIX, queue_name_error

CHECKED_PER_TURN: Final = 2048  # messages checked before the loop is yielded
MAX_TURN_SECONDS: Final = 0.002  # limit of a portion of appending
MESSAGES_PER_CLOCK_CHECK: Final = 32
QUEUES_CREATED_PER_TURN: Final = 16


class BatchCommits:
    """Commits batches, one after the other."""

    def __init__(self, facade: BrokerFacade) -> None:
        self._facade = facade
        self._batch_lock = asyncio.Lock()
        self._created_count = 0  # queues created for rows that name them
        self._tasks: set[asyncio.Task[CommitResult]] = set()

    async def last_batch(self, app: str) -> int | None:
        """Return the last batch of an application, once it is committed.

        A fence is visible from the start of its commit.
        """
        fence = self._facade.engine.batches.fences.get(app)
        if fence is None:
            return None
        await self._facade.wait_committed()
        return int(fence.batch)

    async def targets(self, names: list[str]) -> dict[str, QueueTarget]:
        """Return the queues of a batch; create missing ones, as a publish does."""
        facade = self._facade
        facade.begin_change()
        found: dict[str, QueueTarget] = {}
        for name in names:
            fault = queue_name_error(strip_queue_prefix(name))
            if not fault and name.startswith(REPLY_QUEUE_PREFIX):
                fault = "responses are not a queue"
            if fault:
                raise InvalidQueueName(name, fault)
        for name in names:
            queue = await self._open_queue(name)
            check = (
                facade.queue_handler.schemas.get_validator(queue) if queue.rules.schema else None
            )
            found[name] = QueueTarget(
                int(queue.rules.max_message_size), check, not queue.rules.is_compacted
            )
        return found

    async def commit(self, batch: Batch) -> CommitResult:
        """Append a batch in one frame with its fence; a batch that was committed is not repeated.

        A cancelled caller does not stop a commit that has begun.
        """
        task = asyncio.create_task(self._commit(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _commit(self, batch: Batch) -> CommitResult:
        facade = self._facade
        engine, commit_loop = facade.engine, facade.commit_loop
        async with self._batch_lock:
            facade.begin_change()
            fence = engine.batches.fences.get(batch.app)
            if fence is not None and batch.number <= fence.batch:
                await facade.wait_committed()
                return CommitResult(int(fence.rows) if batch.number == fence.batch else 0, True)
            engine.publishing.check_store_available()
            runs = [(await self._open_queue(name), messages) for name, messages in batch.runs]
            engine.publishing.check_store_available()
            for queue, messages in runs:
                for message in messages if queue.rules.is_compacted else []:
                    check_message(queue, message)
            await self._check_capacity(runs)
            located_repairs = await self._locate_dead_letters(batch.repairs)
            commit_loop.hold_frame()
            try:
                engine.batches.write_batch_note(batch.app, batch.number, batch.rows)
                for queue, messages in runs:
                    await self._append(queue, messages)
                applied = await self._apply_repairs(located_repairs, batch.to_all)
            except BaseException as fault:
                # Half of a batch is in the open frame: that frame must never be committed.
                commit_loop.abort_batch(fault)
                raise
            facade.begin_change()
            commit_loop.release_frame()
            await facade.wait_committed()
        return CommitResult(batch.rows, False, len(batch.repairs) - applied)

    async def _open_queue(self, name: str) -> Queue:
        """Return the queue called `name`, and create it if it does not exist, a few per turn."""
        facade = self._facade
        queue = facade.engine.queues.get(name)
        if queue is None:
            queue = facade.queue_handler.create_queue(name)
            self._created_count += 1
            if self._created_count % QUEUES_CREATED_PER_TURN == 0:
                await facade.yield_to_loop()
                facade.begin_change()
        return queue

    async def _check_capacity(self, runs: list[tuple[Queue, list[Message]]]) -> None:
        """Refuse a batch that exceeds a queue's limits; once it has begun, nothing is refused."""
        facade = self._facade
        by_queue: dict[Queue, list[list[Message]]] = {}
        for queue, messages in runs:
            by_queue.setdefault(queue, []).append(messages)
        for queue, parts in by_queue.items():
            load = facade.engine.batches.begin(queue, sum(map(len, parts)))
            for messages in parts if load.needs_messages else []:
                for at in range(0, len(messages), CHECKED_PER_TURN):
                    load.add(messages, at, min(at + CHECKED_PER_TURN, len(messages)))
                    await facade.yield_to_loop()
            load.check()

    async def _locate_dead_letters(
        self, repairs: Sequence[DeadLetterRepair]
    ) -> list[LocatedRepair]:
        """Return the dead letters that still exist, with their replacements."""
        facade = self._facade
        found: list[tuple[DeadLetterRepair, Queue, Partition]] = []
        for one in repairs:
            if not facade.inspector.is_dead_letter_queue(one.dead_letter_queue):
                raise InvalidBatch(
                    f"queue {one.dead_letter_queue!r} is not a dead-letter queue",
                    "Give the position of a dead letter",
                )
            dead_letter_queue = facade.engine.queues.get(one.dead_letter_queue)
            if dead_letter_queue is None or not 0 <= one.partition < len(
                dead_letter_queue.partitions
            ):
                continue
            queue = await self._open_queue(one.queue)
            if queue.rules.is_compacted:
                check_message(queue, one.message)
            found.append((one, queue, dead_letter_queue.partitions[one.partition]))
        located_repairs: list[LocatedRepair] = []
        for at in range(0, len(found), MESSAGES_PER_CLOCK_CHECK):
            batch = found[at : at + MESSAGES_PER_CLOCK_CHECK]
            messages = await facade.read_messages(
                [(partition, one.sequence) for one, _, partition in batch]
            )
            located_repairs += [
                LocatedRepair(one, queue, partition, dead_letter)
                for (one, queue, partition), dead_letter in zip(batch, messages, strict=True)
                if dead_letter is not None
            ]
        return located_repairs

    async def _apply_repairs(self, located_repairs: list[LocatedRepair], to_all: bool) -> int:
        """Replace each dead letter; return how many were replaced."""
        facade = self._facade
        count = 0
        for at in range(0, len(located_repairs), MESSAGES_PER_CLOCK_CHECK):
            facade.begin_change()
            for one in located_repairs[at : at + MESSAGES_PER_CLOCK_CHECK]:
                if facade.is_current(one.queue) and self._apply_repair(one, to_all):
                    count += 1
            await facade.yield_to_loop()
        return count

    def _apply_repair(self, one: LocatedRepair, to_all: bool) -> bool:
        return self._facade.engine.redrive.redrive_repaired(
            one.partition,
            one.repair.sequence,
            one.dead_letter,
            one.queue,
            one.repair.message,
            to_all,
        )

    async def _append(self, queue: Queue, messages: list[Message]) -> None:
        facade = self._facade
        at = 0
        # A queue that is deleted meanwhile accepts no more.
        while at < len(messages) and facade.is_current(queue):
            facade.begin_change()
            deadline = time.perf_counter() + MAX_TURN_SECONDS
            while at < len(messages) and time.perf_counter() < deadline:
                end = min(at + MESSAGES_PER_CLOCK_CHECK, len(messages))
                self._append_portion(queue, messages, at, end)
                at = end
            await facade.yield_to_loop()

    def _append_portion(self, queue: Queue, messages: list[Message], start: int, end: int) -> None:
        self._facade.engine.batches.append_range(queue, messages, start, end)
