"""Time, handed in: everything that waits asks one of these, so that a test can let three hours pass in no time."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Final

Clock = Callable[[], float]

_MIN_SWEEP_SIZE: Final = 2048  # entries from which on it pays to look for lapsed ones

_EPOCH_OFFSET: Final[float] = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since 1970 that never run backwards: the date is asked once, from then on the steady clock counts.
    Somebody who sets the machine's clock must not expire every session, or none."""
    return _EPOCH_OFFSET + time.monotonic()


class Deadline:
    """Something that wants to be called at a time. `due` returns when to be called next; 0.0 means never again.

    A deadline that moves (a keep-alive) is not taken out of the heap and put back for each packet: it looks at the
    clock when it is called, and asks to be called again later.
    """

    def fire(self, now: float) -> float:
        return 0.0

    def is_obsolete(self) -> bool:
        """Whether nobody needs this call any more; such entries are swept out of the heap when they are many."""
        return False


class DeadlineHeap:
    """One heap for all waiting things of the broker, served by one timer of the loop."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._entry_count: int = 0
        self._sweep_at: int = _MIN_SWEEP_SIZE

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, when: float, deadline: Deadline) -> bool:
        """Whether this is now the first: then the timer must be set anew."""
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        self._entry_count += 1
        heapq.heappush(self._heap, (when, self._entry_count, deadline))
        return (
            self._heap[0][1] == self._entry_count
        )  # not `is`: compiled code makes a new tuple for each look at one

    def _sweep(self) -> None:
        """Take out what nobody needs. Done each time the heap has doubled, so the heap holds at most twice what is
        needed: a client that comes back each second must not leave an entry for each of its former goodbyes."""
        self._heap = [entry for entry in self._heap if not entry[2].is_obsolete()]
        heapq.heapify(self._heap)
        self._sweep_at = max(_MIN_SWEEP_SIZE, 2 * len(self._heap))

    def next_due_at(self) -> float:
        """When to run next; 0.0 when nothing waits."""
        return self._heap[0][0] if self._heap else 0.0

    def run_due(self, now: float) -> None:
        """Call everything that is due."""
        while self._heap and self._heap[0][0] <= now:
            _, _, deadline = heapq.heappop(self._heap)
            if deadline.is_obsolete():
                continue
            next_at = deadline.fire(now)
            if next_at > 0.0:
                self._entry_count += 1
                heapq.heappush(self._heap, (next_at, self._entry_count, deadline))
