"""A consumer group: its cursors, one per partition, and its members, which share the partitions.

A member is a `Consumer`; the broker derives from it. The group assigns partitions and keeps the
indexes of leases; `flow/delivery/dispatch` decides what is delivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64, mypyc_attr

from sluice.queues.log import ACKED
from sluice.queues.model.admission import Admission
from sluice.queues.model.containers.held_key import NO_HELD_KEYS, HeldKey
from sluice.queues.model.cursor import SEQUENCE_MASK, Cursor
from sluice.queues.model.delivery_lease import LEASED, Lease
from sluice.queues.model.partition import Partition
from sluice.queues.ports import ConnectionState

if TYPE_CHECKING:
    from sluice.queues.model.queue import PartitionGate, Queue


@mypyc_attr(allow_interpreted_subclasses=True)
class Consumer:
    """A member of a group. It takes deliveries while it has capacity."""

    def __init__(self, client: str, prefetch: i64, priority: i64, is_exclusive: bool) -> None:
        self.client: str = client
        self.identity: str = client  # what its deliveries are bound to: see `names.make_identity`
        self.prefetch: i64 = prefetch
        self.priority: i64 = priority
        self.is_exclusive: bool = is_exclusive
        self.group: Group | None = None
        self.cursors: list[Cursor] = []  # the partitions it serves
        self.in_flight: i64 = 0  # deliveries it has not settled
        self.join_number: i64 = 0  # running number, in the order of joining
        self.is_paused: bool = False  # a member whose session has no connection
        self.is_stalled: bool = False  # missed a deadline and has settled nothing since
        self.settled_at: float = 0.0  # when it last settled a delivery; 0.0: never
        # When it last joined, reconnected, extended a delivery or tried to settle one too late.
        self.active_at: float = 0.0
        self.is_scheduled: bool = False  # dispatch at the end of the turn
        self.next_cursor_index: i64 = 0  # the partition that is served next
        # Since when it has had no capacity for messages of its partitions; 0.0: it has capacity.
        self.full_since: float = 0.0
        # Partitions were moved away because it had no capacity for long.
        self.was_offloaded: bool = False
        # The common parts of its delivery tokens, set when it joins: see `delivery_tokens`.
        self.token_member_hash_high: i64 = 0
        self.token_member_hash_low: i64 = 0
        self.token_run_text: bytes = b""

    def has_capacity(self) -> bool:
        """Return whether the consumer accepts one more delivery.

        Subclasses add the state of the connection. A consumer with prefetch 0 is draining: it gets
        no new deliveries and keeps its leases until they are settled.
        """
        return self.in_flight < self.prefetch

    def next_blocked_consumer(self) -> Consumer | None:
        """Return another consumer that is blocked on a shared limit, if the limit allows more now.

        Called after dispatch to this consumer.
        """
        return None

    def deliver(self, lease: Lease) -> None:
        """Send a message. The consumer holds the lease until it settles or the deadline passes."""

    def on_lease_revoked(self, lease: Lease) -> None:
        """Called when the deadline has passed or a newer message replaces this one.

        Settlements of the lease no longer count.
        """

    def describe_connection(self) -> ConnectionState | None:
        """Return the state of the connection, for display; None if there is none to speak of."""
        return None


class Group:
    def __init__(self, queue: Queue, gid: i64, name: str) -> None:
        self.queue: Queue = queue
        self.gid: i64 = gid
        self.name: str = name
        self.cursors: list[Cursor] = []
        self.consumers: list[Consumer] = []
        # Leases by the message id of the publisher.
        self.leases_by_message_id: dict[bytes, Lease] = {}
        self.held_keys: dict[int, HeldKey] = NO_HELD_KEYS  # by key hash
        self.used_at: float = 0.0  # when it last had consumers, as `expire_groups` has seen
        self.in_flight: i64 = 0  # leased right now
        self.admission: Admission = Admission(queue.pause)
        self.admission_check_at: float = 0.0  # when it may deliver again; 0.0: not scheduled
        self.delivered: i64 = 0
        self.redelivered: i64 = 0
        self.nacked: i64 = 0
        # Cursors with messages for which their consumer has no capacity; see
        # `dispatch._redistribute_blocked`.
        self.blocked_cursors: list[Cursor] = []
        self.is_redistribution_scheduled: bool = False  # at the end of the turn
        # No member had capacity at the last check, and none has reported any since.
        self.is_saturated: bool = False
        # When a partition may move to a member with capacity; 0.0: not set.
        self.partition_move_at: float = 0.0
        # Members that may get messages, highest priority first.
        self._eligible: list[Consumer] = []
        self._next_member: i64 = 0  # which of them is next
        self._assignment: list[int] = []
        self.update_admission(0.0)

    # ---- members

    def add_member(self, consumer: Consumer) -> None:
        consumer.group = self
        self.consumers.append(consumer)
        self.queue.consumer_count += 1

    def remove_member(self, consumer: Consumer) -> None:
        """Remove a member; its partitions have no consumer until `rebalance`."""
        consumer.group = None
        consumer.cursors = []
        self.consumers.remove(consumer)
        self.queue.consumer_count -= 1

    def rebalance(self) -> list[Cursor]:
        """Assign the partitions to active members; return cursors with a new consumer."""
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
        """Return the members that get partitions: one exclusive member, or the highest priority.

        Stalled members count only if all are stalled, and unreachable members only if none is
        reachable. Draining members never count.
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

    def can_redistribute(self) -> bool:
        """Return whether a message could go to another member if one has no capacity."""
        return len(self._eligible) > 1

    def eligible_members(self) -> list[Consumer]:
        """Return the members that may get messages, highest priority first."""
        return self._eligible

    def next_member_with_capacity(self) -> Consumer | None:
        """Return a member with capacity, of the highest priority; equal members take turns."""
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

    def count_delayed(self) -> i64:
        """Return how many waiting messages are not due yet."""
        count: i64 = 0
        for cursor in self.cursors:
            delayed: i64 = len(cursor.partition.delayed_seqs)
            if delayed:
                count += min(delayed, cursor.count_waiting())
        return count

    def oldest_due_ms(self) -> i64:
        """Return when the oldest unsettled message was due, in milliseconds since 1970; 0: none.

        Of each partition only the first message that is due counts, and only if few messages with
        a delay are before it.
        """
        oldest: i64 = 0
        for cursor in self.cursors:
            due = cursor.oldest_due_ms()
            if due and (oldest == 0 or due < oldest):
                oldest = due
        return oldest

    def count_acked(self) -> i64:
        count: i64 = 0
        for cursor in self.cursors:
            count += i64(cursor.outcome_counts[ACKED])
        return count

    def update_admission(self, now: float) -> None:
        """Decide again whether the group may deliver: its policies or the time have changed."""
        keys = self.admission.keys
        if keys.differs(self.queue.rules):
            keys.change(self.queue.rules, now)
            if keys.is_active:
                for cursor in self.cursors:
                    for lease in cursor.leases.values():
                        if lease.state == LEASED:
                            lease.limited_key = cursor.partition.key_hash(lease.seq)
                            keys.count(lease.limited_key)
        keys.open_due(now)
        self.admission.update(self.queue.rules, self.in_flight, now)

    def make_released_ready(self) -> list[Cursor]:
        """Make messages ready that no limit of their key holds; return their cursors."""
        keys = self.admission.keys
        cursors: list[Cursor] = []
        released = keys.take_released()
        while released:
            for rank, number in released:
                cursor = self.cursors[number]
                if cursor.end_hold(rank):
                    cursors.append(cursor)
                else:
                    keys.on_withdrawn(cursor.location(i64(rank) & SEQUENCE_MASK))
            released = keys.take_released()
        return cursors

    def count_redeliveries_in_flight(self) -> i64:
        count: i64 = 0
        for cursor in self.cursors:
            for lease in cursor.leases.values():
                if lease.state == LEASED and lease.failures:
                    count += 1
        return count

    # ---- ordering across a change of the partition count

    def is_behind_gate(self, partition: Partition, seq: i64, key_hash: i64) -> bool:
        """Return whether older messages of the key before a gate are unsettled."""
        number = partition.number
        for gate in self.queue.partition_gates:
            old_count: i64 = len(gate.boundary_seqs)
            if number < old_count and seq < gate.boundary_seqs[number]:
                continue  # older than this gate
            if self.queue.rules.choose_partition is not None:
                # The strategy needs the key, which is not in memory: wait for all old partitions.
                for old_number in range(old_count):
                    if old_number != number and self._is_gate_closed(gate, old_number):
                        return True
                continue
            number_by_hash: i64 = key_hash % old_count
            if number_by_hash != number and self._is_gate_closed(gate, number_by_hash):
                return True
        return False

    def _is_gate_closed(self, gate: PartitionGate, number: i64) -> bool:
        return self.cursors[number].low_watermark < gate.boundary_seqs[number]

    # ---- keys that are held for repair

    def hold_key(self, held: HeldKey) -> None:
        """Deliver nothing more of a key, in no partition: the key may have moved to another one."""
        if not self.held_keys:
            self.held_keys = {}
        self.held_keys[int(held.key_hash)] = held
        for cursor in self.cursors:
            cursor.hold_key(held.key_hash)

    def release_key(self, held: HeldKey) -> None:
        if self.held_keys.get(int(held.key_hash)) is held:
            del self.held_keys[int(held.key_hash)]
            for cursor in self.cursors:
                cursor.release_key(held.key_hash)

    def is_repaired(self, partition: Partition, seq: i64, key_hash: i64) -> bool:
        """Return whether its key waits for the message, a dead letter that was redriven."""
        held = self.held_keys.get(int(key_hash))
        return held is not None and (int(partition.pid), int(seq)) in held.repaired

    # ---- leases by the publisher's message id

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
        """Remove a lease from the chain of its id in constant time: an id may be used often."""
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


