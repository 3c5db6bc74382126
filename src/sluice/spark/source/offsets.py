"""Offsets of a stream and the ranges between them: pure functions on sequences, no I/O, no clock.

Spark stores an offset in its checkpoint as JSON and compares it as text, so equal offsets must have
equal text:

    {"v": 1, "queues": {"tasks/image": {"0": 120, "1": 95}},  next sequence per partition, sorted
     "incarnations": {"tasks/image": "7-1893456000123"},      the incarnations of the queues
     "began": {...}}                                          where the batch that ends here began

Sequences mean nothing in a queue that was deleted and created again, which has another incarnation.
Checkpoints of older versions have no incarnations, and get them with the next batch.

A batch begins where the previous one ended, which is in the checkpoint. Two starts are not: Spark
does not store the start of the first batch, and asks for it again after a crash, when the latest
and earliest offsets and the cursor of the group may have moved; and a new queue or partition is in
no previous batch. In these cases the end of the batch stores its start (`began`).

A batch is the range between two offsets. Planned again after a crash, the same two offsets give the
same ranges, and so the same rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from math import ceil
from typing import Any, Final

from pyspark.sql.datasource import InputPartition

from sluice.spark.errors import InvalidOption

VERSION: Final = 1
BEGAN: Final = "began"
TASK_ROWS: Final = 2000  # one task reads these as fast as several would
TASK_BYTES: Final = 1 << 30  # upper bound for a task, about: some five seconds of work
ROW_BYTES: Final = 1024  # before the first measurement
QueuePartition = tuple[str, int]  # queue and partition
Sequences = dict[QueuePartition, int]
Incarnations = dict[str, str]  # by queue; missing or empty: unknown


def to_json(
    sequences: Mapping[QueuePartition, int], incarnations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the offset as Spark stores it."""
    queues: dict[str, dict[str, int]] = {}
    for (queue, partition), sequence in sorted(sequences.items()):
        queues.setdefault(queue, {})[str(partition)] = sequence
    offset: dict[str, Any] = {"v": VERSION, "queues": queues}
    known = {
        queue: incarnations[queue] for queue in queues if incarnations and incarnations.get(queue)
    }
    return {**offset, "incarnations": known} if known else offset


def make_progress(
    latest: Mapping[QueuePartition, int],
    incarnations: Mapping[str, str],
    end: Mapping[QueuePartition, int],
) -> dict[str, Any]:
    """Return the latest offset, with how many messages lie between `end` and it.

    Spark shows it to users as the latest offset of the source; it has no other place for metrics of
    a Python source.
    """
    behind: dict[str, dict[str, int]] = {}
    for (queue, partition), sequence in sorted(latest.items()):
        behind.setdefault(queue, {})[str(partition)] = max(
            0, sequence - end.get((queue, partition), 0)
        )
    total = sum(sum(parts.values()) for parts in behind.values())
    return {**to_json(latest, incarnations), "behind": behind, "rowsBehind": total}


def from_json(offset: Mapping[str, Any]) -> Sequences:
    try:
        if offset["v"] != VERSION:
            raise ValueError
        return {
            (queue, int(partition)): int(sequence)
            for queue, parts in offset["queues"].items()
            for partition, sequence in parts.items()
        }
    except (KeyError, ValueError, AttributeError, TypeError):
        raise InvalidOption(
            f"the checkpoint holds an offset that is not ours: {str(offset)[:200]}",
            "Give each query a checkpointLocation of its own; one of another source cannot be used",
        ) from None


def incarnations_in(offset: Mapping[str, Any]) -> Incarnations:
    return {queue: str(one) for queue, one in offset.get("incarnations", {}).items()}


def make_batch_end(
    end: dict[str, Any], start: Mapping[str, Any], began: dict[str, Any] | None
) -> Mapping[str, Any]:
    """Return the end of a batch for Spark, with `began` if its start is not in the checkpoint.

    An end that is no further than `start` must be the same text, or Spark would plan a batch for
    it.
    """
    if end == {name: part for name, part in start.items() if name != BEGAN}:
        return start
    return end if began is None else {**end, BEGAN: began}


