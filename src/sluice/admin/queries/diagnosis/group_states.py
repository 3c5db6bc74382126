"""The state of a message in each group of its queue, with one sentence why and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.admin.model import Event, GroupState
from sluice.admin.queries.diagnosis import phrases
from sluice.admin.queries.diagnosis.delivery_obstacles import (
    describe_blocked,
    describe_disconnection,
    find_obstacle,
)
from sluice.admin.queries.diagnosis.policy_findings import describe_hold_remedy
from sluice.message import Message, decode_headers
from sluice.queues.service import (
    GroupInspector,
    MessageLocation,
    QueueInspector,
    stored_messages,
    views,
)


@dataclass
class TraceData:
    """What was found about a message."""

    message_id: str
    location: MessageLocation | None  # where it is, or was
    message: Message | None  # None: no longer stored
    dead_letters: list[tuple[MessageLocation, Message]] = field(default_factory=list)
    # Stored for messages that were acknowledged after failures.
    history: list[Event] = field(default_factory=list)


def build_group_states(queue: QueueInspector, trace: TraceData, now: float) -> list[GroupState]:
    """Return the state in each group of the queue, and in deleted groups that gave it up."""
    dead: dict[str, tuple[MessageLocation, Message]] = {}
    for location, dead_letter in trace.dead_letters:
        dead[dict(decode_headers(dead_letter.headers)).get("original-group", "")] = (
            location,
            dead_letter,
        )
    states: list[GroupState] = []
    for group in queue.groups():
        dead_letter_entry = dead.pop(group.name, None) or dead.get("")
        unsettled = None
        if trace.location is not None and trace.message is not None:
            unsettled = _unsettled_state(group, trace.location, trace.message, now)
        if unsettled is not None:
            states.append(unsettled)
        elif dead_letter_entry is not None:
            states.append(_dead_state(queue.name, group.name, *dead_letter_entry, now))
        else:
            states.append(_settled_state(group, trace, now))
    for name, dead_letter_entry in dead.items():
        if name or not states:
            states.append(_dead_state(queue.name, name, *dead_letter_entry, now))
    return states


def _make_state(
    group: str, state: str, why: str, do: str = "", delivery: views.Delivery | None = None
) -> GroupState:
    if delivery is None:
        return GroupState(group, state, "", 0, 0, 0.0, 0.0, why, do)
    return GroupState(
        group,
        state,
        delivery.consumer,
        delivery.attempt,
        delivery.failures,
        delivery.retry_at if delivery.phase == "backoff" else 0.0,
        delivery.deadline if delivery.phase == "delivered" else 0.0,
        why,
        do,
    )


def _unsettled_state(
    group: GroupInspector, location: MessageLocation, message: Message, now: float
) -> GroupState | None:
    """Return the state in a group that has not settled the message; None for one that has."""
    stored = group.describe(location)
    if stored.state == views.SETTLED:
        return None
    if stored.state == views.DELAYED:
        moved_to = stored.rescheduled_to
        due = float(message.deliver_at_ms) / 1000.0 if moved_to is None else moved_to
        cause = (
            "its publisher set a delay, which ends at"
            if moved_to is None
            else "it was rescheduled to"
        )
        why = f"{cause} {phrases.format_time(due, now)}"
        return GroupState(group.name, stored.state, "", 0, 0, due, 0.0, why, "")
    delivery = group.find_delivery(location)
    if delivery is None:
        return _make_state(group.name, stored.state, *_explain_waiting(group, location, now))
    if delivery.phase == "delivered":
        why = (
            f"consumer {delivery.consumer} has it since"
            f" {phrases.format_time(delivery.last_delivered_at, now)} and must settle or extend it"
            f" by {phrases.format_time(delivery.deadline, now)}"
        )
        if delivery.holder is not None and not delivery.holder.is_connected:
            why += f"; {describe_disconnection(group, delivery.holder, now)}"
        return _make_state(group.name, stored.state, why, delivery=delivery)
    failed = f"it has failed {phrases.pluralize(delivery.failures, 'time')}"
    if delivery.description:
        failed += f", last: {delivery.description}"
    do = ""
    if delivery.phase == "dead-lettering":
        why = f"{failed}; it is being moved to the dead letters"
    elif delivery.phase == "backoff":
        why = f"{failed}; it is retried at {phrases.format_time(delivery.retry_at, now)}"
        do = "Fix what fails, or wait"
    else:
        why, do = _explain_waiting(group, location, now)
        why = f"{failed}; its retry is due, and {why}"
    return _make_state(group.name, stored.state, why, do, delivery)


def _explain_waiting(
    group: GroupInspector, location: MessageLocation, now: float
) -> tuple[str, str]:
    held = group.held_key_of(location)
    if held is not None:
        return (
            f"its key {held.key!r} is held for repair since {held.message_id} died at"
            f" {phrases.format_time(held.held_at, now)}",
            describe_hold_remedy(group.queue, held, now),
        )
    consumer = group.server_of(location)
    if consumer is None:
        why = (
            f"every consumer of group {group.name} is stopping (prefetch 0)"
            if group.members()
            else f"group {group.name} has no consumers"
        )
        return why, phrases.start_worker_hint(group.queue, group.name)
    if group.is_gated(location):
        return (
            "older messages of its key are in the partition that the key had before partitions"
            " were added",
            phrases.peek_command(group.queue, group.name),
        )
    limit = group.key_limit_of(location)
    if limit:
        return f"its key has reached limits.{limit}", ""
    blocker = group.blocker_of(location)
    if blocker is not None:
        finding = describe_blocked(group, blocker, now)
        return finding.what, finding.do
    obstacle = find_obstacle(group, consumer, now)
    if obstacle is None:
        served = f"consumer {consumer.client} serves its partition"
        return f"earlier messages come first; {served}", ""
    if not group.has_key(location) and group.can_redistribute():
        return f"no consumer of group {group.name} has capacity; {obstacle.what}", obstacle.do
    return f"consumer {consumer.client} serves its partition, and {obstacle.what}", obstacle.do


def _settled_state(group: GroupInspector, trace: TraceData, now: float) -> GroupState:
    name = group.name
    for step in reversed(trace.history):
        when = phrases.format_time(step.at, now)
        if step.what == "acked" and step.group == name:
            why = f"consumer {step.consumer} acknowledged it at {when}, attempt {step.attempt}"
            return GroupState(name, "acked", step.consumer, step.attempt, 0, 0.0, 0.0, why, "")
        if step.what == "cancelled":
            return _make_state(name, "cancelled", f"{step.consumer} cancelled it at {when}")
    location = trace.location
    if location is not None and trace.message is not None and not group.is_for_group(location):
        return _make_state(
            name, "not-for-it", "it was redriven only for the group that had failed it"
        )
    if location is not None and group.has_only_acked(location):
        return _make_state(name, "acked", f"group {name} has acknowledged it")
    return _make_state(
        name,
        "settled",
        f"group {name} has settled it (acknowledged, expired, purged, cancelled or skipped by a"
        " seek: which one is not recorded)",
    )


def _dead_state(
    queue: str, group: str, location: MessageLocation, dead_letter: Message, now: float
) -> GroupState:
    headers = dict(decode_headers(dead_letter.headers))
    reason = headers.get("dead-reason", "")
    description = f" ({headers['dead-description']})" if headers.get("dead-description") else ""
    dead_letter_id = stored_messages.generated_id(location)
    attempts = int(headers["attempts"]) if headers.get("attempts", "").isdecimal() else 0
    why = (
        f"it was dead-lettered with reason {reason}{description} at"
        f" {phrases.format_time(float(dead_letter.enqueued_at_ms) / 1000.0, now)} and is in "
        f"{stored_messages.queue_of(location)}"
    )
    do = f"Fix the cause, then `{phrases.retry_dead_letter_command(queue, dead_letter_id)}`"
    return GroupState(group, "dead", "", attempts, attempts, 0.0, 0.0, why, do)
