"""Where a stream stands and what it reads next: pure functions on sequences, no I/O and no clock.

Spark keeps an offset in its checkpoint as JSON and compares it as text, so equal offsets must be written alike:

    {"v": 1, "queues": {"tasks/image": {"0": 120, "1": 95}},      the next sequence of each partition, sorted
     "incarnations": {"tasks/image": "7-1893456000123"},          which queue of that name they are of
     "began": {...}}                                              the offset at which the batch that ends here began

Sequences mean nothing in a queue that was deleted and made again, which has another incarnation. Checkpoints of before
have none, and get them with their next batch.

A batch begins where the one before it has ended, which is in the checkpoint. Of the first one Spark writes no beginning
down, and asks for it again after a crash, when the latest, the earliest and the place of a group are others; and of a
queue or a partition that is new, no batch before tells. So there its end says where it began.

A batch is the range from one offset to the next. Planned again after a crash, the same two offsets give the same
ranges, and so the same rows.
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
TASK_ROWS: Final = 2000  # what one task reads as fast as several would
TASK_BYTES: Final = 1 << 30  # what a task reads at most, about: some five seconds of work
ROW_BYTES: Final = 1024  # where nobody has looked yet
QueuePartition = tuple[str, int]  # queue and partition
Sequences = dict[QueuePartition, int]
Incarnations = dict[str, str]  # by queue; one that is not in it, or empty, is not known


def to_json(
    sequences: Mapping[QueuePartition, int], incarnations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """As Spark keeps it."""
    queues: dict[str, dict[str, int]] = {}
    for (queue, partition), sequence in sorted(sequences.items()):
        queues.setdefault(queue, {})[str(partition)] = sequence
    offset: dict[str, Any] = {"v": VERSION, "queues": queues}
    known = {
        queue: incarnations[queue] for queue in queues if incarnations and incarnations.get(queue)
    }
    return {**offset, "incarnations": known} if known else offset


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
    """The end of a batch as Spark is given it; with `began` it says where. One that is no further than `start` is the
    same text as that, or Spark would make a batch of it."""
    if end == {name: part for name, part in start.items() if name != BEGAN}:
        return start
    return end if began is None else {**end, BEGAN: began}


def batch_start(start: Mapping[str, Any], end: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the batch begins that ends there: `start`, unless its end knows better. A source without news keeps the end
    that it had."""
    began: Mapping[str, Any] = start if start == end else end.get(BEGAN, start)
    return began


def recreated_queues(known: Mapping[str, str], current: Mapping[str, str]) -> set[str]:
    """The queues that are not the ones they were."""
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
    """The queues that end before they start, and of which nobody knows which ones they were: they must be others."""
    return {
        queue
        for (queue, part), first in start.items()
        if not (known.get(queue) and current.get(queue)) and end.get((queue, part), first) < first
    }


def without_queues(sequences: Mapping[QueuePartition, int], queues: set[str]) -> Sequences:
    return {(queue, part): seq for (queue, part), seq in sequences.items() if queue not in queues}


@dataclass(frozen=True)
class Range:
    """A part of a partition. `lenient`: what is not kept any more is left out, and no loss."""

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
    """What lies between two offsets.

    A partition that `start` does not know is new, and read from its beginning on: what is gone there was never to be
    read. One that ends before it starts has nothing in between."""
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
    """Cut the longer ranges until there are about `least`, in proportion to their length: fewer partitions than
    cores is no reason for cores to be idle."""
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
    """What one task reads, one range after the other."""

    ranges: tuple[Range, ...]


def plan_tasks(ranges: list[Range], min_tasks: int, row_bytes: float = ROW_BYTES) -> list[Task]:
    """Ranges as tasks. A partition is never cut, so that a task has whatever it has of a key in order, unless the user
    wants more tasks than there are partitions (`least`).

    A task costs Spark some 25 ms, whatever it reads, and a range beside another one nearly nothing. So there are as
    many as this machine has cores, and more only where they would read very much each: then whole rounds of the cores.
    A driver knows nothing of its executors; for a cluster `least` says how many there are."""
    if min_tasks > len(ranges):
        return [Task((one,)) for one in split_ranges(ranges, min_tasks)]
    rows = sum(one.end - one.start for one in ranges)
    cores = usable_cores()
    rounds = max(
        1, ceil(rows * row_bytes / (TASK_BYTES * cores))
    )  # a queue that keeps nothing has no bytes
    count = max(min_tasks, min(len(ranges), rounds * cores, ceil(rows / TASK_ROWS)))
    return [Task(tuple(some)) for some in distribute_ranges(ranges, count)]


def usable_cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def distribute_ranges(ranges: list[Range], count: int) -> list[list[Range]]:
    """The longest first, each to whoever has least to read: the shares come out about alike."""
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
    """How far to go if only `most` rows may be read: every partition gets its share of them, by how much waits in it,
    and each that has something gets on by one at least, so that none is left behind for good."""
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
