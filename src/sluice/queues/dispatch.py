"""Who gets what: members of a group and their partitions, and leasing messages to those with room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.message import Message
from sluice.queues.block import GONE
from sluice.queues.cursor import Cursor
from sluice.queues.delivery import LEASED, WAITING, Lease
from sluice.queues.group import Group
from sluice.queues.journal import PURGED
from sluice.queues.partition import Partition
from sluice.queues.ports import Consumer
from sluice.queues.reading import AHEAD, BURY, DELIVER, EXPIRE, Read, message_of, read_for
from sluice.queues.removal import expire, remove_for_all
from sluice.queues.settling import body_came, bury, fail

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
    count: i64 = len(consumer.cursors)
    if count <= 1:
        _offer(engine, cursor, consumer, ALL)
        return
    share: i64 = consumer.prefetch // count
    _offer(engine, cursor, consumer, share)
    if cursor.out >= share:
        engine.feed(consumer)


def _offer(engine: Engine, cursor: Cursor, consumer: Consumer, most: i64) -> None:
    if cursor.fetching:
        return
    partition = cursor.partition
    alone = len(partition.cursors) == 1
    while cursor.out < most and consumer.has_room():
        seq = cursor.choose()
        if seq < 0:
            return
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
                return
        if message.expires and float(message.expires) <= engine.now:
            cursor.put_back(seq, partition.priority(seq), cursor.key_of(seq))
            expire(engine, partition, seq, message)
            continue
        _lease(engine, cursor, seq, message, consumer)


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
        if lease.failures and now >= lease.first_at + queue.rules.total_timeout:
            lease.state = WAITING
            lease.message = message
            bury(engine, lease, "timeout", lease.description, True)
            return
        group.redelivered += 1
    lease.message = message
    lease.consumer = consumer
    lease.holder = consumer.client
    lease.state = LEASED
    lease.token = engine.next_token
    engine.next_token += 1
    lease.attempt = lease.failures + 1
    lease.last_at = now
    lease.since = now
    lease.deadline = now + queue.rules.delivery_timeout
    cursor.out += 1
    cursor.delivered += 1
    consumer.held += 1
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
    cursors = consumer.cursors
    count: i64 = len(cursors)
    if count == 0:
        return
    share: i64 = ALL if count == 1 else consumer.prefetch // count
    if _serve(engine, consumer, share) and count > 1 and consumer.has_room():
        _serve(engine, consumer, ALL)


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
            _offer(engine, cursor, consumer, most)
        if cursor.fetching:
            here = False
    consumer.turn = (consumer.turn + step) % count
    return here


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
    consumer.settled_at = engine.now
    consumer.stalled = False
    consumer.paused = False
    group.consumers.append(consumer)
    group.queue.consumers += 1
    rebalance(engine, group)


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


def pause(engine: Engine, consumer: Consumer, paused: bool) -> None:
    """A consumer cannot be reached for now, or is back: meanwhile others serve its partitions, it keeps what it has."""
    consumer.paused = paused
    if not paused:
        consumer.stalled = False
        consumer.settled_at = engine.now
    if consumer.group is not None:
        rebalance(engine, consumer.group)
        engine.feed(consumer)


def rebalance(engine: Engine, group: Group) -> None:
    for cursor in group.rebalance():
        if cursor.consumer is not None:
            engine.feed(cursor.consumer)
        else:
            engine.young.forget_ahead(cursor)
