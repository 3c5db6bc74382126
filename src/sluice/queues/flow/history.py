"""History of deliveries that failed or were released: events that explain a message's state.

A message that is delivered once and acknowledged has no history and costs nothing: the list is
created with the first failure or release. The current delivery is no event yet; the lease names its
holder. Notes of retries persist the events, and a dead letter carries them in a header.

    in a note     count, then for each event: time, kind, consumer, attempt, detail
    in a header   JSON: [[milliseconds, kind, group, consumer, attempt, detail], ...], oldest first
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.message import Message, decode_headers

if TYPE_CHECKING:
    from sluice.queues.log.notes import NoteReader, NoteWriter
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.model.delivery_lease import Lease

HEADER: Final = "history"
MAX_EVENTS: Final = 32  # the newest ones are kept
MAX_HEADER_BYTES: Final = 4000  # the header is sent with every delivery of the dead letter
MAX_DETAIL_LENGTH: Final = 160
# Histories of released messages without a failure, per group and partition.
MAX_RELEASED: Final = 256

ENQUEUED: Final = "enqueued"
DELIVERED: Final = "delivered"
EXTENDED: Final = "extended"
NACKED: Final = "nacked"
TIMED_OUT: Final = "timed-out"
VANISHED: Final = "vanished"
RELEASED: Final = "released"
DEAD: Final = "dead"
EXPIRED: Final = "expired"
REDRIVEN: Final = "redriven"
ACKED: Final = "acked"

MAX_RECENT: Final = 2048  # histories that are kept after an acknowledgement


class HistoryEvent:
    def __init__(
        self, at: float, kind: str, group: str, consumer: str, attempt: i64, detail: str
    ) -> None:
        self.at: float = at
        self.kind: str = kind
        self.group: str = group  # empty: all groups
        self.consumer: str = consumer
        self.attempt: i64 = attempt
        self.detail: str = detail


class RecentHistory:
    """Histories of recent messages that were acknowledged after a failure.

    They let an operator check that a fix worked. They are in memory only, and their number is
    bounded.
    """

    def __init__(self) -> None:
        self._events_by_message: dict[str, list[HistoryEvent]] = {}

    def record_ack(self, lease: Lease, message_id: str, now: float) -> None:
        """Record the acknowledgement of a delivery with a history, or of a redriven message."""
        message = lease.message
        events = events_from_headers(message) if message is not None else []
        if not events and message is not None:
            events.append(
                HistoryEvent(float(message.enqueued_at) / 1000.0, ENQUEUED, "", "", 0, "")
            )
        record_delivery(lease)
        events.extend(lease.history or [])
        events.append(
            HistoryEvent(
                now, ACKED, lease.cursor.group.name, lease.holder_client_id(), lease.attempt, ""
            )
        )
        key = _message_key(lease.cursor.group.queue.name, message_id)
        known = self._events_by_message.pop(key, None)
        if known is not None:
            events = [*known, *events]  # another group acknowledged it before
        elif len(self._events_by_message) >= MAX_RECENT:
            for oldest in self._events_by_message:
                del self._events_by_message[oldest]
                break
        self._events_by_message[key] = events

    def get(self, queue: str, message_id: str) -> list[HistoryEvent]:
        return self._events_by_message.get(_message_key(queue, message_id), [])


def _message_key(queue: str, message_id: str) -> str:
    return f"{queue} {message_id}"


# ---- recording


def record_end(lease: Lease, kind: str, now: float, detail: str) -> i64:
    """Record start and end of a delivery that was not acknowledged; return the number of events."""
    count = record_delivery(lease)
    events = lease.history
    assert events is not None
    events.append(
        HistoryEvent(
            now,
            kind,
            lease.cursor.group.name,
            lease.holder_client_id(),
            lease.attempt,
            detail[:MAX_DETAIL_LENGTH],
        )
    )
    del events[:-MAX_EVENTS]
    return count + 1


def record_delivery(lease: Lease) -> i64:
    """Record the current delivery and its last extension; return the number of events."""
    events = lease.history
    if events is None:
        events = take_released(lease.cursor, lease.seq)
        lease.history = events
    group = lease.cursor.group.name
    events.append(
        HistoryEvent(
            lease.last_delivered_at, DELIVERED, group, lease.holder_client_id(), lease.attempt, ""
        )
    )
    if lease.lease_started_at <= lease.last_delivered_at:
        return 1
    events.append(
        HistoryEvent(
            lease.lease_started_at, EXTENDED, group, lease.holder_client_id(), lease.attempt, ""
        )
    )
    return 2


def take_released(cursor: Cursor, seq: i64) -> list[HistoryEvent]:
    """Take the events of a message that was released before it failed; else an empty list."""
    released = cursor.released_history
    if released is None:
        return []
    return released.pop(int(seq), None) or []


def store_released(cursor: Cursor, seq: i64, events: list[HistoryEvent]) -> None:
    """Keep the events of a released message without a lease.

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


# ---- in notes and snapshots


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
    del events[:-MAX_EVENTS]
    return events


# ---- in headers


def events_from_headers(message: Message) -> list[HistoryEvent]:
    """Return the history in the headers of a message; empty if it has none."""
    if not message.headers:
        return []
    for name, value in decode_headers(message.headers):
        if name == HEADER:
            return decode_events(value)
    return []


def encode_events(events: list[HistoryEvent]) -> str:
    """Encode events as a header value; the oldest are left out if they do not fit."""
    rows: list[str] = []
    size = 2
    for event in reversed(events[-MAX_EVENTS:]):
        row = json.dumps(
            [
                int(event.at * 1000.0 + 0.5),
                event.kind,
                event.group,
                event.consumer,
                int(event.attempt),
                event.detail,
            ],
            separators=(",", ":"),
        )
        size += len(row) + 1
        if size > MAX_HEADER_BYTES:
            break
        rows.append(row)
    rows.reverse()
    return "[" + ",".join(rows) + "]"


def decode_events(text: str) -> list[HistoryEvent]:
    """Decode a header value, which clients may have written; ignore invalid events."""
    events: list[HistoryEvent] = []
    try:
        rows = json.loads(text)
        for row in rows:
            at, kind, group, consumer, attempt, detail = row
            events.append(
                HistoryEvent(
                    float(at) / 1000.0,
                    str(kind),
                    str(group),
                    str(consumer),
                    int(attempt),
                    str(detail),
                )
            )
    except (ValueError, TypeError, RecursionError, OverflowError):
        return events
    return events