def assign_partitions(partition_count: int, consumers: list[int], previous: list[int]) -> list[int]:
    """Return the consumer of each partition, -1 for none.

    Numbers differ by at most one, and a partition moves only if even numbers require it.
    `consumers` are distinct numbers in order of preference: if the partitions do not divide evenly,
    the first ones get one more. `previous` is the last result.
    """
    if not consumers:
        return [-1] * partition_count
    base_count, remainder = divmod(partition_count, len(consumers))
    # Consumers with more than the base count keep one more: that moves the fewest partitions.
    held = dict.fromkeys(consumers, 0)
    for consumer in previous:
        if consumer in held:
            held[consumer] += 1
    by_held = sorted(consumers, key=lambda consumer: -min(held[consumer], base_count + 1))
    missing = {
        consumer: base_count + (1 if nth < remainder else 0) for nth, consumer in enumerate(by_held)
    }
    assigned = [-1] * partition_count
    for number, consumer in enumerate(previous[:partition_count]):
        if missing.get(consumer, 0) > 0:
            assigned[number] = consumer
            missing[consumer] -= 1
    open_slots = [consumer for consumer in consumers for _ in range(missing[consumer])]
    open_slots.reverse()
    for number in range(partition_count):
        if assigned[number] < 0:
            assigned[number] = open_slots.pop()
    return assigned
