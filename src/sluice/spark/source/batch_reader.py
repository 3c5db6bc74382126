"""spark.read: the messages of queues between two offsets, as a DataFrame. It settles nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from sluice.spark.errors import READ_REMAINING_REMEDY, Refused
from sluice.spark.http import BulkClient, average_row_bytes
from sluice.spark.source import planner
from sluice.spark.source.offsets import Task, plan_tasks, ranges_between
from sluice.spark.source.range_reader import read_task
from sluice.spark.source.source_options import EARLIEST, ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa


class BatchReader(DataSourceReader):
    """Plans on the driver and reads on the executors; holds plain values and no connection.

    It accepts no filters (`pushFilters`): Spark keeps the plan of a `load()` for every query on it,
    so that a filter of one query would remove rows from the others.
    """

    def __init__(self, options: ReadOptions, columns: list[str]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with BulkClient(options.where) as client:
            found = planner.find_offsets(client, options)
            first = planner.starting_sequences(client, options, found)
            last = planner.ending_sequences(client, options, found)
        # "earliest" means all messages that are stored; consumers may settle some of them while
        # this plans.
        is_lenient = options.starting == EARLIEST and options.starting_time is None
        ranges = ranges_between(
            first, last, is_lenient or not options.fail_on_data_loss, planner.incarnations_of(found)
        )
        return plan_tasks(ranges, options.min_partitions, average_row_bytes(found.values()))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Task):
            return iter(())  # Spark passes another object if there are no partitions
        return self._read(partition)

    def _read(self, task: Task) -> Iterator[pa.RecordBatch]:
        options = self._options
        for queue, ranges in groupby(task.ranges, lambda one: one.queue):
            yield from read_task(
                options.where,
                self._columns,
                Task(tuple(ranges)),
                self._existing_group(queue),
                allow_loss=not options.fail_on_data_loss,
                remedy=READ_REMAINING_REMEDY,
            )

    def _existing_group(self, queue: str) -> str:
        """Return the group to read for, or "" if the queue does not have it yet."""
        group = self._options.group
        if group:
            with BulkClient(self._options.where) as client:
                try:
                    client.progress(queue, group)
                except Refused as refusal:
                    if refusal.code != "unknown_group":
                        raise
                    return ""
        return group
