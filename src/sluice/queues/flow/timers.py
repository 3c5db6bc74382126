"""What happens by itself: deadlines, retries, delays, expiry, and the end of retention. Each has a heap of times; one
look at their tops tells when the engine must be woken. Entries that events have overtaken are known when they come up.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.group import Group
from sluice.queues.model.partition import Partition
from sluice.queues.flow.removal import sweep_expired, sweep_retained
from sluice.queues.flow.settlement import fail, retry_due

if TYPE_CHECKING:
    from sluice.queues.engine import Engine
    from sluice.queues.model.queue import Queue

RETENTION_STEPS: Final = 60.0  # settled messages are looked through this often within their retention
RUBBISH: Final = 1024  # entries of deleted queues from which on it pays to look for them


class Timers:
    def __init__(self) -> None:
        self._ticket: int = (
            0  # keeps equal times in order of asking, and the rest of an entry out of comparisons
        )
        self._deadlines: list[tuple[float, int, Queue]] = []
        self._retries: list[tuple[float, int, Lease]] = []
        self._delayed: list[tuple[float, int, Partition, int]] = []
        self._expiries: list[tuple[float, int, Partition]] = []
        self._retentions: list[tuple[float, int, Partition]] = []
        self._handovers: list[tuple[float, int, Group]] = []
        self._rubbish: int = 0

    def first(self) -> float:
        """When to wake up; 0.0 for not at all."""
        first = 0.0
        if self._deadlines:
            first = self._deadlines[0][0]
        if self._retries and (first == 0.0 or self._retries[0][0] < first):
            first = self._retries[0][0]
        if self._delayed and (first == 0.0 or self._delayed[0][0] < first):
            first = self._delayed[0][0]
        if self._expiries and (first == 0.0 or self._expiries[0][0] < first):
            first = self._expiries[0][0]
        if self._retentions and (first == 0.0 or self._retentions[0][0] < first):
            first = self._retentions[0][0]
        if self._handovers and (first == 0.0 or self._handovers[0][0] < first):
            first = self._handovers[0][0]
        return first

    def run(self, engine: Engine) -> None:
        """Do what is due."""
        now = engine.now
        while self._deadlines and self._deadlines[0][0] <= now:
            when, _, queue = heapq.heappop(self._deadlines)
            if queue.watch_at == when:
                pass_deadlines(engine, queue)
        while self._retries and self._retries[0][0] <= now:
            when, _, lease = heapq.heappop(self._retries)
            retry_due(engine, lease, when)
        while self._delayed and self._delayed[0][0] <= now:
            _, _, partition, seq = heapq.heappop(self._delayed)
            delay_over(engine, partition, seq)
        while self._expiries and self._expiries[0][0] <= now:
            when, _, partition = heapq.heappop(self._expiries)
            if float(partition.expiry_set) == when:
                self._expire(engine, partition)
        while self._retentions and self._retentions[0][0] <= now:
            when, _, partition = heapq.heappop(self._retentions)
            if partition.retention_set == when:
                self._let_go(engine, partition)
        while self._handovers and self._handovers[0][0] <= now:
            when, _, group = heapq.heappop(self._handovers)
            if group.handover_at == when:
                group.handover_at = 0.0
                engine.share_later(group)

    # ---- asking to be woken

    def watch(self, queue: Queue, when: float) -> None:
        """One entry per queue with leases: when it comes up, the list of deadlines says whether it was the time."""
        queue.watch_at = when
        self._ticket += 1
        heapq.heappush(self._deadlines, (when, self._ticket, queue))

    def wait_for_retry(self, lease: Lease, when: float) -> None:
        self._ticket += 1
        heapq.heappush(self._retries, (when, self._ticket, lease))

    def wait_for_delay(self, partition: Partition, seq: i64, when: float) -> None:
        partition.delay(seq)
        self._ticket += 1
        heapq.heappush(self._delayed, (when, self._ticket, partition, int(seq)))

    def expect_expiry(self, partition: Partition, when: i64) -> None:
        """Look for expired messages at `when`, unless that is done earlier anyway."""
        if partition.expiry_set == 0 or when < partition.expiry_set:
            partition.expiry_set = when
            self._ticket += 1
            heapq.heappush(self._expiries, (float(when), self._ticket, partition))

    def expect_retention(self, partition: Partition, when: float) -> None:
        partition.retention_set = when
        self._ticket += 1
        heapq.heappush(self._retentions, (when, self._ticket, partition))

    def expect_handover(self, group: Group, when: float) -> None:
        """Look at `when`, unless that is done earlier anyway, whether a partition can move to a member with room."""
        if group.handover_at == 0.0 or when < group.handover_at:
            group.handover_at = when
            self._ticket += 1
            heapq.heappush(self._handovers, (when, self._ticket, group))

    def first_delay(self, partitions: list[Partition]) -> float:
        """When the first delayed message of these partitions is due; 0.0 when they have none. Looks through all."""
        first = 0.0
        for when, _, partition, seq in self._delayed:
            if (
                (first == 0.0 or when < first)
                and seq in partition.delayed
                and partition in partitions
                and partition.holds(seq)
            ):
                first = when
        return first

    # ---- looking through a partition

    def _expire(self, engine: Engine, partition: Partition) -> None:
        partition.expiry_set = 0
        sweep_expired(engine, partition)
        soonest = partition.next_expiry()
        if soonest:
            self.expect_expiry(partition, max(soonest, int(engine.now) + 1))

    def _let_go(self, engine: Engine, partition: Partition) -> None:
        partition.retention_set = 0.0
        sweep_retained(engine, partition)
        retention = partition.queue.rules.retention
        if retention > 0.0 and partition.live:
            self.expect_retention(partition, engine.now + max(1.0, retention / RETENTION_STEPS))

    # ---- deleted queues

    def forget(self, queue: Queue) -> None:
        """Entries of a deleted queue do nothing, but would keep it in memory for as long as its messages live."""
        self._rubbish += len(queue.partitions)
        for partition in queue.partitions:
            partition.expiry_set = 0
            partition.retention_set = 0.0
        if self._rubbish < RUBBISH or self._rubbish * 2 < len(self._expiries) + len(self._retentions):
            return
        self._rubbish = 0
        self._expiries = [one for one in self._expiries if float(one[2].expiry_set) == one[0]]
        self._retentions = [one for one in self._retentions if one[2].retention_set == one[0]]
        self._delayed = [one for one in self._delayed if one[3] in one[2].delayed]
        heapq.heapify(self._expiries)
        heapq.heapify(self._retentions)
        heapq.heapify(self._delayed)


def pass_deadlines(engine: Engine, queue: Queue) -> None:
    """Take back what was not settled in time. A consumer that has given no sign of life since is stalled."""
    queue.watch_at = 0.0
    lease = queue.deadlines.first
    while lease is not None and lease.deadline <= engine.now:
        consumer = lease.consumer
        stalls = (
            consumer is not None and consumer.settled_at <= lease.since and consumer.active_at <= lease.since
        )
        if consumer is not None:
            consumer.taken_away(lease)
        lease.description = f"no answer within {queue.rules.delivery_timeout:g} s"
        fail(engine, lease, -1.0, False)
        if stalls and consumer is not None and not consumer.stalled and consumer.group is not None:
            consumer.stalled = True
            engine.rebalance(consumer.group)
        lease = queue.deadlines.first
    if lease is not None:
        engine.timers.watch(queue, lease.deadline)


def delay_over(engine: Engine, partition: Partition, seq: i64) -> None:
    """The time of a delayed message has come, in every group that was not done with it before."""
    partition.delayed.discard(int(seq))
    if not partition.holds(seq):
        return
    for cursor in partition.cursors:
        cursor.come_early_if_special(seq)
        if cursor.consumer is not None:
            engine.feed(cursor.consumer)
