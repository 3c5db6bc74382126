"""Timers of the engine: when deadlines, retries, delays, expiry and retention are due.

They decide nothing: what is due is popped by `Engine.tick`, which calls the part that acts.
"""

from __future__ import annotations

import heapq
from typing import Final

from mypy_extensions import i64

from sluice.queues.model import READY, EngineState, Group, HeldKey, Lease, Partition, Queue

# Number of searches for settled messages within their retention.
SWEEPS_PER_RETENTION: Final = 60.0
# With fewer entries of deleted queues, removing them is not worth the time.
MIN_STALE_ENTRIES: Final = 1024


class Timers:
    """Times of deadlines, retries, delays, expiry, retention, partition moves and admission.

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
        self._partition_moves: list[tuple[float, int, Group]] = []
        self._admissions: list[tuple[float, int, Group]] = []
        self._holds: list[tuple[float, int, HeldKey]] = []
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
        if self._partition_moves and (first == 0.0 or self._partition_moves[0][0] < first):
            first = self._partition_moves[0][0]
        if self._admissions and (first == 0.0 or self._admissions[0][0] < first):
            first = self._admissions[0][0]
        if self._holds and (first == 0.0 or self._holds[0][0] < first):
            first = self._holds[0][0]
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

    def pop_partition_move(self) -> Group | None:
        """Return a group in which a partition may move to another member."""
        while self._partition_moves and self._partition_moves[0][0] <= self._state.now:
            due_at, _, group = heapq.heappop(self._partition_moves)
            if group.partition_move_at == due_at:
                group.partition_move_at = 0.0
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

    def pop_held_key(self) -> HeldKey | None:
        """Return a held key whose timeout is over, unless it was changed."""
        while self._holds and self._holds[0][0] <= self._state.now:
            due_at, _, held = heapq.heappop(self._holds)
            group = self._state.groups.get(int(held.gid))
            if (
                group is not None
                and group.held_keys.get(int(held.key_hash)) is held
                and due_at == held.release_at(group.queue.rules.hold_timeout)
            ):
                return held
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

    def schedule_partition_move(self, group: Group, due_at: float) -> None:
        """Check at `due_at` whether a partition can move, unless an earlier check is scheduled."""
        if group.partition_move_at == 0.0 or due_at < group.partition_move_at:
            group.partition_move_at = due_at
            self._tie_breaker += 1
            heapq.heappush(self._partition_moves, (due_at, self._tie_breaker, group))

    def schedule_admission(self, group: Group, due_at: float) -> None:
        """Check at `due_at` whether a group may deliver, unless an earlier check is scheduled."""
        if group.admission_check_at == 0.0 or due_at < group.admission_check_at:
            group.admission_check_at = due_at
            self._tie_breaker += 1
            heapq.heappush(self._admissions, (due_at, self._tie_breaker, group))

    def schedule_release(self, group: Group, held: HeldKey) -> None:
        """Release a held key when its timeout is over, if it has one."""
        due_at = held.release_at(group.queue.rules.hold_timeout)
        if due_at > 0.0:
            self._tie_breaker += 1
            heapq.heappush(self._holds, (due_at, self._tie_breaker, held))

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
