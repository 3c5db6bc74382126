"""Consumers to dispatch to when the turn ends, because their messages or their capacity changed.

It also assigns partitions to members and revokes leases, because both end in a dispatch. It does
not decide what is delivered: `dispatch` does.
"""

from __future__ import annotations

from sluice.queues.bodies import BodyCache
from sluice.queues.flow.timers import Timers
from sluice.queues.model import Consumer, Cursor, EngineState, Group, HeldKey, Lease


class DispatchSchedule:
    """Consumers and groups that may get messages when the turn ends."""

    def __init__(self, state: EngineState, timers: Timers, body_cache: BodyCache) -> None:
        self._state: EngineState = state
        self._timers: Timers = timers
        self._body_cache: BodyCache = body_cache
        self._consumers: list[Consumer] = []
        # Groups with messages that members with capacity may take over from other members.
        self._groups: list[Group] = []

    def add(self, consumer: Consumer) -> None:
        """Dispatch to a consumer that may have capacity again."""
        if not consumer.is_scheduled:
            consumer.is_scheduled = True
            self._consumers.append(consumer)

    def add_cursor(self, cursor: Cursor) -> None:
        """Dispatch to the consumer of a partition that may have messages for it."""
        if cursor.consumer is not None:
            self.add(cursor.consumer)

    def add_group(self, group: Group) -> None:
        """Redistribute messages of members without capacity within `group`."""
        if not group.is_redistribution_scheduled:
            group.is_redistribution_scheduled = True
            self._groups.append(group)

    def has_work(self) -> bool:
        return len(self._consumers) > 0 or len(self._groups) > 0

    def take_consumers(self) -> list[Consumer]:
        consumers = self._consumers
        self._consumers = []
        return consumers

    def take_groups(self) -> list[Group]:
        if not self._groups:
            return self._groups
        groups = self._groups
        self._groups = []
        return groups

    # ---- changes that lead to a dispatch

    def rebalance(self, group: Group) -> None:
        """Assign the partitions to the members and dispatch to all of them.

        Messages for which one member had no capacity may now go to another one.
        """
        for cursor in group.rebalance():
            cursor.blocked_since = 0.0
            if cursor.consumer is None:
                self._body_cache.forget_cursor(cursor)
        for consumer in group.eligible_members():
            self.add(consumer)

    def update_admission(self, group: Group) -> None:
        """Decide again whether a group may deliver, and dispatch to its members if it may."""
        admission = group.admission
        group.update_admission(self._state.now)
        if admission.is_open:
            for consumer in group.eligible_members():
                self.add(consumer)
            if group.blocked_cursors:
                self.add_group(group)
        elif admission.reopens_at > 0.0:
            self._timers.schedule_admission(group, admission.reopens_at)
        self.wake_keys(group)

    def wake_keys(self, group: Group) -> None:
        """Dispatch messages that the limits of their keys admit, and set a timer for the others."""
        keys = group.admission.keys
        for cursor in group.make_released_ready():
            self.add_cursor(cursor)
        due_at = keys.next_due()
        if due_at > 0.0:
            self._timers.schedule_admission(group, due_at)

    def release_key(self, held: HeldKey) -> None:
        """Deliver messages of a held key again."""
        group = self._state.groups.get(int(held.gid))
        if group is not None:
            group.release_key(held)
            for cursor in group.cursors:
                self.add_cursor(cursor)

    def clear_stalled(self, group: Group, identity: str) -> None:
        """Mark a consumer as no longer stalled: it settled something, even if too late."""
        for consumer in group.consumers:
            if consumer.is_stalled and consumer.identity == identity:
                consumer.is_stalled = False
                consumer.active_at = self._state.now
                self.rebalance(group)
                return

    def on_delivery_ended(self, lease: Lease, consumer: Consumer | None, by_consumer: bool) -> None:
        """Update admission and stalled consumers after a lease was taken away from `consumer`.

        `by_consumer`: the consumer itself ended the delivery, so it is not stalled.
        """
        group = lease.cursor.group
        if group.admission.keys.is_active:
            group.admission.keys.open_due(self._state.now)
            self.wake_keys(group)
        if not group.admission.is_open:
            # An ack or a failure has been reported before: any other end says nothing.
            group.admission.breaker.on_probe_lost(lease)
            self.update_admission(group)
        if consumer is not None and by_consumer:
            consumer.settled_at = self._state.now
            if consumer.is_stalled:
                consumer.is_stalled = False
                if consumer.group is not None:
                    self.rebalance(consumer.group)

    def revoke(self, lease: Lease) -> None:
        """Take a lease away from its consumer because its message or its group is removed."""
        consumer = lease.consumer
        if consumer is not None:
            consumer.on_lease_revoked(lease)
        lease.cursor.end_delivery(lease)
        self.on_delivery_ended(lease, consumer, False)
        if consumer is not None:
            self.add(consumer)

    def on_settled(self, cursor: Cursor) -> None:
        """Dispatch messages that a settlement made ready: the next of its key, or gated ones."""
        if cursor.low_watermark >= cursor.gate_watermark:
            self._check_gates(cursor)
        consumer = cursor.consumer
        if consumer is not None and not consumer.is_scheduled and cursor.has_more():
            consumer.is_scheduled = True
            self._consumers.append(consumer)

    def _check_gates(self, cursor: Cursor) -> None:
        """Open gates after a cursor's low watermark has reached a gate boundary."""
        cursor.update_gate_watermark()
        for other in cursor.group.cursors:
            other.open_gates()
            self.add_cursor(other)
        cursor.group.queue.drop_passed_gates()
