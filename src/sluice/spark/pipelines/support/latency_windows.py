"""Windows of time that can be added up: messages, bytes and latencies of a queue.

A latency is counted in one of a row of steps, each 5 % longer than the one before. So windows can be put together in
any order, a backlog as well as what comes in, and a percentile of them all is still right to 2.5 %: percentiles of
percentiles would not be. Knows neither Spark nor pages.

However long it is looked at something: from `MOST` windows on, neighbours become one (`seconds` tells their length).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from sluice.spark.pipelines.support.time_buckets import bucket_seconds_for

MAX_WINDOWS: Final = 5000
STEP_FACTOR: Final = 1.05
MIN_LATENCY_SECONDS: Final = (
    0.001  # seconds: what is shorter is nothing, for times come in milliseconds
)
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Count(NamedTuple):
    """Messages of one queue, one window and one step; `step` is None for those whose latency is not known."""

    start: int  # seconds since 1970, and so is the end
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
        """For each share, rising: so many seconds, or less, took this part of those whose latency is known."""
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
    """The middle of a step. Step 0 is below LEAST, and n ends at LEAST * STEP**n."""
    return float(MIN_LATENCY_SECONDS * STEP_FACTOR ** (step - 0.5)) if step > 0 else 0.0


class Windows:
    """All windows of some queues."""

    def __init__(self, requested_seconds: int = 0, max_windows: int = MAX_WINDOWS) -> None:
        self.requested_seconds = (
            requested_seconds  # how long they were to be; 0 is told by the first one
        )
        self.seconds = requested_seconds  # how long they are
        self._max_windows = max_windows
        self._windows: dict[tuple[int, str], Window] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __len__(self) -> int:
        return len({start for start, _ in self._windows})

    def add(self, counts: Iterable[Count]) -> None:
        for one in counts:
            self.requested_seconds = self.requested_seconds or one.end - one.start
            self.seconds = max(
                self.seconds, one.end - one.start
            )  # some were put together before they came
            steps = {} if one.step is None else {one.step: one.messages}
            self._merge_window(
                one.start, one.queue, Window(one.messages, one.bytes or 0, one.slowest, steps)
            )
            if len(self._windows) > self._max_windows:
                self._coarsen()

    def resampled(self, seconds: int) -> Windows:
        """The same in longer windows."""
        longer = Windows(self.requested_seconds, self._max_windows)
        longer.seconds = seconds
        for (start, queue), window in self._windows.items():
            longer._merge_window(start, queue, window)
        return longer

    def for_chart(self, max_windows: int) -> Windows:
        """Not more of them, one after the other, than a chart shows."""
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
        """By what came through, most first."""
        sums: dict[str, int] = {}
        for (_, queue), window in self._windows.items():
            sums[queue] = sums.get(queue, 0) + window.messages
        return sorted(sums, key=lambda name: (-sums[name], name))

    def peak(self) -> float:
        """Messages per second in the busiest window, all queues together."""
        sums: dict[int, int] = {}
        for (start, _), window in self._windows.items():
            sums[start] = sums.get(start, 0) + window.messages
        return max(sums.values(), default=0) / max(self.seconds, 1)

    def rows(self) -> list[dict[str, Any]]:
        """A row per window and queue, the oldest first; times are UTC and say so."""
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
        while (
            len(self._windows) > self._max_windows
        ):  # so many queues that each has but a window or two
            self._max_windows *= 2


def window_seconds_for(
    seconds: int, length: float, queues: int, max_windows: int = MAX_WINDOWS
) -> int:
    """How long windows must be for a time of `length`. Half of the room is left: more of them come."""
    return bucket_seconds_for(seconds, length, max(1, max_windows // 2 // max(queues, 1) - 1))


def _utc(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
