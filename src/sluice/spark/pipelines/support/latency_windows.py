"""Time windows that can be summed: messages, bytes and latencies of a queue.

A latency is counted in a histogram whose steps grow by 5 %. So windows can be merged in any order,
and a percentile of the sum is accurate to 2.5 %; percentiles of percentiles would not be. The
module knows neither Spark nor HTML.

Memory is bounded: beyond MAX_WINDOWS, neighboring windows are merged (`seconds` is their length).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from sluice.spark.pipelines.support.time_buckets import bucket_seconds_for

MAX_WINDOWS: Final = 5000
STEP_FACTOR: Final = 1.05
# Shorter ones count as zero: times have a resolution of milliseconds.
MIN_LATENCY_SECONDS: Final = 0.001
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Count(NamedTuple):
    """Messages of one queue, window and latency step; `step` is None if the latency is unknown."""

    start: int  # seconds since 1970, like the end
    end: int
    queue: str
    step: int | None
    messages: int
    bytes: int
    slowest: float | None


@dataclass
class Window:
    messages: int = 0
    bytes: int = 0
    slowest: float | None = None
    steps: dict[int, int] = field(default_factory=dict)

    @property
    def timed(self) -> int:
        return sum(self.steps.values())

    def merge(self, other: Window) -> None:
        self.messages += other.messages
        self.bytes += other.bytes
        if other.slowest is not None:
            self.slowest = max(other.slowest, self.slowest or 0.0)
        for step, number in other.steps.items():
            self.steps[step] = self.steps.get(step, 0) + number

    def percentiles(self, shares: Iterable[float]) -> list[float | None]:
        """Return the latency at or below which each share of the timed messages is; `shares`
        ascend.
        """
        found: list[float | None] = []
        timed, seen, at = self.timed, 0, -1.0
        steps = iter(sorted(self.steps.items()))
        for share in shares:
            while seen < share * timed:
                step, number = next(steps)
                seen += number
                at = step_seconds(step)
            found.append(None if self.slowest is None else min(at, self.slowest))
        return found

    def figures(self) -> dict[str, Any]:
        return {
            "messages": self.messages,
            "bytes": self.bytes,
            "timed": self.timed,
            **dict(zip(PERCENTILES, self.percentiles(PERCENTILES.values()))),
            "slowest": self.slowest,
        }


def step_seconds(step: int) -> float:
    """Return the middle of a step. Step 0 is below MIN_LATENCY_SECONDS; step n ends at
    MIN_LATENCY_SECONDS * STEP_FACTOR**n.
    """
    return float(MIN_LATENCY_SECONDS * STEP_FACTOR ** (step - 0.5)) if step > 0 else 0.0


class Windows:
    """All windows of some queues."""

    def __init__(self, requested_seconds: int = 0, max_windows: int = MAX_WINDOWS) -> None:
        # The requested length; 0: that of the first count.
        self.requested_seconds = requested_seconds
        self.seconds = requested_seconds  # the current length
        self._max_windows = max_windows
        self._windows: dict[tuple[int, str], Window] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __len__(self) -> int:
        return len({start for start, _ in self._windows})

    def add(self, counts: Iterable[Count]) -> None:
        for one in counts:
            self.requested_seconds = self.requested_seconds or one.end - one.start
            # Some were merged before they arrived.
            self.seconds = max(self.seconds, one.end - one.start)
            steps = {} if one.step is None else {one.step: one.messages}
            self._merge_window(
                one.start, one.queue, Window(one.messages, one.bytes or 0, one.slowest, steps)
            )
            if len(self._windows) > self._max_windows:
                self._coarsen()

    def resampled(self, seconds: int) -> Windows:
        """Return the same counts in longer windows."""
        longer = Windows(self.requested_seconds, self._max_windows)
        longer.seconds = seconds
        for (start, queue), window in self._windows.items():
            longer._merge_window(start, queue, window)
        return longer

    def for_chart(self, max_windows: int) -> Windows:
        """Return at most `max_windows` windows, for a chart."""
        return (
            self.resampled(bucket_seconds_for(self.seconds, self._length(), max_windows))
            if self._windows
            else self
        )

    def total(self, queue: str | None = None) -> Window:
        found = Window()
        for (_, name), window in self._windows.items():
            if queue is None or name == queue:
                found.merge(window)
        return found

    def queues(self) -> list[str]:
        """Return the queues, the busiest first."""
        sums: dict[str, int] = {}
        for (_, queue), window in self._windows.items():
            sums[queue] = sums.get(queue, 0) + window.messages
        return sorted(sums, key=lambda name: (-sums[name], name))

    def peak(self) -> float:
        """Return the messages per second of the busiest window, over all queues."""
        sums: dict[int, int] = {}
        for (start, _), window in self._windows.items():
            sums[start] = sums.get(start, 0) + window.messages
        return max(sums.values(), default=0) / max(self.seconds, 1)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per window and queue, oldest first, with times in UTC."""
        return [
            {
                "start": _utc(start),
                "end": _utc(start + self.seconds),
                "queue": queue,
                **window.figures(),
            }
            for (start, queue), window in sorted(self._windows.items(), key=lambda pair: pair[0])
        ]

    def _merge_window(self, start: int, queue: str, window: Window) -> None:
        place = (start // self.seconds * self.seconds, queue)
        self._windows.setdefault(place, Window()).merge(window)

    def _length(self) -> int:
        starts = [start for start, _ in self._windows]
        return max(starts) - min(starts)

    def _coarsen(self) -> None:
        self.seconds = window_seconds_for(
            self.seconds, self._length(), len(self.queues()), self._max_windows
        )
        self._windows = self.resampled(self.seconds)._windows
        # With very many queues, each has only a window or two.
        while len(self._windows) > self._max_windows:
            self._max_windows *= 2


def window_seconds_for(
    seconds: int, length: float, queues: int, max_windows: int = MAX_WINDOWS
) -> int:
    """Return the window length for a time of `length`; half of the capacity is left for later
    windows.
    """
    return bucket_seconds_for(seconds, length, max(1, max_windows // 2 // max(queues, 1) - 1))


def _utc(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
