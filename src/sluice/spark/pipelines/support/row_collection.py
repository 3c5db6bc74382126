"""Collect the rows of a DataFrame on the driver, in chunks and ordered by position.

A chunk is bounded by its bytes: neither row counts nor sizes of compressed files predict them, and
beyond `spark.driver.maxResultSize` Spark fails the job. So the bytes are summed first, and chunks
are cut between two sequences. The same rows are always cut in the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

MAX_COLLECT_BYTES: Final = 128 << 20  # held by Java and by Python
SPAN_SEQUENCES: Final = 1000  # summed together
ROW_BYTES: Final = 200  # besides payload, key and headers
# The position of a row; `home` is its queue.
POSITION_COLUMNS: Final = (
    "home",
    "partition",
    "sequence",
)
_HEADERS: Final = (
    "aggregate(map_entries(headers), 0L,"
    " (sum, one) -> sum + octet_length(one.key) + coalesce(octet_length(one.value), 0))"
)


@dataclass(frozen=True)
class SequenceSpan:
    """Consecutive sequences of one partition, `last` included, and the bytes of their rows."""

    queue: str
    partition: int
    first: int
    last: int
    bytes: int


def collect_in_order(rows: DataFrame, *tie_breakers: str) -> Iterator[pa.Table]:
    """Yield all rows ordered by position; `tie_breakers` order rows of equal position."""
    order = (*POSITION_COLUMNS, *tie_breakers)
    parts = group_spans(_measured_spans(rows), MAX_COLLECT_BYTES)
    if len(parts) <= 1:
        yield rows.orderBy(*order).toArrow()
        return
    for part in parts:
        yield rows.where(_is_within(part)).orderBy(*order).toArrow()


def group_spans(spans: Sequence[SequenceSpan], max_bytes: int) -> list[list[SequenceSpan]]:
    """Group consecutive spans into chunks of at most `max_bytes`."""
    found: list[list[SequenceSpan]] = []
    weight = 0
    for span in spans:
        if not found or weight + span.bytes > max_bytes:
            found.append([])
            weight = 0
        found[-1].append(span)
        weight += span.bytes
    return found


def _measured_spans(rows: DataFrame) -> list[SequenceSpan]:
    spans: list[SequenceSpan] = []
    for span in _measure_spans(rows, SPAN_SEQUENCES):
        spans += (
            _measure_spans(rows.where(_is_within([span])), 1)
            if span.bytes > MAX_COLLECT_BYTES
            else [span]
        )
    return spans


def _measure_spans(rows: DataFrame, width: int) -> list[SequenceSpan]:
    size = f.lit(ROW_BYTES)
    for name in ("value", "key"):
        size = size + f.coalesce(f.octet_length(name), f.lit(0))
    if "headers" in rows.columns:
        size = size + f.coalesce(f.expr(_HEADERS), f.lit(0))
    first = f.expr(f"sequence - pmod(sequence, {width}L)")
    found = rows.groupBy("home", "partition", first.alias("first")).agg(f.sum(size).alias("bytes"))
    return [
        SequenceSpan(queue, partition, start, start + width - 1, weight)
        for queue, partition, start, weight in found.orderBy("home", "partition", "first").collect()
    ]


def _is_within(part: Sequence[SequenceSpan]) -> Column:
    """Return the condition that a row is in one of these consecutive spans.

    It is one comparison for any number of spans: Spark traverses expressions recursively. The
    condition on `home` alone lets Spark skip files.
    """
    first, last = part[0], part[-1]
    position = f.struct(*POSITION_COLUMNS)
    return (
        f.col("home").between(first.queue, last.queue)
        & (position >= _position(first.queue, first.partition, first.first))
        & (position <= _position(last.queue, last.partition, last.last))
    )


def _position(queue: str, partition: int, sequence: int) -> Column:
    """Return a position with the same types as those of rows, so that Spark can compare them."""
    values = (f.lit(queue), f.lit(partition).cast("int"), f.lit(sequence).cast("bigint"))
    return f.struct(*(value.alias(name) for name, value in zip(POSITION_COLUMNS, values)))
