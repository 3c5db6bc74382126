"""The broker's side of bulk reads and writes: offsets, places, progress and batches.

It runs on the broker's loop, in portions. It turns ranges of sequences into places in the store and
leaves reading to others; it appends batches that others have decoded and checked. It knows neither
Arrow nor HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from sluice.admin.broker_facade import BrokerFacade, strip_queue_prefix
from sluice.admin.bulk.broker_load import BrokerLoad
from sluice.admin.bulk.bulk_views import (
    Batch,
    CommitResult,
    DeadLetterRepair,
    GroupProgress,
    LocatedRepair,
    MessageSlice,
    PartitionOffsets,
    QueueOffsets,
    QueueTarget,
)
from sluice.admin.queries import QueueIndex
from sluice.errors import (
    InUse,
    InvalidBatch,
    InvalidQueueConfig,
    InvalidQueueName,
    OutOfRange,
    QueueMadeAgain,
    UnknownGroup,
    UnknownPartition,
)
from sluice.message import Message
from sluice.queues.bulk import MessageLocations, collect_locations, first_lost, resolve_start
from sluice.queues.commit_loop import CommitListener
from sluice.queues.flow import check_message
from sluice.queues.log import Frame
from sluice.queues.model import Cursor, Group, Partition, Queue
from sluice.queues.names import REPLY_QUEUE_PREFIX, new_group_name_error, queue_name_error

LOOKUP_BATCH_SIZE: Final = 2048  # places looked up before the loop is yielded
MAX_TURN_SECONDS: Final = 0.002  # limit of a portion of settling or appending
LOCATION_BYTES: Final = 20
ANY_SIZE: Final = 1 << 62
MESSAGES_PER_CLOCK_CHECK: Final = 32
QUEUES_CREATED_PER_TURN: Final = 16


class BulkService(CommitListener):
    """Bulk operations. `has_segment_files`: the store's files can be read by address."""

    def __init__(
        self, facade: BrokerFacade, queue_index: QueueIndex, has_segment_files: bool = False
    ) -> None:
        self._facade = facade
        self._queue_index = queue_index
        self.has_segment_files = has_segment_files
        self._waiters: dict[int, set[asyncio.Event]] = {}  # by queue, set by its next commit
        self._load = BrokerLoad()
        self._batch_lock = asyncio.Lock()
        self._created_count = 0  # queues created for rows that name them
        self._tasks: set[asyncio.Task[CommitResult]] = set()
        facade.commit_loop.add_listener(self)

    # ---- offsets

    async def offsets(
        self, name: str, after: dict[int, int] | None = None, wait_seconds: float = 0.0
    ) -> QueueOffsets:
        """Return the offsets of each partition.

        With `after`, wait until one partition has passed it, at most `wait` seconds.
        """
        self._facade.sync_clock()
        queue = self._facade.get_queue(name)
        if after is not None and wait_seconds > 0.0 and not _has_advanced(queue, after):
            changed = asyncio.Event()
            waiters = self._waiters.setdefault(int(queue.qid), set())
            waiters.add(changed)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_seconds):
                        while self._facade.is_current(queue) and not _has_advanced(queue, after):
                            await changed.wait()
                            changed.clear()
            finally:
                waiters.discard(changed)
                if not waiters:
                    self._waiters.pop(int(queue.qid), None)
            queue = self._facade.get_queue(name)
        return self._offsets_of(queue)

    def on_frame_committed(self, frame: Frame) -> None:
        self._load.record_write(len(frame.data))
        if self._waiters:
            for logged in frame.partitions:
                assert isinstance(logged, Partition)
                for changed in self._waiters.get(int(logged.queue.qid), ()):
                    changed.set()

    def _offsets_of(self, queue: Queue) -> QueueOffsets:
        live = sum(int(partition.live_count) for partition in queue.partitions)
        each = int(queue.bytes) / live if live else 0.0
        return QueueOffsets(
            queue.name,
            incarnation_of(queue),
            [
                PartitionOffsets(
                    int(one.number),
                    _earliest(one),
                    int(one.committed_end),
                    round(each * int(one.live_count)),
                )
                for one in queue.partitions
            ],
            self._queue_index.is_dead_letter_queue(queue.name),
            bool(queue.rules.is_compacted),
        )

    async def offsets_at(self, name: str, moment: float) -> dict[int, int]:
        """Return the first sequence at or after a time, in each partition."""
        queue = self._facade.get_queue(name)
        milliseconds = round(moment * 1000.0)
        return {
            int(one.number): min(await self._first_since(one, milliseconds), int(one.committed_end))
            for one in queue.partitions
        }

    async def _first_since(self, partition: Partition, milliseconds: int) -> int:
        """Return the first sequence that arrived at or after a time.

        The partition knows bounds; between them, a binary search reads messages, which arrived
        in order.
        """
        low = int(partition.first_arrived_since(milliseconds))
        high = int(partition.first_known_arrival_since(milliseconds))
        while low < high:
            middle = (low + high) // 2
            probe = int(partition.first_live(middle))
            if probe >= high:
                high = middle
                continue
            [message] = await self._facade.read_messages([(partition, probe)])
            if message is not None and message.enqueued_at >= milliseconds:
                high = probe
            else:
                low = probe + 1
        return int(partition.first_live(low))

    # ---- reading

    async def slice(
        self,
        name: str,
        partition_number: int,
        start: int,
        end: int,
        lenient: bool,
        max_messages: int,
        max_bytes: int,
        group: str = "",
        incarnation: str = "",
    ) -> MessageSlice:
        """Return the next part of a range.

        A range with messages that are no longer stored is refused, unless `lenient`. For a group,
        messages for another group alone are left out. All that the group waits for is stored, so
        the only losses are messages that other clients settled for it or that were removed.
        """
        queue = self._facade.get_queue(name)
        check_incarnation(queue, incarnation)
        partition = _find_partition(queue, partition_number)
        found, reached = await self._locate(
            queue, partition, start, end, lenient, max_messages, max_bytes, group
        )
        locations = found.value()
        records: list[bytes | None] = []
        if not self.has_segment_files and locations:
            records = await self._read_records(
                [
                    int.from_bytes(locations[at + 8 : at + 16], "little")
                    for at in range(0, len(locations), LOCATION_BYTES)
                ]
            )
        return MessageSlice(
            int(partition.pid),
            locations,
            records,
            reached,
            int(found.bytes),
            self._load.max_read_rate(),
        )

    async def count(
        self,
        name: str,
        ranges: dict[int, tuple[int, int]],
        lenient: bool,
        group: str = "",
        incarnation: str = "",
    ) -> dict[int, int]:
        """Return how many messages a read of these ranges would return, by partition."""
        queue = self._facade.get_queue(name)
        check_incarnation(queue, incarnation)
        counts: dict[int, int] = {}
        for number, (start, end) in ranges.items():
            partition = _find_partition(queue, number)
            counts[number] = 0
            while start < end:
                found, start = await self._locate(
                    queue, partition, start, end, lenient, LOOKUP_BATCH_SIZE, ANY_SIZE, group
                )
                counts[number] += int(found.count)
                await self._facade.yield_to_loop()
                # A queue that was deleted meanwhile, or created again, is refused.
                check_incarnation(self._facade.get_queue(name), incarnation_of(queue))
        return counts

    async def _locate(
        self,
        queue: Queue,
        partition: Partition,
        start: int,
        end: int,
        lenient: bool,
        max_messages: int,
        max_bytes: int,
        group: str,
    ) -> tuple[MessageLocations, int]:
        """Return locations of messages of a range, and the sequence that they reach."""
        partition_number = int(partition.number)
        reader_group = (
            _find_group(queue, group) if group and (not lenient or group in queue.groups) else None
        )
        cursor = None if reader_group is None or lenient else reader_group.cursors[partition_number]
        if not lenient:
            _check_range(partition, start, end, cursor)
        first = start
        gid = 0 if reader_group is None else int(reader_group.gid)
        requested_end, end = end, min(end, int(partition.committed_end))
        found = MessageLocations()
        while start < end:
            count_limit = min(max_messages, int(found.count) + LOOKUP_BATCH_SIZE)
            start = int(
                collect_locations(partition, start, end, gid, count_limit, max_bytes, found)
            )
            if found.count < count_limit or count_limit == max_messages:
                break
            await self._facade.yield_to_loop()
            if not self._facade.is_current(queue):
                break
        if cursor is not None:  # state may have changed while the loop was yielded
            if queue.groups.get(group) is not reader_group:
                raise _unknown_group(queue, group)
            _check_lost(cursor, first, start)
        return found, start if start < end else requested_end

    async def _read_records(self, addresses: list[int]) -> list[bytes | None]:
        waiter: asyncio.Future[list[bytes | None]] = asyncio.get_running_loop().create_future()

        def done(found: list[bytes | None]) -> None:
            if not waiter.done():
                waiter.set_result(found)

        self._facade.commit_loop.reads.read(addresses, done)
        return await waiter

    # ---- progress

    async def progress(self, name: str, group: str) -> GroupProgress:
        queue = self._facade.get_queue(name)
        return _build_progress(_find_group(queue, group), {})

    async def advance(
        self,
        name: str,
        group: str,
        ends: dict[int, int],
        create_group: bool,
        start: str,
        incarnation: str = "",
        restart: bool = False,
    ) -> GroupProgress:
        """Settle everything below these sequences for a group and return when it is committed.

        Never moves backwards, unless a reader begins there: then the group goes back to its start.
        """
        facade = self._facade
        facade.begin_change()
        queue = facade.get_queue(name)
        check_incarnation(queue, incarnation)
        start_sequences = resolve_start(queue, start)
        for number, end in ends.items():
            partition = _find_partition(queue, number)
            if end > partition.committed_end:
                raise OutOfRange(
                    f"partition {number} of queue {queue.name!r} goes up to"
                    f" {partition.committed_end}, and {end} is beyond",
                    "Ask for its offsets; a queue that was deleted and created again starts at 0",
                )
        found = queue.groups.get(group)
        if found is None:
            if not create_group:
                raise _unknown_group(queue, group)
            fault = new_group_name_error(group)
            if fault:
                raise InvalidQueueConfig(f"{group!r} is not a valid group name", fault)
            facade.engine.check_group_limit(group, len(queue.partitions))
            found = facade.engine.get_or_create_group(queue, group, start_sequences)
        if create_group or ends:
            _check_no_consumers(queue, found)
        if create_group:
            for cursor in found.cursors:
                if cursor.lost_ranges is None:
                    facade.engine.bulk_progress.start_tracking(cursor, cursor.low_watermark)
        if restart:
            self._restart_progress(found, ends)
        if (
            create_group
            or restart
            or any(_is_progress(found.cursors[number], end) for number, end in ends.items())
        ):
            for number, end in ends.items():
                await self._settle_partition(queue, found, number, end)
            facade.engine.frame_builder.request_sync()
        await facade.wait_committed()
        return _build_progress(found, ends)

    def _restart_progress(self, group: Group, starts: dict[int, int]) -> None:
        """Record losses of the group from here on; earlier ones do not concern this reader."""
        facade = self._facade
        facade.begin_change()
        floors = [
            min(int(cursor.low_watermark), starts.get(number, int(cursor.low_watermark)))
            for number, cursor in enumerate(group.cursors)
        ]
        if any(
            floor < cursor.low_watermark
            for floor, cursor in zip(floors, group.cursors, strict=True)
        ):
            facade.engine.seek_group(group, floors)
        for number, start in starts.items():
            facade.engine.bulk_progress.start_tracking(group.cursors[number], start)

    async def _settle_partition(self, queue: Queue, group: Group, number: int, end: int) -> None:
        """Settle one partition in portions.

        Each portion is valid by itself: a caller that gives up in between has settled less and
        repeats the call.
        """
        facade = self._facade
        while True:
            if not facade.is_current(queue) or queue.groups.get(group.name) is not group:
                raise _unknown_group(queue, group.name)
            _check_no_consumers(queue, group)
            facade.begin_change()
            deadline = time.perf_counter() + MAX_TURN_SECONDS
            cursor = group.cursors[number]
            while True:
                if facade.engine.bulk_progress.settle_range(cursor, end, MESSAGES_PER_CLOCK_CHECK):
                    return
                if time.perf_counter() > deadline:
                    break
            await facade.yield_to_loop()

    # ---- writing

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
            engine.check_store_available()
            runs = [(await self._open_queue(name), messages) for name, messages in batch.runs]
            engine.check_store_available()
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
                for at in range(0, len(messages), LOOKUP_BATCH_SIZE):
                    load.add(messages, at, min(at + LOOKUP_BATCH_SIZE, len(messages)))
                    await facade.yield_to_loop()
            load.check()

    async def _locate_dead_letters(
        self, repairs: Sequence[DeadLetterRepair]
    ) -> list[LocatedRepair]:
        """Return the dead letters that still exist, with their replacements."""
        facade = self._facade
        found: list[tuple[DeadLetterRepair, Queue, Partition]] = []
        for one in repairs:
            if not self._queue_index.is_dead_letter_queue(
                one.dead_letter_queue
            ) and not one.dead_letter_queue.startswith("dlq/"):
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


