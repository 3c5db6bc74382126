"""Shared compacted queues: the last message of each key is stored, for all present and new groups.

Compaction is a property of the queue: partitions, groups, deliveries and retries are those of work
queues. Three things differ. A message replaces the older one of its key in the same frame, even if
a consumer holds a lease: the delivery ends, and its settlement finds nothing. A message that every
group has settled stays. A tombstone (an empty payload) removes its key: existing groups receive it,
and then it is deleted. A tombstone for an unknown key changes nothing.

The record of a message contains all that recovery needs: replaying it replaces what it replaced. So
the depth of a compacted queue is the number of its keys, and replaced messages count as purged in
the ledger of a group.

A key is identified by its hash (`key_index`), which leads to the location of its last message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.errors import InvalidQueueConfig, MissingKey
from sluice.message import COMPRESSED, TOMBSTONE, Message, encoded_fields_size
from sluice.queues.compacted.key_index import find_last_message, set_last_message
from sluice.queues.flow import removal, settlement
from sluice.queues.log.notes import PURGED
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.store.protocol import HEADER_BYTES

if TYPE_CHECKING:
    from sluice.queues.engine import Engine


# ---- storing


def publish(engine: Engine, queue: Queue, message: Message) -> None:
    """Store a checked message. A tombstone adds no key and needs no space."""
    check_message(queue, message)
    if (
        not message.payload
        or queue.depth < queue.rules.max_depth
        or removal.apply_overflow_policy(engine, queue, message)
    ):
        append_message(engine, queue, message)


def check_message(queue: Queue, message: Message) -> None:
    """Use the topic of a bound message as key; refuse other messages without a key.

    Delays and priorities are refused too.
    """
    if not message.key:
        if not message.topic:
            raise MissingKey(queue.name)
        message.key = message.topic
    if message.deliver_at or message.priority:
        raise InvalidQueueConfig(
            f"queue {queue.name!r} is compacted, and has neither delays nor priorities",
            "Leave delay, deliver-at and priority out, or use a work queue",
        )


def append_message(engine: Engine, queue: Queue, message: Message) -> None:
    """Replace the older message of the key. A dead letter without a key replaces none."""
    rules = queue.rules
    payload = message.payload
    key = engine.partition_key_hash(queue, message.key)
    partition = queue.choose_partition(key)
    old = find_last_message(engine, queue, message.key)
    flags: i64 = 0
    pending_groups: i64 = len(partition.cursors)
    if not payload and message.key:
        if old is None:
            return  # unknown key
        if pending_groups == 0:
            removal.remove_for_all_groups(engine, old[0], old[1], PURGED)
            return
        flags = TOMBSTONE
    if old is not None:
        _replace_older(engine, old[0], old[1])
    now_ms: i64 = int(engine.now * 1000.0)
    message.enqueued_at = now_ms
    if rules.message_ttl > 0.0:
        max_expires: i64 = int(engine.now + rules.message_ttl + 0.999)
        if message.expires == 0 or message.expires > max_expires:
            message.expires = max_expires
    expires = message.expires
    if rules.compress and len(payload) >= 256:
        compressed = engine.codec.compress(payload)
        if len(compressed) < len(payload):
            payload = compressed
            flags |= COMPRESSED
    seq = partition.next_seq
    size: i64 = HEADER_BYTES + encoded_fields_size(message) + len(payload)
    address = engine.frame_builder.add_message(
        partition, flags, seq, key, expires, now_ms, size, message, payload, rules.sync
    )
    partition.append(address, size, key, expires, flags, pending_groups, now_ms)
    engine.segment_usage.add_last_value(address, size)
    queue.depth += 1
    queue.bytes += size
    queue.enqueued += 1
    set_last_message(engine, queue, partition, seq, message.key)
    if queue.consumer_count:
        engine.body_cache.put(partition, seq, message)
    if expires:
        engine.timers.schedule_expiry(partition, expires)


# ---- replacing


def _replace_older(engine: Engine, partition: Partition, seq: i64) -> None:
    """Remove a replaced message from all groups; revoke its leases."""
    for cursor in partition.cursors:
        if not cursor.is_settled(seq) and partition.is_for_group(seq, cursor.group.gid):
            lease = cursor.leases.get(int(seq))
            if cursor.prefetched_bodies:
                engine.body_cache.drop_prefetched(cursor, seq)
            if lease is None:
                cursor.withdraw(seq)
            else:
                if lease.state == LEASED:
                    if lease.consumer is not None:
                        lease.consumer.on_lease_revoked(lease)
                    settlement.unassign(engine, lease, False)
                cursor.end_active(lease)
                removal.end_lease(lease)
            _settle_replaced(cursor, seq)
            engine.after_settle(cursor)
    _delete_replaced(engine, partition, seq)


def _settle_replaced(cursor: Cursor, seq: i64) -> None:
    cursor.outcome_counts[PURGED] += 1
    cursor.partition.decrement_pending_groups(seq)
    cursor.mark_settled(seq, False)


def _delete_replaced(engine: Engine, partition: Partition, seq: i64) -> None:
    partition.queue.depth -= 1
    removal.delete_message(engine, partition, seq)


# ---- recovery


def replay_message(
    engine: Engine, queue: Queue, partition: Partition, seq: i64, key: bytes
) -> None:
    """Replay a message from after the snapshot: it replaces what it replaced then."""
    old = find_last_message(engine, queue, key)
    if old is not None:
        old_partition, old_seq = old
        for cursor in old_partition.cursors:
            if not cursor.is_settled(old_seq) and old_partition.is_for_group(
                old_seq, cursor.group.gid
            ):
                cursor.leases.pop(old_seq, None)
                _settle_replaced(cursor, old_seq)
        _delete_replaced(engine, old_partition, old_seq)
    set_last_message(engine, queue, partition, seq, key)
