"""Findings about what keeps a message from being delivered to the consumer of its partition.

Used by the message trace, for one message, and by the diagnosis, for a group.
"""

from __future__ import annotations

from math import inf

from sluice.admin.model import Finding
from sluice.admin.queries.diagnosis import phrases
from sluice.admin.queries.message_lookup import displayed_message_id
from sluice.broker.namespaces import QueueConsumer
from sluice.broker.routing import NEVER_EXPIRES
from sluice.queues.model import LEASED, READY, STRICT, Consumer, Cursor, Group, Lease


def find_obstacle(consumer: Consumer, now: float) -> Finding | None:
    """Return why a consumer accepts no more deliveries now, or None."""
    name = consumer.client
    group = consumer.group
    queue = group.queue if group is not None else None
    timeout = queue.rules.delivery_timeout if queue is not None else 0.0
    if consumer.is_paused:
        return Finding(
            "consumer-away", describe_disconnection(consumer, now), _reconnect_hint(consumer)
        )
    if consumer.is_stalled:
        seen_at = max(consumer.settled_at, consumer.active_at)
        return Finding(
            "consumer-stalled",
            f"consumer {name} has stalled: it let a deadline pass and has settled or extended"
            f" nothing since {phrases.format_time(seen_at, now)}",
            f"Look at {name}: it hangs, or needs more than {phrases.format_duration(timeout)} for a"
            " message. Restart it, have it extend its deliveries, or raise"
            " performance.delivery_timeout",
        )
    slow = _slow_connection(consumer)
    if slow is not None:
        return slow
    if consumer.in_flight >= consumer.prefetch:
        return _prefetch_exhausted(consumer, now)
    return None


def _prefetch_exhausted(consumer: Consumer, now: float) -> Finding:
    """Report a consumer that holds as many deliveries as its prefetch.

    All of them are within their deadlines: otherwise it would have stalled.
    """
    name = consumer.client
    leases = leases_held_by(consumer)
    dates = ""
    if leases:
        oldest = min(leases, key=lambda lease: lease.last_delivered_at)
        deadline = min(lease.deadline for lease in leases)
        dates = (
            f", the oldest since {phrases.format_time(oldest.last_delivered_at, now)}. It must"
            f" settle or extend the first by {phrases.format_time(deadline, now)}"
        )
    group = f" of group {consumer.group.name}" if consumer.group is not None else ""
    settled = (
        f"it last settled at {phrases.format_time(consumer.settled_at, now)}"
        if consumer.settled_at
        else ""
    )
    settle_hint = f". If {name} is done with the messages it holds, let it settle them ($ack)"
    return Finding(
        "prefetch",
        f"consumer {name} is busy: it holds"
        f" {phrases.pluralize(int(consumer.in_flight), 'delivery', 'deliveries')},"
        f" as many as its prefetch allows{dates}; {settled or 'it has settled nothing yet'}",
        f"Wait, or start more workers{group}{'' if settled else settle_hint}",
        is_fault=False,
    )


def describe_disconnection(consumer: Consumer, now: float) -> str:
    """Say since when a consumer is disconnected, and when its session and its leases end."""
    text = f"consumer {consumer.client} is disconnected"
    expires_at = inf
    if isinstance(consumer, QueueConsumer):
        session = consumer.session
        if session.disconnected_at:
            text += f" since {phrases.format_time(session.disconnected_at, now)}"
        if session.expiry_seconds != NEVER_EXPIRES:
            expires_at = session.disconnected_at + session.expiry_seconds
            text += f", and its session expires at {phrases.format_time(expires_at, now)}"
        else:
            text += ", and its session does not expire"
    leases = leases_held_by(consumer)
    if not leases:
        return text
    held = "The delivery that it holds returns" if len(leases) == 1 else ""
    held = held or f"The {len(leases):,} deliveries that it holds return"
    first = min(lease.deadline for lease in leases)
    if expires_at <= first:
        return f"{text}. {held} to the group then"
    if len(leases) == 1:
        return f"{text}. {held} to the group at its deadline, {phrases.format_time(first, now)}"
    latest = ", and all of them when the session expires" if expires_at < inf else ""
    return (
        f"{text}. {held} to the group at their deadlines, the first at"
        f" {phrases.format_time(first, now)}{latest}"
    )


def _reconnect_hint(consumer: Consumer) -> str:
    group = f" of group {consumer.group.name}" if consumer.group is not None else ""
    return f"Start another worker{group}, or {consumer.client} again with the same client id"


