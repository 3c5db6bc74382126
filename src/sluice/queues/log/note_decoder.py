"""What notes mean, for a store that shows the queues to others: the journal's numbers turned into names.

The other direction of `recovery`, which turns the same notes into state. A note that is not listed here changes nothing
that a store could show.
"""

from __future__ import annotations

from mypy_extensions import i64

from sluice.queues.model.delivery_lease import LEASED, WAITING
from sluice.queues.engine import Engine
from sluice.queues.model.group import Group
from sluice.queues.log.frame_builder import (
    GROUP_GONE,
    GROUP_MADE,
    QUEUE_GONE,
    QUEUE_MADE,
    REMOVED,
    RETRY,
    SETTLED,
    SOUGHT,
    Note,
)
from sluice.queues.log.broker_state import FIRST_PID, MAIL, RETAINED, SESSIONS
from sluice.store.changes import (
    Change,
    GroupGone,
    GroupPlaced,
    Meaning,
    QueueGone,
    QueueMade,
    Ranges,
    Removed,
    Retried,
    Settled,
    Standing,
)

_HOW = ("acked", "dead", "expired", "purged")
_KEPT = {RETAINED: "$retained", SESSIONS: "$sessions", MAIL: "$mail"}


class QueueMeaning(Meaning):
    """Names are remembered when they are made: a note of the end of a queue or a group has only its number, and the
    engine has forgotten it by then."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = engine
        self._queues: dict[int, tuple[str, list[int]]] = {}  # name and pids, by qid
        self._groups: dict[int, tuple[str, int]] = {}  # name and qid, by gid
        self._seen: dict[int, tuple[int, int]] = {}  # what `groups` saw of each last

    def learn(self) -> None:
        """The engine was brought back: take its names from it, and hear from now on what leaves compacted queues."""
        self._engine.gone = {}
        for queue in self._engine.queues.values():
            self._queues[int(queue.qid)] = (queue.name, [int(one.pid) for one in queue.partitions])
            for group in queue.groups.values():
                self._groups[int(group.gid)] = (group.name, int(queue.qid))

    # ---- places

    def place_of(self, pid: int) -> tuple[str, int] | None:
        if pid >= FIRST_PID:
            return _KEPT.get(pid, f"$kept-{pid - FIRST_PID}"), 0
        partition = self._engine.partitions.get(pid)
        return None if partition is None else (partition.queue.name, int(partition.number))

    def is_queue(self, pid: int) -> bool:
        return pid < FIRST_PID

    def first_live(self, pid: int) -> int:
        partition = self._engine.partitions.get(pid)
        return -1 if partition is None else int(partition.first_live(0))

    def length(self, pid: int) -> int:
        partition = self._engine.partitions.get(pid)
        return 0 if partition is None else int(partition.next - partition.first_live(0))

    def compacted(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for queue in self._engine.queues.values():
            if queue.rules.compacted:
                for partition in queue.partitions:
                    held = found.setdefault(int(partition.pid), [])
                    seq = partition.first_live(0)
                    while seq < partition.next:
                        held.append(int(seq))
                        seq = partition.first_live(seq + 1)
        return found

    def needs(self, group: str, pid: int, seq: int) -> bool:
        partition = self._engine.partitions.get(pid)
        if partition is None or not partition.holds(seq):
            return False
        found = partition.queue.groups.get(group)
        return found is not None and not found.cursors[partition.number].settled(seq)

    # ---- notes

    def changes_of(self, notes: list[bytes]) -> list[Change]:
        changes: list[Change] = []
        for body in notes:
            if body and body[0] == QUEUE_MADE:
                changes.extend(self._queue_made(Note(body)))
            elif body:
                change = self._read(body)
                if change is not None:
                    changes.append(change)
        if self._engine.gone:
            for pid, seqs in self._engine.gone.items():
                changes.append(Removed(pid, [(seq, 1) for seq in seqs]))
            self._engine.gone = {}
        return changes

    def _read(self, body: bytes) -> Change | None:
        note = Note(body)
        what = note.what
        if what == SETTLED:
            return self._settled(note)
        if what == RETRY:
            return self._retried(note)
        if what == REMOVED:
            return Removed(int(note.number()), _ranges(note))
        if what == QUEUE_GONE:
            name, pids = self._queues.pop(int(note.number()), ("", []))
            return QueueGone(name, pids) if name else None
        if what == GROUP_MADE:
            qid = int(note.number())
            gid = int(note.number())
            self._groups[gid] = (note.text(), qid)
            return self._placed(gid, note)
        if what == SOUGHT:
            return self._placed(int(note.number()), note)
        if what == GROUP_GONE:
            name, qid = self._groups.pop(int(note.number()), ("", 0))
            return GroupGone(name, self._pids(qid)) if name else None
        return None

    def _pids(self, qid: int) -> list[int]:
        return self._queues.get(qid, ("", []))[1]

    def _queue_made(self, note: Note) -> list[Change]:
        """Groups that are there already are there in new partitions too."""
        qid = int(note.number())
        first = int(note.number())
        count = int(note.number())
        name = note.text()
        config = note.text()
        pids = [*self._pids(qid), *range(first, first + count)]
        self._queues[qid] = (name, pids)
        changes: list[Change] = [QueueMade(name, config, pids)]
        for group, of in self._groups.values():
            if of == qid:
                changes.append(GroupPlaced(group, [(pid, 0) for pid in range(first, first + count)]))
        return changes

    def _placed(self, gid: int, note: Note) -> Change | None:
        name, qid = self._groups.get(gid, ("", 0))
        floors: list[tuple[int, int]] = []
        for pid in self._pids(qid):
            if note.more():
                floors.append((pid, int(note.number())))
        return GroupPlaced(name, floors) if name else None

    def _settled(self, note: Note) -> Change | None:
        gid = int(note.number())
        pid = int(note.number())
        how = int(note.number())
        name, _ = self._groups.get(gid, ("", 0))
        return Settled(name, pid, _HOW[how], _ranges(note)) if name and how < len(_HOW) else None

    def _retried(self, note: Note) -> Change | None:
        name, _ = self._groups.get(int(note.number()), ("", 0))
        pid = int(note.number())
        seq = int(note.number())
        failures = int(note.number())
        due = note.real()
        note.real()
        note.real()
        return Retried(name, pid, seq, failures, due, note.text()) if name else None

    # ---- how groups stand

    def groups(self, all_of_them: bool) -> list[Standing]:
        found: list[Standing] = []
        for group in self._engine.groups.values():
            moved = (int(group.delivered), int(group.nacked))
            gid = int(group.gid)
            if all_of_them or self._seen.get(gid) != moved or _is_busy(group):
                self._seen[gid] = moved
                self._stand(group, found)
        return found

    def _stand(self, group: Group, found: list[Standing]) -> None:
        for cursor in group.cursors:
            standing = Standing(group.name, int(cursor.partition.pid), int(cursor.fresh))
            standing.delivered = int(cursor.delivered)
            for seq, lease in cursor.leases.items():
                if lease.state == LEASED:
                    standing.held[seq] = lease.client()
                    if lease.attempt > 1:
                        standing.attempts[seq] = int(lease.attempt)
                elif lease.state == WAITING:
                    standing.waiting[seq] = Retried(
                        group.name, standing.pid, seq, int(lease.failures), lease.due, lease.description
                    )
            found.append(standing)


def _is_busy(group: Group) -> bool:
    """Whether any delivery of a group is under way: it may change hands without a count."""
    for cursor in group.cursors:
        if cursor.leases:
            return True
    return False


def _ranges(note: Note) -> Ranges:
    found: Ranges = []
    while note.more():
        first: i64 = note.number()
        found.append((int(first), int(note.number())))
    return found
