"""Recovery: build the engine from a snapshot, the index of older messages, and newer records.

Records after the snapshot are replayed through the functions that wrote them, so that a queue goes
through the same states: whether a message is deleted depends on the groups at that time. Leases are
in no record: after a crash, leased messages are delivered again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from sluice.errors import StoreError, UnusableRecord
from sluice.message import DELAYED, TARGETED, decode_body
from sluice.queues.bulk import load_acknowledged
from sluice.queues.engine import Engine
from sluice.queues.flow import load_admission, load_rescheduled, read_pause
from sluice.queues.log import FIRST_OWNER_PID, FIRST_STATE_PID, NoteReader, notes
from sluice.queues.model import (
    SEQUENCE_BITS,
    Cursor,
    Group,
    Lease,
    Partition,
    Queue,
    QueueRules,
    count_unsettled,
    history,
)
from sluice.queues.recovery.snapshot import SnapshotReader, load_released, load_retry, read_gates
from sluice.store.protocol import MESSAGE, ROW_BYTES, Record, read_row

MAX_PARTITIONS_PER_NOTE: Final = 1 << 16  # that one note can create


def _shift_to_now(lease: Lease, now: float) -> None:
    """Shift the times of a lease whose last delivery is in the future.

    The clock was set back while the broker was down. A retry waits for a duration and not for a
    date, so it continues from now; otherwise it and later messages of its key would wait for hours.
    """
    offset_seconds = lease.last_delivered_at - now
    lease.retry_at -= offset_seconds
    lease.first_delivered_at -= offset_seconds
    lease.last_delivered_at = now


def unusable_record(source: str, error: Exception) -> UnusableRecord:
    return UnusableRecord(f"{source} contains invalid data: {type(error).__name__}: {error}")


class EngineLoader:
    """Loads the records of a store into an engine. `parse` reads a stored configuration."""

    def __init__(self, engine: Engine, parse: Callable[[str, str], QueueRules]) -> None:
        self._engine: Engine = engine
        self._parse = parse
        self._snapshot: SnapshotReader = SnapshotReader(engine, parse)
        self._delayed_messages: list[tuple[Partition, int, float]] = []
        self._is_replaying: bool = False

    # ---- methods that the store calls, in this order. A valid checksum says that the bytes are
    # those that were written, not that Sluice wrote them: each failure to read them becomes one
    # kind of error.

    def load_snapshot(self, snapshot: bytes) -> None:
        try:
            self._snapshot.read(snapshot)
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            raise unusable_record("the snapshot", error) from error

    def load_rows(self, rows: bytes) -> None:
        try:
            self._load_rows(rows)
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            raise unusable_record("an index", error) from error

    def load_record(self, record: Record) -> None:
        try:
            self._load_record(record)
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            raise unusable_record("a record", error) from error

    def finish(self) -> None:
        """Rebuild cursors and timers after all records were loaded."""
        try:
            self._finish()
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            raise unusable_record("the state of the queues", error) from error

    # ---- the same, with the original errors

    def _load_rows(self, rows: bytes) -> None:
        at: i64 = 0
        size: i64 = len(rows)
        while at < size:
            record = read_row(rows, at)
            at += ROW_BYTES
            if record.pid >= FIRST_OWNER_PID:
                if record.pid >= FIRST_STATE_PID:
                    self._engine.broker_state.load_row(record)
                else:
                    self._engine.exclusive.load_row(record)
                continue
            partition = self._engine.partitions.get(int(record.pid))
            if partition is not None and self._snapshot.had_message(record.pid, record.seq):
                self._place_message(partition, record, 0, self._arrival_ms(record))

    def _arrival_ms(self, record: Record) -> i64:
        """Return when the message of an index row arrived, in milliseconds since 1970.

        The row of a message with a delay has the end of the delay in place of its arrival. The
        snapshot has the arrival. Without it (a damaged store), the message counts as arrived when
        its delay ended, or now: it may stay stored for too long, but never for too short a time.
        """
        if record.flags & DELAYED == 0:
            return record.time
        arrived_at: i64 = self._snapshot.arrival_ms(record.pid, record.seq)
        if arrived_at:
            return arrived_at
        now: i64 = int(self._engine.now * 1000.0)
        return record.time if record.time < now else now

    def _load_record(self, record: Record) -> None:
        if not self._is_replaying:
            self._begin_replay()
        if record.kind != MESSAGE:
            self._apply_note(NoteReader(record.body))
            return
        if record.pid >= FIRST_OWNER_PID:
            if record.pid >= FIRST_STATE_PID:
                self._engine.broker_state.load_record(record)
            else:
                self._engine.exclusive.load_record(record)
            return
        partition = self._engine.partitions.get(int(record.pid))
        if partition is None:
            return
        if record.seq >= partition.next_seq:
            self._append_message(partition, record)
        elif partition.holds(record.seq):
            self._place_message(partition, record, 0, 0)  # copied by compaction
        # Otherwise compaction copied it, and it was settled since.

    def _finish(self) -> None:
        engine = self._engine
        if not self._is_replaying:
            self._begin_replay()
        for queue in engine.queues.values():
            for partition in queue.partitions:
                partition.committed_end = partition.next_seq
                partition.restored_end = partition.next_seq
                earliest_expiry = partition.next_expiry()
                if earliest_expiry:
                    engine.timers.schedule_expiry(partition, earliest_expiry)
                engine.timers.schedule_retention(partition)
        for partition, seq, due in self._delayed_messages:
            if seq not in partition.rescheduled:
                self._restore_delay(partition, seq, due)
        for partition in engine.partitions.values():
            for seq, due_ms in partition.rescheduled.items():
                self._restore_delay(partition, seq, float(due_ms) / 1000.0)
        for queue in engine.queues.values():
            for group in queue.groups.values():
                for cursor in group.cursors:
                    for lease in cursor.leases.values():
                        if lease.last_delivered_at > engine.now:
                            _shift_to_now(lease, engine.now)
                        engine.timers.schedule_retry(lease, lease.retry_at)
                    cursor.rebuild()
        engine.delivery_control.finish_recovery()
        engine.key_holds.finish_recovery()
        engine.schedules.finish_recovery()
        engine.exclusive.finish_recovery(engine.now)

    def _restore_delay(self, partition: Partition, seq: int, due_at: float) -> None:
        if not partition.holds(seq):
            return
        if due_at > self._engine.now:
            partition.mark_delayed(seq)
            self._engine.timers.schedule_delayed(partition, seq, due_at)
        elif partition.flags(seq) & DELAYED:
            partition.end_delay(seq, due_at)

    # ---- messages

    def _place_message(
        self, partition: Partition, record: Record, pending_groups: i64, arrived_ms: i64
    ) -> None:
        engine = self._engine
        old = partition.address(record.seq)
        engine.segment_usage.add(record.address, record.size)
        if old >= 0:
            engine.segment_usage.drop(old, record.size)
            partition.set_address(record.seq, record.address)
            return
        partition.insert(
            record.seq,
            record.address,
            record.size,
            record.key_hash,
            record.expires,
            record.flags,
            pending_groups,
            arrived_ms,
        )
        self._remember_delay(partition, record)

    def _remember_delay(self, partition: Partition, record: Record) -> None:
        if record.flags & DELAYED:
            partition.has_delayed = True
            self._delayed_messages.append((partition, int(record.seq), float(record.time) / 1000.0))

    def _begin_replay(self) -> None:
        """Count the pending groups of all messages from before the snapshot."""
        self._is_replaying = True
        self._snapshot.finish_rows()
        self._engine.key_holds.finish_snapshot()
        for warning in self._engine.exclusive.finish_rows():
            self._engine.state.warn(warning)
        for queue in self._engine.queues.values():
            for partition in queue.partitions:
                partition.undated_end = partition.next_seq
                self._count_unsettled(partition)
            for group in queue.groups.values():
                for cursor in group.cursors:
                    self._check_ledger(cursor)

    def _count_unsettled(self, partition: Partition) -> None:
        seq = partition.first_live(0)
        while seq < partition.next_seq:
            pending_groups: i64 = 0
            for cursor in partition.cursors:
                if partition.is_for_group(seq, cursor.group.gid) and not cursor.is_settled(seq):
                    pending_groups += 1
            partition.restore_pending_groups(seq, pending_groups)
            seq = partition.first_live(seq + 1)

    def _check_ledger(self, cursor: Cursor) -> None:
        """Compare the ledger of a group with the stored messages; some may be lost."""
        partition = cursor.partition
        cursor.advance_watermark(cursor.low_watermark)
        for seq in list(cursor.leases):
            if not partition.holds(seq) or cursor.is_settled(seq):
                del cursor.leases[seq]
        if cursor.settled_seqs:
            cursor.settled_seqs = {seq for seq in cursor.settled_seqs if partition.holds(seq)}
        present = cursor.count_settled() + count_unsettled(cursor)
        if present != cursor.enqueued:
            self._engine.state.warn(
                f"messages missing in the store: {cursor.enqueued - present} "
                f"(queue {partition.queue.name}, partition {partition.number}, "
                f"group {cursor.group.name})"
            )
            cursor.enqueued = present
            if cursor.lost_ranges is not None:
                # Each gap may be one of them.
                cursor.lost_ranges.add(cursor.lost_ranges.acknowledged_to, partition.next_seq)
        cursor.enqueued_counted_to = partition.next_seq

    def _append_message(self, partition: Partition, record: Record) -> None:
        """Append a message from after the snapshot."""
        queue = partition.queue
        missing: i64 = record.seq - partition.next_seq
        if record.seq >= 1 << SEQUENCE_BITS:
            raise ValueError(f"message {record.seq} follows message {partition.next_seq - 1}")
        # A damaged log that was opened by a salvage.
        if missing:
            for cursor in partition.cursors:
                cursor.enqueued -= missing
                if cursor.lost_ranges is not None:
                    cursor.lost_ranges.add(partition.next_seq, record.seq)
        message = decode_body(record.body, 0, False)
        target: i64 = (
            partition.target_groups.get(int(record.seq), 0) if record.flags & TARGETED else 0
        )
        pending_groups: i64 = 1 if target else len(partition.cursors)
        if queue.rules.is_compacted:
            self._engine.key_compaction.replay_message(queue, partition, record.seq, message.key)
        self._engine.segment_usage.add(record.address, record.size)
        partition.next_seq = record.seq
        partition.append(
            record.address,
            record.size,
            record.key_hash,
            record.expires,
            record.flags,
            pending_groups,
            message.enqueued_at_ms,
        )
        self._remember_delay(partition, record)
        if target:
            partition.skip_for_other_groups(record.seq, target)
        if message.id:
            queue.remember_id(message.dedup_key(), float(message.enqueued_at_ms) / 1000.0)
            if record.flags & DELAYED:
                queue.index_delayed(message.id, partition, record.seq)
        if missing:
            for cursor in partition.cursors:
                # The low watermark may be at the first lost message.
                cursor.advance_watermark(cursor.low_watermark)

    # ---- notes

    def _apply_note(self, note: NoteReader) -> None:
        engine = self._engine
        kind = note.kind
        if kind >= notes.FIRST_OWNER_NOTE:
            engine.exclusive.apply_note(note)
        elif kind >= notes.FIRST_STATE_NOTE:
            engine.broker_state.apply_note(note)
        elif kind == notes.SETTLED:
            self._apply_settled(note)
        elif kind == notes.REMOVED:
            self._apply_removed(note)
        elif kind == notes.RETRY:
            self._apply_retry(note)
        elif kind == notes.TARGET_GROUP:
            partition = engine.partitions.get(int(note.read_int()))
            seq = int(note.read_int())
            if partition is not None:
                partition.set_target_group(seq, note.read_int())
        elif kind == notes.DELIVERY_RELEASED:
            self._apply_released(note)
        elif kind == notes.BULK_PROGRESS:
            self._apply_bulk_progress(note)
        elif kind == notes.BATCH_COMMITTED:
            engine.batches.fences.load(note)
        elif kind == notes.TOKEN_SECRET:
            engine.tokens.secret = note.read_bytes()
        elif kind == notes.DEAD_LETTERED:
            queue = self._find_queue(note.read_int())
            reason = note.read_text()
            if queue is not None:
                queue.count_dead(reason)
            if note.has_more():
                self._count_dead_letter(note)
        elif kind == notes.QUEUE_PAUSED:
            queue = self._find_queue(note.read_int())
            if queue is not None:
                queue.set_pause(read_pause(note))
        elif kind == notes.GROUP_ADMISSION:
            group = engine.groups.get(int(note.read_int()))
            if group is not None:
                load_admission(note, group.admission)
        elif kind == notes.RESCHEDULED:
            load_rescheduled(note, engine.partitions)
        elif notes.SCHEDULE_STORED <= kind <= notes.SCHEDULE_RAN:
            engine.schedules.load(note)
        elif notes.KEY_HELD <= kind <= notes.KEY_RELEASED:
            engine.key_holds.load(note)
        else:
            self._apply_lifecycle(note)

    def _apply_lifecycle(self, note: NoteReader) -> None:
        """Apply a note that creates, changes or deletes a queue or a group."""
        engine = self._engine
        kind = note.kind
        if kind == notes.QUEUE_CREATED:
            self._apply_queue_created(note)
        elif kind == notes.QUEUE_DELETED:
            queue = self._find_queue(note.read_int())
            if queue is not None:
                engine.lifecycle.remove_queue(queue)
                del self._snapshot.by_qid[int(queue.qid)]
        elif kind == notes.GROUP_CREATED:
            queue = self._find_queue(note.read_int())
            gid = note.read_int()
            name = note.read_text()
            if queue is not None:
                engine.lifecycle.add_group(
                    queue, gid, name, [int(note.read_int()) for _ in queue.partitions]
                )
        else:
            group = engine.groups.get(int(note.read_int()))
            if group is None:
                return
            if kind == notes.GROUP_DELETED:
                engine.lifecycle.remove_group(group)
            elif kind == notes.GROUP_SEEK:
                engine.lifecycle.set_group_positions(
                    group, [int(note.read_int()) for _ in group.cursors]
                )

    def _find_queue(self, qid: i64) -> Queue | None:
        return self._snapshot.by_qid.get(int(qid))

    def _apply_queue_created(self, note: NoteReader) -> None:
        engine = self._engine
        qid = note.read_int()
        first_pid = note.read_count(FIRST_OWNER_PID)
        count = note.read_count(MAX_PARTITIONS_PER_NOTE)
        name = note.read_text()
        config = note.read_text()
        created_at = note.read_seconds()
        rules = self._parse(name, config)
        queue = self._find_queue(qid)
        if queue is None:
            queue = Queue(qid, rules)
            queue.config_json = config
            queue.created_at = created_at
            self._snapshot.by_qid[int(qid)] = queue
            engine.queues[name] = queue
            engine.state.next_qid = max(engine.state.next_qid, qid + 1)
        else:
            engine.lifecycle.set_rules(queue, rules, config)
        queue.partition_gates = read_gates(note)
        if count:
            engine.lifecycle.add_partitions(queue, first_pid, count)

    def _apply_settled(self, note: NoteReader) -> None:
        group = self._engine.groups.get(int(note.read_int()))
        partition = self._engine.partitions.get(int(note.read_int()))
        outcome = note.read_int()
        if group is None or partition is None:
            return
        cursor = group.cursors[partition.number]
        while note.has_more():
            first = note.read_int()
            end = first + note.read_int()
            seq = partition.first_live(first)
            while seq < end and seq < partition.next_seq:
                if not cursor.is_settled(seq):
                    lease = cursor.leases.pop(int(seq), None)
                    if outcome == notes.ACKED:
                        group.delivered += 1
                        if lease is not None:
                            group.redelivered += 1
                    self._engine.removal.apply_settlement(cursor, seq, outcome)
                seq = partition.first_live(seq + 1)

    def _apply_removed(self, note: NoteReader) -> None:
        partition = self._engine.partitions.get(int(note.read_int()))
        if partition is None:
            return
        while note.has_more():
            first = note.read_int()
            end = first + note.read_int()
            seq = partition.first_live(first)
            while seq < end and seq < partition.next_seq:
                self._engine.removal.delete_message(partition, seq)
                seq = partition.first_live(seq + 1)

    def _apply_retry(self, note: NoteReader) -> None:
        group = self._engine.groups.get(int(note.read_int()))
        partition = self._engine.partitions.get(int(note.read_int()))
        if group is None or partition is None:
            return
        partition.queue.retried += 1
        cursor = group.cursors[partition.number]
        seq = load_retry(note, cursor)
        self._count_failure(group, cursor.leases[int(seq)])
        if not partition.holds(seq) or cursor.is_settled(seq):
            del cursor.leases[int(seq)]  # the message is lost: the log was damaged

    def _count_failure(self, group: Group, lease: Lease) -> None:
        """Count the delivery that a retry note ended.

        No record stores deliveries: the counters of a previous run continue with those that ended.
        """
        group.delivered += 1
        if lease.failures > 1:
            group.redelivered += 1
        if lease.history and lease.history[-1].kind == history.NACKED:
            group.nacked += 1

    def _count_dead_letter(self, note: NoteReader) -> None:
        """Count the delivery that a dead letter ended."""
        group = self._engine.groups.get(int(note.read_int()))
        if group is not None:
            group.delivered += 1
            group.nacked += note.read_int()
            group.redelivered += note.read_int()

    def _apply_released(self, note: NoteReader) -> None:
        group = self._engine.groups.get(int(note.read_int()))
        partition = self._engine.partitions.get(int(note.read_int()))
        if group is not None and partition is not None:
            group.delivered += 1
            load_released(note, group.cursors[partition.number])

    def _apply_bulk_progress(self, note: NoteReader) -> None:
        group = self._engine.groups.get(int(note.read_int()))
        partition = self._engine.partitions.get(int(note.read_int()))
        if group is not None and partition is not None:
            load_acknowledged(note, group.cursors[partition.number])
