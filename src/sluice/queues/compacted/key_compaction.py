"""Compacted queues: of each key the last message is kept, for every group that is there and every one that will come.

Compaction is a property of the queue, not another kind of it: partitions, groups, deliveries and retries are those of
work queues. Three things differ. A message takes the place of the older one of its key, in the same frame, whoever has
that in hand: a delivery that is under way is ended, and what its consumer says of it finds nothing any more. A message
that every group has settled stays. And a tombstone, an empty payload, removes its key: groups that are there hear of
it, and then it is let go. One for a key that is not there changes nothing.

The record of a message says all that recovery needs: reading it again replaces what it replaced. So the depth of a
compacted queue is the number of its keys, and what was replaced counts as purged in the books of a group.

A key is known by its mark (`keys`); by it the queue knows the place of its last message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.errors import InvalidQueueConfig, MissingKey
from sluice.message import COMPRESSED, TOMBSTONE, Message, size_of_start
from sluice.queues.flow import removal
from sluice.queues.flow import settlement
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED
from sluice.queues.log.frame_builder import PURGED
from sluice.queues.compacted.key_index import place_of, remember
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.store.protocol import HEADER_BYTES

if TYPE_CHECKING:
    from sluice.queues.engine import Engine


# ---- in


def publish(engine: Engine, queue: Queue, message: Message) -> None:
    """Take a message that is small enough and no duplicate. A tombstone needs no room: it adds no key."""
    check(queue, message)
    if (
        not message.payload
        or queue.depth < queue.rules.max_depth
        or removal.make_room(engine, queue, message)
    ):
        append(engine, queue, message)


def check(queue: Queue, message: Message) -> None:
    """A captured message goes by its topic; any other must have a key. None has a turn but its own."""
    if not message.key:
        if not message.topic:
            raise MissingKey(queue.name)
        message.key = message.topic
    if message.deliver_at or message.priority:
        raise InvalidQueueConfig(
            f"queue {queue.name!r} is compacted, and has neither delays nor priorities",
            "Leave delay, deliver-at and priority out, or use a work queue",
        )


def append(engine: Engine, queue: Queue, message: Message) -> None:
    """Put a message into the place of the older one of its key. One without a key, a dead letter, stands by itself."""
    rules = queue.rules
    payload = message.payload
    key = engine.key_hash(queue, message.key)
    partition = queue.place(key)
    old = place_of(engine, queue, message.key)
    flags: i64 = 0
    left: i64 = len(partition.cursors)
    if not payload and message.key:
        if old is None:
            return  # there is no such key, and so nothing ends
        if left == 0:
            removal.remove_for_all(engine, old[0], old[1], PURGED)
            return
        flags = TOMBSTONE
    if old is not None:
        _replace(engine, old[0], old[1])
    now_ms: i64 = int(engine.now * 1000.0)
    message.enqueued_at = now_ms
    if rules.message_ttl > 0.0:
        latest: i64 = int(engine.now + rules.message_ttl + 0.999)
        if message.expires == 0 or message.expires > latest:
            message.expires = latest
    expires = message.expires
    if rules.compress and len(payload) >= 256:
        packed = engine.codec.compress(payload)
        if len(packed) < len(payload):
            payload = packed
            flags |= COMPRESSED
    seq = partition.next
    size: i64 = HEADER_BYTES + size_of_start(message) + len(payload)
    address = engine.journal.add_message(
        partition, flags, seq, key, expires, now_ms, size, message, payload, rules.sync
    )
    partition.append(address, size, key, expires, flags, left, now_ms)
    engine.segments.add_lasting(address, size)
    queue.depth += 1
    queue.bytes += size
    queue.enqueued += 1
    remember(engine, queue, partition, seq, message.key)
    if queue.consumers:
        engine.young.put(partition, seq, message)
    if expires:
        engine.timers.expect_expiry(partition, expires)


# ---- out


def _replace(engine: Engine, partition: Partition, seq: i64) -> None:
    """A younger message of its key is here: gone from every group, from its consumers' hands too."""
    for cursor in partition.cursors:
        if not cursor.settled(seq) and partition.is_for(seq, cursor.group.gid):
            lease = cursor.leases.get(int(seq))
            if cursor.ahead:
                engine.young.drop_ahead(cursor, seq)
            if lease is None:
                cursor.withdraw(seq)
            else:
                if lease.state == LEASED:
                    if lease.consumer is not None:
                        lease.consumer.taken_away(lease)
                    settlement.let_go(engine, lease, False)
                cursor.end_out(lease)
                removal.drop_lease(lease)
            _pass(cursor, seq)
            engine.after_settle(cursor)
    _end(engine, partition, seq)


def _pass(cursor: Cursor, seq: i64) -> None:
    cursor.counts[PURGED] += 1
    cursor.partition.settle_one(seq)
    cursor.pass_over(seq, False)


def _end(engine: Engine, partition: Partition, seq: i64) -> None:
    partition.queue.depth -= 1
    removal.let_go_of(engine, partition, seq)


# ---- recovery


def load(engine: Engine, queue: Queue, partition: Partition, seq: i64, key: bytes) -> None:
    """A message is read that was published behind the snapshot: it replaces what it replaced then."""
    old = place_of(engine, queue, key)
    if old is not None:
        home, before = old
        for cursor in home.cursors:
            if not cursor.settled(before) and home.is_for(before, cursor.group.gid):
                cursor.leases.pop(before, None)
                _pass(cursor, before)
        _end(engine, home, before)
    remember(engine, queue, partition, seq, key)
