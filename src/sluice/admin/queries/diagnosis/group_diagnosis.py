"""Why a group with something to do does not do it: the part of the diagnosis that looks at consumers and cursors."""

from __future__ import annotations

from typing import Final

from sluice.admin.queries.diagnosis import phrases
from sluice.admin.broker_facade import Hands
from sluice.admin.queries.diagnosis.delivery_obstacles import behind, blocker_of, lease_name, obstacle_of
from sluice.admin.views import Finding
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, READY, WAITING, Lease
from sluice.queues.model.group import Group
from sluice.queues.ports import Consumer
from sluice.queues.model.queue_rules import ANY_ORDER, STRICT

MOST_EXAMINED: Final = 1000  # stored messages of a partition that a diagnosis looks at


def lag_of(group: Group) -> int:
    return sum(int(cursor.waiting()) + len(cursor.leases) for cursor in group.cursors)


def diagnose_group(hands: Hands, group: Group, name_it: bool) -> list[Finding]:
    """What stands in the way of a group, the first true reason first; nothing when its messages go out."""
    found = _obstacles(hands, group)
    if not name_it:
        return found
    return [
        Finding(one.code, f"group {group.name}: {one.what}", one.do, one.is_fault)
        if f"group {group.name}" not in one.what
        else one
        for one in found
    ]


def _obstacles(hands: Hands, group: Group) -> list[Finding]:
    if not group.consumers:
        return [_nobody(group)]
    if all(consumer.prefetch == 0 for consumer in group.consumers):
        return [_all_draining(group)]
    now = hands.engine.now
    serving = [consumer for consumer in group.consumers if consumer.cursors]
    waiting = sum(int(cursor.waiting()) for cursor in group.cursors)
    out = int(group.out())
    standby = [*_disconnected(group, serving, now), *_standby(group, serving)]
    held = _held_back(hands, group, waiting, out, now)
    stuck = [one for one in (obstacle_of(consumer, now) for consumer in serving) if one is not None]
    if stuck and all(one.code in ("consumer-away", "consumer-stalled") for one in stuck):
        if len(stuck) == len(serving):
            return [*stuck, *held, *standby]
    if held and held[0].code != "key-busy":
        # Even a consumer with all the room of the world would get nothing.
        return [*held, *stuck, *standby] if waiting or not out else [*_in_work(group, now), *held, *standby]
    if out == lag_of(group) and all(one.code in ("prefetch", "window-full") for one in stuck):
        return [*_in_work(group, now), *standby]  # whoever has no room needs none
    busy_keys = _busy_keys(group, now) if waiting and out else []
    if busy_keys:
        # More room or more consumers would change nothing.
        return [*busy_keys, *(one for one in held if one.code != "key-busy"), *standby]
    if stuck and not _moves(serving, now):
        return [*stuck, *held, *standby]
    if held:
        return [*held, *standby]
    if waiting == 0 and out:
        return [*_in_work(group, now), *standby]
    return standby


def _nobody(group: Group) -> Finding:
    queue = group.queue
    busy = [other.name for other in queue.groups.values() if other.consumers]
    lag = phrases.messages(lag_of(group), "waits", "wait")
    if busy:
        return Finding(
            "wrong-group",
            f"nobody consumes for group {group.name}, in which {lag}; consumers are in {', '.join(busy)}",
            f"Let workers subscribe with consumer-group {group.name}. If nobody needs this group any more: "
            f"`{phrases.delete_group(queue.name, group.name)}`",
        )
    return Finding(
        "no-consumer",
        f"nobody consumes for group {group.name}, in which {lag}",
        phrases.start_worker(queue.name, group.name),
    )


def _all_draining(group: Group) -> Finding:
    names = ", ".join(consumer.client for consumer in group.consumers[:5])
    return Finding(
        "draining",
        f"every consumer of group {group.name} is stopping and takes nothing more (prefetch 0): {names}",
        phrases.start_worker(group.queue.name, group.name),
    )


def _moves(serving: list[Consumer], now: float) -> bool:
    """Whether some consumer with room serves a partition in which something is ready."""
    return any(
        cursor.has_more()
        for consumer in serving
        if obstacle_of(consumer, now) is None
        for cursor in consumer.cursors
    )


# ---- messages that may not go


