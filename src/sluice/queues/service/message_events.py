"""The events in the history of a message: from the message itself, and merged from all sources."""

from __future__ import annotations

from sluice.message import Message, decode_headers
from sluice.queues.bulk import parse_iso_time
from sluice.queues.flow import format_iso_time
from sluice.queues.model import HistoryEvent, history
from sluice.queues.service.views import Event


def show_event(step: HistoryEvent) -> Event:
    return Event(step.at, step.kind, step.group, step.consumer, int(step.attempt), step.detail)


def events_in_message(message: Message) -> list[Event]:
    """Return the events that a message itself records.

    A dead letter and a redriven message also record their earlier history.
    """
    events = [show_event(step) for step in history.events_from_headers(message)]
    if events:
        return events
    headers = dict(decode_headers(message.headers)) if message.headers else {}
    if "dead-reason" not in headers:
        details = []
        if message.topic:
            details.append(f"captured from {message.topic.decode('utf-8', 'replace')}")
        if message.deliver_at_ms:
            details.append(f"not before {format_iso_time(float(message.deliver_at_ms) / 1000.0)}")
        at = float(message.enqueued_at_ms) / 1000.0
        return [Event(at, history.ENQUEUED, detail=", ".join(details))]
    died_at = float(message.enqueued_at_ms) / 1000.0
    enqueued_at = _parse_time(headers.get("original-enqueued-at", "")) or died_at
    what = history.EXPIRED if headers["dead-reason"] == "expired" else history.DEAD
    texts = [headers["dead-reason"], headers.get("dead-description", "")]
    detail = ": ".join([text for text in texts if text])
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


def merge_events(sources: list[list[Event]]) -> list[Event]:
    """Merge events by time: dead letters share the beginning and have their own end."""
    found: list[Event] = []
    known: dict[tuple[object, ...], int] = {}
    for source in sources:
        counts: dict[tuple[object, ...], int] = {}
        for event in source:
            key = (round(event.at * 1000.0), event.what, event.group, event.consumer, event.attempt)
            counts[key] = counts.get(key, 0) + 1
            if counts[key] > known.get(key, 0):
                known[key] = known.get(key, 0) + 1
                found.append(event)
    return sorted(found, key=_time_of)


def _time_of(event: Event) -> float:
    return event.at
