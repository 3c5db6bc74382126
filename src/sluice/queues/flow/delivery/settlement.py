"""Settlement: end deliveries by ack, nack with retry, release, deadline or dead letter.

It changes leases, cursors and counters and writes notes; it does not choose consumers (`dispatch`),
and does not decide which client may settle a delivery (`lease_lookup`).
"""

from __future__ import annotations

from collections.abc import Callable

from mypy_extensions import i64

from sluice.errors import StaleDelivery
from sluice.message import Message
from sluice.queues.bodies import BodyReads
from sluice.queues.flow.dead_letters import DeadLetters
from sluice.queues.flow.delivery.delivery_control import DeliveryControl
from sluice.queues.flow.delivery.delivery_history import (
    RecentHistory,
    record_delivery,
    record_unacked_delivery,
    store_released,
    write_events,
)
from sluice.queues.flow.delivery.delivery_tokens import DeliveryTokens
from sluice.queues.flow.delivery.key_holds import KeyHolds
from sluice.queues.flow.dispatch_schedule import DispatchSchedule
from sluice.queues.flow.removal import Removal
from sluice.queues.flow.retention import Retention
from sluice.queues.flow.timers import Timers
from sluice.queues.log import ACKED, DEAD, NoteWriter, notes
from sluice.queues.model import (
    AWAIT_RETRY,
    BACKOFF,
    DEAD_LETTERING,
    DUE,
    ENDED,
    FAIL,
    FORGET,
    LEASED,
    READ_BODY,
    READY,
    REJECT,
    RELEASE,
    SETTLE,
    Cursor,
    EngineState,
    Lease,
    Queue,
    RecentAcks,
    RowBudget,
    history,
)
from sluice.queues.names import format_message_id


