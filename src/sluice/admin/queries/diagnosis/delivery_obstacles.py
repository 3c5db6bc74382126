"""What keeps a message from going out to the consumer that serves its partition, as a finding: biography and diagnosis
both ask, the one for a message and the other for a group."""

from __future__ import annotations

from math import inf

from sluice.admin.queries.diagnosis import phrases
from sluice.admin.queries.message_lookup import name_of
from sluice.admin.views import Finding
from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer
from sluice.broker.sessions.registry import NEVER
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, READY, Lease
from sluice.queues.model.group import Group
from sluice.queues.ports import Consumer
from sluice.queues.model.queue_rules import STRICT


def obstacle_of(consumer: Consumer, now: float) -> Finding | None:
    """Why a consumer takes nothing more now; None when it does."""
    name = consumer.client
    group = consumer.group
    queue = group.queue if group is not None else None
    timeout = queue.rules.delivery_timeout if queue is not None else 0.0
    if consumer.paused:
        return Finding("consumer-away", disconnection(consumer, now), _bring_back(consumer))
    if consumer.stalled:
        seen_at = max(consumer.settled_at, consumer.active_at)
        return Finding(
            "consumer-stalled",
            f"consumer {name} has stalled: it let a deadline pass and has settled or extended nothing since "
            f"{phrases.moment(seen_at, now)}",
            f"Look at {name}: it hangs, or needs more than {phrases.span(timeout)} for a message. Restart it, have it"
            " extend its deliveries, or raise performance.delivery_timeout",
        )
    slow = _slow_line(consumer)
    if slow is not None:
        return slow
    if consumer.held >= consumer.prefetch:
        return _busy(consumer, now)
    return None


def _busy(consumer: Consumer, now: float) -> Finding:
    """A consumer holds as many deliveries as it asked for. All of them are within their deadlines:
    otherwise it would have stalled."""
    name = consumer.client
    leases = leases_of(consumer)
    dates = ""
    if leases:
        oldest = min(leases, key=lambda lease: lease.last_at)
        deadline = min(lease.deadline for lease in leases)
        dates = (
            f", the oldest since {phrases.moment(oldest.last_at, now)}. It must settle or extend the first by "
            f"{phrases.moment(deadline, now)}"
        )
    group = f" of group {consumer.group.name}" if consumer.group is not None else ""
    settled = f"it last settled at {phrases.moment(consumer.settled_at, now)}" if consumer.settled_at else ""
    forgets = f". If {name} is done with what it holds, let it settle that ($ack)"
    return Finding(
        "prefetch",
        f"consumer {name} is busy: it holds {phrases.count_of(int(consumer.held), 'delivery', 'deliveries')}, "
        f"as many as its prefetch allows{dates}; {settled or 'it has settled nothing yet'}",
        f"Wait, or start more workers{group}{'' if settled else forgets}",
        is_fault=False,
    )


def disconnection(consumer: Consumer, now: float) -> str:
    """Say since when a consumer is disconnected, when its session expires, and when what it holds returns."""
    said = f"consumer {consumer.client} is disconnected"
    expires_at = inf
    if isinstance(consumer, QueueConsumer):
        session = consumer.session
        if session.gone_at:
            said += f" since {phrases.moment(session.gone_at, now)}"
        if session.expiry != NEVER:
            expires_at = session.gone_at + session.expiry
            said += f", and its session expires at {phrases.moment(expires_at, now)}"
        else:
            said += ", and its session does not expire"
    leases = leases_of(consumer)
    if not leases:
        return said
    held = "The delivery that it holds returns" if len(leases) == 1 else ""
    held = held or f"The {len(leases):,} deliveries that it holds return"
    first = min(lease.deadline for lease in leases)
    if expires_at <= first:
        return f"{said}. {held} to the group then"
    if len(leases) == 1:
        return f"{said}. {held} to the group at its deadline, {phrases.moment(first, now)}"
    latest = ", and all of them when the session expires" if expires_at < inf else ""
    return f"{said}. {held} to the group at their deadlines, the first at {phrases.moment(first, now)}{latest}"


