"""A consumer group: its cursors, one for each partition, and its members, who share the partitions between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.queues.flow.assignment import assign
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.partition import Partition
from sluice.queues.ports import Consumer

if TYPE_CHECKING:
    from sluice.queues.model.queue import Queue


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
        # Cursors with messages for which their consumer has no room; see dispatch.share_out.
        self.unserved: list[Cursor] = []
        self.is_sharing: bool = False  # is looked at when the turn ends
        self.is_saturated: bool = False  # no member had room at the last look, and none has had any since
        self.handover_at: float = 0.0  # when a partition may move to a member with room; 0.0: not set
        self._eligible: list[Consumer] = []  # members that may be given messages, the highest priority first
        self._next: i64 = 0  # which of them is asked next
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
        self._assign_helpers(active)
        self.is_saturated = False
        return moved

    def _assign_helpers(self, active: list[Consumer]) -> None:
        """Spread the active members without a partition over the cursors."""
        for cursor in self.cursors:
            if cursor.helpers:
                cursor.helpers = []
        if len(active) <= len(self.cursors):
            return
        number = 0
        for consumer in active:
            if not consumer.cursors:
                cursor = self.cursors[number % len(self.cursors)]
                cursor.helpers = [*cursor.helpers, consumer]
                number += 1

    def _active(self) -> list[Consumer]:
        """Return who gets partitions: one exclusive member alone, else those of the highest priority.

        Stalled members count only where all are stalled, and those that cannot be reached only where
        none can. Draining members never count.
        """
        taking = [consumer for consumer in self.consumers if consumer.prefetch > 0]
        able = [consumer for consumer in taking if not consumer.paused] or taking
        exclusive = [consumer for consumer in able if consumer.exclusive]
        if exclusive:
            self._eligible = exclusive[:1]
            return self._eligible
        able = [consumer for consumer in able if not consumer.stalled] or able
        self._eligible = sorted(able, key=_by_priority)
        if not able:
            return []
        highest = self._eligible[0].priority
        return [consumer for consumer in able if consumer.priority == highest]

    def shares_work(self) -> bool:
        """Return whether a message that one member has no room for could go to another one."""
        return len(self._eligible) > 1

    def eligible(self) -> list[Consumer]:
        """Return the members that may be given messages, the highest priority first."""
        return self._eligible

    def member_with_room(self) -> Consumer | None:
        """Return a member with room, of the highest priority that has one; those of one priority take turns."""
        members = self._eligible
        count: i64 = len(members)
        found: Consumer | None = None
        step: i64 = 0
        while step < count:
            nth: i64 = (self._next + step) % count
            member = members[nth]
            step += 1
            if (found is None or member.priority > found.priority) and member.has_room():
                found = member
                if member.priority == members[0].priority:
                    self._next = nth + 1
                    return member
        return found

    def hand_over(self, cursor: Cursor, consumer: Consumer) -> None:
        """Move the partition of `cursor` to `consumer`."""
        before = cursor.consumer
        if before is not None:
            before.cursors.remove(cursor)
        cursor.consumer = consumer
        cursor.helpers = []
        consumer.cursors.append(cursor)
        self._owners[cursor.partition.number] = int(consumer.joined)

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
        first = self.own_ids.get(name)
        if first is not None:
            lease.namesake = first
            first.namesake_before = lease
        self.own_ids[name] = lease

    def drop_name(self, lease: Lease) -> None:
        """Take a delivery out of the list of those with its id, without a walk: a publisher may use one id often."""
        name = lease.own_id
        if not name:
            return
        before = lease.namesake_before
        after = lease.namesake
        if after is not None:
            after.namesake_before = before
        if before is not None:
            before.namesake = after
        elif after is not None:
            self.own_ids[name] = after
        else:
            del self.own_ids[name]
        lease.own_id = b""
        lease.namesake = None
        lease.namesake_before = None


def _by_priority(consumer: Consumer) -> int:
    return -int(consumer.priority)
