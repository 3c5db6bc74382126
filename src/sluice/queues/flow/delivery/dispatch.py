"""Dispatch: assign partitions to members, and lease messages to members with capacity.

No member with capacity waits while a message could go to it (work conservation):

* An ordered message goes to the consumer of its partition, an unordered one to any member.
* A cursor whose consumer has no capacity for its messages is in `group.blocked_cursors`, if there
  are other members. `_redistribute_blocked` gives the messages to members with capacity when the
  turn ends: unordered ones at once, and the whole partition once messages have waited in it for
  `rebalance_after`. The order of a key still holds: `batch_size` limits its active messages over
  all members.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.message import Message
from sluice.queues.bodies import BodyCache, BodyReads, decode_message
from sluice.queues.flow.delivery.delivery_control import DeliveryControl
from sluice.queues.flow.delivery.delivery_tokens import DeliveryTokens
from sluice.queues.flow.delivery.settlement import Settlement
from sluice.queues.flow.dispatch_schedule import DispatchSchedule
from sluice.queues.flow.removal import Removal
from sluice.queues.flow.retention import Retention
from sluice.queues.flow.timers import Timers
from sluice.queues.log import Frame
from sluice.queues.model import (
    FOR_DEAD_LETTER,
    FOR_DELIVERY,
    FOR_EXPIRY,
    FOR_PREFETCH,
    GIVE_UP,
    NO_ADDRESS,
    BodyRead,
    Consumer,
    Cursor,
    EngineState,
    Group,
    Partition,
)
from sluice.queues.ports import Codec

NO_LIMIT: Final = 0x7FFF_FFFF_FFFF_FFFF


class Dispatch:
    def __init__(
        self,
        state: EngineState,
        dispatch_schedule: DispatchSchedule,
        timers: Timers,
        removal: Removal,
        retention: Retention,
        settlement: Settlement,
        delivery_control: DeliveryControl,
        tokens: DeliveryTokens,
        body_cache: BodyCache,
        body_reads: BodyReads,
        codec: Codec,
    ) -> None:
        self._state: EngineState = state
        self._dispatch_schedule: DispatchSchedule = dispatch_schedule
        self._timers: Timers = timers
        self._removal: Removal = removal
        self._retention: Retention = retention
        self._settlement: Settlement = settlement
        self._delivery_control: DeliveryControl = delivery_control
        self._tokens: DeliveryTokens = tokens
        self._body_cache: BodyCache = body_cache
        self._body_reads: BodyReads = body_reads
        self._codec: Codec = codec
        self._join_count: i64 = 0
        self.is_closing: bool = False  # consumers leave because the server shuts down

    # ---- turns and frames

    def on_frame_committed(self, frame: Frame) -> None:
        """Deliver the messages of a frame to consumers with capacity."""
        for partition in frame.partitions:
            assert isinstance(partition, Partition)
            for cursor in partition.cursors:
                self.dispatch_cursor(cursor)

    def end_turn(self) -> None:
        """Dispatch to the scheduled consumers, and redistribute messages of blocked cursors."""
        dispatch_schedule = self._dispatch_schedule
        while dispatch_schedule.has_work():
            for consumer in dispatch_schedule.take_consumers():
                consumer.is_scheduled = False
                self._dispatch_consumer(consumer)
                blocked_consumer = consumer.next_blocked_consumer()
                if blocked_consumer is not None:
                    dispatch_schedule.add(blocked_consumer)
            for group in dispatch_schedule.take_groups():
                group.is_redistribution_scheduled = False
                self._redistribute_blocked(group)

    def on_delay_over(self, partition: Partition, seq: i64) -> None:
        """Make a message whose delay is over available to all groups that have not settled it."""
        partition.end_delay(seq, self._state.now)
        partition.choose_if_out_of_order(seq)
        for cursor in partition.cursors:
            self._dispatch_schedule.add_cursor(cursor)

    # ---- leasing

    def dispatch_cursor(self, cursor: Cursor) -> None:
        """Lease messages of the cursor to its consumer, up to its quota of the prefetch.

        The remaining capacity goes to the consumer's other partitions first: a partition that took
        all would scan far for keys without active messages, and leave no capacity for the others.
        """
        consumer = cursor.consumer
        if consumer is None:
            return
        if cursor.helpers:
            self._dispatch_round_robin(cursor)
        count: i64 = len(consumer.cursors)
        if count <= 1:
            if self._dispatch_to(cursor, consumer, NO_LIMIT, False):
                self._mark_blocked(cursor, consumer)
            return
        quota: i64 = consumer.prefetch // count
        has_more = self._dispatch_to(cursor, consumer, quota, False)
        if cursor.in_flight >= quota:
            self._dispatch_schedule.add(consumer)
        elif has_more:
            self._mark_blocked(cursor, consumer)

    def _dispatch_round_robin(self, cursor: Cursor) -> None:
        """Distribute unordered messages to the consumer and its helpers, one by one."""
        candidates = [*cursor.helpers]
        if cursor.consumer is not None:
            candidates.append(cursor.consumer)
        full_count: i64 = 0
        while (
            full_count < len(candidates)
            and not cursor.is_waiting_for_body
            and cursor.has_unordered()
        ):
            in_flight_before = cursor.in_flight
            cursor.next_helper = (cursor.next_helper + 1) % len(candidates)
            candidate = candidates[cursor.next_helper]
            if candidate.has_capacity():
                full_count = 0
                self._dispatch_to(cursor, candidate, in_flight_before + 1, True)
                if cursor.in_flight == in_flight_before:
                    return  # no message is left, or a body is being read
            else:
                full_count += 1

    def _dispatch_to(
        self, cursor: Cursor, consumer: Consumer, max_in_flight: i64, unordered_only: bool
    ) -> bool:
        """Lease messages to `consumer` until `max_in_flight` of the cursor are leased.

        `unordered_only`: no ordered messages. Return whether the consumer had no capacity for
        messages that may be left.
        """
        if cursor.is_waiting_for_body:
            return False
        partition = cursor.partition
        admission = cursor.group.admission
        if admission.keys.is_active:
            admission.keys.now = self._state.now
        while cursor.in_flight < max_in_flight and admission.is_open:
            if not consumer.has_capacity():
                return cursor.has_more()
            seq = cursor.next_ready_unordered() if unordered_only else cursor.next_ready()
            if seq < 0:
                if admission.keys.is_active:
                    self._dispatch_schedule.wake_keys(cursor.group)
                if not unordered_only:
                    cursor.blocked_since = 0.0
                return False
            boxed_seq: object = int(seq)
            message = (
                self._body_cache.take(partition, boxed_seq) if partition.cached_bodies else None
            )
            if message is None:
                if cursor.prefetched_bodies:
                    message = self._body_cache.take_prefetched(cursor, boxed_seq)
                if message is None and cursor.awaited_seq == seq:
                    message = cursor.awaited_body
                    cursor.awaited_body = None
                    cursor.awaited_seq = -1
                if message is None:
                    cursor.requeue(seq, partition.priority(seq), cursor.key_hash_of(seq))
                    if not cursor.is_prefetching:
                        self._body_reads.request_for_delivery(cursor, seq)
                    return False
            if message.expires and float(message.expires) <= self._state.now:
                message.expires = partition.expires(seq)  # a command may have moved it
            if message.expires and float(message.expires) <= self._state.now:
                cursor.requeue(seq, partition.priority(seq), cursor.key_hash_of(seq))
                self._retention.expire_message(partition, seq, message)
                continue
            self._lease_message(cursor, seq, message, consumer)
        return False

    def _lease_message(
        self, cursor: Cursor, seq: i64, message: Message, consumer: Consumer
    ) -> None:
        group = cursor.group
        queue = group.queue
        now = self._state.now
        # The cursor has a lease for each message in flight and for each that failed. If all of them
        # are in flight, the chosen message has none: no lookup.
        lease = cursor.leases.get(int(seq)) if len(cursor.leases) > cursor.in_flight else None
        if lease is None:
            lease = cursor.add_lease(seq, now)
            queue.delivery_latency.add(now - float(message.enqueued_at_ms) / 1000.0)
        else:
            if lease.failures and now >= self._settlement.give_up_at(lease):
                lease.change(GIVE_UP)
                lease.message = message
                self._settlement.dead_letter(lease, "timeout", lease.description, True)
                group.admission.keys.on_withdrawn(cursor.location(seq))
                return
            group.redelivered += 1
        lease.message = message
        self._tokens.issue(lease, consumer, cursor.partition.pid)
        cursor.begin_delivery(lease, consumer, now)
        if queue.deadline_check_at == 0.0:
            self._timers.schedule_deadline_check(queue, lease.deadline)
        if message.id:
            group.index_by_message_id(lease, message.id)
        if group.admission.has_policies:
            self._delivery_control.on_delivered(lease)
        consumer.deliver(lease)

    def _dispatch_consumer(self, consumer: Consumer) -> None:
        """Lease messages of its partitions to a consumer: first up to their quotas, then more.

        The partitions take turns. There is a second round only if one of them has reached its quota
        in the first, and none waits for a body. With many queues in use, a look at a partition
        reads memory that is in no cache.
        """
        if consumer.was_offloaded and consumer.has_capacity():
            consumer.was_offloaded = False
            if consumer.group is not None:
                # The consumer gets partitions back.
                self._dispatch_schedule.rebalance(consumer.group)
        count: i64 = len(consumer.cursors)
        if count > 0:
            quota: i64 = NO_LIMIT if count == 1 else consumer.prefetch // count
            if self._dispatch_round(consumer, quota) and count > 1 and consumer.has_capacity():
                self._dispatch_round(consumer, NO_LIMIT)
        group = consumer.group
        if group is None or not group.can_redistribute():
            return
        if consumer.has_capacity():
            if group.blocked_cursors:
                group.is_saturated = False
                self._dispatch_schedule.add_group(group)
        else:
            for cursor in consumer.cursors:
                if cursor.has_more():
                    self._mark_blocked(cursor, consumer)

    def _dispatch_round(self, consumer: Consumer, max_in_flight: i64) -> bool:
        """Dispatch once from each of its partitions.

        Return whether one of them has reached `max_in_flight`, and none waits for a body.
        """
        cursors = consumer.cursors
        count: i64 = len(cursors)
        has_bodies = True
        is_limited = False
        step: i64 = 0
        while step < count and consumer.has_capacity():
            cursor = cursors[(consumer.next_cursor_index + step) % count]
            step += 1
            if cursor.has_more():
                self._dispatch_to(cursor, consumer, max_in_flight, False)
                if cursor.in_flight >= max_in_flight:
                    is_limited = True
            if cursor.is_waiting_for_body:
                has_bodies = False
        consumer.next_cursor_index = (consumer.next_cursor_index + step) % count
        return is_limited and has_bodies

    # ---- messages for which the consumer of their partition has no capacity

    def _mark_blocked(self, cursor: Cursor, consumer: Consumer) -> None:
        """Record that the partition's consumer has no capacity for deliverable messages."""
        group = cursor.group
        if not group.can_redistribute():
            return
        if consumer.full_since == 0.0:
            consumer.full_since = self._state.now
        if cursor.blocked_since == 0.0:
            cursor.blocked_since = self._state.now
        if not cursor.is_listed_blocked:
            cursor.is_listed_blocked = True
            group.blocked_cursors.append(cursor)
        if not group.is_saturated:
            self._dispatch_schedule.add_group(group)

    def _redistribute_blocked(self, group: Group) -> None:
        """Lease messages whose consumers have no capacity to members that have capacity."""
        if not group.admission.is_open:
            return  # `update_admission` schedules this again
        blocked = group.blocked_cursors
        group.blocked_cursors = []
        for cursor in blocked:
            cursor.is_listed_blocked = False
        for cursor in blocked:
            if self._redistribute_cursor(group, cursor) and not cursor.is_listed_blocked:
                cursor.is_listed_blocked = True
                group.blocked_cursors.append(cursor)

    def _redistribute_cursor(self, group: Group, cursor: Cursor) -> bool:
        """Redistribute messages of one partition; return whether some are left for later."""
        while cursor.consumer is not None and not cursor.is_waiting_for_body and cursor.has_more():
            if group.is_saturated:
                return True
            member = group.next_member_with_capacity()
            if member is None:
                group.is_saturated = True
                return True
            consumer = cursor.consumer
            if consumer is member or consumer.has_capacity():
                if not self._dispatch_to(cursor, consumer, NO_LIMIT, False):
                    return False
                continue
            in_flight_before = cursor.in_flight
            self._dispatch_to(cursor, member, in_flight_before + 1, True)
            if cursor.in_flight > in_flight_before or cursor.is_waiting_for_body:
                continue
            # The remaining messages are ordered: they wait for the consumer of the partition, or
            # the partition moves.
            if not cursor.finds_ready():
                self._dispatch_schedule.wake_keys(group)
                cursor.blocked_since = 0.0
                return False
            movable_at = _movable_at(group, cursor, consumer, member)
            if movable_at > self._state.now:
                self._timers.schedule_partition_move(group, movable_at)
                return True
            if self._is_stuck(group, consumer):
                consumer.was_offloaded = True
            group.move_partition(cursor, member)
            cursor.blocked_since = self._state.now
        if not cursor.has_more():
            cursor.blocked_since = 0.0
        return False

    def _is_stuck(self, group: Group, consumer: Consumer) -> bool:
        """Return whether the consumer took nothing, rather than too little, for a while."""
        return (
            consumer.full_since > 0.0
            and self._state.now - consumer.full_since >= group.queue.rules.rebalance_after
        )

    # ---- bodies read from the store

    def on_read_done(self, read: BodyRead, records: list[bytes | None]) -> None:
        """Process the result of a read. A damaged message is removed with a warning."""
        cursor = read.cursor
        partition = read.partition
        if cursor is not None:
            if read.purpose == FOR_PREFETCH:
                cursor.is_prefetching = False
            else:
                cursor.is_waiting_for_body = False
        is_awaited = read.purpose == FOR_DELIVERY
        for seq, address, data in zip(read.sequences, read.addresses, records, strict=True):
            current_address = partition.address(seq)
            if current_address == NO_ADDRESS:
                is_awaited = False
                continue
            message = None if data is None else decode_message(data, self._codec)
            if message is not None:
                self._on_body(read, seq, message, is_awaited)
            elif current_address == address:
                self._removal.drop_damaged(partition, seq)
            elif read.purpose == FOR_EXPIRY or read.purpose == FOR_DEAD_LETTER:
                self._body_reads.repeat(read, seq, current_address)
            is_awaited = False
        if cursor is not None:
            self.dispatch_cursor(cursor)
            self._dispatch_schedule.add_cursor(cursor)

    def _on_body(self, read: BodyRead, seq: i64, message: Message, is_awaited: bool) -> None:
        cursor = read.cursor
        lease = read.lease
        if read.purpose == FOR_EXPIRY:
            # A command may have moved the expiry during the read.
            if read.partition.has_expired(seq, self._state.now):
                self._retention.expire_message(read.partition, seq, message)
        elif read.purpose == FOR_DEAD_LETTER:
            if lease is not None:
                self._settlement.on_dead_letter_body(lease, message, read.reason)
        elif cursor is not None:
            if is_awaited:
                cursor.awaited_body = message
                cursor.awaited_seq = seq
            elif cursor.consumer is not None:
                self._body_cache.put_prefetched(cursor, seq, message)

    # ---- members

    def join(self, group: Group, consumer: Consumer) -> None:
        self._join_count += 1
        consumer.join_number = self._join_count
        consumer.active_at = self._state.now
        consumer.is_stalled = False
        consumer.is_paused = False
        consumer.full_since = 0.0
        consumer.was_offloaded = False
        self._tokens.prepare_consumer(consumer, group.gid)
        group.add_member(consumer)
        self._dispatch_schedule.rebalance(group)
        self._dispatch_schedule.add(consumer)

    def leave(self, consumer: Consumer) -> None:
        """Remove a consumer; its deliveries fail once, without a backoff, and go to other members.

        If the consumer leaves because the server shuts down, nothing fails: the client may settle
        its deliveries after the restart.
        """
        group = consumer.group
        if group is None:
            return
        group.remove_member(consumer)
        for cursor in group.cursors:
            if cursor.in_flight and not self.is_closing:
                for lease in [held for held in cursor.leases.values() if held.consumer is consumer]:
                    lease.description = "the consumer left the group"
                    self._settlement.fail_delivery(lease, 0.0, False)
        self._dispatch_schedule.rebalance(group)

    def set_identity(self, consumer: Consumer, identity: str) -> None:
        """Bind further deliveries to another identity: a session goes on as another user."""
        consumer.identity = identity
        if consumer.group is not None:
            self._tokens.prepare_consumer(consumer, consumer.group.gid)

    def set_paused(self, consumer: Consumer, is_paused: bool) -> None:
        """Mark a consumer as unreachable or reachable.

        Meanwhile other members serve its partitions; it keeps its leases.
        """
        consumer.is_paused = is_paused
        if not is_paused:
            consumer.is_stalled = False
            consumer.active_at = self._state.now
        if consumer.group is not None:
            self._dispatch_schedule.rebalance(consumer.group)
            self._dispatch_schedule.add(consumer)

    def set_prefetch(self, consumer: Consumer, prefetch: i64) -> None:
        """Change a consumer's prefetch.

        With 0 the consumer drains: other members get its partitions at once, it keeps its leases.
        """
        changes_draining = (consumer.prefetch == 0) != (prefetch == 0)
        consumer.prefetch = prefetch
        if changes_draining and consumer.group is not None:
            self._dispatch_schedule.rebalance(consumer.group)
        self._dispatch_schedule.add(consumer)


def _movable_at(group: Group, cursor: Cursor, consumer: Consumer, member: Consumer) -> float:
    """Return when the partition may move to `member`: messages have waited long enough.

    For a member of lower priority, the consumer must also have had no capacity for as long.
    """
    since = cursor.blocked_since
    if member.priority < consumer.priority and consumer.full_since > since:
        since = consumer.full_since
    return since + group.queue.rules.rebalance_after
