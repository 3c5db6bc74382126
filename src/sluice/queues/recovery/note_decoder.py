"""Decode notes into named changes, for a store that shows queues to its own clients (Redis).

The counterpart of `recovery`, which turns the same notes into state. Notes that are not listed here
change nothing that a store could show.
"""

from __future__ import annotations

from mypy_extensions import i64

from sluice.queues.engine import Engine
from sluice.queues.log import (
    FIRST_STATE_PID,
    PENDING_PID,
    RETAINED_PID,
    SESSIONS_PID,
    NoteReader,
    notes,
)
from sluice.queues.model import BACKOFF, LEASED, Group
from sluice.store.changes import (
    Change,
    GroupDeleted,
    GroupPositioned,
    GroupSnapshot,
    MessagesRemoved,
    MessagesSettled,
    NoteDecoder,
    QueueCreated,
    QueueDeleted,
    Ranges,
    RetryRescheduled,
    RetryScheduled,
)

_OUTCOME_NAMES = ("acked", "dead", "expired", "purged", "cancelled")
_STATE_STREAM_NAMES = {RETAINED_PID: "$retained", SESSIONS_PID: "$sessions", PENDING_PID: "$mail"}


class QueueNoteDecoder(NoteDecoder):
    """Decodes notes with the names of queues and groups.

    It remembers names when they are created: a note that deletes a queue or a group has only its
    number, and the engine has removed it by then.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = engine
        self._queues: dict[int, tuple[str, list[int]]] = {}  # name and pids, by qid
        self._groups: dict[int, tuple[str, int]] = {}  # name and qid, by gid
        # Counters of each group at the last `group_snapshots`.
        self._last_counts: dict[int, tuple[int, int]] = {}

    def load_names(self) -> None:
        """Load the names of the recovered engine, and track removals of compacted queues."""
        self._engine.removal.removed_from_compacted = {}
        for queue in self._engine.queues.values():
            self._queues[int(queue.qid)] = (queue.name, [int(one.pid) for one in queue.partitions])
            for group in queue.groups.values():
                self._groups[int(group.gid)] = (group.name, int(queue.qid))

    # ---- partitions

    def locate_partition(self, pid: int) -> tuple[str, int] | None:
        if pid >= FIRST_STATE_PID:
            return _STATE_STREAM_NAMES.get(pid, f"$kept-{pid - FIRST_STATE_PID}"), 0
        partition = self._engine.partitions.get(pid)
        return None if partition is None else (partition.queue.name, int(partition.number))

    def is_queue_partition(self, pid: int) -> bool:
        return pid < FIRST_STATE_PID

    def first_live_seq(self, pid: int) -> int:
        partition = self._engine.partitions.get(pid)
        return -1 if partition is None else int(partition.first_live(0))

    def stream_length(self, pid: int) -> int:
        partition = self._engine.partitions.get(pid)
        return 0 if partition is None else int(partition.next_seq - partition.first_live(0))

    def compacted_messages(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for queue in self._engine.queues.values():
            if queue.rules.is_compacted:
                for partition in queue.partitions:
                    live_sequences = found.setdefault(int(partition.pid), [])
                    seq = partition.first_live(0)
                    while seq < partition.next_seq:
                        live_sequences.append(int(seq))
                        seq = partition.first_live(seq + 1)
        return found

    def is_unsettled(self, group: str, pid: int, seq: int) -> bool:
        partition = self._engine.partitions.get(pid)
        if partition is None or not partition.holds(seq):
            return False
        found = partition.queue.groups.get(group)
        return found is not None and not found.cursors[partition.number].is_settled(seq)

    # ---- notes

    def decode_changes(self, bodies: list[bytes]) -> list[Change]:
        changes: list[Change] = []
        for body in bodies:
            if body and body[0] == notes.QUEUE_CREATED:
                changes.extend(self._decode_queue_created(NoteReader(body)))
            elif body and body[0] == notes.RESCHEDULED:
                changes.extend(self._decode_rescheduled(NoteReader(body)))
            elif body:
                change = self._decode_note(body)
                if change is not None:
                    changes.append(change)
        if self._engine.removal.removed_from_compacted:
            for pid, seqs in self._engine.removal.removed_from_compacted.items():
                changes.append(MessagesRemoved(pid, [(seq, 1) for seq in seqs]))
            self._engine.removal.removed_from_compacted = {}
        return changes

    def _decode_note(self, body: bytes) -> Change | None:
        note = NoteReader(body)
        kind = note.kind
        if kind == notes.SETTLED:
            return self._decode_settled(note)
        if kind == notes.RETRY:
            return self._decode_retried(note)
        if kind == notes.REMOVED:
            return MessagesRemoved(int(note.read_int()), _read_ranges(note))
        if kind == notes.QUEUE_DELETED:
            name, pids = self._queues.pop(int(note.read_int()), ("", []))
            return QueueDeleted(name, pids) if name else None
        if kind == notes.GROUP_CREATED:
            qid = int(note.read_int())
            gid = int(note.read_int())
            self._groups[gid] = (note.read_text(), qid)
            return self._decode_group_positions(gid, note)
        if kind == notes.GROUP_SEEK:
            return self._decode_group_positions(int(note.read_int()), note)
        if kind == notes.GROUP_DELETED:
            name, qid = self._groups.pop(int(note.read_int()), ("", 0))
            return GroupDeleted(name, self._pids_of_queue(qid)) if name else None
        return None

    def _pids_of_queue(self, qid: int) -> list[int]:
        return self._queues.get(qid, ("", []))[1]

    def _decode_queue_created(self, note: NoteReader) -> list[Change]:
        """Decode a created or grown queue; existing groups also get the new partitions."""
        qid = int(note.read_int())
        first = int(note.read_int())
        count = int(note.read_int())
        name = note.read_text()
        config = note.read_text()
        pids = [*self._pids_of_queue(qid), *range(first, first + count)]
        self._queues[qid] = (name, pids)
        changes: list[Change] = [QueueCreated(name, config, pids)]
        for group, group_qid in self._groups.values():
            if group_qid == qid:
                changes.append(
                    GroupPositioned(group, [(pid, 0) for pid in range(first, first + count)])
                )
        return changes

    def _decode_group_positions(self, gid: int, note: NoteReader) -> Change | None:
        name, qid = self._groups.get(gid, ("", 0))
        low_watermarks: list[tuple[int, int]] = []
        for pid in self._pids_of_queue(qid):
            if note.has_more():
                low_watermarks.append((pid, int(note.read_int())))
        return GroupPositioned(name, low_watermarks) if name else None

    def _decode_settled(self, note: NoteReader) -> Change | None:
        gid = int(note.read_int())
        pid = int(note.read_int())
        outcome = int(note.read_int())
        name, _ = self._groups.get(gid, ("", 0))
        return (
            MessagesSettled(name, pid, _OUTCOME_NAMES[outcome], _read_ranges(note))
            if name and outcome < len(_OUTCOME_NAMES)
            else None
        )

    def _decode_retried(self, note: NoteReader) -> Change | None:
        name, _ = self._groups.get(int(note.read_int()), ("", 0))
        pid = int(note.read_int())
        seq = int(note.read_int())
        failures = int(note.read_int())
        due = note.read_seconds()
        note.read_seconds()
        note.read_seconds()
        return RetryScheduled(name, pid, seq, failures, due, note.read_text()) if name else None

    def _decode_rescheduled(self, note: NoteReader) -> list[Change]:
        """Decode the new time of the retries of a message, in every group that waits for one."""
        partition = self._engine.partitions.get(int(note.read_int()))
        seq = int(note.read_int())
        changes: list[Change] = []
        for cursor in partition.cursors if partition is not None else []:
            lease = cursor.leases.get(seq)
            if lease is not None and lease.state == BACKOFF:
                changes.append(
                    RetryRescheduled(
                        cursor.group.name,
                        int(cursor.partition.pid),
                        seq,
                        int(lease.failures),
                        lease.retry_at,
                        lease.description,
                    )
                )
        return changes

    # ---- group snapshots

    def group_snapshots(self, include_unchanged: bool) -> list[GroupSnapshot]:
        found: list[GroupSnapshot] = []
        for group in self._engine.groups.values():
            counts = (int(group.delivered), int(group.nacked))
            gid = int(group.gid)
            if include_unchanged or self._last_counts.get(gid) != counts or _has_deliveries(group):
                self._last_counts[gid] = counts
                self._add_group_snapshots(group, found)
        return found

    def _add_group_snapshots(self, group: Group, found: list[GroupSnapshot]) -> None:
        for cursor in group.cursors:
            snapshot = GroupSnapshot(
                group.name, int(cursor.partition.pid), int(cursor.scan_position)
            )
            snapshot.delivery_count = int(cursor.delivered)
            for seq, lease in cursor.leases.items():
                if lease.state == LEASED:
                    snapshot.holders[seq] = lease.holder_client_id()
                    if lease.attempt > 1:
                        snapshot.attempts[seq] = int(lease.attempt)
                elif lease.state == BACKOFF:
                    snapshot.scheduled_retries[seq] = RetryScheduled(
                        group.name,
                        snapshot.pid,
                        seq,
                        int(lease.failures),
                        lease.retry_at,
                        lease.description,
                    )
            found.append(snapshot)


def _has_deliveries(group: Group) -> bool:
    """Return whether a group has leases: a holder may change without a change of the counters."""
    for cursor in group.cursors:
        if cursor.leases:
            return True
    return False


def _read_ranges(note: NoteReader) -> Ranges:
    found: Ranges = []
    while note.has_more():
        first: i64 = note.read_int()
        found.append((int(first), int(note.read_int())))
    return found
