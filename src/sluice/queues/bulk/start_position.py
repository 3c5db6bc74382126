"""Parse the start position of a group into a sequence for each partition."""

from __future__ import annotations

from datetime import UTC, datetime

from sluice.errors import InvalidQueueConfig
from sluice.queues.model import Queue


def resolve_start(queue: Queue, start: str) -> list[int]:
    """Return the first sequence of each partition for a start position.

    `start` is `earliest`, `latest`, a sequence, or a time (ISO 8601, or `@` and seconds since
    1970).
    """
    if start in ("", "earliest"):
        return [int(partition.first_live(0)) for partition in queue.partitions]
    if start == "latest":
        return [int(partition.next_seq) for partition in queue.partitions]
    if start.isascii() and start.isdigit() and len(start) <= 18:
        sequence = int(start)
        return [
            min(max(sequence, int(one.first_live(0))), int(one.next_seq))
            for one in queue.partitions
        ]
    try:
        seconds = float(start[1:]) if start.startswith("@") else parse_iso_time(start)
        milliseconds = int(seconds * 1000.0)
        if milliseconds >= 1 << 62:
            raise OverflowError
    except (ValueError, OverflowError):
        raise InvalidQueueConfig(
            f"start is {start!r}",
            "Use earliest, latest, a sequence, or a time such as 2030-01-31T12:00:00Z",
        ) from None
    return [int(partition.first_arrived_since(milliseconds)) for partition in queue.partitions]


def parse_iso_time(text: str) -> float:
    """Parse an ISO 8601 time into seconds since 1970; a time without a zone is UTC."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
