"""History of deliveries that failed or were released: events that explain a message's state.

A message that is delivered once and acknowledged has no history and costs nothing: the list is
created with the first failure or release. The current delivery is no event yet; the lease names its
holder. Notes of retries persist the events, and a dead letter carries them in a header.

    in a note     count, then for each event: time, kind, consumer, attempt, detail
    in a header   JSON: [[milliseconds, kind, group, consumer, attempt, detail], ...], oldest first
"""

from __future__ import annotations

import json
from typing import Final

from mypy_extensions import i64

from sluice.message import Message, decode_headers

HEADER: Final = "history"
MAX_EVENTS: Final = 32  # the newest ones are kept
MAX_HEADER_BYTES: Final = 4000  # the header is sent with every delivery of the dead letter
MAX_DETAIL_LENGTH: Final = 160

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
CANCELLED: Final = "cancelled"
RESCHEDULED: Final = "rescheduled"


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