class Settlement:
    """Ends deliveries. `draw` returns a random number in [0, 1), for the jitter of a backoff."""

    def __init__(
        self,
        state: EngineState,
        dispatch_schedule: DispatchSchedule,
        timers: Timers,
        delivery_control: DeliveryControl,
        removal: Removal,
        retention: Retention,
        dead_letters: DeadLetters,
        body_reads: BodyReads,
        tokens: DeliveryTokens,
        draw: Callable[[], float],
        ack_rows: RowBudget,
        key_holds: KeyHolds,
    ) -> None:
        self._state: EngineState = state
        self._dispatch_schedule: DispatchSchedule = dispatch_schedule
        self._timers: Timers = timers
        self._delivery_control: DeliveryControl = delivery_control
        self._removal: Removal = removal
        self._retention: Retention = retention
        self._dead_letters: DeadLetters = dead_letters
        self._body_reads: BodyReads = body_reads
        self._tokens: DeliveryTokens = tokens
        self._draw = draw
        self.recent_history: RecentHistory = RecentHistory()
        self._ack_rows: RowBudget = ack_rows
        self._key_holds: KeyHolds = key_holds
        self._remembers_acks: bool = ack_rows.rows_per_queue > 0

    # ---- commands of clients

    def ack(self, lease: Lease) -> None:
        """Settle a delivery as done.

        The last holder may also acknowledge a message that waits for its retry: the work was done,
        late.
        """
        if lease.state != ENDED:
            lease.cursor.group.queue.process_latency.add(self._state.now - lease.last_delivered_at)
            self.settle_lease(lease, ACKED)

    def nack(self, lease: Lease, delay_seconds: float, description: str) -> None:
        """Record a failure: retry after `delay_seconds`, or after the backoff if negative."""
        if lease.state != LEASED and 0 < lease.token_counter < self._tokens.first_counter:
            return  # the failure was counted in a previous run
        _check_leased(lease)
        lease.cursor.group.nacked += 1
        lease.description = description
        self.fail_delivery(lease, delay_seconds, True)

    def extend(self, lease: Lease) -> None:
        """Restart the deadline of a delivery that is still being processed."""
        _check_leased(lease)
        now = self._state.now
        queue = lease.cursor.group.queue
        queue.deadlines.remove(lease)
        lease.lease_started_at = now
        lease.deadline = now + queue.rules.delivery_timeout
        queue.deadlines.add(lease)
        consumer = lease.consumer
        if consumer is not None:
            consumer.active_at = now
            if consumer.is_stalled:
                self._dispatch_schedule.clear_stalled(lease.cursor.group, consumer.identity)

    # ---- end of a delivery

    def settle_lease(self, lease: Lease, outcome: i64) -> None:
        """Settle a message for its group, whether it is leased or waits for a retry."""
        cursor = lease.cursor
        seq = lease.seq
        if outcome == ACKED:
            self._record_ack(lease)
            if cursor.group.admission.has_policies:
                self._delivery_control.on_acked(lease)
        if lease.state == LEASED:
            consumer = lease.consumer
            was_full = consumer is not None and consumer.in_flight >= consumer.prefetch
            cursor.end_delivery(lease)
            self._dispatch_schedule.on_delivery_ended(lease, consumer, True)
            if consumer is not None and was_full:
                # A consumer that had capacity before has had its dispatch already.
                self._dispatch_schedule.add(consumer)
        elif outcome == ACKED:
            self._record_late_ack(lease)
        cursor.deactivate(lease)
        cursor.remove_lease(lease, SETTLE)
        cursor.log_settlement(seq, outcome, self._state.frame_builder)
        self._removal.apply_settlement(cursor, seq, outcome)
        self._dispatch_schedule.on_settled(cursor)

    def _record_ack(self, lease: Lease) -> None:
        """Record an acknowledgement, and the history of a message that has one."""
        if self._remembers_acks:
            cursor = lease.cursor
            group = cursor.group
            partition = cursor.partition
            recent_acks = group.queue.recent_acks
            if recent_acks is None:
                recent_acks = RecentAcks(self._ack_rows)
                group.queue.recent_acks = recent_acks
            message = lease.message
            recent_acks.add(
                partition.pid,
                lease.seq,
                group.gid,
                lease.holder,
                lease.publisher_message_id,
                lease.attempt,
                partition.arrival_ms(lease.seq) if message is None else message.enqueued_at_ms,
                i64(lease.last_delivered_at * 1000.0),
                i64(self._state.now * 1000.0),
            )
        if lease.history is not None or (lease.message is not None and lease.message.headers):
            self.recent_history.record_ack(
                lease, message_id_of(lease).decode("utf-8", "replace"), self._state.now
            )

    def _record_late_ack(self, lease: Lease) -> None:
        """Record an ack of the last holder after the deadline: it counts, the work is done."""
        for consumer in lease.cursor.group.consumers:
            if consumer.identity == lease.holder:
                consumer.settled_at = self._state.now

    # ---- failure, retry and release

    def give_up_at(self, lease: Lease) -> float:
        """Return when `total_timeout` is over."""
        return self._timeout_started_at(lease) + lease.cursor.group.queue.rules.total_timeout

    def timeout_spent(self, lease: Lease) -> float:
        """Return the seconds of `total_timeout` that a message has used since its first attempt."""
        return self._state.now - self._timeout_started_at(lease)

    def _timeout_started_at(self, lease: Lease) -> float:
        """Return the time from which `total_timeout` counts: the first attempt.

        For a message that was tried before this process started, it is the start, minus the time
        that was used up to its last retry note or the snapshot. Dates of a previous run do not
        count: the clock may have jumped, and no client could work on the message while the broker
        was down.
        """
        if lease.first_delivered_at > self._state.started_at:
            return lease.first_delivered_at
        return self._state.started_at - lease.spent_before_start

    def fail_delivery(self, lease: Lease, delay_seconds: float, by_consumer: bool) -> None:
        """Count a failure: retry after `delay_seconds` (negative: the backoff), or dead-letter."""
        cursor = lease.cursor
        queue = cursor.group.queue
        rules = queue.rules
        event_kind = (
            history.NACKED
            if by_consumer
            else history.TIMED_OUT
            if delay_seconds < 0.0
            else history.VANISHED
        )
        if self._report_failure(lease, event_kind):
            lease.failures += 1
        event_count = record_unacked_delivery(lease, event_kind, self._state.now, lease.description)
        if lease.failures > rules.max_retries:
            self.dead_letter(lease, "max_retries", lease.description, by_consumer)
            return
        deadline = self.give_up_at(lease)
        if self._state.now >= deadline:
            self.dead_letter(lease, "timeout", lease.description, by_consumer)
            return
        message = lease.message
        self._end_delivery(lease, by_consumer)
        if delay_seconds < 0.0:
            delay_seconds = rules.backoff_seconds(max(lease.failures, 1), self._draw())
        queue.retried += 1
        lease.retry_at = self._state.now + delay_seconds
        if lease.retry_at > deadline:
            lease.retry_at = deadline
        lease.message = None
        lease.change(FAIL)
        if lease.failures:
            self._write_retry_note(lease, event_count)
        if self._expire_returned(cursor, lease.seq, message):
            return  # perhaps after a read of its body, which a nack does not wait for
        if delay_seconds > 0.0:
            self._timers.schedule_retry(lease, lease.retry_at)
        else:
            self._make_ready(lease, DUE)

    def _end_delivery(self, lease: Lease, by_consumer: bool) -> None:
        """Take a lease away from its consumer, which then has capacity for another one."""
        consumer = lease.consumer
        lease.cursor.end_delivery(lease)
        self._dispatch_schedule.on_delivery_ended(lease, consumer, by_consumer)
        if consumer is not None:
            self._dispatch_schedule.add(consumer)

    def _report_failure(self, lease: Lease, event_kind: str) -> bool:
        """Report a failure to the breaker; return whether it counts against `max_retries`."""
        if not lease.cursor.group.admission.has_policies or event_kind == history.VANISHED:
            return True
        return self._delivery_control.on_failed(lease)

    def expire_leases(self, queue: Queue) -> None:
        """Fail deliveries whose deadline has passed, and mark inactive consumers as stalled."""
        lease = queue.deadlines.first
        while lease is not None and lease.deadline <= self._state.now:
            consumer = lease.consumer
            is_stalling = (
                consumer is not None
                and consumer.settled_at <= lease.lease_started_at
                and consumer.active_at <= lease.lease_started_at
            )
            if consumer is not None:
                consumer.on_lease_revoked(lease)
            lease.description = f"not settled within {queue.rules.delivery_timeout:g} s"
            self.fail_delivery(lease, -1.0, False)
            if (
                is_stalling
                and consumer is not None
                and not consumer.is_stalled
                and consumer.group is not None
            ):
                consumer.is_stalled = True
                self._dispatch_schedule.rebalance(consumer.group)
            lease = queue.deadlines.first
        if lease is not None:
            self._timers.schedule_deadline_check(queue, lease.deadline)

    def _write_retry_note(self, lease: Lease, event_count: i64) -> None:
        note = NoteWriter(notes.RETRY)
        note.write_int(lease.cursor.group.gid)
        note.write_int(lease.cursor.partition.pid)
        write_retry(note, lease)
        write_events(note, lease.history, event_count)
        note.write_int(lease.token_counter)
        note.write_seconds(self.timeout_spent(lease))
        self._state.frame_builder.add_note(note, self._state.now_ms(), False)

    def _make_ready(self, lease: Lease, event: i64) -> None:
        """Make a failed message available for leasing again, until its total timeout."""
        cursor = lease.cursor
        lease.change(event)
        cursor.requeue(lease.seq, cursor.partition.priority(lease.seq), lease.key_hash)
        self._timers.schedule_retry(lease, self.give_up_at(lease))
        self._dispatch_schedule.add_cursor(cursor)

    def on_retry_due(self, lease: Lease) -> None:
        """Handle a timer of a failed message: its retry, or the end of its total timeout."""
        if lease.state != BACKOFF and (lease.state != READY or not lease.failures):
            return
        if self._state.now >= self.give_up_at(lease):
            self.dead_letter(lease, "timeout", lease.description, True)
        elif lease.state == BACKOFF:
            self._make_ready(lease, DUE)

    def reschedule_retry(self, lease: Lease, due_at: float) -> None:
        """Retry a failed message at another time, or at once. No consumer holds it."""
        if lease.state != BACKOFF and lease.state != READY:
            return  # its dead letter is being written
        if due_at <= self._state.now:
            lease.retry_at = self._state.now
            if lease.state == BACKOFF:
                self._make_ready(lease, DUE)
            return
        if lease.state == READY:
            lease.cursor.suspend(lease.seq)
        lease.change(AWAIT_RETRY)
        lease.retry_at = due_at
        self._timers.schedule_retry(lease, due_at)

    def release(self, lease: Lease) -> None:
        """Return an unused delivery: not a failure.

        A message that has never failed is as if it had never been delivered.
        """
        _check_leased(lease)
        cursor = lease.cursor
        message = lease.message
        event_count = record_unacked_delivery(lease, history.RELEASED, self._state.now, "")
        self._write_release_note(lease, event_count)
        self._end_delivery(lease, True)
        if lease.failures:
            lease.message = None
            self._make_ready(lease, RELEASE)
            self._expire_returned(cursor, lease.seq, message)
            return
        priority = cursor.partition.priority(lease.seq)
        if lease.history is not None:
            store_released(cursor, lease.seq, lease.history)
        cursor.remove_lease(lease, FORGET)
        cursor.requeue(lease.seq, priority, lease.key_hash)
        self._expire_returned(cursor, lease.seq, message)
        self._dispatch_schedule.add_cursor(cursor)

    def _expire_returned(self, cursor: Cursor, seq: i64, message: Message | None) -> bool:
        """Remove a returned message if it expired meanwhile; return whether it did.

        The search for expired messages skipped it because a client held it.
        """
        has_expired = cursor.partition.has_expired(seq, self._state.now)
        if has_expired:
            self._retention.read_or_expire(cursor.partition, seq, message)
        return has_expired

    def _write_release_note(self, lease: Lease, event_count: i64) -> None:
        note = NoteWriter(notes.DELIVERY_RELEASED)
        note.write_int(lease.cursor.group.gid)
        note.write_int(lease.cursor.partition.pid)
        note.write_int(lease.seq)
        write_events(note, lease.history, event_count)
        self._state.frame_builder.add_note(note, self._state.now_ms(), False)

    # ---- dead letters

    def dead_letter(self, lease: Lease, reason: str, description: str, by_consumer: bool) -> None:
        """Dead-letter a message in one frame with its settlement; read its body first if needed."""
        if lease.state == ENDED or lease.state == DEAD_LETTERING:
            raise StaleDelivery(message_id_of(lease).decode("utf-8", "replace"))
        message = lease.message
        if message is None:
            message = lease.cursor.partition.cached_bodies.get(int(lease.seq))
        if lease.state == LEASED:
            lease.ended_by_dead_letter = True
            lease.dead_after_nack = by_consumer and reason in ("max_retries", "timeout")
            if reason != "max_retries" and reason != "timeout":
                record_delivery(lease)  # with the other two, `fail_delivery` has recorded it
            self._end_delivery(lease, by_consumer)
            lease.change(REJECT)
        if message is not None:
            self._write_dead_letter(lease, message, reason, description)
            return
        if lease.state == READY:
            lease.cursor.suspend(lease.seq)
        lease.change(READ_BODY)
        lease.description = description
        self._body_reads.request_for_dead_letter(lease, reason)

    def on_dead_letter_body(self, lease: Lease, message: Message, reason: str) -> None:
        """Complete a dead letter whose body was read."""
        if lease.state == DEAD_LETTERING:
            self._write_dead_letter(lease, message, reason, lease.description)

    def _write_dead_letter(
        self, lease: Lease, message: Message, reason: str, description: str
    ) -> None:
        location = self._dead_letters.write_failed(lease, message, reason, description)
        if location is not None and lease.cursor.group.queue.rules.holds_keys and lease.key_hash:
            self._key_holds.hold(lease, message, location)
        self.settle_lease(lease, DEAD)


def message_id_of(lease: Lease) -> bytes:
    if lease.publisher_message_id:
        return lease.publisher_message_id
    message = lease.message
    if message is not None and message.id:
        return message.id
    return format_message_id(lease.cursor.partition.pid, lease.seq)


def _check_leased(lease: Lease) -> None:
    """Raise StaleDelivery unless a client holds the lease, as failing or extending requires."""
    if lease.state != LEASED:
        raise StaleDelivery(message_id_of(lease).decode("utf-8", "replace"))


def write_retry(note: NoteWriter, lease: Lease) -> None:
    note.write_int(lease.seq)
    note.write_int(lease.failures)
    note.write_seconds(lease.retry_at)
    note.write_seconds(lease.first_delivered_at)
    note.write_seconds(lease.last_delivered_at)
    note.write_text(lease.description)
