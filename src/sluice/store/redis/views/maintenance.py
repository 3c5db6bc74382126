"""Periodic updates of the views in Redis, apart from frames.

Pending lists follow deliveries, due retries become pending, and pending deliveries without a
consumer are claimed. All updates go through the writer, in order with frames. After a start the
views are compared with the queues once: deliveries leased by the previous owner have no consumer
now, and views that a crash left incomplete in a Cluster are repaired.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sluice.store.changes import GroupSnapshot, MessagesRemoved, NoteDecoder
from sluice.store.redis.connection import RedisChannel, script_command
from sluice.store.redis.keys import (
    PartitionKeys,
    RedisKeys,
    entry_sequence,
    fence_key,
    retry_details_key,
    retry_schedule_key,
)
from sluice.store.redis.log import CommandJob, Job, PlanWriter, WriteJob, WritePlan
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.scripts import CLAIM_IDLE, MOVE_DUE_RETRIES, STAMP_UNIT
from sluice.store.redis.views.group_views import UNASSIGNED_CONSUMER, GroupViews

_GroupPartition = tuple[int, str]
_BATCH_SIZE = 500  # partitions whose views one script changes


class ViewMaintenance:
    """Runs in the loop's thread; `submit` passes a job to the writer."""

    def __init__(
        self,
        keys: RedisKeys,
        partition_keys: PartitionKeys,
        note_decoder: NoteDecoder,
        views: GroupViews,
        plan_writer: PlanWriter,
        options: RedisOptions,
        is_cluster: bool,
        submit: Callable[[Job], None],
    ) -> None:
        self._keys = keys
        self._partition_keys = partition_keys
        self._note_decoder = note_decoder
        self._views = views
        self._plan_writer = plan_writer
        self._options = options
        self._is_cluster = is_cluster  # in a Cluster each partition has its own fence
        self._stamp_unit = STAMP_UNIT if is_cluster else 1
        self._submit = submit
        self._pending_moves = 0
        # While polls are pending no new one starts: Redis is behind, and the next poll sees
        # everything.
        self._pending_polls = 0
        self._next_move_at = 0.0
        self._next_scan_at = 0.0

    def restore_views(self) -> None:
        """Repair the views after recovery, before the first frame."""
        plan = WritePlan()
        group_partitions: list[_GroupPartition] = []
        for snapshot in self._note_decoder.group_snapshots(True):
            self._restore_group(snapshot, plan)
            group_partitions.append((snapshot.pid, snapshot.group))
            if len(group_partitions) % _BATCH_SIZE == 0:
                self._submit_plan(plan)
                plan = WritePlan()
        self._submit_plan(plan)
        claim = partial(self._claim_idle, group_partitions, 0)
        self._submit(CommandJob(claim, self._on_initial_claim))
        compacted = self._note_decoder.compacted_messages() if self._is_cluster else {}
        for pid in compacted:
            self._views.ensure_named(pid)
        if compacted:  # on a single Redis a message replaces another one atomically
            self._submit(
                CommandJob(partial(self._find_stale_entries, compacted), self._remove_stale_entries)
            )

    def _restore_group(self, snapshot: GroupSnapshot, plan: WritePlan) -> None:
        views = self._views
        views.ensure_named(snapshot.pid)
        base = self._partition_keys.base_key(snapshot.pid)
        steps = plan.view_steps(base)
        views.create_group(steps, base, snapshot.pid, snapshot.group, snapshot.next_seq)
        views.trim_stream(snapshot.pid, plan)
        steps.add_command("UNLINK", retry_schedule_key(base, snapshot.group))
        steps.add_command("UNLINK", retry_details_key(base, snapshot.group))
        for retry in snapshot.scheduled_retries.values():
            views.schedule_retry(steps, base, retry)

    def _on_initial_claim(self, seqs_by_group: dict[_GroupPartition, list[int]]) -> None:
        self._views.is_reconciled = True
        self._adopt_pending(seqs_by_group)

    def _on_claimed(self, seqs_by_group: dict[_GroupPartition, list[int]]) -> None:
        self._pending_polls -= 1
        self._adopt_pending(seqs_by_group)

    def _remove_stale_entries(self, seqs_by_partition: dict[int, list[int]]) -> None:
        plan = WritePlan()
        for pid, seqs in seqs_by_partition.items():
            self._views.apply_removed(MessagesRemoved(pid, [(seq, 1) for seq in seqs]), plan)
        self._submit_plan(plan)

    def _adopt_pending(self, seqs_by_group: dict[_GroupPartition, list[int]]) -> None:
        plan = WritePlan()
        for group_partition, seqs in seqs_by_group.items():
            self._views.adopt_pending(group_partition, seqs, plan)
        self._submit_plan(plan)

    def poll(self, now: float) -> None:
        """Update the views; called every `poll_seconds` with `now` in seconds since 1970."""
        if not self._views.is_reconciled or self._pending_polls:
            return
        plan = WritePlan()
        for snapshot in self._note_decoder.group_snapshots(False):
            self._views.update_deliveries(snapshot, plan)
        self._views.flush_deferred(plan)
        if now >= self._next_scan_at:
            self._views.refresh_claims(plan)
        self._submit_plan(plan)
        if now >= self._next_scan_at:
            self._next_scan_at = now + self._options.pending_scan_seconds
            group_partitions = list(self._views.pending)
            claim = partial(
                self._claim_idle, group_partitions, int(self._options.claim_idle_seconds * 1000)
            )
            self._pending_polls += 1
            self._submit(CommandJob(claim, self._on_claimed))
        if now >= self._next_move_at and self._pending_moves == 0:
            self._next_move_at = now + self._options.mover_seconds
            self._move_due_retries(now)

    def _move_due_retries(self, now: float) -> None:
        for group_partition, seqs in self._views.scheduled_retries.items():
            if seqs:
                self._pending_moves += 1
                self._submit(
                    CommandJob(
                        partial(self._run_move, group_partition, int(now * 1000)),
                        partial(self._on_retries_moved, group_partition),
                    )
                )

    def _on_retries_moved(self, group_partition: _GroupPartition, seqs: list[int]) -> None:
        self._pending_moves -= 1
        self._views.mark_retries_pending(group_partition, seqs)

    def _submit_plan(self, plan: WritePlan) -> None:
        """Submit a plan in batches: a script blocks Redis, and views are independent."""
        bases = list(plan.views)
        for start in range(0, len(bases), _BATCH_SIZE):
            batch = WritePlan()
            batch.views = {base: plan.views[base] for base in bases[start : start + _BATCH_SIZE]}
            self._pending_polls += 1
            self._submit(
                WriteJob(self._plan_writer, partial(_return_plan, batch), self._on_written)
            )

    def _on_written(self) -> None:
        self._pending_polls -= 1

    # -- in the writer thread

    def _fence_key(self, base: str) -> str:
        return fence_key(base) if self._is_cluster else self._keys.fence

    def _run_move(
        self, group_partition: _GroupPartition, now: int, channel: RedisChannel, token: int
    ) -> list[int]:
        pid, group = group_partition
        base = self._partition_keys.base_key(pid)
        keys = [
            self._fence_key(base),
            base,
            retry_schedule_key(base, group),
            retry_details_key(base, group),
        ]
        arguments = (
            token,
            self._stamp_unit,
            now,
            self._options.mover_batch,
            group,
            UNASSIGNED_CONSUMER,
        )
        response = channel.execute([(base, script_command(MOVE_DUE_RETRIES, keys, *arguments))])[0]
        return [int(seq) for seq in response]

    def _find_stale_entries(
        self, compacted: dict[int, list[int]], channel: RedisChannel, token: int
    ) -> dict[int, list[int]]:
        """Find entries in streams of compacted queues that an interrupted write left behind.

        Compares with the messages at the time of the request: a message replaced later is removed
        with its own frame.
        """
        seqs_by_partition: dict[int, list[int]] = {}
        bases = [self._partition_keys.base_key(pid) for pid in compacted]
        lengths = channel.execute([(base, ["XLEN", base]) for base in bases])
        for (pid, expected), base, length in zip(compacted.items(), bases, lengths):
            start = "-" if int(length) > len(expected) else ""
            expected_seqs = set(expected) if start else set()
            while start:
                entries = channel.execute(
                    [(base, ["XRANGE", base, start, "+", "COUNT", _BATCH_SIZE])]
                )[0]
                seqs = [entry_sequence(entry) for entry, _ in entries]
                seqs_by_partition.setdefault(pid, []).extend(
                    seq for seq in seqs if seq not in expected_seqs
                )
                start = f"{seqs[-1] + 1}-0" if seqs else ""
        return seqs_by_partition

    def _claim_idle(
        self,
        group_partitions: list[_GroupPartition],
        idle_milliseconds: int,
        channel: RedisChannel,
        token: int,
    ) -> dict[_GroupPartition, list[int]]:
        """Claim deliveries that are pending for this long; by group, in batches."""
        seqs_by_group: dict[_GroupPartition, list[int]] = {}
        remaining: list[tuple[_GroupPartition, Any]] = [
            (group_partition, b"0-0") for group_partition in group_partitions
        ]
        while remaining:
            batch, remaining = (
                remaining[: self._options.claim_batch],
                remaining[self._options.claim_batch :],
            )
            commands = []
            for (pid, group), start in batch:
                base = self._partition_keys.base_key(pid)
                arguments = (
                    token,
                    self._stamp_unit,
                    group,
                    UNASSIGNED_CONSUMER,
                    idle_milliseconds,
                    start,
                    self._options.claim_batch,
                )
                commands.append(
                    (base, script_command(CLAIM_IDLE, [self._fence_key(base), base], *arguments))
                )
            for (group_partition, _), response in zip(batch, channel.execute(commands)):
                seqs_by_group.setdefault(group_partition, []).extend(
                    entry_sequence(entry) for entry in response[1]
                )
                if response[0] != b"0-0":
                    remaining.append((group_partition, response[0]))
        return seqs_by_group


def _return_plan(plan: WritePlan) -> WritePlan:
    """Return a plan that is already built."""
    return plan
