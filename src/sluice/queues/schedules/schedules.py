"""All schedules of one engine: commands of operators, and ticks.

A tick and the note that it is handled are in one frame, so a crash repeats both or neither; the
message id of the tick catches the rest. Times are those of the engine, so a virtual clock drives
schedules like everything else.

A tick that its queue refuses is tried again every few seconds. Ticks that come up late, because
the broker was down or the queue refused them, are missed ones: `Timing.missed` decides.
"""

from __future__ import annotations

import heapq
from typing import Final

from mypy_extensions import i64

from sluice.errors import ScheduleExists, SluiceError, TooManySchedules, UnknownSchedule
from sluice.queues.flow import Lifecycle, Publishing
from sluice.queues.log import NoteReader, NoteWriter, notes
from sluice.queues.model import NOT_PAUSED, EngineState, Pause
from sluice.queues.schedules.recurrence import NEVER, Recurrence, format_tick, latest_ticks
from sluice.queues.schedules.schedule import (
    ALL,
    DUPLICATE,
    MISSED,
    PUBLISHED,
    REFUSED,
    SKIP,
    Run,
    Schedule,
    read_run,
    read_schedule,
)

MAX_MISSED_TICKS: Final = 100  # that are published for one outage, with `missed` all
GRACE_SECONDS: Final = 60.0  # a tick that is later than that is missed
RETRY_SECONDS: Final = 5.0  # after a refusal
DEFAULT_MAX_SCHEDULES: Final = 1000
DEFAULT_MIN_INTERVAL_MS: Final = 1000


