"""spark.readStream: Spark's checkpoint is the truth, and the broker's group follows it.

An instance on the driver plans: where to begin, how far the next batch goes, which ranges that is. Ranges are read
elsewhere (`rows`), from a copy of this object that was pickled once. What this object remembers is only good for
fewer questions; a restart may lose all of it.

The group is told in two ways. `commit(end)` comes one batch late, while the next one is planned; and the `start` that
`latestOffset` is given is the end of the last batch that Spark has finished, also in the call that ends a run of
trigger(availableNow=True). So the cursor reaches the very end. It goes by what Spark has written down, never before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from sluice.errors import SluiceError
from sluice.spark.source import planner
from sluice.spark.http.bulk_client import Door, QueueOffsets, row_bytes
from sluice.spark.errors import ANEW, MADE_AGAIN, OWN_GROUP, DataLost, InvalidOption, Refused
from sluice.spark.source.offsets import (
    ROW_BYTES,
    Incarnations,
    Place,
    Sequences,
    Task,
    admit,
    beginning,
    ended,
    from_json,
    incarnations_in,
    made_again,
    made_shorter,
    ranges_between,
    tasks_for,
    to_json,
    without,
)
from sluice.spark.source.source_options import EARLIEST, GROUP, LATEST, ReadOptions
from sluice.spark.source.range_reader import read_task

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

WAIT_SECONDS: Final = 1  # for news: Spark asks again at once, and cannot stop a query meanwhile
LOOK_SECONDS: Final = 0.25  # between two looks at several queues


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions, names: list[str]) -> None:
        self._options = options
        self._names = names
        self._door: Door | None = None  # of the planner; the copies that read open their own
        self._initial: dict[str, Any] | None = None
        self._has_begun = False  # the group was told of a first batch
        self._target: Sequences | None = None  # where a run with availableNow ends
        self._latest: dict[str, Any] | None = None
        self._row_bytes: float = ROW_BYTES  # by the last look
        self._settled: dict[Place, tuple[int, str]] = {}  # the sequence, and the incarnation of its queue
        self._late: dict[
            str, tuple[str, dict[int, int]]
        ] = {}  # the incarnation, and where the group begins in it
        self._idle_since = 0.0  # since when too little waits for a batch

    # ---- what Spark asks the planner

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 Spark's name, as those below
        """Asked more than once for the first batch, and must not move meanwhile. It changes nothing: a restart in the
        middle of the first batch asks too, and that batch has begun already."""
        if self._initial is None:
            options, door = self._options, self._open()
            found = planner.look(door, options)
            start = EARLIEST
            if options.starting_time is not None:
                start = f"@{options.starting_time:.3f}"
            elif options.starting == LATEST:
                start = LATEST
            for seen in found.values():
                self._join(door, seen, start)
            if options.group:  # from here on all is kept for it; what has gone before was not
                found = {queue: planner.offsets_of(door, queue) for queue in found}
            begin = planner.starting(door, options, found, OWN_GROUP)
            self._initial = to_json(begin, planner.incarnations_of(found))
        return self._initial

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = planner.latest_of(planner.look(self._open(), self._options))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Spark wants one limit, and hands it back; all of ours apply unless it hands back another kind."""
        options = self._options
        if options.max_offsets:
            return ReadMaxRows(options.max_offsets)
        if options.max_bytes:
            return ReadMaxBytes(options.max_bytes)
        if options.min_offsets:
            return ReadMinRows(options.min_offsets)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next batch goes. Waits a second for news if there are none."""
        begin, then = from_json(start), incarnations_in(start)
        is_first = start == self._initial
        if is_first:
            self._begin(begin, then)
        else:
            self._settle(begin, then)
        found = self._look(begin, then)
        known = self._begun(begin, then, found)
        begin = {**known, **self._added(known, found)}
        latest, now = planner.latest_of(found), planner.incarnations_of(found)
        self._latest = to_json(latest, now)
        self._row_bytes = row_bytes(found.values())
        self._check(begin, found)
        self._check_group(begin, found)
        if self._target is not None:
            latest = {
                place: min(end, self._target[place]) for place, end in latest.items() if place in self._target
            }
        latest = {**begin, **latest}  # a queue that is gone stays where it was
        if not isinstance(limit, ReadAllAvailable):
            latest = self._limited(begin, latest, found)
        end = to_json(latest, {**then, **{queue: one for queue, one in now.items() if one}})
        began = None
        if is_first or begin != from_json(start):  # nothing in the checkpoint says where it begins
            queues = {queue for queue, _ in known}
            which = {queue: (then if queue in queues else now).get(queue, "") for queue, _ in begin}
            began = to_json(begin, which)
        return dict(ended(end, start, began))

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """A restart may begin here, in the middle of a batch, and find that its group is gone: it comes back first."""
        options = self._options
        start = dict(beginning(start, end))
        begin, ends = from_json(start), from_json(end)
        then, now = incarnations_in(start), incarnations_in(end)
        known = without(begin, made_again(then, now) | made_shorter(begin, ends, then, now))
        for (queue, part), first in known.items():
            if ends.get((queue, part), first) < first:
                self._lost(
                    f"partition {part} of queue {queue!r} is to be read from {first} on in a batch that Spark has"
                    f" written down as one up to {ends[queue, part]}",
                    ANEW,
                )
        self._settle(begin, then)
        ranges = ranges_between(known, ends, not options.fail_on_data_loss, now)
        return tasks_for(ranges, options.min_partitions, self._row_bytes)

    def commit(self, end: dict[str, Any]) -> None:
        self._settle(from_json(end), incarnations_in(end))

    def stop(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    # ---- what the executors do

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        options = self._options
        return read_task(
            options.where,
            self._names,
            partition,
            options.group,
            may_lose=not options.fail_on_data_loss,
            cure=OWN_GROUP if options.group else "",
        )

    # ---- looking

    def _open(self) -> Door:
        if self._door is None:
            self._door = Door(self._options.where)
        return self._door

    def _look(self, begin: Sequences, then: Incarnations) -> dict[str, QueueOffsets]:
        """How far the queues go, after a while if that is no further than `begin`."""
        door = self._open()
        until = time.monotonic() + WAIT_SECONDS
        while True:
            found = self._look_once(door, begin)
            known = without(begin, made_again(then, planner.incarnations_of(found)))
            if self._target is not None or self._has_news(known, found):
                return found
            if len(found) == 1 and self._options.queues:
                [(queue, seen)] = found.items()
                if door.can_wait(seen.latest()):
                    return {queue: door.offsets(queue, seen.latest(), WAIT_SECONDS)}
            if time.monotonic() >= until:
                return found
            time.sleep(LOOK_SECONDS)

    def _look_once(self, door: Door, begin: Sequences) -> dict[str, QueueOffsets]:
        """The queues that are wanted now. Those that only the checkpoint knows stay where they were: they are not
        subscribed to any more, or gone."""
        options = self._options
        wanted = planner.chosen_queues(door, options)
        known = {queue for queue, _ in begin}
        found = {}
        for queue in wanted:
            try:
                found[queue] = planner.offsets_of(door, queue)
            except InvalidOption:
                if queue not in known:
                    raise
                self._lost(f"queue {queue!r} is not there any more")
        for queue in sorted(known.difference(wanted)):
            if options.takes(queue):  # a list may be older than a queue, or without it for a moment
                try:
                    found[queue] = planner.offsets_of(door, queue)
                except InvalidOption:
                    self._lost(f"queue {queue!r} is not there any more")
        for queue in sorted(found.keys() - known):
            found[queue] = self._come_late(door, found[queue])
        return found

    def _begun(self, begin: Sequences, then: Incarnations, found: dict[str, QueueOffsets]) -> Sequences:
        """`begin` without the queues that were deleted and made again: sequences of the old one would skip what is in
        the new one, however long it is."""
        others = made_again(then, planner.incarnations_of(found))
        for queue in sorted(others):
            self._lost(
                f"queue {queue!r} was deleted and made again: Spark has read the one that was {then[queue]!r}, and"
                f" there is {found[queue].incarnation!r}",
                ANEW,
            )
            found[queue] = self._come_late(self._open(), found[queue])
        return without(begin, others)

    def _added(self, known: Sequences, found: dict[str, QueueOffsets]) -> Sequences:
        """Where the group begins in what Spark has not heard of yet: in a partition that was added at its beginning, in
        a queue that came later at what it had when the group was there. What is lost behind that is told."""
        if not self._options.group:
            return {}
        queues = {queue for queue, _ in known}
        added = {place: 0 for place in planner.latest_of(found) if place[0] in queues and place not in known}
        for queue in found.keys() - queues:
            _, starts = self._late[queue]
            added |= {(queue, one.partition): starts.get(one.partition, 0) for one in found[queue].partitions}
        return {place: seq for place, seq in added.items() if self._target is None or place in self._target}

    def _has_news(self, begin: Sequences, found: dict[str, QueueOffsets]) -> bool:
        """Whether it is worth a batch."""
        waiting = sum(max(0, end - begin.get(place, 0)) for place, end in planner.latest_of(found).items())
        if not waiting:
            self._idle_since = 0.0
            return False
        if waiting >= self._options.min_offsets:
            return True
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        return now - self._idle_since >= self._options.max_delay

    def _check(self, begin: Sequences, found: dict[str, QueueOffsets]) -> None:
        """Whether what the checkpoint names is still there: told now, before a batch is written down that nobody could
        ever read."""
        for queue, seen in found.items():
            for one in seen.partitions:
                start = begin.get((queue, one.partition))
                if start is None:
                    continue
                if start > one.latest:
                    self._lost(
                        f"partition {one.partition} of queue {queue!r} goes up to {one.latest}, and Spark has read"
                        f" up to {start}: the queue was deleted and made again, or its broker's data are others",
                        ANEW,
                    )
            if not self._options.group:
                self._check_kept(seen, {part: seq for (one, part), seq in begin.items() if one == queue})

    def _check_kept(self, seen: QueueOffsets, begin: dict[int, int]) -> None:
        if seen.compacted:
            return  # what was replaced is no loss
        for one in seen.partitions:
            if begin.get(one.partition, one.earliest) < one.earliest:
                self._lost(
                    f"partition {one.partition} of queue {seen.queue!r} is kept from {one.earliest} on, and Spark has"
                    f" read up to {begin[one.partition]} only"
                )

    def _check_group(self, begin: Sequences, found: dict[str, QueueOffsets]) -> None:
        """The same for what is to be read next in the group: the broker knows what it has lost, and what was never for
        it. Without an answer the tasks find out."""
        if not self._options.group:
            return
        for queue, seen in found.items():
            latest = seen.latest()
            starts = {
                part: seq for (one, part), seq in begin.items() if one == queue and seq < latest.get(part, 0)
            }
            if starts:
                try:
                    told = self._open().tell(queue, self._options.group, starts, incarnation=seen.incarnation)
                except SluiceError as fault:
                    log.warning(
                        "what group %s of %s has lost is not known: %s", self._options.group, queue, fault
                    )
                else:
                    self._tell_lost(queue, {part: told.lost[part] for part in starts if part in told.lost})

    def _tell_lost(self, queue: str, lost: dict[int, int]) -> None:
        options = self._options
        planner.tell_lost(queue, options.group, lost, not options.fail_on_data_loss, OWN_GROUP)

    def _lost(self, what: str, do: str = "") -> None:
        planner.lose(what, not self._options.fail_on_data_loss, do)

    def _limited(self, begin: Sequences, latest: Sequences, found: dict[str, QueueOffsets]) -> Sequences:
        options = self._options
        earliest = planner.earliest_of(found)
        first = {place: max(begin.get(place, 0), earliest.get(place, 0)) for place in latest}
        first = {place: start if start <= latest[place] else 0 for place, start in first.items()}
        waiting = sum(latest[place] - start for place, start in first.items())
        if self._target is None and options.min_offsets and not self._has_news(begin, found):
            return begin
        self._idle_since = 0.0
        most = options.max_offsets or waiting
        if options.max_bytes:
            most = min(most, max(1, int(options.max_bytes / max(row_bytes(found.values()), 1.0))))
        return admit(first, latest, most)

    # ---- the group

    def _join(self, door: Door, seen: QueueOffsets, start: str = EARLIEST) -> None:
        """Make the group, so that messages are kept for it from now on; refused while others consume in it. Queues that
        come later are read from their beginning, whatever the options say of the first start."""
        options = self._options
        if not options.group:
            return
        try:
            door.tell(seen.queue, options.group, {}, create=True, start=start, incarnation=seen.incarnation)
        except Refused as refusal:
            if refusal.code == MADE_AGAIN:
                raise DataLost(refusal.what, ANEW) from None
            raise InvalidOption(f"option group is {options.group!r}: {refusal.what}", refusal.do) from None

    def _come_late(self, door: Door, seen: QueueOffsets) -> QueueOffsets:
        """A queue that appears, or was made again, is read from its beginning: from what there is once the group is
        there. How far it goes then."""
        queue, group = seen.queue, self._options.group
        if not group or (queue in self._late and self._late[queue][0] == seen.incarnation):
            return seen
        self._join(door, seen)
        self._tell_lost(queue, door.standing(queue, group).lost)  # by a batch that was not written down
        seen = planner.offsets_of(door, queue)
        door.tell(queue, group, seen.earliest(), incarnation=seen.incarnation, begin=True)
        self._late[queue] = seen.incarnation, seen.earliest()
        return seen

    def _begin(self, begin: Sequences, then: Incarnations) -> None:
        """Let the group be where Spark begins, so that all from there on is kept for it. Once: it makes the group
        forget what was lost before."""
        options = self._options
        if self._has_begun or not options.group:
            return
        door = self._open()
        for queue in sorted({queue for queue, _ in begin}):
            starts = {part: seq for (one, part), seq in begin.items() if one == queue}
            if options.starting == GROUP and options.starting_time is None:
                self._tell_lost(queue, door.standing(queue, options.group).lost)
            else:
                self._check_kept(planner.offsets_of(door, queue), starts)
            door.tell(queue, options.group, starts, incarnation=then.get(queue, ""), begin=True)
        self._has_begun = True

    def _settle(self, done: Sequences, then: Incarnations) -> None:
        """Let the group be done with what Spark is done with. Should that fail, the next call says it again: a batch
        that is written must not fail because of a cursor."""
        group = self._options.group
        if not group:
            return
        for queue in sorted({queue for queue, _ in done if self._options.takes(queue)}):
            ends = {part: seq for (one, part), seq in done.items() if one == queue}
            which = then.get(queue, "")
            if all(self._settled.get((queue, part)) == (seq, which) for part, seq in ends.items()):
                continue
            try:
                self._advance(queue, ends, which)
            except DataLost:
                raise
            except SluiceError as fault:
                log.warning("the group %s of %s does not follow yet: %s", group, queue, fault)
            else:
                self._settled.update({(queue, part): (seq, which) for part, seq in ends.items()})

    def _advance(self, queue: str, ends: dict[int, int], which: str) -> None:
        """A group that is gone, or new to this checkpoint, was not there to keep what Spark has not read yet."""
        door, group = self._open(), self._options.group
        try:
            door.advance(queue, group, ends, incarnation=which)
        except Refused as refusal:
            if refusal.code != "unknown_group":
                raise
            self._check_kept(door.offsets(queue), ends)
            door.advance(queue, group, ends, create=True, incarnation=which)
