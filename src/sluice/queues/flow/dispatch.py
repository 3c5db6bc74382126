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
from sluice.queues.model.message_columns import GONE
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, WAITING, Lease
from sluice.queues.model.group import Group
from sluice.queues.log.frame_builder import PURGED
from sluice.queues.model.partition import Partition
from sluice.queues.ports import Consumer
from sluice.queues.bodies.body_reads import AHEAD, BURY, DELIVER, EXPIRE, Read, message_of, read_for
from sluice.queues.flow.removal import expire, remove_for_all
from sluice.queues.flow.settlement import body_came, bury, fail, time_to_give_up

if TYPE_CHECKING:
    from sluice.queues.engine import Engine

ALL: Final = 0x7FFF_FFFF_FFFF_FFFF

# ---- leasing


def offer(engine: Engine, cursor: Cursor) -> None:
    """Lease what the cursor has to its consumer, up to its share of the room. A consumer's other partitions come first
    with what is left: one that took all would search far for keys that are free, and leave the others behind."""
    consumer = cursor.consumer
    if consumer is None:
        return
    if cursor.helpers:
        _offer_in_turns(engine, cursor)
    count: i64 = len(consumer.cursors)
    if count <= 1:
        if _offer(engine, cursor, consumer, ALL, False):
            _leave_unserved(engine, cursor, consumer)
        return
    share: i64 = consumer.prefetch // count
    left = _offer(engine, cursor, consumer, share, False)
    if cursor.out >= share:
        engine.feed(consumer)
    elif left:
        _leave_unserved(engine, cursor, consumer)


def _offer_in_turns(engine: Engine, cursor: Cursor) -> None:
    """Deal messages without a key out to the consumer of the partition and its helpers, one by one."""
    takers = [*cursor.helpers]
    if cursor.consumer is not None:
        takers.append(cursor.consumer)
    full: i64 = 0
    while full < len(takers) and not cursor.fetching and cursor.has_shared():
        before = cursor.out
        cursor.turn = (cursor.turn + 1) % len(takers)
        taker = takers[cursor.turn]
        if taker.has_room():
            full = 0
            _offer(engine, cursor, taker, before + 1, True)
            if cursor.out == before:
                return  # nothing is left, or a body is being read
        else:
            full += 1


def _offer(engine: Engine, cursor: Cursor, consumer: Consumer, most: i64, shared: bool) -> bool:
    """Lease messages to `consumer` until `most` of the cursor's are out; `shared`: only those without a key.

    Return whether the consumer had no room for messages that may be left.
    """
    if cursor.fetching:
        return False
    partition = cursor.partition
    alone = len(partition.cursors) == 1
    while cursor.out < most:
        if not consumer.has_room():
            return cursor.has_more()
        seq = cursor.choose_shared() if shared else cursor.choose()
        if seq < 0:
            if not shared:
                cursor.blocked_since = 0.0
            return False
        number: object = int(seq)
        message = partition.young.get(number) if partition.young else None
        if message is not None:
            if alone:
                del partition.young[number]
                engine.young.bytes -= message.cost
        else:
            if cursor.ahead:
                message = cursor.ahead.pop(number, None)
            if message is not None:
                engine.young.bytes -= message.cost
                engine.young.ahead_bytes -= message.cost
            elif cursor.awaited_seq == seq:
                message = cursor.awaited
                cursor.awaited = None
                cursor.awaited_seq = -1
            if message is None:
                cursor.put_back(seq, partition.priority(seq), cursor.key_of(seq))
                if not cursor.reading:
                    read_for(engine, cursor, seq)
                return False
        if message.expires and float(message.expires) <= engine.now:
            cursor.put_back(seq, partition.priority(seq), cursor.key_of(seq))
            expire(engine, partition, seq, message)
            continue
        _lease(engine, cursor, seq, message, consumer)
    return False