def incarnation_of(queue: Queue) -> str:
    """Return what distinguishes a queue from an earlier or later one of the same name.

    Sequences belong to one incarnation. A store never reuses a queue number; the creation time
    distinguishes the queues of different stores (in memory, emptied, salvaged). Both are stored
    and survive restarts and moves to another node. The time is rounded as the journal rounds it,
    so that it is the same before and after recovery.
    """
    return f"{int(queue.qid)}-{int(queue.created_at * 1000.0 + 0.5)}"


def check_incarnation(queue: Queue, expected: str) -> None:
    """Refuse a queue of another incarnation; an empty `expected` accepts all."""
    if expected and expected != incarnation_of(queue):
        raise QueueMadeAgain(queue.name, expected, incarnation_of(queue))


def _earliest(partition: Partition) -> int:
    return min(int(partition.first_live(0)), int(partition.committed_end))


def _has_advanced(queue: Queue, after: dict[int, int]) -> bool:
    return any(int(one.committed_end) > after.get(int(one.number), 0) for one in queue.partitions)


def _find_partition(queue: Queue, number: int) -> Partition:
    if not 0 <= number < len(queue.partitions):
        raise UnknownPartition(queue.name, number, len(queue.partitions))
    return queue.partitions[number]


def _check_range(partition: Partition, start: int, end: int, cursor: Cursor | None) -> None:
    """Refuse a range that is not stored; `cursor` is that of the group that reads, if any."""
    queue = partition.queue
    description = f"partition {partition.number} of queue {queue.name!r}"
    earliest, latest = _earliest(partition), int(partition.committed_end)
    if start >= end:
        return
    if cursor is not None:
        _check_lost(cursor, start, end)
    elif start < earliest and not queue.rules.is_compacted:
        raise OutOfRange(
            f"{description} is kept from {earliest} on, and {start} is before that",
            "Begin at the earliest; messages are kept until every group has settled them,"
            " so read with a group",
            earliest,
            latest,
        )
    if end > latest:
        raise OutOfRange(
            f"{description} goes up to {latest}, and {end} is beyond",
            "Ask for its offsets; a queue that was deleted and created again starts at 0",
            earliest,
            latest,
        )