class Schedules:
    def __init__(self, state: EngineState, publishing: Publishing, lifecycle: Lifecycle) -> None:
        self._state: EngineState = state
        self._publishing: Publishing = publishing
        self._lifecycle: Lifecycle = lifecycle
        self.by_name: dict[str, Schedule] = {}
        self.max_schedules: int = DEFAULT_MAX_SCHEDULES
        self.min_interval_ms: int = DEFAULT_MIN_INTERVAL_MS
        # When schedules are due. An entry counts if its time is still that of its schedule.
        self._due: list[tuple[float, int, Schedule]] = []
        self._tie_breaker: int = 0

    # ---- commands

    def find(self, name: str) -> Schedule:
        schedule = self.by_name.get(name)
        if schedule is None:
            raise UnknownSchedule(name)
        return schedule

    def add(self, schedule: Schedule) -> None:
        """Add a new schedule; its first tick is after now."""
        if schedule.name in self.by_name:
            raise ScheduleExists(schedule.name)
        if len(self.by_name) >= self.max_schedules:
            raise TooManySchedules(self.max_schedules)
        schedule.created_at = self._state.now
        schedule.anchor_ms = self._state.now_ms() // 1000 * 1000
        schedule.restart(self._state.now_ms())
        self._store(schedule)

    def replace(self, schedule: Schedule) -> None:
        """Give a schedule other times or another message; its runs and its pause stay."""
        old = self.find(schedule.name)
        schedule.created_at = old.created_at
        schedule.pause = old.pause
        schedule.runs = old.runs
        schedule.counts = old.counts
        schedule.anchor_ms = self._state.now_ms() // 1000 * 1000
        if schedule.timing.every_ms == old.timing.every_ms:
            schedule.anchor_ms = old.anchor_ms
        schedule.restart(self._state.now_ms())
        old.due_at = 0.0
        self._store(schedule)

    def remove(self, schedule: Schedule) -> None:
        self._drop(schedule.name)
        note = NoteWriter(notes.SCHEDULE_REMOVED)
        note.write_text(schedule.name)
        self._state.frame_builder.add_note(note, self._state.now_ms(), True)

    def pause(self, schedule: Schedule, by: str, reason: str) -> None:
        """Let a schedule tick no more. Its ticks are not missed meanwhile: there are none."""
        schedule.pause = Pause(self._state.now, by, reason)
        self._store(schedule)

    def resume(self, schedule: Schedule) -> None:
        if schedule.pause.paused_at > 0.0:
            schedule.pause = NOT_PAUSED
            schedule.restart(self._state.now_ms())
            self._store(schedule)

    def run_now(self, schedule: Schedule) -> Run:
        """Publish once now, apart from the ticks, also while it is paused. Raises a refusal."""
        run = self._publish(schedule, self._state.now_ms())
        self._log(schedule, run, 1)
        return run

    def _store(self, schedule: Schedule) -> None:
        note = NoteWriter(notes.SCHEDULE_STORED)
        schedule.write(note)
        self._state.frame_builder.add_note(note, self._state.now_ms(), True)
        self._install(schedule)
        self._plan(schedule)

    def _install(self, schedule: Schedule) -> None:
        schedule.prepare()
        self.by_name[schedule.name] = schedule

    def _drop(self, name: str) -> None:
        schedule = self.by_name.pop(name, None)
        if schedule is not None:
            schedule.due_at = 0.0

    # ---- ticks

    def next_due(self) -> float:
        """Return the time of the next tick; 0.0 for none."""
        while self._due and self._due[0][2].due_at != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else 0.0

    def run_due(self) -> None:
        """Publish the ticks that are due."""
        while self._due and self._due[0][0] <= self._state.now:
            due_at, _, schedule = heapq.heappop(self._due)
            recurrence = schedule.recurrence()
            if schedule.due_at == due_at and recurrence is not None:
                self._run(schedule, recurrence)

    def _plan(self, schedule: Schedule) -> None:
        """Look at a schedule at its next tick."""
        recurrence = schedule.recurrence()
        schedule.due_at = 0.0
        if recurrence is not None:
            tick = recurrence.next_after(schedule.handled_ms)
            if tick != NEVER:
                self._wake_at(schedule, float(tick + schedule.jitter_of(tick)) / 1000.0)

    def _wake_at(self, schedule: Schedule, due_at: float) -> None:
        schedule.due_at = due_at
        self._tie_breaker += 1
        heapq.heappush(self._due, (due_at, self._tie_breaker, schedule))

    def _run(self, schedule: Schedule, recurrence: Recurrence) -> None:
        """Publish the ticks since the last one that was handled, as far as its policy says."""
        now = self._state.now
        if self._publishing.unavailable_reason:
            self._wake_at(schedule, now + RETRY_SECONDS)  # the run could not be stored
            return
        # A microsecond more: the due time may have been rounded up.
        now_ms: i64 = int(now * 1000.0 + 0.001)
        ticks, is_complete = latest_ticks(recurrence, schedule.handled_ms, now_ms, MAX_MISSED_TICKS)
        while ticks and ticks[-1] + schedule.jitter_of(ticks[-1]) > now_ms:
            ticks.pop()
        missed = schedule.timing.missed
        wanted: list[int] = ticks
        if missed != ALL:
            wanted = ticks[-1:]
            if missed == SKIP and wanted:
                due_ms = wanted[0] + schedule.jitter_of(wanted[0])
                if now - float(due_ms) / 1000.0 > GRACE_SECONDS:
                    wanted = []
        missed_ticks = ticks[: len(ticks) - len(wanted)]
        if missed_ticks or not is_complete:
            self._note_missed(schedule, missed_ticks, is_complete)
        for tick in wanted:
            try:
                run = self._publish(schedule, tick)
            except SluiceError as error:
                self._note_refused(schedule, tick, error)
                self._wake_at(schedule, now + RETRY_SECONDS)
                return
            schedule.handled_ms = tick
            self._log(schedule, run, 1)
        self._plan(schedule)

    def _publish(self, schedule: Schedule, tick_ms: i64) -> Run:
        name = schedule.queue
        queue = self._state.queues.get(name)
        if queue is None:
            queue = self._lifecycle.get_or_create_queue(name)
            self._state.effects.created_queues.append(queue)
        message = schedule.make_message(tick_ms, self._state.now)
        duplicates = queue.duplicates
        self._publishing.publish(queue, message, None, 0)
        outcome = DUPLICATE if queue.duplicates > duplicates else PUBLISHED
        return Run(tick_ms, self._state.now, message.id, outcome, "")

    def _note_missed(self, schedule: Schedule, ticks: list[int], is_complete: bool) -> None:
        count: i64 = len(ticks) if is_complete else len(ticks) + 1
        if ticks:
            schedule.handled_ms = ticks[-1]
        detail = f"{'' if is_complete else 'at least '}{count} missed"
        run = Run(schedule.handled_ms, self._state.now, b"", MISSED, detail)
        self._log(schedule, run, count)
        self._state.warn(f"schedule {schedule.name!r} was late: ticks {detail}")

    def _note_refused(self, schedule: Schedule, tick_ms: i64, error: SluiceError) -> None:
        """Record the first refusal of a tick, not those of each further try."""
        if schedule.refused_ms == tick_ms:
            return
        schedule.refused_ms = tick_ms
        run = Run(tick_ms, self._state.now, schedule.message_id(tick_ms), REFUSED, str(error))
        self._log(schedule, run, 1)
        self._state.warn(
            f"schedule {schedule.name!r}: the tick of {format_tick(tick_ms)} was refused and is "
            f"tried again: {error}"
        )

    def _log(self, schedule: Schedule, run: Run, count: i64) -> None:
        schedule.add_run(run, count)
        note = NoteWriter(notes.SCHEDULE_RAN)
        note.write_text(schedule.name)
        note.write_int(schedule.handled_ms)
        note.write_int(count)
        run.write(note)
        self._state.frame_builder.add_note(note, self._state.now_ms(), False)

    # ---- recovery

    def load(self, note: NoteReader) -> None:
        """Repeat a command or a run of a previous start."""
        if note.kind == notes.SCHEDULE_STORED:
            schedule = read_schedule(note)
            old = self.by_name.get(schedule.name)
            if old is not None:
                schedule.runs = old.runs
                schedule.counts = old.counts
            self._install(schedule)
            return
        name = note.read_text()
        if note.kind == notes.SCHEDULE_REMOVED:
            self._drop(name)
            return
        known = self.by_name.get(name)
        if known is not None:
            known.handled_ms = note.read_int()
            count = note.read_int()
            known.add_run(read_run(note), count)

    def finish_recovery(self) -> None:
        for schedule in self.by_name.values():
            self._plan(schedule)

    def write_snapshot(self, out: NoteWriter) -> None:
        out.write_int(len(self.by_name))
        for schedule in self.by_name.values():
            schedule.write(out)
            schedule.write_runs(out)

    def load_snapshot(self, note: NoteReader) -> None:
        for _ in range(note.read_int()):
            schedule = read_schedule(note)
            schedule.read_runs(note)
            self._install(schedule)
