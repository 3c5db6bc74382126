"""One schedule: its times, the message of its ticks, its state and its last runs."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.errors import InvalidSchedule
from sluice.message import MAX_EXPIRES, Message
from sluice.placement import fnv1a32
from sluice.queues.flow import read_pause, write_pause
from sluice.queues.log import NoteReader, NoteWriter
from sluice.queues.model import NOT_PAUSED, Pause
from sluice.queues.schedules.recurrence import (
    NEVER,
    CronRecurrence,
    IntervalRecurrence,
    Recurrence,
    format_tick,
)

# What happens to ticks that were missed.
SKIP: Final = 0
ONCE: Final = 1
ALL: Final = 2
MISSED_NAMES: Final = ("skip", "once", "all")

# Outcomes of a run.
PUBLISHED: Final = 0
DUPLICATE: Final = 1
REFUSED: Final = 2
MISSED: Final = 3
OUTCOME_NAMES: Final = ("published", "duplicate", "refused", "missed")
MAX_RUNS: Final = 5  # that are remembered


class Run:
    """What happened at a tick."""

    def __init__(
        self, tick_ms: i64, at: float, message_id: bytes, outcome: i64, detail: str
    ) -> None:
        self.tick_ms: i64 = tick_ms
        self.at: float = at
        self.message_id: bytes = message_id
        self.outcome: i64 = outcome
        self.detail: str = detail

    def write(self, note: NoteWriter) -> None:
        note.write_int(self.tick_ms)
        note.write_seconds(self.at)
        note.write_bytes(self.message_id)
        note.write_int(self.outcome)
        note.write_text(self.detail)


def read_run(note: NoteReader) -> Run:
    tick_ms = note.read_int()
    at = note.read_seconds()
    message_id = note.read_bytes()
    outcome = note.read_int()
    if not 0 <= outcome < len(OUTCOME_NAMES):
        raise ValueError(f"a run with outcome {outcome}")
    return Run(tick_ms, at, message_id, outcome, note.read_text())


class Timing:
    """When a schedule ticks: `cron` in `zone`, or each `every_ms`."""

    def __init__(self, cron: str, every_ms: i64, zone: str, jitter_ms: i64, missed: i64) -> None:
        self.cron: str = cron
        self.every_ms: i64 = every_ms
        self.zone: str = zone
        self.jitter_ms: i64 = jitter_ms
        self.missed: i64 = missed

    def recurrence(self, anchor_ms: i64) -> Recurrence:
        if self.cron:
            return CronRecurrence(self.cron, self.zone)
        return IntervalRecurrence(anchor_ms, self.every_ms)


class Schedule:
    """A schedule of `queue`. Its ticks publish copies of `template`, which expire after `ttl_ms`.

    `handled_ms` is the last tick that was handled, or the time from which on there are ticks.
    """

    def __init__(self, name: str, queue: str, timing: Timing, template: Message) -> None:
        self.name: str = name
        self.queue: str = queue
        self.timing: Timing = timing
        self.template: Message = template
        self.ttl_ms: i64 = 0  # 0: that of the queue
        self.created_at: float = 0.0
        self.changed_by: str = ""
        self.pause: Pause = NOT_PAUSED
        self.anchor_ms: i64 = 0  # an interval counts from here
        self.handled_ms: i64 = 0
        self.runs: list[Run] = []  # the last ones, oldest first
        self.counts: list[int] = [0] * len(OUTCOME_NAMES)
        self.fault: str = ""  # why it cannot tick
        self.due_at: float = 0.0  # when it is looked at next; 0.0: never
        self.refused_ms: i64 = 0  # the tick whose refusal is recorded
        self._recurrence: Recurrence | None = None

    def restart(self, now_ms: i64) -> None:
        """Let ticks begin after now."""
        self.handled_ms = now_ms

    def prepare(self) -> None:
        """Compute its times. A time zone of an earlier start may be unknown to this system."""
        self._recurrence = None
        self.fault = ""
        try:
            self._recurrence = self.timing.recurrence(self.anchor_ms)
        except InvalidSchedule as error:
            self.fault = str(error)

    def recurrence(self) -> Recurrence | None:
        """Return its times; None while it does not tick."""
        return None if self.pause.paused_at > 0.0 else self._recurrence

    def next_ticks(self, count: int) -> list[int]:
        """Return the next ticks, in milliseconds since 1970."""
        found: list[int] = []
        recurrence = self.recurrence()
        tick = self.handled_ms
        while recurrence is not None and len(found) < count:
            tick = recurrence.next_after(tick)
            if tick == NEVER:
                break
            found.append(int(tick))
        return found

    def message_id(self, tick_ms: i64) -> bytes:
        return f"{self.name}@{format_tick(tick_ms)}".encode()

    def jitter_of(self, tick_ms: i64) -> i64:
        """Return the delay of a tick: the same one at each start and on each node."""
        return (self.timing.jitter_ms * fnv1a32(self.message_id(tick_ms))) >> 32

    def make_message(self, tick_ms: i64, now: float) -> Message:
        template = self.template
        message = Message(template.payload, template.props, template.key, self.message_id(tick_ms))
        message.priority = template.priority
        if self.ttl_ms:
            seconds = now + float(self.ttl_ms) / 1000.0
            message.expires = min(int(seconds + 0.999), MAX_EXPIRES)
        return message

    def add_run(self, run: Run, count: i64) -> None:
        self.counts[run.outcome] += int(count)
        self.runs.append(run)
        if len(self.runs) > MAX_RUNS:
            self.runs.pop(0)

    # ---- stored form

    def write(self, note: NoteWriter) -> None:
        """Write everything except its runs and counts."""
        timing = self.timing
        template = self.template
        note.write_text(self.name)
        note.write_text(self.queue)
        note.write_text(timing.cron)
        note.write_int(timing.every_ms)
        note.write_text(timing.zone)
        note.write_int(timing.jitter_ms)
        note.write_int(timing.missed)
        note.write_bytes(template.payload)
        note.write_bytes(template.props)
        note.write_bytes(template.key)
        note.write_int(template.priority)
        note.write_int(self.ttl_ms)
        note.write_seconds(self.created_at)
        note.write_text(self.changed_by)
        write_pause(note, self.pause)
        note.write_int(self.anchor_ms)
        note.write_int(self.handled_ms)

    def write_runs(self, note: NoteWriter) -> None:
        note.write_int(len(self.runs))
        for run in self.runs:
            run.write(note)
        for count in self.counts:
            note.write_int(count)

    def read_runs(self, note: NoteReader) -> None:
        self.runs = [read_run(note) for _ in range(note.read_count(MAX_RUNS))]
        self.counts = [int(note.read_int()) for _ in OUTCOME_NAMES]


def read_schedule(note: NoteReader) -> Schedule:
    name = note.read_text()
    queue = note.read_text()
    cron = note.read_text()
    every_ms = note.read_int()
    zone = note.read_text()
    jitter_ms = note.read_int()
    missed = note.read_count(ALL)
    if not cron and every_ms <= 0:
        raise ValueError(f"a schedule with an interval of {every_ms} ms")
    payload = note.read_bytes()
    props = note.read_bytes()
    template = Message(payload, props, note.read_bytes())
    template.priority = note.read_count(9)
    schedule = Schedule(name, queue, Timing(cron, every_ms, zone, jitter_ms, missed), template)
    schedule.ttl_ms = note.read_int()
    schedule.created_at = note.read_seconds()
    schedule.changed_by = note.read_text()
    schedule.pause = read_pause(note)
    schedule.anchor_ms = note.read_int()
    schedule.handled_ms = note.read_int()
    return schedule
