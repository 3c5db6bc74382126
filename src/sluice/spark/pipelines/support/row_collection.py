"""Rows of a DataFrame on the driver, some at a time and in the order of their places.

What is collected in one go is bounded by its bytes: neither rows nor the sizes of compressed files say how much comes,
and beyond `spark.driver.maxResultSize` Spark fails the job. So the rows are weighed first, and cut between two
sequences. The same rows are cut in the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

AT_ONCE: Final = 128 << 20  # bytes; Java and Python hold them, and what becomes of them
WIDTH: Final = 1000  # sequences that are weighed together
ROW_BYTES: Final = 200  # of what is not payload, key or header
PLACE: Final = ("home", "partition", "sequence")  # the columns that say where a row lies: `home` is a queue
_HEADERS: Final = (
    "aggregate(map_entries(headers), 0L,"
    " (sum, one) -> sum + octet_length(one.key) + coalesce(octet_length(one.value), 0))"
)


@dataclass(frozen=True)
class Span:
    """Sequences of one partition, the last included, and what their rows weigh."""

    home: str
    partition: int
    first: int
    last: int
    bytes: int


def brought(rows: DataFrame, *ties: str) -> Iterator[pa.Table]:
    """All rows, in the order of their places; `ties` decide between those that have the same."""
    order = (*PLACE, *ties)
    parts = bundles(_weighed(rows), AT_ONCE)
    if len(parts) <= 1:
        yield rows.orderBy(*order).toArrow()
        return
    for part in parts:
        yield rows.where(_within(part)).orderBy(*order).toArrow()


def bundles(spans: Sequence[Span], most: int) -> list[list[Span]]:
    """Spans in their order, as many together as weigh no more than `most`."""
    found: list[list[Span]] = []
    weight = 0
    for span in spans:
        if not found or weight + span.bytes > most:
            found.append([])
            weight = 0
        found[-1].append(span)
        weight += span.bytes
    return found


def _weighed(rows: DataFrame) -> list[Span]:
    spans: list[Span] = []
    for span in _spans(rows, WIDTH):
        spans += _spans(rows.where(_within([span])), 1) if span.bytes > AT_ONCE else [span]
    return spans


def _spans(rows: DataFrame, width: int) -> list[Span]:
    size = f.lit(ROW_BYTES)
    for name in ("value", "key"):
        size = size + f.coalesce(f.octet_length(name), f.lit(0))
    if "headers" in rows.columns:
        size = size + f.coalesce(f.expr(_HEADERS), f.lit(0))
    first = f.expr(f"sequence - pmod(sequence, {width}L)")
    found = rows.groupBy("home", "partition", first.alias("first")).agg(f.sum(size).alias("bytes"))
    return [
        Span(home, partition, start, start + width - 1, weight)
        for home, partition, start, weight in found.orderBy("home", "partition", "first").collect()
    ]


def _within(part: Sequence[Span]) -> Column:
    """Whether a row is in one of these, which are neighbours in the order. However many they are, it is one comparison:
    Spark goes through an expression by recursion. By `home` alone, files that have none of them are left out."""
    first, last = part[0], part[-1]
    place = f.struct(*PLACE)
    return (
        f.col("home").between(first.home, last.home)
        & (place >= _place(first.home, first.partition, first.first))
        & (place <= _place(last.home, last.partition, last.last))
    )


def _place(home: str, partition: int, sequence: int) -> Column:
    """As Spark compares it with those of rows: of the same types."""
    values = (f.lit(home), f.lit(partition).cast("int"), f.lit(sequence).cast("bigint"))
    return f.struct(*(value.alias(name) for name, value in zip(PLACE, values)))
