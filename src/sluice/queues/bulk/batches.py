"""Batches of messages that are stored exactly once.

A batch comes from an application that numbers its batches. Its messages and a note with its number
go into one frame, so after a crash all or nothing of it is stored, and a batch that is sent again
is recognized and not stored again. For each application, the number of its last batch is stored;
applications that have sent nothing for a month are forgotten, and those with a single batch after a
day. All functions work in portions: between them, the caller yields to other work.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.errors import PartitionFull, QueueFull
from sluice.message import Message
from sluice.queues.flow import Appender, DeadLetters, KeyCompaction, Publishing, free_length
from sluice.queues.log import NoteReader, NoteWriter, notes
from sluice.queues.model import DEAD_LETTER, DROP_OLDEST, EngineState, Queue, hash_key

FENCE_TTL_SECONDS: Final = 30 * 86_400.0
# Prefix of applications that send a single batch: the fence only has to detect a retry.
ONCE_APP_PREFIX: Final = "once/"
ONCE_FENCE_TTL_SECONDS: Final = 86_400.0

# State of a key after a batch: absent, the stored value, or a value of the batch.
ABSENT: Final = 0
STORED: Final = 1
WRITTEN: Final = 2


class BatchFence:
    """The last batch of an application."""

    def __init__(self, batch: i64, rows: i64, committed_at: float) -> None:
        self.batch: i64 = batch
        self.rows: i64 = rows
        self.committed_at: float = committed_at


class BatchFences:
    def __init__(self) -> None:
        self._fences: dict[str, BatchFence] = {}

    def get(self, app: str) -> BatchFence | None:
        return self._fences.get(app)

    def put(self, app: str, batch: i64, rows: i64, committed_at: float) -> None:
        self._fences[app] = BatchFence(batch, rows, committed_at)

    def drop_expired(self, now: float) -> None:
        old = [
            app
            for app, fence in self._fences.items()
            if now - fence.committed_at > _fence_ttl_seconds(app)
        ]
        for app in old:
            del self._fences[app]

    def load(self, note: NoteReader) -> None:
        """Load a note of a previous run."""
        app = note.read_text()
        batch = note.read_int()
        rows = note.read_int()
        self.put(app, batch, rows, note.read_seconds())

    def write_snapshot(self, out: NoteWriter, now: float) -> None:
        self.drop_expired(now)
        out.write_int(len(self._fences))
        for app, fence in self._fences.items():
            _write_fence(out, app, fence)

    def load_snapshot(self, note: NoteReader) -> None:
        for _ in range(note.read_int()):
            self.load(note)


def _fence_ttl_seconds(app: str) -> float:
    return ONCE_FENCE_TTL_SECONDS if app.startswith(ONCE_APP_PREFIX) else FENCE_TTL_SECONDS


def _write_fence(out: NoteWriter, app: str, fence: BatchFence) -> None:
    out.write_text(app)
    out.write_int(fence.batch)
    out.write_int(fence.rows)
    out.write_seconds(fence.committed_at)


class BatchCheck:
    """Checks whether a queue can take a batch of `count` messages.

    A batch is refused as a whole or not at all, so its needs are counted before its first message
    is appended. In a compacted queue, only new keys need space.
    """

    def __init__(
        self, key_compaction: KeyCompaction, queue: Queue, count: i64, max_partition_length: i64
    ) -> None:
        rules = queue.rules
        self._key_compaction: KeyCompaction = key_compaction
        self._max_partition_length: i64 = max_partition_length
        self._queue: Queue = queue
        self._needed: i64 = count
        self._overflows_to_dlq: bool = rules.overflow == DEAD_LETTER and rules.dlq_enabled
        self._capacity: i64 = (
            rules.max_depth
            if rules.overflow == DROP_OLDEST
            else max(0, rules.max_depth - queue.depth)
        )
        # Whether the messages must be counted with `add`; otherwise their number is enough.
        self.needs_messages: bool = not self._overflows_to_dlq and (
            count > self._capacity if rules.is_compacted else max_partition_length > 0
        )
        self._keys: dict[int, int] = {}  # state of each key after the batch, by key hash
        self._key_growth: i64 = 0  # keys that the batch has added so far
        self._max_key_growth: i64 = 0  # maximum of `_key_growth`
        self._written_keys: i64 = 0  # keys whose value is from this batch
        self._count_by_partition: list[int] = [0] * len(queue.partitions)
        self._keyless_count: i64 = 0

    def add(self, messages: list[Message], start: i64, end: i64) -> None:
        compacted = self._queue.rules.is_compacted
        nth = start
        while nth < end:
            message = messages[nth]
            nth += 1
            if compacted:
                self._add_key(message)
                continue
            key = self._queue.key_hash(message.key)
            if key:
                self._count_by_partition[key % len(self._count_by_partition)] += 1
            else:
                self._keyless_count += 1

    def _add_key(self, message: Message) -> None:
        key_hash = int(hash_key(message.key))
        before = self._keys.get(key_hash, -1)
        if before < 0:
            before = (
                ABSENT
                if self._key_compaction.find_last_message(self._queue, message.key) is None
                else STORED
            )
        after = WRITTEN
        if not message.payload:
            # Groups receive tombstones, which take space until they are settled.
            after = before if self._queue.groups else ABSENT
        self._key_growth += (after != ABSENT) - (before != ABSENT)
        self._max_key_growth = max(self._max_key_growth, self._key_growth)
        self._written_keys += (after == WRITTEN) - (before == WRITTEN)
        self._keys[key_hash] = after

    def check(self) -> None:
        """Refuse the batch if there is no space, and no way to make some."""
        if self._overflows_to_dlq:
            return
        queue = self._queue
        if self.needs_messages and queue.rules.is_compacted:
            self._needed = (
                self._written_keys if queue.rules.overflow == DROP_OLDEST else self._max_key_growth
            )
        if self._needed > self._capacity:
            queue.refused += 1
            raise QueueFull(
                queue.name,
                int(queue.depth),
                queue.rules.is_compacted,
                int(self._capacity),
                int(self._needed),
            )
        if self.needs_messages and not queue.rules.is_compacted:
            self._check_lengths()

    def _check_lengths(self) -> None:
        """Check the length of partitions if `max_partition_length` limits them."""
        queue = self._queue
        count: i64 = len(self._count_by_partition)
        each: i64 = (self._keyless_count + count - 1) // count
        for partition in queue.partitions:
            if partition.number >= count:
                continue  # added after the batch started
            needed: i64 = self._count_by_partition[partition.number] + each
            capacity = free_length(partition, self._max_partition_length, needed)
            if needed > capacity:
                queue.refused += 1
                raise PartitionFull(
                    queue.name,
                    int(partition.number),
                    int(self._max_partition_length),
                    int(capacity),
                    int(needed),
                )


class BatchWriting:
    """Appends batches, and remembers the last batch of each application."""

    def __init__(
        self,
        state: EngineState,
        appender: Appender,
        key_compaction: KeyCompaction,
        dead_letters: DeadLetters,
        publishing: Publishing,
    ) -> None:
        self._state: EngineState = state
        self._appender: Appender = appender
        self._key_compaction: KeyCompaction = key_compaction
        self._dead_letters: DeadLetters = dead_letters
        self._publishing: Publishing = publishing
        self.fences: BatchFences = BatchFences()

    def begin(self, queue: Queue, count: i64) -> BatchCheck:
        """Return the check of a batch of `count` messages."""
        return BatchCheck(self._key_compaction, queue, count, self._publishing.max_partition_length)

    def append_range(self, queue: Queue, messages: list[Message], start: i64, end: i64) -> i64:
        """Append messages `start` to `end` of a batch; return how many the queue stored.

        None is refused: the result of the check before the first message must hold for the last
        one, although other clients publish meanwhile.
        """
        accepted: i64 = 0
        nth = start
        while nth < end:
            message = messages[nth]
            nth += 1
            if message.id and queue.is_duplicate(message.id, self._state.now):
                queue.duplicates += 1
                continue
            if self._ensure_capacity(queue, message) and self._append(queue, message):
                accepted += 1
            if message.id:
                queue.remember_id(message.id, self._state.now)
        return accepted

    def _ensure_capacity(self, queue: Queue, message: Message) -> bool:
        """Make space as `Publishing` does, but refuse nothing.

        Return False if the message was dead-lettered.
        """
        rules = queue.rules
        if queue.depth < rules.max_depth or (
            rules.is_compacted and not self._key_compaction.adds_key(queue, message)
        ):
            return True
        if rules.overflow == DROP_OLDEST:
            self._publishing.drop_oldest(queue)
        elif rules.overflow == DEAD_LETTER:
            return not self._dead_letters.write_refused(queue, message, "overflow")
        return True

    def _append(self, queue: Queue, message: Message) -> bool:
        if queue.rules.is_compacted:
            self._key_compaction.store(queue, message)
        elif self._publishing.max_partition_length:
            return self._publishing.append_within_limit(queue, message, True)
        else:
            self._appender.append(queue, message, 0)
        return True

    def write_batch_note(self, app: str, batch: i64, rows: i64) -> None:
        """Write the fence, in the frame of the messages."""
        self.fences.put(app, batch, rows, self._state.now)
        note = NoteWriter(notes.BATCH_COMMITTED)
        _write_fence(note, app, BatchFence(batch, rows, self._state.now))
        self._state.frame_builder.add_note(note, self._state.now_ms(), True)
