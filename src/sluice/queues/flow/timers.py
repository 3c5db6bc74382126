"""Timers: deadlines, retries, delays, expiry, retention and handover of partitions.

Each has a heap of times; the smallest of their first entries is the time of the next wake-up.
Outdated entries are recognized and ignored when they come up.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.queues.flow.removal import sweep_expired, sweep_retained
from sluice.queues.flow.settlement import fail_delivery, on_retry_due
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.group import Group
from sluice.queues.model.partition import Partition

if TYPE_CHECKING:
    from sluice.queues.engine import Engine
    from sluice.queues.model.queue import Queue

# Number of searches for settled messages within their retention.
SWEEPS_PER_RETENTION: Final = 60.0
# With fewer entries of deleted queues, removing them is not worth the time.
MIN_STALE_ENTRIES: Final = 1024


class Timers:
    def __init__(self) -> None:
        # Keeps equal times in insertion order, and avoids comparing the rest of an entry.
        self._tie_breaker: int = 0
        self._deadlines: list[tuple[float, int, Queue]] = []
        self._retries: list[tuple[float, int, Lease]] = []
        self._delays: list[tuple[float, int, Partition, int]] = []
        self._expiries: list[tuple[float, int, Partition]] = []
        self._retentions: list[tuple[float, int, Partition]] = []
        self._handovers: list[tuple[float, int, Group]] = []
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
        return first

    def run_due(self, engine: Engine) -> None:
        """Run all timers that are due."""
        now = engine.now
        while self._deadlines and self._deadlines[0][0] <= now:
            due_at, _, queue = heapq.heappop(self._deadlines)
            if queue.deadline_check_at == due_at:
                expire_leases(engine, queue)
        while self._retries and self._retries[0][0] <= now:
            due_at, _, lease = heapq.heappop(self._retries)
            on_retry_due(engine, lease, due_at)
        while self._delays and self._delays[0][0] <= now:
            _, _, partition, seq = heapq.heappop(self._delays)
            release_delayed(engine, partition, seq)
        while self._expiries and self._expiries[0][0] <= now:
            due_at, _, partition = heapq.heappop(self._expiries)
            if float(partition.expiry_check_at) == due_at:
                self._run_expiry(engine, partition)
        while self._retentions and self._retentions[0][0] <= now:
            due_at, _, partition = heapq.heappop(self._retentions)
            if partition.retention_check_at == due_at:
                self._run_retention(engine, partition)
        while self._handovers and self._handovers[0][0] <= now:
            due_at, _, group = heapq.heappop(self._handovers)
            if group.handover_at == due_at:
                group.handover_at = 0.0
                engine.schedule_sharing(group)

    # ---- scheduling

    def schedule_deadline_check(self, queue: Queue, due_at: float) -> None:
        """Schedule a check of a queue's deadlines: one entry per queue with leases."""
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

    def schedule_retention(self, partition: Partition, due_at: float) -> None:
        partition.retention_check_at = due_at
        self._tie_breaker += 1
        heapq.heappush(self._retentions, (due_at, self._tie_breaker, partition))

    def schedule_handover(self, group: Group, due_at: float) -> None:
        """Check at `due_at` whether a partition can move, unless an earlier check is scheduled."""
        if group.handover_at == 0.0 or due_at < group.handover_at:
            group.handover_at = due_at
            self._tie_breaker += 1
            heapq.heappush(self._handovers, (due_at, self._tie_breaker, group))

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

    # ---- sweeps

    def _run_expiry(self, engine: Engine, partition: Partition) -> None:
        partition.expiry_check_at = 0
        sweep_expired(engine, partition)
        soonest = partition.next_expiry()
        if soonest:
            self.schedule_expiry(partition, max(soonest, int(engine.now) + 1))

    def _run_retention(self, engine: Engine, partition: Partition) -> None:
        partition.retention_check_at = 0.0
        sweep_retained(engine, partition)
        retention = partition.queue.rules.retention
        if retention > 0.0 and partition.live_count:
            self.schedule_retention(
                partition, engine.now + max(1.0, retention / SWEEPS_PER_RETENTION)
            )

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


def expire_leases(engine: Engine, queue: Queue) -> None:
    """Fail deliveries whose deadline has passed, and mark inactive consumers as stalled."""
    queue.deadline_check_at = 0.0
    lease = queue.deadlines.first
    while lease is not None and lease.deadline <= engine.now:
        consumer = lease.consumer
        is_stalling = (
            consumer is not None
            and consumer.settled_at <= lease.lease_started_at
            and consumer.active_at <= lease.lease_started_at
        )
        if consumer is not None:
            consumer.on_lease_revoked(lease)
        lease.description = f"no answer within {queue.rules.delivery_timeout:g} s"
        fail_delivery(engine, lease, -1.0, False)
        if (
            is_stalling
            and consumer is not None
            and not consumer.is_stalled
            and consumer.group is not None
        ):
            consumer.is_stalled = True
            engine.rebalance(consumer.group)
        lease = queue.deadlines.first
    if lease is not None:
        engine.timers.schedule_deadline_check(queue, lease.deadline)


def release_delayed(engine: Engine, partition: Partition, seq: i64) -> None:
    """Make a delayed message available to all groups that have not settled it."""
    partition.delayed_seqs.discard(int(seq))
    if not partition.holds(seq):
        return
    for cursor in partition.cursors:
        cursor.admit_if_out_of_order(seq)
        if cursor.consumer is not None:
            engine.schedule_dispatch(cursor.consumer)
