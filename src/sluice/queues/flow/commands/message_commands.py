"""Commands on messages that are not delivered: find a message by its id, cancel or reschedule it.

A command concerns all groups of the queue. It is refused, and changes nothing, while a consumer of
any group holds the message: its work may be done already. The note of a command is synced, as the
acknowledgement of the command promises its effect.
"""

from __future__ import annotations

from mypy_extensions import i64

from sluice.errors import AlreadyDelivered, InvalidQueueConfig, UnknownMessage
from sluice.message import DELAYED, MAX_EXPIRES, PRIORITY_MASK
from sluice.queues.flow.appender import Appender
from sluice.queues.flow.dead_letters import format_iso_time
from sluice.queues.flow.delivery import Settlement
from sluice.queues.flow.dispatch_schedule import DispatchSchedule
from sluice.queues.flow.removal import Removal
from sluice.queues.flow.timers import Timers
from sluice.queues.log import CANCELLED, NoteReader, NoteWriter, notes
from sluice.queues.model import (
    LEASED,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    EngineState,
    Partition,
    Queue,
    history,
)
from sluice.queues.names import parse_message_id


class MessageCommands:
    def __init__(
        self,
        state: EngineState,
        dispatch_schedule: DispatchSchedule,
        timers: Timers,
        removal: Removal,
        appender: Appender,
        settlement: Settlement,
    ) -> None:
        self._state: EngineState = state
        self._dispatch_schedule: DispatchSchedule = dispatch_schedule
        self._timers: Timers = timers
        self._removal: Removal = removal
        self._appender: Appender = appender
        self._settlement: Settlement = settlement

    # ---- finding

    def find(self, queue: Queue, message_id: bytes) -> tuple[Partition, int] | None:
        """Return where the message is, without reading any; None: not known, but perhaps stored.

        A generated id has the location. An id of the publisher is known while the message has a
        delay or a failed delivery.
        """
        pid, seq = parse_message_id(message_id)
        partition = self._state.partitions.get(int(pid))
        if partition is not None and partition.queue is queue and partition.holds(seq):
            return partition, int(seq)
        for group in queue.groups.values():
            lease = group.leases_by_message_id.get(message_id)
            if lease is not None:
                return lease.cursor.partition, int(lease.seq)
        location = queue.delayed_ids.get(message_id, -1)
        partition = self._state.partitions.get(location >> SEQUENCE_BITS)
        if location < 0 or partition is None or not partition.holds(location & SEQUENCE_MASK):
            return None
        return partition, location & SEQUENCE_MASK

    # ---- cancelling

    def cancel(self, partition: Partition, seq: i64, message_id: bytes, by: str) -> None:
        """Remove a message that waits, is delayed or waits for a retry, for all groups.

        It is never delivered afterward.
        """
        self._check_unheld(partition, seq, message_id)
        self._record(partition.queue, message_id, history.CANCELLED, by, "")
        self._state.frame_builder.request_sync()
        self._removal.remove_for_all_groups(partition, seq, CANCELLED)

    # ---- rescheduling

    def reschedule(
        self, partition: Partition, seq: i64, message_id: bytes, due_at: float, by: str
    ) -> None:
        """Deliver a message at another time: now, if `due_at` is not in the future.

        A message that waits, or has a delay, is delayed until then and loses its place in the
        order. A failed message is retried then.
        """
        self._check_unheld(partition, seq, message_id)
        if due_at < self._state.now:
            due_at = self._state.now
        self._check_timeouts(partition, seq, message_id, due_at)
        expires = self._expiry_for(partition, seq, message_id, due_at)
        due_ms: i64 = int(due_at * 1000.0)
        note = NoteWriter(notes.RESCHEDULED)
        note.write_int(partition.pid)
        note.write_int(seq)
        note.write_int(due_ms)
        note.write_int(expires)
        self._state.frame_builder.add_note(note, self._state.now_ms(), True)
        partition.reschedule(seq, due_ms, expires)
        if expires:
            self._timers.schedule_expiry(partition, expires)
        self._record(
            partition.queue, message_id, history.RESCHEDULED, by, f"to {format_iso_time(due_at)}"
        )
        if due_at > self._state.now:
            self._delay(partition, seq, float(due_ms) / 1000.0)
        else:
            self._promote(partition, seq)
        for cursor in partition.cursors:
            lease = cursor.leases.get(int(seq))
            if lease is not None:
                self._settlement.reschedule_retry(lease, due_at)

    def _delay(self, partition: Partition, seq: i64, due_at: float) -> None:
        """Let no group choose the message until it is due."""
        is_out_of_order = partition.flags(seq) & (DELAYED | PRIORITY_MASK) != 0
        was_delayed = int(seq) in partition.delayed_seqs
        partition.mark_delayed(seq)
        if seq >= partition.committed_end:
            # One with a delay or a priority is already among those to choose.
            if not is_out_of_order:
                self._appender.offer_after_commit(partition, seq)
            return
        self._timers.schedule_delayed(partition, seq, due_at)
        if was_delayed:
            return  # neither chosen nor parked
        for cursor in partition.cursors:
            if int(seq) not in cursor.leases:
                cursor.withdraw_until_due(seq, is_out_of_order)
                self._dispatch_schedule.add_cursor(cursor)

    def _promote(self, partition: Partition, seq: i64) -> None:
        """End the delay of a message, if it has one."""
        if int(seq) in partition.delayed_seqs:
            partition.delayed_seqs.discard(int(seq))
            partition.end_delay(seq, self._state.now)
            partition.choose_if_out_of_order(seq)
            for cursor in partition.cursors:
                self._dispatch_schedule.add_cursor(cursor)

    def _check_timeouts(
        self, partition: Partition, seq: i64, message_id: bytes, due_at: float
    ) -> None:
        """Refuse a time after which a group would give up the message instead of retrying it."""
        for cursor in partition.cursors:
            lease = cursor.leases.get(int(seq))
            if lease is not None and lease.failures:
                gives_up_at = self._settlement.give_up_at(lease)
                if due_at >= gives_up_at:
                    raise InvalidQueueConfig(
                        f"group {cursor.group.name!r} gives up message {_show(message_id)!r} at "
                        f"{format_iso_time(gives_up_at)}, before that time",
                        "Choose an earlier time, or raise retry_policy.total_timeout",
                    )

    def _expiry_for(self, partition: Partition, seq: i64, message_id: bytes, due_at: float) -> i64:
        """Return the expiry of a message: if it would expire before it is due, a new one."""
        expires = partition.expires(seq)
        if expires == 0 or due_at < float(expires):
            return expires
        time_to_live = partition.queue.rules.message_ttl
        if time_to_live <= 0.0:
            raise InvalidQueueConfig(
                f"message {_show(message_id)!r} expires at {format_iso_time(float(expires))}, "
                "before that time",
                "Choose an earlier time, or publish the message again with another expiry",
            )
        return min(int(due_at + time_to_live + 0.999), MAX_EXPIRES)

    # ---- both

    def _record(self, queue: Queue, message_id: bytes, kind: str, by: str, detail: str) -> None:
        """Remember the command for the history of the message."""
        event = history.HistoryEvent(self._state.now, kind, "", by, 0, detail)
        self._settlement.recent_history.record(queue.name, _show(message_id), [event])

    def _check_unheld(self, partition: Partition, seq: i64, message_id: bytes) -> None:
        """Refuse a message that a consumer holds, or that no group has to settle."""
        queue = partition.queue
        shown_id = _show(message_id)
        if queue.rules.is_compacted:
            raise InvalidQueueConfig(
                f"queue {queue.name!r} is compacted: a message is the value of its key",
                "Publish an empty payload to delete the key, or another value to replace it",
            )
        if not partition.holds(seq) or not partition.is_in_depth(seq):
            raise UnknownMessage(queue.name, shown_id)
        for cursor in partition.cursors:
            lease = cursor.leases.get(int(seq))
            if lease is not None and lease.state == LEASED:
                raise AlreadyDelivered(shown_id, cursor.group.name, lease.holder_client_id())


def _show(message_id: bytes) -> str:
    return message_id.decode("utf-8", "replace")


def load_rescheduled(note: NoteReader, partitions: dict[int, Partition]) -> None:
    """Repeat a command of a previous run; timers are set when recovery ends."""
    partition = partitions.get(int(note.read_int()))
    seq = note.read_int()
    due_ms = note.read_int()
    expires = note.read_int()
    if partition is None or not partition.holds(seq):
        return
    partition.reschedule(seq, due_ms, expires)
    for cursor in partition.cursors:
        lease = cursor.leases.get(int(seq))
        if lease is not None:
            lease.retry_at = float(due_ms) / 1000.0


def write_rescheduled(out: NoteWriter, partition: Partition) -> None:
    """Write the stored messages whose time a command has changed, and forget the others."""
    if partition.rescheduled:
        partition.rescheduled = {
            seq: due_ms for seq, due_ms in partition.rescheduled.items() if partition.holds(seq)
        }
    out.write_int(len(partition.rescheduled))
    for seq, due_ms in partition.rescheduled.items():
        out.write_int(seq)
        out.write_int(due_ms)
        out.write_int(partition.expires(seq))
