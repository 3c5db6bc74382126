"""Spans of time for charts: how long one is, and those in which nothing happened."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

MOST: Final = 96  # bars in a chart
BUCKETS: Final = (10, 30, 60, 300, 900, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86_400, 7 * 86_400)


def choose_bucket(first: datetime | None, last: datetime | None) -> timedelta:
    """The shortest usual span of which not too many lie between two times."""
    seconds = 0.0 if first is None or last is None else (last - first).total_seconds()
    found = next((size for size in BUCKETS if seconds / size <= MOST), BUCKETS[-1])
    return timedelta(seconds=found)


def fill(starts: Sequence[datetime], bucket: timedelta, least: int = 1) -> list[datetime]:
    """Every span from the first to the last that is given, those between them too. With `least`, some before and behind
    as well: one bar as wide as the chart would tell nothing."""
    if not starts:
        return []
    first, last = min(starts), max(starts)
    count = int((last - first) / bucket) + 1
    before = max(0, least - count) // 2
    return [first + (nth - before) * bucket for nth in range(max(count, least))]
