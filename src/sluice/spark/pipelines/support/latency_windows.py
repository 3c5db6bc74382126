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

from sluice.spark.pipelines.support.time_buckets import coarser

MOST: Final = 5000
STEP: Final = 1.05
LEAST: Final = 0.001  # seconds: what is shorter is nothing, for times come in milliseconds
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

    def take(self, other: Window) -> None:
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
                at = seconds_of(step)
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


def seconds_of(step: int) -> float:
    """The middle of a step. Step 0 is below LEAST, and n ends at LEAST * STEP**n."""
    return float(LEAST * STEP ** (step - 0.5)) if step > 0 else 0.0


class Windows:
    """All windows of some queues."""

    def __init__(self, wanted: int = 0, most: int = MOST) -> None:
        self.wanted = wanted  # how long they were to be; 0 is told by the first one
        self.seconds = wanted  # how long they are
        self._most = most
        self._known: dict[tuple[int, str], Window] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __len__(self) -> int:
        return len({start for start, _ in self._known})

    def add(self, counts: Iterable[Count]) -> None:
        for one in counts:
            self.wanted = self.wanted or one.end - one.start
            self.seconds = max(self.seconds, one.end - one.start)  # some were put together before they came
            steps = {} if one.step is None else {one.step: one.messages}
            self._take(one.start, one.queue, Window(one.messages, one.bytes or 0, one.slowest, steps))
            if len(self._known) > self._most:
                self._put_together()

    def of(self, seconds: int) -> Windows:
        """The same in longer windows."""
        longer = Windows(self.wanted, self._most)
        longer.seconds = seconds
        for (start, queue), window in self._known.items():
            longer._take(start, queue, window)
        return longer

    def for_chart(self, most: int) -> Windows:
        """Not more of them, one after the other, than a chart shows."""
        return self.of(coarser(self.seconds, self._length(), most)) if self._known else self

    def total(self, queue: str | None = None) -> Window:
        found = Window()
        for (_, name), window in self._known.items():
            if queue is None or name == queue:
                found.take(window)
        return found

    def queues(self) -> list[str]:
        """By what came through, most first."""
        sums: dict[str, int] = {}
        for (_, queue), window in self._known.items():
            sums[queue] = sums.get(queue, 0) + window.messages
        return sorted(sums, key=lambda name: (-sums[name], name))

    def peak(self) -> float:
        """Messages per second in the busiest window, all queues together."""
        sums: dict[int, int] = {}
        for (start, _), window in self._known.items():
            sums[start] = sums.get(start, 0) + window.messages
        return max(sums.values(), default=0) / max(self.seconds, 1)

    def rows(self) -> list[dict[str, Any]]:
        """A row per window and queue, the oldest first; times are UTC and say so."""
        return [
            {"start": _utc(start), "end": _utc(start + self.seconds), "queue": queue, **window.figures()}
            for (start, queue), window in sorted(self._known.items(), key=lambda pair: pair[0])
        ]

    def _take(self, start: int, queue: str, window: Window) -> None:
        place = (start // self.seconds * self.seconds, queue)
        self._known.setdefault(place, Window()).take(window)

    def _length(self) -> int:
        starts = [start for start, _ in self._known]
        return max(starts) - min(starts)

    def _put_together(self) -> None:
        self.seconds = fitting(self.seconds, self._length(), len(self.queues()), self._most)
        self._known = self.of(self.seconds)._known
        while len(self._known) > self._most:  # so many queues that each has but a window or two
            self._most *= 2


def fitting(seconds: int, length: float, queues: int, most: int = MOST) -> int:
    """How long windows must be for a time of `length`. Half of the room is left: more of them come."""
    return coarser(seconds, length, max(1, most // 2 // max(queues, 1) - 1))


def _utc(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
