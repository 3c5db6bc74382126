"""Create, change and delete queues and groups.

These functions run twice: when a command is carried out, and when recovery replays its notes. So
only functions that recovery does not call write notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.errors import (
    InvalidQueueConfig,
    InvalidQueueName,
    QueueExists,
    TooManyFollowed,
    TooManyGroups,
    TooManyPartitions,
)
from sluice.message import TOMBSTONE
from sluice.queues.bulk.lost_ranges import LostRanges
from sluice.queues.flow.removal import (
    counts_unclaimed_in_depth,
    delete_message,
    on_settled_by_all,
    retains_settled,
)
from sluice.queues.flow.settlement import unassign
from sluice.queues.log import notes
from sluice.queues.log.notes import PURGED, NoteWriter
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, SETTLED
from sluice.queues.model.group import Group
from sluice.queues.model.partition import NO_DELAYED, Partition
from sluice.queues.model.queue import PartitionGate, Queue
from sluice.queues.model.queue_rules import STRICT, QueueRules
from sluice.queues.names import queue_name_error

if TYPE_CHECKING:
    from sluice.queues.engine import Engine

# Average used to limit the cursors of all groups together.
GROUPS_PER_QUEUE: Final = 5
MIN_COUNTED_GROUP: Final = 100  # partitions


# ---- queues


def create_queue(engine: Engine, rules: QueueRules, config: str) -> Queue:
    """Create a queue; the next frame stores it."""
    error = queue_name_error(rules.name)
    if error:
        raise InvalidQueueName(rules.name, error)
    if rules.name in engine.queues:
        raise QueueExists(rules.name)
    queue = Queue(engine.next_qid, rules)
    queue.config_json = config
    queue.created_at = engine.now
    engine.next_qid += 1
    engine.queues[rules.name] = queue
    count: i64 = 1 if rules.ordering == STRICT else rules.partitions
    _write_queue_note(engine, queue, count)
    add_partitions(engine, queue, engine.next_pid, count)
    return queue


def check_partition_limit(engine: Engine, rules: QueueRules, current: i64) -> None:
    """Refuse more partitions than the broker may have. Each costs memory, and time at each start.

    Recovery does not check: a lower limit than before must not prevent a start.
    """
    wanted: i64 = 1 if rules.ordering == STRICT else rules.partitions
    count: i64 = len(engine.partitions)
    if (
        engine.max_partitions
        and wanted > current
        and count + wanted - current > engine.max_partitions
    ):
        raise TooManyPartitions(
            rules.name, int(wanted - current), int(count), int(engine.max_partitions)
        )


def check_group_limit(engine: Engine, group_name: str, added: i64) -> None:
    """Refuse a new group of `added` partitions if the groups of the broker would have too many.

    Small groups are not checked: there are as many of them as queues, and counting all cursors for
    each of them would take too long.
    """
    if not engine.max_partitions or added < MIN_COUNTED_GROUP:
        return
    limit: i64 = engine.max_partitions * GROUPS_PER_QUEUE
    count = _count_cursors(engine)
    if count + added > limit:
        raise TooManyGroups(group_name, int(added), int(count), int(limit))


def check_growth_limit(engine: Engine, queue: Queue, rules: QueueRules) -> None:
    """Refuse more partitions of a queue if its groups would have too many cursors."""
    wanted: i64 = 1 if rules.ordering == STRICT else rules.partitions
    added: i64 = (wanted - len(queue.partitions)) * len(queue.groups)
    if not engine.max_partitions or added <= 0:
        return
    limit: i64 = engine.max_partitions * GROUPS_PER_QUEUE
    count = _count_cursors(engine)
    if count + added > limit:
        raise TooManyFollowed(queue.name, len(queue.groups), int(added), int(count), int(limit))


def _count_cursors(engine: Engine) -> i64:
    count: i64 = 0
    for group in engine.groups.values():
        count += len(group.cursors)
    return count


def _write_queue_note(engine: Engine, queue: Queue, added: i64) -> None:
    note = NoteWriter(notes.QUEUE_CREATED)
    note.write_int(queue.qid)
    note.write_int(engine.next_pid)
    note.write_int(added)
    note.write_text(queue.name)
    note.write_text(queue.config_json)
    note.write_seconds(queue.created_at)
    write_gates(note, queue)
    engine.add_note(note, True)


def write_gates(note: NoteWriter, queue: Queue) -> None:
    note.write_int(len(queue.partition_gates))
    for gate in queue.partition_gates:
        note.write_int(len(gate.boundary_seqs))
        for boundary_seq in gate.boundary_seqs:
            note.write_int(boundary_seq)


def add_partitions(engine: Engine, queue: Queue, first_pid: i64, count: i64) -> None:
    added: list[Partition] = []
    for step in range(count):
        partition = Partition(queue, first_pid + step, len(queue.partitions))
        queue.partitions.append(partition)
        engine.partitions[int(partition.pid)] = partition
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
    engine.next_pid = max(engine.next_pid, first_pid + count)


def _tracks_lost_ranges(group: Group) -> bool:
    for cursor in group.cursors:
        if cursor.lost_ranges is not None:
            return True
    return False


def reconfigure_queue(engine: Engine, queue: Queue, rules: QueueRules, config: str) -> None:
    """Apply new rules to a queue. Partitions can only be added; see `PartitionGate`."""
    count: i64 = len(queue.partitions)
    wanted: i64 = 1 if rules.ordering == STRICT else rules.partitions
    if wanted < count:
        raise InvalidQueueConfig(
            f"queue {queue.name!r} has {count} partitions, and {wanted} would be fewer",
            "Raise partitions, or create a new queue: messages cannot change their partition",
        )
    engine.frame_builder.flush(int(engine.now * 1000.0))
    if wanted > count:
        queue.partition_gates.append(
            PartitionGate([int(partition.next_seq) for partition in queue.partitions])
        )
    old = queue.rules
    set_rules(engine, queue, rules, config)
    _write_queue_note(engine, queue, wanted - count)
    if wanted > count:
        add_partitions(engine, queue, engine.next_pid, wanted - count)
    if wanted > count or old.ordering != rules.ordering or old.batch_size != rules.batch_size:
        for group in queue.groups.values():
            for cursor in group.cursors:
                cursor.rebuild()
    if old.delivery_timeout != rules.delivery_timeout:
        queue.deadlines.set_timeout(rules.delivery_timeout)
        if queue.deadlines.first is not None:
            engine.timers.schedule_deadline_check(queue, queue.deadlines.first.deadline)
        else:
            # Otherwise the next delivery would rely on a wake-up set for the old timeout.
            queue.deadline_check_at = 0.0
    for group in queue.groups.values():
        engine.rebalance(group)
        for consumer in group.consumers:
            engine.schedule_dispatch(consumer)


def set_rules(engine: Engine, queue: Queue, rules: QueueRules, config: str) -> None:
    """Set new rules and apply their retention to messages without pending groups."""
    was_retained = queue.rules.retention > 0.0
    is_retained = rules.retention > 0.0
    queue.rules = rules
    queue.config_json = config
    for partition in queue.partitions:
        partition.retention_check_at = 0.0
        if partition.cursors and was_retained != is_retained and not rules.is_compacted:
            seq = partition.first_live(0)
            while seq < partition.next_seq:
                if partition.pending_groups(seq) <= 0:
                    if is_retained:
                        queue.depth -= 1
                    else:
                        delete_message(engine, partition, seq)
                seq = partition.first_live(seq + 1)
        if is_retained and partition.live_count:
            engine.schedule_retention(partition)


def delete_queue(engine: Engine, queue: Queue) -> None:
    """Delete a queue with its messages. Its consumers stay subscribed to the free name."""
    note = NoteWriter(notes.QUEUE_DELETED)
    note.write_int(queue.qid)
    engine.add_note(note, True)
    remove_queue(engine, queue)


def remove_queue(engine: Engine, queue: Queue) -> None:
    for group in list(queue.groups.values()):
        _remove_members(engine, group)
        engine.groups.pop(int(group.gid), None)
    queue.groups = {}
    for partition in queue.partitions:
        partition.cursors = []
        partition.delayed_seqs = NO_DELAYED
        seq = partition.first_live(0)
        while seq < partition.next_seq:
            delete_message(engine, partition, seq)
            seq = partition.first_live(seq + 1)
        engine.body_cache.forget_partition(partition)
        engine.partitions.pop(int(partition.pid), None)
    engine.timers.forget_queue(queue)
    queue.depth = 0
    queue.is_deleted = True
    engine.queues.pop(queue.name, None)


def _remove_members(engine: Engine, group: Group) -> None:
    """Remove the members of a deleted group and revoke their leases."""
    for cursor in group.cursors:
        _revoke_leases(engine, cursor)
        cursor.consumer = None
        engine.body_cache.forget_cursor(cursor)
    for consumer in group.consumers:
        consumer.group = None
        consumer.cursors = []
        group.queue.consumer_count -= 1
    group.consumers = []


def _revoke_leases(engine: Engine, cursor: Cursor) -> None:
    for lease in list(cursor.leases.values()):
        consumer = lease.consumer
        if lease.state == LEASED:
            if consumer is not None:
                consumer.on_lease_revoked(lease)
            unassign(engine, lease, False)
        lease.state = SETTLED
        lease.message = None
        cursor.group.unindex_by_message_id(lease)
    cursor.leases = {}


# ---- groups


def create_group(
    engine: Engine, queue: Queue, name: str, start_sequences: list[int] | None
) -> Group:
    """Create a group that starts at `start_sequences`, or at the oldest stored message."""
    if start_sequences is None:
        start_sequences = [int(partition.first_live(0)) for partition in queue.partitions]
    engine.frame_builder.flush(int(engine.now * 1000.0))
    group = add_group(engine, queue, engine.next_gid, name, start_sequences)
    note = NoteWriter(notes.GROUP_CREATED)
    note.write_int(queue.qid)
    note.write_int(group.gid)
    note.write_text(name)
    for start_sequence in start_sequences:
        note.write_int(start_sequence)
    engine.add_note(note, True)
    for partition in queue.partitions:
        if partition.live_count:
            engine.schedule_retention(partition)  # the group may start after all stored messages
    _schedule_expiries(engine, queue)
    return group


def _schedule_expiries(engine: Engine, queue: Queue) -> None:
    """Schedule expiry checks: messages may be needed again that earlier checks skipped."""
    for partition in queue.partitions:
        soonest = partition.next_expiry()
        if soonest:
            engine.timers.schedule_expiry(partition, soonest)


def add_group(
    engine: Engine, queue: Queue, gid: i64, name: str, start_sequences: list[int]
) -> Group:
    group = Group(queue, gid, name)
    engine.next_gid = max(engine.next_gid, gid + 1)
    queue.groups[name] = group
    engine.groups[int(gid)] = group
    for partition, start_sequence in zip(queue.partitions, start_sequences, strict=True):
        cursor = Cursor(group, partition, 0)
        group.cursors.append(cursor)
        is_first = not partition.cursors
        partition.cursors.append(cursor)
        cursor.advance_watermark(_clamp_sequence(partition, start_sequence))
        _attach_cursor(cursor, is_first)
    for cursor in group.cursors:
        cursor.rebuild()
    return group


def _clamp_sequence(partition: Partition, sequence: i64) -> i64:
    return max(0, min(sequence, partition.next_seq))


def _attach_cursor(cursor: Cursor, is_first: bool) -> None:
    """Make a cursor responsible for all messages from its low watermark on.

    `is_first`: the cursor belongs to the first group of the queue.
    """
    partition = cursor.partition
    queue = partition.queue
    if is_first and not counts_unclaimed_in_depth(partition):
        # Messages waited for a first group until now: from here on, messages before the group's
        # start count as settled.
        seq = partition.first_live(0)
        while seq < cursor.low_watermark:
            queue.depth -= 1
            seq = partition.first_live(seq + 1)
    gid = cursor.group.gid
    seq = partition.first_live(cursor.low_watermark)
    while seq < partition.next_seq:
        if not partition.is_for_group(seq, gid) or partition.flags(seq) & TOMBSTONE:
            # A new group does not need tombstones.
            cursor.mark_settled(seq, True)
        else:
            if (
                not is_first
                and partition.pending_groups(seq) <= 0
                and not counts_unclaimed_in_depth(partition)
            ):
                queue.depth += 1
            partition.set_pending_groups(seq, partition.pending_groups(seq) + 1)
            partition.watch_expiry(seq)
            cursor.enqueued += 1
        seq = partition.first_live(seq + 1)


def delete_group(engine: Engine, group: Group) -> None:
    """Delete a group and the messages that only this group had not settled."""
    engine.frame_builder.flush(int(engine.now * 1000.0))
    note = NoteWriter(notes.GROUP_DELETED)
    note.write_int(group.gid)
    engine.add_note(note, True)
    remove_group(engine, group)
    _schedule_expiries(engine, group.queue)


def remove_group(engine: Engine, group: Group) -> None:
    queue = group.queue
    _remove_members(engine, group)
    is_last = len(queue.groups) == 1
    for cursor in group.cursors:
        partition = cursor.partition
        seq = partition.first_live(0)
        while seq < partition.next_seq:
            _detach_message(engine, cursor, seq, is_last)
            seq = partition.first_live(seq + 1)
        partition.cursors.remove(cursor)
    queue.groups.pop(group.name, None)
    engine.groups.pop(int(group.gid), None)


def _detach_message(engine: Engine, cursor: Cursor, seq: i64, is_last: bool) -> None:
    """Remove one group from a stored message.

    After the last group, all messages wait for the next group, except those for a single group.
    """
    partition = cursor.partition
    queue = partition.queue
    is_in_depth = partition.pending_groups(seq) > 0 or counts_unclaimed_in_depth(partition)
    is_unsettled = partition.is_for_group(seq, cursor.group.gid) and not cursor.is_settled(seq)
    if is_last:
        partition.set_pending_groups(seq, 0)
        if int(seq) in partition.target_groups or partition.flags(seq) & TOMBSTONE:
            if is_in_depth:
                queue.depth -= 1
            delete_message(engine, partition, seq)
            return
        if not is_in_depth:
            queue.depth += 1
        partition.watch_expiry(seq)
    elif is_unsettled and partition.decrement_pending_groups(seq):
        on_settled_by_all(engine, partition, seq, retains_settled(partition, seq))


def seek_group(engine: Engine, group: Group, start_sequences: list[int]) -> None:
    """Move a group back to stored messages, or forward; skipped ones count as purged."""
    engine.frame_builder.flush(int(engine.now * 1000.0))
    note = NoteWriter(notes.GROUP_SEEK)
    note.write_int(group.gid)
    for start_sequence in start_sequences:
        note.write_int(start_sequence)
    engine.add_note(note, True)
    set_group_positions(engine, group, start_sequences)
    _schedule_expiries(engine, group.queue)
    for cursor in group.cursors:
        if cursor.consumer is not None:
            engine.schedule_dispatch(cursor.consumer)


def set_group_positions(engine: Engine, group: Group, start_sequences: list[int]) -> None:
    for cursor, start_sequence in zip(group.cursors, start_sequences, strict=True):
        _revoke_leases(engine, cursor)
        engine.body_cache.forget_cursor(cursor)
        _set_cursor_position(engine, cursor, _clamp_sequence(cursor.partition, start_sequence))
    for cursor in group.cursors:
        cursor.rebuild()


def _set_cursor_position(engine: Engine, cursor: Cursor, start_sequence: i64) -> None:
    partition = cursor.partition
    queue = partition.queue
    gid = cursor.group.gid
    is_in_depth = counts_unclaimed_in_depth(partition)
    other_groups_seqs: list[int] = []
    cursor.count_enqueued()
    seq = partition.first_live(min(cursor.low_watermark, start_sequence))
    while seq < partition.next_seq:
        was_settled = cursor.is_settled(seq)
        if not partition.is_for_group(seq, gid):
            if seq >= start_sequence:
                other_groups_seqs.append(int(seq))
        elif seq < start_sequence and not was_settled:
            cursor.outcome_counts[PURGED] += 1
            is_last = partition.decrement_pending_groups(seq)
            is_retained = retains_settled(partition, seq)
            if cursor.lost_ranges is not None and not (
                queue.rules.is_compacted and (is_retained or not is_last)
            ):
                cursor.lost_ranges.add(seq, seq + 1)
            if is_last:
                on_settled_by_all(engine, partition, seq, is_retained)
        elif seq >= start_sequence:
            if was_settled:
                if not is_in_depth and partition.pending_groups(seq) <= 0:
                    queue.depth += 1
                partition.set_pending_groups(seq, partition.pending_groups(seq) + 1)
                cursor.enqueued += 1
            partition.watch_expiry(seq)
        seq = partition.first_live(seq + 1)
    cursor.settled_seqs = set(other_groups_seqs)
    cursor.low_watermark = start_sequence
    cursor.scan_position = start_sequence
    cursor.advance_watermark(start_sequence)
