"""Counters that the broker's own rooms add to as they work, and that are read only when somebody asks.

Counting is an attribute of a native object plus one: nothing is locked, labelled or formatted on the path of a message.
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
        self.publishes_dropped: i64 = (
            0  # a receiver could not take them: too slow, too small, or expired
        )
        self.connections_opened: i64 = 0
        self.connections_open: i64 = 0
        self.connections_refused: i64 = 0
        self.clients_connected: i64 = 0
        self.clients_maximum: i64 = 0
        self.sessions_expired: i64 = 0
        self.protocol_violations: i64 = 0
        self.wrong_tokens: i64 = (
            0  # settlements with a delivery token that the client was not given
        )


# Upper bounds in seconds: from a cached delivery in the same turn to a job that ran for an hour.
LATENCY_BOUNDS: Final[tuple[float, ...]] = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
    0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
)  # fmt: skip

# The same for compiled code, which compares plain numbers much faster than Python's.
_BOUNDS: Final[vec[float]] = vec[float](LATENCY_BOUNDS)


class Histogram:
    """Counts of durations by upper bound, the last one for all that is longer."""

    def __init__(self) -> None:
        self._counts: vec[i64] = vec[i64]()
        self.total: float = 0.0

    def add(self, seconds: float) -> None:
        if len(self._counts) == 0:
            self._counts = vec[i64]([0] * (len(_BOUNDS) + 1))  # made when first needed
        bounds = _BOUNDS
        at: i64 = 0
        last: i64 = len(bounds)
        while at < last and seconds > bounds[at]:
            at += 1
        self._counts[at] += 1
        self.total += seconds

    def counts(self) -> list[int]:
        """By bound; empty when nothing was counted."""
        return [int(count) for count in self._counts]
