"""Spans of time for charts and windows: how long one is, and those in which nothing happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import count
from typing import Final

MOST: Final = 96  # bars in a chart
BUCKETS: Final = (10, 30, 60, 300, 900, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86_400, 7 * 86_400)


def choose_bucket(first: datetime | None, last: datetime | None) -> timedelta:
    """The shortest usual span of which not too many lie between two times."""
    seconds = 0.0 if first is None or last is None else (last - first).total_seconds()
    return timedelta(seconds=coarser(BUCKETS[0], seconds, MOST))


def coarser(size: int, seconds: float, most: int) -> int:
    """The shortest span, `size` or a multiple of it, of which not more than `most` lie in so many seconds."""
    return next(one for one in _multiples(size) if seconds / one <= most)


def _multiples(size: int) -> Iterator[int]:
    """Usual spans as long as there are some that `size` fits into, so that marks of an axis fall on full hours."""
    yield size
    usual = [one for one in BUCKETS if one > size and one % size == 0]
    if 3600 % size == 0 or 86_400 % size == 0:
        yield from usual
        size = max(size, BUCKETS[-1])
    yield from (size << nth for nth in count(1))


def fill(starts: Sequence[datetime], bucket: timedelta, least: int = 1) -> list[datetime]:
    """Every span from the first to the last that is given, those between them too. With `least`, some before and behind
    as well: one bar as wide as the chart would tell nothing."""
    if not starts:
        return []
    first, last = min(starts), max(starts)
    count_ = int((last - first) / bucket) + 1
    before = max(0, least - count_) // 2
    return [first + (nth - before) * bucket for nth in range(max(count_, least))]
