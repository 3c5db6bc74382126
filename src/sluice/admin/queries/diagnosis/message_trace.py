"""The trace of a message: its events, its state in each group, and why.

The broker records little about a message without failures (see `queues.flow.history`), so most of
the trace is derived: from the message, its deliveries, the settled ranges of each group, and its
dead letters.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from sluice.admin import model
from sluice.admin.broker_facade import BrokerFacade, MessageLocation
from sluice.admin.model import Event, GroupState, MessageTrace
from sluice.admin.queries.dead_letter_operations import dead_letter_queues_of, dead_letters_of
from sluice.admin.queries.diagnosis.group_states import TraceData, build_group_states
from sluice.admin.queries.message_lookup import (
    MAX_SCANNED_MESSAGES,
    build_message_view,
    iterate_queue,
    locate_message,
    parse_location,
    read_in_batches,
)
from sluice.errors import UnknownMessage
from sluice.message import Message, decode_headers
from sluice.queues.bulk import parse_iso_time
from sluice.queues.flow import format_iso_time
from sluice.queues.model import LEASED, Cursor, Queue, history
from sluice.queues.names import client_id_of, format_message_id, parse_message_id

MAX_PAYLOAD_BYTES = 1_048_576


async def trace_message(facade: BrokerFacade, name: str, message_id: str) -> MessageTrace:
    queue = facade.get_queue(name)
    location = await locate_message(facade, queue, message_id)
    message: Message | None = None
    if location is not None:
        (message,) = await facade.read_messages([location])
    trace = TraceData(message_id, location or parse_location(facade, queue, message_id), message)
    if message is None or _is_settled_by_some_group(trace.location):
        trace.dead_letters = await _find_dead_letters(facade, queue, message_id)
    trace.history = facade.engine.settlement.recent_history.get(queue.name, message_id)
    trace.history += _recent_acks(queue, trace)
    stored_at = queue.id_stored_at(message_id.encode("utf-8", "replace"))
    if trace.location is None and not trace.dead_letters and not trace.history and not stored_at:
        return await trace_message(
            facade, name, await _original_message_id(facade, queue, message_id)
        )
    now = facade.sync_clock()
    states = build_group_states(queue, trace, now)
    view = (
        build_message_view(trace.location, message, None, MAX_PAYLOAD_BYTES)
        if trace.location and message
        else None
    )
    return MessageTrace(
        message_id=message_id,
        queue=queue.name,
        message=view,
        states=states,
        events=_merge_events(trace, stored_at),
        dead_letters=[
            format_message_id(location[0].pid, location[1]).decode()
            for location, _ in trace.dead_letters
        ],
        summary=_summarize(queue, trace, view, states),
    )


def _is_settled_by_some_group(location: MessageLocation | None) -> bool:
    if location is None:
        return True
    return any(cursor.is_settled(location[1]) for cursor in location[0].cursors)


async def _find_dead_letters(
    facade: BrokerFacade, queue: Queue, message_id: str
) -> list[tuple[MessageLocation, Message]]:
    if not queue.dead_by_reason and not any(
        dead_letter_queue.depth for dead_letter_queue in dead_letter_queues_of(facade, queue.name)
    ):
        return []
    return [
        found
        async for found in dead_letters_of(facade, queue.name, message_id)
        if found[0][0].queue is not queue
    ]


async def _original_message_id(facade: BrokerFacade, queue: Queue, message_id: str) -> str:
    """Return the original id of a dead letter of this queue that is named by its own id."""
    for dead_letter_queue in dead_letter_queues_of(facade, queue.name):
        location = parse_location(facade, dead_letter_queue, message_id)
        if location is not None and dead_letter_queue is not queue:
            (dead_letter,) = await facade.read_messages([location])
            original_id = (
                dict(decode_headers(dead_letter.headers)).get("original-message-id", "")
                if dead_letter
                else ""
            )
            if original_id and original_id != message_id:
                return original_id
    raise UnknownMessage(queue.name, message_id)


async def find_queues_of_message(facade: BrokerFacade, message_id: str) -> list[str]:
    """Return the queues that know a message: by its id, by the recorded ids, then by a scan."""
    queues = facade.engine.queues
    own_id = message_id.encode("utf-8", "replace")
    found: dict[str, None] = {}
    if not own_id:
        return []
    pid, seq = parse_message_id(own_id)
    partition = facade.engine.partitions.get(int(pid))
    if partition is not None and seq < partition.next_seq:
        found[partition.queue.name] = None
    for nth, name in enumerate(list(queues)):
        if nth % 256 == 255:
            await facade.yield_to_loop()
        queue = queues.get(name)
        if queue is not None and (
            queue.id_stored_at(own_id)
            or any(own_id in group.leases_by_message_id for group in queue.groups.values())
            or (queue.recent_acks is not None and queue.recent_acks.find(own_id, -1, -1))
        ):
            found[name] = None
    if found:
        return list(found)
    scanned = 0
    for name in list(queues):
        queue = queues.get(name)
        if queue is None or scanned >= MAX_SCANNED_MESSAGES:
            continue
        locations = islice(iterate_queue(queue), MAX_SCANNED_MESSAGES - scanned)
        scanned += sum(int(partition.live_count) for partition in queue.partitions)
        async for _, message in read_in_batches(facade, locations):
            origin = dict(decode_headers(message.headers)) if message.headers else {}
            if message.id == own_id:
                found[name] = None
            elif origin.get("original-message-id", "") == message_id:
                found[
                    origin["original-queue"] if origin.get("original-queue") in queues else name
                ] = None
    return list(found)


def _recent_acks(queue: Queue, trace: TraceData) -> list[history.HistoryEvent]:
    """Return the events of remembered acknowledgements that the history does not contain."""
    if queue.recent_acks is None:
        return []
    pid, seq = -1, -1
    if trace.location is not None:
        pid, seq = int(trace.location[0].pid), trace.location[1]
    known = {event.group for event in trace.history if event.kind == history.ACKED}
    names = {int(group.gid): group.name for group in queue.groups.values()}
    events: list[history.HistoryEvent] = []
    # A stored message is known by its location: an earlier one may have had the same id.
    message_id = "" if trace.message is not None else trace.message_id
    for ack in queue.recent_acks.find(message_id.encode("utf-8", "replace"), pid, seq):
        group = names.get(int(ack.gid))
        if group is None or group in known:
            continue
        if trace.message is None and not trace.history and not events and ack.enqueued_at:
            events.append(history.HistoryEvent(ack.enqueued_at, history.ENQUEUED, "", "", 0, ""))
        consumer = client_id_of(ack.holder)
        for at, kind in ((ack.delivered_at, history.DELIVERED), (ack.acked_at, history.ACKED)):
            events.append(history.HistoryEvent(at, kind, group, consumer, ack.attempt, ""))
    return events


# ---- events


def _merge_events(trace: TraceData, stored_at: float) -> list[Event]:
    """Merge the events of all sources: dead letters share the beginning and have their own end."""
    sources = [_events_in_message(dead_letter) for _, dead_letter in trace.dead_letters]
    if trace.message is not None:
        sources.append(_events_in_message(trace.message))
    if not sources and not trace.history and stored_at:
        sources.append([Event(stored_at, history.ENQUEUED)])
    sources.append([_to_event(step) for step in trace.history])
    if trace.location is not None:
        sources += [
            _delivery_events(cursor, trace.location[1]) for cursor in trace.location[0].cursors
        ]
    found: list[Event] = []
    known: Counter[tuple[object, ...]] = Counter()
    for source in sources:
        counts: Counter[tuple[object, ...]] = Counter()
        for event in source:
            key = (round(event.at * 1000.0), event.what, event.group, event.consumer, event.attempt)
            counts[key] += 1
            if counts[key] > known[key]:
                known[key] += 1
                found.append(event)
    return sorted(found, key=lambda event: event.at)


def _to_event(step: history.HistoryEvent) -> Event:
    return Event(step.at, step.kind, step.group, step.consumer, int(step.attempt), step.detail)


def _events_in_message(message: Message) -> list[Event]:
    """Return the events that a message itself records.

    A dead letter and a redriven message also record their earlier history.
    """
    events = [_to_event(step) for step in history.events_from_headers(message)]
    if events:
        return events
    headers = dict(decode_headers(message.headers)) if message.headers else {}
    if "dead-reason" not in headers:
        detail = (
            f"captured from {message.topic.decode('utf-8', 'replace')}" if message.topic else ""
        )
        if message.deliver_at:
            detail = ", ".join(
                [
                    *([detail] if detail else []),
                    f"not before {format_iso_time(float(message.deliver_at) / 1000.0)}",
                ]
            )
        return [Event(float(message.enqueued_at) / 1000.0, history.ENQUEUED, detail=detail)]
    died_at = float(message.enqueued_at) / 1000.0
    enqueued_at = _parse_time(headers.get("original-enqueued-at", "")) or died_at
    what = history.EXPIRED if headers["dead-reason"] == "expired" else history.DEAD
    detail = ": ".join(
        text for text in (headers["dead-reason"], headers.get("dead-description", "")) if text
    )
    if enqueued_at == died_at and "original-sequence" not in headers:
        return [Event(died_at, what, detail=detail)]  # its queue never stored it
    return [
        Event(enqueued_at, history.ENQUEUED),
        Event(died_at, what, headers.get("original-group", ""), detail=detail),
    ]


def _parse_time(text: str) -> float:
    try:
        return parse_iso_time(text)
    except ValueError:
        return 0.0


def _delivery_events(cursor: Cursor, seq: int) -> list[Event]:
    """Return the events of a delivery that one group has not settled."""
    lease = cursor.leases.get(seq)
    steps = lease.history if lease is not None and lease.history is not None else None
    if steps is None and cursor.released_history is not None:
        steps = cursor.released_history.get(seq)
    events = [_to_event(step) for step in steps or []]
    if lease is not None and lease.state == LEASED:
        group = cursor.group.name
        events.append(
            Event(
                lease.last_delivered_at,
                history.DELIVERED,
                group,
                lease.holder_client_id(),
                int(lease.attempt),
            )
        )
        if lease.lease_started_at > lease.last_delivered_at:
            events.append(
                Event(
                    lease.lease_started_at,
                    history.EXTENDED,
                    group,
                    lease.holder_client_id(),
                    int(lease.attempt),
                )
            )
    return events


# ---- summary


def _summarize(
    queue: Queue, trace: TraceData, view: model.Message | None, states: list[GroupState]
) -> str:
    name = f"Message {trace.message_id} of queue {queue.name}"
    if not states:
        if view is None:
            return f"{name} is no longer stored, and the queue has no groups."
        if "dead-reason" in view.headers:
            origin = view.headers.get("original-queue", "")
            return f"{name} is a dead letter of queue {origin}; no group consumes it."
        return f"{name} is stored, and waits for a first group to subscribe."
    gone_text = "" if view is not None or trace.dead_letters else " is no longer stored:"
    state_texts = "; ".join(
        f"in group {state.group} it is {state.state}: {state.why}" if state.group else state.why
        for state in states
    )
    return f"{name}{gone_text} {state_texts}." if gone_text else f"{name}: {state_texts}."
