"""Where a message stands in each group of its queue, and why it is there: a sentence each, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.admin.queries.diagnosis import phrases
from sluice.admin.broker_facade import Place
from sluice.admin.queries.message_lookup import is_delayed
from sluice.admin.queries.diagnosis.delivery_obstacles import behind, blocker_of, disconnection, obstacle_of
from sluice.admin.views import GroupState
from sluice.message import Message, decode_headers
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import DYING, LEASED, WAITING, Lease
from sluice.queues.flow.history import ACKED, Step
from sluice.queues.log.frame_builder import DEAD, EXPIRED, PURGED
from sluice.queues.names import message_id as id_of
from sluice.queues.model.queue import Queue


@dataclass
class Life:
    """What was found of a message."""

    name: str
    place: Place | None  # where it is, or was
    message: Message | None  # None: not kept any more
    letters: list[tuple[Place, Message]] = field(default_factory=list)
    past: list[Step] = field(default_factory=list)  # of one that came to a good end after some trouble


def states_of(queue: Queue, life: Life, now: float) -> list[GroupState]:
    """In each group of its queue; in one that is gone, when it died there."""
    dead: dict[str, tuple[Place, Message]] = {}
    for place, letter in life.letters:
        dead[dict(decode_headers(letter.headers)).get("original-group", "")] = place, letter
    states: list[GroupState] = []
    for group in queue.groups.values():
        letter_of = dead.pop(group.name, None) or dead.get("")
        alive = None
        if life.place is not None and life.message is not None:
            alive = _alive(group.cursors[int(life.place[0].number)], life.place[1], life.message, now)
        if alive is not None:
            states.append(alive)
        elif letter_of is not None:
            states.append(_dead(queue, group.name, *letter_of, now))
        else:
            states.append(_done(queue, group.cursors, group.name, life, now))
    for name, letter_of in dead.items():
        if name or not states:
            states.append(_dead(queue, name, *letter_of, now))
    return states


def _state(group: str, state: str, why: str, do: str = "", lease: Lease | None = None) -> GroupState:
    if lease is None:
        return GroupState(group, state, "", 0, 0, 0.0, 0.0, why, do)
    consumer = lease.client()
    if not consumer and lease.history:
        consumer = lease.history[-1].consumer
    return GroupState(
        group,
        state,
        consumer,
        int(lease.attempt),
        int(lease.failures),
        lease.due if lease.state == WAITING else 0.0,
        lease.deadline if lease.state == LEASED else 0.0,
        why,
        do,
    )


def _alive(cursor: Cursor, seq: int, message: Message, now: float) -> GroupState | None:
    """Where it stands in a group that has still to settle it; None for one that is done."""
    group = cursor.group.name
    lease = cursor.leases.get(seq)
    if lease is None:
        if cursor.settled(seq) or not cursor.partition.is_for(seq, cursor.group.gid):
            return None
        if is_delayed(cursor.partition, seq):
            due = float(message.deliver_at) / 1000.0
            why = f"its publisher asked for a delay, which is over at {phrases.moment(due, now)}"
            return GroupState(group, "delayed", "", 0, 0, due, 0.0, why, "")
        why, do = _why_it_waits(cursor, seq, now)
        return _state(group, "waiting", why, do)
    if lease.state == LEASED:
        why = (
            f"consumer {lease.client()} has it since {phrases.moment(lease.last_at, now)} and must settle or extend it "
            f"by {phrases.moment(lease.deadline, now)}"
        )
        if lease.consumer is not None and lease.consumer.paused:
            why += f"; {disconnection(lease.consumer, now)}"
        return _state(group, "delivered", why, lease=lease)
    failed = f"it has failed {phrases.count_of(int(lease.failures), 'time')}"
    if lease.description:
        failed += f", last: {lease.description}"
    if lease.state == DYING:
        return _state(group, "retrying", f"{failed}; it is on its way to the dead letters", lease=lease)
    if lease.state == WAITING:
        why = f"{failed}; it is tried again at {phrases.moment(lease.due, now)}"
        return _state(group, "retrying", why, "Mend what fails, or wait", lease)
    why, do = _why_it_waits(cursor, seq, now)
    return _state(group, "retrying", f"{failed}; it may go out again now, and {why}", do, lease)


def _why_it_waits(cursor: Cursor, seq: int, now: float) -> tuple[str, str]:
    group = cursor.group
    queue = group.queue
    consumer = cursor.consumer
    if consumer is None and group.consumers:
        return (
            f"every consumer of group {group.name} is stopping (prefetch 0)",
            phrases.start_worker(queue.name, group.name),
        )
    if consumer is None:
        return f"nobody consumes for group {group.name}", phrases.start_worker(queue.name, group.name)
    if seq in cursor.gated():
        return (
            "older messages of its key are in the partition that had the key before partitions were added",
            phrases.peek(queue.name, group.name),
        )
    key = int(cursor.key_of(seq))
    blocker = blocker_of(cursor, key) if key and seq not in cursor.leases else None
    if blocker is not None:
        finding = behind(blocker, now)
        return finding.what, finding.do
    obstacle = obstacle_of(consumer, now)
    if obstacle is not None and not key and group.shares_work():
        return f"no consumer of group {group.name} has room; {obstacle.what}", obstacle.do
    if obstacle is not None:
        return f"consumer {consumer.client} serves its partition, and {obstacle.what}", obstacle.do
    return f"its turn has not come; consumer {consumer.client} serves its partition", ""


def _done(queue: Queue, cursors: list[Cursor], group: str, life: Life, now: float) -> GroupState:
    for step in reversed(life.past):
        if step.what == ACKED and step.group == group:
            when = phrases.moment(step.at, now)
            why = f"consumer {step.consumer} acknowledged it at {when}, attempt {step.attempt}"
            return GroupState(group, "acked", step.consumer, int(step.attempt), 0, 0.0, 0.0, why, "")
    place = life.place
    if place is not None and life.message is not None:
        partition, seq = place
        if not partition.is_for(seq, cursors[int(partition.number)].group.gid):
            return _state(group, "not-for-it", "it was put back for the group that had failed it alone")
    cursor = cursors[int(place[0].number)] if place is not None else None
    others = sum(cursor.counts[how] for how in (DEAD, EXPIRED, PURGED)) if cursor is not None else 1
    if others == 0:
        return _state(group, "acked", f"group {group} has acknowledged it")
    return _state(
        group,
        "settled",
        f"group {group} is done with it (acknowledged, expired, purged or passed by a seek: that is not kept)",
    )


def _dead(queue: Queue, group: str, place: Place, letter: Message, now: float) -> GroupState:
    story = dict(decode_headers(letter.headers))
    reason = story.get("dead-reason", "")
    said = f" ({story['dead-description']})" if story.get("dead-description") else ""
    name = id_of(place[0].pid, place[1]).decode()
    attempts = int(story["attempts"]) if story.get("attempts", "").isdecimal() else 0
    why = (
        f"it died of {reason}{said} at {phrases.moment(float(letter.enqueued_at) / 1000.0, now)} and lies in "
        f"{place[0].queue.name}"
    )
    do = f"Mend the cause, then {phrases.retry_letter(queue.name, name)}"
    return GroupState(group, "dead", "", attempts, attempts, 0.0, 0.0, why, do)
