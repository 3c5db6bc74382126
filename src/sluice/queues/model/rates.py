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


class Sample:
    def __init__(self, taken_at: float, enqueued: int, delivered: int, acked: int) -> None:
        self.taken_at = taken_at
        self.enqueued = enqueued
        self.delivered = delivered
        self.acked = acked


class Rates:
    """Messages per second; 0.0 until there are two samples."""

    def __init__(self, enqueued: float, delivered: float, acked: float) -> None:
        self.enqueued = enqueued
        self.delivered = delivered
        self.acked = acked


class Sampler:
    """The samples of one queue."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def rates(self, now: float, enqueued: int, delivered: int, acked: int) -> Rates:
        samples = self._samples
        if samples and (acked < samples[-1].acked or delivered < samples[-1].delivered):
            samples.clear()  # a group was deleted, with its counters
        if not samples or now - samples[-1].taken_at >= STEP_SECONDS:
            samples.append(Sample(now, enqueued, delivered, acked))
        while len(samples) > 1 and _is_outdated(
            now - samples[0].taken_at, now - samples[1].taken_at
        ):
            samples.popleft()
        first = samples[0]
        passed = now - first.taken_at
        if passed <= 0.0:
            return Rates(0.0, 0.0, 0.0)
        return Rates(
            round((enqueued - first.enqueued) / passed, 1),
            round((delivered - first.delivered) / passed, 1),
            round((acked - first.acked) / passed, 1),
        )


def _is_outdated(age: float, next_age: float) -> bool:
    """Return whether the first sample can be dropped: the next covers the window or is nearer."""
    return next_age >= WINDOW_SECONDS or (age > 2.0 * WINDOW_SECONDS and next_age >= STEP_SECONDS)
