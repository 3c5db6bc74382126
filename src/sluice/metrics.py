"""Counters of the broker, read only when metrics are requested.

Counting increments an attribute of a native object: nothing is locked, labeled or formatted on the
message path.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64


class Counters:
    def __init__(self) -> None:
        self.bytes_received: i64 = 0
        self.bytes_sent: i64 = 0
        self.packets_received: i64 = 0
        self.packets_sent: i64 = 0
        self.publishes_received: i64 = 0
        self.publishes_sent: i64 = 0
        self.publish_bytes_received: i64 = 0
        self.publish_bytes_sent: i64 = 0
        # The receiver was too slow, its limits were too small, or the message expired.
        self.publishes_dropped: i64 = 0
        self.connections_opened: i64 = 0
        self.connections_open: i64 = 0
        self.connections_refused: i64 = 0
        self.clients_connected: i64 = 0
        self.clients_maximum: i64 = 0
        self.sessions_expired: i64 = 0
        self.protocol_violations: i64 = 0
        # Settlements with a delivery token that does not belong to the client.
        self.wrong_tokens: i64 = 0


# Upper bounds in seconds: from a delivery in the same turn to a job that runs for an hour.
LATENCY_BOUNDS: Final[tuple[float, ...]] = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
    0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
)  # fmt: skip

# The same for compiled code, which compares native floats much faster.
_BOUNDS: Final[vec[float]] = vec[float](LATENCY_BOUNDS)


class Histogram:
    """Counts of durations by upper bound; the last one counts all longer durations."""

    def __init__(self) -> None:
        self._counts: vec[i64] = vec[i64]()
        self.total: float = 0.0

    def add(self, seconds: float) -> None:
        if len(self._counts) == 0:
            self._counts = vec[i64]([0] * (len(_BOUNDS) + 1))  # created on first use
        bounds = _BOUNDS
        at: i64 = 0
        last: i64 = len(bounds)
        while at < last and seconds > bounds[at]:
            at += 1
        self._counts[at] += 1
        self.total += seconds

    def count(self) -> i64:
        """Return how many durations were added."""
        total: i64 = 0
        for count in self._counts:
            total += count
        return total

    def counts(self) -> list[int]:
        """Return the counts by bound, empty if nothing was counted."""
        return [int(count) for count in self._counts]