def batch_start(start: Mapping[str, Any], end: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return where the batch that ends at `end` begins: `start`, unless `end` stores another start.

    A source without new rows keeps its previous end.
    """
    began: Mapping[str, Any] = start if start == end else end.get(BEGAN, start)
    return began


def recreated_queues(known: Mapping[str, str], current: Mapping[str, str]) -> set[str]:
    """Return the queues whose incarnation has changed."""
    return {
        queue
        for queue, one in known.items()
        if one and current.get(queue) and current[queue] != one
    }


def shortened_queues(
    start: Mapping[QueuePartition, int],
    end: Mapping[QueuePartition, int],
    known: Mapping[str, str],
    current: Mapping[str, str],
) -> set[str]:
    """Return queues of unknown incarnation that end before they start: they were recreated."""
    return {
        queue
        for (queue, part), first in start.items()
        if not (known.get(queue) and current.get(queue)) and end.get((queue, part), first) < first
    }


def without_queues(sequences: Mapping[QueuePartition, int], queues: set[str]) -> Sequences:
    return {(queue, part): seq for (queue, part), seq in sequences.items() if queue not in queues}


@dataclass(frozen=True)
class Range:
    """A part of a partition. `lenient`: messages that are no longer stored are no loss."""

    queue: str
    partition: int
    start: int
    end: int
    lenient: bool = False
    incarnation: str = ""  # of the queue; empty if not known


def ranges_between(
    start: Mapping[QueuePartition, int],
    end: Mapping[QueuePartition, int],
    lenient: bool,
    incarnations: Mapping[str, str] | None = None,
) -> list[Range]:
    """Return the ranges between two offsets.

    A partition that `start` does not contain is new, and read from its beginning; removed messages
    in it are no loss. A partition that ends before it starts has no range.
    """
    found = []
    for place, last in sorted(end.items()):
        first = start.get(place)
        one = (incarnations or {}).get(place[0], "")
        if first is None:
            found.append(Range(*place, 0, last, True, one))
        else:
            found.append(Range(*place, first, last, lenient, one))
    return [one for one in found if one.start < one.end]


def split_ranges(ranges: list[Range], min_count: int) -> list[Range]:
    """Cut the longer ranges until there are about `min_count`, in proportion to their length, so
    that no core is idle while there are fewer partitions than cores.
    """
    total = sum(one.end - one.start for one in ranges)
    if len(ranges) >= min_count or not total:
        return ranges
    found = []
    for one in ranges:
        length = one.end - one.start
        pieces = min(length, max(1, round(min_count * length / total)))
        cuts = [one.start + length * nth // pieces for nth in range(pieces + 1)]
        found += [replace(one, start=first, end=last) for first, last in pairwise(cuts)]
    return found


@dataclass(frozen=True)
class Task(InputPartition):
    """The ranges that one task reads, one after the other."""

    ranges: tuple[Range, ...]


def plan_tasks(ranges: list[Range], min_tasks: int, row_bytes: float = ROW_BYTES) -> list[Task]:
    """Return ranges as tasks.

    A partition is never cut, so that a task reads the messages of a key in order, unless the user
    wants more tasks than there are partitions (`min_tasks`).

    A task costs Spark some 25 ms independent of its size, and an additional range nearly nothing.
    So there is one task per core of this machine, and more only if tasks would exceed TASK_BYTES:
    then a multiple of the cores. A driver does not know its executors; for a cluster `min_tasks`
    says how many tasks to plan.
    """
    if min_tasks > len(ranges):
        return [Task((one,)) for one in split_ranges(ranges, min_tasks)]
    rows = sum(one.end - one.start for one in ranges)
    cores = usable_cores()
    # An empty queue has no bytes.
    rounds = max(1, ceil(rows * row_bytes / (TASK_BYTES * cores)))
    count = max(min_tasks, min(len(ranges), rounds * cores, ceil(rows / TASK_ROWS)))
    return [Task(tuple(some)) for some in distribute_ranges(ranges, count)]


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def distribute_ranges(ranges: list[Range], count: int) -> list[list[Range]]:
    """Assign each range, longest first, to the share with the fewest rows, so that shares are about
    equal.
    """
    shares: list[list[Range]] = [[] for _ in range(count)]
    heap = [(0, nth) for nth in range(count)]
    for one in sorted(ranges, key=lambda part: part.start - part.end):
        rows, nth = heappop(heap)
        shares[nth].append(one)
        heappush(heap, (rows + one.end - one.start, nth))
    return [
        sorted(share, key=lambda part: (part.queue, part.partition, part.start)) for share in shares
    ]


def limit_rows(
    start: Mapping[QueuePartition, int], latest: Mapping[QueuePartition, int], max_rows: int
) -> Sequences:
    """Return the ends of a batch of at most `max_rows` rows.

    Each partition gets a share in proportion to its backlog, and at least one row if it has any, so
    that no partition is skipped forever.
    """
    waiting = {place: max(0, end - start.get(place, 0)) for place, end in latest.items()}
    total = sum(waiting.values())
    if total <= max_rows:
        return dict(latest)
    return {
        place: start.get(place, 0) + min(count, max(1, max_rows * count // total))
        if count
        else latest[place]
        for place, count in waiting.items()
    }
