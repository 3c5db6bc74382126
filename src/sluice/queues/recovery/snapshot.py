"""The state of all queues as bytes, and back: with a snapshot, the store can delete older notes.

A snapshot contains no bodies and no addresses: those come from the store's index rows. It says
which messages are stored, what each group has settled, and which deliveries wait for a retry. It
does not contain leases.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from sluice.errors import StoreError
from sluice.queues.engine import Engine
from sluice.queues.flow import (
    load_admission,
    load_held_keys,
    read_events,
    read_pause,
    store_released,
    take_released,
    write_admission,
    write_events,
    write_gates,
    write_held_keys,
    write_pause,
    write_rescheduled,
    write_retry,
)
from sluice.queues.log import OUTCOMES, NoteReader, NoteWriter
from sluice.queues.model import (
    AWAIT_RETRY,
    MAX_EVENTS,
    SEQUENCE_BITS,
    Cursor,
    Group,
    LastValues,
    Lease,
    Partition,
    PartitionGate,
    Queue,
    QueueRules,
    read_lost_ranges,
)

VERSION: Final = 12
# Since then, queues have the counters of deleted groups and of refused publishes.
COUNTERS_SINCE: Final = 9
# Since then: pauses of queues and groups, and open breakers.
ADMISSION_SINCE: Final = 9
# Since then: cancelled messages are counted, and delayed messages have their publisher's ids.
COMMANDS_SINCE: Final = 10
# Since then: schedules.
SCHEDULES_SINCE: Final = 11
# Since then: keys that are held for repair.
HELD_KEYS_SINCE: Final = 12
# The oldest version that can be read: that of Sluice 0.1.0.
OLDEST_VERSION: Final = 8


# ---- writing


def write_state(engine: Engine) -> NoteWriter:
    """Write the state after all records so far, except last values.

    `incremental_snapshot` writes last values after it.
    """
    out = NoteWriter(VERSION)
    out.write_int(engine.state.next_qid)
    out.write_int(engine.state.next_pid)
    out.write_int(engine.state.next_gid)
    out.write_bytes(engine.tokens.secret)
    engine.broker_state.write_snapshot(out)
    engine.batches.fences.write_snapshot(out, engine.now)
    engine.schedules.write_snapshot(out)
    out.write_int(len(engine.queues))
    for queue in engine.queues.values():
        _write_queue(out, queue, engine)
    return out


def _write_queue(out: NoteWriter, queue: Queue, engine: Engine) -> None:
    out.write_int(queue.qid)
    out.write_text(queue.name)
    out.write_text(queue.config_json)
    out.write_seconds(queue.created_at)
    out.write_int(queue.enqueued)
    out.write_int(queue.duplicates)
    out.write_int(queue.retried)
    out.write_int(queue.refused)
    out.write_int(queue.past_delivered)
    out.write_int(queue.past_redelivered)
    out.write_int(queue.past_nacked)
    out.write_int(queue.past_acked)
    out.write_int(len(queue.dead_by_reason))
    for reason, count in queue.dead_by_reason.items():
        out.write_text(reason)
        out.write_int(count)
    write_gates(out, queue)
    out.write_int(len(queue.partitions))
    for partition in queue.partitions:
        _write_partition(out, partition)
    out.write_int(len(queue.groups))
    for group in queue.groups.values():
        _write_group(out, group, engine)
    write_pause(out, queue.pause)
    recent = queue.recent_ids(engine.now)
    out.write_int(len(recent))
    for name, stored_at in recent:
        out.write_bytes(name)
        out.write_seconds(stored_at)
    queue.write_delayed_ids(out)


def _write_partition(out: NoteWriter, partition: Partition) -> None:
    out.write_int(partition.pid)
    out.write_int(partition.next_seq)
    first = partition.first_live(0)
    out.write_int(first)
    # Those of compacted queues are written with their last values.
    deleted_ranges = (
        partition.deleted_ranges(first) if not partition.queue.rules.is_compacted else []
    )
    out.write_int(len(deleted_ranges))
    for start, count in deleted_ranges:
        out.write_int(start)
        out.write_int(count)
    out.write_int(len(partition.target_groups))
    for seq, gid in partition.target_groups.items():
        out.write_int(seq)
        out.write_int(gid)
    partition.write_delayed_arrivals(out)
    write_rescheduled(out, partition)


def _write_group(out: NoteWriter, group: Group, engine: Engine) -> None:
    out.write_int(group.gid)
    out.write_text(group.name)
    # Deliveries in flight are counted when they end, if the next start replays that.
    out.write_int(group.delivered - group.in_flight)
    out.write_int(group.redelivered - group.count_redeliveries_in_flight())
    out.write_int(group.nacked)
    write_admission(out, group.admission)
    for cursor in group.cursors:
        out.write_int(cursor.low_watermark)
        out.write_int(cursor.count_enqueued())
        for count in cursor.outcome_counts:
            out.write_int(count)
        out.write_int(len(cursor.settled_seqs))
        for seq in cursor.settled_seqs:
            out.write_int(seq)
        failed = [lease for lease in cursor.leases.values() if lease.failures]
        out.write_int(len(failed))
        for lease in failed:
            write_retry(out, lease)
            write_events(out, lease.history, MAX_EVENTS)
            out.write_int(lease.token_counter)
            out.write_seconds(engine.settlement.timeout_spent(lease))
        _write_released(out, cursor)
        lost_ranges = cursor.lost_ranges
        out.write_int(0 if lost_ranges is None else 1)
        if lost_ranges is not None:
            lost_ranges.write(out)
    write_held_keys(out, group)


def _write_released(out: NoteWriter, cursor: Cursor) -> None:
    """Write the histories of released messages that are still to be delivered."""
    released = cursor.released_history if cursor.released_history is not None else {}
    live_sequences = [
        seq for seq in released if cursor.partition.holds(seq) and not cursor.is_settled(seq)
    ]
    out.write_int(len(live_sequences))
    for seq in live_sequences:
        out.write_int(seq)
        write_events(out, released[seq], MAX_EVENTS)


# ---- reading


class SnapshotReader:
    """Reads a snapshot into an engine, and remembers which index rows refer to stored messages."""

    def __init__(self, engine: Engine, parse: Callable[[str, str], QueueRules]) -> None:
        self.by_qid: dict[int, Queue] = {}
        self._engine: Engine = engine
        self._parse = parse
        self._live: dict[int, LiveSequences] = {}

    def read(self, snapshot: bytes) -> None:
        note = NoteReader(snapshot)
        if not OLDEST_VERSION <= note.kind <= VERSION:
            raise StoreError(
                f"the store has a snapshot of version {note.kind}, "
                f"and this Sluice reads versions {OLDEST_VERSION} to {VERSION}",
                "Open it with the version of Sluice that wrote it",
            )
        engine = self._engine
        engine.state.next_qid = note.read_int()
        engine.state.next_pid = note.read_int()
        engine.state.next_gid = note.read_int()
        engine.tokens.secret = note.read_bytes()
        engine.broker_state.load_snapshot(note)
        engine.batches.fences.load_snapshot(note)
        if note.kind >= SCHEDULES_SINCE:
            engine.schedules.load_snapshot(note)
        for _ in range(note.read_int()):
            self._read_queue(note)
        self._read_last_values(note)
        engine.exclusive.load_snapshot(note)

    def _read_last_values(self, note: NoteReader) -> None:
        for _ in range(note.read_int()):
            queue = self.by_qid[int(note.read_int())]
            last_values = LastValues()
            for _ in range(note.read_int()):
                key_hash = int(note.read_int())
                pid = int(note.read_int())
                last_values.put(key_hash, (pid << SEQUENCE_BITS) | int(note.read_int()))
            queue.last_values = last_values
            for _ in range(note.read_int()):
                live = self._live[int(note.read_int())]
                gaps = NoteReader(note.read_bytes())
                while gaps.has_more():
                    start = gaps.read_int()
                    live.add_gap(start, gaps.read_int())

    def _read_queue(self, note: NoteReader) -> None:
        qid = note.read_int()
        name = note.read_text()
        config = note.read_text()
        queue = Queue(qid, self._parse(name, config))
        queue.config_json = config
        queue.created_at = note.read_seconds()
        queue.enqueued = note.read_int()
        queue.duplicates = note.read_int()
        queue.retried = note.read_int()
        if note.kind >= COUNTERS_SINCE:
            queue.refused = note.read_int()
            queue.past_delivered = note.read_int()
            queue.past_redelivered = note.read_int()
            queue.past_nacked = note.read_int()
            queue.past_acked = note.read_int()
        for _ in range(note.read_int()):
            reason = note.read_text()
            queue.dead_by_reason[reason] = int(note.read_int())
        queue.partition_gates = read_gates(note)
        self._engine.queues[name] = queue
        self.by_qid[int(qid)] = queue
        for number in range(note.read_int()):
            self._read_partition(note, queue, number)
        for _ in range(note.read_int()):
            self._read_group(note, queue)
        if note.kind >= ADMISSION_SINCE:
            queue.set_pause(read_pause(note))
        for _ in range(note.read_int()):
            message_id = note.read_bytes()
            queue.remember_id(message_id, note.read_seconds())
        if note.kind >= COMMANDS_SINCE:
            queue.load_delayed_ids(note)

    def _read_partition(self, note: NoteReader, queue: Queue, number: int) -> None:
        partition = Partition(queue, note.read_int(), number)
        partition.next_seq = note.read_count(1 << SEQUENCE_BITS)
        live = LiveSequences(note.read_int(), partition.next_seq)
        for _ in range(note.read_int()):
            start = note.read_int()
            live.add_gap(start, note.read_int())
        for _ in range(note.read_int()):
            seq = int(note.read_int())
            partition.set_target_group(seq, note.read_int())
        for _ in range(note.read_int()):
            seq = int(note.read_int())
            live.arrivals_ms[seq] = int(note.read_int())
        partition.has_delayed = bool(live.arrivals_ms)
        for _ in range(note.read_int() if note.kind >= COMMANDS_SINCE else 0):
            seq = int(note.read_int())
            due_ms = note.read_int()
            live.rescheduled[seq] = (int(due_ms), int(note.read_int()))
        queue.partitions.append(partition)
        self._engine.partitions[int(partition.pid)] = partition
        self._live[int(partition.pid)] = live

    def _read_group(self, note: NoteReader, queue: Queue) -> None:
        group = Group(queue, note.read_int(), note.read_text())
        group.delivered = note.read_int()
        group.redelivered = note.read_int()
        group.nacked = note.read_int()
        if note.kind >= ADMISSION_SINCE:
            load_admission(note, group.admission)
        queue.groups[group.name] = group
        self._engine.groups[int(group.gid)] = group
        for partition in queue.partitions:
            cursor = Cursor(group, partition, note.read_int())
            cursor.enqueued = note.read_int()
            known = OUTCOMES if note.kind >= COMMANDS_SINCE else OUTCOMES - 1
            cursor.outcome_counts = [int(note.read_int()) for _ in range(known)]
            cursor.outcome_counts += [0] * (OUTCOMES - known)
            cursor.settled_seqs = {int(note.read_int()) for _ in range(note.read_int())}
            for _ in range(note.read_int()):
                load_retry(note, cursor)
            for _ in range(note.read_int()):
                load_released(note, cursor)
            if note.read_int():
                cursor.lost_ranges = read_lost_ranges(note)
            group.cursors.append(cursor)
            partition.cursors.append(cursor)
        if note.kind >= HELD_KEYS_SINCE:
            load_held_keys(note, group)

    def had_message(self, pid: i64, seq: i64) -> bool:
        """Return whether a message was stored when the snapshot was made."""
        live = self._live.get(int(pid))
        return live is not None and live.contains(seq)

    def arrival_ms(self, pid: i64, seq: i64) -> int:
        """Return when a message with a delay arrived, in milliseconds since 1970; 0: not known."""
        live = self._live.get(int(pid))
        return 0 if live is None else live.arrivals_ms.get(int(seq), 0)

    def finish_rows(self) -> None:
        for pid, live in self._live.items():
            partition = self._engine.partitions.get(pid)
            for seq, (due_ms, expires) in live.rescheduled.items():
                if partition is not None and partition.holds(seq):
                    partition.reschedule(seq, due_ms, expires)
        self._live = {}


class LiveSequences:
    """The stored sequences of a partition when the snapshot was made."""

    def __init__(self, first: i64, end: i64) -> None:
        self._first: i64 = first
        self._end: i64 = end
        self._gap_starts: list[int] = []
        self._gap_ends: list[int] = []
        # Arrivals of delayed messages, in milliseconds since 1970.
        self.arrivals_ms: dict[int, int] = {}
        # New due times, in milliseconds since 1970, and expiries of messages that were moved.
        self.rescheduled: dict[int, tuple[int, int]] = {}

    def add_gap(self, start: i64, count: i64) -> None:
        self._gap_starts.append(int(start))
        self._gap_ends.append(int(start + count))

    def contains(self, seq: i64) -> bool:
        if seq < self._first or seq >= self._end:
            return False
        nth = bisect_right(self._gap_starts, int(seq)) - 1
        return nth < 0 or self._gap_ends[nth] <= seq


def read_gates(note: NoteReader) -> list[PartitionGate]:
    return [
        PartitionGate([int(note.read_int()) for _ in range(note.read_int())])
        for _ in range(note.read_int())
    ]


def load_retry(note: NoteReader, cursor: Cursor) -> i64:
    """Read a delivery that waits for its retry; return its sequence.

    Its token tells whether a settlement that arrives later was counted already. A log may have
    notes from before 0.1.0, even without a snapshot: they lack the last fields.
    """
    seq = note.read_int()
    lease = cursor.leases.get(int(seq))
    if lease is None:
        lease = Lease(cursor, seq, 0)
        cursor.leases[int(seq)] = lease
    lease.change(AWAIT_RETRY)
    lease.failures = note.read_int()
    lease.attempt = lease.failures
    lease.retry_at = note.read_seconds()
    lease.first_delivered_at = note.read_seconds()
    lease.last_delivered_at = note.read_seconds()
    lease.description = note.read_text()
    events = lease.history if lease.history is not None else take_released(cursor, seq)
    lease.history = read_events(note, cursor.group.name, events)
    lease.token_counter = note.read_int() if note.has_more() else 0
    lease.spent_before_start = note.read_seconds() if note.has_more() else 0.0
    return seq


def load_released(note: NoteReader, cursor: Cursor) -> None:
    """Read the events of a released delivery."""
    seq = note.read_int()
    lease = cursor.leases.get(int(seq))
    if lease is not None:
        events = lease.history if lease.history is not None else []
        lease.history = read_events(note, cursor.group.name, events)
    else:
        events = take_released(cursor, seq)
        store_released(cursor, seq, read_events(note, cursor.group.name, events))
