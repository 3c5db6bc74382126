"""Retention: remove messages whose time is over: expired ones, and settled ones after a while."""

from __future__ import annotations

from mypy_extensions import i64

from sluice.message import Message
from sluice.queues.bodies import BodyReads
from sluice.queues.flow.dead_letters import DeadLetters
from sluice.queues.flow.removal import Removal
from sluice.queues.flow.timers import Timers
from sluice.queues.log import DEAD, EXPIRED
from sluice.queues.model import LEASED, Cursor, EngineState, Partition


class Retention:
    def __init__(
        self,
        state: EngineState,
        timers: Timers,
        removal: Removal,
        dead_letters: DeadLetters,
        body_reads: BodyReads,
    ) -> None:
        self._state: EngineState = state
        self._timers: Timers = timers
        self._removal: Removal = removal
        self._dead_letters: DeadLetters = dead_letters
        self._body_reads: BodyReads = body_reads

    # ---- expiry

    def sweep_expired(self, partition: Partition) -> None:
        """Remove expired messages. A leased message stays until its delivery fails."""
        for seq in partition.find_expired(int(self._state.now)):
            self.read_or_expire(partition, seq, None)
        soonest = partition.next_expiry()
        if soonest:
            self._timers.schedule_expiry(partition, max(soonest, int(self._state.now) + 1))

    def read_or_expire(self, partition: Partition, seq: i64, message: Message | None) -> None:
        """Remove an expired message. A dead letter needs its body: read it first if needed."""
        if message is None:
            message = partition.cached_bodies.get(int(seq))
        if message is None and partition.queue.rules.expired_to_dlq:
            self._body_reads.request_for_expiry(partition, seq)
        else:
            self.expire_message(partition, seq, message)

    def expire_message(self, partition: Partition, seq: i64, message: Message | None) -> None:
        """Remove a message that no consumer took in time: drop it, or dead-letter it if configured.

        A dead letter needs `message`.
        """
        if message is None or not partition.queue.rules.expired_to_dlq:
            self._removal.remove_for_all_groups(partition, seq, EXPIRED)
            return
        expired_cursors: list[Cursor] = []
        target_count = 0
        for cursor in partition.cursors:
            if partition.is_for_group(seq, cursor.group.gid):
                target_count += 1
                if not cursor.is_settled(seq):
                    lease = cursor.leases.get(int(seq))
                    if lease is None or lease.state != LEASED:
                        expired_cursors.append(cursor)
        if len(expired_cursors) == target_count and target_count != 1:
            # No group has settled it, so one dead letter is enough for all groups.
            self._dead_letters.write_expired(partition, seq, message, None, None)
        else:
            for cursor in expired_cursors:
                lease = cursor.leases.get(int(seq))
                self._dead_letters.write_expired(partition, seq, message, cursor.group, lease)
        self._removal.remove_for_all_groups(partition, seq, DEAD)

    # ---- settled messages

    def sweep_retention(self, partition: Partition) -> None:
        """Delete settled messages whose retention is over."""
        retention = partition.queue.rules.retention
        if partition.cursors and retention > 0.0:
            before_ms: i64 = int((self._state.now - retention) * 1000.0)
            for seq in partition.find_settled_before(before_ms):
                self._removal.remove_without_groups(partition, seq)
        self._timers.schedule_retention(partition)
