"""spark.readStream: Spark's checkpoint is the truth, and the broker's group follows it.

An instance on the driver plans: where to begin, how far the next batch goes, and its ranges.
Executors read the ranges (`range_reader`) from a copy of this object that was pickled once. The
state of this object only saves requests; a restart may lose all of it.

The group follows in two ways. `commit(end)` comes one batch late, while Spark plans the next one.
The `start` argument of `latestOffset` is the end of the last finished batch, also in the call that
ends a run of trigger(availableNow=True), so the cursor reaches the very end. The group never moves
beyond what Spark has written to its checkpoint.
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
from sluice.spark.errors import (
    OWN_GROUP_REMEDY,
    QUEUE_RECREATED,
    START_OVER_REMEDY,
    DataLost,
    InvalidOption,
    Refused,
)
from sluice.spark.http import BulkClient, QueueOffsets, average_row_bytes
from sluice.spark.source import planner
from sluice.spark.source.offsets import (
    ROW_BYTES,
    Incarnations,
    QueuePartition,
    Sequences,
    Task,
    batch_start,
    from_json,
    incarnations_in,
    limit_rows,
    make_batch_end,
    make_progress,
    plan_tasks,
    ranges_between,
    recreated_queues,
    shortened_queues,
    to_json,
    without_queues,
)
from sluice.spark.source.range_reader import read_task
from sluice.spark.source.source_options import EARLIEST, GROUP, LATEST, ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

WAIT_SECONDS: Final = 1  # for new rows; Spark cannot stop a query meanwhile
POLL_SECONDS: Final = 0.25  # between two polls of several queues


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions, columns: list[str]) -> None:
        self._options = options
        self._columns = columns
        # Of the planner; the copies on executors open their own.
        self._client: BulkClient | None = None
        self._initial_offset: dict[str, Any] | None = None
        self._has_begun_group = False  # the group knows the start of the first batch
        self._available_now_end: Sequences | None = None  # where a run with availableNow ends
        self._latest_offset: dict[str, Any] | None = None
        self._row_bytes: float = ROW_BYTES  # as of the last poll
        # The sequence, and the incarnation of its queue.
        self._settled: dict[QueuePartition, tuple[int, str]] = {}
        # The incarnation, and where the group begins in it.
        self._new_queue_starts: dict[str, tuple[str, dict[int, int]]] = {}
        self._waiting_since = 0.0  # since when there are too few rows for a batch

    # ---- called by Spark on the driver

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return where the first batch begins.

        Spark asks several times, and the answer must not move. This changes nothing in the group: a
        restart in the middle of the first batch asks too, and that batch has already begun.
        """
        if self._initial_offset is None:
            options, client = self._options, self._open_client()
            found = planner.find_offsets(client, options)
            start = EARLIEST
            if options.starting_time is not None:
                start = f"@{options.starting_time:.3f}"
            elif options.starting == LATEST:
                start = LATEST
            for seen in found.values():
                self._create_group(client, seen, start)
            # from here on all messages are stored for the group; before, they were not
            if options.group:
                found = {queue: planner.queue_offsets(client, queue) for queue in found}
            begin = planner.starting_sequences(client, options, found, OWN_GROUP_REMEDY)
            self._initial_offset = to_json(begin, planner.incarnations_of(found))
        return self._initial_offset

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._available_now_end = planner.latest_sequences(
            planner.find_offsets(self._open_client(), self._options)
        )

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return one limit for Spark, which passes it back. All our limits apply unless Spark
        passes another kind.
        """
        options = self._options
        if options.max_offsets:
            return ReadMaxRows(options.max_offsets)
        if options.max_bytes:
            return ReadMaxBytes(options.max_bytes)
        if options.min_offsets:
            return ReadMinRows(options.min_offsets)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return how far the next batch goes. Wait up to a second if there are no new rows."""
        begin, start_incarnations = from_json(start), incarnations_in(start)
        is_first = start == self._initial_offset
        if is_first:
            self._begin_group(begin, start_incarnations)
        else:
            self._settle(begin, start_incarnations)
        found = self._poll_offsets(begin, start_incarnations)
        known = self._without_recreated(begin, start_incarnations, found)
        begin = {**known, **self._new_partition_starts(known, found)}
        latest, current_incarnations = (
            planner.latest_sequences(found),
            planner.incarnations_of(found),
        )
        newest = latest
        self._row_bytes = average_row_bytes(found.values())
        self._check_offsets(begin, found)
        self._check_group(begin, found)
        if self._available_now_end is not None:
            latest = {
                place: min(end, self._available_now_end[place])
                for place, end in latest.items()
                if place in self._available_now_end
            }
        latest = {**begin, **latest}  # a deleted queue stays where it was
        if not isinstance(limit, ReadAllAvailable):
            latest = self._apply_limits(begin, latest, found)
        end = to_json(
            latest,
            {
                **start_incarnations,
                **{queue: one for queue, one in current_incarnations.items() if one},
            },
        )
        self._latest_offset = make_progress(newest, current_incarnations, latest)
        began = None
        # the checkpoint does not contain the start of this batch
        if is_first or begin != from_json(start):
            queues = {queue for queue, _ in known}
            which = {
                queue: (start_incarnations if queue in queues else current_incarnations).get(
                    queue, ""
                )
                for queue, _ in begin
            }
            began = to_json(begin, which)
        return dict(make_batch_end(end, start, began))

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return what `StreamingQueryProgress` shows as the latest offset of this source."""
        return self._latest_offset

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan the tasks of a batch.

        A restart may begin here, in the middle of a batch, after the group was deleted: create it
        again first.
        """
        options = self._options
        start = dict(batch_start(start, end))
        begin, ends = from_json(start), from_json(end)
        start_incarnations, end_incarnations = incarnations_in(start), incarnations_in(end)
        known = without_queues(
            begin,
            recreated_queues(start_incarnations, end_incarnations)
            | shortened_queues(begin, ends, start_incarnations, end_incarnations),
        )
        for (queue, part), first in known.items():
            if ends.get((queue, part), first) < first:
                self._report_loss(
                    f"partition {part} of queue {queue!r} is to be read from {first} on in a batch"
                    f" that Spark has written down as one up to {ends[queue, part]}",
                    START_OVER_REMEDY,
                )
        self._settle(begin, start_incarnations)
        ranges = ranges_between(known, ends, not options.fail_on_data_loss, end_incarnations)
        return plan_tasks(ranges, options.min_partitions, self._row_bytes)

    def commit(self, end: dict[str, Any]) -> None:
        self._settle(from_json(end), incarnations_in(end))

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    # ---- called by Spark on the executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        options = self._options
        return read_task(
            options.where,
            self._columns,
            partition,
            options.group,
            allow_loss=not options.fail_on_data_loss,
            remedy=OWN_GROUP_REMEDY if options.group else "",
        )

    # ---- offsets of the queues

    def _open_client(self) -> BulkClient:
        if self._client is None:
            self._client = BulkClient(self._options.where)
        return self._client

    def _poll_offsets(
        self, begin: Sequences, incarnations: Incarnations
    ) -> dict[str, QueueOffsets]:
        """Return the offsets of the queues, after a wait if they are no further than `begin`."""
        client = self._open_client()
        until = time.monotonic() + WAIT_SECONDS
        while True:
            found = self._find_offsets(client, begin)
            known = without_queues(
                begin, recreated_queues(incarnations, planner.incarnations_of(found))
            )
            if self._available_now_end is not None or self._has_enough_rows(known, found):
                return found
            if len(found) == 1 and self._options.queues:
                [(queue, seen)] = found.items()
                if client.can_wait(seen.latest()):
                    return {queue: client.offsets(queue, seen.latest(), WAIT_SECONDS)}
            if time.monotonic() >= until:
                return found
            time.sleep(POLL_SECONDS)

    def _find_offsets(self, client: BulkClient, begin: Sequences) -> dict[str, QueueOffsets]:
        """Return the offsets of the subscribed queues.

        A queue that is only in the checkpoint stays where it was: it is no longer subscribed to, or
        was deleted.
        """
        options = self._options
        wanted = planner.select_queues(client, options)
        known = {queue for queue, _ in begin}
        found = {}
        for queue in wanted:
            try:
                found[queue] = planner.queue_offsets(client, queue)
            except InvalidOption:
                if queue not in known:
                    raise
                self._report_loss(f"queue {queue!r} is not there any more")
        for queue in sorted(known.difference(wanted)):
            # A listing may be older than the queue, or lack it for a moment.
            if options.matches(queue):
                try:
                    found[queue] = planner.queue_offsets(client, queue)
                except InvalidOption:
                    self._report_loss(f"queue {queue!r} is not there any more")
        for queue in sorted(found.keys() - known):
            found[queue] = self._start_new_queue(client, found[queue])
        return found

    def _without_recreated(
        self, begin: Sequences, incarnations: Incarnations, found: dict[str, QueueOffsets]
    ) -> Sequences:
        """Return `begin` without the queues that were deleted and created again: sequences of the
        old queue would skip messages of the new one.
        """
        recreated = recreated_queues(incarnations, planner.incarnations_of(found))
        for queue in sorted(recreated):
            self._report_loss(
                f"queue {queue!r} was deleted and made again: Spark has read the one that was"
                f" {incarnations[queue]!r}, and there is {found[queue].incarnation!r}",
                START_OVER_REMEDY,
            )
            found[queue] = self._start_new_queue(self._open_client(), found[queue])
        return without_queues(begin, recreated)

    def _new_partition_starts(self, known: Sequences, found: dict[str, QueueOffsets]) -> Sequences:
        """Return where the group begins in partitions that are not in the checkpoint.

        In an added partition of a known queue that is its beginning; in a new queue, its earliest
        sequence at the time when the group was created. Losses after that are reported.
        """
        if not self._options.group:
            return {}
        queues = {queue for queue, _ in known}
        added = {
            place: 0
            for place in planner.latest_sequences(found)
            if place[0] in queues and place not in known
        }
        for queue in found.keys() - queues:
            _, starts = self._new_queue_starts[queue]
            added |= {
                (queue, one.partition): starts.get(one.partition, 0)
                for one in found[queue].partitions
            }
        return {
            place: seq
            for place, seq in added.items()
            if self._available_now_end is None or place in self._available_now_end
        }

    def _has_enough_rows(self, begin: Sequences, found: dict[str, QueueOffsets]) -> bool:
        """Return whether there are enough rows for a batch, or the oldest of them has waited long
        enough.
        """
        waiting = sum(
            max(0, end - begin.get(place, 0))
            for place, end in planner.latest_sequences(found).items()
        )
        if not waiting:
            self._waiting_since = 0.0
            return False
        if waiting >= self._options.min_offsets:
            return True
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        return now - self._waiting_since >= self._options.max_delay

    def _check_offsets(self, begin: Sequences, found: dict[str, QueueOffsets]) -> None:
        """Check that the messages after the checkpoint's offsets are still stored.

        This runs before Spark writes a batch to the checkpoint that could never be read.
        """
        for queue, seen in found.items():
            for one in seen.partitions:
                start = begin.get((queue, one.partition))
                if start is None:
                    continue
                if start > one.latest:
                    self._report_loss(
                        f"partition {one.partition} of queue {queue!r} goes up to {one.latest}, and"
                        f" Spark has read up to {start}: the queue was deleted and made again, or"
                        " its broker's data are others",
                        START_OVER_REMEDY,
                    )
            if not self._options.group:
                self._check_stored(
                    seen, {part: seq for (one, part), seq in begin.items() if one == queue}
                )

    def _check_stored(self, seen: QueueOffsets, begin: dict[int, int]) -> None:
        if seen.compacted:
            return  # a replaced value is no loss
        for one in seen.partitions:
            if begin.get(one.partition, one.earliest) < one.earliest:
                self._report_loss(
                    f"partition {one.partition} of queue {seen.queue!r} is kept from {one.earliest}"
                    f" on, and Spark has read up to {begin[one.partition]} only"
                )

    def _check_group(self, begin: Sequences, found: dict[str, QueueOffsets]) -> None:
        """Check for lost messages in the group before the next batch reads them.

        The broker knows what the group has lost, and which messages were never for it. If it does
        not answer, the tasks detect a loss.
        """
        if not self._options.group:
            return
        for queue, seen in found.items():
            latest = seen.latest()
            starts = {
                part: seq
                for (one, part), seq in begin.items()
                if one == queue and seq < latest.get(part, 0)
            }
            if starts:
                try:
                    progress = self._open_client().set_progress(
                        queue, self._options.group, starts, incarnation=seen.incarnation
                    )
                except SluiceError as fault:
                    log.warning(
                        "cannot check group %s of %s for lost messages: %s",
                        self._options.group,
                        queue,
                        fault,
                    )
                else:
                    self._report_lost_ranges(
                        queue,
                        {part: progress.lost[part] for part in starts if part in progress.lost},
                    )

    def _report_lost_ranges(self, queue: str, lost: dict[int, int]) -> None:
        options = self._options
        planner.report_lost_ranges(
            queue, options.group, lost, not options.fail_on_data_loss, OWN_GROUP_REMEDY
        )

    def _report_loss(self, what: str, do: str = "") -> None:
        planner.report_loss(what, not self._options.fail_on_data_loss, do)

    def _apply_limits(
        self, begin: Sequences, latest: Sequences, found: dict[str, QueueOffsets]
    ) -> Sequences:
        options = self._options
        earliest = planner.earliest_sequences(found)
        first = {place: max(begin.get(place, 0), earliest.get(place, 0)) for place in latest}
        first = {place: start if start <= latest[place] else 0 for place, start in first.items()}
        waiting = sum(latest[place] - start for place, start in first.items())
        if (
            self._available_now_end is None
            and options.min_offsets
            and not self._has_enough_rows(begin, found)
        ):
            return begin
        self._waiting_since = 0.0
        max_rows = options.max_offsets or waiting
        if options.max_bytes:
            max_rows = min(
                max_rows,
                max(1, int(options.max_bytes / max(average_row_bytes(found.values()), 1.0))),
            )
        return limit_rows(first, latest, max_rows)

    # ---- the group

    def _create_group(self, client: BulkClient, seen: QueueOffsets, start: str = EARLIEST) -> None:
        """Create the group, so that messages are stored for it from now on.

        The broker refuses while other consumers use the group. Queues that appear later are read
        from their beginning; the start options apply to the first start only.
        """
        options = self._options
        if not options.group:
            return
        try:
            client.set_progress(
                seen.queue,
                options.group,
                {},
                create=True,
                start=start,
                incarnation=seen.incarnation,
            )
        except Refused as refusal:
            if refusal.code == QUEUE_RECREATED:
                raise DataLost(refusal.what, START_OVER_REMEDY) from None
            raise InvalidOption(
                f"option group is {options.group!r}: {refusal.what}", refusal.remedy
            ) from None

    def _start_new_queue(self, client: BulkClient, seen: QueueOffsets) -> QueueOffsets:
        """Create the group in a queue that appeared or was created again, and return its offsets.

        The stream reads such a queue from the earliest sequence that is stored when the group
        exists.
        """
        queue, group = seen.queue, self._options.group
        if not group or (
            queue in self._new_queue_starts and self._new_queue_starts[queue][0] == seen.incarnation
        ):
            return seen
        self._create_group(client, seen)
        # Lost by a batch that Spark did not write to its checkpoint.
        self._report_lost_ranges(queue, client.group_progress(queue, group).lost)
        seen = planner.queue_offsets(client, queue)
        client.set_progress(queue, group, seen.earliest(), incarnation=seen.incarnation, begin=True)
        self._new_queue_starts[queue] = seen.incarnation, seen.earliest()
        return seen

    def _begin_group(self, begin: Sequences, incarnations: Incarnations) -> None:
        """Set the group to where Spark begins, so that all messages from there on are stored for
        it.

        This runs once: it resets the lost ranges of the group.
        """
        options = self._options
        if self._has_begun_group or not options.group:
            return
        client = self._open_client()
        for queue in sorted({queue for queue, _ in begin}):
            starts = {part: seq for (one, part), seq in begin.items() if one == queue}
            if options.starting == GROUP and options.starting_time is None:
                self._report_lost_ranges(queue, client.group_progress(queue, options.group).lost)
            else:
                self._check_stored(planner.queue_offsets(client, queue), starts)
            client.set_progress(
                queue, options.group, starts, incarnation=incarnations.get(queue, ""), begin=True
            )
        self._has_begun_group = True

    def _settle(self, sequences: Sequences, incarnations: Incarnations) -> None:
        """Settle for the group what Spark has finished.

        A failure is logged, and the next call repeats the request: a written batch must not fail
        because of a cursor.
        """
        group = self._options.group
        if not group:
            return
        for queue in sorted({queue for queue, _ in sequences if self._options.matches(queue)}):
            ends = {part: seq for (one, part), seq in sequences.items() if one == queue}
            incarnation = incarnations.get(queue, "")
            if all(
                self._settled.get((queue, part)) == (seq, incarnation) for part, seq in ends.items()
            ):
                continue
            try:
                self._advance(queue, ends, incarnation)
            except DataLost:
                raise
            except SluiceError as fault:
                log.warning("cannot advance group %s of %s yet: %s", group, queue, fault)
            else:
                self._settled.update(
                    {(queue, part): (seq, incarnation) for part, seq in ends.items()}
                )

    def _advance(self, queue: str, ends: dict[int, int], incarnation: str) -> None:
        """Advance the group, and create it if it does not exist.

        While the group did not exist, messages that Spark has not read may have been removed.
        """
        client, group = self._open_client(), self._options.group
        try:
            client.advance(queue, group, ends, incarnation=incarnation)
        except Refused as refusal:
            if refusal.code != "unknown_group":
                raise
            self._check_stored(client.offsets(queue), ends)
            client.advance(queue, group, ends, create=True, incarnation=incarnation)
