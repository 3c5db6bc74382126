"""Cache of message bodies with one budget for all queues and two pools.

Published: bodies as they were published. A consumer that keeps up never causes a read. When the
cache is full, the partitions that were added first evict their oldest half first.

Prefetched: bodies that were read for one cursor, which needs them next. They are the most likely to
be needed soon, so they may take three quarters of the budget, and published bodies are evicted for
them. Among themselves, cursors evict the bodies that they need last.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, cast

from mypy_extensions import i64

from sluice.message import Message
from sluice.queues.model import Partition

if TYPE_CHECKING:
    from sluice.queues.model import Cursor


class BodyCache:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes: i64 = max_bytes
        self.used_bytes: i64 = 0  # of both pools
        self.prefetched_bytes: i64 = 0
        self._partitions: deque[Partition] = deque()
        self._cursors: deque[Cursor] = deque()

    # ---- published bodies

    def put(self, partition: Partition, seq: i64, message: Message) -> None:
        if not partition.is_in_body_cache:
            partition.is_in_body_cache = True
            if not partition.cached_bodies:
                partition.cached_bodies = {}  # replace the shared empty dict
            self._partitions.append(partition)
        partition.cached_bodies[int(seq)] = message
        message.cached_bytes = message.memory_bytes()
        self.used_bytes += message.cached_bytes
        if self.used_bytes > self.max_bytes:
            self._evict_published()

    def take(self, partition: Partition, seq: object) -> Message | None:
        """Return a published body; remove it if no other group needs it."""
        message = partition.cached_bodies.get(seq)
        if message is not None and len(partition.cursors) == 1:
            del partition.cached_bodies[seq]
            self.used_bytes -= message.cached_bytes
        return message

    def drop(self, partition: Partition, seq: i64) -> None:
        boxed_seq: object = int(seq)
        if boxed_seq in partition.cached_bodies:  # rarely: it was taken when it was delivered
            self.used_bytes -= partition.cached_bodies[boxed_seq].cached_bytes
            del partition.cached_bodies[boxed_seq]

    def forget_partition(self, partition: Partition) -> None:
        """Drop the bodies of a deleted partition."""
        for message in partition.cached_bodies.values():
            self.used_bytes -= message.cached_bytes
        partition.cached_bodies = {}
        if partition.is_in_body_cache:
            partition.is_in_body_cache = False
            self._partitions.remove(partition)

    def _evict_published(self) -> None:
        for _ in range(len(self._partitions)):
            partition = self._partitions.popleft()
            cached = partition.cached_bodies
            for seq in list(cached)[: (len(cached) + 1) // 2]:
                self.used_bytes -= cached.pop(seq).cached_bytes
            if cached:
                self._partitions.append(partition)
            else:
                partition.is_in_body_cache = False
            if self.used_bytes <= self.max_bytes:
                return

    # ---- prefetched bodies

    def prefetch_capacity(self) -> i64:
        """Return how many bytes can be read ahead without an eviction."""
        return max(0, self.max_bytes - self.max_bytes // 4 - self.prefetched_bytes)

    def put_prefetched(self, cursor: Cursor, seq: i64, message: Message) -> None:
        if not cursor.is_in_body_cache:
            cursor.is_in_body_cache = True
            cursor.prefetched_bodies = {}
            self._cursors.append(cursor)
        cursor.prefetched_bodies[int(seq)] = message
        message.cached_bytes = message.memory_bytes()
        self.used_bytes += message.cached_bytes
        self.prefetched_bytes += message.cached_bytes
        if self.prefetched_bytes > self.max_bytes - self.max_bytes // 4:
            self._evict_prefetched()
        if self.used_bytes > self.max_bytes:
            self._evict_published()

    def take_prefetched(self, cursor: Cursor, seq: object) -> Message | None:
        """Remove and return a prefetched body."""
        message = cursor.prefetched_bodies.get(seq)
        if message is not None:
            del cursor.prefetched_bodies[seq]
            self._subtract_prefetched(message)
        return message

    def forget_cursor(self, cursor: Cursor) -> None:
        """Drop the bodies of a cursor that has no consumer or a new position."""
        if cursor.is_in_body_cache:
            for message in cursor.prefetched_bodies.values():
                self._subtract_prefetched(message)
            cursor.prefetched_bodies = {}
            cursor.is_in_body_cache = False
            cursor.prefetched_to = 0
            self._cursors.remove(cursor)

    def _subtract_prefetched(self, message: Message) -> None:
        self.used_bytes -= message.cached_bytes
        self.prefetched_bytes -= message.cached_bytes

    def _evict_prefetched(self) -> None:
        for _ in range(len(self._cursors)):
            cursor = self._cursors.popleft()
            prefetched = cursor.prefetched_bodies
            for boxed_seq in list(prefetched)[len(prefetched) // 2 :]:
                self._subtract_prefetched(prefetched.pop(boxed_seq))
                seq: i64 = cast(int, boxed_seq)
                if seq < cursor.prefetched_to:
                    cursor.prefetched_to = seq
            if prefetched:
                self._cursors.append(cursor)
            else:
                cursor.is_in_body_cache = False
            if self.prefetched_bytes <= self.max_bytes - self.max_bytes // 4:
                return
