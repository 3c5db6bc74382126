"""Settlement of deliveries: ack, nack with retry, release, dead letter.

It changes leases, cursors and counters and writes notes; it does not choose consumers (`dispatch`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.errors import StaleDelivery, UnknownDelivery
from sluice.message import Message
from sluice.queues.bodies.body_reads import FOR_DEAD_LETTER, BodyRead
from sluice.queues.flow import dead_letters, history
from sluice.queues.flow.delivery_tokens import DeliveryToken
from sluice.queues.flow.removal import end_lease, expire_if_due, settle_message
from sluice.queues.log import notes
from sluice.queues.log.notes import ACKED, DEAD, NoteWriter
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import (
    DEAD_LETTERING,
    LEASED,
    READY,
    SETTLED,
    WAITING,
    Lease,
)
from sluice.queues.model.group import Group
from sluice.queues.names import format_message_id, parse_message_id

if TYPE_CHECKING:
    from sluice.queues.engine import Engine


# ---- permission to settle


def find_lease(
    engine: Engine, group: Group, message_id: bytes, token: DeliveryToken, identity: str
) -> Lease:
    """Return the lease that a client wants to settle, if the client may still settle it."""
    found: Lease | None = None
    lease = group.leases_by_message_id.get(message_id) if group.leases_by_message_id else None
    while lease is not None:
        if _may_settle(engine, lease, token, identity):
            return _record_activity(engine, lease, identity)
        found = lease
        lease = lease.next_same_id
    pid, seq = parse_message_id(message_id)
    partition = engine.partitions.get(int(pid))
    if partition is not None and partition.queue is group.queue:
        lease = group.cursors[partition.number].leases.get(int(seq))
        if lease is not None:
            if _may_settle(engine, lease, token, identity):
                return _record_activity(engine, lease, identity)
            found = lease
    clear_stalled(engine, group, identity)
    if found is None:
        raise UnknownDelivery(message_id.decode("utf-8", "replace"))
    raise StaleDelivery(message_id.decode("utf-8", "replace"))


def _may_settle(engine: Engine, lease: Lease, token: DeliveryToken, identity: str) -> bool:
    """Return whether the token matches or, without a token, `identity` was the last holder.

    An empty `identity` is an operator, who may settle every delivery of the group. The tag of a
    lease from an earlier run is not known: then the token must be one that was issued to
    `identity`.
    """
    if token.counter:
        if lease.token_counter != token.counter:
            return False
        if lease.token_tag:
            return lease.token_tag == token.tag
        cursor = lease.cursor
        return engine.tokens.is_valid(
            token, cursor.group.gid, identity, cursor.partition.pid, lease.seq
        )
    return not identity or lease.holder == identity


def _record_activity(engine: Engine, lease: Lease, identity: str) -> Lease:
    if lease.state != LEASED:
        clear_stalled(engine, lease.cursor.group, identity)
    return lease


def clear_stalled(engine: Engine, group: Group, identity: str) -> None:
    """Mark a consumer as no longer stalled: it settled something, even if too late."""
    for consumer in group.consumers:
        if consumer.is_stalled and consumer.identity == identity:
            consumer.is_stalled = False
            consumer.active_at = engine.now
            engine.rebalance(group)
            return


def message_id_of(lease: Lease) -> bytes:
    if lease.publisher_message_id:
        return lease.publisher_message_id
    message = lease.message
    if message is not None and message.id:
        return message.id
    return format_message_id(lease.cursor.partition.pid, lease.seq)


# ---- ack


def finish_delivery(engine: Engine, lease: Lease, outcome: i64) -> None:
    cursor = lease.cursor
    seq = lease.seq
    if outcome == ACKED and (
        lease.history is not None or (lease.message is not None and lease.message.headers)
    ):
        engine.recent_history.record_ack(
            lease, message_id_of(lease).decode("utf-8", "replace"), engine.now
        )
    if lease.state == LEASED:
        consumer = lease.consumer
        was_full = consumer is not None and consumer.in_flight >= consumer.prefetch
        unassign_without_dispatch(engine, lease, True)
        if consumer is not None and was_full:
            # A consumer with capacity was already offered all messages.
            engine.schedule_dispatch(consumer)
    elif outcome == ACKED:
        _record_late_ack(engine, lease)
    cursor.end_active(lease)
    end_lease(lease)
    cursor.log_settlement(seq, outcome, engine.frame_builder)
    settle_message(engine, cursor, seq, outcome)
    engine.after_settle(cursor)


def _record_late_ack(engine: Engine, lease: Lease) -> None:
    """Record an ack of the last holder after the deadline. It counts, because the work is done."""
    for consumer in lease.cursor.group.consumers:
        if consumer.identity == lease.holder:
            consumer.settled_at = engine.now


def unassign(engine: Engine, lease: Lease, by_consumer: bool) -> None:
    """Take a lease away from its consumer and schedule a dispatch to that consumer.

    `by_consumer`: the consumer itself ended the delivery.
    """
    consumer = lease.consumer
    unassign_without_dispatch(engine, lease, by_consumer)
    if consumer is not None:
        engine.schedule_dispatch(consumer)


def unassign_without_dispatch(engine: Engine, lease: Lease, by_consumer: bool) -> None:
    """Take a lease away from its consumer."""
    consumer = lease.consumer
    lease.consumer = None
    lease.cursor.in_flight -= 1
    lease.cursor.group.queue.deadlines.remove(lease)
    if consumer is None:
        return
    consumer.in_flight -= 1
    if by_consumer:
        consumer.settled_at = engine.now
        if consumer.is_stalled:
            consumer.is_stalled = False
            if consumer.group is not None:
                engine.rebalance(consumer.group)


# ---- failure, retry and release


def check_leased(lease: Lease) -> None:
    """Raise StaleDelivery unless a client holds the lease, as failing or extending requires."""
    if lease.state != LEASED:
        raise StaleDelivery(message_id_of(lease).decode("utf-8", "replace"))


def give_up_at(engine: Engine, lease: Lease) -> float:
    """Return when `total_timeout` is over."""
    return _timeout_started_at(engine, lease) + lease.cursor.group.queue.rules.total_timeout


def timeout_spent(engine: Engine, lease: Lease) -> float:
    """Return the seconds of `total_timeout` that a message has used since its first attempt."""
    return engine.now - _timeout_started_at(engine, lease)


def _timeout_started_at(engine: Engine, lease: Lease) -> float:
    """Return the time from which `total_timeout` counts: the first attempt.

    For a message that was tried before this process started, it is the start, minus the time that
    was used up to its last retry note or the snapshot. Dates of a previous run do not count: the
    clock may have jumped, and no client could work on the message while the broker was down.
    """
    if lease.first_delivered_at > engine.started_at:
        return lease.first_delivered_at
    return engine.started_at - lease.spent_before_start


def fail_delivery(engine: Engine, lease: Lease, delay_seconds: float, by_consumer: bool) -> None:
    """Count a failure: retry after `delay_seconds` (negative: the backoff), or dead-letter."""
    cursor = lease.cursor
    queue = cursor.group.queue
    rules = queue.rules
    lease.failures += 1
    event_kind = (
        history.NACKED
        if by_consumer
        else history.TIMED_OUT
        if delay_seconds < 0.0
        else history.VANISHED
    )
    event_count = history.record_end(lease, event_kind, engine.now, lease.description)
    if lease.failures > rules.max_retries:
        dead_letter(engine, lease, "max_retries", lease.description, by_consumer)
        return
    deadline = give_up_at(engine, lease)
    if engine.now >= deadline:
        dead_letter(engine, lease, "timeout", lease.description, by_consumer)
        return
    message = lease.message
    unassign(engine, lease, by_consumer)
    if delay_seconds < 0.0:
        delay_seconds = rules.backoff_seconds(lease.failures, engine.draw())
    queue.retried += 1
    lease.retry_at = engine.now + delay_seconds
    if lease.retry_at > deadline:
        lease.retry_at = deadline
    lease.message = None
    lease.state = WAITING
    if expire_if_due(engine, cursor.partition, lease.seq, message):
        return
    _write_retry_note(engine, lease, event_count)
    if delay_seconds > 0.0:
        engine.timers.schedule_retry(lease, lease.retry_at)
    else:
        make_ready(engine, lease)


def _write_retry_note(engine: Engine, lease: Lease, event_count: i64) -> None:
    note = NoteWriter(notes.RETRY)
    note.write_int(lease.cursor.group.gid)
    note.write_int(lease.cursor.partition.pid)
    write_retry(note, lease)
    history.write_events(note, lease.history, event_count)
    note.write_int(lease.token_counter)
    note.write_seconds(timeout_spent(engine, lease))
    engine.frame_builder.add_note(note.to_bytes(), int(engine.now * 1000.0), False)


def write_retry(note: NoteWriter, lease: Lease) -> None:
    note.write_int(lease.seq)
    note.write_int(lease.failures)
    note.write_seconds(lease.retry_at)
    note.write_seconds(lease.first_delivered_at)
    note.write_seconds(lease.last_delivered_at)
    note.write_text(lease.description)


def make_ready(engine: Engine, lease: Lease) -> None:
    """Make a failed message available for leasing again, until its total timeout."""
    cursor = lease.cursor
    lease.state = READY
    cursor.requeue(lease.seq, cursor.partition.priority(lease.seq), lease.key_hash)
    engine.timers.schedule_retry(lease, give_up_at(engine, lease))
    if cursor.consumer is not None:
        engine.schedule_dispatch(cursor.consumer)


def on_retry_due(engine: Engine, lease: Lease, due_at: float) -> None:
    """Handle a timer of a failed message: its retry, or the end of its total timeout."""
    if lease.state == WAITING:
        if lease.retry_at != due_at:
            return
        if engine.now >= give_up_at(engine, lease):
            dead_letter(engine, lease, "timeout", lease.description, True)
        else:
            make_ready(engine, lease)
    elif lease.state == READY and lease.failures:
        if engine.now >= give_up_at(engine, lease):
            dead_letter(engine, lease, "timeout", lease.description, True)


def release_delivery(engine: Engine, lease: Lease) -> None:
    """Release an unused delivery: not a failure.

    A message that has never failed is as if it had never been delivered.
    """
    cursor = lease.cursor
    message = lease.message
    _write_release_note(engine, lease, history.record_end(lease, history.RELEASED, engine.now, ""))
    unassign(engine, lease, True)
    if lease.failures:
        lease.message = None
        make_ready(engine, lease)
        expire_if_due(engine, cursor.partition, lease.seq, message)
        return
    priority = cursor.partition.priority(lease.seq)
    if lease.history is not None:
        history.store_released(cursor, lease.seq, lease.history)
    end_lease(lease)
    cursor.requeue(lease.seq, priority, lease.key_hash)
    expire_if_due(engine, cursor.partition, lease.seq, message)
    if cursor.consumer is not None:
        engine.schedule_dispatch(cursor.consumer)


def _write_release_note(engine: Engine, lease: Lease, event_count: i64) -> None:
    note = NoteWriter(notes.DELIVERY_RELEASED)
    note.write_int(lease.cursor.group.gid)
    note.write_int(lease.cursor.partition.pid)
    note.write_int(lease.seq)
    history.write_events(note, lease.history, event_count)
    engine.frame_builder.add_note(note.to_bytes(), int(engine.now * 1000.0), False)


# ---- dead letters


def dead_letter(
    engine: Engine, lease: Lease, reason: str, description: str, by_consumer: bool
) -> None:
    """Dead-letter a message, in one frame with its settlement; read its body first if needed."""
    if lease.state == SETTLED or lease.state == DEAD_LETTERING:
        raise StaleDelivery(message_id_of(lease).decode("utf-8", "replace"))
    message = lease.message
    if message is None:
        message = lease.cursor.partition.cached_bodies.get(int(lease.seq))
    if lease.state == LEASED:
        if reason != "max_retries" and reason != "timeout":
            history.record_delivery(lease)  # for the other reasons, the failure was recorded before
        unassign(engine, lease, by_consumer)
        lease.state = WAITING
    if message is not None:
        _finish_dead(engine, lease, message, reason, description)
        return
    if lease.state == READY:
        lease.cursor.suspend(lease.seq)
    lease.state = DEAD_LETTERING
    lease.description = description
    request_body(engine, lease, reason)


def request_body(engine: Engine, lease: Lease, reason: str) -> None:
    partition = lease.cursor.partition
    read = BodyRead(
        FOR_DEAD_LETTER, partition, [int(lease.seq)], [int(partition.address(lease.seq))]
    )
    read.lease = lease
    read.reason = reason
    engine.reads.append(read)


def on_dead_letter_body(engine: Engine, lease: Lease, message: Message, reason: str) -> None:
    if lease.state == DEAD_LETTERING:
        _finish_dead(engine, lease, message, reason, lease.description)


def _finish_dead(
    engine: Engine, lease: Lease, message: Message, reason: str, description: str
) -> None:
    dead_letters.write_dead_letter(engine, lease, message, reason, description)
    finish_delivery(engine, lease, DEAD)


# ---- partition gates


def check_gates(engine: Engine, cursor: Cursor) -> None:
    """Open gates after a cursor's low watermark has reached a gate boundary."""
    queue = cursor.group.queue
    cursor.update_gate_watermark()
    for other in cursor.group.cursors:
        other.open_gates()
        if other.consumer is not None:
            engine.schedule_dispatch(other.consumer)
    while queue.partition_gates:
        for number, boundary_seq in enumerate(queue.partition_gates[0].boundary_seqs):
            if queue.partitions[number].first_live(0) < boundary_seq:
                return
        queue.partition_gates.pop(0)
