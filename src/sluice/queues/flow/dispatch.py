"""Dispatch: assign partitions to members, and lease messages to members with capacity.

No member with capacity waits while a message could go to it (work conservation):

* A message with a key goes to the consumer of its partition, one without a key to any member.
* Messages for which the consumer of a partition has no capacity stay in `group.blocked_cursors`.
  `share_blocked` gives them to members with capacity when the turn ends: messages without a key at
  once, and the whole partition once messages have waited in it for `rebalance_after`. The order of
  a key still holds: its active messages count for all members.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.message import Message
from sluice.queues.bodies.body_reads import (
    FOR_DEAD_LETTER,
    FOR_DELIVERY,
    FOR_EXPIRY,
    FOR_PREFETCH,
    BodyRead,
    decode_message,
    request_bodies,
)
from sluice.queues.flow.removal import expire_message, remove_for_all_groups
from sluice.queues.flow.settlement import (
    dead_letter,
    fail_delivery,
    give_up_at,
    on_dead_letter_body,
)
from sluice.queues.log.notes import PURGED
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, WAITING, Lease
from sluice.queues.model.group import Group
from sluice.queues.model.message_columns import NO_ADDRESS
from sluice.queues.model.partition import Partition
from sluice.queues.ports import Consumer

if TYPE_CHECKING:
    from sluice.queues.engine import Engine

NO_LIMIT: Final = 0x7FFF_FFFF_FFFF_FFFF

# ---- leasing


def dispatch_cursor(engine: Engine, cursor: Cursor) -> None:
    """Lease messages of the cursor to its consumer, up to its share of the capacity.

    The remaining capacity goes to the consumer's other partitions first: a partition that took all
    would scan far for inactive keys, and leave no capacity for the others.
    """
    consumer = cursor.consumer
    if consumer is None:
        return
    if cursor.helpers:
        _dispatch_round_robin(engine, cursor)
    count: i64 = len(consumer.cursors)
    if count <= 1:
        if _dispatch_to(engine, cursor, consumer, NO_LIMIT, False):
            _mark_blocked(engine, cursor, consumer)
        return
    share: i64 = consumer.prefetch // count
    has_more = _dispatch_to(engine, cursor, consumer, share, False)
    if cursor.in_flight >= share:
        engine.schedule_dispatch(consumer)
    elif has_more:
        _mark_blocked(engine, cursor, consumer)


def _dispatch_round_robin(engine: Engine, cursor: Cursor) -> None:
    """Distribute messages without a key to the consumer and its helpers, one by one."""
    candidates = [*cursor.helpers]
    if cursor.consumer is not None:
        candidates.append(cursor.consumer)
    full_count: i64 = 0
    while full_count < len(candidates) and not cursor.is_waiting_for_body and cursor.has_shared():
        in_flight_before = cursor.in_flight
        cursor.next_helper = (cursor.next_helper + 1) % len(candidates)
        candidate = candidates[cursor.next_helper]
        if candidate.has_capacity():
            full_count = 0
            _dispatch_to(engine, cursor, candidate, in_flight_before + 1, True)
            if cursor.in_flight == in_flight_before:
                return  # no message is left, or a body is being read
        else:
            full_count += 1


def _dispatch_to(
    engine: Engine, cursor: Cursor, consumer: Consumer, max_in_flight: i64, shared_only: bool
) -> bool:
    """Lease messages to `consumer` until `max_in_flight` of the cursor are leased.

    `shared_only`: only messages without a key. Return whether the consumer had no capacity for
    messages that may be left.
    """
    if cursor.is_waiting_for_body:
        return False
    partition = cursor.partition
    is_only_group = len(partition.cursors) == 1
    while cursor.in_flight < max_in_flight:
        if not consumer.has_capacity():
            return cursor.has_more()
        seq = cursor.next_ready_shared() if shared_only else cursor.next_ready()
        if seq < 0:
            if not shared_only:
                cursor.blocked_since = 0.0
            return False
        boxed_seq: object = int(seq)
        message = partition.cached_bodies.get(boxed_seq) if partition.cached_bodies else None
        if message is not None:
            if is_only_group:
                del partition.cached_bodies[boxed_seq]
                engine.body_cache.used_bytes -= message.cached_bytes
        else:
            if cursor.prefetched_bodies:
                message = cursor.prefetched_bodies.pop(boxed_seq, None)
            if message is not None:
                engine.body_cache.used_bytes -= message.cached_bytes
                engine.body_cache.prefetched_bytes -= message.cached_bytes
            elif cursor.awaited_seq == seq:
                message = cursor.awaited_body
                cursor.awaited_body = None
                cursor.awaited_seq = -1
            if message is None:
                cursor.requeue(seq, partition.priority(seq), cursor.key_hash_of(seq))
                if not cursor.is_prefetching:
                    request_bodies(engine, cursor, seq)
                return False
        if message.expires and float(message.expires) <= engine.now:
            cursor.requeue(seq, partition.priority(seq), cursor.key_hash_of(seq))
            expire_message(engine, partition, seq, message)
            continue
        _lease_message(engine, cursor, seq, message, consumer)
    return False


def _lease_message(
    engine: Engine, cursor: Cursor, seq: i64, message: Message, consumer: Consumer
) -> None:
    boxed_seq = int(seq)
    group = cursor.group
    queue = group.queue
    now = engine.now
    # If every lease is in flight, the chosen message has none.
    lease = cursor.leases.get(boxed_seq) if len(cursor.leases) > cursor.in_flight else None
    if lease is None:
        lease = Lease(cursor, seq, cursor.key_hash_of(seq))
        lease.first_delivered_at = now
        cursor.leases[boxed_seq] = lease
        queue.delivery_latency.add(now - float(message.enqueued_at) / 1000.0)
    else:
        if lease.failures and now >= give_up_at(engine, lease):
            lease.state = WAITING
            lease.message = message
            dead_letter(engine, lease, "timeout", lease.description, True)
            return
        group.redelivered += 1
    lease.message = message
    lease.consumer = consumer
    lease.holder = consumer.identity
    lease.state = LEASED
    engine.tokens.issue(lease, consumer, cursor.partition.pid)
    lease.attempt = lease.failures + 1
    lease.last_delivered_at = now
    lease.lease_started_at = now
    lease.deadline = now + queue.rules.delivery_timeout
    cursor.in_flight += 1
    cursor.delivered += 1
    consumer.in_flight += 1
    consumer.full_since = 0.0
    group.delivered += 1
    queue.deadlines.add(lease)
    if queue.deadline_check_at == 0.0:
        engine.timers.schedule_deadline_check(queue, lease.deadline)
    if message.id:
        group.index_by_message_id(lease, message.id)
    consumer.deliver(lease)


def dispatch_consumer(engine: Engine, consumer: Consumer) -> None:
    """Lease messages of its partitions to a consumer: first up to their shares, then more.

    The partitions take turns. While one of them waits for a body, the second round is skipped.
    """
    if consumer.was_offloaded and consumer.has_capacity():
        consumer.was_offloaded = False
        if consumer.group is not None:
            # The consumer gets its share of the partitions back.
            rebalance(engine, consumer.group)
    count: i64 = len(consumer.cursors)
    if count > 0:
        share: i64 = NO_LIMIT if count == 1 else consumer.prefetch // count
        if _dispatch_round(engine, consumer, share) and count > 1 and consumer.has_capacity():
            _dispatch_round(engine, consumer, NO_LIMIT)
    group = consumer.group
    if group is None or not group.can_share_work():
        return
    if consumer.has_capacity():
        if group.blocked_cursors:
            group.is_saturated = False
            engine.schedule_sharing(group)
    else:
        for cursor in consumer.cursors:
            if cursor.has_more():
                _mark_blocked(engine, cursor, consumer)


def _dispatch_round(engine: Engine, consumer: Consumer, max_in_flight: i64) -> bool:
    """Dispatch once from each of its partitions; return whether none waits for a body."""
    cursors = consumer.cursors
    count: i64 = len(cursors)
    has_bodies = True
    step: i64 = 0
    while step < count and consumer.has_capacity():
        cursor = cursors[(consumer.next_cursor_index + step) % count]
        step += 1
        if cursor.has_more():
            _dispatch_to(engine, cursor, consumer, max_in_flight, False)
        if cursor.is_waiting_for_body:
            has_bodies = False
    consumer.next_cursor_index = (consumer.next_cursor_index + step) % count
    return has_bodies


# ---- sharing messages for which the consumer of a partition has no capacity


def _mark_blocked(engine: Engine, cursor: Cursor, consumer: Consumer) -> None:
    """Record that the partition's consumer has no capacity for deliverable messages."""
    group = cursor.group
    if not group.can_share_work():
        return
    if consumer.full_since == 0.0:
        consumer.full_since = engine.now
    if cursor.blocked_since == 0.0:
        cursor.blocked_since = engine.now
    if not cursor.is_listed_blocked:
        cursor.is_listed_blocked = True
        group.blocked_cursors.append(cursor)
    if not group.is_saturated:
        engine.schedule_sharing(group)


