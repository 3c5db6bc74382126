"""Work for later: consumers to dispatch to when the turn ends, and timers.

`DispatchSchedule` also assigns partitions to members, because each change of members or capacity
ends in a dispatch. Neither class decides what is delivered.
"""

from __future__ import annotations

import heapq
from typing import Final

from mypy_extensions import i64

from sluice.queues.bodies import BodyCache
from sluice.queues.model import READY, Consumer, Cursor, EngineState, Group, Lease, Partition, Queue

# Number of searches for settled messages within their retention.
SWEEPS_PER_RETENTION: Final = 60.0
# With fewer entries of deleted queues, removing them is not worth the time.
MIN_STALE_ENTRIES: Final = 1024


class Timers:
    """Times of deadlines, retries, delays, expiry, retention, handover and admission.

    Each has a heap; the smallest of their first entries is the time of the next wake-up. Outdated
    entries are recognized and ignored when they come up. The `pop` methods return what is due.
    """

    def __init__(self, state: EngineState) -> None:
        self._state: EngineState = state
        # Keeps equal times in insertion order, and avoids comparing the rest of an entry.
        self._tie_breaker: int = 0
        self._deadlines: list[tuple[float, int, Queue]] = []
        self._retries: list[tuple[float, int, Lease]] = []
        self._delays: list[tuple[float, int, Partition, int]] = []
        self._expiries: list[tuple[float, int, Partition]] = []
        self._retentions: list[tuple[float, int, Partition]] = []
        self._handovers: list[tuple[float, int, Group]] = []
        self._admissions: list[tuple[float, int, Group]] = []
        self._stale_entries: int = 0

    def next_due(self) -> float:
        """Return the time of the next wake-up; 0.0 for none."""
        first = 0.0
        if self._deadlines:
            first = self._deadlines[0][0]
        if self._retries and (first == 0.0 or self._retries[0][0] < first):
            first = self._retries[0][0]
        if self._delays and (first == 0.0 or self._delays[0][0] < first):
            first = self._delays[0][0]
        if self._expiries and (first == 0.0 or self._expiries[0][0] < first):
            first = self._expiries[0][0]
        if self._retentions and (first == 0.0 or self._retentions[0][0] < first):
            first = self._retentions[0][0]
        if self._handovers and (first == 0.0 or self._handovers[0][0] < first):
            first = self._handovers[0][0]
        if self._admissions and (first == 0.0 or self._admissions[0][0] < first):
            first = self._admissions[0][0]
        return first

    # ---- due work

    def pop_deadline(self) -> Queue | None:
        """Return a queue with deliveries whose deadline has passed."""
        now = self._state.now
        while self._deadlines and self._deadlines[0][0] <= now:
            due_at, _, queue = heapq.heappop(self._deadlines)
            if queue.deadline_check_at == due_at:
                queue.deadline_check_at = 0.0
                return queue
        return None

    def pop_retry(self) -> Lease | None:
        """Return a failed delivery whose retry is due, or whose total timeout is over."""
        while self._retries and self._retries[0][0] <= self._state.now:
            due_at, _, lease = heapq.heappop(self._retries)
            if lease.state == READY or lease.retry_at == due_at:
                return lease
        return None

    def pop_delayed(self) -> tuple[Partition, int] | None:
        """Return partition and sequence of a message whose delay is over."""
        while self._delays and self._delays[0][0] <= self._state.now:
            due_at, _, partition, seq = heapq.heappop(self._delays)
            if seq not in partition.delayed_seqs:
                continue  # a command ended the delay
            if partition.rescheduled and partition.rescheduled.get(seq, -1) >= 0:
                if partition.rescheduled[seq] > int(due_at * 1000.0 + 0.5):
                    continue  # a command moved it, and added an entry
            partition.delayed_seqs.discard(seq)
            if partition.holds(seq):
                return partition, seq
        return None

    def pop_expiry(self) -> Partition | None:
        """Return a partition in which messages may have expired."""
        while self._expiries and self._expiries[0][0] <= self._state.now:
            due_at, _, partition = heapq.heappop(self._expiries)
            if float(partition.expiry_check_at) == due_at:
                partition.expiry_check_at = 0
                return partition
        return None

    def pop_retention(self) -> Partition | None:
        """Return a partition in which the retention of messages may be over."""
        while self._retentions and self._retentions[0][0] <= self._state.now:
            due_at, _, partition = heapq.heappop(self._retentions)
            if partition.retention_check_at == due_at:
                partition.retention_check_at = 0.0
                return partition
        return None

    def pop_handover(self) -> Group | None:
        """Return a group in which a partition may move to another member."""
        while self._handovers and self._handovers[0][0] <= self._state.now:
            due_at, _, group = heapq.heappop(self._handovers)
            if group.handover_at == due_at:
                group.handover_at = 0.0
                return group
        return None

    def pop_admission(self) -> Group | None:
        """Return a group whose breaker or rate limit may admit a delivery again."""
        while self._admissions and self._admissions[0][0] <= self._state.now:
            due_at, _, group = heapq.heappop(self._admissions)
            if group.admission_check_at == due_at:
                group.admission_check_at = 0.0
                return group
        return None

    # ---- scheduling

    def watch_deadline(self, lease: Lease) -> None:
        """Check the deadline of a new delivery, unless its queue is checked earlier."""
        queue = lease.cursor.group.queue
        if queue.deadline_check_at == 0.0:
            self.schedule_deadline_check(queue, lease.deadline)

    def schedule_deadline_check(self, queue: Queue, due_at: float) -> None:
        """Check the deadlines of a queue at `due_at`: one entry per queue with leases."""
        queue.deadline_check_at = due_at
        self._tie_breaker += 1
        heapq.heappush(self._deadlines, (due_at, self._tie_breaker, queue))

    def schedule_retry(self, lease: Lease, due_at: float) -> None:
        self._tie_breaker += 1
        heapq.heappush(self._retries, (due_at, self._tie_breaker, lease))

    def schedule_delayed(self, partition: Partition, seq: i64, due_at: float) -> None:
        partition.add_delayed(seq)
        self._tie_breaker += 1
        heapq.heappush(self._delays, (due_at, self._tie_breaker, partition, int(seq)))

    def schedule_expiry(self, partition: Partition, due_at: i64) -> None:
        """Search for expired messages at `due_at`, unless an earlier search is scheduled."""
        if partition.expiry_check_at == 0 or due_at < partition.expiry_check_at:
            partition.expiry_check_at = due_at
            self._tie_breaker += 1
            heapq.heappush(self._expiries, (float(due_at), self._tie_breaker, partition))

    def schedule_retention(self, partition: Partition) -> None:
        """Schedule a search for settled messages whose retention is over, unless there is one."""
        retention = partition.queue.rules.retention
        if partition.retention_check_at == 0.0 and retention > 0.0 and partition.live_count:
            due_at = self._state.now + max(1.0, retention / SWEEPS_PER_RETENTION)
            partition.retention_check_at = due_at
            self._tie_breaker += 1
            heapq.heappush(self._retentions, (due_at, self._tie_breaker, partition))

    def schedule_handover(self, group: Group, due_at: float) -> None:
        """Check at `due_at` whether a partition can move, unless an earlier check is scheduled."""
        if group.handover_at == 0.0 or due_at < group.handover_at:
            group.handover_at = due_at
            self._tie_breaker += 1
            heapq.heappush(self._handovers, (due_at, self._tie_breaker, group))

    def schedule_admission(self, group: Group, due_at: float) -> None:
        """Check at `due_at` whether a group may deliver, unless an earlier check is scheduled."""
        if group.admission_check_at == 0.0 or due_at < group.admission_check_at:
            group.admission_check_at = due_at
            self._tie_breaker += 1
            heapq.heappush(self._admissions, (due_at, self._tie_breaker, group))

    def next_delayed_due(self, partitions: list[Partition]) -> float:
        """Return when the first delayed message of these partitions is due, or 0.0. Linear."""
        first = 0.0
        for due_at, _, partition, seq in self._delays:
            if (
                (first == 0.0 or due_at < first)
                and seq in partition.delayed_seqs
                and partition in partitions
                and partition.holds(seq)
            ):
                first = due_at
        return first

    # ---- deleted queues

    def forget_queue(self, queue: Queue) -> None:
        """Drop the entries of a deleted queue, which would keep it in memory until they are due."""
        self._stale_entries += len(queue.partitions)
        for partition in queue.partitions:
            partition.expiry_check_at = 0
            partition.retention_check_at = 0.0
        if self._stale_entries < MIN_STALE_ENTRIES or self._stale_entries * 2 < len(
            self._expiries
        ) + len(self._retentions):
            return
        self._stale_entries = 0
        self._expiries = [
            entry for entry in self._expiries if float(entry[2].expiry_check_at) == entry[0]
        ]
        self._retentions = [
            entry for entry in self._retentions if entry[2].retention_check_at == entry[0]
        ]
        self._delays = [entry for entry in self._delays if entry[3] in entry[2].delayed_seqs]
        heapq.heapify(self._expiries)
        heapq.heapify(self._retentions)
        heapq.heapify(self._delays)


