"""The part of the diagnosis that explains why a group with a backlog makes no progress.

It looks at consumers and cursors.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.admin.model import Finding
from sluice.admin.queries.diagnosis import phrases
from sluice.admin.queries.diagnosis.delivery_obstacles import describe_blocked, find_obstacle
from sluice.admin.queries.diagnosis.policy_findings import (
    find_closed_by_policy,
    find_held_keys,
    find_limited_keys,
)
from sluice.admin.queries.diagnosis.recent_flow import RecentFlow
from sluice.queues.names import looks_generated
from sluice.queues.service import GroupInspector, views


def diagnose_group(
    flow: RecentFlow, group: GroupInspector, now: float, include_name: bool
) -> list[Finding]:
    """Return what blocks a group, the cause first; empty if its messages are delivered."""
    found = [*_find_obstacles(flow, group, now), *find_held_keys(group, now)]
    if not any(one.code == "keys-limited" for one in found):
        found = [*found, *find_limited_keys(group)]
    if not include_name:
        return found
    return [
        Finding(one.code, f"group {group.name}: {one.what}", one.do, one.is_fault)
        if f"group {group.name}" not in one.what
        else one
        for one in found
    ]


def _find_obstacles(flow: RecentFlow, group: GroupInspector, now: float) -> list[Finding]:
    if closed := find_closed_by_policy(group, now):
        return closed
    members = group.members()
    if not members:
        return [_no_consumer(group)]
    if all(consumer.prefetch == 0 for consumer in members):
        return [_all_draining(group, members)]
    serving = [consumer for consumer in members if consumer.partitions]
    obstacles = [find_obstacle(group, consumer, now) for consumer in serving]
    blocked = [one for one in obstacles if one is not None]
    waiting = group.waiting()
    in_flight = group.in_flight()
    standby = [*_disconnected(group, members, now), *_standby(group, members)]
    held = _find_held_back(flow, group, now)
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
    if in_flight == group.lag() and all(one.code in ("prefetch", "window-full") for one in blocked):
        return [*_in_progress(group, now), *standby]  # nothing waits, so capacity does not matter
    busy_keys = _busy_keys(group, now) if waiting and in_flight else []
    if busy_keys:
        # More capacity or more consumers would change nothing.
        return [*busy_keys, *(one for one in held if one.code != "key-busy"), *standby]
    # Otherwise a consumer with capacity serves a partition with a ready message.
    is_stuck = not any(
        obstacle is None and group.has_ready_messages(consumer)
        for consumer, obstacle in zip(serving, obstacles, strict=True)
    )
    if blocked and is_stuck:
        return [*blocked, *held, *standby]
    if held:
        return [*held, *standby]
    if waiting == 0 and in_flight:
        return [*_in_progress(group, now), *standby]
    return standby


def _no_consumer(group: GroupInspector) -> Finding:
    busy = group.groups_with_members()
    lag = phrases.count_messages(group.lag(), "waits", "wait")
    if looks_generated(group.name):
        return Finding(
            "wrong-group" if busy else "no-consumer",
            f"group {group.name} has no consumers, and {lag}; its name is a generated client id",
            "A client without an id of its own made it, and will not come back to it:"
            f" `{phrases.delete_group_command(group.queue, group.name)}`, and give the client a"
            " consumer-group",
        )
    if busy:
        return Finding(
            "wrong-group",
            f"group {group.name} has no consumers, and {lag}; consumers are in {', '.join(busy)}",
            f"Let workers subscribe with consumer-group {group.name}. If this group is no longer"
            f" needed: `{phrases.delete_group_command(group.queue, group.name)}`",
        )
    return Finding(
        "no-consumer",
        f"group {group.name} has no consumers, and {lag}",
        phrases.start_worker_hint(group.queue, group.name),
    )


def _all_draining(group: GroupInspector, members: list[views.Member]) -> Finding:
    names = ", ".join(consumer.client for consumer in members[:5])
    return Finding(
        "draining",
        f"every consumer of group {group.name} is stopping and accepts nothing more"
        f" (prefetch 0): {names}",
        phrases.start_worker_hint(group.queue, group.name),
    )


# ---- messages that may not be delivered


def _find_held_back(flow: RecentFlow, group: GroupInspector, now: float) -> list[Finding]:
    """Report delays, retries, keys and partition gates that hold back all undelivered messages."""
    held = group.held_back()
    if held is None:
        return []
    found: list[Finding] = []
    if held.retrying:
        found.append(_retrying(group, held, now))
    if held.parked > held.gated:
        blocker = group.key_blocker()
        if blocker is not None:
            found.append(describe_blocked(group, blocker, now))
        found.extend(find_limited_keys(group))
    if group.in_flight() or flow.has_acked(group, now):
        # Other messages are being processed meanwhile.
        found = [replace(one, is_fault=False) for one in found]
    if held.gated:
        found.append(
            Finding(
                "gate",
                f"{phrases.count_messages(held.gated, 'waits', 'wait')} until older ones of"
                f" {'its key' if held.gated == 1 else 'their keys'} are settled, in the partitions"
                " that they had before partitions were added",
                phrases.peek_command(group.queue, group.name),
            )
        )
    if held.delayed:
        found.append(
            Finding(
                "delayed",
                f"{phrases.count_messages(held.delayed, 'waits', 'wait')} for a delay that the"
                f" publisher set; {'it' if held.delayed == 1 else 'the first'} ends at"
                f" {phrases.format_time(held.next_due, now)}",
                phrases.peek_command(group.queue, group.name),
                is_fault=any(one.is_fault for one in found),
            )
        )
    return found


def _retrying(group: GroupInspector, held: views.HeldBack, now: float) -> Finding:
    last = held.last_failed
    last_failure = f"; the last failure: {last.description}" if last and last.description else ""
    return Finding(
        "all-retrying",
        f"{phrases.count_messages(held.retrying, 'failed and waits', 'failed and wait')} for a"
        f" retry, {'until' if held.retrying == 1 else 'the first until'}"
        f" {phrases.format_time(held.next_retry, now)}{last_failure}",
        phrases.explain_command(last.message_id if last else "", group.queue),
    )


def _busy_keys(group: GroupInspector, now: float) -> list[Finding]:
    """Report that no waiting message can be delivered because all their keys are with consumers."""
    busy = group.busy_keys()
    if busy is None:
        return []
    return [describe_blocked(group, busy.oldest, now, busy.waiting, busy.keys)]


# ---- consumers


def _in_progress(group: GroupInspector, now: float) -> list[Finding]:
    """Return what connected consumers work on; deliveries of disconnected ones do not count."""
    count, oldest = group.connected_deliveries()
    if oldest is None:
        return []
    text = oldest.message_id if count == 1 else f"the oldest ({oldest.message_id})"
    return [
        Finding(
            "in-work",
            f"nothing waits: {phrases.count_messages(count, 'is', 'are')} in delivery,"
            f" {text} with {oldest.consumer} since"
            f" {phrases.format_time(oldest.last_delivered_at, now)}",
            phrases.consumers_command(group.queue),
            is_fault=False,
        )
    ]


def _disconnected(group: GroupInspector, members: list[views.Member], now: float) -> list[Finding]:
    """Report disconnected consumers whose deliveries others get later; not a fault of the group."""
    found = [
        find_obstacle(group, consumer, now)
        for consumer in members
        if not consumer.is_connected and consumer.in_flight and not consumer.partitions
    ]
    return [Finding(one.code, one.what, one.do, is_fault=False) for one in found if one is not None]


def _standby(group: GroupInspector, members: list[views.Member]) -> list[Finding]:
    """Report consumers that get nothing because others have all partitions."""
    idle = [
        consumer
        for consumer in members
        if not consumer.partitions
        and consumer.prefetch > 0
        and (consumer.is_connected or not consumer.in_flight)
    ]
    if not idle:
        return []
    what, do = _explain_standby(group, members, idle)
    return [Finding("standby", what, do, is_fault=False)] if what else []


def _explain_standby(
    group: GroupInspector, members: list[views.Member], idle: list[views.Member]
) -> tuple[str, str]:
    names = ", ".join(consumer.client for consumer in idle[:5]) + (" ..." if len(idle) > 5 else "")
    verb, ending = ("has", "s") if len(idle) == 1 else ("have", "")
    have = f"{names} {verb} no partition and stand{ending} by"
    serving = [consumer for consumer in members if consumer.partitions]
    exclusive = [consumer.client for consumer in serving if consumer.is_exclusive]
    if exclusive:
        return (
            f"{have}: {exclusive[0]} consumes exclusively",
            f"Stop {exclusive[0]}, or subscribe without exclusive",
        )
    highest = max((consumer.priority for consumer in serving), default=0)
    available = [consumer for consumer in idle if consumer.is_connected and not consumer.is_stalled]
    if available and all(consumer.priority < highest for consumer in available):
        return (
            f"{names} {verb} a lower consumer-priority than {highest}, and"
            f" {'gets' if len(idle) == 1 else 'get'} only messages that consumers of that"
            " priority have no capacity for",
            "Give all the same consumer-priority, or leave it",
        )
    if not available:
        gone = idle[0]
        state = "has stalled" if gone.is_connected else "is disconnected"
        return (
            f"{names} {verb} no partition: {gone.client} {state}, and others serve its partitions",
            phrases.consumers_command(group.queue),
        )
    if group.is_strict():
        return (
            f"{have}: the order is strict, so one consumer works at a time",
            "Leave it: a standby consumer takes over when the active one is gone. For more at a"
            " time, create a queue with ordering partition",
        )
    if not group.is_ordered():
        return "", ""  # without an order, a consumer needs no partition
    return (
        f"{have} for messages with a key: the queue has"
        f" {phrases.pluralize(group.count_partitions(), 'partition')} for"
        f" {phrases.pluralize(len(members), 'consumer')}",
        phrases.configure_command(group.queue, "partitions", str(len(members))),
    )