def _held_back(hands: Hands, group: Group, waiting: int, out: int, now: float) -> list[Finding]:
    """Delays, retries, keys and gates, when they hold back everything that is not in somebody's hands."""
    queue = group.queue
    delayed = sum(_count_delayed(cursor) for cursor in group.cursors)
    parked = sum(int(cursor.parked()) for cursor in group.cursors)
    gated = sum(len(cursor.gated()) for cursor in group.cursors)
    retrying = [
        lease for cursor in group.cursors for lease in cursor.leases.values() if lease.state == WAITING
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
        flows = hands.door.service.figures(queue).rates.acked > 0.0  # others are being done meanwhile
        found.append(_retrying(group, retrying, is_fault=not out and not flows, now=now))
    if parked > gated:
        found += _parked(group, now)
    if gated:
        found.append(
            Finding(
                "gate",
                f"{phrases.messages(gated, 'waits', 'wait')} until older ones of "
                f"{'its key' if gated == 1 else 'their keys'} are done, where they were before partitions were added",
                phrases.peek(queue.name, group.name),
            )
        )
    if delayed:
        due = hands.engine.timers.first_delay(queue.partitions)
        found.append(
            Finding(
                "delayed",
                f"{phrases.messages(delayed, 'waits', 'wait')} for a delay that the publisher asked for; "
                f"{'it' if delayed == 1 else 'the first'} is over at {phrases.moment(due, now)}",
                phrases.peek(queue.name, group.name),
                is_fault=any(one.is_fault for one in found),
            )
        )
    return found


def _count_delayed(cursor: Cursor) -> int:
    return sum(
        1
        for seq in cursor.partition.delayed
        if not cursor.settled(seq) and cursor.partition.is_for(seq, cursor.group.gid)
    )


def _retrying(group: Group, retrying: list[Lease], is_fault: bool, now: float) -> Finding:
    first = min(retrying, key=lambda lease: lease.due)
    last = max(retrying, key=lambda lease: lease.last_at)
    said = f"; the last failure: {last.description}" if last.description else ""
    return Finding(
        "all-retrying",
        f"{phrases.messages(len(retrying), 'failed and waits', 'failed and wait')} for a retry, "
        f"{'until' if len(retrying) == 1 else 'the first until'} {phrases.moment(first.due, now)}{said}",
        phrases.explain(lease_name(last), group.queue.name),
        is_fault,
    )


def _parked(group: Group, now: float) -> list[Finding]:
    """The oldest delivery that others of its key wait behind, of those that wait for a retry if there are such."""
    blockers: list[Lease] = []
    for cursor in group.cursors:
        if cursor.parked():
            for key in cursor.slots():
                blocker = blocker_of(cursor, key)
                if blocker is not None:
                    blockers.append(blocker)
    failed = [lease for lease in blockers if lease.state == WAITING]
    if failed:
        return [behind(min(failed, key=lambda lease: lease.first_at), now)]
    held = [lease for lease in blockers if lease.state == LEASED]
    return [behind(min(held, key=lambda lease: lease.last_at), now)] if held else []


def _busy_keys(group: Group, now: float) -> list[Finding]:
    """Return the reason why none of the waiting messages can go to any consumer: their keys are all with
    consumers. Empty when some message could go. The consumers need not have looked at the messages yet.

    Only the first messages of each partition are examined. Empty also if none of those waits for a consumer and there
    are more: then nothing is known of the messages that do.
    """
    most = int(group.queue.rules.batch_size)
    waiting = 0
    blockers: list[Lease] = []
    for cursor in group.cursors:
        out: dict[int, list[Lease]] = {}
        for lease in cursor.leases.values():
            if lease.state != READY and lease.key:
                out.setdefault(int(lease.key), []).append(lease)
        keys: set[int] = set()
        undelivered, is_all = _undelivered(cursor)
        if not undelivered and not is_all:
            return []
        for seq in undelivered:
            key = int(cursor.key_of(seq))
            if not key or len(out.get(key, ())) < most:
                return []
            keys.add(key)
            waiting += 1
        blockers += (min(out[key], key=lambda lease: lease.seq) for key in keys)
    held = [lease for lease in blockers if lease.state == LEASED]
    if not held or len(held) < len(blockers):
        return []  # a message that waits for its retry is a reason of its own
    return [behind(min(held, key=lambda lease: lease.last_at), now, waiting, len(held))]


def _undelivered(cursor: Cursor) -> tuple[list[int], bool]:
    """Return the sequences that no consumer has and that need not wait for a date, and whether those are all.

    At most MOST_EXAMINED stored messages are examined, whatever their state: a diagnosis runs on the event loop.
    """
    partition = cursor.partition
    found: list[int] = []
    seq = int(partition.first_live(cursor.floor))
    for _ in range(MOST_EXAMINED):
        if seq >= partition.committed:
            return found, True
        lease = cursor.leases.get(seq)
        if (
            (lease is None or lease.state == READY)
            and seq not in partition.delayed
            and not cursor.settled(seq)
            and partition.is_for(seq, cursor.group.gid)
        ):
            found.append(seq)
        seq = int(partition.first_live(seq + 1))
    return found, seq >= partition.committed


# ---- consumers


def _in_work(group: Group, now: float) -> list[Finding]:
    """Return what connected consumers work on; the deliveries of others are not worked on."""
    leases = [
        lease
        for cursor in group.cursors
        for lease in cursor.leases.values()
        if lease.state == LEASED and (lease.consumer is None or not lease.consumer.paused)
    ]
    if not leases:
        return []
    oldest = min(leases, key=lambda lease: lease.last_at)
    count = len(leases)
    return [
        Finding(
            "in-work",
            f"nothing waits: {phrases.messages(count, 'is', 'are')} in work, "
            f"{lease_name(oldest) if count == 1 else f'the oldest ({lease_name(oldest)})'} with {oldest.client()} "
            f"since {phrases.moment(oldest.last_at, now)}",
            phrases.consumers(group.queue.name),
            is_fault=False,
        )
    ]


def _disconnected(group: Group, serving: list[Consumer], now: float) -> list[Finding]:
    """Return the disconnected consumers whose deliveries the others get later: no fault of the group."""
    found = [
        obstacle_of(consumer, now)
        for consumer in group.consumers
        if consumer.paused and consumer.held and consumer not in serving
    ]
    return [Finding(one.code, one.what, one.do, is_fault=False) for one in found if one is not None]


def _standby(group: Group, serving: list[Consumer]) -> list[Finding]:
    """Consumers that get nothing because others have all partitions: worth knowing for whoever watches one of them."""
    idle = [
        consumer
        for consumer in group.consumers
        if not consumer.cursors and consumer.prefetch > 0 and not (consumer.paused and consumer.held)
    ]
    if not idle:
        return []
    names = ", ".join(consumer.client for consumer in idle[:5]) + (" ..." if len(idle) > 5 else "")
    have = f"{names} {'has' if len(idle) == 1 else 'have'} no partition and stand{'s' if len(idle) == 1 else ''} by"
    queue = group.queue
    exclusive = [consumer for consumer in serving if consumer.exclusive]
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
    able = [consumer for consumer in idle if not consumer.paused and not consumer.stalled]
    if able and all(consumer.priority < highest for consumer in able):
        return [
            Finding(
                "standby",
                f"{names} {'has' if len(idle) == 1 else 'have'} a lower consumer-priority than {highest}, and "
                f"{'gets' if len(idle) == 1 else 'get'} only what consumers of that priority have no room for",
                "Give all the same consumer-priority, or leave it",
                is_fault=False,
            )
        ]
    if not able:
        gone = idle[0]
        state = "is disconnected" if gone.paused else "has stalled"
        return [
            Finding(
                "standby",
                f"{names} {'has' if len(idle) == 1 else 'have'} no partition: {gone.client} {state}, and others "
                "serve its partitions",
                phrases.consumers(queue.name),
                is_fault=False,
            )
        ]
    if queue.rules.ordering == STRICT:
        return [
            Finding(
                "standby",
                f"{have}: the order is strict, so one consumer works at a time",
                "Leave it: who stands by takes over when that one is gone. For more at a time, make a queue with "
                "ordering partition",
                is_fault=False,
            )
        ]
    if queue.rules.ordering == ANY_ORDER:
        return []  # without an order, a consumer needs no partition
    return [
        Finding(
            "standby",
            f"{have} for messages with a key: the queue has "
            f"{phrases.count_of(len(queue.partitions), 'partition')} for "
            f"{phrases.count_of(len(group.consumers), 'consumer')}",
            phrases.configure(queue.name, "partitions", str(len(group.consumers))),
            is_fault=False,
        )
    ]
