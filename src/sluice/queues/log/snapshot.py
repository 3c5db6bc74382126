"""The state of all queues as one piece of bytes, and back: what a store keeps so that it need not keep every note.

A snapshot says nothing of bodies and addresses: those come from the store's index rows. It says which messages are
still here, what each group has settled, and which of its deliveries wait for a retry. What was leased is not in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from sluice.errors import StoreError
from sluice.queues.model.cursor import SEQUENCE_BITS, Cursor
from sluice.queues.model.delivery_lease import WAITING, Lease
from sluice.queues.engine import Engine
from sluice.queues.model.group import Group
from sluice.queues.flow.history import MOST_STEPS, give_back, read_steps, taken_back, write_steps
from sluice.queues.log.frame_builder import Note, NoteWriter
from sluice.queues.compacted.last_values import Latest
from sluice.queues.flow.lifecycle import write_gates
from sluice.queues.bulk.lost_ranges import read_losses
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Gate, Queue
from sluice.queues.model.queue_rules import Rules
from sluice.queues.flow.settlement import time_spent, write_retry

VERSION: Final = 8
IN_PARTS: Final = (
    5  # since then last values stand in no order, and the gaps between those of shared queues with them
)
WITH_TOKENS: Final = 6  # since then what waits for a retry has the token of the delivery that failed
WITH_LOSSES: Final = 7  # since then a group that is read in bulk says what it was told, and what it has lost
# Since then: the time spent of `total_timeout`, when messages with a delay arrived, and the secret of delivery tokens.
WITH_TIMES: Final = 8
OLDEST: Final = 3  # the oldest that can still be read: before there were compacted queues


# ---- out


def write_state(engine: Engine) -> NoteWriter:
    """Everything that the records so far add up to, but for last values, which `saving` writes behind it."""
    out = NoteWriter(VERSION)
    out.number(engine.next_qid)
    out.number(engine.next_pid)
    out.number(engine.next_gid)
    out.data(engine.tokens.secret)
    engine.keeping.write_snapshot(out)
    engine.batches.write_snapshot(out, engine.now)
    out.number(len(engine.queues))
    for queue in engine.queues.values():
        _write_queue(out, queue, engine)
    return out


def _write_queue(out: NoteWriter, queue: Queue, engine: Engine) -> None:
    out.number(queue.qid)
    out.text(queue.name)
    out.text(queue.config)
    out.real(queue.created_at)
    out.number(queue.enqueued)
    out.number(queue.duplicates)
    out.number(queue.retried)
    out.number(len(queue.dead))
    for reason, count in queue.dead.items():
        out.text(reason)
        out.number(count)
    write_gates(out, queue)
    out.number(len(queue.partitions))
    for partition in queue.partitions:
        _write_partition(out, partition)
    out.number(len(queue.groups))
    for group in queue.groups.values():
        _write_group(out, group, engine)
    recent = queue.recent_ids(engine.now)
    out.number(len(recent))
    for name, stored_at in recent:
        out.data(name)
        out.real(stored_at)


def _write_partition(out: NoteWriter, partition: Partition) -> None:
    out.number(partition.pid)
    out.number(partition.next)
    first = partition.first_live(0)
    out.number(first)
    holes = (
        partition.holes(first) if not partition.queue.rules.compacted else []
    )  # those come with last values
    out.number(len(holes))
    for start, count in holes:
        out.number(start)
        out.number(count)
    out.number(len(partition.targets))
    for seq, gid in partition.targets.items():
        out.number(seq)
        out.number(gid)
    partition.write_delayed_arrivals(out)


def _write_group(out: NoteWriter, group: Group, engine: Engine) -> None:
    out.number(group.gid)
    out.text(group.name)
    out.number(group.delivered)
    out.number(group.redelivered)
    out.number(group.nacked)
    for cursor in group.cursors:
        out.number(cursor.floor)
        out.number(cursor.count_entered())
        for count in cursor.counts:
            out.number(count)
        out.number(len(cursor.done))
        for seq in cursor.done:
            out.number(seq)
        failed = [lease for lease in cursor.leases.values() if lease.failures]
        out.number(len(failed))
        for lease in failed:
            write_retry(out, lease)
            write_steps(out, lease.history, MOST_STEPS)
            out.number(lease.token)
            out.real(time_spent(engine, lease))
        _write_returned(out, cursor)
        losses = cursor.losses
        out.number(0 if losses is None else 1)
        if losses is not None:
            losses.write(out)


def _write_returned(out: NoteWriter, cursor: Cursor) -> None:
    """What was given back and is still to be delivered."""
    returned = cursor.returned if cursor.returned is not None else {}
    living = [seq for seq in returned if cursor.partition.holds(seq) and not cursor.settled(seq)]
    out.number(len(living))
    for seq in living:
        out.number(seq)
        write_steps(out, returned[seq], MOST_STEPS)


# ---- and back


class SnapshotReader:
    """Reads a snapshot into an engine, and remembers until the rows are loaded which of them still count."""

    def __init__(self, engine: Engine, parse: Callable[[str, str], Rules]) -> None:
        self.by_qid: dict[int, Queue] = {}
        self._engine: Engine = engine
        self._parse = parse
        self._living: dict[int, Living] = {}

    def read(self, snapshot: bytes) -> None:
        note = Note(snapshot)
        if not OLDEST <= note.what <= VERSION:
            raise StoreError(
                f"the store has a snapshot of version {note.what}, and this Sluice reads version {VERSION}",
                "Open it with the version of Sluice that wrote it",
            )
        engine = self._engine
        engine.next_qid = note.number()
        engine.next_pid = note.number()
        engine.next_gid = note.number()
        if note.what >= WITH_TIMES:
            engine.tokens.secret = note.data()
        engine.keeping.load_snapshot(note)
        engine.batches.load_snapshot(note)
        for _ in range(note.number()):
            self._read_queue(note)
        if note.what > OLDEST:
            self._read_shared(note)
            engine.exclusive.load_snapshot(note, note.what >= IN_PARTS)

    def _read_shared(self, note: Note) -> None:
        for _ in range(note.number()):
            queue = self.by_qid[int(note.number())]
            latest = Latest()
            for _ in range(note.number()):
                mark = int(note.number())
                pid = int(note.number())
                latest.put(mark, (pid << SEQUENCE_BITS) | int(note.number()))
            queue.latest = latest
            for _ in range(note.number() if note.what >= IN_PARTS else 0):
                living = self._living[int(note.number())]
                gaps = Note(note.data())
                while gaps.more():
                    start = gaps.number()
                    living.add_hole(start, gaps.number())

    def _read_queue(self, note: Note) -> None:
        qid = note.number()
        name = note.text()
        config = note.text()
        queue = Queue(qid, self._parse(name, config))
        queue.config = config
        queue.created_at = note.real()
        queue.enqueued = note.number()
        queue.duplicates = note.number()
        queue.retried = note.number()
        for _ in range(note.number()):
            reason = note.text()
            queue.dead[reason] = int(note.number())
        queue.gates = read_gates(note)
        self._engine.queues[name] = queue
        self.by_qid[int(qid)] = queue
        for number in range(note.number()):
            self._read_partition(note, queue, number)
        for _ in range(note.number()):
            self._read_group(note, queue)
        for _ in range(note.number()):
            message_id = note.data()
            queue.remember(message_id, note.real())

    def _read_partition(self, note: Note, queue: Queue, number: int) -> None:
        partition = Partition(queue, note.number(), number)
        partition.next = note.count(1 << SEQUENCE_BITS)
        living = Living(note.number(), partition.next)
        for _ in range(note.number()):
            start = note.number()
            living.add_hole(start, note.number())
        for _ in range(note.number()):
            seq = int(note.number())
            partition.aim(seq, note.number())
        for _ in range(note.number() if note.what >= WITH_TIMES else 0):
            seq = int(note.number())
            living.arrivals[seq] = int(note.number())
        partition.has_delays = bool(living.arrivals)
        queue.partitions.append(partition)
        self._engine.partitions[int(partition.pid)] = partition
        self._living[int(partition.pid)] = living

    def _read_group(self, note: Note, queue: Queue) -> None:
        group = Group(queue, note.number(), note.text())
        group.delivered = note.number()
        group.redelivered = note.number()
        group.nacked = note.number()
        queue.groups[group.name] = group
        self._engine.groups[int(group.gid)] = group
        for partition in queue.partitions:
            cursor = Cursor(group, partition, note.number())
            cursor.entered = note.number()
            cursor.counts = [int(note.number()) for _ in range(4)]
            cursor.done = {int(note.number()) for _ in range(note.number())}
            for _ in range(note.number()):
                load_retry(note, cursor, note.what >= WITH_TOKENS, note.what >= WITH_TIMES)
            for _ in range(note.number()):
                load_returned(note, cursor)
            if note.what >= WITH_LOSSES and note.number():
                cursor.losses = read_losses(note)
            group.cursors.append(cursor)
            partition.cursors.append(cursor)

    def holds(self, pid: i64, seq: i64) -> bool:
        """Whether a message from before the snapshot was still kept then."""
        living = self._living.get(int(pid))
        return living is not None and living.holds(seq)

    def arrival(self, pid: i64, seq: i64) -> int:
        """Return when a message with a delay arrived, in milliseconds since 1970; 0: not known."""
        living = self._living.get(int(pid))
        return 0 if living is None else living.arrivals.get(int(seq), 0)

    def end_rows(self) -> None:
        self._living = {}


class Living:
    """Which sequences of a partition were kept when the snapshot was made."""

    def __init__(self, first: i64, end: i64) -> None:
        self._first: i64 = first
        self._end: i64 = end
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.arrivals: dict[int, int] = {}  # of messages with a delay, in milliseconds since 1970

    def add_hole(self, start: i64, count: i64) -> None:
        self._starts.append(int(start))
        self._ends.append(int(start + count))

    def holds(self, seq: i64) -> bool:
        if seq < self._first or seq >= self._end:
            return False
        nth = bisect_right(self._starts, int(seq)) - 1
        return nth < 0 or self._ends[nth] <= seq


def read_gates(note: Note) -> list[Gate]:
    return [Gate([int(note.number()) for _ in range(note.number())]) for _ in range(note.number())]


def load_retry(note: Note, cursor: Cursor, with_token: bool, with_spent: bool) -> i64:
    """Read a delivery that waits for its retry; return its sequence.

    Its token tells whether a settlement that arrives later was counted already. Notes and snapshots
    of older versions lack the last fields.
    """
    seq = note.number()
    lease = cursor.leases.get(int(seq))
    if lease is None:
        lease = Lease(cursor, seq, 0)
        cursor.leases[int(seq)] = lease
    lease.state = WAITING
    lease.failures = note.number()
    lease.attempt = lease.failures
    lease.due = note.real()
    lease.first_at = note.real()
    lease.last_at = note.real()
    lease.description = note.text()
    steps = lease.history if lease.history is not None else taken_back(cursor, seq)
    lease.history = read_steps(note, cursor.group.name, steps)
    lease.token = note.number() if with_token and note.more() else 0
    lease.spent_before = note.real() if with_spent and note.more() else 0.0
    return seq


def load_returned(note: Note, cursor: Cursor) -> None:
    """Steps of a delivery that was given back."""
    seq = note.number()
    lease = cursor.leases.get(int(seq))
    if lease is not None:
        steps = lease.history if lease.history is not None else []
        lease.history = read_steps(note, cursor.group.name, steps)
    else:
        steps = taken_back(cursor, seq)
        give_back(cursor, seq, read_steps(note, cursor.group.name, steps))
