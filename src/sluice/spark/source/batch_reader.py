"""spark.read: a queue as it is now, from one offset to another, as a DataFrame. Nothing is settled by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from sluice.spark.source import planner
from sluice.spark.http.bulk_client import Door, row_bytes
from sluice.spark.errors import LEFT, Refused
from sluice.spark.source.offsets import Sequences, Task, ranges_between, tasks_for
from sluice.spark.source.source_options import EARLIEST, ReadOptions
from sluice.spark.source.pushdown import Bounds
from sluice.spark.source.range_reader import read_task

if TYPE_CHECKING:
    import pyarrow as pa


class BatchReader(DataSourceReader):
    """Planned on the driver, read on the executors; it holds plain values and no connection."""

    def __init__(self, options: ReadOptions, names: list[str]) -> None:
        self._options = options
        self._names = names
        self._bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with Door(options.where) as door:
            found = planner.look(door, options)
            first = self._wanted(planner.starting(door, options, found))
            last = self._wanted(planner.ending(door, options, found))
            found = {queue: seen for queue, seen in found.items() if self._bounds.takes_queue(queue)}
            if self._bounds.since is not None:
                first = _later(first, planner.at_time(door, found, self._bounds.since))
        # Who asks for the earliest asks for what there is, and consumers settle more of it while this is planned.
        whatever = options.starting == EARLIEST and options.starting_time is None
        ranges = ranges_between(
            first, last, whatever or not options.fail_on_data_loss, planner.incarnations_of(found)
        )
        ranges = [one for part in ranges for one in self._bounds.narrow(part)]
        return tasks_for(ranges, options.min_partitions, row_bytes(found.values()))

    def _wanted(self, sequences: Sequences) -> Sequences:
        """Offsets are those of all queues that the options name, whatever a filter leaves of them."""
        return {place: seq for place, seq in sequences.items() if self._bounds.takes_queue(place[0])}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Task):
            return iter(())  # how Spark says that there are no partitions
        return self._read(partition)

    def _read(self, task: Task) -> Iterator[pa.RecordBatch]:
        options = self._options
        for queue, ranges in groupby(task.ranges, lambda one: one.queue):
            yield from read_task(
                options.where,
                self._names,
                Task(tuple(ranges)),
                self._group_in(queue),
                may_lose=not options.fail_on_data_loss,
                cure=LEFT,
            )

    def _group_in(self, queue: str) -> str:
        """The group that is read for; none in a queue in which it is not there yet."""
        group = self._options.group
        if group:
            with Door(self._options.where) as door:
                try:
                    door.progress(queue, group)
                except Refused as refusal:
                    if refusal.code != "unknown_group":
                        raise
                    return ""
        return group


class NarrowingReader(BatchReader):
    """One that takes filters. A class of its own, because Spark refuses a reader that could take them while its
    setting is off; and only if asked for, because Spark keeps the last plan of a `load()` for every query on it, so
    that one with a filter spoils the others (docs/spark.md, traps)."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 Spark's name
        """Filters narrow what is fetched; Spark still applies every one, so that a bound need not be sharp."""
        self._bounds = Bounds.of(filters)
        return filters


def _later(one: Sequences, other: Sequences) -> Sequences:
    return {place: max(sequence, other.get(place, 0)) for place, sequence in one.items()}
