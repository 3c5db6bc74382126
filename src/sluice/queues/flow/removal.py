"""How messages leave: settled by a group, expired, purged, pushed out by younger ones, or kept long enough.

A message is let go when no group waits for it and its queue keeps no settled ones. Until then three cases have nobody
waiting (`left` is 0): the queue has no groups yet, a group began behind the message (both wait for a group to come, and
count in the depth), or it is kept for its retention (and does not). A compacted queue keeps settled ones until they are
replaced, and counts them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.errors import PartitionFull, QueueFull
from sluice.message import TOMBSTONE, Message
from sluice.queues.flow import dead_letters
from sluice.queues.model.message_columns import GONE
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, SETTLED, Lease
from sluice.queues.log.frame_builder import ACKED, DEAD, EXPIRED, PURGED
from sluice.queues.compacted.key_index import place_of
from sluice.queues.model.partition import Partition
from sluice.queues.bodies.body_reads import EXPIRE, Read
from sluice.queues.model.queue_rules import DEAD_LETTER, DROP_OLDEST

if TYPE_CHECKING:
    from sluice.queues.engine import Engine
    from sluice.queues.model.queue import Queue


# ---- one group, one message: the same for a living queue and for recovery


def settle_one(engine: Engine, cursor: Cursor, seq: i64, how: i64) -> None:
    """A group needs `seq` no more; the last one lets it go."""
    partition = cursor.partition
    queue = partition.queue
    last = partition.settle_one(seq)
    keeps = queue.rules.retention > 0.0
    if queue.rules.compacted:
        keeps = partition.flags(seq) & TOMBSTONE == 0
    cursor.counts[how] += 1
    stays = queue.rules.compacted and how == ACKED and (keeps or not last)  # until a younger one replaces it
    if cursor.losses is not None and not stays:
        cursor.losses.lose(seq, seq + 1)
    cursor.pass_over(seq, keeps or not last)
    if last:
        if keeps:
            settled_by_all(engine, partition, seq, keeps)
        else:
            queue.depth -= 1
            let_go_of(engine, partition, seq)


def settled_by_all(engine: Engine, partition: Partition, seq: i64, keeps: bool) -> None:
    """No group waits for it any more; `keeps`: its queue does. Those of a compacted queue go on counting."""
    queue = partition.queue
    if not keeps:
        queue.depth -= 1
        let_go_of(engine, partition, seq)
        return
    if not queue.rules.compacted:
        queue.depth -= 1
    engine.expect_retention(partition)


def keeps_settled(partition: Partition, seq: i64) -> bool:
    """Whether a message stays when every group has settled it."""
    rules = partition.queue.rules
    if rules.compacted:
        return partition.flags(seq) & TOMBSTONE == 0
    return rules.retention > 0.0


def let_go_of(engine: Engine, partition: Partition, seq: i64) -> None:
    """Nobody needs the message any more: its place in the store is free."""
    block = partition.block(seq)
    if block is None:
        return
    size: i64 = i64(block.size[block.at(seq)])
    if partition.young:
        engine.young.drop(partition, seq)
    for cursor in partition.cursors:
        if cursor.done:
            cursor.done.discard(int(seq))
    address = partition.remove(seq)
    if address != GONE:
        engine.segments.drop(address, size)
        partition.queue.bytes -= size
        if engine.gone is not None and partition.queue.rules.compacted:
            engine.gone.setdefault(int(partition.pid), []).append(int(seq))


def waits_for_nobody(partition: Partition) -> bool:
    """Whether a kept message without a group that waits for it counts in the depth: see above."""
    rules = partition.queue.rules
    return not partition.cursors or rules.retention <= 0.0 or rules.compacted


# ---- out of the hands of every group


def remove_for_all(engine: Engine, partition: Partition, seq: i64, how: i64) -> bool:
    """Take a message out of every group that is not working on it; whether it is gone."""
    left = False
    for cursor in partition.cursors:
        if not partition.holds(seq):
            break  # the last one has let it go
        if cursor.settled(seq) or not partition.is_for(seq, cursor.group.gid):
            continue
        lease = cursor.leases.get(int(seq))
        if lease is not None and lease.state == LEASED:
            left = True
        else:
            take_from(engine, cursor, seq, how, lease)
    if left:
        return False
    if partition.holds(seq):
        if waits_for_nobody(partition):
            partition.queue.depth -= 1
        engine.journal.add_removed(partition, seq)
        let_go_of(engine, partition, seq)
    return True


def take_from(engine: Engine, cursor: Cursor, seq: i64, how: i64, lease: Lease | None) -> None:
    """Settle for a group what none of its consumers has in hand."""
    if cursor.ahead:
        engine.young.drop_ahead(cursor, seq)
    if lease is None:
        cursor.withdraw(seq)
    else:
        cursor.end_out(lease)
        drop_lease(lease)
    cursor.log_settled(seq, how, engine.journal)
    settle_one(engine, cursor, seq, how)
    engine.after_settle(cursor)


def drop_lease(lease: Lease) -> None:
    lease.state = SETTLED
    cursor = lease.cursor
    del cursor.leases[int(lease.seq)]
    if lease.own_id:
        cursor.group.drop_name(lease)
    lease.message = None


def purge(engine: Engine, queue: Queue) -> int:
    """Remove everything that nobody is working on; how many messages that were."""
    before = queue.depth
    for partition in queue.partitions:
        purge_some(engine, partition, 0, partition.next, partition.live)
    return int(before - queue.depth)


def purge_some(engine: Engine, partition: Partition, start: i64, end: i64, most: i64) -> i64:
    """The same for at most so many messages from `start` on, before `end`; where to go on."""
    seq = partition.first_live(start)
    while seq < end and most > 0:
        remove_for_all(engine, partition, seq, PURGED)
        most -= 1
        seq = partition.first_live(seq + 1)
    return seq


# ---- full


def adds_key(engine: Engine, queue: Queue, message: Message) -> bool:
    """Whether a compacted queue gets longer by it: else it takes the place of another, or ends a key."""
    return bool(message.payload) and place_of(engine, queue, message.key) is None


def make_room(engine: Engine, queue: Queue, message: Message) -> bool:
    """A full queue: whether there is room now, by its own policy. False: the message went to the dead letters."""
    if queue.rules.compacted and not adds_key(engine, queue, message):
        return True
    policy = queue.rules.overflow
    if policy == DROP_OLDEST:
        if drop_oldest(engine, queue):
            return True
    elif policy == DEAD_LETTER and dead_letters.bury_unborn(engine, queue, message, "overflow"):
        return False
    queue.refused += 1
    raise QueueFull(queue.name, int(queue.depth), queue.rules.compacted)


def append_within(engine: Engine, queue: Queue, message: Message, has_begun: bool = False) -> bool:
    """Append where a partition may not be longer than `engine.max_length`. False: it went to the dead letters.
    `has_begun`: it is of a batch that cannot be refused any more; where nothing gives way the partition gets longer."""
    key = engine.key_hash(queue, message.key)
    partition = queue.place(key)
    if not _shorten(engine, partition):
        if queue.rules.overflow == DEAD_LETTER and dead_letters.bury_unborn(
            engine, queue, message, "overflow"
        ):
            return False
        if not has_begun:
            queue.refused += 1
            raise PartitionFull(queue.name, int(partition.number), int(engine.max_length))
    engine.append_to(partition, message, key, 0)
    return True


def _shorten(engine: Engine, partition: Partition) -> bool:
    """Let a partition be shorter than it may be, settled messages between living ones counted in; whether it is. What
    is only kept for its retention goes first; for what somebody waits for, the queue's own policy counts."""
    seq = partition.first_live(0)
    while partition.next - seq >= engine.max_length:
        if _is_only_kept(partition, seq):
            engine.journal.add_removed(partition, seq)
            let_go_of(engine, partition, seq)
        elif partition.queue.rules.overflow == DROP_OLDEST and dead_letters.is_idle(partition, seq):
            remove_for_all(engine, partition, seq, PURGED)
        else:
            return False
        seq = partition.first_live(seq + 1)
    return True


