"""Ranges of partitions as record batches, on an executor. It keeps nothing: the same range gives the same rows."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import cache

import pyarrow as pa
from pyspark import TaskContext

from sluice.spark.columns import SEQUENCE
from sluice.spark.door import Door, Where
from sluice.spark.faults import BrokerGone, DataLost, Refused, StreamCut
from sluice.spark.offsets import Range, Task


def read_task(where: Where, names: list[str], task: Task, group: str = "") -> Iterator[pa.RecordBatch]:
    """Spark's Python worker looks through its whole heap for garbage after every task: 20 to 30 ms for all that was
    imported, more than a short range takes to read. What is there by now is there to stay, and is left out of it."""
    if TaskContext.get() is not None:
        _freeze_once()
    with Door(where) as door:
        for part in task.ranges:
            yield from read_range(door, names, part, group)


@cache
def _freeze_once() -> None:
    gc.freeze()


def read_range(door: Door, names: list[str], part: Range, group: str = "") -> Iterator[pa.RecordBatch]:
    """The rows of a range, in order. An answer that is cut short (the broker was restarted) is taken up again behind
    the last row that arrived, so the sequence always comes along, and is dropped here if nobody wants it."""
    asked = names if SEQUENCE in names else [*names, SEQUENCE]
    at = part.start
    cut_at: float | None = None  # the first time since something arrived
    while at < part.end:
        try:
            for batch in door.rows(part.queue, part.partition, at, part.end, asked, part.lenient, group):
                at = batch.column(SEQUENCE)[-1].as_py() + 1
                cut_at = None
                yield batch if asked is names else batch.select(names)
            return
        except StreamCut as cut:
            cut_at = cut_at or time.monotonic()
            if time.monotonic() - cut_at > door.where.retry_seconds:
                raise BrokerGone(door.where.url, door.where.retry_seconds, cut.what) from None
            time.sleep(0.2)
        except Refused as refusal:
            if refusal.code == "out_of_range":
                raise DataLost(
                    f"rows {at} to {part.end} of partition {part.partition} of queue {part.queue!r} cannot be read"
                    f" whole: {refusal.what}"
                ) from None
            raise