def _lease(engine: Engine, cursor: Cursor, seq: i64, message: Message, consumer: Consumer) -> None:
    number = int(seq)
    group = cursor.group
    queue = group.queue
    now = engine.now
    # While every lease is out, what is chosen has none.
    lease = cursor.leases.get(number) if len(cursor.leases) > cursor.out else None
    if lease is None:
        lease = Lease(cursor, seq, cursor.key_of(seq))
        lease.first_at = now
        cursor.leases[number] = lease
        queue.delivery_latency.add(now - float(message.enqueued_at) / 1000.0)
    else:
        if lease.failures and now >= time_to_give_up(engine, lease):
            lease.state = WAITING
            lease.message = message
            bury(engine, lease, "timeout", lease.description, True)
            return
        group.redelivered += 1
    lease.message = message
    lease.consumer = consumer
    lease.holder = consumer.identity
    lease.state = LEASED
    engine.tokens.issue(lease, consumer, cursor.partition.pid)
    lease.attempt = lease.failures + 1
    lease.last_at = now
    lease.since = now
    lease.deadline = now + queue.rules.delivery_timeout
    cursor.out += 1
    cursor.delivered += 1
    consumer.held += 1
    consumer.full_since = 0.0
    group.delivered += 1
    queue.deadlines.add(lease)
    if queue.watch_at == 0.0:
        engine.timers.watch(queue, lease.deadline)
    if message.id:
        group.add_name(lease, message.id)
    consumer.deliver(lease)


def refill(engine: Engine, consumer: Consumer) -> None:
    """Give a consumer with room what its partitions have, each partition in turn: first their shares, then whatever
    there is. While one of them waits for a body, what is left is left to it."""
    if consumer.was_relieved and consumer.has_room():
        consumer.was_relieved = False
        if consumer.group is not None:
            rebalance(engine, consumer.group)  # it gets its share of the partitions back
    count: i64 = len(consumer.cursors)
    if count > 0:
        share: i64 = ALL if count == 1 else consumer.prefetch // count
        if _serve(engine, consumer, share) and count > 1 and consumer.has_room():
            _serve(engine, consumer, ALL)
    group = consumer.group
    if group is None or not group.shares_work():
        return
    if consumer.has_room():
        if group.unserved:
            group.is_saturated = False
            engine.share_later(group)
    else:
        for cursor in consumer.cursors:
            if cursor.has_more():
                _leave_unserved(engine, cursor, consumer)


def _serve(engine: Engine, consumer: Consumer, most: i64) -> bool:
    """One round over its partitions; whether none of them waits for a body."""
    cursors = consumer.cursors
    count: i64 = len(cursors)
    here = True
    step: i64 = 0
    while step < count and consumer.has_room():
        cursor = cursors[(consumer.turn + step) % count]
        step += 1
        if cursor.has_more():
            _offer(engine, cursor, consumer, most, False)
        if cursor.fetching:
            here = False
    consumer.turn = (consumer.turn + step) % count
    return here


# ---- sharing what the consumer of a partition has no room for


def _leave_unserved(engine: Engine, cursor: Cursor, consumer: Consumer) -> None:
    """Note that `consumer`, which has the partition, has no room for messages that could be delivered."""
    group = cursor.group
    if not group.shares_work():
        return
    if consumer.full_since == 0.0:
        consumer.full_since = engine.now
    if cursor.blocked_since == 0.0:
        cursor.blocked_since = engine.now
    if not cursor.is_unserved:
        cursor.is_unserved = True
        group.unserved.append(cursor)
    if not group.is_saturated:
        engine.share_later(group)


def share_out(engine: Engine, group: Group) -> None:
    """Give messages that the consumers of their partitions have no room for to members that have room."""
    unserved = group.unserved
    group.unserved = []
    for cursor in unserved:
        cursor.is_unserved = False
    for cursor in unserved:
        if _share(engine, group, cursor) and not cursor.is_unserved:
            cursor.is_unserved = True
            group.unserved.append(cursor)


def _share(engine: Engine, group: Group, cursor: Cursor) -> bool:
    """Do so for one partition; return whether messages are left that a member may take later."""
    while cursor.consumer is not None and not cursor.fetching and cursor.has_more():
        if group.is_saturated:
            return True
        member = group.member_with_room()
        if member is None:
            group.is_saturated = True
            return True
        consumer = cursor.consumer
        if consumer is member or consumer.has_room():
            if not _offer(engine, cursor, consumer, ALL, False):
                return False
            continue
        before = cursor.out
        _offer(engine, cursor, member, before + 1, True)
        if cursor.out > before or cursor.fetching:
            continue
        # What is left has a key: it waits for the consumer of the partition, or the partition moves.
        if not cursor.has_deliverable():
            cursor.blocked_since = 0.0
            return False
        movable_at = _movable_at(group, cursor, consumer, member)
        if movable_at > engine.now:
            engine.timers.expect_handover(group, movable_at)
            return True
        if _is_stuck(engine, group, consumer):
            consumer.was_relieved = True
        group.hand_over(cursor, member)
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
    return consumer.full_since > 0.0 and engine.now - consumer.full_since >= group.queue.rules.rebalance_after


# ---- bodies that had to be read


