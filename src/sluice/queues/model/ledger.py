"""The books: enqueued = waiting + delivered + retrying + acked + dead + expired + purged, per queue and group.

The numbers are kept as messages pass; `verify` counts everything again one by one and says where the two differ. It is
what `sluice verify` runs, and the simulator after each step.
"""

from __future__ import annotations

from collections.abc import Iterator

from mypy_extensions import i64

from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED
from sluice.queues.engine import Engine
from sluice.queues.model.group import Group
from sluice.queues.log.frame_builder import ACKED, DEAD, EXPIRED, PURGED
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.flow.removal import waits_for_nobody


class Ledger:
    """The account of one group: what it had to settle, and what became of it."""

    def __init__(self) -> None:
        self.enqueued: int = 0
        self.waiting: int = 0
        self.delivered: int = 0
        self.retrying: int = 0
        self.acked: int = 0
        self.dead: int = 0
        self.expired: int = 0
        self.purged: int = 0

    def add(self, cursor: Cursor) -> None:
        self.enqueued += int(cursor.count_entered())
        self.waiting += int(cursor.waiting())
        self.delivered += int(cursor.out)
        self.retrying += int(cursor.retrying())
        self.acked += cursor.counts[ACKED]
        self.dead += cursor.counts[DEAD]
        self.expired += cursor.counts[EXPIRED]
        self.purged += cursor.counts[PURGED]

    def balance(self) -> int:
        """0 when nothing is unaccounted for."""
        settled = self.acked + self.dead + self.expired + self.purged
        return self.enqueued - self.waiting - self.delivered - self.retrying - settled


def ledger(queue: Queue, group: Group) -> Ledger:
    account = Ledger()
    for cursor in group.cursors:
        account.add(cursor)
    return account


def verify(engine: Engine) -> list[str]:
    """Everything that does not add up, in sentences; nothing when all is well."""
    found: list[str] = []
    for queue in engine.queues.values():
        found.extend(verify_queue(queue))
        for group in queue.groups.values():
            found.extend(verify_group(group))
    return found


def verify_queue(queue: Queue) -> list[str]:
    """The same for the messages of one queue, whatever its groups make of them."""
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
        while seq < partition.next:
            block = partition.block(seq)
            if block is not None:
                size += i64(block.size[block.at(seq)])
            if partition.left(seq) > 0 or waits_for_nobody(partition):
                depth += 1
            seq = partition.first_live(seq + 1)
    if depth != queue.depth:
        yield f"queue {queue.name}: depth {queue.depth} on the books, {depth} counted"
    if size != queue.bytes:
        yield f"queue {queue.name}: bytes {queue.bytes} on the books, {size} counted"
    members = sum(len(group.consumers) for group in queue.groups.values())
    if members != queue.consumers:
        yield f"queue {queue.name}: consumers {queue.consumers} on the books, {members} counted"


def _check_partition(partition: Partition) -> Iterator[str]:
    name = f"queue {partition.queue.name}, partition {partition.number}"
    live: i64 = 0
    seq = partition.first_live(0)
    while seq < partition.next:
        live += 1
        left: i64 = 0
        for cursor in partition.cursors:
            if partition.is_for(seq, cursor.group.gid) and not cursor.settled(seq):
                left += 1
        if left != partition.left(seq):
            yield f"{name}, message {seq}: groups to settle it {partition.left(seq)} on the books, {left} counted"
        seq = partition.first_live(seq + 1)
    if live != partition.live:
        yield f"{name}: messages {partition.live} on the books, {live} counted"


def _check_group(queue: Queue, group: Group) -> Iterator[str]:
    account = ledger(queue, group)
    if account.balance():
        yield (
            f"queue {queue.name}, group {group.name}: messages unaccounted for {account.balance()} "
            f"of {account.enqueued}"
        )
    for cursor in group.cursors:
        yield from _check_cursor(cursor, f"queue {queue.name}, group {group.name}")


def _check_cursor(cursor: Cursor, name: str) -> Iterator[str]:
    partition = cursor.partition
    name = f"{name}, partition {partition.number}"
    unsettled = cursor.count_unsettled()
    if unsettled != cursor.waiting() + len(cursor.leases):
        yield (
            f"{name}: waiting {cursor.waiting()} and delivered {len(cursor.leases)} on the books, "
            f"not settled {unsettled} counted"
        )
    out: i64 = 0
    for seq, lease in cursor.leases.items():
        if lease.state == LEASED:
            out += 1
        if not partition.holds(seq) or cursor.settled(seq) or lease.seq != seq:
            yield f"{name}: message {seq} has a delivery and is settled"
    if out != cursor.out:
        yield f"{name}: deliveries {cursor.out} on the books, {out} counted"
    if cursor.slots() != cursor.count_slots():
        yield f"{name}: the keys that are busy are not those of the messages that are out"
    if cursor.floor < partition.next and not partition.holds(cursor.floor):
        yield f"{name}: the floor stands at message {cursor.floor}, which is gone"
    for seq in cursor.done:
        if not partition.holds(seq):
            yield f"{name}: message {seq} is gone and still remembered"
