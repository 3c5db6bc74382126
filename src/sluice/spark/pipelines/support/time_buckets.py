"""Time buckets for charts and windows: their length, and the empty ones between others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import count
from typing import Final

MAX_BARS: Final = 96  # in a chart
BUCKET_SECONDS: Final = (
    10,
    30,
    60,
    300,
    900,
    1800,
    3600,
    3 * 3600,
    6 * 3600,
    12 * 3600,
    86_400,
    7 * 86_400,
)


def choose_bucket(first: datetime | None, last: datetime | None) -> timedelta:
    """Return the shortest usual bucket with at most MAX_BARS between two times."""
    seconds = 0.0 if first is None or last is None else (last - first).total_seconds()
    return timedelta(seconds=bucket_seconds_for(BUCKET_SECONDS[0], seconds, MAX_BARS))


def bucket_seconds_for(size: int, seconds: float, max_buckets: int) -> int:
    """Return the shortest multiple of `size` with at most `max_buckets` in `seconds`."""
    return next(one for one in _multiples(size) if seconds / one <= max_buckets)


def _multiples(size: int) -> Iterator[int]:
    """Yield usual multiples of `size` first, so that ticks of an axis fall on whole hours."""
    yield size
    candidates = [one for one in BUCKET_SECONDS if one > size and one % size == 0]
    if 3600 % size == 0 or 86_400 % size == 0:
        yield from candidates
        size = max(size, BUCKET_SECONDS[-1])
    yield from (size << nth for nth in count(1))


def fill_gaps(starts: Sequence[datetime], bucket: timedelta, min_count: int = 1) -> list[datetime]:
    """Return every bucket from the first to the last of `starts`.

    With `min_count`, add some before and after: one bar as wide as the chart shows nothing.
    """
    if not starts:
        return []
    first, last = min(starts), max(starts)
    count_ = int((last - first) / bucket) + 1
    buckets_before = max(0, min_count - count_) // 2
    return [first + (nth - buckets_before) * bucket for nth in range(max(count_, min_count))]