def room_within(partition: Partition, length: i64, enough: i64) -> i64:
    """How many messages `_shorten` makes room for, one after the other; it is not asked about more than `enough`."""
    if partition.queue.rules.overflow == DROP_OLDEST:
        return length
    seq = partition.first_live(0)
    while length - (partition.next - seq) < enough and seq < partition.next:
        if not _is_only_kept(partition, seq):
            break
        seq = partition.first_live(seq + 1)
    return max(0, length - (partition.next - seq))


def _is_only_kept(partition: Partition, seq: i64) -> bool:
    return partition.left(seq) <= 0 and not waits_for_nobody(partition)


def drop_oldest(engine: Engine, queue: Queue) -> bool:
    """Push out the oldest message that nobody is working on; False when there is none."""
    oldest: Partition | None = None
    found: i64 = 0
    found_time: i64 = 0
    for partition in queue.partitions:
        seq = _oldest_idle(partition)
        if seq < 0:
            continue
        time = partition.time(seq)
        if oldest is None or time < found_time:
            oldest = partition
            found = seq
            found_time = time
    return oldest is not None and remove_for_all(engine, oldest, found, PURGED)


def _oldest_idle(partition: Partition) -> i64:
    """The first message that counts in the depth and is in nobody's hands; -1 when there is none."""
    seq = partition.first_live(0)
    while seq < partition.next:
        if (partition.left(seq) > 0 or waits_for_nobody(partition)) and dead_letters.is_idle(partition, seq):
            return seq
        seq = partition.first_live(seq + 1)
    return -1