def share_blocked(engine: Engine, group: Group) -> None:
    """Lease messages whose consumers have no capacity to members that have capacity."""
    blocked = group.blocked_cursors
    group.blocked_cursors = []
    for cursor in blocked:
        cursor.is_listed_blocked = False
    for cursor in blocked:
        if _share_cursor(engine, group, cursor) and not cursor.is_listed_blocked:
            cursor.is_listed_blocked = True
            group.blocked_cursors.append(cursor)


def _share_cursor(engine: Engine, group: Group, cursor: Cursor) -> bool:
    """Share the messages of one partition; return whether some are left for later."""
    while cursor.consumer is not None and not cursor.is_waiting_for_body and cursor.has_more():
        if group.is_saturated:
            return True
        member = group.next_member_with_capacity()
        if member is None:
            group.is_saturated = True
            return True
        consumer = cursor.consumer
        if consumer is member or consumer.has_capacity():
            if not _dispatch_to(engine, cursor, consumer, NO_LIMIT, False):
                return False
            continue
        in_flight_before = cursor.in_flight
        _dispatch_to(engine, cursor, member, in_flight_before + 1, True)
        if cursor.in_flight > in_flight_before or cursor.is_waiting_for_body:
            continue
        # The remaining messages have a key: they wait for the consumer of the partition, or the
        # partition moves.
        if not cursor.has_deliverable():
            cursor.blocked_since = 0.0
            return False
        movable_at = _movable_at(group, cursor, consumer, member)
        if movable_at > engine.now:
            engine.timers.schedule_handover(group, movable_at)
            return True
        if _is_stuck(engine, group, consumer):
            consumer.was_offloaded = True
        group.move_partition(cursor, member)
        cursor.blocked_since = engine.now
    if not cursor.has_more():
        cursor.blocked_since = 0.0
    return False