def fetched(engine: Engine, read: Read, records: list[bytes | None]) -> None:
    """The answer to a read. A record that is damaged can never be delivered: its message is given up, loudly."""
    cursor = read.cursor
    partition = read.partition
    if cursor is not None:
        if read.what == AHEAD:
            cursor.reading = False
        else:
            cursor.fetching = False
    first = read.what == DELIVER
    for seq, address, data in zip(read.sequences, read.addresses, records, strict=True):
        here = partition.address(seq)
        if here == GONE:
            first = False
            continue
        message = None if data is None else message_of(data, engine.codec)
        if message is not None:
            _came(engine, read, seq, message, first)
        elif here == address:
            damaged(engine, partition, seq)
        elif read.what == EXPIRE or read.what == BURY:
            # Compaction has moved it and given its old place back: ask again where it is now.
            again = Read(read.what, partition, [seq], [int(here)])
            again.lease = read.lease
            again.reason = read.reason
            engine.reads.append(again)
        first = False
    if cursor is not None:
        offer(engine, cursor)
        if cursor.consumer is not None:
            engine.feed(cursor.consumer)


def _came(engine: Engine, read: Read, seq: i64, message: Message, first: bool) -> None:
    cursor = read.cursor
    lease = read.lease
    if read.what == EXPIRE:
        expire(engine, read.partition, seq, message)
    elif read.what == BURY:
        if lease is not None:
            body_came(engine, lease, message, read.reason)
    elif cursor is not None:
        if first:
            cursor.awaited = message
            cursor.awaited_seq = seq
        elif cursor.consumer is not None:
            engine.young.put_ahead(cursor, seq, message)


def damaged(engine: Engine, partition: Partition, seq: i64) -> None:
    """The store cannot give a message back any more."""
    engine.warnings.append(
        f"message {seq} of partition {partition.number} of queue {partition.queue.name} is damaged on disk: lost"
    )
    remove_for_all(engine, partition, seq, PURGED)


# ---- members


def join(engine: Engine, group: Group, consumer: Consumer) -> None:
    engine.joined += 1
    consumer.joined = engine.joined
    consumer.group = group
    consumer.active_at = engine.now
    consumer.stalled = False
    consumer.paused = False
    consumer.full_since = 0.0
    consumer.was_relieved = False
    engine.tokens.admit(consumer, group.gid)
    group.consumers.append(consumer)
    group.queue.consumers += 1
    rebalance(engine, group)
    engine.feed(consumer)


def leave(engine: Engine, consumer: Consumer) -> None:
    """A consumer is gone for good: what it held goes to the others at once, as one failure without a backoff. If it
    goes because the server does, that is no failure of its own: it may settle what it has in the next life."""
    group = consumer.group
    if group is None:
        return
    consumer.group = None
    consumer.cursors = []
    group.consumers.remove(consumer)
    group.queue.consumers -= 1
    for cursor in group.cursors:
        if cursor.out and not engine.closing:
            for lease in [one for one in cursor.leases.values() if one.consumer is consumer]:
                lease.description = "its consumer went away"
                fail(engine, lease, 0.0, False)
    rebalance(engine, group)


def set_identity(engine: Engine, consumer: Consumer, identity: str) -> None:
    """Bind the next deliveries of a consumer to another identity: a client has resumed its session as another user."""
    consumer.identity = identity
    if consumer.group is not None:
        engine.tokens.admit(consumer, consumer.group.gid)


def pause(engine: Engine, consumer: Consumer, paused: bool) -> None:
    """A consumer cannot be reached for now, or is back: meanwhile others serve its partitions, it keeps what it has."""
    consumer.paused = paused
    if not paused:
        consumer.stalled = False
        consumer.active_at = engine.now
    if consumer.group is not None:
        rebalance(engine, consumer.group)
        engine.feed(consumer)


def set_prefetch(engine: Engine, consumer: Consumer, prefetch: i64) -> None:
    """Change how much a consumer takes. With 0 it drains: others get its partitions at once, it keeps what it has."""
    drains = (consumer.prefetch == 0) != (prefetch == 0)
    consumer.prefetch = prefetch
    if drains and consumer.group is not None:
        rebalance(engine, consumer.group)
    engine.feed(consumer)


def rebalance(engine: Engine, group: Group) -> None:
    """Share the partitions out among the members. Each member is asked what it has room for, since what one member
    had no room for may go to another now."""
    for cursor in group.rebalance():
        cursor.blocked_since = 0.0
        if cursor.consumer is None:
            engine.young.forget_ahead(cursor)
    for consumer in group.eligible():
        engine.feed(consumer)
