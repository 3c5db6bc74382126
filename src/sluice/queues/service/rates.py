"""Rates of a queue: enqueued, delivered and acknowledged per second, over the last few seconds.

Counters are sampled on request, at most once a second, and all callers share the samples: two
callers do not disturb each other. Messages do not pass through this module. After a long time
without requests, the first result is the average since the last sample.
"""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_SECONDS: Final = 5.0
STEP_SECONDS: Final = 1.0


class LatencySum:
    """Number and sum of the measured durations."""

    def __init__(self, count: int = 0, seconds: float = 0.0) -> None:
        self.count: int = count
        self.seconds: float = seconds

    def average_since(self, earlier: LatencySum, otherwise: float) -> float:
        """Return the average of the durations since `earlier`."""
        count = self.count - earlier.count
        return round((self.seconds - earlier.seconds) / count, 6) if count > 0 else otherwise


class Sample:
    def __init__(
        self,
        taken_at: float,
        enqueued: int,
        delivered: int,
        acked: int,
        nacked: int,
        delivery: LatencySum,
        process: LatencySum,
    ) -> None:
        self.taken_at: float = taken_at
        self.enqueued: int = enqueued
        self.delivered: int = delivered
        self.acked: int = acked
        self.nacked: int = nacked
        self.delivery: LatencySum = delivery
        self.process: LatencySum = process


class Rates:
    """Messages per second, 0.0 until there are two samples; and average latencies.

    A latency is the average of the last seconds with deliveries or acknowledgements.
    """

    def __init__(self) -> None:
        self.enqueued: float = 0.0
        self.delivered: float = 0.0
        self.acked: float = 0.0
        self.nacked: float = 0.0
        self.delivery_seconds: float = 0.0
        self.process_seconds: float = 0.0


class Sampler:
    """The samples of one queue."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._delivery_seconds: float = 0.0  # the last known averages
        self._process_seconds: float = 0.0

    def rates(self, current: Sample) -> Rates:
        samples = self._samples
        if not samples:
            nothing = LatencySum()
            self._delivery_seconds = current.delivery.average_since(nothing, 0.0)
            self._process_seconds = current.process.average_since(nothing, 0.0)
        elif (
            current.acked < samples[-1].acked
            or current.delivered < samples[-1].delivered
            or current.nacked < samples[-1].nacked
        ):
            samples.clear()  # a group was deleted, with its counters
        if not samples or current.taken_at - samples[-1].taken_at >= STEP_SECONDS:
            samples.append(current)
        while len(samples) > 1 and _is_outdated(
            current.taken_at - samples[0].taken_at, current.taken_at - samples[1].taken_at
        ):
            samples.popleft()
        first = samples[0]
        rates = Rates()
        passed = current.taken_at - first.taken_at
        if passed > 0.0:
            rates.enqueued = round((current.enqueued - first.enqueued) / passed, 1)
            rates.delivered = round((current.delivered - first.delivered) / passed, 1)
            rates.acked = round((current.acked - first.acked) / passed, 1)
            rates.nacked = round((current.nacked - first.nacked) / passed, 1)
        self._delivery_seconds = current.delivery.average_since(
            first.delivery, self._delivery_seconds
        )
        self._process_seconds = current.process.average_since(first.process, self._process_seconds)
        rates.delivery_seconds = self._delivery_seconds
        rates.process_seconds = self._process_seconds
        return rates


def _is_outdated(age: float, next_age: float) -> bool:
    """Return whether the first sample can be dropped: the next covers the window or is nearer."""
    return next_age >= WINDOW_SECONDS or (age > 2.0 * WINDOW_SECONDS and next_age >= STEP_SECONDS)
