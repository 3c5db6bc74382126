"""Findings about what keeps a message from being delivered to the consumer of its partition.

Used by the message trace, for one message, and by the diagnosis, for a group.
"""

from __future__ import annotations

from math import inf

from sluice.admin.model import Finding
from sluice.admin.queries.diagnosis import phrases
from sluice.queues.service import GroupInspector, views


def find_obstacle(group: GroupInspector, consumer: views.Member, now: float) -> Finding | None:
    """Return why a consumer of a group accepts no more deliveries now, or None."""
    name = consumer.client
    timeout = group.rules.delivery_timeout
    if not consumer.is_connected:
        return Finding(
            "consumer-away",
            describe_disconnection(group, consumer, now),
            _reconnect_hint(group, consumer),
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
        return _prefetch_exhausted(group, consumer, now)
    return None


def _prefetch_exhausted(group: GroupInspector, consumer: views.Member, now: float) -> Finding:
    """Report a consumer that holds as many deliveries as its prefetch.

    All of them are within their deadlines: otherwise it would have stalled.
    """
    name = consumer.client
    held = group.held_by(consumer)
    dates = ""
    if held is not None:
        dates = (
            f", the oldest since {phrases.format_time(held.oldest_at, now)}. It must"
            f" settle or extend the first by {phrases.format_time(held.first_deadline, now)}"
        )
    settled = (
        f"it last settled at {phrases.format_time(consumer.settled_at, now)}"
        if consumer.settled_at
        else ""
    )
    settle_hint = f". If {name} is done with the messages it holds, let it settle them ($ack)"
    return Finding(
        "prefetch",
        f"consumer {name} is busy: it holds"
        f" {phrases.pluralize(consumer.in_flight, 'delivery', 'deliveries')},"
        f" as many as its prefetch allows{dates}; {settled or 'it has settled nothing yet'}",
        f"Wait, or start more workers of group {group.name}{'' if settled else settle_hint}",
        is_fault=False,
    )


def describe_disconnection(group: GroupInspector, consumer: views.Member, now: float) -> str:
    """Say since when a consumer is disconnected, and when its session and its leases end."""
    text = f"consumer {consumer.client} is disconnected"
    expires_at = inf
    session = consumer.connection
    if session is not None:
        if session.disconnected_at:
            text += f" since {phrases.format_time(session.disconnected_at, now)}"
        expires_at = session.expires_at
        if expires_at < inf:
            text += f", and its session expires at {phrases.format_time(expires_at, now)}"
        else:
            text += ", and its session does not expire"
    deliveries = group.held_by(consumer)
    if deliveries is None:
        return text
    held = "The delivery that it holds returns" if deliveries.count == 1 else ""
    held = held or f"The {deliveries.count:,} deliveries that it holds return"
    first = deliveries.first_deadline
    if expires_at <= first:
        return f"{text}. {held} to the group then"
    if deliveries.count == 1:
        return f"{text}. {held} to the group at its deadline, {phrases.format_time(first, now)}"
    latest = ", and all of them when the session expires" if expires_at < inf else ""
    return (
        f"{text}. {held} to the group at their deadlines, the first at"
        f" {phrases.format_time(first, now)}{latest}"
    )


def _reconnect_hint(group: GroupInspector, consumer: views.Member) -> str:
    return (
        f"Start another worker of group {group.name}, or {consumer.client} again with the same"
        " client id"
    )


def _slow_connection(consumer: views.Member) -> Finding | None:
    connection = consumer.connection
    if connection is None:
        return None
    if connection.is_slow:
        return Finding(
            "consumer-slow",
            f"consumer {consumer.client} reads more slowly than the broker sends, and gets nothing"
            " until it has caught up",
            f"Look at {consumer.client} and at its network, or add a second consumer to its group",
        )
    if connection.unacked >= connection.window:
        return Finding(
            "window-full",
            f"consumer {consumer.client} has"
            f" {phrases.pluralize(connection.unacked, 'packet')} to acknowledge (PUBACK),"
            " as many as its receive maximum allows",
            "Let it send PUBACKs as deliveries arrive, or connect with a larger receive maximum",
        )
    return None


def describe_blocked(
    group: GroupInspector, blocker: views.Delivery, now: float, waiting: int = 0, keys: int = 1
) -> Finding:
    """Report that a message waits for an earlier one of its key; in strict order, for any earlier.

    `waiting` is how many messages wait in this way, for messages of how many `keys`.
    """
    if blocker.phase == "delivered":
        return _describe_busy_key(group, blocker, now, waiting, keys)
    name = f"{blocker.message_id}{'' if group.is_strict() else ' of the same key'}"
    last = f"; it failed with: {blocker.description}" if blocker.description else ""
    return Finding(
        "key-blocked",
        f"message {name} waits for its retry until {phrases.format_time(blocker.retry_at, now)} and"
        f" blocks the messages after it{last}",
        f"{phrases.explain_command(blocker.message_id, group.queue)} says why it fails. With"
        " ordering none, later messages do not wait",
    )


def _describe_busy_key(
    group: GroupInspector, blocker: views.Delivery, now: float, waiting: int, keys: int
) -> Finding:
    """Report that a consumer holds an earlier message of the key."""
    max_deliveries = int(group.rules.batch_size)
    is_strict = group.is_strict()
    order = "strict order" if is_strict else "the order per key"
    waits = phrases.count_messages(waiting, "waits", "wait") if waiting else "it waits"
    key = f" of key {blocker.key!r}" if blocker.key and not is_strict else ""
    name = f"{blocker.message_id}{key}"
    others = f" ({keys:,} keys are busy, this one the longest)" if keys > 1 else ""
    limit = "only one message" if max_deliveries == 1 else f"only {max_deliveries} messages"
    scope = "of the queue" if is_strict else "of a key"
    what = (
        f"{waits} because of {order}: consumer {blocker.consumer} holds message {name}"
        f" since {phrases.format_time(blocker.last_delivered_at, now)}{others}, and {limit} {scope}"
        f" {'is' if max_deliveries == 1 else 'are'} delivered at a time"
    )
    holder = blocker.holder
    if holder is not None and not holder.is_connected:
        return Finding(
            "key-busy",
            f"{what}; {describe_disconnection(group, holder, now)}",
            _reconnect_hint(group, holder),
            is_fault=False,
        )
    more = phrases.configure_command(
        group.queue, "performance.batch_size", str(10 * max_deliveries)
    )
    spread = "use a queue with ordering partition" if is_strict else "use more keys"
    return Finding(
        "key-busy",
        what,
        f"Make the jobs shorter, {spread}, or allow more at a time, where a retry may come after"
        f" later messages: `{more}`",
        is_fault=False,
    )