def _check_lost(cursor: Cursor, start: int, end: int) -> None:
    lost = int(first_lost(cursor, start, end))
    if lost >= 0:
        partition = cursor.partition
        raise OutOfRange(
            f"partition {partition.number} of queue {partition.queue.name!r} has lost {lost} before"
            f" group {cursor.group.name!r} had read it: other clients settled it for this group, or"
            " it was purged, expired or dropped because the queue was full",
            "Give the bulk reader a group of its own; lenient leaves out lost messages",
            _earliest(partition),
            int(partition.committed_end),
        )


def _is_progress(cursor: Cursor, end: int) -> bool:
    """Return whether the group has not settled, or has not recorded, everything below `end`."""
    return (
        cursor.low_watermark < end
        or cursor.lost_ranges is None
        or cursor.lost_ranges.acknowledged_to < end
    )


def _check_no_consumers(queue: Queue, group: Group) -> None:
    if group.consumers:
        raise InUse(
            f"group {group.name!r} of queue {queue.name!r} has {len(group.consumers)} consumers"
            " over MQTT",
            "Give Spark (or another bulk reader) a group of its own, or end those consumers",
        )


def _find_group(queue: Queue, name: str) -> Group:
    group = queue.groups.get(name)
    if group is None:
        raise _unknown_group(queue, name)
    return group


def _unknown_group(queue: Queue, name: str) -> UnknownGroup:
    refusal = UnknownGroup(queue.name, name)
    refusal.remedy = 'Create it: PUT its progress with "create": true'
    return refusal


def _build_progress(group: Group, starts: dict[int, int]) -> GroupProgress:
    """Build the progress of a group.

    Lost ranges are searched from `starts` on, or from the last recorded progress.
    """
    lost: dict[int, int] = {}
    for number, cursor in enumerate(group.cursors):
        acknowledged_to = (
            0 if cursor.lost_ranges is None else int(cursor.lost_ranges.acknowledged_to)
        )
        first = int(
            first_lost(cursor, starts.get(number, acknowledged_to), cursor.partition.committed_end)
        )
        if first >= 0:
            lost[number] = first
    return GroupProgress(
        {int(cursor.partition.number): int(cursor.low_watermark) for cursor in group.cursors}, lost
    )
