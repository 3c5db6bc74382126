"""A consumer group: its cursors, one for each partition, and its members, who share the partitions between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.queues.flow.assignment import assign_partitions
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
        self.leases_by_message_id: dict[
            bytes, Lease
        ] = {}  # deliveries that go by their publisher's id
        self.delivered: i64 = 0
        self.redelivered: i64 = 0
        self.nacked: i64 = 0
        # Cursors with messages for which their consumer has no room; see dispatch.share_out.
        self.blocked_cursors: list[Cursor] = []
        self.is_sharing_scheduled: bool = False  # is looked at when the turn ends
        self.is_saturated: bool = (
            False  # no member had room at the last look, and none has had any since
        )
        self.handover_at: float = (
            0.0  # when a partition may move to a member with room; 0.0: not set
        )
        self._eligible: list[
            Consumer
        ] = []  # members that may be given messages, the highest priority first
        self._next_member: i64 = 0  # which of them is asked next
        self._assignment: list[int] = []

    # ---- members

    def rebalance(self) -> list[Cursor]:
        """Share the partitions out among the active members; the cursors that have a new one."""
        active = self._active_members()
        by_join_number = {int(consumer.join_number): consumer for consumer in active}
        assignment = assign_partitions(len(self.cursors), list(by_join_number), self._assignment)
        moved: list[Cursor] = []
        for consumer in self.consumers:
            consumer.cursors = []
        for cursor, join_number in zip(self.cursors, assignment, strict=True):
            holder = by_join_number.get(join_number)
            if cursor.consumer is not holder:
                cursor.consumer = holder
                moved.append(cursor)
            if holder is not None:
                holder.cursors.append(cursor)
        self._assignment = assignment
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
        helper_count = 0
        for consumer in active:
            if not consumer.cursors:
                cursor = self.cursors[helper_count % len(self.cursors)]
                cursor.helpers = [*cursor.helpers, consumer]
                helper_count += 1

    def _active_members(self) -> list[Consumer]:
        """Return who gets partitions: one exclusive member alone, else those of the highest priority.

        Stalled members count only where all are stalled, and those that cannot be reached only where
        none can. Draining members never count.
        """
        prefetching = [consumer for consumer in self.consumers if consumer.prefetch > 0]
        reachable = [consumer for consumer in prefetching if not consumer.is_paused] or prefetching
        exclusive = [consumer for consumer in reachable if consumer.is_exclusive]
        if exclusive:
            self._eligible = exclusive[:1]
            return self._eligible
        reachable = [consumer for consumer in reachable if not consumer.is_stalled] or reachable
        self._eligible = sorted(reachable, key=_by_priority)
        if not reachable:
            return []
        highest = self._eligible[0].priority
        return [consumer for consumer in reachable if consumer.priority == highest]

    def can_share_work(self) -> bool:
        """Return whether a message that one member has no room for could go to another one."""
        return len(self._eligible) > 1

    def eligible_members(self) -> list[Consumer]:
        """Return the members that may be given messages, the highest priority first."""
        return self._eligible

    def next_member_with_capacity(self) -> Consumer | None:
        """Return a member with room, of the highest priority that has one; those of one priority take turns."""
        members = self._eligible
        count: i64 = len(members)
        found: Consumer | None = None
        step: i64 = 0
        while step < count:
            nth: i64 = (self._next_member + step) % count
            member = members[nth]
            step += 1
            if (found is None or member.priority > found.priority) and member.has_capacity():
                found = member
                if member.priority == members[0].priority:
                    self._next_member = nth + 1
                    return member
        return found

    def move_partition(self, cursor: Cursor, consumer: Consumer) -> None:
        """Move the partition of `cursor` to `consumer`."""
        previous = cursor.consumer
        if previous is not None:
            previous.cursors.remove(cursor)
        cursor.consumer = consumer
        cursor.helpers = []
        consumer.cursors.append(cursor)
        self._assignment[cursor.partition.number] = int(consumer.join_number)

    def count_in_flight(self) -> i64:
        count: i64 = 0
        for cursor in self.cursors:
            count += cursor.in_flight
        return count

    # ---- order across a change of the number of partitions

    def is_behind_gate(self, partition: Partition, seq: i64, key_hash: i64) -> bool:
        """Whether messages of `key` from before a gate, in the partition that had it then, are not all settled."""
        number = partition.number
        for gate in self.queue.partition_gates:
            old_count: i64 = len(gate.boundary_seqs)
            if number < old_count and seq < gate.boundary_seqs[number]:
                continue  # it is older than this gate itself
            old_number: i64 = key_hash % old_count
            if (
                old_number != number
                and self.cursors[old_number].low_watermark < gate.boundary_seqs[old_number]
            ):
                return True
        return False

    # ---- deliveries by their publisher's id

    def index_by_message_id(self, lease: Lease, message_id: bytes) -> None:
        if lease.publisher_message_id:
            return
        lease.publisher_message_id = message_id
        first = self.leases_by_message_id.get(message_id)
        if first is not None:
            lease.next_same_id = first
            first.previous_same_id = lease
        self.leases_by_message_id[message_id] = lease

    def unindex_by_message_id(self, lease: Lease) -> None:
        """Take a delivery out of the list of those with its id, without a walk: a publisher may use one id often."""
        message_id = lease.publisher_message_id
        if not message_id:
            return
        previous = lease.previous_same_id
        following = lease.next_same_id
        if following is not None:
            following.previous_same_id = previous
        if previous is not None:
            previous.next_same_id = following
        elif following is not None:
            self.leases_by_message_id[message_id] = following
        else:
            del self.leases_by_message_id[message_id]
        lease.publisher_message_id = b""
        lease.next_same_id = None
        lease.previous_same_id = None


def _by_priority(consumer: Consumer) -> int:
    return -int(consumer.priority)
