"""Removal: settle messages for groups, and delete those that no group has to settle.

A message is deleted when no group has to settle it and its queue keeps no settled messages. Until
then, a stored message may have no group left that has to settle it, for three reasons: the queue
has no groups yet, every group started after the message (both wait for a new group, and count in
the depth), or the message is kept for its retention (and does not count). A compacted queue keeps
settled messages until they are replaced, and counts all of them.

Commands and recovery both call `apply_settlement` and `delete_message`.
"""

from __future__ import annotations

from mypy_extensions import i64

from sluice.queues.bodies import BodyCache
from sluice.queues.flow.dispatch_schedule import DispatchSchedule
from sluice.queues.flow.timers import Timers
from sluice.queues.log import ACKED, PURGED
from sluice.queues.model import (
    LEASED,
    NO_ADDRESS,
    SETTLE,
    Cursor,
    EngineState,
    HeldKey,
    Lease,
    Partition,
    Queue,
)


class Removal:
    def __init__(
        self,
        state: EngineState,
        dispatch_schedule: DispatchSchedule,
        timers: Timers,
        body_cache: BodyCache,
    ) -> None:
        self._state: EngineState = state
        self._dispatch_schedule: DispatchSchedule = dispatch_schedule
        self._timers: Timers = timers
        self._body_cache: BodyCache = body_cache
        # Sequences removed from compacted queues, by partition, for a store that shows them; None
        # if the store does not.
        self.removed_from_compacted: dict[int, list[int]] | None = None

    # ---- one group, one message

    def apply_settlement(self, cursor: Cursor, seq: i64, outcome: i64) -> None:
        """Apply one group's settlement to the state; that of the last group deletes the message."""
        partition = cursor.partition
        is_last = partition.remove_pending_group(seq)
        stays_stored = partition.stays_when_settled(seq)
        is_stored = stays_stored or not is_last
        # A compacted queue keeps an acknowledged message until a newer value replaces it.
        is_readable = is_stored and outcome == ACKED and partition.queue.rules.is_compacted
        cursor.count_outcome(seq, outcome, is_readable)
        cursor.mark_settled(seq, is_stored)
        if partition.held_keys:
            held = partition.held_keys.get(int(seq))
            if held is not None and (is_last or held.gid == cursor.group.gid):
                self._end_hold(partition, seq, held)
        if is_last:
            self.on_settled_by_all(partition, seq, stays_stored)

    def on_settled_by_all(self, partition: Partition, seq: i64, stays_stored: bool) -> None:
        """Delete a message that all groups have settled, unless it stays stored."""
        if stays_stored:
            self._timers.schedule_retention(partition)
        else:
            self.delete_message(partition, seq)

    def _end_hold(self, partition: Partition, seq: i64, held: HeldKey) -> None:
        """Release a key that waits for no other message than `seq`, which is settled or deleted."""
        del partition.held_keys[int(seq)]
        held.dead_letters.discard((int(partition.pid), int(seq)))
        held.repaired.discard((int(partition.pid), int(seq)))
        if held.is_over():
            self._dispatch_schedule.release_key(held)

    def delete_message(self, partition: Partition, seq: i64) -> None:
        """Delete a message and free its space in the store."""
        block = partition.find_block(seq)
        if block is None:
            return
        size: i64 = i64(block.size[block.index_of(seq)])
        if partition.cached_bodies:
            self._body_cache.drop(partition, seq)
        for cursor in partition.cursors:
            if cursor.settled_seqs:
                cursor.settled_seqs.discard(int(seq))
        if partition.held_keys:
            held = partition.held_keys.get(int(seq))
            if held is not None:
                self._end_hold(partition, seq, held)
        address = partition.remove(seq)
        if address != NO_ADDRESS:
            self._state.segment_usage.drop(address, size)
            if self.removed_from_compacted is not None and partition.queue.rules.is_compacted:
                self.removed_from_compacted.setdefault(int(partition.pid), []).append(int(seq))

    def settle_unleased(self, cursor: Cursor, seq: i64, outcome: i64, lease: Lease | None) -> None:
        """Settle a message that is not leased; `lease` is there if it was leased before."""
        self.withdraw(cursor, seq, lease)
        cursor.log_settlement(seq, outcome, self._state.frame_builder)
        self.apply_settlement(cursor, seq, outcome)
        self._dispatch_schedule.on_settled(cursor)

    def withdraw(self, cursor: Cursor, seq: i64, lease: Lease | None) -> None:
        """Take a message that is not leased back from a group, with its lease object if any."""
        if cursor.prefetched_bodies:
            self._body_cache.take_prefetched(cursor, int(seq))
        if lease is None:
            cursor.withdraw(seq)
        else:
            cursor.deactivate(lease)
            cursor.remove_lease(lease, SETTLE)

    # ---- all groups

    def remove_for_all_groups(self, partition: Partition, seq: i64, outcome: i64) -> bool:
        """Settle a message for each group that does not lease it; return whether it is deleted."""
        is_leased = False
        for cursor in partition.cursors:
            if not partition.holds(seq):
                break  # the last group deleted it
            if cursor.is_settled(seq) or not partition.is_for_group(seq, cursor.group.gid):
                continue
            lease = cursor.leases.get(int(seq))
            if lease is not None and lease.state == LEASED:
                is_leased = True
            else:
                self.settle_unleased(cursor, seq, outcome, lease)
        if is_leased:
            return False
        if partition.holds(seq):
            self.remove_without_groups(partition, seq)
        return True

    def remove_without_groups(self, partition: Partition, seq: i64) -> None:
        """Delete a message that no group has to settle, and log its removal.

        No settlement implies it.
        """
        self._state.frame_builder.add_removal(partition, seq)
        self.delete_message(partition, seq)

    def purge_queue(self, queue: Queue) -> int:
        """Remove all messages that are not leased; return their number."""
        before = queue.depth
        for partition in queue.partitions:
            self.purge_range(partition, 0, partition.next_seq, partition.live_count)
        return int(before - queue.depth)

    def purge_range(self, partition: Partition, start: i64, end: i64, max_count: i64) -> i64:
        """Purge at most `max_count` messages from `start` to `end`; return where to continue."""
        seq = partition.first_live(start)
        while seq < end and max_count > 0:
            self.remove_for_all_groups(partition, seq, PURGED)
            max_count -= 1
            seq = partition.first_live(seq + 1)
        return seq

    def drop_damaged(self, partition: Partition, seq: i64) -> None:
        """Remove a message whose record the store cannot read."""
        self._state.warn(
            f"message lost: damaged on disk (queue {partition.queue.name}, "
            f"partition {partition.number}, sequence {seq})"
        )
        self.remove_for_all_groups(partition, seq, PURGED)
