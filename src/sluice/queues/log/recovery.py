"""The engine brought back from what a store kept: a snapshot, the messages that stood before it, the records behind it.

Records behind the snapshot are replayed through the functions that made them, so that a queue passes through the states
it was in: who waited for a message when it was let go decides whether it comes back. What was leased is in no record:
after a crash it is delivered again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from sluice.errors import StoreError, UnusableRecord
from sluice.message import DELAYED, TARGETED, decode_body
from sluice.queues.compacted import key_compaction
from sluice.queues.flow import dead_letters
from sluice.queues.flow import lifecycle
from sluice.queues.log import frame_builder as notes
from sluice.queues.model.cursor import SEQUENCE_BITS, Cursor
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.engine import Engine, pass_by_others
from sluice.queues.log.frame_builder import Note
from sluice.queues.log.broker_state import FIRST_OWNER, FIRST_PID, THING_GONE
from sluice.queues.bulk.lost_ranges import load_told
from sluice.queues.compacted.owners import OWNER_MADE
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.flow.removal import let_go_of, settle_one, waits_for_nobody
from sluice.queues.model.queue_rules import Rules
from sluice.queues.log.snapshot import SnapshotReader, load_retry, load_returned, read_gates
from sluice.store.protocol import MESSAGE, ROW_BYTES, Record, read_row

MOST_PARTITIONS: Final = 1 << 16  # that one note can make


def _delivered_now(lease: Lease, now: float) -> None:
    """It was delivered at a time that is still to come: somebody has set the clock back while we were down. A retry
    waits for a span and not for a date, so it goes on from now; else it, and all behind it of its key, waited for
    hours."""
    ahead = lease.last_at - now
    lease.due -= ahead
    lease.first_at -= ahead
    lease.last_at = now


def unusable(what: str, error: Exception) -> UnusableRecord:
    return UnusableRecord(f"{what} holds what cannot be read: {type(error).__name__}: {error}")


class EngineLoader:
    """`parse` reads a configuration that the engine wrote before."""

    def __init__(self, engine: Engine, parse: Callable[[str, str], Rules]) -> None:
        self._engine: Engine = engine
        self._parse = parse
        self._snapshot: SnapshotReader = SnapshotReader(engine, parse)
        self._delays: list[tuple[Partition, int, float]] = []
        self._replays: bool = False

    # ---- what the store calls, in this order. A checksum that is right says that the bytes are
    # those that were
    # written, not that a Sluice wrote them: whatever fails to be read here is told in one kind of
    # error.

    def load_snapshot(self, snapshot: bytes) -> None:
        try:
            self._snapshot.read(snapshot)
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            raise unusable("the snapshot", error) from error

    def load_rows(self, rows: bytes) -> None:
        try:
            self._load_rows(rows)
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            raise unusable("an index", error) from error

    def load_record(self, record: Record) -> None:
        try:
            self._load_record(record)
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            raise unusable("a record", error) from error

    def finish(self) -> None:
        """All is read: put every cursor at its floor and every waiting thing where it is waited
        for."""
        try:
            self._finish()
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            raise unusable("the state of the queues", error) from error

    # ---- the same, with whatever errors they have

    def _load_rows(self, rows: bytes) -> None:
        at: i64 = 0
        size: i64 = len(rows)
        while at < size:
            record = read_row(rows, at)
            at += ROW_BYTES
            if record.pid >= FIRST_OWNER:
                if record.pid >= FIRST_PID:
                    self._engine.keeping.load_row(record)
                else:
                    self._engine.exclusive.load_row(record)
                continue
            partition = self._engine.partitions.get(int(record.pid))
            if partition is not None and self._snapshot.holds(record.pid, record.seq):
                self._place(partition, record, 0, self._arrival(record))

    def _arrival(self, record: Record) -> i64:
        """Return when the message of an index row arrived, in milliseconds since 1970.

        The row of a message with a delay has the end of the delay in place of its arrival. The snapshot
        has the arrival; without it (a snapshot of an older version) the message counts as arrived when
        its delay ended, or now: it may be retained for too long, and never for too short a time.
        """
        if record.flags & DELAYED == 0:
            return record.time
        arrived_at: i64 = self._snapshot.arrival(record.pid, record.seq)
        if arrived_at:
            return arrived_at
        now: i64 = int(self._engine.now * 1000.0)
        return record.time if record.time < now else now

    def _load_record(self, record: Record) -> None:
        if not self._replays:
            self._begin_replay()
        if record.kind != MESSAGE:
            self._apply(Note(record.body))
            return
        if record.pid >= FIRST_OWNER:
            if record.pid >= FIRST_PID:
                self._engine.keeping.load_record(record)
            else:
                self._engine.exclusive.load_record(record)
            return
        partition = self._engine.partitions.get(int(record.pid))
        if partition is None:
            return
        if record.seq >= partition.next:
            self._append(partition, record)
        elif partition.holds(record.seq):
            self._place(partition, record, 0, 0)  # compaction wrote it anew
        # else: compaction wrote it anew, and it was settled since

    def _finish(self) -> None:
        engine = self._engine
        if not self._replays:
            self._begin_replay()
        for queue in engine.queues.values():
            for partition in queue.partitions:
                partition.committed = partition.next
                partition.restored = partition.next
                soonest = partition.next_expiry()
                if soonest:
                    engine.timers.expect_expiry(partition, soonest)
                if queue.rules.retention > 0.0 and partition.live:
                    engine.expect_retention(partition)
        for partition, seq, due in self._delays:
            if due > engine.now and partition.holds(seq):
                engine.timers.wait_for_delay(partition, seq, due)
        for queue in engine.queues.values():
            for group in queue.groups.values():
                for cursor in group.cursors:
                    for lease in cursor.leases.values():
                        if lease.last_at > engine.now:
                            _delivered_now(lease, engine.now)
                        engine.timers.wait_for_retry(lease, lease.due)
                    cursor.rebuild()
        engine.exclusive.finish(engine.now)

    # ---- messages

    def _place(self, partition: Partition, record: Record, left: i64, time: i64) -> None:
        engine = self._engine
        old = partition.address(record.seq)
        engine.segments.add(record.address, record.size)
        if old >= 0:
            engine.segments.drop(old, record.size)
            partition.move(record.seq, record.address)
            return
        partition.insert(
            record.seq, record.address, record.size, record.key, record.expires, record.flags, left, time
        )
        partition.queue.bytes += record.size
        if record.flags & DELAYED:
            partition.has_delays = True
            self._delays.append((partition, int(record.seq), float(record.time) / 1000.0))

    def _begin_replay(self) -> None:
        """The messages from before the snapshot are all here: count who waits for each."""
        self._replays = True
        self._snapshot.end_rows()
        self._engine.warnings += self._engine.exclusive.end_rows()
        for queue in self._engine.queues.values():
            for partition in queue.partitions:
                partition.undated = partition.next
                self._count_waiting(partition)
            for group in queue.groups.values():
                for cursor in group.cursors:
                    self._check_entered(cursor)

    def _count_waiting(self, partition: Partition) -> None:
        queue = partition.queue
        seq = partition.first_live(0)
        while seq < partition.next:
            left: i64 = 0
            for cursor in partition.cursors:
                if partition.is_for(seq, cursor.group.gid) and not cursor.settled(seq):
                    left += 1
            partition.set_left(seq, left)
            if left > 0 or waits_for_nobody(partition):
                queue.depth += 1
            seq = partition.first_live(seq + 1)

    def _check_entered(self, cursor: Cursor) -> None:
        """The ledger of a group must fit what is here; where it does not, the store has lost something."""
        partition = cursor.partition
        cursor.advance(cursor.floor)
        for seq in list(cursor.leases):
            if not partition.holds(seq) or cursor.settled(seq):
                del cursor.leases[seq]
        if cursor.done:
            cursor.done = {seq for seq in cursor.done if partition.holds(seq)}
        here = cursor.count_settled() + cursor.count_unsettled()
        if here != cursor.entered:
            self._engine.warnings.append(
                f"of partition {partition.number} of queue {partition.queue.name}, what group {cursor.group.name} had "
                f"to settle is not all in the store any more: messages missing {cursor.entered - here}"
            )
            cursor.entered = here
            if cursor.losses is not None:
                cursor.losses.lose(cursor.losses.told, partition.next)  # any gap may be one of them
        cursor.entered_to = partition.next

    def _append(self, partition: Partition, record: Record) -> None:
        """A message behind the snapshot, as it came."""
        queue = partition.queue
        lost: i64 = record.seq - partition.next
        if record.seq >= 1 << SEQUENCE_BITS:
            raise ValueError(f"message {record.seq} follows message {partition.next - 1}")
        if lost:  # a damaged log that was opened all the same
            for cursor in partition.cursors:
                cursor.entered -= lost
                if cursor.losses is not None:
                    cursor.losses.lose(partition.next, record.seq)
        message = decode_body(record.body, 0, False)
        target: i64 = partition.targets.get(int(record.seq), 0) if record.flags & TARGETED else 0
        left: i64 = 1 if target else len(partition.cursors)
        if queue.rules.compacted:
            key_compaction.load(self._engine, queue, partition, record.seq, message.key)
        self._place(partition, record, left, message.enqueued_at)
        queue.depth += 1
        queue.enqueued += 1
        if target:
            pass_by_others(partition, record.seq, target)
        if message.id:
            queue.remember(message.known_by(), float(message.enqueued_at) / 1000.0)
        if lost:
            for cursor in partition.cursors:
                cursor.advance(cursor.floor)  # it may have stood at the first that is lost

    # ---- notes

    def _apply(self, note: Note) -> None:
        engine = self._engine
        what = note.what
        if what >= OWNER_MADE:
            engine.exclusive.apply(note)
        elif what >= THING_GONE:
            engine.keeping.apply(note)
        elif what == notes.SETTLED:
            self._settled(note)
        elif what == notes.REMOVED:
            self._removed(note)
        elif what == notes.RETRY:
            self._retry(note)
        elif what == notes.TARGET:
            partition = engine.partitions.get(int(note.number()))
            seq = int(note.number())
            if partition is not None:
                partition.aim(seq, note.number())
        elif what == notes.RETURNED:
            self._returned(note)
        elif what == notes.TOLD:
            self._told(note)
        elif what == notes.BATCH:
            engine.batches.load(note)
        elif what == notes.TOKEN_SECRET:
            engine.tokens.secret = note.data()
        elif what == notes.DIED:
            queue = self._queue(note.number())
            if queue is not None:
                dead_letters.count(queue, note.text())
        else:
            self._change(note)

    def _change(self, note: Note) -> None:
        """A queue or a group comes, changes or goes."""
        engine = self._engine
        what = note.what
        if what == notes.QUEUE_MADE:
            self._made(note)
        elif what == notes.QUEUE_GONE:
            queue = self._queue(note.number())
            if queue is not None:
                lifecycle.forget_queue(engine, queue)
                del self._snapshot.by_qid[int(queue.qid)]
        elif what == notes.GROUP_MADE:
            queue = self._queue(note.number())
            gid = note.number()
            name = note.text()
            if queue is not None:
                lifecycle.add_group(engine, queue, gid, name, [int(note.number()) for _ in queue.partitions])
        else:
            group = engine.groups.get(int(note.number()))
            if group is None:
                return
            if what == notes.GROUP_GONE:
                lifecycle.forget_group(engine, group)
            elif what == notes.SOUGHT:
                lifecycle.move_group(engine, group, [int(note.number()) for _ in group.cursors])

    def _queue(self, qid: i64) -> Queue | None:
        return self._snapshot.by_qid.get(int(qid))

    def _made(self, note: Note) -> None:
        engine = self._engine
        qid = note.number()
        first_pid = note.count(FIRST_OWNER)
        count = note.count(MOST_PARTITIONS)
        name = note.text()
        config = note.text()
        created_at = note.real()
        rules = self._parse(name, config)
        queue = self._queue(qid)
        if queue is None:
            queue = Queue(qid, rules)
            queue.config = config
            queue.created_at = created_at
            self._snapshot.by_qid[int(qid)] = queue
            engine.queues[name] = queue
            engine.next_qid = max(engine.next_qid, qid + 1)
        else:
            lifecycle.set_rules(engine, queue, rules, config)
        queue.gates = read_gates(note)
        if count:
            lifecycle.add_partitions(engine, queue, first_pid, count)

    def _settled(self, note: Note) -> None:
        group = self._engine.groups.get(int(note.number()))
        partition = self._engine.partitions.get(int(note.number()))
        how = note.number()
        if group is None or partition is None:
            return
        cursor = group.cursors[partition.number]
        while note.more():
            first = note.number()
            end = first + note.number()
            seq = partition.first_live(first)
            while seq < end and seq < partition.next:
                if not cursor.settled(seq):
                    cursor.leases.pop(int(seq), None)
                    settle_one(self._engine, cursor, seq, how)
                seq = partition.first_live(seq + 1)

    def _removed(self, note: Note) -> None:
        partition = self._engine.partitions.get(int(note.number()))
        if partition is None:
            return
        while note.more():
            first = note.number()
            end = first + note.number()
            seq = partition.first_live(first)
            while seq < end and seq < partition.next:
                if waits_for_nobody(partition):
                    partition.queue.depth -= 1
                let_go_of(self._engine, partition, seq)
                seq = partition.first_live(seq + 1)

    def _retry(self, note: Note) -> None:
        group = self._engine.groups.get(int(note.number()))
        partition = self._engine.partitions.get(int(note.number()))
        if group is None or partition is None:
            return
        partition.queue.retried += 1
        cursor = group.cursors[partition.number]
        seq = load_retry(note, cursor, True, True)
        if not partition.holds(seq) or cursor.settled(seq):
            del cursor.leases[int(seq)]  # of a message that is lost: the log was damaged

    def _returned(self, note: Note) -> None:
        group = self._engine.groups.get(int(note.number()))
        partition = self._engine.partitions.get(int(note.number()))
        if group is not None and partition is not None:
            load_returned(note, group.cursors[partition.number])

    def _told(self, note: Note) -> None:
        group = self._engine.groups.get(int(note.number()))
        partition = self._engine.partitions.get(int(note.number()))
        if group is not None and partition is not None:
            load_told(note, group.cursors[partition.number])
