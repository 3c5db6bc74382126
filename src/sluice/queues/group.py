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

    # ---- members

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
        """Who gets partitions: one exclusive member alone, else those of the highest priority that are not stalled.
        Whoever cannot be reached counts only where nobody can."""
        able = [consumer for consumer in self.consumers if not consumer.paused] or self.consumers
        exclusive = [consumer for consumer in able if consumer.exclusive]
        if exclusive:
            return exclusive[:1]
        able = [consumer for consumer in able if not consumer.stalled] or able
        if not able:
            return []
        highest = max(consumer.priority for consumer in able)
        return [consumer for consumer in able if consumer.priority == highest]

    def out(self) -> i64:
        count: i64 = 0
        for cursor in self.cursors:
            count += cursor.out
        return count

    # ---- order across a change of the number of partitions

    def is_behind_gate(self, partition: Partition, seq: i64, key: i64) -> bool:
        """Whether messages of `key` from before a gate, in the partition that had it then, are not all settled."""
        number = partition.number
        for gate in self.queue.gates:
            size: i64 = len(gate.floors)
            if number < size and seq < gate.floors[number]:
                continue  # it is older than this gate itself
            old: i64 = key % size
            if old != number and self.cursors[old].floor < gate.floors[old]:
                return True
        return False

    # ---- deliveries by their publisher's id

    def add_name(self, lease: Lease, name: bytes) -> None:
        if lease.own_id:
            return
        lease.own_id = name
        lease.namesake = self.own_ids.get(name)
        self.own_ids[name] = lease

    def drop_name(self, lease: Lease) -> None:
        name = lease.own_id
        if not name:
            return
        first = self.own_ids.get(name)
        if first is lease:
            if lease.namesake is None:
                del self.own_ids[name]
            else:
                self.own_ids[name] = lease.namesake
        else:
            while first is not None:
                if first.namesake is lease:
                    first.namesake = lease.namesake
                    break
                first = first.namesake
        lease.own_id = b""
        lease.namesake = None
