"""The views of a frame in Redis: groups, pending deliveries, retries, counters, queue names.

All views are derived from the log and written with the frame that changes them. This object knows
the pending lists, so that a settlement sends no more than necessary: a message that was delivered
and settled between two polls was never in a pending list and need not be removed. Counters and
trimming of streams can be half a second late; they are collected and sent with the next poll,
because at a high rate they are most of the work.
"""

from __future__ import annotations

import json

from sluice.store.changes import (
    Change,
    GroupDeleted,
    GroupPositioned,
    GroupSnapshot,
    MessagesRemoved,
    MessagesSettled,
    NoteDecoder,
    QueueCreated,
    QueueDeleted,
    RetryRescheduled,
    RetryScheduled,
)
from sluice.store.redis.connection import Argument
from sluice.store.redis.keys import (
    PartitionKeys,
    RedisKeys,
    counters_key,
    entry_id,
    fence_key,
    retry_details_key,
    retry_schedule_key,
    rewritten_key,
)
from sluice.store.redis.log import ScriptSteps, WritePlan

UNASSIGNED_CONSUMER = "sluice"  # consumer of pending deliveries that no client holds

_GroupPartition = tuple[int, str]  # pid and group


class GroupViews:
    """`has_entries_read`: Redis 7.0 and later store the entries read, and compute a group's lag."""

    def __init__(
        self,
        keys: RedisKeys,
        partition_keys: PartitionKeys,
        note_decoder: NoteDecoder,
        claim_batch: int,
        has_entries_read: bool,
        max_length: int = 0,
    ) -> None:
        self._keys = keys
        self._partition_keys = partition_keys
        self._note_decoder = note_decoder
        self._claim_batch = claim_batch
        self._has_entries_read = has_entries_read
        self._max_length = max_length
        self.pending: dict[_GroupPartition, dict[int, str]] = {}  # consumers, as stored in Redis
        self.scheduled_retries: dict[_GroupPartition, set[int]] = {}  # as stored in Redis
        # Until the first comparison after a start, the pending lists in Redis are unknown.
        self.is_reconciled = False
        self._next_seqs: dict[_GroupPartition, int] = {}
        self._groups_by_partition: dict[int, set[str]] = {}
        self._reported_deliveries: dict[_GroupPartition, int] = {}
        self._trimmed_to: dict[int, int] = {}
        self._trim_targets: dict[int, int] = {}  # first live message by partition
        self._unsent_counts: dict[int, dict[str, int]] = {}

    # ---- frames

    def apply_notes(self, notes: list[bytes], plan: WritePlan) -> list[int]:
        """Add the changes in a frame's notes to its plan; return the deleted partitions."""
        deleted_pids: list[int] = []
        touched: set[int] = set()
        for change in self._note_decoder.decode_changes(notes):
            if isinstance(change, MessagesSettled):
                self._apply_settled(change, plan)
                touched.add(change.pid)
            elif isinstance(change, RetryRescheduled):
                base = self._base_key(change.pid)
                self.schedule_retry(plan.view_steps(base), base, change)
            elif isinstance(change, RetryScheduled):
                self._apply_retry(change, plan)
            elif isinstance(change, QueueDeleted):
                deleted_pids += change.pids
                self._apply_queue_deleted(change, plan)
            else:
                touched.update(self._apply_other(change, plan))
        for pid in deleted_pids:
            self._trim_targets.pop(pid, None)
        for pid in touched.difference(deleted_pids):
            # As of this frame: a message settled in the next frame must exist until that is
            # committed.
            self._trim_targets[pid] = self._note_decoder.first_live_seq(pid)
            if self._max_length:  # the length is a guarantee, so the stream is trimmed at once
                self.trim_stream(pid, plan)
        return deleted_pids

    def add_count(self, pid: int, counter: str, amount: int) -> None:
        counts = self._unsent_counts.get(pid)
        if counts is None:
            counts = self._unsent_counts[pid] = {}
        counts[counter] = counts.get(counter, 0) + amount

    def flush_deferred(self, plan: WritePlan) -> None:
        """Add the changes that frames left for the next poll."""
        for pid, counts in self._unsent_counts.items():
            base = self._base_key(pid)
            steps = plan.view_steps(base)
            for counter, amount in counts.items():
                steps.add_command("HINCRBY", counters_key(base), counter, amount)
        self._unsent_counts.clear()
        for pid, first in self._trim_targets.items():
            if first > self._trimmed_to.get(pid, 0):
                self._trimmed_to[pid] = first
                base = self._base_key(pid)
                plan.view_steps(base).add_command("XTRIM", base, "MINID", f"{first}-0")
        self._trim_targets.clear()

    def ensure_named(self, pid: int) -> None:
        if not self._partition_keys.has_name(pid):
            self._partition_keys.assign_name(pid, self._note_decoder.locate_partition(pid))

    def _base_key(self, pid: int) -> str:
        self.ensure_named(pid)
        return self._partition_keys.base_key(pid)

    def _apply_settled(self, change: MessagesSettled, plan: WritePlan) -> None:
        group_partition = (change.pid, change.group)
        pending = self.pending.get(group_partition)
        retries = self.scheduled_retries.get(group_partition)
        count = 0
        acked: list[Argument] = []
        ended_retries: list[Argument] = []
        for first, size in change.ranges:
            count += size
            if not self.is_reconciled or pending or retries:
                for seq in range(first, first + size):
                    was_waiting = retries is not None and seq in retries
                    if (
                        not self.is_reconciled
                        or was_waiting
                        or (pending is not None and seq in pending)
                    ):
                        acked.append(entry_id(seq))
                        if pending is not None:
                            pending.pop(seq, None)
                    if retries is not None and was_waiting:
                        retries.discard(seq)
                        ended_retries.append(seq)
        self.add_count(change.pid, change.outcome, count)
        if acked:
            base = self._base_key(change.pid)
            steps = plan.view_steps(base)
            steps.add_batched_command("XACK", base, [change.group], acked)
            self._remove_retries(steps, base, change.group, ended_retries)

    def _remove_retries(
        self, steps: ScriptSteps, base: str, group: str, seqs: list[Argument]
    ) -> None:
        steps.add_batched_command("ZREM", retry_schedule_key(base, group), [], seqs)
        steps.add_batched_command("HDEL", retry_details_key(base, group), [], seqs)

    def _apply_retry(self, change: RetryScheduled, plan: WritePlan) -> None:
        """Acknowledge the delivery and schedule its retry in one step."""
        group_partition = (change.pid, change.group)
        base = self._base_key(change.pid)
        steps = plan.view_steps(base)
        self.pending.get(group_partition, {}).pop(change.seq, None)
        steps.add_command("XACK", base, change.group, entry_id(change.seq))
        self.schedule_retry(steps, base, change)
        self.add_count(change.pid, "retried", 1)

    def schedule_retry(self, steps: ScriptSteps, base: str, change: RetryScheduled) -> None:
        self.scheduled_retries.setdefault((change.pid, change.group), set()).add(change.seq)
        details = json.dumps(
            {"failures": change.failures, "due": change.due_at, "description": change.description}
        )
        steps.add_command(
            "ZADD", retry_schedule_key(base, change.group), round(change.due_at * 1000), change.seq
        )
        steps.add_command("HSET", retry_details_key(base, change.group), change.seq, details)

    def _apply_queue_deleted(self, change: QueueDeleted, plan: WritePlan) -> None:
        plan.log.add_command("HDEL", self._keys.queues, change.queue)
        for pid in change.pids:
            base = self._base_key(pid)
            steps = plan.view_steps(base)
            for group in list(self._groups_by_partition.get(pid, ())):
                self._forget_group((pid, group), base, steps)
                self._reported_deliveries.pop((pid, group), None)
            self._groups_by_partition.pop(pid, None)
            # The fence stays for a day: a late copy of an old write must not recreate the stream.
            for key in (base, rewritten_key(base), counters_key(base)):
                steps.add_command("UNLINK", key)
            steps.add_command("EXPIRE", fence_key(base), 86400)
            self._trimmed_to.pop(pid, None)
            self._unsent_counts.pop(pid, None)

    def _forget_group(
        self, group_partition: _GroupPartition, base: str, steps: ScriptSteps
    ) -> None:
        self.pending.pop(group_partition, None)
        self.scheduled_retries.pop(group_partition, None)
        self._next_seqs.pop(group_partition, None)
        self._groups_by_partition.get(group_partition[0], set()).discard(group_partition[1])
        steps.add_command("UNLINK", retry_schedule_key(base, group_partition[1]))
        steps.add_command("UNLINK", retry_details_key(base, group_partition[1]))

    def _apply_other(self, change: Change, plan: WritePlan) -> list[int]:
        """Apply the other kinds of changes; return partitions in which messages may be removed."""
        if isinstance(change, QueueCreated):
            for pid in change.pids:
                self.ensure_named(pid)
            description = {
                "partitions": len(change.pids),
                "config": json.loads(change.config or "{}"),
            }
            plan.log.add_command("HSET", self._keys.queues, change.queue, json.dumps(description))
            return change.pids
        if isinstance(change, GroupPositioned):
            for pid, position in change.positions:
                base = self._base_key(pid)
                steps = plan.view_steps(base)
                steps.add_optional_command(base, "XGROUP", "DESTROY", base, change.group)
                self._forget_group((pid, change.group), base, steps)
                self.create_group(steps, base, pid, change.group, position)
            return [pid for pid, _ in change.positions]
        if isinstance(change, GroupDeleted):
            for pid in change.pids:
                base = self._base_key(pid)
                steps = plan.view_steps(base)
                steps.add_optional_command(base, "XGROUP", "DESTROY", base, change.group)
                self._forget_group((pid, change.group), base, steps)
                self._reported_deliveries.pop((pid, change.group), None)
            return change.pids
        if isinstance(change, MessagesRemoved):
            self.apply_removed(change, plan)
            return [change.pid]
        return []

    def apply_removed(self, change: MessagesRemoved, plan: WritePlan) -> None:
        base = self._base_key(change.pid)
        steps = plan.view_steps(base)
        seqs: list[int] = []
        for first, size in change.ranges:
            seqs += range(first, first + size)
        ids: list[Argument] = [entry_id(seq) for seq in seqs]
        steps.add_batched_command("XDEL", base, [], ids)
        for group in self._groups_by_partition.get(change.pid, ()):
            group_partition = (change.pid, group)
            pending = self.pending.get(group_partition, {})
            retries = self.scheduled_retries.get(group_partition, set())
            if not self.is_reconciled:
                steps.add_batched_command("XACK", base, [group], ids)
            # A scheduled retry may have become pending a moment ago.
            elif pending or retries:
                held_ids: list[Argument] = [
                    entry_id(seq) for seq in seqs if seq in pending or seq in retries
                ]
                steps.add_batched_command("XACK", base, [group], held_ids)
            for seq in seqs:
                pending.pop(seq, None)
            if retries:
                self._remove_retries(steps, base, group, [seq for seq in seqs if seq in retries])
                retries.difference_update(seqs)

    def create_group(
        self, steps: ScriptSteps, base: str, pid: int, group: str, next_seq: int
    ) -> None:
        self._next_seqs[pid, group] = next_seq
        self._groups_by_partition.setdefault(pid, set()).add(group)
        arguments: list[Argument] = [
            "XGROUP",
            "CREATE",
            base,
            group,
            _id_before(next_seq),
            "MKSTREAM",
        ]
        if self._has_entries_read:
            arguments += ["ENTRIESREAD", next_seq]
        steps.add_optional_command(base, *arguments)

    def trim_stream(self, pid: int, plan: WritePlan) -> None:
        """Remove everything below the first live message, with a frame or before the first one.

        If a maximum length is set and reached, trim by length: the engine has removed messages
        beyond it, and entries that another program added at the front are removed too.
        """
        first = self._note_decoder.first_live_seq(pid)
        if first > self._trimmed_to.get(pid, 0):
            self._trimmed_to[pid] = first
            base = self._base_key(pid)
            length = self._note_decoder.stream_length(pid) if self._max_length else 0
            if length and length >= self._max_length:
                plan.view_steps(base).add_command("XTRIM", base, "MAXLEN", length)
            else:
                plan.view_steps(base).add_command("XTRIM", base, "MINID", f"{first}-0")

    # ---- deliveries

    def update_deliveries(self, snapshot: GroupSnapshot, plan: WritePlan) -> None:
        """Update a group's pending list in Redis.

        Messages whose frame is not committed have no entry.
        """
        group_partition = (snapshot.pid, snapshot.group)
        if group_partition not in self._next_seqs:
            return
        pending = self.pending.setdefault(group_partition, {})
        retries = self.scheduled_retries.get(group_partition)
        by_holder: dict[tuple[str, int], list[Argument]] = {}
        ended_retries: list[Argument] = []
        for seq, holder in snapshot.holders.items():
            name = holder or "-"
            if pending.get(seq) != name:
                pending[seq] = name
                by_holder.setdefault((name, snapshot.attempts.get(seq, 1)), []).append(
                    entry_id(seq)
                )
                if retries is not None and seq in retries:
                    retries.discard(seq)
                    ended_retries.append(seq)
        base = self._base_key(snapshot.pid)
        has_moved = self._next_seqs.get(group_partition) != snapshot.next_seq
        reported = self._reported_deliveries.get(group_partition, 0)
        consumed = (
            snapshot.delivery_count - reported
            if snapshot.delivery_count >= reported
            else snapshot.delivery_count
        )
        if consumed:
            self._reported_deliveries[group_partition] = snapshot.delivery_count
            self.add_count(snapshot.pid, "consumed", consumed)
        if not by_holder and not has_moved:
            return
        steps = plan.view_steps(base)
        if has_moved:
            self._next_seqs[group_partition] = snapshot.next_seq
            arguments: list[Argument] = [
                "XGROUP",
                "SETID",
                base,
                snapshot.group,
                _id_before(snapshot.next_seq),
            ]
            if self._has_entries_read:
                arguments += ["ENTRIESREAD", snapshot.next_seq]
            steps.add_optional_command(base, *arguments)
        for (holder, attempt), ids in by_holder.items():
            self.claim(steps, base, snapshot.group, holder, ids, attempt)
        self._remove_retries(steps, base, snapshot.group, ended_retries)

    def claim(
        self,
        steps: ScriptSteps,
        base: str,
        group: str,
        holder: str,
        ids: list[Argument],
        attempt: int = 0,
    ) -> None:
        """Add commands that claim deliveries; without an attempt Redis keeps its count."""
        count: list[Argument] = ["RETRYCOUNT", attempt] if attempt else []
        for start in range(0, len(ids), self._claim_batch):
            batch = ids[start : start + self._claim_batch]
            steps.add_optional_command(
                base, "XCLAIM", base, group, holder, 0, *batch, *count, "FORCE", "JUSTID"
            )

    def refresh_claims(self, plan: WritePlan) -> None:
        """Claim deliveries of live consumers again, so that the scan for idle ones skips them."""
        for (pid, group), pending in self.pending.items():
            by_holder: dict[str, list[Argument]] = {}
            for seq, holder in pending.items():
                if holder != UNASSIGNED_CONSUMER:
                    by_holder.setdefault(holder, []).append(entry_id(seq))
            for holder, ids in by_holder.items():
                base = self._base_key(pid)
                self.claim(plan.view_steps(base), base, group, holder, ids)

    def mark_retries_pending(self, group_partition: _GroupPartition, seqs: list[int]) -> None:
        """Record retries that Redis made pending, unless delivered or settled meanwhile."""
        retries = self.scheduled_retries.get(group_partition, set())
        pending = self.pending.setdefault(group_partition, {})
        for seq in seqs:
            if seq in retries:
                retries.discard(seq)
                pending[seq] = UNASSIGNED_CONSUMER

    def adopt_pending(
        self, group_partition: _GroupPartition, seqs: list[int], plan: WritePlan
    ) -> None:
        """Adopt pending deliveries of unknown consumers: redeliver or, if settled, acknowledge."""
        pending = self.pending.setdefault(group_partition, {})
        settled_ids: list[Argument] = []
        for seq in seqs:
            if self._note_decoder.is_unsettled(group_partition[1], group_partition[0], seq):
                pending.setdefault(seq, UNASSIGNED_CONSUMER)
            else:
                settled_ids.append(entry_id(seq))
        base = self._base_key(group_partition[0])
        if settled_ids:
            plan.view_steps(base).add_batched_command(
                "XACK", base, [group_partition[1]], settled_ids
            )


def _id_before(seq: int) -> str:
    """Return the last id before a sequence."""
    return entry_id(seq - 1) if seq > 0 else "0"
