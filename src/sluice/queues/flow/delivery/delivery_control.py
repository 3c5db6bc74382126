"""Delivery control: pause and resume, and what the policies of `model.admission` lead to.

It writes the notes that let pauses and open breakers survive a restart, sets the timer that opens a
group again, and schedules dispatch when it opens. A rate limit and the failures in a row are not
stored: after a restart, the bucket is full and the count starts over.
"""

from __future__ import annotations

from sluice.queues.flow.dispatch_schedule import DispatchSchedule
from sluice.queues.flow.timers import Timers
from sluice.queues.log import NoteReader, NoteWriter, notes
from sluice.queues.model import (
    CLOSED,
    NOT_PAUSED,
    Admission,
    EngineState,
    Group,
    Lease,
    Pause,
    Queue,
)


class DeliveryControl:
    def __init__(
        self, state: EngineState, dispatch_schedule: DispatchSchedule, timers: Timers
    ) -> None:
        self._state: EngineState = state
        self._dispatch_schedule: DispatchSchedule = dispatch_schedule
        self._timers: Timers = timers

    # ---- commands of operators

    def pause_group(self, group: Group, by: str, reason: str) -> None:
        """Deliver nothing more to a group. Deliveries in flight can be settled."""
        group.admission.pause = Pause(self._state.now, by, reason)
        self._write_group_note(group, True)
        self._dispatch_schedule.update_admission(group)

    def resume_group(self, group: Group) -> None:
        group.admission.pause = NOT_PAUSED
        self._write_group_note(group, True)
        self._dispatch_schedule.update_admission(group)

    def pause_queue(self, queue: Queue, by: str, reason: str) -> None:
        """Deliver nothing more of a queue to any group, present or future."""
        self._set_queue_pause(queue, Pause(self._state.now, by, reason))

    def resume_queue(self, queue: Queue) -> None:
        self._set_queue_pause(queue, NOT_PAUSED)

    def _set_queue_pause(self, queue: Queue, pause: Pause) -> None:
        queue.set_pause(pause)
        note = NoteWriter(notes.QUEUE_PAUSED)
        note.write_int(queue.qid)
        write_pause(note, pause)
        self._state.frame_builder.add_note(note, self._state.now_ms(), True)
        for group in queue.groups.values():
            self._dispatch_schedule.update_admission(group)

    # ---- deliveries and their ends; called only if the group has policies

    def on_delivered(self, lease: Lease) -> None:
        group = lease.cursor.group
        admission = group.admission
        admission.on_delivered(lease, group.queue.rules, group.in_flight, self._state.now)
        if admission.reopens_at > 0.0:
            self._timers.schedule_admission(group, admission.reopens_at)
        if admission.keys.is_active:
            self._dispatch_schedule.wake_keys(group)

    def on_acked(self, lease: Lease) -> None:
        group = lease.cursor.group
        if group.admission.breaker.on_success(lease):
            self._write_group_note(group, False)
            self._state.warn(f"queue {group.queue.name!r}: group {group.name!r} delivers again")
            self._dispatch_schedule.update_admission(group)

    def on_failed(self, lease: Lease) -> bool:
        """Report a nack or a passed deadline; return whether it counts as an attempt.

        While the breaker is open, failures say nothing about the message.
        """
        group = lease.cursor.group
        rules = group.queue.rules
        breaker = group.admission.breaker
        if not rules.breaker_failures:
            return True
        was_closed = breaker.state == CLOSED
        if breaker.on_failure(lease, rules, self._state.now):
            self._write_group_note(group, False)
            if was_closed:
                self._state.warn(
                    f"queue {group.queue.name!r}: the breaker of group {group.name!r} opened after "
                    f"{rules.breaker_failures} failures in a row"
                )
            self._dispatch_schedule.update_admission(group)
        return was_closed

    def finish_recovery(self) -> None:
        for group in self._state.groups.values():
            group.admission.refill()
            self._dispatch_schedule.update_admission(group)

    # ---- notes

    def _write_group_note(self, group: Group, sync: bool) -> None:
        note = NoteWriter(notes.GROUP_ADMISSION)
        note.write_int(group.gid)
        write_admission(note, group.admission)
        self._state.frame_builder.add_note(note, self._state.now_ms(), sync)


def write_pause(note: NoteWriter, pause: Pause) -> None:
    note.write_seconds(pause.paused_at)
    note.write_text(pause.by)
    note.write_text(pause.reason)


def read_pause(note: NoteReader) -> Pause:
    paused_at = note.read_seconds()
    by = note.read_text()
    return Pause(paused_at, by, note.read_text())


def write_admission(note: NoteWriter, admission: Admission) -> None:
    write_pause(note, admission.pause)
    note.write_seconds(admission.breaker.opened_at)


def load_admission(note: NoteReader, admission: Admission) -> None:
    admission.pause = read_pause(note)
    opened_at = note.read_seconds()
    if opened_at > 0.0:
        admission.breaker.open_at(opened_at)
    else:
        admission.breaker.close()
