"""What happened to a delivery that did not go well at once: its steps, for whoever asks why a message is where it is.

A message that is delivered once and acknowledged has no history and costs nothing: the list is made with the first
failure or the first time it is given back. The delivery that is under way is no step yet; who has it stands in the
lease. Steps are kept with the notes of retries, and a dead letter carries them on as one header.

    in a note     count, then for each step: time, what, consumer, attempt, detail
    in a header   JSON: [[milliseconds, what, group, consumer, attempt, detail], ...], oldest first
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.message import Message, decode_headers

if TYPE_CHECKING:
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.model.delivery_lease import Lease
    from sluice.queues.log.frame_builder import Note, NoteWriter

HEADER: Final = "history"
MOST_STEPS: Final = 32  # the last ones are kept
MOST_BYTES: Final = 4000  # of a header: it travels with every delivery of the letter
LONGEST_DETAIL: Final = 160
MOST_RETURNED: Final = 256  # given back without a failure and remembered, for each group and partition

ENQUEUED: Final = "enqueued"
DELIVERED: Final = "delivered"
EXTENDED: Final = "extended"
NACKED: Final = "nacked"
TIMED_OUT: Final = "timed-out"
VANISHED: Final = "vanished"
RELEASED: Final = "released"
DEAD: Final = "dead"
EXPIRED: Final = "expired"
REDRIVEN: Final = "redriven"
ACKED: Final = "acked"

MOST_PAST: Final = 2048  # lives that are remembered after their good end


class Step:
    def __init__(self, at: float, what: str, group: str, consumer: str, attempt: i64, detail: str) -> None:
        self.at: float = at
        self.what: str = what
        self.group: str = group  # empty: all of them
        self.consumer: str = consumer
        self.attempt: i64 = attempt
        self.detail: str = detail


class Past:
    """The lives of the last messages that were acknowledged after some trouble: whoever has just mended something wants
    to see that it helped. They are gone with the process, and when there are too many."""

    def __init__(self) -> None:
        self._lives: dict[str, list[Step]] = {}

    def remember(self, lease: Lease, name: str, now: float) -> None:
        """A delivery with a history, or of a message that had an earlier life, is acknowledged."""
        message = lease.message
        steps = earlier_steps(message) if message is not None else []
        if not steps and message is not None:
            steps.append(Step(float(message.enqueued_at) / 1000.0, ENQUEUED, "", "", 0, ""))
        tell_delivery(lease)
        steps.extend(lease.history or [])
        steps.append(Step(now, ACKED, lease.cursor.group.name, lease.client(), lease.attempt, ""))
        key = _life(lease.cursor.group.queue.name, name)
        known = self._lives.pop(key, None)
        if known is not None:
            steps = [*known, *steps]  # another group was done with it before
        elif len(self._lives) >= MOST_PAST:
            for oldest in self._lives:
                del self._lives[oldest]
                break
        self._lives[key] = steps

    def of(self, queue: str, name: str) -> list[Step]:
        return self._lives.get(_life(queue, name), [])


def _life(queue: str, name: str) -> str:
    return f"{queue} {name}"


# ---- as it happens


def tell_end(lease: Lease, what: str, now: float, detail: str) -> i64:
    """A delivery has ended, and not by an ack: its beginning and its end become steps. How many that are."""
    count = tell_delivery(lease)
    steps = lease.history
    assert steps is not None
    steps.append(
        Step(now, what, lease.cursor.group.name, lease.client(), lease.attempt, detail[:LONGEST_DETAIL])
    )
    del steps[:-MOST_STEPS]
    return count + 1


def tell_delivery(lease: Lease) -> i64:
    """The delivery that is under way becomes a step, and so does the last time it was extended."""
    steps = lease.history
    if steps is None:
        steps = taken_back(lease.cursor, lease.seq)
        lease.history = steps
    group = lease.cursor.group.name
    steps.append(Step(lease.last_at, DELIVERED, group, lease.client(), lease.attempt, ""))
    if lease.since <= lease.last_at:
        return 1
    steps.append(Step(lease.since, EXTENDED, group, lease.client(), lease.attempt, ""))
    return 2


def taken_back(cursor: Cursor, seq: i64) -> list[Step]:
    """The steps of a message that was given back before it ever failed; a new list when it was not."""
    returned = cursor.returned
    if returned is None:
        return []
    return returned.pop(int(seq), None) or []


def give_back(cursor: Cursor, seq: i64, steps: list[Step]) -> None:
    """Remember the steps of a message that is as if it had never been delivered. They are dropped with its success,
    or when there are too many like it."""
    returned = cursor.returned
    if returned is None:
        returned = {}
        cursor.returned = returned
    if len(returned) >= MOST_RETURNED:
        for number in list(returned):
            if cursor.settled(number) or not cursor.partition.holds(number):
                del returned[number]
        if len(returned) >= MOST_RETURNED:
            for number in returned:
                del returned[number]
                break
    returned[int(seq)] = steps


# ---- in notes and snapshots


def write_steps(note: NoteWriter, steps: list[Step] | None, count: i64) -> None:
    """The last `count` of them."""
    if steps is None:
        note.number(0)
        return
    first: i64 = max(0, len(steps) - count)
    note.number(len(steps) - first)
    for step in steps[first:]:
        note.real(step.at)
        note.text(step.what)
        note.text(step.consumer)
        note.number(step.attempt)
        note.text(step.detail)


def read_steps(note: Note, group: str, steps: list[Step]) -> list[Step]:
    """Put the steps of a note behind those that are known already."""
    for _ in range(note.number()):
        at = note.real()
        what = note.text()
        consumer = note.text()
        attempt = note.number()
        steps.append(Step(at, what, group, consumer, attempt, note.text()))
    del steps[:-MOST_STEPS]
    return steps


# ---- in headers


def earlier_steps(message: Message) -> list[Step]:
    """What a message that died before brings along; empty for one that has not."""
    if not message.headers:
        return []
    for name, value in decode_headers(message.headers):
        if name == HEADER:
            return steps_of(value)
    return []


def text_of(steps: list[Step]) -> str:
    """As the value of a header: what does not fit is left out, the oldest first."""
    rows: list[str] = []
    size = 2
    for step in reversed(steps[-MOST_STEPS:]):
        row = json.dumps(
            [
                int(step.at * 1000.0 + 0.5),
                step.what,
                step.group,
                step.consumer,
                int(step.attempt),
                step.detail,
            ],
            separators=(",", ":"),
        )
        size += len(row) + 1
        if size > MOST_BYTES:
            break
        rows.append(row)
    rows.reverse()
    return "[" + ",".join(rows) + "]"


def steps_of(text: str) -> list[Step]:
    """And back. Headers of letters may have been written by anybody: what is no step is none."""
    steps: list[Step] = []
    try:
        rows = json.loads(text)
        for row in rows:
            at, what, group, consumer, attempt, detail = row
            steps.append(
                Step(float(at) / 1000.0, str(what), str(group), str(consumer), int(attempt), str(detail))
            )
    except (ValueError, TypeError, RecursionError, OverflowError):
        return steps
    return steps
