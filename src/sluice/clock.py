"""Time as a parameter: code that waits takes a clock, so that a test can advance it by hours."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Final

Clock = Callable[[], float]

_MIN_SWEEP_SIZE: Final = 2048  # entries; below that a sweep does not pay

_EPOCH_OFFSET: Final[float] = time.time() - time.monotonic()


def steady_time() -> float:
    """Return seconds since 1970 that never run backwards.

    The date is read once; from then on the monotonic clock counts. A change of the machine's clock
    must not expire every session, or none.
    """
    return _EPOCH_OFFSET + time.monotonic()


class Deadline:
    """A callback for a point in time. `fire` returns the time of its next call, or 0.0 for never.

    A deadline that moves (a keep-alive) is not removed and added again for each packet: when it is
    called, it compares with the clock and asks for a later call.
    """

    def fire(self, now: float) -> float:
        return 0.0

    def is_obsolete(self) -> bool:
        """Return whether the call is no longer needed; many obsolete entries cause a sweep."""
        return False


class DeadlineHeap:
    """One heap for all deadlines of the broker, served by one timer of the loop."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._entry_count: int = 0
        self._sweep_at: int = _MIN_SWEEP_SIZE

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, when: float, deadline: Deadline) -> bool:
        """Add a deadline; return whether it is now the first: then the timer must be set again."""
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        self._entry_count += 1
        heapq.heappush(self._heap, (when, self._entry_count, deadline))
        # Not `is`: compiled code creates a new tuple for each access.
        return self._heap[0][1] == self._entry_count

    def _sweep(self) -> None:
        """Remove obsolete entries.

        Runs each time the heap has doubled, so the heap is at most twice as large as needed: a
        client that reconnects each second must not leave an entry for each of its connections.
        """
        self._heap = [entry for entry in self._heap if not entry[2].is_obsolete()]
        heapq.heapify(self._heap)
        self._sweep_at = max(_MIN_SWEEP_SIZE, 2 * len(self._heap))

    def next_due_at(self) -> float:
        """Return the time of the next call, or 0.0 if there is none."""
        return self._heap[0][0] if self._heap else 0.0

    def run_due(self, now: float) -> None:
        """Call all deadlines that are due."""
        while self._heap and self._heap[0][0] <= now:
            _, _, deadline = heapq.heappop(self._heap)
            if deadline.is_obsolete():
                continue
            next_at = deadline.fire(now)
            if next_at > 0.0:
                self._entry_count += 1
                heapq.heappush(self._heap, (next_at, self._entry_count, deadline))