def _bring_back(consumer: Consumer) -> str:
    group = f" of group {consumer.group.name}" if consumer.group is not None else ""
    return f"Start another worker{group}, or {consumer.client} again with the same client id"


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
            f"consumer {consumer.client} has {phrases.count_of(len(session.inflight), 'packet')} to acknowledge "
            "(PUBACK), as many as it said it takes",
            "Let it send PUBACKs as deliveries arrive, or connect with a larger receive maximum",
        )
    return None


def leases_of(consumer: Consumer) -> list[Lease]:
    """Return the deliveries that a consumer holds."""
    return [
        lease
        for cursor in (consumer.group.cursors if consumer.group is not None else [])
        if cursor.out
        for lease in cursor.leases.values()
        if lease.consumer is consumer
    ]


def blocker_of(cursor: Cursor, key: object) -> Lease | None:
    """The oldest delivery of a key: whatever else has this key waits behind it."""
    found: Lease | None = None
    for lease in cursor.leases.values():
        if lease.key == key and lease.state != READY and (found is None or lease.seq < found.seq):
            found = lease
    return found


def behind(blocker: Lease, now: float, waiting: int = 0, keys: int = 1) -> Finding:
    """A message cannot go because an earlier one of its key is not done; in strict order, an earlier one at all.

    `waiting` is how many messages wait in this way, behind messages of how many `keys`.
    """
    group: Group = blocker.cursor.group
    queue = group.queue
    is_strict = queue.rules.ordering == STRICT
    name = f"{lease_name(blocker)}{'' if is_strict else ' of the same key'}"
    if blocker.state == LEASED:
        return _key_is_busy(blocker, now, waiting, keys)
    last = f"; it failed with: {blocker.description}" if blocker.description else ""
    return Finding(
        "key-blocked",
        f"message {name} waits for its retry until {phrases.moment(blocker.due, now)} and holds back those behind it"
        f"{last}",
        f"{phrases.explain(lease_name(blocker), queue.name)} tells why it fails. What may overtake is a matter of "
        "ordering: none does not wait",
    )


def _key_is_busy(blocker: Lease, now: float, waiting: int, keys: int) -> Finding:
    """The message before it is with a consumer."""
    queue = blocker.cursor.group.queue
    most = int(queue.rules.batch_size)
    is_strict = queue.rules.ordering == STRICT
    order = "strict order" if is_strict else "the order per key"
    waits = phrases.messages(waiting, "waits", "wait") if waiting else "it waits"
    message = blocker.message
    key = f" of key {message.key.decode('utf-8', 'replace')!r}" if message is not None and message.key else ""
    name = lease_name(blocker) + ("" if is_strict else key)
    others = f" ({keys:,} keys are busy, this one the longest)" if keys > 1 else ""
    limit = "only one message" if most == 1 else f"only {most} messages"
    scope = "of the queue" if is_strict else "of a key"
    what = (
        f"{waits} because of {order}: consumer {blocker.client()} holds message {name} since "
        f"{phrases.moment(blocker.last_at, now)}{others}, and {limit} {scope} {'is' if most == 1 else 'are'} "
        "delivered at a time"
    )
    consumer = blocker.consumer
    if consumer is not None and consumer.paused:
        return Finding(
            "key-busy", f"{what}; {disconnection(consumer, now)}", _bring_back(consumer), is_fault=False
        )
    more = phrases.configure(queue.name, "performance.batch_size", str(10 * most))
    spread = "use a queue with ordering partition" if is_strict else "use more keys"
    return Finding(
        "key-busy",
        what,
        f"Make the jobs shorter, {spread}, or allow more at a time, where a retry may come after later "
        f"messages: `{more}`",
        is_fault=False,
    )


def lease_name(lease: Lease) -> str:
    if lease.own_id:
        return lease.own_id.decode("utf-8", "replace")
    return name_of(lease.cursor.partition, int(lease.seq), lease.message)