def _movable_at(group: Group, cursor: Cursor, consumer: Consumer, member: Consumer) -> float:
    """Return when the partition may move to `member`: messages have waited long enough.

    For a member of lower priority, the consumer must also have had no capacity for as long.
    """
    since = cursor.blocked_since
    if member.priority < consumer.priority and consumer.full_since > since:
        since = consumer.full_since
    return since + group.queue.rules.rebalance_after


def _is_stuck(engine: Engine, group: Group, consumer: Consumer) -> bool:
    """Return whether the consumer took nothing for `rebalance_after`, rather than too little."""
    return (
        consumer.full_since > 0.0
        and engine.now - consumer.full_since >= group.queue.rules.rebalance_after
    )


# ---- bodies read from the store


def on_read_done(engine: Engine, read: BodyRead, records: list[bytes | None]) -> None:
    """Process the result of a read. A damaged message is removed with a warning."""
    cursor = read.cursor
    partition = read.partition
    if cursor is not None:
        if read.purpose == FOR_PREFETCH:
            cursor.is_prefetching = False
        else:
            cursor.is_waiting_for_body = False
    is_awaited = read.purpose == FOR_DELIVERY
    for seq, address, data in zip(read.sequences, read.addresses, records, strict=True):
        current_address = partition.address(seq)
        if current_address == NO_ADDRESS:
            is_awaited = False
            continue
        message = None if data is None else decode_message(data, engine.codec)
        if message is not None:
            _on_body(engine, read, seq, message, is_awaited)
        elif current_address == address:
            drop_damaged(engine, partition, seq)
        elif read.purpose == FOR_EXPIRY or read.purpose == FOR_DEAD_LETTER:
            # Compaction has moved the record and freed its old address: read the new one.
            retry = BodyRead(read.purpose, partition, [seq], [int(current_address)])
            retry.lease = read.lease
            retry.reason = read.reason
            engine.reads.append(retry)
        is_awaited = False
    if cursor is not None:
        dispatch_cursor(engine, cursor)
        if cursor.consumer is not None:
            engine.schedule_dispatch(cursor.consumer)


