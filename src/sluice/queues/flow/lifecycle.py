"""Lifecycle: create, change and delete queues and groups.

Most methods run twice: when a command is carried out, and when recovery replays its notes. So only
methods that recovery does not call write notes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from sluice.errors import (
    InvalidQueueConfig,
    InvalidQueueName,
    QueueExists,
    TooManyFollowed,
    TooManyGroups,
    TooManyPartitions,
    UnknownQueue,
)
from sluice.message import TOMBSTONE
from sluice.queues.bodies import BodyCache
from sluice.queues.flow.dispatch_schedule import DispatchSchedule
from sluice.queues.flow.removal import Removal
from sluice.queues.flow.timers import Timers
from sluice.queues.log import PURGED, NoteWriter, notes
from sluice.queues.model import (
    LEASED,
    NO_DELAYED,
    NO_HELD_KEYS,
    REVOKE,
    STRICT,
    Cursor,
    EngineState,
    Group,
    LostRanges,
    Partition,
    PartitionGate,
    Queue,
    QueueRules,
)
from sluice.queues.names import queue_name_error

# Average used to limit the cursors of all groups together.
GROUPS_PER_QUEUE: Final = 5
MIN_COUNTED_GROUP: Final = 100  # partitions


class Lifecycle:
    """Creates, changes and deletes queues and groups.

    `rules_for` returns the rules and the configuration of a queue that is created from a template.
    """

    def __init__(
        self,
        state: EngineState,
        dispatch_schedule: DispatchSchedule,
        timers: Timers,
        removal: Removal,
        body_cache: BodyCache,
        rules_for: Callable[[str], tuple[QueueRules, str]],
    ) -> None:
        self._state: EngineState = state
        self._dispatch_schedule: DispatchSchedule = dispatch_schedule
        self._timers: Timers = timers
        self._removal: Removal = removal
        self._body_cache: BodyCache = body_cache
        self._rules_for = rules_for
        # Limit of partitions of all queues together, for new queues; 0: no limit.
        self.max_partitions: i64 = 0

    # ---- queues

    def get_queue(self, name: str) -> Queue:
        queue = self._state.queues.get(name)
        if queue is None:
            raise UnknownQueue(name)
        return queue

    def get_or_create_queue(self, name: str, is_limited: bool = True) -> Queue:
        """Return the queue called `name`; create it from its template if it does not exist.

        Unless `is_limited`, the queue may exceed `max_partitions`.
        """
        queue = self._state.queues.get(name)
        if queue is None:
            rules, config = self._rules_for(name)
            queue = self.create_queue(rules, config, is_limited)
        return queue

    def create_queue(self, rules: QueueRules, config: str, is_limited: bool = True) -> Queue:
        """Create a queue; the next frame stores it."""
        state = self._state
        if is_limited:
            self._check_partition_limit(rules, 0)
        error = queue_name_error(rules.name)
        if error:
            raise InvalidQueueName(rules.name, error)
        if rules.name in state.queues:
            raise QueueExists(rules.name)
        queue = Queue(state.next_qid, rules)
        queue.config_json = config
        queue.created_at = state.now
        state.next_qid += 1
        state.queues[rules.name] = queue
        count: i64 = 1 if rules.ordering == STRICT else rules.partitions
        self._write_queue_note(queue, count)
        self.add_partitions(queue, state.next_pid, count)
        return queue

    def _check_partition_limit(self, rules: QueueRules, current: i64) -> None:
        """Refuse more partitions than the broker may have.

        Each costs memory, and time at each start. Recovery does not check: a lower limit than
        before must not prevent a start.
        """
        wanted: i64 = 1 if rules.ordering == STRICT else rules.partitions
        count: i64 = len(self._state.partitions)
        if (
            self.max_partitions
            and wanted > current
            and count + wanted - current > self.max_partitions
        ):
            raise TooManyPartitions(
                rules.name, int(wanted - current), int(count), int(self.max_partitions)
            )

    def check_group_limit(self, group_name: str, added: i64) -> None:
        """Refuse a new group of `added` partitions if the groups of the broker would have too many.

        Small groups are not checked: there are as many of them as queues, and counting all cursors
        for each of them would take too long.
        """
        if not self.max_partitions or added < MIN_COUNTED_GROUP:
            return
        limit: i64 = self.max_partitions * GROUPS_PER_QUEUE
        count = self._count_cursors()
        if count + added > limit:
            raise TooManyGroups(group_name, int(added), int(count), int(limit))

    def _check_growth_limit(self, queue: Queue, rules: QueueRules) -> None:
        """Refuse more partitions of a queue if its groups would have too many cursors."""
        wanted: i64 = 1 if rules.ordering == STRICT else rules.partitions
        added: i64 = (wanted - len(queue.partitions)) * len(queue.groups)
        if not self.max_partitions or added <= 0:
            return
        limit: i64 = self.max_partitions * GROUPS_PER_QUEUE
        count = self._count_cursors()
        if count + added > limit:
            raise TooManyFollowed(queue.name, len(queue.groups), int(added), int(count), int(limit))

    def _count_cursors(self) -> i64:
        count: i64 = 0
        for group in self._state.groups.values():
            count += len(group.cursors)
        return count

    def _write_queue_note(self, queue: Queue, added: i64) -> None:
        note = NoteWriter(notes.QUEUE_CREATED)
        note.write_int(queue.qid)
        note.write_int(self._state.next_pid)
        note.write_int(added)
        note.write_text(queue.name)
        note.write_text(queue.config_json)
        note.write_seconds(queue.created_at)
        write_gates(note, queue)
        self._state.frame_builder.add_note(note, self._state.now_ms(), True)

    def add_partitions(self, queue: Queue, first_pid: i64, count: i64) -> None:
        added: list[Partition] = []
        for step in range(count):
            partition = Partition(queue, first_pid + step, len(queue.partitions))
            queue.partitions.append(partition)
            self._state.partitions[int(partition.pid)] = partition
            added.append(partition)
        for group in queue.groups.values():
            tracks_lost_ranges = _tracks_lost_ranges(group)
            for partition in added:
                cursor = Cursor(group, partition, 0)
                # A bulk reader of the other partitions reads this one from its beginning.
                if tracks_lost_ranges:
                    cursor.lost_ranges = LostRanges(0)
                group.cursors.append(cursor)
                partition.cursors.append(cursor)
                for key_hash in group.held_keys:
                    cursor.hold_key(key_hash)
        self._state.next_pid = max(self._state.next_pid, first_pid + count)

    def reconfigure_queue(self, queue: Queue, rules: QueueRules, config: str) -> None:
        """Apply new rules to a queue. Partitions can only be added; see `PartitionGate`."""
        self._check_partition_limit(rules, len(queue.partitions))
        self._check_growth_limit(queue, rules)
        count: i64 = len(queue.partitions)
        wanted: i64 = 1 if rules.ordering == STRICT else rules.partitions
        if wanted < count:
            raise InvalidQueueConfig(
                f"queue {queue.name!r} has {count} partitions, and {wanted} would be fewer",
                "Raise partitions, or create a new queue: messages cannot change their partition",
            )
        self._state.write_settlements()
        if wanted > count:
            queue.partition_gates.append(
                PartitionGate([int(partition.next_seq) for partition in queue.partitions])
            )
        old = queue.rules
        self.set_rules(queue, rules, config)
        self._write_queue_note(queue, wanted - count)
        if wanted > count:
            self.add_partitions(queue, self._state.next_pid, wanted - count)
        if wanted > count or old.ordering != rules.ordering or old.batch_size != rules.batch_size:
            for group in queue.groups.values():
                for cursor in group.cursors:
                    cursor.rebuild()
        if old.delivery_timeout != rules.delivery_timeout:
            queue.deadlines.set_timeout(rules.delivery_timeout)
            if queue.deadlines.first is not None:
                self._timers.schedule_deadline_check(queue, queue.deadlines.first.deadline)
            else:
                # Otherwise the next delivery would rely on a wake-up set for the old timeout.
                queue.deadline_check_at = 0.0
        for group in queue.groups.values():
            for held in group.held_keys.values():
                self._timers.schedule_release(group, held)  # the timeout may have changed
            self._dispatch_schedule.update_admission(group)
            self._dispatch_schedule.rebalance(group)
            for consumer in group.consumers:
                self._dispatch_schedule.add(consumer)

    def set_rules(self, queue: Queue, rules: QueueRules, config: str) -> None:
        """Set new rules and apply their retention to messages without pending groups."""
        if queue.rules.retention > 0.0 >= rules.retention and not rules.is_compacted:
            for partition in queue.partitions:
                if partition.cursors:
                    self._delete_retained(partition)
        if queue.rules.holds_keys and (
            not rules.holds_keys or queue.rules.ordering != rules.ordering
        ):
            for group in queue.groups.values():
                self._release_keys(group)
        queue.set_rules(rules, config)
        if not rules.breaker_failures:
            for group in queue.groups.values():
                group.admission.breaker.close()  # in recovery too, where nothing else closes it
        for partition in queue.partitions:
            self._timers.schedule_retention(partition)

    def _release_keys(self, group: Group) -> None:
        for held in list(group.held_keys.values()):
            self._dispatch_schedule.release_key(held)

    def _delete_retained(self, partition: Partition) -> None:
        seq = partition.first_live(0)
        while seq < partition.next_seq:
            if partition.pending_groups(seq) <= 0:
                self._removal.delete_message(partition, seq)
            seq = partition.first_live(seq + 1)

    def delete_queue(self, queue: Queue) -> None:
        """Delete a queue with its messages. Its consumers stay subscribed to the free name."""
        note = NoteWriter(notes.QUEUE_DELETED)
        note.write_int(queue.qid)
        self._state.frame_builder.add_note(note, self._state.now_ms(), True)
        self.remove_queue(queue)

    def remove_queue(self, queue: Queue) -> None:
        for group in list(queue.groups.values()):
            self._remove_members(group)
            self._state.groups.pop(int(group.gid), None)
        for partition in queue.partitions:
            partition.cursors = []
            partition.delayed_seqs = NO_DELAYED
            seq = partition.first_live(0)
            while seq < partition.next_seq:
                self._removal.delete_message(partition, seq)
                seq = partition.first_live(seq + 1)
            self._body_cache.forget_partition(partition)
            self._state.partitions.pop(int(partition.pid), None)
        self._timers.forget_queue(queue)
        queue.mark_deleted()
        self._state.queues.pop(queue.name, None)

    def _remove_members(self, group: Group) -> None:
        """Remove the members of a deleted group and revoke their leases."""
        group.held_keys = NO_HELD_KEYS
        for cursor in group.cursors:
            self._revoke_leases(cursor)
            cursor.consumer = None
            self._body_cache.forget_cursor(cursor)
        for consumer in list(group.consumers):
            group.remove_member(consumer)

    def _revoke_leases(self, cursor: Cursor) -> None:
        for lease in list(cursor.leases.values()):
            if lease.state == LEASED:
                self._dispatch_schedule.revoke(lease)
            cursor.remove_lease(lease, REVOKE)

    # ---- groups

    def get_or_create_group(
        self, queue: Queue, name: str, start_sequences: list[int] | None = None
    ) -> Group:
        """Return the group `name`, or create it.

        A new group starts at `start_sequences`, or at the oldest message.
        """
        existing = queue.groups.get(name)
        if existing is not None:
            return existing
        if start_sequences is None:
            start_sequences = [int(partition.first_live(0)) for partition in queue.partitions]
        self._state.write_settlements()
        group = self.add_group(queue, self._state.next_gid, name, start_sequences)
        note = NoteWriter(notes.GROUP_CREATED)
        note.write_int(queue.qid)
        note.write_int(group.gid)
        note.write_text(name)
        for start_sequence in start_sequences:
            note.write_int(start_sequence)
        self._state.frame_builder.add_note(note, self._state.now_ms(), True)
        for partition in queue.partitions:
            # The group may start after all stored messages.
            self._timers.schedule_retention(partition)
        self._schedule_expiries(queue)
        return group

    def _schedule_expiries(self, queue: Queue) -> None:
        """Schedule expiry checks: messages may be needed again that earlier checks skipped."""
        for partition in queue.partitions:
            soonest = partition.next_expiry()
            if soonest:
                self._timers.schedule_expiry(partition, soonest)

    def add_group(self, queue: Queue, gid: i64, name: str, start_sequences: list[int]) -> Group:
        group = Group(queue, gid, name)
        self._state.next_gid = max(self._state.next_gid, gid + 1)
        queue.groups[name] = group
        self._state.groups[int(gid)] = group
        for partition, start_sequence in zip(queue.partitions, start_sequences, strict=True):
            cursor = Cursor(group, partition, 0)
            group.cursors.append(cursor)
            cursor.advance_watermark(_clamp_sequence(partition, start_sequence))
            _attach_cursor(cursor)
        for cursor in group.cursors:
            cursor.rebuild()
        return group

    def delete_group(self, group: Group) -> None:
        """Delete a group and the messages that only this group had not settled."""
        self._state.write_settlements()
        note = NoteWriter(notes.GROUP_DELETED)
        note.write_int(group.gid)
        self._state.frame_builder.add_note(note, self._state.now_ms(), True)
        self.remove_group(group)
        self._schedule_expiries(group.queue)

    def expire_groups(self, unused_seconds: float) -> None:
        """Delete groups that have had no consumer for so long, except those that read in bulk.

        Call it periodically: it also notes which groups have consumers. After a restart the time
        starts again.
        """
        now = self._state.now
        expired: list[Group] = []
        for group in self._state.groups.values():
            if group.consumers or group.used_at == 0.0:
                group.used_at = now
            elif now - group.used_at >= unused_seconds and not _tracks_lost_ranges(group):
                expired.append(group)
        for group in expired:
            self._state.warn(
                f"group expired: {group.name} of queue {group.queue.name} had no consumer for "
                f"{unused_seconds:g} s (limits.group_expiry)"
            )
            self.delete_group(group)

    def remove_group(self, group: Group) -> None:
        queue = group.queue
        self._remove_members(group)
        is_last = len(queue.groups) == 1
        for cursor in group.cursors:
            partition = cursor.partition
            seq = partition.first_live(0)
            while seq < partition.next_seq:
                self._detach_message(cursor, seq, is_last)
                seq = partition.first_live(seq + 1)
            partition.cursors.remove(cursor)
        queue.keep_counters(group)
        queue.groups.pop(group.name, None)
        self._state.groups.pop(int(group.gid), None)

    def _detach_message(self, cursor: Cursor, seq: i64, is_last: bool) -> None:
        """Remove one group from a stored message.

        After the last group, all messages wait for the next group, except those for a single group.
        """
        partition = cursor.partition
        if is_last:
            if int(seq) in partition.target_groups or partition.flags(seq) & TOMBSTONE:
                self._removal.delete_message(partition, seq)
            else:
                partition.remove_all_pending_groups(seq)
                partition.watch_expiry(seq)
        elif (
            partition.is_for_group(seq, cursor.group.gid)
            and not cursor.is_settled(seq)
            and partition.remove_pending_group(seq)
        ):
            self._removal.on_settled_by_all(partition, seq, partition.stays_when_settled(seq))

    def seek_group(self, group: Group, start_sequences: list[int]) -> None:
        """Move a group back to stored messages, or forward; skipped ones count as purged."""
        self._state.write_settlements()
        note = NoteWriter(notes.GROUP_SEEK)
        note.write_int(group.gid)
        for start_sequence in start_sequences:
            note.write_int(start_sequence)
        self._state.frame_builder.add_note(note, self._state.now_ms(), True)
        self.set_group_positions(group, start_sequences)
        self._schedule_expiries(group.queue)
        for cursor in group.cursors:
            self._dispatch_schedule.add_cursor(cursor)

    def set_group_positions(self, group: Group, start_sequences: list[int]) -> None:
        self._release_keys(group)
        for cursor, start_sequence in zip(group.cursors, start_sequences, strict=True):
            self._revoke_leases(cursor)
            self._body_cache.forget_cursor(cursor)
            self._set_cursor_position(cursor, _clamp_sequence(cursor.partition, start_sequence))
        for cursor in group.cursors:
            cursor.rebuild()

    def _set_cursor_position(self, cursor: Cursor, start_sequence: i64) -> None:
        partition = cursor.partition
        is_compacted = partition.queue.rules.is_compacted
        gid = cursor.group.gid
        other_groups_seqs: list[int] = []
        cursor.count_enqueued()
        seq = partition.first_live(min(cursor.low_watermark, start_sequence))
        while seq < partition.next_seq:
            was_settled = cursor.is_settled(seq)
            if not partition.is_for_group(seq, gid):
                if seq >= start_sequence:
                    other_groups_seqs.append(int(seq))
            elif seq < start_sequence and not was_settled:
                is_last = partition.remove_pending_group(seq)
                stays_stored = partition.stays_when_settled(seq)
                is_readable = is_compacted and (stays_stored or not is_last)
                cursor.count_outcome(seq, PURGED, is_readable)
                if is_last:
                    self._removal.on_settled_by_all(partition, seq, stays_stored)
            elif seq >= start_sequence:
                if was_settled:
                    partition.add_pending_group(seq)
                    cursor.enqueued += 1
                partition.watch_expiry(seq)
            seq = partition.first_live(seq + 1)
        cursor.move_to(start_sequence, set(other_groups_seqs))


def write_gates(note: NoteWriter, queue: Queue) -> None:
    note.write_int(len(queue.partition_gates))
    for gate in queue.partition_gates:
        note.write_int(len(gate.boundary_seqs))
        for boundary_seq in gate.boundary_seqs:
            note.write_int(boundary_seq)


def _tracks_lost_ranges(group: Group) -> bool:
    for cursor in group.cursors:
        if cursor.lost_ranges is not None:
            return True
    return False


def _clamp_sequence(partition: Partition, sequence: i64) -> i64:
    return max(0, min(sequence, partition.next_seq))


def _attach_cursor(cursor: Cursor) -> None:
    """Make a cursor responsible for all messages from its low watermark on."""
    partition = cursor.partition
    gid = cursor.group.gid
    is_first = not partition.cursors
    seq = partition.first_live(cursor.low_watermark)
    while seq < partition.next_seq:
        if not partition.is_for_group(seq, gid) or partition.flags(seq) & TOMBSTONE:
            # A new group does not need tombstones.
            cursor.mark_settled(seq, True)
        else:
            partition.add_pending_group(seq)
            partition.watch_expiry(seq)
            cursor.enqueued += 1
        seq = partition.first_live(seq + 1)
    partition.cursors.append(cursor)
    if is_first:
        # Messages waited for a first group until now: those before its start count as settled.
        partition.uncount_without_groups(cursor.low_watermark)
