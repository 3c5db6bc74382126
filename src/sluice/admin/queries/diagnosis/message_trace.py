"""The trace of a message: its events, its state in each group, and why.

The broker records little about a message without failures (see `queues.flow.history`), so most of
the trace is derived: from the message, its deliveries, the settled ranges of each group, and its
dead letters.
"""

from __future__ import annotations

from itertools import islice

from sluice.admin import model
from sluice.admin.broker_facade import BATCH_SIZE, BrokerFacade
from sluice.admin.model import Event, GroupState, MessageTrace
from sluice.admin.queries.dead_letter_operations import dead_letters_of
from sluice.admin.queries.diagnosis.group_states import TraceData, build_group_states
from sluice.admin.queries.message_lookup import (
    MAX_SCANNED_MESSAGES,
    build_message_view,
    locate_message,
    read_in_batches,
)
from sluice.errors import UnknownMessage
from sluice.message import Message, decode_headers
from sluice.queues.service import (
    MessageLocation,
    QueueInspector,
    events_in_message,
    merge_events,
    stored_messages,
)

MAX_PAYLOAD_BYTES = 1_048_576


async def trace_message(facade: BrokerFacade, name: str, message_id: str) -> MessageTrace:
    queue = facade.inspect(name)
    location = await locate_message(facade, queue, message_id)
    message: Message | None = None
    if location is not None:
        (message,) = await facade.read_messages([location])
    trace = TraceData(message_id, location or queue.parse_location(message_id), message)
    known_at = trace.location
    if (
        message is None
        or known_at is None
        or any(group.has_settled(known_at) for group in queue.groups())
    ):
        trace.dead_letters = await _find_dead_letters(facade, queue, message_id)
    trace.history = queue.recorded_events(message_id, trace.location, message)
    stored_at = queue.id_stored_at(message_id)
    if trace.location is None and not trace.dead_letters and not trace.history and not stored_at:
        return await trace_message(
            facade, name, await _original_message_id(facade, queue, message_id)
        )
    now = facade.sync_clock()
    states = build_group_states(queue, trace, now)
    view = (
        build_message_view(trace.location, message, MAX_PAYLOAD_BYTES)
        if trace.location and message
        else None
    )
    return MessageTrace(
        message_id=message_id,
        queue=queue.name,
        message=view,
        states=states,
        events=_collect_events(queue, trace, stored_at),
        dead_letters=[stored_messages.generated_id(location) for location, _ in trace.dead_letters],
        summary=_summarize(queue.name, trace, view, states),
    )


async def _find_dead_letters(
    facade: BrokerFacade, queue: QueueInspector, message_id: str
) -> list[tuple[MessageLocation, Message]]:
    others = facade.inspector.dead_letter_queues_of(queue.name)
    if not queue.has_dead_letters() and not any(one.depth() for one in others):
        return []
    return [
        found
        async for found in dead_letters_of(facade, queue.name, message_id)
        if stored_messages.queue_of(found[0]) != queue.name
    ]


def _collect_events(queue: QueueInspector, trace: TraceData, stored_at: float) -> list[Event]:
    sources = [events_in_message(dead_letter) for _, dead_letter in trace.dead_letters]
    if trace.message is not None:
        sources.append(events_in_message(trace.message))
    if not sources and not trace.history and stored_at:
        sources.append([Event(stored_at, "enqueued")])
    sources.append(trace.history)
    if trace.location is not None:
        sources += [group.events_of(trace.location) for group in queue.groups()]
    return merge_events(sources)


async def _original_message_id(facade: BrokerFacade, queue: QueueInspector, message_id: str) -> str:
    """Return the original id of a dead letter of this queue that is named by its own id."""
    for dead_letter_queue in facade.inspector.dead_letter_queues_of(queue.name):
        location = dead_letter_queue.parse_location(message_id)
        if location is not None and dead_letter_queue.name != queue.name:
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
    inspector = facade.inspector
    found: dict[str, None] = {}
    if not message_id:
        return []
    stored_in = inspector.find_by_location(message_id)
    if stored_in:
        found[stored_in] = None
    for nth, queue in enumerate(inspector.queues()):
        if nth % BATCH_SIZE == BATCH_SIZE - 1:
            await facade.yield_to_loop()
        if queue.is_current() and queue.knows(message_id):
            found[queue.name] = None
    if found:
        return list(found)
    own_id = message_id.encode("utf-8", "replace")
    scanned = 0
    for queue in inspector.queues():
        if not queue.is_current() or scanned >= MAX_SCANNED_MESSAGES:
            continue
        locations = islice(queue.locations(), MAX_SCANNED_MESSAGES - scanned)
        scanned += queue.count_stored()
        async for _, message in read_in_batches(facade, locations):
            headers = dict(decode_headers(message.headers)) if message.headers else {}
            if message.id == own_id:
                found[queue.name] = None
            elif headers.get("original-message-id", "") == message_id:
                origin = headers.get("original-queue", "")
                found[queue.name if inspector.find(origin) is None else origin] = None
    return list(found)


# ---- summary


def _summarize(
    queue: str, trace: TraceData, view: model.Message | None, states: list[GroupState]
) -> str:
    name = f"Message {trace.message_id} of queue {queue}"
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