def _on_body(engine: Engine, read: BodyRead, seq: i64, message: Message, is_awaited: bool) -> None:
    cursor = read.cursor
    lease = read.lease
    if read.purpose == FOR_EXPIRY:
        expire_message(engine, read.partition, seq, message)
    elif read.purpose == FOR_DEAD_LETTER:
        if lease is not None:
            on_dead_letter_body(engine, lease, message, read.reason)
    elif cursor is not None:
        if is_awaited:
            cursor.awaited_body = message
            cursor.awaited_seq = seq
        elif cursor.consumer is not None:
            engine.body_cache.put_prefetched(cursor, seq, message)


def drop_damaged(engine: Engine, partition: Partition, seq: i64) -> None:
    """Remove a message whose record the store cannot read."""
    engine.warnings.append(
        f"message lost: damaged on disk (queue {partition.queue.name}, "
        f"partition {partition.number}, sequence {seq})"
    )
    remove_for_all_groups(engine, partition, seq, PURGED)


# ---- members


def join(engine: Engine, group: Group, consumer: Consumer) -> None:
    engine.join_count += 1
    consumer.join_number = engine.join_count
    consumer.group = group
    consumer.active_at = engine.now
    consumer.is_stalled = False
    consumer.is_paused = False
    consumer.full_since = 0.0
    consumer.was_offloaded = False
    engine.tokens.prepare_consumer(consumer, group.gid)
    group.consumers.append(consumer)
    group.queue.consumer_count += 1
    rebalance(engine, group)
    engine.schedule_dispatch(consumer)


def leave(engine: Engine, consumer: Consumer) -> None:
    """Remove a consumer; its deliveries fail once, without a backoff, and go to other members.

    If the consumer leaves because the server shuts down, nothing fails: the client may settle its
    deliveries after the restart.
    """
    group = consumer.group
    if group is None:
        return
    consumer.group = None
    consumer.cursors = []
    group.consumers.remove(consumer)
    group.queue.consumer_count -= 1
    for cursor in group.cursors:
        if cursor.in_flight and not engine.is_closing:
            for lease in [held for held in cursor.leases.values() if held.consumer is consumer]:
                lease.description = "its consumer went away"
                fail_delivery(engine, lease, 0.0, False)
    rebalance(engine, group)


def set_identity(engine: Engine, consumer: Consumer, identity: str) -> None:
    """Bind further deliveries to another identity: a client resumed its session as another user."""
    consumer.identity = identity
    if consumer.group is not None:
        engine.tokens.prepare_consumer(consumer, consumer.group.gid)


def set_paused(engine: Engine, consumer: Consumer, is_paused: bool) -> None:
    """Mark a consumer as unreachable or reachable.

    Meanwhile other members serve its partitions; it keeps its leases.
    """
    consumer.is_paused = is_paused
    if not is_paused:
        consumer.is_stalled = False
        consumer.active_at = engine.now
    if consumer.group is not None:
        rebalance(engine, consumer.group)
        engine.schedule_dispatch(consumer)


def set_prefetch(engine: Engine, consumer: Consumer, prefetch: i64) -> None:
    """Change a consumer's prefetch.

    With 0 the consumer drains: other members get its partitions at once, it keeps its leases.
    """
    changes_draining = (consumer.prefetch == 0) != (prefetch == 0)
    consumer.prefetch = prefetch
    if changes_draining and consumer.group is not None:
        rebalance(engine, consumer.group)
    engine.schedule_dispatch(consumer)


def rebalance(engine: Engine, group: Group) -> None:
    """Assign the partitions to the members and dispatch to all of them.

    Messages for which one member had no capacity may now go to another one.
    """
    for cursor in group.rebalance():
        cursor.blocked_since = 0.0
        if cursor.consumer is None:
            engine.body_cache.forget_cursor(cursor)
    for consumer in group.eligible_members():
        engine.schedule_dispatch(consumer)
