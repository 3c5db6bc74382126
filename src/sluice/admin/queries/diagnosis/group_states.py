"""The state of a message in each group of its queue, with one sentence why and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.admin.broker_facade import MessageLocation
from sluice.admin.model import GroupState
from sluice.admin.queries.diagnosis import phrases
from sluice.admin.queries.diagnosis.delivery_obstacles import (
    describe_blocked,
    describe_disconnection,
    find_blocking_lease,
    find_obstacle,
)
from sluice.admin.queries.message_lookup import is_delayed
from sluice.message import Message, decode_headers
from sluice.queues.log import CANCELLED, DEAD, EXPIRED, PURGED
from sluice.queues.model import (
    DEAD_LETTERING,
    LEASED,
    WAITING,
    Cursor,
    HistoryEvent,
    Lease,
    Queue,
    history,
)
from sluice.queues.names import format_message_id


@dataclass
class TraceData:
    """What was found about a message."""

    message_id: str
    location: MessageLocation | None  # where it is, or was
    message: Message | None  # None: no longer stored
    dead_letters: list[tuple[MessageLocation, Message]] = field(default_factory=list)
    # Stored for messages that were acknowledged after failures.
    history: list[HistoryEvent] = field(default_factory=list)


def build_group_states(queue: Queue, trace: TraceData, now: float) -> list[GroupState]:
    """Return the state in each group of the queue, and in deleted groups that gave it up."""
    dead: dict[str, tuple[MessageLocation, Message]] = {}
    for location, dead_letter in trace.dead_letters:
        dead[dict(decode_headers(dead_letter.headers)).get("original-group", "")] = (
            location,
            dead_letter,
        )
    states: list[GroupState] = []
    for group in queue.groups.values():
        dead_letter_entry = dead.pop(group.name, None) or dead.get("")
        unsettled = None
        if trace.location is not None and trace.message is not None:
            unsettled = _unsettled_state(
                group.cursors[int(trace.location[0].number)], trace.location[1], trace.message, now
            )
        if unsettled is not None:
            states.append(unsettled)
        elif dead_letter_entry is not None:
            states.append(_dead_state(queue, group.name, *dead_letter_entry, now))
        else:
            states.append(_settled_state(queue, group.cursors, group.name, trace, now))
    for name, dead_letter_entry in dead.items():
        if name or not states:
            states.append(_dead_state(queue, name, *dead_letter_entry, now))
    return states


def _make_state(
    group: str, state: str, why: str, do: str = "", lease: Lease | None = None
) -> GroupState:
    if lease is None:
        return GroupState(group, state, "", 0, 0, 0.0, 0.0, why, do)
    consumer = lease.holder_client_id()
    if not consumer and lease.history:
        consumer = lease.history[-1].consumer
    return GroupState(
        group,
        state,
        consumer,
        int(lease.attempt),
        int(lease.failures),
        lease.retry_at if lease.state == WAITING else 0.0,
        lease.deadline if lease.state == LEASED else 0.0,
        why,
        do,
    )


def _unsettled_state(cursor: Cursor, seq: int, message: Message, now: float) -> GroupState | None:
    """Return the state in a group that has not settled the message; None for one that has."""
    group = cursor.group.name
    lease = cursor.leases.get(seq)
    if lease is None:
        if cursor.is_settled(seq) or not cursor.partition.is_for_group(seq, cursor.group.gid):
            return None
        if is_delayed(cursor.partition, seq):
            moved_ms = cursor.partition.rescheduled.get(seq, 0)
            due = float(moved_ms or message.deliver_at) / 1000.0
            cause = "its publisher set a delay, which ends at"
            if moved_ms:
                cause = "it was rescheduled to"
            why = f"{cause} {phrases.format_time(due, now)}"
            return GroupState(group, "delayed", "", 0, 0, due, 0.0, why, "")
        why, do = _explain_waiting(cursor, seq, now)
        return _make_state(group, "waiting", why, do)
    if lease.state == LEASED:
        why = (
            f"consumer {lease.holder_client_id()} has it since"
            f" {phrases.format_time(lease.last_delivered_at, now)} and must settle or extend it by"
            f" {phrases.format_time(lease.deadline, now)}"
        )
        if lease.consumer is not None and lease.consumer.is_paused:
            why += f"; {describe_disconnection(lease.consumer, now)}"
        return _make_state(group, "delivered", why, lease=lease)
    failed = f"it has failed {phrases.pluralize(int(lease.failures), 'time')}"
    if lease.description:
        failed += f", last: {lease.description}"
    if lease.state == DEAD_LETTERING:
        return _make_state(
            group, "retrying", f"{failed}; it is being moved to the dead letters", lease=lease
        )
    if lease.state == WAITING:
        why = f"{failed}; it is retried at {phrases.format_time(lease.retry_at, now)}"
        return _make_state(group, "retrying", why, "Fix what fails, or wait", lease)
    why, do = _explain_waiting(cursor, seq, now)
    return _make_state(group, "retrying", f"{failed}; its retry is due, and {why}", do, lease)


def _explain_waiting(cursor: Cursor, seq: int, now: float) -> tuple[str, str]:
    group = cursor.group
    queue = group.queue
    consumer = cursor.consumer
    if consumer is None and group.consumers:
        return (
            f"every consumer of group {group.name} is stopping (prefetch 0)",
            phrases.start_worker_hint(queue.name, group.name),
        )
    if consumer is None:
        return f"group {group.name} has no consumers", phrases.start_worker_hint(
            queue.name, group.name
        )
    if seq in cursor.gated_seqs():
        return (
            "older messages of its key are in the partition that the key had before partitions"
            " were added",
            phrases.peek_command(queue.name, group.name),
        )
    key = int(cursor.key_hash_of(seq))
    blocker = find_blocking_lease(cursor, key) if key and seq not in cursor.leases else None
    if blocker is not None:
        finding = describe_blocked(blocker, now)
        return finding.what, finding.do
    obstacle = find_obstacle(consumer, now)
    if obstacle is not None and not key and group.can_share_work():
        return f"no consumer of group {group.name} has capacity; {obstacle.what}", obstacle.do
    if obstacle is not None:
        return f"consumer {consumer.client} serves its partition, and {obstacle.what}", obstacle.do
    return f"earlier messages come first; consumer {consumer.client} serves its partition", ""


def _settled_state(
    queue: Queue, cursors: list[Cursor], group: str, trace: TraceData, now: float
) -> GroupState:
    for step in reversed(trace.history):
        if step.kind == history.ACKED and step.group == group:
            when = phrases.format_time(step.at, now)
            why = f"consumer {step.consumer} acknowledged it at {when}, attempt {step.attempt}"
            return GroupState(
                group, "acked", step.consumer, int(step.attempt), 0, 0.0, 0.0, why, ""
            )
        if step.kind == history.CANCELLED:
            when = phrases.format_time(step.at, now)
            return _make_state(group, "cancelled", f"{step.consumer} cancelled it at {when}")
    location = trace.location
    if location is not None and trace.message is not None:
        partition, seq = location
        if not partition.is_for_group(seq, cursors[int(partition.number)].group.gid):
            return _make_state(
                group, "not-for-it", "it was redriven only for the group that had failed it"
            )
    cursor = cursors[int(location[0].number)] if location is not None else None
    others = (
        sum(cursor.outcome_counts[how] for how in (DEAD, EXPIRED, PURGED, CANCELLED))
        if cursor is not None
        else 1
    )
    if others == 0:
        return _make_state(group, "acked", f"group {group} has acknowledged it")
    return _make_state(
        group,
        "settled",
        f"group {group} has settled it (acknowledged, expired, purged, cancelled or skipped by a"
        " seek: which one is not recorded)",
    )


def _dead_state(
    queue: Queue, group: str, location: MessageLocation, dead_letter: Message, now: float
) -> GroupState:
    headers = dict(decode_headers(dead_letter.headers))
    reason = headers.get("dead-reason", "")
    description = f" ({headers['dead-description']})" if headers.get("dead-description") else ""
    dead_letter_id = format_message_id(location[0].pid, location[1]).decode()
    attempts = int(headers["attempts"]) if headers.get("attempts", "").isdecimal() else 0
    why = (
        f"it was dead-lettered with reason {reason}{description} at"
        f" {phrases.format_time(float(dead_letter.enqueued_at) / 1000.0, now)} and is in "
        f"{location[0].queue.name}"
    )
    do = f"Fix the cause, then `{phrases.retry_dead_letter_command(queue.name, dead_letter_id)}`"
    return GroupState(group, "dead", "", attempts, attempts, 0.0, 0.0, why, do)
