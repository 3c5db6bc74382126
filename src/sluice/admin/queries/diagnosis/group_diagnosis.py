"""The part of the diagnosis that explains why a group with a backlog makes no progress.

It looks at consumers and cursors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sluice.admin.broker_facade import BrokerFacade
from sluice.admin.model import Finding
from sluice.admin.queries.diagnosis import phrases
from sluice.admin.queries.diagnosis.delivery_obstacles import (
    describe_blocked,
    find_blocking_lease,
    find_obstacle,
    lease_message_id,
)
from sluice.admin.queries.diagnosis.policy_findings import find_closed_by_policy
from sluice.admin.queries.diagnosis.recent_flow import RecentFlow
from sluice.queues.model import (
    ANY_ORDER,
    LEASED,
    READY,
    STRICT,
    WAITING,
    Consumer,
    Cursor,
    Group,
    Lease,
)
from sluice.queues.names import looks_generated

MAX_EXAMINED_MESSAGES: Final = 1000  # stored messages of a partition that a diagnosis examines


def group_lag(group: Group) -> int:
    return sum(int(cursor.count_waiting()) + len(cursor.leases) for cursor in group.cursors)


def diagnose_group(
    facade: BrokerFacade, flow: RecentFlow, group: Group, include_name: bool
) -> list[Finding]:
    """Return what blocks a group, the cause first; empty if its messages are delivered."""
    found = _find_obstacles(facade, flow, group)
    if not include_name:
        return found
    return [
        Finding(one.code, f"group {group.name}: {one.what}", one.do, one.is_fault)
        if f"group {group.name}" not in one.what
        else one
        for one in found
    ]


def _find_obstacles(facade: BrokerFacade, flow: RecentFlow, group: Group) -> list[Finding]:
    if closed := find_closed_by_policy(group, facade.engine.now):
        return closed
    if not group.consumers:
        return [_no_consumer(group)]
    if all(consumer.prefetch == 0 for consumer in group.consumers):
        return [_all_draining(group)]
    now = facade.engine.now
    serving = [consumer for consumer in group.consumers if consumer.cursors]
    waiting = sum(int(cursor.count_waiting()) for cursor in group.cursors)
    in_flight = int(group.in_flight)
    standby = [*_disconnected(group, serving, now), *_standby(group, serving)]
    held = _find_held_back(facade, flow, group, waiting, now)
    blocked = [
        one for one in (find_obstacle(consumer, now) for consumer in serving) if one is not None
    ]
    if blocked and all(one.code in ("consumer-away", "consumer-stalled") for one in blocked):
        if len(blocked) == len(serving):
            return [*blocked, *held, *standby]
    if held and held[0].code != "key-busy":
        # A consumer with any capacity would get nothing.
        return (
            [*held, *blocked, *standby]
            if waiting or not in_flight
            else [*_in_progress(group, now), *held, *standby]
        )
    if in_flight == group_lag(group) and all(
        one.code in ("prefetch", "window-full") for one in blocked
    ):
        return [*_in_progress(group, now), *standby]  # nothing waits, so capacity does not matter
    busy_keys = _busy_keys(group, now) if waiting and in_flight else []
    if busy_keys:
        # More capacity or more consumers would change nothing.
        return [*busy_keys, *(one for one in held if one.code != "key-busy"), *standby]
    if blocked and not _can_make_progress(serving, now):
        return [*blocked, *held, *standby]
    if held:
        return [*held, *standby]
    if waiting == 0 and in_flight:
        return [*_in_progress(group, now), *standby]
    return standby


def _no_consumer(group: Group) -> Finding:
    queue = group.queue
    busy = [other.name for other in queue.groups.values() if other.consumers]
    lag = phrases.count_messages(group_lag(group), "waits", "wait")
    if looks_generated(group.name):
        return Finding(
            "wrong-group" if busy else "no-consumer",
            f"group {group.name} has no consumers, and {lag}; its name is a generated client id",
            "A client without an id of its own made it, and will not come back to it:"
            f" `{phrases.delete_group_command(queue.name, group.name)}`, and give the client a"
            " consumer-group",
        )
    if busy:
        return Finding(
            "wrong-group",
            f"group {group.name} has no consumers, and {lag}; consumers are in {', '.join(busy)}",
            f"Let workers subscribe with consumer-group {group.name}. If this group is no longer"
            f" needed: `{phrases.delete_group_command(queue.name, group.name)}`",
        )
    return Finding(
        "no-consumer",
        f"group {group.name} has no consumers, and {lag}",
        phrases.start_worker_hint(queue.name, group.name),
    )


def _all_draining(group: Group) -> Finding:
    names = ", ".join(consumer.client for consumer in group.consumers[:5])
    return Finding(
        "draining",
        f"every consumer of group {group.name} is stopping and accepts nothing more"
        f" (prefetch 0): {names}",
        phrases.start_worker_hint(group.queue.name, group.name),
    )


def _can_make_progress(serving: list[Consumer], now: float) -> bool:
    """Return whether a consumer with capacity serves a partition with a ready message."""
    return any(
        cursor.has_more()
        for consumer in serving
        if find_obstacle(consumer, now) is None
        for cursor in consumer.cursors
    )


# ---- messages that may not be delivered


def _find_held_back(
    facade: BrokerFacade, flow: RecentFlow, group: Group, waiting: int, now: float
) -> list[Finding]:
    """Report delays, retries, keys and partition gates that hold back all undelivered messages."""
    queue = group.queue
    delayed = sum(_count_delayed(cursor) for cursor in group.cursors)
    parked = sum(int(cursor.count_parked()) for cursor in group.cursors)
    gated = sum(len(cursor.gated_seqs()) for cursor in group.cursors)
    retrying = [
        lease
        for cursor in group.cursors
        for lease in cursor.leases.values()
        if lease.state == WAITING
    ]
    ready = sum(
        1
        for cursor in group.cursors
        for lease in cursor.leases.values()
        if lease.state not in (LEASED, WAITING)
    )
    if ready or waiting > delayed + parked:
        return []
    found: list[Finding] = []
    if retrying:
        found.append(_retrying(group, retrying, now))
    if parked > gated:
        found += _blocked_by_key(group, now)
    if group.in_flight or flow.has_acked(group, now):
        # Other messages are being processed meanwhile.
        found = [replace(one, is_fault=False) for one in found]
    if gated:
        found.append(
            Finding(
                "gate",
                f"{phrases.count_messages(gated, 'waits', 'wait')} until older ones of"
                f" {'its key' if gated == 1 else 'their keys'} are settled, in the partitions that"
                " they had before partitions were added",
                phrases.peek_command(queue.name, group.name),
            )
        )
    if delayed:
        due = facade.engine.timers.next_delayed_due(queue.partitions)
        found.append(
            Finding(
                "delayed",
                f"{phrases.count_messages(delayed, 'waits', 'wait')} for a delay that the publisher"
                f" set; {'it' if delayed == 1 else 'the first'} ends at"
                f" {phrases.format_time(due, now)}",
                phrases.peek_command(queue.name, group.name),
                is_fault=any(one.is_fault for one in found),
            )
        )
    return found


def _count_delayed(cursor: Cursor) -> int:
    return sum(
        1
        for seq in cursor.partition.delayed_seqs
        if not cursor.is_settled(seq) and cursor.partition.is_for_group(seq, cursor.group.gid)
    )


def _retrying(group: Group, retrying: list[Lease], now: float) -> Finding:
    first = min(retrying, key=lambda lease: lease.retry_at)
    last = max(retrying, key=lambda lease: lease.last_delivered_at)
    last_failure = f"; the last failure: {last.description}" if last.description else ""
    return Finding(
        "all-retrying",
        f"{phrases.count_messages(len(retrying), 'failed and waits', 'failed and wait')} for a"
        f" retry, {'until' if len(retrying) == 1 else 'the first until'}"
        f" {phrases.format_time(first.retry_at, now)}{last_failure}",
        phrases.explain_command(lease_message_id(last), group.queue.name),
    )


def _blocked_by_key(group: Group, now: float) -> list[Finding]:
    """Report the oldest delivery that blocks its key, preferring those that wait for a retry."""
    blockers: list[Lease] = []
    for cursor in group.cursors:
        if cursor.count_parked():
            for key in cursor.active_by_key():
                blocker = find_blocking_lease(cursor, key)
                if blocker is not None:
                    blockers.append(blocker)
    failed = [lease for lease in blockers if lease.state == WAITING]
    if failed:
        return [describe_blocked(min(failed, key=lambda lease: lease.first_delivered_at), now)]
    held = [lease for lease in blockers if lease.state == LEASED]
    return (
        [describe_blocked(min(held, key=lambda lease: lease.last_delivered_at), now)]
        if held
        else []
    )


def _busy_keys(group: Group, now: float) -> list[Finding]:
    """Report that no waiting message can be delivered because all their keys are with consumers.

    Empty when some message could go. The consumers need not have looked at the messages yet. Only
    the first messages of each partition are examined. Empty also if none of those waits for a
    consumer and there are more: then nothing is known of the messages that do.
    """
    max_deliveries = int(group.queue.rules.batch_size)
    waiting = 0
    blockers: list[Lease] = []
    for cursor in group.cursors:
        leases_by_key: dict[int, list[Lease]] = {}
        for lease in cursor.leases.values():
            if lease.state != READY and lease.key_hash:
                leases_by_key.setdefault(int(lease.key_hash), []).append(lease)
        keys: set[int] = set()
        undelivered, is_all = _find_undelivered(cursor)
        if not undelivered and not is_all:
            return []
        for seq in undelivered:
            key = int(cursor.key_hash_of(seq))
            if not key or len(leases_by_key.get(key, ())) < max_deliveries:
                return []
            keys.add(key)
            waiting += 1
        blockers += (min(leases_by_key[key], key=lambda lease: lease.seq) for key in keys)
    held = [lease for lease in blockers if lease.state == LEASED]
    if not held or len(held) < len(blockers):
        return []  # a message that waits for its retry is reported by itself
    return [
        describe_blocked(
            min(held, key=lambda lease: lease.last_delivered_at), now, waiting, len(held)
        )
    ]


def _find_undelivered(cursor: Cursor) -> tuple[list[int], bool]:
    """Return the sequences that are neither delivered nor delayed, and whether those are all.

    At most MAX_EXAMINED_MESSAGES stored messages are examined: this runs on the event loop.
    """
    partition = cursor.partition
    found: list[int] = []
    seq = int(partition.first_live(cursor.low_watermark))
    for _ in range(MAX_EXAMINED_MESSAGES):
        if seq >= partition.committed_end:
            return found, True
        lease = cursor.leases.get(seq)
        if (
            (lease is None or lease.state == READY)
            and seq not in partition.delayed_seqs
            and not cursor.is_settled(seq)
            and partition.is_for_group(seq, cursor.group.gid)
        ):
            found.append(seq)
        seq = int(partition.first_live(seq + 1))
    return found, seq >= partition.committed_end


# ---- consumers


def _in_progress(group: Group, now: float) -> list[Finding]:
    """Return what connected consumers work on; deliveries of disconnected ones do not count."""
    leases = [
        lease
        for cursor in group.cursors
        for lease in cursor.leases.values()
        if lease.state == LEASED and (lease.consumer is None or not lease.consumer.is_paused)
    ]
    if not leases:
        return []
    oldest = min(leases, key=lambda lease: lease.last_delivered_at)
    count = len(leases)
    oldest_id = lease_message_id(oldest)
    oldest_text = oldest_id if count == 1 else f"the oldest ({oldest_id})"
    return [
        Finding(
            "in-work",
            f"nothing waits: {phrases.count_messages(count, 'is', 'are')} in delivery,"
            f" {oldest_text} with {oldest.holder_client_id()} since"
            f" {phrases.format_time(oldest.last_delivered_at, now)}",
            phrases.consumers_command(group.queue.name),
            is_fault=False,
        )
    ]


def _disconnected(group: Group, serving: list[Consumer], now: float) -> list[Finding]:
    """Report disconnected consumers whose deliveries others get later; not a fault of the group."""
    found = [
        find_obstacle(consumer, now)
        for consumer in group.consumers
        if consumer.is_paused and consumer.in_flight and consumer not in serving
    ]
    return [Finding(one.code, one.what, one.do, is_fault=False) for one in found if one is not None]


def _standby(group: Group, serving: list[Consumer]) -> list[Finding]:
    """Report consumers that get nothing because others have all partitions."""
    idle = [
        consumer
        for consumer in group.consumers
        if not consumer.cursors
        and consumer.prefetch > 0
        and not (consumer.is_paused and consumer.in_flight)
    ]
    if not idle:
        return []
    names = ", ".join(consumer.client for consumer in idle[:5]) + (" ..." if len(idle) > 5 else "")
    verb, ending = ("has", "s") if len(idle) == 1 else ("have", "")
    have = f"{names} {verb} no partition and stand{ending} by"
    queue = group.queue
    exclusive = [consumer for consumer in serving if consumer.is_exclusive]
    if exclusive:
        return [
            Finding(
                "standby",
                f"{have}: {exclusive[0].client} consumes exclusively",
                f"Stop {exclusive[0].client}, or subscribe without exclusive",
                is_fault=False,
            )
        ]
    highest = max((int(consumer.priority) for consumer in serving), default=0)
    available = [
        consumer for consumer in idle if not consumer.is_paused and not consumer.is_stalled
    ]
    if available and all(consumer.priority < highest for consumer in available):
        return [
            Finding(
                "standby",
                f"{names} {verb} a lower consumer-priority than {highest}, and"
                f" {'gets' if len(idle) == 1 else 'get'} only messages that consumers of that"
                " priority have no capacity for",
                "Give all the same consumer-priority, or leave it",
                is_fault=False,
            )
        ]
    if not available:
        gone = idle[0]
        state = "is disconnected" if gone.is_paused else "has stalled"
        return [
            Finding(
                "standby",
                f"{names} {verb} no partition: {gone.client} {state}, and others serve its"
                " partitions",
                phrases.consumers_command(queue.name),
                is_fault=False,
            )
        ]
    if queue.rules.ordering == STRICT:
        return [
            Finding(
                "standby",
                f"{have}: the order is strict, so one consumer works at a time",
                "Leave it: a standby consumer takes over when the active one is gone. For more at a"
                " time, create a queue with ordering partition",
                is_fault=False,
            )
        ]
    if queue.rules.ordering == ANY_ORDER:
        return []  # without an order, a consumer needs no partition
    return [
        Finding(
            "standby",
            f"{have} for messages with a key: the queue has "
            f"{phrases.pluralize(len(queue.partitions), 'partition')} for "
            f"{phrases.pluralize(len(group.consumers), 'consumer')}",
            phrases.configure_command(queue.name, "partitions", str(len(group.consumers))),
            is_fault=False,
        )
    ]
