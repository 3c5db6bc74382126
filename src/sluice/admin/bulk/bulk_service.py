"""The broker's side of the bulk door: sequences, places, progress and batches, on the broker's loop and in portions.

It turns ranges of sequences into places in the store and leaves reading to others; it takes batches that others have
read and checked, and appends them. Nothing here knows Arrow or HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from sluice.admin.bulk.bulk_views import (
    Batch,
    Committed,
    Mending,
    PartitionOffsets,
    QueueOffsets,
    Repair,
    Slice,
    Standing,
    Target,
)
from sluice.admin.broker_facade import Hands, plain
from sluice.admin.queries.view_builders import Register
from sluice.admin.bulk.broker_load import Strain
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
from sluice.queues.flow import dead_letters
from sluice.queues.bulk.bulk_ops import Load, Places, append_some, collect, note_batch, settle_some
from sluice.queues.compacted.key_compaction import check
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.group import Group
from sluice.queues.log.frame_builder import Frame
from sluice.queues.bulk.lost_ranges import begin_anew, first_lost
from sluice.queues.names import RESPONSES, fault_of_name, fault_of_new_group
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.bulk.start_position import start_floors

AT_ONCE: Final = 2048  # places that are looked up before others get their turn
TURN_SECONDS: Final = 0.002  # what a portion of settling or appending may take
PLACE_BYTES: Final = 20
STEP: Final = 32  # messages between two looks at the clock
CREATED_AT_ONCE: Final = 16  # queues, before others get their turn


class BulkDesk:
    """`direct` says that the store's files can be read by address: else records are read here."""

    def __init__(self, hands: Hands, register: Register, direct: bool = False) -> None:
        self._hands = hands
        self._register = register
        self.direct = direct
        self._waiters: dict[int, set[asyncio.Event]] = {}  # by queue: who waits for its next commit
        self._strain = Strain()
        self._one_batch = asyncio.Lock()
        self._created = 0  # queues, for rows that name them
        self._tasks: set[asyncio.Task[Committed]] = set()
        hands.runner.frame_kept = self._kept

    # ---- offsets

    async def offsets(
        self, name: str, after: dict[int, int] | None = None, wait: float = 0.0
    ) -> QueueOffsets:
        """How far each partition goes. With `after`, as soon as one goes further than that, or `wait` is over."""
        self._hands.look()
        queue = self._hands.queue(name)
        if after is not None and wait > 0.0 and not _is_beyond(queue, after):
            news = asyncio.Event()
            waiters = self._waiters.setdefault(int(queue.qid), set())
            waiters.add(news)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        while self._hands.lives(queue) and not _is_beyond(queue, after):
                            await news.wait()
                            news.clear()
            finally:
                waiters.discard(news)
                if not waiters:
                    self._waiters.pop(int(queue.qid), None)
            queue = self._hands.queue(name)
        return self._offsets_of(queue)

    def _kept(self, frame: Frame) -> None:
        self._strain.wrote(len(frame.data))
        if self._waiters:
            for partition in frame.partitions:
                for news in self._waiters.get(int(partition.queue.qid), ()):
                    news.set()

    def _offsets_of(self, queue: Queue) -> QueueOffsets:
        live = sum(int(partition.live) for partition in queue.partitions)
        each = int(queue.bytes) / live if live else 0.0
        return QueueOffsets(
            queue.name,
            incarnation_of(queue),
            [
                PartitionOffsets(
                    int(one.number), _earliest(one), int(one.committed), round(each * int(one.live))
                )
                for one in queue.partitions
            ],
            self._register.takes_the_dead(queue.name),
            bool(queue.rules.compacted),
        )

    async def offsets_at(self, name: str, moment: float) -> dict[int, int]:
        """The first sequence at or after a time, in each partition."""
        queue = self._hands.queue(name)
        milliseconds = round(moment * 1000.0)
        return {
            int(one.number): min(await self._first_since(one, milliseconds), int(one.committed))
            for one in queue.partitions
        }

    async def _first_since(self, partition: Partition, milliseconds: int) -> int:
        """Between the first message that may have come by then and the first that is known to have, it is found by
        reading some of them: halving the rest each time, because they came in order."""
        low = int(partition.first_since(milliseconds))
        high = int(partition.first_dated_since(milliseconds))
        while low < high:
            middle = (low + high) // 2
            probe = int(partition.first_live(middle))
            if probe >= high:
                high = middle
                continue
            [message] = await self._hands.read([(partition, probe)])
            if message is not None and message.enqueued_at >= milliseconds:
                high = probe
            else:
                low = probe + 1
        return int(partition.first_live(low))

    # ---- reading

    async def slice(
        self,
        name: str,
        number: int,
        start: int,
        end: int,
        lenient: bool,
        most: int,
        most_bytes: int,
        group: str = "",
        incarnation: str = "",
    ) -> Slice:
        """The next part of a range. What is not kept any more is refused, unless `lenient`. For a group, what is for
        another one alone is left out, and whatever it waits for is kept: refused is what others have settled for it,
        or taken away from it."""
        queue = self._hands.queue(name)
        check_incarnation(queue, incarnation)
        partition = _partition(queue, number)
        reader = _group(queue, group) if group and (not lenient or group in queue.groups) else None
        cursor = None if reader is None or lenient else reader.cursors[number]
        if not lenient:
            _check_range(partition, start, end, cursor)
        first = start
        gid = 0 if reader is None else int(reader.gid)
        asked, end = end, min(end, int(partition.committed))
        found = Places()
        while start < end:
            enough = min(most, int(found.count) + AT_ONCE)
            start = int(collect(partition, start, end, gid, enough, most_bytes, found))
            if found.count < enough or enough == most:
                break
            await self._hands.breathe()
            if not self._hands.lives(queue):
                break
        if cursor is not None:  # others had their turn
            if queue.groups.get(group) is not reader:
                raise _no_group(queue, group)
            _check_lost(cursor, first, start)
        places = found.value()
        records: list[bytes | None] = []
        if not self.direct and places:
            records = await self._read(
                [
                    int.from_bytes(places[at + 8 : at + 16], "little")
                    for at in range(0, len(places), PLACE_BYTES)
                ]
            )
        return Slice(
            int(partition.pid),
            places,
            records,
            start if start < end else asked,
            int(found.bytes),
            self._strain.pace(),
        )

    async def _read(self, addresses: list[int]) -> list[bytes | None]:
        waiter: asyncio.Future[list[bytes | None]] = asyncio.get_running_loop().create_future()

        def done(found: list[bytes | None]) -> None:
            if not waiter.done():
                waiter.set_result(found)

        self._hands.runner.read(addresses, done)
        return await waiter

    # ---- progress

    async def progress(self, name: str, group: str) -> Standing:
        queue = self._hands.queue(name)
        return _standing(_group(queue, group), {})

    async def advance(
        self,
        name: str,
        group: str,
        ends: dict[int, int],
        create: bool,
        start: str,
        incarnation: str = "",
        begin: bool = False,
    ) -> Standing:
        """Let a group be done with everything below these sequences; never backwards, unless a reader begins there, to
        whom the group then goes back. Answered when it is kept."""
        hands = self._hands
        hands.begin()
        queue = hands.queue(name)
        check_incarnation(queue, incarnation)
        floors = start_floors(queue, start)
        for number, end in ends.items():
            partition = _partition(queue, number)
            if end > partition.committed:
                raise OutOfRange(
                    f"partition {number} of queue {queue.name!r} goes up to {partition.committed}, and {end} is beyond",
                    "Ask for its offsets; a queue that was deleted and made again begins anew",
                )
        found = queue.groups.get(group)
        if found is None:
            if not create:
                raise _no_group(queue, group)
            fault = fault_of_new_group(group)
            if fault:
                raise InvalidQueueConfig(f"{group!r} cannot be a group", fault)
            hands.engine.check_group(group, len(queue.partitions))
            found = hands.engine.group(queue, group, floors)
        if create or ends:
            _check_free(queue, found)
        if create:
            for cursor in found.cursors:
                if cursor.losses is None:
                    begin_anew(hands.engine, cursor, cursor.floor)
        if begin:
            self._begin(found, ends)
        if create or begin or any(_is_news(found.cursors[number], end) for number, end in ends.items()):
            for number, end in ends.items():
                await self._settle(queue, found, number, end)
            hands.engine.journal.want_sync()
        await hands.kept()
        return _standing(found, ends)

    def _begin(self, group: Group, starts: dict[int, int]) -> None:
        """From here on whatever is lost for the group is known; what has gone before was not for this reader."""
        hands = self._hands
        hands.begin()
        floors = [
            min(int(cursor.floor), starts.get(number, int(cursor.floor)))
            for number, cursor in enumerate(group.cursors)
        ]
        if any(floor < cursor.floor for floor, cursor in zip(floors, group.cursors, strict=True)):
            hands.engine.seek(group, floors)
        for number, start in starts.items():
            begin_anew(hands.engine, group.cursors[number], start)

    async def _settle(self, queue: Queue, group: Group, number: int, end: int) -> None:
        """One partition, in portions. Each portion is good by itself: somebody who gives up in between has settled
        less, and says it again."""
        hands = self._hands
        while True:
            if not hands.lives(queue) or queue.groups.get(group.name) is not group:
                raise _no_group(queue, group.name)
            _check_free(queue, group)
            hands.begin()
            until = time.perf_counter() + TURN_SECONDS
            cursor = group.cursors[number]
            while True:
                if settle_some(hands.engine, cursor, end, STEP):
                    return
                if time.perf_counter() > until:
                    break
            await hands.breathe()

    # ---- writing

    async def last_batch(self, app: str) -> int | None:
        """Told when it is kept: a fence is known from the first moment of a commit on."""
        fence = self._hands.engine.batches.last(app)
        if fence is None:
            return None
        await self._hands.kept()
        return int(fence.batch)

    async def targets(self, names: list[str]) -> dict[str, Target]:
        """The queues of a batch, made if they are not there, as a publish would."""
        hands = self._hands
        hands.begin()
        found: dict[str, Target] = {}
        for name in names:
            fault = fault_of_name(plain(name))
            if not fault and name.startswith(RESPONSES):
                fault = "responses are no queue"
            if fault:
                raise InvalidQueueName(name, fault)
        for name in names:
            queue = await self._open(name)
            check = hands.door.validator(queue) if queue.rules.schema else None
            found[name] = Target(int(queue.rules.max_message_size), check, not queue.rules.compacted)
        return found

    async def commit(self, batch: Batch) -> Committed:
        """Append a batch, all of it in one frame with its fence; one that was committed before is not stored again.
        An asker who goes away does not stop it half way: what has begun is done."""
        task = asyncio.create_task(self._commit(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _commit(self, batch: Batch) -> Committed:
        hands = self._hands
        engine, runner = hands.engine, hands.runner
        async with self._one_batch:
            hands.begin()
            fence = engine.batches.last(batch.app)
            if fence is not None and batch.number <= fence.batch:
                await hands.kept()
                return Committed(int(fence.rows) if batch.number == fence.batch else 0, True)
            engine.check_available()
            runs = [(await self._open(name), messages) for name, messages in batch.runs]
            engine.check_available()
            for queue, messages in runs:
                for message in messages if queue.rules.compacted else []:
                    check(queue, message)
            await self._check_room(runs)
            menders = await self._letters(batch.repairs)
            runner.hold()
            try:
                note_batch(engine, batch.app, batch.number, batch.rows)
                for queue, messages in runs:
                    await self._append(queue, messages)
                mended = await self._mend(menders, batch.to_all)
            except BaseException as fault:
                runner.break_off(fault)  # half a batch is in the open frame: that frame must never be kept
                raise
            hands.begin()
            runner.release()
            await hands.kept()
        return Committed(batch.rows, False, len(batch.repairs) - mended)

    async def _open(self, name: str) -> Queue:
        """Return the queue called `name`, which is created if it does not exist: a few of them in each turn."""
        hands = self._hands
        queue = hands.engine.queues.get(name)
        if queue is None:
            queue = hands.door.open(name)
            self._created += 1
            if self._created % CREATED_AT_ONCE == 0:
                await hands.breathe()
                hands.begin()
        return queue

    async def _check_room(self, runs: list[tuple[Queue, list[Message]]]) -> None:
        """Refuse a batch that some queue has no room for: once it has begun, nothing is refused."""
        hands = self._hands
        by_queue: dict[Queue, list[list[Message]]] = {}
        for queue, messages in runs:
            by_queue.setdefault(queue, []).append(messages)
        for queue, parts in by_queue.items():
            load = Load(hands.engine, queue, sum(map(len, parts)))
            for messages in parts if load.looks else []:
                for at in range(0, len(messages), AT_ONCE):
                    load.add(messages, at, min(at + AT_ONCE, len(messages)))
                    await hands.breathe()
            load.check()

    async def _letters(self, repairs: Sequence[Repair]) -> list[Mending]:
        """The letters that are there, with what is to take their place."""
        hands = self._hands
        found: list[tuple[Repair, Queue, Partition]] = []
        for one in repairs:
            if not self._register.takes_the_dead(one.home) and not one.home.startswith("dlq/"):
                raise InvalidBatch(
                    f"queue {one.home!r} is no dead-letter queue", "Give the place of a dead letter"
                )
            home = hands.engine.queues.get(one.home)
            if home is None or not 0 <= one.partition < len(home.partitions):
                continue
            queue = await self._open(one.queue)
            if queue.rules.compacted:
                check(queue, one.message)
            found.append((one, queue, home.partitions[one.partition]))
        menders: list[Mending] = []
        for at in range(0, len(found), STEP):
            some = found[at : at + STEP]
            letters = await hands.read([(partition, one.sequence) for one, _, partition in some])
            menders += [
                Mending(one, queue, partition, letter)
                for (one, queue, partition), letter in zip(some, letters, strict=True)
                if letter is not None
            ]
        return menders

    async def _mend(self, menders: list[Mending], to_all: bool) -> int:
        """Put each in the place of its letter; how many there were."""
        hands = self._hands
        count = 0
        for at in range(0, len(menders), STEP):
            hands.begin()
            for one in menders[at : at + STEP]:
                if hands.lives(one.queue) and dead_letters.replace(
                    hands.engine,
                    one.partition,
                    one.repair.sequence,
                    one.letter,
                    one.queue,
                    one.repair.message,
                    to_all,
                ):
                    count += 1
            await hands.breathe()
        return count

    async def _append(self, queue: Queue, messages: list[Message]) -> None:
        hands = self._hands
        at = 0
        while at < len(messages) and hands.lives(queue):  # what is deleted meanwhile takes no more
            hands.begin()
            until = time.perf_counter() + TURN_SECONDS
            while at < len(messages) and time.perf_counter() < until:
                end = min(at + STEP, len(messages))
                append_some(hands.engine, queue, messages, at, end)
                at = end
            await hands.breathe()


def incarnation_of(queue: Queue) -> str:
    """By what a queue is told from another of the same name, before it or after it: sequences are those of one
    incarnation. Its number is never given twice by one store, and the time of its making tells it from those of
    another store (in memory, emptied, salvaged). Both are kept, and outlast restarts and moves to another node.
    The time is rounded as the journal does it, so that it is the same before and after it was read back."""
    return f"{int(queue.qid)}-{int(queue.created_at * 1000.0 + 0.5)}"


def check_incarnation(queue: Queue, asked: str) -> None:
    """`asked` is empty for those who do not mind."""
    if asked and asked != incarnation_of(queue):
        raise QueueMadeAgain(queue.name, asked, incarnation_of(queue))


def _earliest(partition: Partition) -> int:
    return min(int(partition.first_live(0)), int(partition.committed))


def _is_beyond(queue: Queue, after: dict[int, int]) -> bool:
    return any(int(one.committed) > after.get(int(one.number), 0) for one in queue.partitions)


def _partition(queue: Queue, number: int) -> Partition:
    if not 0 <= number < len(queue.partitions):
        raise UnknownPartition(queue.name, number, len(queue.partitions))
    return queue.partitions[number]


def _check_range(partition: Partition, start: int, end: int, reader: Cursor | None) -> None:
    """`reader` is that of the group for which is read."""
    queue = partition.queue
    place = f"partition {partition.number} of queue {queue.name!r}"
    earliest, latest = _earliest(partition), int(partition.committed)
    if start >= end:
        return
    if reader is not None:
        _check_lost(reader, start, end)
    elif start < earliest and not queue.rules.compacted:
        raise OutOfRange(
            f"{place} is kept from {earliest} on, and {start} is before that",
            "Begin at the earliest; messages are kept until every group has settled them, so read with a group",
            earliest,
            latest,
        )
    if end > latest:
        raise OutOfRange(
            f"{place} goes up to {latest}, and {end} is beyond",
            "Ask for its offsets; a queue that was deleted and made again begins anew",
            earliest,
            latest,
        )


def _check_lost(reader: Cursor, start: int, end: int) -> None:
    lost = int(first_lost(reader, start, end))
    if lost >= 0:
        partition = reader.partition
        raise OutOfRange(
            f"partition {partition.number} of queue {partition.queue.name!r} has lost {lost} before group"
            f" {reader.group.name!r} was done with it: others have settled it for this group, or it was purged, expired"
            " or pushed out",
            "Give whoever reads in bulk a group of its own; lenient leaves out what is gone",
            _earliest(partition),
            int(partition.committed),
        )


def _is_news(cursor: Cursor, end: int) -> bool:
    """Whether a group is not done with everything below `end` yet, or was not told so."""
    return cursor.floor < end or cursor.losses is None or cursor.losses.told < end


def _check_free(queue: Queue, group: Group) -> None:
    if group.consumers:
        raise InUse(
            f"group {group.name!r} of queue {queue.name!r} has {len(group.consumers)} consumers over MQTT",
            "Give Spark (or whoever reads in bulk) a group of its own, or end those consumers",
        )


def _group(queue: Queue, name: str) -> Group:
    group = queue.groups.get(name)
    if group is None:
        raise _no_group(queue, name)
    return group


def _no_group(queue: Queue, name: str) -> UnknownGroup:
    refusal = UnknownGroup(queue.name, name)
    refusal.do = 'Create it: PUT its progress with "create": true'
    return refusal


def _standing(group: Group, starts: dict[int, int]) -> Standing:
    """Losses are looked for from `starts` on, where it says nothing from what the group was told last."""
    lost: dict[int, int] = {}
    for number, cursor in enumerate(group.cursors):
        told = 0 if cursor.losses is None else int(cursor.losses.told)
        first = int(first_lost(cursor, starts.get(number, told), cursor.partition.committed))
        if first >= 0:
            lost[number] = first
    return Standing({int(cursor.partition.number): int(cursor.floor) for cursor in group.cursors}, lost)
