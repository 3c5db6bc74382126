"""Record the history of deliveries: failures and releases, and acks of messages that had failed."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.queues.log import NoteReader, NoteWriter
from sluice.queues.model import Cursor, HistoryEvent, Lease, history
from sluice.queues.names import client_id_of

MAX_RECENT: Final = 2048  # histories that are kept after an acknowledgement
# Histories of released messages without a failure, per group and partition.
MAX_RELEASED: Final = 256


class RecentHistory:
    """Histories of recent messages: acknowledged after a failure, or cancelled.

    They let an operator check that a fix worked, and who cancelled a message. They are in memory
    only, and their number is bounded.
    """

    def __init__(self) -> None:
        self._events_by_message: dict[str, list[HistoryEvent]] = {}

    def record_ack(self, lease: Lease, message_id: str, now: float) -> None:
        """Record the acknowledgement of a delivery with a history, or of a redriven message."""
        message = lease.message
        events = history.events_from_headers(message) if message is not None else []
        if not events and message is not None:
            events.append(
                HistoryEvent(
                    float(message.enqueued_at_ms) / 1000.0, history.ENQUEUED, "", "", 0, ""
                )
            )
        record_delivery(lease)
        events.extend(lease.history or [])
        events.append(_make_event(lease, now, history.ACKED, ""))
        self.record(lease.cursor.group.queue.name, message_id, events)

    def record(self, queue: str, message_id: str, events: list[HistoryEvent]) -> None:
        """Record events of a message that is not stored any more, or soon will not be."""
        key = _message_key(queue, message_id)
        known = self._events_by_message.pop(key, None)
        if known is not None:
            events = [*known, *events]  # of another group, before
        elif len(self._events_by_message) >= MAX_RECENT:
            for oldest in self._events_by_message:
                del self._events_by_message[oldest]
                break
        self._events_by_message[key] = events

    def get(self, queue: str, message_id: str) -> list[HistoryEvent]:
        return self._events_by_message.get(_message_key(queue, message_id), [])


def _message_key(queue: str, message_id: str) -> str:
    return f"{queue} {message_id}"


def _make_event(lease: Lease, at: float, kind: str, detail: str) -> HistoryEvent:
    """Return an event of a lease's group, its last holder and its present attempt."""
    group = lease.cursor.group.name
    return HistoryEvent(at, kind, group, client_id_of(lease.holder), lease.attempt, detail)


def record_unacked_delivery(lease: Lease, kind: str, now: float, detail: str) -> i64:
    """Record start and end of a delivery that was not acknowledged; return the number of events."""
    count = record_delivery(lease)
    events = lease.history
    assert events is not None
    events.append(_make_event(lease, now, kind, detail[: history.MAX_DETAIL_LENGTH]))
    del events[: -history.MAX_EVENTS]
    return count + 1


def record_delivery(lease: Lease) -> i64:
    """Record the current delivery and its last extension; return the number of events."""
    events = lease.history
    if events is None:
        events = take_released(lease.cursor, lease.seq)
        lease.history = events
    events.append(_make_event(lease, lease.last_delivered_at, history.DELIVERED, ""))
    if lease.lease_started_at <= lease.last_delivered_at:
        return 1
    events.append(_make_event(lease, lease.lease_started_at, history.EXTENDED, ""))
    return 2


def write_events(note: NoteWriter, events: list[HistoryEvent] | None, count: i64) -> None:
    """Write the last `count` events."""
    if events is None:
        note.write_int(0)
        return
    first: i64 = max(0, len(events) - count)
    note.write_int(len(events) - first)
    for event in events[first:]:
        note.write_seconds(event.at)
        note.write_text(event.kind)
        note.write_text(event.consumer)
        note.write_int(event.attempt)
        note.write_text(event.detail)


def read_events(note: NoteReader, group: str, events: list[HistoryEvent]) -> list[HistoryEvent]:
    """Append the events of a note to the known ones."""
    for _ in range(note.read_int()):
        at = note.read_seconds()
        kind = note.read_text()
        consumer = note.read_text()
        attempt = note.read_int()
        events.append(HistoryEvent(at, kind, group, consumer, attempt, note.read_text()))
    del events[: -history.MAX_EVENTS]
    return events


def take_released(cursor: Cursor, seq: i64) -> list[HistoryEvent]:
    """Take the events of a message that was released before it failed; else an empty list."""
    released = cursor.released_history
    if released is None:
        return []
    return released.pop(int(seq), None) or []


def store_released(cursor: Cursor, seq: i64, events: list[HistoryEvent]) -> None:
    """Store the events of a released message, whose lease object is removed.

    They are dropped when it is acknowledged, or when there are too many.
    """
    released = cursor.released_history
    if released is None:
        released = {}
        cursor.released_history = released
    if len(released) >= MAX_RELEASED:
        for released_seq in list(released):
            if cursor.is_settled(released_seq) or not cursor.partition.holds(released_seq):
                del released[released_seq]
        if len(released) >= MAX_RELEASED:
            for released_seq in released:
                del released[released_seq]
                break
    released[int(seq)] = events
