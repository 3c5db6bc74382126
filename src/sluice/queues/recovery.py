"""The state of all queues as one piece of bytes, and back: what a store keeps so that it need not keep every note.

A snapshot says nothing of bodies and addresses: those come from the store's index rows. It says which messages are still
here, what each group has settled, and which of its deliveries wait for a retry. What was leased is not in it: after a
crash it is delivered again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from sluice.message import DELAYED, PRIORITY_BITS, decode_body
from sluice.queues import journal as notes
from sluice.queues.cursor import Cursor
from sluice.queues.delivery import WAITING, Lease
from sluice.queues.engine import Engine
from sluice.queues.group import Group
from sluice.queues.journal import Note, NoteWriter
from sluice.queues.keeping import FIRST_PID, THING_GONE
from sluice.queues.partition import BLOCK, Partition
from sluice.queues.queue import Queue
from sluice.queues.rules import Rules
from sluice.store.protocol import MESSAGE, ROW_BYTES, Record, read_row

VERSION: Final = 1


def write_snapshot(engine: Engine) -> bytes:
    """Everything that the records so far add up to."""
    out = NoteWriter(VERSION)
    out.number(engine.next_qid)
    out.number(engine.next_pid)
    out.number(engine.next_gid)
    out.number(len(engine.queues))
    for queue in engine.queues.values():
        _write_queue(out, queue, engine.now)
    engine.keeping.write_snapshot(out)
    return out.value()


def _write_queue(out: NoteWriter, queue: Queue, now: float) -> None:
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
    out.number(queue.gate_size)
    for floor in queue.gate_floors:
        out.number(floor)
    out.number(len(queue.partitions))
    for partition in queue.partitions:
        _write_partition(out, partition)
    out.number(len(queue.groups))
    for group in queue.groups.values():
        _write_group(out, group)
    recent = queue.recent_ids(now)
    out.number(len(recent))
    for name, stored_at in recent:
        out.text(name.decode("utf-8", "surrogateescape"))
        out.real(stored_at)


def _write_partition(out: NoteWriter, partition: Partition) -> None:
    out.number(partition.pid)
    out.number(partition.next)
    first = partition.first_live(0)
    out.number(first)
    holes = partition.holes(first)
    out.number(len(holes))
    for start, count in holes:
        out.number(start)
        out.number(count)
    out.number(len(partition.targets))
    for seq, gid in partition.targets.items():
        out.number(seq)
        out.number(gid)


def _write_group(out: NoteWriter, group: Group) -> None:
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
        for seq in sorted(cursor.done):
            out.number(seq)
        failed = [lease for lease in cursor.leases.values() if lease.failures]
        out.number(len(failed))
        for lease in failed:
            out.number(lease.seq)
            out.number(lease.failures)
            out.real(lease.due)
            out.real(lease.first_at)
            out.text(lease.description)


class EngineLoader:
    """Brings an engine back from what a store kept. `parse` reads a configuration that the engine wrote before."""

    def __init__(self, engine: Engine, parse: Callable[[str, str], Rules]) -> None:
        self._engine = engine
        self._parse = parse
        self._by_qid: dict[int, Queue] = {}
        self._holes: dict[int, set[int]] = {}
        self._first: dict[int, int] = {}
        self._delays: list[tuple[Partition, int, float]] = []

    def load_snapshot(self, snapshot: bytes) -> None:
        note = Note(snapshot)
        if note.what != VERSION:
            raise ValueError(f"a snapshot of version {note.what} cannot be read by this Sluice")
        engine = self._engine
        engine.next_qid = note.number()
        engine.next_pid = note.number()
        engine.next_gid = note.number()
        for _ in range(note.number()):
            self._load_queue(note)
        engine.keeping.load_snapshot(note)

    def _load_queue(self, note: Note) -> None:
        engine = self._engine
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
        queue.gate_size = note.number()
        queue.gate_floors = [int(note.number()) for _ in range(queue.gate_size)]
        engine.queues[name] = queue
        self._by_qid[int(qid)] = queue
        for number in range(note.number()):
            self._load_partition(note, queue, number)
        for _ in range(note.number()):
            self._load_group(note, queue)
        for _ in range(note.number()):
            message_id = note.text().encode("utf-8", "surrogateescape")
            queue.remember(message_id, note.real())

    def _load_partition(self, note: Note, queue: Queue, number: int) -> None:
        partition = Partition(queue, note.number(), number)
        pid = int(partition.pid)
        partition.next = note.number()
        self._first[pid] = int(note.number())
        holes: set[int] = set()
        for _ in range(note.number()):
            start = int(note.number())
            holes.update(range(start, start + int(note.number())))
        self._holes[pid] = holes
        for _ in range(note.number()):
            seq = int(note.number())
            partition.targets[seq] = int(note.number())
        queue.partitions.append(partition)
        self._engine.partitions[pid] = partition

    def _load_group(self, note: Note, queue: Queue) -> None:
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
                self._load_retry(note, cursor)
            group.cursors.append(cursor)
            partition.cursors.append(cursor)

    def _load_retry(self, note: Note, cursor: Cursor) -> None:
        seq = note.number()
        lease = cursor.leases.get(int(seq))
        if lease is None:
            lease = Lease(cursor, seq, 0)
            cursor.leases[int(seq)] = lease
        lease.state = WAITING
        lease.failures = note.number()
        lease.due = note.real()
        lease.first_at = note.real()
        lease.description = note.text()

    def load_rows(self, rows: bytes) -> None:
        at: i64 = 0
        size: i64 = len(rows)
        while at < size:
            record = read_row(rows, at)
            at += ROW_BYTES
            if record.pid >= FIRST_PID:
                self._engine.keeping.load_row(record)
                continue
            partition = self._engine.partitions.get(int(record.pid))
            if partition is None:
                continue
            pid = int(record.pid)
            if record.seq >= self._first.get(pid, 0) and int(record.seq) not in self._holes.get(pid, set()):
                self._place(partition, record)

    def load_record(self, record: Record) -> None:
        if record.kind != MESSAGE:
            self._apply(Note(record.body), float(record.time) / 1000.0)
            return
        if record.pid >= FIRST_PID:
            self._engine.keeping.load_record(record)
            return
        partition = self._engine.partitions.get(int(record.pid))
        if partition is None:
            return
        new = record.seq >= partition.next
        if not new and not partition.holds(record.seq):
            return  # compaction wrote it anew, and it was settled since
        self._place(partition, record)
        if new:
            self._newly_known(partition, record)

    def _newly_known(self, partition: Partition, record: Record) -> None:
        """What a message behind the snapshot tells besides its place."""
        queue = partition.queue
        queue.enqueued += 1
        message = decode_body(record.body)
        if message.id:
            queue.remember(message.id, float(message.enqueued_at) / 1000.0)

    def _place(self, partition: Partition, record: Record) -> None:
        engine = self._engine
        queue = partition.queue
        old = partition.address(record.seq)
        if old >= 0:
            engine.segments.drop(old, record.size)
            engine.segments.add(record.address, record.size)
            partition.move(record.seq, record.address)
            return
        partition.insert(
            record.seq, record.address, record.size, record.key, record.expires, record.flags, 0, record.time
        )
        engine.segments.add(record.address, record.size)
        queue.bytes += record.size
        if record.flags & DELAYED:
            self._delays.append((partition, int(record.seq), float(record.time) / 1000.0))

    def _apply(self, note: Note, at: float) -> None:
        engine = self._engine
        what = note.what
        if what >= THING_GONE:
            engine.keeping.apply(note)
        elif what == notes.QUEUE_MADE:
            self._made(note)
        elif what == notes.QUEUE_GONE:
            queue = self._by_qid.pop(int(note.number()), None)
            if queue is not None:
                engine.forget_queue(queue)
        elif what == notes.GROUP_MADE:
            queue = self._by_qid.get(int(note.number()))
            gid = note.number()
            name = note.text()
            if queue is not None:
                floors = [int(note.number()) for _ in queue.partitions]
                self._new_group(queue, gid, name, floors)
        elif what == notes.GROUP_GONE:
            group = engine.groups.get(int(note.number()))
            if group is not None:
                engine.forget_group(group)
        elif what == notes.SETTLED:
            self._settled(note)
        elif what == notes.REMOVED:
            self._removed(note)
        elif what == notes.RETRY:
            group = engine.groups.get(int(note.number()))
            partition = engine.partitions.get(int(note.number()))
            if group is not None and partition is not None:
                cursor = group.cursors[partition.number]
                self._load_retry(note, cursor)
                partition.queue.retried += 1
        elif what == notes.SOUGHT:
            group = engine.groups.get(int(note.number()))
            if group is not None:
                for cursor in group.cursors:
                    cursor.sought(note.number(), note.number())

    def _made(self, note: Note) -> None:
        qid = int(note.number())
        first_pid = note.number()
        count = note.number()
        name = note.text()
        config = note.text()
        created_at = note.real()
        rules = self._parse(name, config)
        queue = self._by_qid.get(qid)
        if queue is None:
            queue = Queue(qid, rules)
            queue.created_at = created_at
            self._by_qid[qid] = queue
            self._engine.queues[name] = queue
            self._engine.next_qid = max(self._engine.next_qid, qid + 1)
        queue.rules = rules
        queue.config = config
        queue.gate_size = note.number()
        queue.gate_floors = [int(note.number()) for _ in range(queue.gate_size)]
        if count:
            self._engine.add_partitions(queue, first_pid, count)

    def _new_group(self, queue: Queue, gid: i64, name: str, floors: list[int]) -> None:
        group = Group(queue, gid, name)
        self._engine.next_gid = max(self._engine.next_gid, gid + 1)
        queue.groups[name] = group
        self._engine.groups[int(gid)] = group
        for partition, floor in zip(queue.partitions, floors, strict=True):
            cursor = Cursor(group, partition, floor)
            cursor.entered = partition.count_live(floor, group.gid)
            cursor.entered_to = partition.next
            group.cursors.append(cursor)
            partition.cursors.append(cursor)

    def _settled(self, note: Note) -> None:
        group = self._engine.groups.get(int(note.number()))
        partition = self._engine.partitions.get(int(note.number()))
        how = note.number()
        if group is None or partition is None:
            return
        cursor = group.cursors[partition.number]
        while note.more():
            first = note.number()
            for seq in range(first, first + note.number()):
                if not cursor.settled(seq):
                    cursor.leases.pop(int(seq), None)
                    cursor.note_settled(seq, how)

    def _removed(self, note: Note) -> None:
        partition = self._engine.partitions.get(int(note.number()))
        note.number()
        if partition is None:
            return
        while note.more():
            first = note.number()
            for seq in range(first, first + note.number()):
                self._engine.let_go_of(partition, seq)

    def finish(self) -> None:
        """All is read: put every cursor at its floor and every waiting thing where it is waited for."""
        engine = self._engine
        self._holes.clear()
        for queue in engine.queues.values():
            for partition in queue.partitions:
                partition.committed = partition.next
                self._finish_partition(partition)
            for group in queue.groups.values():
                for cursor in group.cursors:
                    self._finish_cursor(cursor)
        for partition, seq, due in self._delays:
            engine.announce_special(partition, seq, due)

    def _finish_partition(self, partition: Partition) -> None:
        """Count who still waits for each message, and let go of those that nobody waits for."""
        engine = self._engine
        seq = partition.first_live(0)
        while seq < partition.next:
            block = partition.block(seq)
            assert block is not None
            at: i64 = seq & (BLOCK - 1)
            left: i64 = 0
            for cursor in partition.cursors:
                if not partition.is_for(seq, cursor.group.gid):
                    cursor.pass_over(seq)
                elif not cursor.settled(seq):
                    left += 1
            partition.add_left(seq, left - partition.left(seq))
            if left == 0 and partition.cursors:
                if partition.queue.rules.retention <= 0.0:
                    engine.let_go_of(partition, seq)
                    seq = partition.first_live(seq + 1)
                    continue
            else:
                partition.queue.depth += 1
            expires: i64 = i64(block.expires[at]) & 0xFFFF_FFFF
            if expires:
                engine.expect_expiry(partition, expires)
            seq = partition.first_live(seq + 1)

    def _finish_cursor(self, cursor: Cursor) -> None:
        engine = self._engine
        partition = cursor.partition
        leases = list(cursor.leases.values())
        cursor.leases = {}
        cursor.entered_to = partition.next
        cursor.restart(cursor.floor)
        for lease in leases:
            if partition.holds(lease.seq) and not cursor.settled(lease.seq):
                lease.key = cursor.key_of(lease.seq)
                cursor.hold_lease(lease)
                engine.wait_for_retry(lease)
        seq = partition.first_live(cursor.floor)
        while seq < partition.next:
            block = partition.block(seq)
            assert block is not None
            flags: i64 = i64(block.flags[seq & (BLOCK - 1)])
            if (
                flags & PRIORITY_BITS
                and not flags & DELAYED
                and not cursor.settled(seq)
                and int(seq) not in cursor.leases
            ):
                cursor.come_early(seq, flags & PRIORITY_BITS)
            seq = partition.first_live(seq + 1)