# ---- out of time


def sweep_expired(engine: Engine, partition: Partition) -> None:
    """Take out what has expired. What somebody is working on has until that fails."""
    for seq in partition.expired(int(engine.now)):
        _read_or_expire(engine, partition, seq, partition.young.get(seq))


def expire_if_due(engine: Engine, partition: Partition, seq: i64, message: Message | None) -> bool:
    """Remove a message that a client has returned if it expired meanwhile; return whether it did.

    The search for expired messages has skipped it, because a client held it.
    """
    expires = partition.expires(seq)
    if expires == 0 or float(expires) > engine.now:
        return False
    if message is None:
        message = partition.young.get(int(seq))
    _read_or_expire(engine, partition, seq, message)
    return True


def _read_or_expire(engine: Engine, partition: Partition, seq: i64, message: Message | None) -> None:
    """Remove an expired message. A dead letter needs its body: if it is not given, read it first."""
    if message is None and partition.queue.rules.expired_to_dlq:
        engine.reads.append(Read(EXPIRE, partition, [int(seq)], [int(partition.address(seq))]))
    else:
        expire(engine, partition, seq, message)


def expire(engine: Engine, partition: Partition, seq: i64, message: Message | None) -> None:
    """Nobody has taken it in time: dropped, or a dead letter where the queue says so (then `message` is given)."""
    if message is None or not partition.queue.rules.expired_to_dlq:
        remove_for_all(engine, partition, seq, EXPIRED)
        return
    concerned: list[Cursor] = []
    meant = 0
    for cursor in partition.cursors:
        if partition.is_for(seq, cursor.group.gid):
            meant += 1
            if not cursor.settled(seq):
                lease = cursor.leases.get(int(seq))
                if lease is None or lease.state != LEASED:
                    concerned.append(cursor)
    if len(concerned) == meant and meant != 1:
        # No group has seen it through, so one letter stands for all of them.
        dead_letters.bury_expired(engine, partition, seq, message, None, None)
    else:
        for cursor in concerned:
            lease = cursor.leases.get(int(seq))
            dead_letters.bury_expired(engine, partition, seq, message, cursor.group, lease)
    remove_for_all(engine, partition, seq, DEAD)


# ---- kept long enough


def sweep_retained(engine: Engine, partition: Partition) -> None:
    """Let go of settled messages whose retention is over."""
    queue = partition.queue
    if not partition.cursors or queue.rules.retention <= 0.0:
        return
    for seq in partition.settled_before(int((engine.now - queue.rules.retention) * 1000.0)):
        if queue.rules.compacted:
            queue.depth -= 1
        engine.journal.add_removed(partition, seq)
        let_go_of(engine, partition, seq)
