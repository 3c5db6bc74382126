"""The broker's side of bulk reads: offsets, places and progress. Writes are in `batch_commits`.

It runs on the broker's loop, in portions. It turns ranges of sequences into places in the store and
leaves reading to others. It knows neither Arrow nor HTTP.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from sluice.admin.broker_facade import BrokerFacade
from sluice.admin.bulk.batch_commits import BatchCommits
from sluice.admin.bulk.broker_load import BrokerLoad
from sluice.admin.bulk.bulk_views import (
    GroupProgress,
    MessageSlice,
    PartitionOffsets,
    QueueOffsets,
)
from sluice.errors import (
    InUse,
    InvalidQueueConfig,
    OutOfRange,
    UnknownGroup,
    UnknownPartition,
)
from sluice.queues.bulk import (
    MessageLocations,
    check_incarnation,
    check_lost,
    check_range,
    collect_locations,
    earliest_stored,
    first_lost,
    incarnation_of,
    is_progress,
    resolve_start,
)
from sluice.queues.commit_loop import CommitListener
from sluice.queues.log import Frame
from sluice.queues.model import Group, Partition, Queue
from sluice.queues.names import new_group_name_error

LOOKUP_BATCH_SIZE: Final = 2048  # places looked up before the loop is yielded
MAX_TURN_SECONDS: Final = 0.002  # limit of a portion of settling or appending
LOCATION_BYTES: Final = 20
ANY_SIZE: Final = 1 << 62
MESSAGES_PER_CLOCK_CHECK: Final = 32
QUEUES_CREATED_PER_TURN: Final = 16


class BulkService(BatchCommits, CommitListener):
    """Bulk operations. `has_segment_files`: the store's files can be read by address."""

    def __init__(self, facade: BrokerFacade, has_segment_files: bool = False) -> None:
        super().__init__(facade)
        self.has_segment_files = has_segment_files
        self._waiters: dict[int, set[asyncio.Event]] = {}  # by queue, set by its next commit
        self._load = BrokerLoad()
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
                    earliest_stored(one),
                    int(one.committed_end),
                    round(each * int(one.live_count)),
                )
                for one in queue.partitions
            ],
            self._facade.inspector.is_dead_letter_queue(queue.name),
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
            if message is not None and message.enqueued_at_ms >= milliseconds:
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
            check_range(partition, start, end, cursor)
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
            check_lost(cursor, first, start)
        return found, start if start < end else requested_end

    async def _read_records(self, addresses: list[int]) -> list[bytes | None]:
        waiter: asyncio.Future[list[bytes | None]] = asyncio.get_running_loop().create_future()

        def done(found: list[bytes | None]) -> None:
            if not waiter.done():
                waiter.set_result(found)

        self._facade.commit_loop.read(addresses, done)
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
            facade.engine.lifecycle.check_group_limit(group, len(queue.partitions))
            found = facade.engine.lifecycle.get_or_create_group(queue, group, start_sequences)
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
            or any(is_progress(found.cursors[number], end) for number, end in ends.items())
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
            facade.engine.lifecycle.seek_group(group, floors)
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


def _has_advanced(queue: Queue, after: dict[int, int]) -> bool:
    return any(int(one.committed_end) > after.get(int(one.number), 0) for one in queue.partitions)


def _find_partition(queue: Queue, number: int) -> Partition:
    if not 0 <= number < len(queue.partitions):
        raise UnknownPartition(queue.name, number, len(queue.partitions))
    return queue.partitions[number]


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
