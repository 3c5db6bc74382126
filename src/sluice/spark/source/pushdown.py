"""Turn filters of a query into bounds of what is fetched: queue, partition, sequence, timestamp.

Bounds may be wide, because Spark applies the filters again, but must never exclude a row that a
filter accepts. So a timestamp is a lower bound only: the API returns the first message of a time,
and older ones may follow it if the broker's clock was set back between two starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from sluice.spark.source.offsets import Range


@dataclass(frozen=True)
class Bounds:
    """Bounds that rows must satisfy. None: no bound."""

    queues: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    first: int | None = None  # sequence
    last: int | None = None
    since: float | None = None  # seconds since 1970

    @staticmethod
    def from_filters(filters: Iterable[Filter]) -> Bounds:
        """Combine all filters: each narrows the bounds further."""
        bounds = Bounds()
        for one in filters:
            bounds = bounds._narrowed(one)
        return bounds

    def _narrowed(self, one: Filter) -> Bounds:
        if isinstance(one, EqualTo | EqualNullSafe | In):
            values = list(one.value) if isinstance(one, In) else [one.value]
            return self._limit_to_values(
                one.attribute, [value for value in values if value is not None]
            )
        if isinstance(one, GreaterThan | GreaterThanOrEqual):
            return self._limit_from(
                one.attribute, one.value, 1 if isinstance(one, GreaterThan) else 0
            )
        if isinstance(one, LessThan | LessThanOrEqual):
            return self._limit_to(one.attribute, one.value, 1 if isinstance(one, LessThan) else 0)
        return self

    def _limit_to_values(self, column: tuple[str, ...], values: list[Any]) -> Bounds:
        if column == ("queue",):
            found = frozenset(values)
            return replace(self, queues=found if self.queues is None else found & self.queues)
        if column == ("partition",):
            numbers = frozenset(values)
            return replace(
                self, partitions=numbers if self.partitions is None else numbers & self.partitions
            )
        if not values:
            return self
        return self._limit_from(column, min(values), 0)._limit_to(column, max(values), 0)

    def _limit_from(self, column: tuple[str, ...], value: Any, more: int) -> Bounds:
        if column == ("sequence",):
            return replace(self, first=max(value + more, self.first or 0))
        seconds = _seconds(value) if column == ("timestamp",) else None
        if seconds is not None:
            return replace(self, since=max(seconds, self.since or 0.0))
        return self

    def _limit_to(self, column: tuple[str, ...], value: Any, less: int) -> Bounds:
        if column == ("sequence",):
            last = value - less
            return replace(self, last=last if self.last is None else min(last, self.last))
        return self

    def matches_queue(self, queue: str) -> bool:
        return self.queues is None or queue in self.queues

    def narrow(self, part: Range) -> list[Range]:
        """Return the range within the bounds, or an empty list."""
        if self.partitions is not None and part.partition not in self.partitions:
            return []
        start = part.start if self.first is None else max(part.start, self.first)
        end = part.end if self.last is None else min(part.end, self.last + 1)
        return [replace(part, start=start, end=end)] if start < end else []


def _seconds(value: Any) -> float | None:
    """Return a time from Spark as seconds; None if it has no time zone."""
    if isinstance(value, datetime):
        return value.timestamp() if value.tzinfo is not None else None
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp() - 86_400.0
    return None
