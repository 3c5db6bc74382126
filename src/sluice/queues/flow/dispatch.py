"""Who gets what: members of a group and their partitions, and leasing messages to those with room.

No member with room waits while a message could go to it (work conservation):

* A message with a key goes to the consumer of its partition, one without a key to any member.
* What the consumer of a partition has no room for is left in `group.unserved`; `share_out` gives it to members that
  have room when the turn ends: at once what has no key, and the whole partition once messages have waited in it for
  `rebalance_after`. The order of a key holds all the same: what is out of a key counts for whoever gets the next one.
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
from sluice.queues.log.frame_builder import PURGED
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
    """Lease what the cursor has to its consumer, up to its share of the room. A consumer's other partitions come first
    with what is left: one that took all would search far for keys that are free, and leave the others behind."""
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
    """Deal messages without a key out to the consumer of the partition and its helpers, one by one."""
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
                return  # nothing is left, or a body is being read
        else:
            full_count += 1


def _dispatch_to(
    engine: Engine, cursor: Cursor, consumer: Consumer, max_in_flight: i64, shared_only: bool
) -> bool:
    """Lease messages to `consumer` until `most` of the cursor's are out; `shared`: only those without a key.

    Return whether the consumer had no room for messages that may be left.
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
    # While every lease is out, what is chosen has none.
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
    """Give a consumer with room what its partitions have, each partition in turn: first their shares, then whatever
    there is. While one of them waits for a body, what is left is left to it."""
    if consumer.was_offloaded and consumer.has_capacity():
        consumer.was_offloaded = False
        if consumer.group is not None:
            rebalance(engine, consumer.group)  # it gets its share of the partitions back
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
    """One round over its partitions; whether none of them waits for a body."""
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


# ---- sharing what the consumer of a partition has no room for


def _mark_blocked(engine: Engine, cursor: Cursor, consumer: Consumer) -> None:
    """Note that `consumer`, which has the partition, has no room for messages that could be delivered."""
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
    """Give messages that the consumers of their partitions have no room for to members that have room."""
    blocked = group.blocked_cursors
    group.blocked_cursors = []
    for cursor in blocked:
        cursor.is_listed_blocked = False
    for cursor in blocked:
        if _share_cursor(engine, group, cursor) and not cursor.is_listed_blocked:
            cursor.is_listed_blocked = True
            group.blocked_cursors.append(cursor)


def _share_cursor(engine: Engine, group: Group, cursor: Cursor) -> bool:
    """Do so for one partition; return whether messages are left that a member may take later."""
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
        # What is left has a key: it waits for the consumer of the partition, or the partition moves.
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
    """Return when the partition may move to `member`: messages have waited for its consumer for long enough. A member
    of a lower priority must also have seen that consumer without any room for as long."""
    since = cursor.blocked_since
    if member.priority < consumer.priority and consumer.full_since > since:
        since = consumer.full_since
    return since + group.queue.rules.rebalance_after


def _is_stuck(engine: Engine, group: Group, consumer: Consumer) -> bool:
    """Return whether it took nothing for as long as a partition may wait, and not only less than there is."""
    return (
        consumer.full_since > 0.0
        and engine.now - consumer.full_since >= group.queue.rules.rebalance_after
    )


# ---- bodies that had to be read


def on_read_done(engine: Engine, read: BodyRead, records: list[bytes | None]) -> None:
    """The answer to a read. A record that is damaged can never be delivered: its message is given up, loudly."""
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
            # Compaction has moved it and given its old place back: ask again where it is now.
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
    """The store cannot give a message back any more."""
    engine.warnings.append(
        f"message {seq} of partition {partition.number} of queue {partition.queue.name} is damaged on disk: lost"
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
    """A consumer is gone for good: what it held goes to the others at once, as one failure without a backoff. If it
    goes because the server does, that is no failure of its own: it may settle what it has in the next life."""
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
    """Bind the next deliveries of a consumer to another identity: a client has resumed its session as another user."""
    consumer.identity = identity
    if consumer.group is not None:
        engine.tokens.prepare_consumer(consumer, consumer.group.gid)


def set_paused(engine: Engine, consumer: Consumer, is_paused: bool) -> None:
    """A consumer cannot be reached for now, or is back: meanwhile others serve its partitions, it keeps what it has."""
    consumer.is_paused = is_paused
    if not is_paused:
        consumer.is_stalled = False
        consumer.active_at = engine.now
    if consumer.group is not None:
        rebalance(engine, consumer.group)
        engine.schedule_dispatch(consumer)


def set_prefetch(engine: Engine, consumer: Consumer, prefetch: i64) -> None:
    """Change how much a consumer takes. With 0 it drains: others get its partitions at once, it keeps what it has."""
    changes_draining = (consumer.prefetch == 0) != (prefetch == 0)
    consumer.prefetch = prefetch
    if changes_draining and consumer.group is not None:
        rebalance(engine, consumer.group)
    engine.schedule_dispatch(consumer)


def rebalance(engine: Engine, group: Group) -> None:
    """Share the partitions out among the members. Each member is asked what it has room for, since what one member
    had no room for may go to another now."""
    for cursor in group.rebalance():
        cursor.blocked_since = 0.0
        if cursor.consumer is None:
            engine.body_cache.forget_cursor(cursor)
    for consumer in group.eligible_members():
        engine.schedule_dispatch(consumer)
