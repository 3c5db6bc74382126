"""Read ranges of partitions as record batches, on an executor.

The module has no state: the same range gives the same rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from sluice.http_client import Endpoint
from sluice.spark.errors import (
    QUEUE_RECREATED,
    START_OVER_REMEDY,
    UNKNOWN_QUEUE,
    BrokerGone,
    DataLost,
    Refused,
    StreamCut,
)
from sluice.spark.http import BulkClient
from sluice.spark.runtime import freeze_imports
from sluice.spark.source.columns import PARTITION, SEQUENCE, schema_of
from sluice.spark.source.offsets import Range, Task

log = logging.getLogger(__name__)

TAIL_ROWS: Final = 128
CONSTANTS: Final = frozenset({"queue", PARTITION, "attempt"})  # equal in all rows of a partition
COUNTED_BATCH_ROWS: Final = 1 << 16
# For each row the broker searches all partitions of the request.
MAX_RANGES_PER_REQUEST: Final = 16


def read_task(
    where: Endpoint,
    columns: list[str],
    task: Task,
    group: str = "",
    allow_loss: bool = False,
    remedy: str = "",
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task.

    `allow_loss`: a queue that was deleted after planning, and perhaps created again, has no rows,
    and that is no error. `remedy`: what to do about removed rows, for the error.
    """
    freeze_imports()
    with BulkClient(where) as client:
        read = count_ranges if CONSTANTS.issuperset(columns) else read_ranges
        for ranges in group_ranges(task.ranges):
            yield from read(client, columns, ranges, group, allow_loss, remedy)


def group_ranges(ranges: Sequence[Range]) -> list[list[Range]]:
    """Group ranges that one request reads: of one queue, of different partitions, equally lenient.

    The broker then scans its log once for all of them; separate requests would touch each page
    several times.
    """
    found: list[list[Range]] = []
    for one in ranges:
        last = found[-1] if found else []
        if (
            last
            and len(last) < MAX_RANGES_PER_REQUEST
            and (last[0].queue, last[0].lenient, last[0].incarnation)
            == (one.queue, one.lenient, one.incarnation)
            and all(other.partition != one.partition for other in last)
        ):
            last.append(one)
        else:
            found.append([one])
    return found


def read_ranges(
    client: BulkClient,
    columns: list[str],
    ranges: Sequence[Range],
    group: str = "",
    allow_loss: bool = False,
    remedy: str = "",
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ranges that one request reads; those of each range in order.

    A response that is cut short (the broker restarted) is resumed after the last rows received. So
    the request always includes partition and sequence, and this function drops them if the caller
    did not ask for them.
    """
    queue, lenient, incarnation = ranges[0].queue, ranges[0].lenient, ranges[0].incarnation
    requested = [*columns, *(name for name in (PARTITION, SEQUENCE) if name not in columns)]
    remaining = {one.partition: (one.start, one.end) for one in ranges}
    cut_at: float | None = None  # the first cut since rows arrived
    while remaining:
        try:
            for batch in client.rows(
                queue, remaining.copy(), requested, lenient, group, incarnation
            ):
                for partition, last in _last_sequences(batch, len(remaining)).items():
                    end = remaining[partition][1]
                    if last + 1 < end:
                        remaining[partition] = (last + 1, end)
                    else:
                        del remaining[partition]
                cut_at = None
                yield batch if len(requested) == len(columns) else batch.select(columns)
            return
        except StreamCut as cut:
            cut_at = cut_at or time.monotonic()
            if time.monotonic() - cut_at > client.where.retry_seconds:
                raise BrokerGone(client.where.url, client.where.retry_seconds, cut.what) from None
            time.sleep(0.2)
        except Refused as refusal:
            _check_refusal(refusal, queue, remaining, allow_loss, remedy)
            return


def count_ranges(
    client: BulkClient,
    columns: list[str],
    ranges: Sequence[Range],
    group: str = "",
    allow_loss: bool = False,
    remedy: str = "",
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ranges if all rows of a partition are equal in these columns.

    The broker then only counts; no message is read or sent.
    """
    queue, lenient, incarnation = ranges[0].queue, ranges[0].lenient, ranges[0].incarnation
    ends = {one.partition: (one.start, one.end) for one in ranges}
    try:
        counts = client.count(queue, ends, lenient, group, incarnation)
    except Refused as refusal:
        _check_refusal(refusal, queue, ends, allow_loss, remedy)
        return
    for partition, rows in counts.items():
        of_row = {"queue": queue, PARTITION: partition, "attempt": 1}
        schema = to_arrow_schema(schema_of(columns))
        most = min(rows, COUNTED_BATCH_ROWS)
        arrays = [pa.repeat(pa.scalar(of_row[one.name], one.type), most) for one in schema]
        whole = pa.RecordBatch.from_arrays(arrays, schema=schema)
        for done in range(0, rows, COUNTED_BATCH_ROWS):
            yield whole.slice(0, min(rows - done, COUNTED_BATCH_ROWS))


def _check_refusal(
    refusal: Refused,
    queue: str,
    ranges: Mapping[int, tuple[int, int]],
    allow_loss: bool,
    remedy: str,
) -> None:
    """Raise for a refused read, unless the queue is gone and the user allows that."""
    if refusal.code == "out_of_range":
        ranges_text = ", ".join(
            f"{start} to {end} of partition {number}" for number, (start, end) in ranges.items()
        )
        raise DataLost(
            f"rows {ranges_text} of queue {queue!r} cannot be read whole: {refusal.what}", remedy
        ) from None
    if refusal.code not in (QUEUE_RECREATED, UNKNOWN_QUEUE):
        raise refusal
    if not allow_loss:
        raise DataLost(refusal.what, START_OVER_REMEDY) from None
    log.warning("%s; skipping the rows of the old queue", refusal.what)


def _last_sequences(batch: pa.RecordBatch, partition_count: int) -> dict[int, int]:
    """Return the last sequence of each partition in `batch`.

    Partitions are interleaved, so the last rows nearly always suffice; the search starts at the
    end. Arrow's group_by would load another library, which the garbage collector of a worker would
    traverse after every task.
    """
    partition, sequence = batch.column(PARTITION), batch.column(SEQUENCE)
    found: dict[int, int] = {}
    end = batch.num_rows
    while end and len(found) < partition_count:
        start = max(0, end - TAIL_ROWS)
        some = (column.slice(start, end - start).to_pylist() for column in (partition, sequence))
        found = {**dict(zip(*some)), **found}
        end = start
    return found
