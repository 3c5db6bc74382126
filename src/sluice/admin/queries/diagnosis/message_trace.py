"""The life of a message: what happened to it, where it is in each group now, and why.

Little is written down about a message that goes its way (see `queues.history`), so most of this is put together from
what is there: the message, its deliveries, what each group has settled, and its dead letters.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from sluice.admin.broker_facade import Hands, Place
from sluice.admin.queries.dead_letter_operations import homes, letters_of
from sluice.admin.queries.message_lookup import (
    SCAN_MOST,
    locate,
    message_view,
    place_of,
    read_through,
    whole,
)
from sluice.admin.queries.diagnosis.group_states import Life, states_of
from sluice.admin.views import Biography, Event, GroupState, MessageView
from sluice.errors import UnknownMessage
from sluice.message import Message, decode_headers
from sluice.queues.flow import history
from sluice.queues.model.cursor import Cursor
from sluice.queues.flow.dead_letters import iso_time
from sluice.queues.model.delivery_lease import LEASED
from sluice.queues.names import message_id as id_of
from sluice.queues.names import parse_message_id
from sluice.queues.model.queue import Queue
from sluice.queues.bulk.start_position import time_of

PAYLOAD_BYTES = 1_048_576


async def biography(hands: Hands, name: str, message_id: str) -> Biography:
    queue = hands.queue(name)
    place = await locate(hands, queue, message_id)
    message: Message | None = None
    if place is not None:
        (message,) = await hands.read([place])
    life = Life(message_id, place or place_of(hands, queue, message_id), message)
    if message is None or _some_group_is_done(life.place):
        life.letters = await _letters(hands, queue, message_id)
    life.past = hands.engine.past.of(queue.name, message_id)
    stored_at = queue.stored_at(message_id.encode("utf-8", "replace"))
    if life.place is None and not life.letters and not life.past and not stored_at:
        return await biography(hands, name, await _name_before_death(hands, queue, message_id))
    now = hands.look()
    states = states_of(queue, life, now)
    view = message_view(life.place, message, None, PAYLOAD_BYTES) if life.place and message else None
    return Biography(
        message_id=message_id,
        queue=queue.name,
        message=view,
        states=states,
        events=_events(life, stored_at),
        dead_letters=[id_of(place[0].pid, place[1]).decode() for place, _ in life.letters],
        summary=_summary(queue, life, view, states),
    )


def _some_group_is_done(place: Place | None) -> bool:
    if place is None:
        return True
    return any(cursor.settled(place[1]) for cursor in place[0].cursors)


async def _letters(hands: Hands, queue: Queue, message_id: str) -> list[tuple[Place, Message]]:
    if not queue.dead and not any(home.depth for home in homes(hands, queue.name)):
        return []
    return [
        found async for found in letters_of(hands, queue.name, message_id) if found[0][0].queue is not queue
    ]


async def _name_before_death(hands: Hands, queue: Queue, message_id: str) -> str:
    """What a dead letter of this queue, named by its own id, was called when it lived here."""
    for home in homes(hands, queue.name):
        place = place_of(hands, home, message_id)
        if place is not None and home is not queue:
            (letter,) = await hands.read([place])
            name = dict(decode_headers(letter.headers)).get("original-message-id", "") if letter else ""
            if name and name != message_id:
                return name
    raise UnknownMessage(queue.name, message_id)


async def find(hands: Hands, message_id: str) -> list[str]:
    """The queues that know a message: by where its id says it is, by what is remembered of ids, then by looking."""
    queues = hands.engine.queues
    own = message_id.encode("utf-8", "replace")
    found: dict[str, None] = {}
    if not own:
        return []
    pid, seq = parse_message_id(own)
    partition = hands.engine.partitions.get(int(pid))
    if partition is not None and seq < partition.next:
        found[partition.queue.name] = None
    for nth, name in enumerate(list(queues)):
        if nth % 256 == 255:
            await hands.breathe()
        queue = queues.get(name)
        if queue is not None and (
            queue.stored_at(own) or any(own in group.own_ids for group in queue.groups.values())
        ):
            found[name] = None
    if found:
        return list(found)
    looked = 0
    for name in list(queues):
        queue = queues.get(name)
        if queue is None or looked >= SCAN_MOST:
            continue
        places = islice(whole(queue), SCAN_MOST - looked)
        looked += sum(int(partition.live) for partition in queue.partitions)
        async for _, message in read_through(hands, places):
            origin = dict(decode_headers(message.headers)) if message.headers else {}
            if message.id == own:
                found[name] = None
            elif origin.get("original-message-id", "") == message_id:
                found[origin["original-queue"] if origin.get("original-queue") in queues else name] = None
    return list(found)


# ---- what happened


def _events(life: Life, stored_at: float) -> list[Event]:
    """Put together from all who know something: dead letters tell of the same beginning, each of its own end."""
    sources = [_beginning(letter) for _, letter in life.letters]
    if life.message is not None:
        sources.append(_beginning(life.message))
    if not sources and not life.past and stored_at:
        sources.append([Event(stored_at, history.ENQUEUED)])
    sources.append([_event(step) for step in life.past])
    if life.place is not None:
        sources += [_deliveries(cursor, life.place[1]) for cursor in life.place[0].cursors]
    found: list[Event] = []
    known: Counter[tuple[object, ...]] = Counter()
    for source in sources:
        told: Counter[tuple[object, ...]] = Counter()
        for event in source:
            key = (round(event.at * 1000.0), event.what, event.group, event.consumer, event.attempt)
            told[key] += 1
            if told[key] > known[key]:
                known[key] += 1
                found.append(event)
    return sorted(found, key=lambda event: event.at)


def _event(step: history.Step) -> Event:
    return Event(step.at, step.what, step.group, step.consumer, int(step.attempt), step.detail)


def _beginning(message: Message) -> list[Event]:
    """What a message tells of itself: that it came; of a dead letter, and of one put back, its earlier life too."""
    events = [_event(step) for step in history.earlier_steps(message)]
    if events:
        return events
    story = dict(decode_headers(message.headers)) if message.headers else {}
    if "dead-reason" not in story:
        detail = f"captured from {message.topic.decode('utf-8', 'replace')}" if message.topic else ""
        if message.deliver_at:
            detail = ", ".join(
                [*([detail] if detail else []), f"not before {iso_time(float(message.deliver_at) / 1000.0)}"]
            )
        return [Event(float(message.enqueued_at) / 1000.0, history.ENQUEUED, detail=detail)]
    died_at = float(message.enqueued_at) / 1000.0
    enqueued_at = _time(story.get("original-enqueued-at", "")) or died_at
    what = history.EXPIRED if story["dead-reason"] == "expired" else history.DEAD
    detail = ": ".join(text for text in (story["dead-reason"], story.get("dead-description", "")) if text)
    if enqueued_at == died_at and "original-sequence" not in story:
        return [Event(died_at, what, detail=detail)]  # its queue never took it
    return [
        Event(enqueued_at, history.ENQUEUED),
        Event(died_at, what, story.get("original-group", ""), detail=detail),
    ]


def _time(text: str) -> float:
    try:
        return time_of(text)
    except ValueError:
        return 0.0


def _deliveries(cursor: Cursor, seq: int) -> list[Event]:
    """What one group has done with it, as far as it is not done with it."""
    lease = cursor.leases.get(seq)
    steps = lease.history if lease is not None and lease.history is not None else None
    if steps is None and cursor.returned is not None:
        steps = cursor.returned.get(seq)
    events = [_event(step) for step in steps or []]
    if lease is not None and lease.state == LEASED:
        group = cursor.group.name
        events.append(Event(lease.last_at, history.DELIVERED, group, lease.client(), int(lease.attempt)))
        if lease.since > lease.last_at:
            events.append(Event(lease.since, history.EXTENDED, group, lease.client(), int(lease.attempt)))
    return events


# ---- the whole of it


def _summary(queue: Queue, life: Life, view: MessageView | None, states: list[GroupState]) -> str:
    name = f"Message {life.name} of queue {queue.name}"
    if not states:
        if view is None:
            return f"{name} is not kept any more, and the queue has no groups."
        if "dead-reason" in view.headers:
            return f"{name} is a dead letter of queue {view.headers.get('original-queue', '')}; nobody consumes it."
        return f"{name} is kept, and waits for a first group to subscribe."
    kept = "" if view is not None or life.letters else " is not kept any more:"
    told = "; ".join(
        f"in group {state.group} it is {state.state}: {state.why}" if state.group else state.why
        for state in states
    )
    return f"{name}{kept} {told}." if kept else f"{name}: {told}."
