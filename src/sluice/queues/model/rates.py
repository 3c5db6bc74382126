"""How fast a queue is written to, delivered from and acknowledged: per second, over the last few seconds.

Counters are looked at when somebody asks, at most once a second, and all who ask share what was seen: two watchers do
not spoil each other's figures. Nothing here is on the path of a message. When nobody has asked for long, the first
answer is the average since the last look.
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
    """Per second. 0.0 until there are two looks to tell a rate from."""

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
            samples.clear()  # a group was deleted, and took its counters along
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
    """Whether the first sample can go: the next one covers the window, or is at least much nearer to it."""
    return next_age >= WINDOW_SECONDS or (age > 2.0 * WINDOW_SECONDS and next_age >= STEP_SECONDS)
