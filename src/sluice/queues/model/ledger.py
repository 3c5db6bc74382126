"""The ledger: enqueued is the sum of waiting, delivered, retrying and the outcomes.

The outcomes are acked, dead, expired, purged and cancelled. The sum holds for each queue and group.
The counters are kept up to date as messages pass; `verify` counts everything again one by one and
reports differences. `sluice verify` runs it, and the simulator after each step.
"""

from __future__ import annotations

from collections.abc import Iterator

from mypy_extensions import i64

from sluice.queues.log import ACKED, CANCELLED, DEAD, EXPIRED, PURGED
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, READY
from sluice.queues.model.group import Group
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue


class Ledger:
    """Counters of one group: the messages it had to settle, and their outcomes."""

    def __init__(self) -> None:
        self.enqueued: int = 0
        self.waiting: int = 0
        self.delivered: int = 0
        self.retrying: int = 0
        self.acked: int = 0
        self.dead: int = 0
        self.expired: int = 0
        self.purged: int = 0
        self.cancelled: int = 0

    def add_cursor(self, cursor: Cursor) -> None:
        self.enqueued += int(cursor.count_enqueued())
        self.waiting += int(cursor.count_waiting())
        self.delivered += int(cursor.in_flight)
        self.retrying += int(cursor.count_retrying())
        self.acked += cursor.outcome_counts[ACKED]
        self.dead += cursor.outcome_counts[DEAD]
        self.expired += cursor.outcome_counts[EXPIRED]
        self.purged += cursor.outcome_counts[PURGED]
        self.cancelled += cursor.outcome_counts[CANCELLED]

    def __repr__(self) -> str:
        return (
            f"Ledger(enqueued={self.enqueued}, waiting={self.waiting}, delivered={self.delivered},"
            f" retrying={self.retrying}, acked={self.acked}, dead={self.dead},"
            f" expired={self.expired}, purged={self.purged}, cancelled={self.cancelled})"
        )

    def balance(self) -> int:
        """Return the number of unaccounted messages: 0 if the ledger adds up."""
        settled = self.acked + self.dead + self.expired + self.purged + self.cancelled
        return self.enqueued - self.waiting - self.delivered - self.retrying - settled


def build_ledger(queue: Queue, group: Group) -> Ledger:
    counters = Ledger()
    for cursor in group.cursors:
        counters.add_cursor(cursor)
    return counters


def verify(queues: dict[str, Queue]) -> list[str]:
    """Return a sentence for each counter that does not add up."""
    found: list[str] = []
    for queue in queues.values():
        found.extend(verify_queue(queue))
        for group in queue.groups.values():
            found.extend(verify_group(group))
    return found


def verify_queue(queue: Queue) -> list[str]:
    """Check the messages of one queue, independent of its groups' counters."""
    found = list(_check_queue(queue))
    for partition in queue.partitions:
        found.extend(_check_partition(partition))
    return found


def verify_group(group: Group) -> list[str]:
    return list(_check_group(group.queue, group))


def _check_queue(queue: Queue) -> Iterator[str]:
    depth: i64 = 0
    size: i64 = 0
    for partition in queue.partitions:
        seq = partition.first_live(0)
        while seq < partition.next_seq:
            block = partition.find_block(seq)
            if block is not None:
                size += i64(block.size[block.index_of(seq)])
            if partition.is_in_depth(seq):
                depth += 1
            seq = partition.first_live(seq + 1)
    if depth != queue.depth:
        yield f"queue {queue.name}: depth {queue.depth} in the ledger, {depth} counted"
    if size != queue.bytes:
        yield f"queue {queue.name}: bytes {queue.bytes} in the ledger, {size} counted"
    members = sum(len(group.consumers) for group in queue.groups.values())
    if members != queue.consumer_count:
        yield (
            f"queue {queue.name}: consumers {queue.consumer_count} in the ledger, {members} counted"
        )


def _check_partition(partition: Partition) -> Iterator[str]:
    name = f"queue {partition.queue.name}, partition {partition.number}"
    live_count: i64 = 0
    seq = partition.first_live(0)
    while seq < partition.next_seq:
        live_count += 1
        pending_groups: i64 = 0
        for cursor in partition.cursors:
            if partition.is_for_group(seq, cursor.group.gid) and not cursor.is_settled(seq):
                pending_groups += 1
        if pending_groups != partition.pending_groups(seq):
            yield (
                f"{name}, message {seq}: groups to settle it "
                f"{partition.pending_groups(seq)} in the ledger, {pending_groups} counted"
            )
        seq = partition.first_live(seq + 1)
    if live_count != partition.live_count:
        yield f"{name}: messages {partition.live_count} in the ledger, {live_count} counted"


def _check_group(queue: Queue, group: Group) -> Iterator[str]:
    counters = build_ledger(queue, group)
    if counters.balance():
        yield (
            f"queue {queue.name}, group {group.name}: messages unaccounted for "
            f"{counters.balance()} "
            f"of {counters.enqueued}"
        )
    for cursor in group.cursors:
        yield from _check_cursor(cursor, f"queue {queue.name}, group {group.name}")


def count_unsettled(cursor: Cursor) -> i64:
    """Count the unsettled messages of a group in one partition, one by one."""
    count: i64 = 0
    partition = cursor.partition
    gid = cursor.group.gid
    seq = partition.first_live(cursor.low_watermark)
    while seq < partition.next_seq:
        if not cursor.is_settled(seq) and partition.is_for_group(seq, gid):
            count += 1
        seq = partition.first_live(seq + 1)
    return count


def _count_active_by_key(cursor: Cursor) -> dict[object, int]:
    """Count the active messages by key, one by one."""
    found: dict[object, int] = {}
    for key in cursor.ready_key_hashes():
        if key:
            found[key] = found.get(key, 0) + 1
    for lease in cursor.leases.values():
        if lease.state != READY and lease.key_hash:
            found[int(lease.key_hash)] = found.get(int(lease.key_hash), 0) + 1
    return found


def _check_cursor(cursor: Cursor, name: str) -> Iterator[str]:
    partition = cursor.partition
    name = f"{name}, partition {partition.number}"
    unsettled = count_unsettled(cursor)
    if unsettled != cursor.count_waiting() + len(cursor.leases):
        yield (
            f"{name}: waiting {cursor.count_waiting()} and delivered {len(cursor.leases)} "
            "in the ledger, "
            f"not settled {unsettled} counted"
        )
    in_flight: i64 = 0
    for seq, lease in cursor.leases.items():
        if lease.state == LEASED:
            in_flight += 1
        if not partition.holds(seq) or cursor.is_settled(seq) or lease.seq != seq:
            yield f"{name}: message {seq} has a delivery and is settled"
    if in_flight != cursor.in_flight:
        yield f"{name}: deliveries {cursor.in_flight} in the ledger, {in_flight} counted"
    if cursor.active_by_key() != _count_active_by_key(cursor):
        yield f"{name}: the active keys are not those of the active messages"
    if cursor.low_watermark < partition.next_seq and not partition.holds(cursor.low_watermark):
        yield f"{name}: the low watermark is at message {cursor.low_watermark}, which is deleted"
    for seq in cursor.settled_seqs:
        if not partition.holds(seq):
            yield f"{name}: message {seq} is deleted and still listed as settled"
