"""A consumer group: its cursors, one for each partition, and its members, who share the partitions between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.queues.assignment import assign
from sluice.queues.cursor import Cursor
from sluice.queues.delivery import Lease
from sluice.queues.partition import Partition
from sluice.queues.ports import Consumer

if TYPE_CHECKING:
    from sluice.queues.queue import Queue


class Group:
    def __init__(self, queue: Queue, gid: i64, name: str) -> None:
        self.queue: Queue = queue
        self.gid: i64 = gid
        self.name: str = name
        self.cursors: list[Cursor] = []
        self.consumers: list[Consumer] = []
        self.own_ids: dict[bytes, Lease] = {}  # deliveries that go by their publisher's id
        self.delivered: i64 = 0
        self.redelivered: i64 = 0
        self.nacked: i64 = 0
        self._owners: list[int] = []

    def rebalance(self) -> list[Cursor]:
        """Share the partitions out among the active members; the cursors that have a new one."""
        active = self._active()
        by_number = {int(consumer.joined): consumer for consumer in active}
        owners = assign(len(self.cursors), list(by_number), self._owners)
        moved: list[Cursor] = []
        for consumer in self.consumers:
            consumer.cursors = []
        for cursor, owner in zip(self.cursors, owners, strict=True):
            holder = by_number.get(owner)
            if cursor.consumer is not holder:
                cursor.consumer = holder
                moved.append(cursor)
            if holder is not None:
                holder.cursors.append(cursor)
        self._owners = owners
        return moved

    def _active(self) -> list[Consumer]:
        """Who gets partitions: one exclusive member alone, else those of the highest priority that are not stalled."""
        exclusive = [consumer for consumer in self.consumers if consumer.exclusive]
        if exclusive:
            return exclusive[:1]
        able = [consumer for consumer in self.consumers if not consumer.stalled] or self.consumers
        if not able:
            return []
        highest = max(consumer.priority for consumer in able)
        return [consumer for consumer in able if consumer.priority == highest]

    def behind_gate(self, partition: Partition, key: i64) -> bool:
        """Whether messages of `key` from before the partitions were added are not all settled yet."""
        queue = self.queue
        old: i64 = (key & 0xFFFF_FFFF) % queue.gate_size
        return old != partition.number and self.cursors[old].floor < queue.gate_floors[old]

    def out(self) -> i64:
        count: i64 = 0
        for cursor in self.cursors:
            count += cursor.out
        return count
