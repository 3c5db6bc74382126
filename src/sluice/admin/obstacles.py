"""What keeps a message from going out to the consumer that serves its partition, as a finding: biography and diagnosis
both ask, the one for a message and the other for a group."""

from __future__ import annotations

from sluice.admin import words
from sluice.admin.messages import name_of
from sluice.admin.views import Finding
from sluice.broker.queue_consumer import QueueConsumer
from sluice.queues.cursor import Cursor
from sluice.queues.delivery import LEASED, READY, Lease
from sluice.queues.group import Group
from sluice.queues.journal import ACKED
from sluice.queues.ports import Consumer
from sluice.queues.rules import STRICT


def obstacle_of(consumer: Consumer, now: float) -> Finding | None:
    """Why a consumer takes nothing more now; None when it does."""
    name = consumer.client
    group = consumer.group
    queue = group.queue if group is not None else None
    timeout = queue.rules.delivery_timeout if queue is not None else 0.0
    if consumer.paused:
        return Finding(
            "consumer-away",
            f"consumer {name} is away: its session lives and its connection is gone",
            f"Start {name} again; what it holds goes to others when the deadline of {words.span(timeout)} has passed",
        )
    if consumer.stalled:
        return Finding(
            "consumer-stalled",
            f"consumer {name} has stalled: it let a deadline pass and has settled nothing since "
            f"{words.moment(consumer.settled_at, now)}",
            f"Look at {name}: it hangs, or needs more than {words.span(timeout)} for a message. Restart it, have it"
            " extend its deliveries, or raise performance.delivery_timeout",
        )
    slow = _slow_line(consumer)
    if slow is not None:
        return slow
    if consumer.held >= consumer.prefetch:
        oldest = oldest_of(consumer)
        since = f", the oldest since {words.moment(oldest.last_at, now)}" if oldest is not None else ""
        return Finding(
            "prefetch",
            f"consumer {name} holds {words.count_of(int(consumer.held), 'delivery', 'deliveries')}, as many as its "
            f"prefetch allows{since}; it last "
            f"settled or joined {words.moment(consumer.settled_at, now)}",
            f"Let {name} settle what it holds ($ack), or subscribe with a larger prefetch",
            # A busy worker looks like one that forgets to settle, but for this: its group has acknowledged something.
            is_fault=group is None or not any(int(cursor.counts[ACKED]) for cursor in group.cursors),
        )
    return None


def _slow_line(consumer: Consumer) -> Finding | None:
    if not isinstance(consumer, QueueConsumer):
        return None
    session = consumer.session
    connection = session.connection
    if connection is not None and connection.choked:
        return Finding(
            "consumer-slow",
            f"consumer {consumer.client} reads more slowly than it is written to, and is given nothing until it has "
            "caught up",
            f"Look at {consumer.client} and at its network, or add a second consumer to its group",
        )
    if connection is not None and len(session.inflight) >= session.window:
        return Finding(
            "window-full",
            f"consumer {consumer.client} has {words.count_of(len(session.inflight), 'packet')} to acknowledge "
            "(PUBACK), as many as it said it takes",
            "Let it send PUBACKs as deliveries arrive, or connect with a larger receive maximum",
        )
    return None


def oldest_of(consumer: Consumer) -> Lease | None:
    """What it has held the longest."""
    oldest: Lease | None = None
    for cursor in consumer.group.cursors if consumer.group is not None else []:
        if cursor.out:
            for lease in cursor.leases.values():
                if lease.consumer is consumer and (oldest is None or lease.last_at < oldest.last_at):
                    oldest = lease
    return oldest


def blocker_of(cursor: Cursor, key: object) -> Lease | None:
    """The oldest delivery of a key: whatever else has this key waits behind it."""
    found: Lease | None = None
    for lease in cursor.leases.values():
        if lease.key == key and lease.state != READY and (found is None or lease.seq < found.seq):
            found = lease
    return found


def behind(blocker: Lease, now: float) -> Finding:
    """A message cannot go because an earlier one of its key is not done; in strict order, an earlier one at all."""
    group: Group = blocker.cursor.group
    queue = group.queue
    is_strict = queue.rules.ordering == STRICT
    name = f"{lease_name(blocker)}{'' if is_strict else ' of the same key'}"
    if blocker.state == LEASED:
        most = int(queue.rules.batch_size)
        return Finding(
            "key-busy",
            f"consumer {blocker.holder} works on message {name} since {words.moment(blocker.last_at, now)}, and only "
            f"{'one' if most == 1 else most} {'of a strict queue' if is_strict else 'of a key'} "
            f"{'goes' if most == 1 else 'go'} out at a time",
            "Let it settle that one, or allow more with "
            + words.configure(queue.name, "performance.batch_size", str(10 * most)),
            is_fault=False,
        )
    last = f"; it failed with: {blocker.description}" if blocker.description else ""
    return Finding(
        "key-blocked",
        f"message {name} waits for its retry until {words.moment(blocker.due, now)} and holds back those behind it"
        f"{last}",
        f"{words.explain(lease_name(blocker), queue.name)} tells why it fails. What may overtake is a matter of "
        "ordering: none does not wait",
    )


def lease_name(lease: Lease) -> str:
    if lease.own_id:
        return lease.own_id.decode("utf-8", "replace")
    return name_of(lease.cursor.partition, int(lease.seq), lease.message)
