"""Removal of messages: settled, expired, purged, displaced by newer ones, or retention over.

A message is deleted when no group has to settle it and its queue keeps no settled messages. Until
then, three kinds of stored messages have no pending groups: the queue has no groups yet, a group
started after the message (both wait for a new group, and count in the depth), or the message is
kept for its retention (and does not count). A compacted queue keeps settled messages until they are
replaced, and counts all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.errors import PartitionFull, QueueFull
from sluice.message import TOMBSTONE, Message
from sluice.queues.bodies.body_reads import FOR_EXPIRY, BodyRead
from sluice.queues.compacted.key_index import find_last_message
from sluice.queues.flow import dead_letters
from sluice.queues.log.notes import ACKED, DEAD, EXPIRED, PURGED
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, SETTLED, Lease
from sluice.queues.model.message_columns import NO_ADDRESS
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue_rules import DEAD_LETTER, DROP_OLDEST

if TYPE_CHECKING:
    from sluice.queues.engine import Engine
    from sluice.queues.model.queue import Queue


# ---- one group, one message: shared by commands and recovery


def settle_message(engine: Engine, cursor: Cursor, seq: i64, outcome: i64) -> None:
    """Settle `seq` for one group; the last group deletes the message."""
    partition = cursor.partition
    queue = partition.queue
    is_last = partition.decrement_pending_groups(seq)
    is_retained = queue.rules.retention > 0.0
    if queue.rules.is_compacted:
        is_retained = partition.flags(seq) & TOMBSTONE == 0
    cursor.outcome_counts[outcome] += 1
    # until a newer value replaces it
    stays_readable = queue.rules.is_compacted and outcome == ACKED and (is_retained or not is_last)
    if cursor.lost_ranges is not None and not stays_readable:
        cursor.lost_ranges.add(seq, seq + 1)
    cursor.mark_settled(seq, is_retained or not is_last)
    if is_last:
        if is_retained:
            on_settled_by_all(engine, partition, seq, is_retained)
        else:
            queue.depth -= 1
            delete_message(engine, partition, seq)


def on_settled_by_all(engine: Engine, partition: Partition, seq: i64, is_retained: bool) -> None:
    """Delete a message that no group has to settle, or keep it if `is_retained`.

    Retained messages of a compacted queue still count in the depth.
    """
    queue = partition.queue
    if not is_retained:
        queue.depth -= 1
        delete_message(engine, partition, seq)
        return
    if not queue.rules.is_compacted:
        queue.depth -= 1
    engine.schedule_retention(partition)


def retains_settled(partition: Partition, seq: i64) -> bool:
    """Return whether a message stays stored when every group has settled it."""
    rules = partition.queue.rules
    if rules.is_compacted:
        return partition.flags(seq) & TOMBSTONE == 0
    return rules.retention > 0.0


def delete_message(engine: Engine, partition: Partition, seq: i64) -> None:
    """Delete a message and free its space in the store."""
    block = partition.find_block(seq)
    if block is None:
        return
    size: i64 = i64(block.size[block.index_of(seq)])
    if partition.cached_bodies:
        engine.body_cache.drop(partition, seq)
    for cursor in partition.cursors:
        if cursor.settled_seqs:
            cursor.settled_seqs.discard(int(seq))
    address = partition.remove(seq)
    if address != NO_ADDRESS:
        engine.segment_usage.drop(address, size)
        partition.queue.bytes -= size
        if engine.removed_from_compacted is not None and partition.queue.rules.is_compacted:
            engine.removed_from_compacted.setdefault(int(partition.pid), []).append(int(seq))


def counts_unclaimed_in_depth(partition: Partition) -> bool:
    """Return whether stored messages without pending groups count in the depth: see the header."""
    rules = partition.queue.rules
    return not partition.cursors or rules.retention <= 0.0 or rules.is_compacted


# ---- removal for all groups


def remove_for_all_groups(engine: Engine, partition: Partition, seq: i64, outcome: i64) -> bool:
    """Settle a message for each group without a lease of it; return whether it is deleted."""
    is_leased = False
    for cursor in partition.cursors:
        if not partition.holds(seq):
            break  # the last group deleted it
        if cursor.is_settled(seq) or not partition.is_for_group(seq, cursor.group.gid):
            continue
        lease = cursor.leases.get(int(seq))
        if lease is not None and lease.state == LEASED:
            is_leased = True
        else:
            settle_unleased(engine, cursor, seq, outcome, lease)
    if is_leased:
        return False
    if partition.holds(seq):
        if counts_unclaimed_in_depth(partition):
            partition.queue.depth -= 1
        engine.frame_builder.add_removal(partition, seq)
        delete_message(engine, partition, seq)
    return True


def settle_unleased(
    engine: Engine, cursor: Cursor, seq: i64, outcome: i64, lease: Lease | None
) -> None:
    """Settle a message for a group whose consumers hold no lease of it."""
    if cursor.prefetched_bodies:
        engine.body_cache.drop_prefetched(cursor, seq)
    if lease is None:
        cursor.withdraw(seq)
    else:
        cursor.end_active(lease)
        end_lease(lease)
    cursor.log_settlement(seq, outcome, engine.frame_builder)
    settle_message(engine, cursor, seq, outcome)
    engine.after_settle(cursor)


def end_lease(lease: Lease) -> None:
    lease.state = SETTLED
    cursor = lease.cursor
    del cursor.leases[int(lease.seq)]
    if lease.publisher_message_id:
        cursor.group.unindex_by_message_id(lease)
    lease.message = None


def purge_queue(engine: Engine, queue: Queue) -> int:
    """Remove all messages without a lease; return their number."""
    before = queue.depth
    for partition in queue.partitions:
        purge_range(engine, partition, 0, partition.next_seq, partition.live_count)
    return int(before - queue.depth)


def purge_range(engine: Engine, partition: Partition, start: i64, end: i64, max_count: i64) -> i64:
    """Purge at most `max_count` messages from `start` to before `end`; return where to continue."""
    seq = partition.first_live(start)
    while seq < end and max_count > 0:
        remove_for_all_groups(engine, partition, seq, PURGED)
        max_count -= 1
        seq = partition.first_live(seq + 1)
    return seq


# ---- overflow


def adds_key(engine: Engine, queue: Queue, message: Message) -> bool:
    """Return whether a message adds a key to a compacted queue."""
    return bool(message.payload) and find_last_message(engine, queue, message.key) is None


def apply_overflow_policy(engine: Engine, queue: Queue, message: Message) -> bool:
    """Make space in a full queue by its policy.

    Return whether the message can be stored; False: it was dead-lettered.
    """
    if queue.rules.is_compacted and not adds_key(engine, queue, message):
        return True
    policy = queue.rules.overflow
    if policy == DROP_OLDEST:
        if drop_oldest(engine, queue):
            return True
    elif policy == DEAD_LETTER and dead_letters.write_rejected_dead_letter(
        engine, queue, message, "overflow"
    ):
        return False
    queue.refused += 1
    raise QueueFull(queue.name, int(queue.depth), queue.rules.is_compacted)


def append_within_limit(
    engine: Engine, queue: Queue, message: Message, is_batch_started: bool = False
) -> bool:
    """Append a message while partitions are limited to `engine.max_partition_length`.

    Return False if the message was dead-lettered. `is_batch_started`: the message belongs to a
    batch that can no longer be refused; if no space can be made, the partition exceeds its limit.
    """
    key_hash = engine.partition_key_hash(queue, message.key)
    partition = queue.choose_partition(key_hash)
    if not _shorten_partition(engine, partition):
        if queue.rules.overflow == DEAD_LETTER and dead_letters.write_rejected_dead_letter(
            engine, queue, message, "overflow"
        ):
            return False
        if not is_batch_started:
            queue.refused += 1
            raise PartitionFull(queue.name, int(partition.number), int(engine.max_partition_length))
    engine.append_to_partition(partition, message, key_hash, 0)
    return True


def _shorten_partition(engine: Engine, partition: Partition) -> bool:
    """Shorten a partition below its limit; return whether that succeeded.

    The length includes settled messages between live ones. Messages that are only retained are
    deleted first; for messages that a group has still to settle, the overflow policy of the queue
    decides.
    """
    seq = partition.first_live(0)
    while partition.next_seq - seq >= engine.max_partition_length:
        if _is_only_retained(partition, seq):
            engine.frame_builder.add_removal(partition, seq)
            delete_message(engine, partition, seq)
        elif partition.queue.rules.overflow == DROP_OLDEST and dead_letters.is_unleased(
            partition, seq
        ):
            remove_for_all_groups(engine, partition, seq, PURGED)
        else:
            return False
        seq = partition.first_live(seq + 1)
    return True


def free_length(partition: Partition, max_length: i64, wanted: i64) -> i64:
    """Return for how many messages `_shorten_partition` can make space, up to about `wanted`."""
    if partition.queue.rules.overflow == DROP_OLDEST:
        return max_length
    seq = partition.first_live(0)
    while max_length - (partition.next_seq - seq) < wanted and seq < partition.next_seq:
        if not _is_only_retained(partition, seq):
            break
        seq = partition.first_live(seq + 1)
    return max(0, max_length - (partition.next_seq - seq))


def _is_only_retained(partition: Partition, seq: i64) -> bool:
    return partition.pending_groups(seq) <= 0 and not counts_unclaimed_in_depth(partition)


def drop_oldest(engine: Engine, queue: Queue) -> bool:
    """Remove the oldest message without a lease; return False if there is none."""
    oldest: Partition | None = None
    found: i64 = 0
    found_time: i64 = 0
    for partition in queue.partitions:
        seq = _oldest_idle(partition)
        if seq < 0:
            continue
        time = partition.arrival_ms(seq)
        if oldest is None or time < found_time:
            oldest = partition
            found = seq
            found_time = time
    return oldest is not None and remove_for_all_groups(engine, oldest, found, PURGED)


def _oldest_idle(partition: Partition) -> i64:
    """Return the first message that counts in the depth and has no lease; -1 if there is none."""
    seq = partition.first_live(0)
    while seq < partition.next_seq:
        if (
            partition.pending_groups(seq) > 0 or counts_unclaimed_in_depth(partition)
        ) and dead_letters.is_unleased(partition, seq):
            return seq
        seq = partition.first_live(seq + 1)
    return -1


# ---- expiry


def sweep_expired(engine: Engine, partition: Partition) -> None:
    """Remove expired messages. A leased message stays until its delivery fails."""
    for seq in partition.find_expired(int(engine.now)):
        _read_or_expire(engine, partition, seq, partition.cached_bodies.get(seq))


def expire_if_due(engine: Engine, partition: Partition, seq: i64, message: Message | None) -> bool:
    """Remove a returned message if it expired meanwhile; return whether it did.

    The search for expired messages skipped it because a client held it.
    """
    expires = partition.expires(seq)
    if expires == 0 or float(expires) > engine.now:
        return False
    if message is None:
        message = partition.cached_bodies.get(int(seq))
    _read_or_expire(engine, partition, seq, message)
    return True


def _read_or_expire(
    engine: Engine, partition: Partition, seq: i64, message: Message | None
) -> None:
    """Remove an expired message. A dead letter needs its body: read it first if it is not given."""
    if message is None and partition.queue.rules.expired_to_dlq:
        engine.reads.append(
            BodyRead(FOR_EXPIRY, partition, [int(seq)], [int(partition.address(seq))])
        )
    else:
        expire_message(engine, partition, seq, message)


def expire_message(engine: Engine, partition: Partition, seq: i64, message: Message | None) -> None:
    """Remove a message that no consumer took in time: drop it, or dead-letter it if configured.

    A dead letter needs `message`.
    """
    if message is None or not partition.queue.rules.expired_to_dlq:
        remove_for_all_groups(engine, partition, seq, EXPIRED)
        return
    expired_cursors: list[Cursor] = []
    target_count = 0
    for cursor in partition.cursors:
        if partition.is_for_group(seq, cursor.group.gid):
            target_count += 1
            if not cursor.is_settled(seq):
                lease = cursor.leases.get(int(seq))
                if lease is None or lease.state != LEASED:
                    expired_cursors.append(cursor)
    if len(expired_cursors) == target_count and target_count != 1:
        # No group has settled it, so one dead letter is enough for all groups.
        dead_letters.write_expired_dead_letter(engine, partition, seq, message, None, None)
    else:
        for cursor in expired_cursors:
            lease = cursor.leases.get(int(seq))
            dead_letters.write_expired_dead_letter(
                engine, partition, seq, message, cursor.group, lease
            )
    remove_for_all_groups(engine, partition, seq, DEAD)


# ---- retention


def sweep_retained(engine: Engine, partition: Partition) -> None:
    """Delete settled messages whose retention is over."""
    queue = partition.queue
    if not partition.cursors or queue.rules.retention <= 0.0:
        return
    for seq in partition.find_settled_before(int((engine.now - queue.rules.retention) * 1000.0)):
        if queue.rules.is_compacted:
            queue.depth -= 1
        engine.frame_builder.add_removal(partition, seq)
        delete_message(engine, partition, seq)