def _slow_connection(consumer: Consumer) -> Finding | None:
    if not isinstance(consumer, QueueConsumer):
        return None
    session = consumer.session
    connection = session.connection
    if connection is not None and connection.is_write_paused:
        return Finding(
            "consumer-slow",
            f"consumer {consumer.client} reads more slowly than the broker sends, and gets nothing"
            " until it has caught up",
            f"Look at {consumer.client} and at its network, or add a second consumer to its group",
        )
    if connection is not None and len(session.outbound.inflight) >= session.outbound.window:
        return Finding(
            "window-full",
            f"consumer {consumer.client} has"
            f" {phrases.pluralize(len(session.outbound.inflight), 'packet')} to acknowledge"
            " (PUBACK),"
            " as many as its receive maximum allows",
            "Let it send PUBACKs as deliveries arrive, or connect with a larger receive maximum",
        )
    return None


def leases_held_by(consumer: Consumer) -> list[Lease]:
    """Return the deliveries that a consumer holds."""
    return [
        lease
        for cursor in (consumer.group.cursors if consumer.group is not None else [])
        if cursor.in_flight
        for lease in cursor.leases.values()
        if lease.consumer is consumer
    ]


def find_blocking_lease(cursor: Cursor, key: object) -> Lease | None:
    """Return the oldest delivery of a key, which blocks all other messages of the key."""
    found: Lease | None = None
    for lease in cursor.leases.values():
        if (
            lease.key_hash == key
            and lease.state != READY
            and (found is None or lease.seq < found.seq)
        ):
            found = lease
    return found


def describe_blocked(blocker: Lease, now: float, waiting: int = 0, keys: int = 1) -> Finding:
    """Report that a message waits for an earlier one of its key; in strict order, for any earlier.

    `waiting` is how many messages wait in this way, for messages of how many `keys`.
    """
    group: Group = blocker.cursor.group
    queue = group.queue
    is_strict = queue.rules.ordering == STRICT
    name = f"{lease_message_id(blocker)}{'' if is_strict else ' of the same key'}"
    if blocker.state == LEASED:
        return _describe_busy_key(blocker, now, waiting, keys)
    last = f"; it failed with: {blocker.description}" if blocker.description else ""
    return Finding(
        "key-blocked",
        f"message {name} waits for its retry until {phrases.format_time(blocker.retry_at, now)} and"
        f" blocks the messages after it{last}",
        f"{phrases.explain_command(lease_message_id(blocker), queue.name)} says why it fails. With"
        " ordering none, later messages do not wait",
    )


def _describe_busy_key(blocker: Lease, now: float, waiting: int, keys: int) -> Finding:
    """Report that a consumer holds an earlier message of the key."""
    queue = blocker.cursor.group.queue
    max_deliveries = int(queue.rules.batch_size)
    is_strict = queue.rules.ordering == STRICT
    order = "strict order" if is_strict else "the order per key"
    waits = phrases.count_messages(waiting, "waits", "wait") if waiting else "it waits"
    message = blocker.message
    key = (
        f" of key {message.key.decode('utf-8', 'replace')!r}"
        if message is not None and message.key
        else ""
    )
    name = lease_message_id(blocker) + ("" if is_strict else key)
    others = f" ({keys:,} keys are busy, this one the longest)" if keys > 1 else ""
    limit = "only one message" if max_deliveries == 1 else f"only {max_deliveries} messages"
    scope = "of the queue" if is_strict else "of a key"
    what = (
        f"{waits} because of {order}: consumer {blocker.holder_client_id()} holds message {name}"
        f" since {phrases.format_time(blocker.last_delivered_at, now)}{others}, and {limit} {scope}"
        f" {'is' if max_deliveries == 1 else 'are'} delivered at a time"
    )
    consumer = blocker.consumer
    if consumer is not None and consumer.is_paused:
        return Finding(
            "key-busy",
            f"{what}; {describe_disconnection(consumer, now)}",
            _reconnect_hint(consumer),
            is_fault=False,
        )
    more = phrases.configure_command(queue.name, "performance.batch_size", str(10 * max_deliveries))
    spread = "use a queue with ordering partition" if is_strict else "use more keys"
    return Finding(
        "key-busy",
        what,
        f"Make the jobs shorter, {spread}, or allow more at a time, where a retry may come after"
        f" later messages: `{more}`",
        is_fault=False,
    )


def lease_message_id(lease: Lease) -> str:
    if lease.publisher_message_id:
        return lease.publisher_message_id.decode("utf-8", "replace")
    return displayed_message_id(lease.cursor.partition, int(lease.seq), lease.message)