class DispatchSchedule:
    """Consumers and groups that may get messages when the turn ends."""

    def __init__(self, state: EngineState, timers: Timers, body_cache: BodyCache) -> None:
        self._state: EngineState = state
        self._timers: Timers = timers
        self._body_cache: BodyCache = body_cache
        self._consumers: list[Consumer] = []
        # Groups with messages that members with capacity may take over from other members.
        self._groups: list[Group] = []

    def add(self, consumer: Consumer) -> None:
        """Dispatch to a consumer that may have capacity again."""
        if not consumer.is_scheduled:
            consumer.is_scheduled = True
            self._consumers.append(consumer)

    def add_cursor(self, cursor: Cursor) -> None:
        """Dispatch to the consumer of a partition that may have messages for it."""
        if cursor.consumer is not None:
            self.add(cursor.consumer)

    def add_group(self, group: Group) -> None:
        """Share messages of members without capacity within `group`."""
        if not group.is_sharing_scheduled:
            group.is_sharing_scheduled = True
            self._groups.append(group)

    def has_work(self) -> bool:
        return len(self._consumers) > 0 or len(self._groups) > 0

    def take_consumers(self) -> list[Consumer]:
        consumers = self._consumers
        self._consumers = []
        return consumers

    def take_groups(self) -> list[Group]:
        if not self._groups:
            return self._groups
        groups = self._groups
        self._groups = []
        return groups

    # ---- changes that lead to a dispatch

    def rebalance(self, group: Group) -> None:
        """Assign the partitions to the members and dispatch to all of them.

        Messages for which one member had no capacity may now go to another one.
        """
        for cursor in group.rebalance():
            cursor.blocked_since = 0.0
            if cursor.consumer is None:
                self._body_cache.forget_cursor(cursor)
        for consumer in group.eligible_members():
            self.add(consumer)

    def update_admission(self, group: Group) -> None:
        """Decide again whether a group may deliver, and dispatch to its members if it may."""
        admission = group.admission
        group.update_admission(self._state.now)
        if admission.is_open:
            for consumer in group.eligible_members():
                self.add(consumer)
            if group.blocked_cursors:
                self.add_group(group)
        elif admission.reopens_at > 0.0:
            self._timers.schedule_admission(group, admission.reopens_at)

    def clear_stalled(self, group: Group, identity: str) -> None:
        """Mark a consumer as no longer stalled: it settled something, even if too late."""
        for consumer in group.consumers:
            if consumer.is_stalled and consumer.identity == identity:
                consumer.is_stalled = False
                consumer.active_at = self._state.now
                self.rebalance(group)
                return

    def on_delivery_ended(self, lease: Lease, consumer: Consumer | None, by_consumer: bool) -> None:
        """Decide about the group again after a lease was taken away from `consumer`.

        `by_consumer`: the consumer itself ended the delivery, so it is not stalled.
        """
        group = lease.cursor.group
        if not group.admission.is_open:
            # An ack or a failure has been reported before: any other end says nothing.
            group.admission.breaker.on_probe_lost(lease)
            self.update_admission(group)
        if consumer is not None and by_consumer:
            consumer.settled_at = self._state.now
            if consumer.is_stalled:
                consumer.is_stalled = False
                if consumer.group is not None:
                    self.rebalance(consumer.group)

    def revoke(self, lease: Lease) -> None:
        """Take a lease away from its consumer because its message or its group goes."""
        consumer = lease.consumer
        if consumer is not None:
            consumer.on_lease_revoked(lease)
        lease.cursor.end_delivery(lease)
        self.on_delivery_ended(lease, consumer, False)
        if consumer is not None:
            self.add(consumer)

    def on_settled(self, cursor: Cursor) -> None:
        """Dispatch messages that a settlement unblocked: the next of its key, or gated ones."""
        if cursor.low_watermark >= cursor.gate_watermark:
            self._check_gates(cursor)
        consumer = cursor.consumer
        if consumer is not None and not consumer.is_scheduled and cursor.has_more():
            consumer.is_scheduled = True
            self._consumers.append(consumer)

    def _check_gates(self, cursor: Cursor) -> None:
        """Open gates after a cursor's low watermark has reached a gate boundary."""
        cursor.update_gate_watermark()
        for other in cursor.group.cursors:
            other.open_gates()
            self.add_cursor(other)
        cursor.group.queue.drop_passed_gates()
