"""Keys that are held for repair: begin, redrive a dead letter, time out, recover.

After a message became a dead letter, nothing of its key is delivered to its group until that one
has been redriven and is settled, was discarded, or `hold_timeout` is over. The end of a dead letter
is noticed where messages end (`removal`), in commands as in recovery, so it needs no note.
"""

from __future__ import annotations

from mypy_extensions import i64

from sluice.message import Message
from sluice.queues.flow.dispatch_schedule import DispatchSchedule
from sluice.queues.flow.timers import Timers
from sluice.queues.log import NoteReader, NoteWriter, notes
from sluice.queues.model import EngineState, Group, HeldKey, Lease, Partition
from sluice.queues.names import format_message_id


class KeyHolds:
    def __init__(
        self, state: EngineState, dispatch_schedule: DispatchSchedule, timers: Timers
    ) -> None:
        self._state: EngineState = state
        self._dispatch_schedule: DispatchSchedule = dispatch_schedule
        self._timers: Timers = timers

    def hold(self, lease: Lease, message: Message, dead_letter: tuple[Partition, int]) -> None:
        """Hold the key of a message that became a dead letter, in the frame of that dead letter."""
        group = lease.cursor.group
        message_id = message.id or format_message_id(lease.cursor.partition.pid, lease.seq)
        held = HeldKey(group.gid, lease.key_hash, message.key, message_id, self._state.now)
        held = _add_dead_letter(group, held, dead_letter[0], dead_letter[1])
        self._timers.schedule_release(group, held)
        note = NoteWriter(notes.KEY_HELD)
        note.write_int(group.gid)
        note.write_int(dead_letter[0].pid)
        note.write_int(dead_letter[1])
        _write_key(note, held)
        self._state.frame_builder.add_note(note, self._state.now_ms(), False)

    def find(self, group: Group, partition: Partition, seq: i64, key_hash: i64) -> HeldKey | None:
        """Return the held key that waits for this dead letter, unless it is of another key."""
        held = partition.held_keys.get(int(seq))
        is_held = held is not None and group.held_keys.get(int(key_hash)) is held
        return held if is_held else None

    def put_back(self, held: HeldKey, partition: Partition, seq: i64) -> None:
        """Let a held key wait for a message that is its dead letter, redriven or repaired."""
        _add_repaired(held, partition, seq)
        note = NoteWriter(notes.KEY_REPAIRED)
        note.write_int(held.gid)
        note.write_int(held.key_hash)
        note.write_int(partition.pid)
        note.write_int(seq)
        self._state.frame_builder.add_note(note, self._state.now_ms(), False)

    def release(self, held: HeldKey) -> None:
        """Release a key: its timeout is over."""
        group = self._state.groups[int(held.gid)]
        note = NoteWriter(notes.KEY_RELEASED)
        note.write_int(group.gid)
        note.write_int(held.key_hash)
        self._state.frame_builder.add_note(note, self._state.now_ms(), False)
        key = held.key.decode("utf-8", "replace")
        self._state.warn(
            f"queue {group.queue.name!r}: group {group.name!r} goes on with key {key!r}, which was "
            "held for repair until hold_timeout"
        )
        self._dispatch_schedule.release_key(held)

    # ---- recovery

    def load(self, note: NoteReader) -> None:
        """Repeat a note of a previous run."""
        group = self._state.groups.get(int(note.read_int()))
        if note.kind == notes.KEY_HELD:
            partition = self._state.partitions.get(int(note.read_int()))
            seq = note.read_int()
            if group is not None:
                held = _read_key(note, group)
                if partition is not None and partition.holds(seq):
                    _add_dead_letter(group, held, partition, seq)
            return
        known = group.held_keys.get(int(note.read_int())) if group is not None else None
        if known is None:
            return
        if note.kind == notes.KEY_RELEASED:
            self._dispatch_schedule.release_key(known)
            return
        partition = self._state.partitions.get(int(note.read_int()))
        seq = note.read_int()
        if partition is not None and partition.holds(seq):
            _add_repaired(known, partition, seq)

    def finish_snapshot(self) -> None:
        """Find the messages of a snapshot for which keys are held; some may be lost."""
        for group in self._state.groups.values():
            for held in list(group.held_keys.values()):
                held.dead_letters = self._register(held, held.dead_letters)
                held.repaired = self._register(held, held.repaired)
                if held.is_over():
                    group.release_key(held)

    def _register(self, held: HeldKey, locations: set[tuple[int, int]]) -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for pid, seq in locations:
            partition = self._state.partitions.get(pid)
            if partition is not None and partition.holds(seq):
                partition.add_held_key(seq, held)
                found.add((pid, seq))
        return found

    def finish_recovery(self) -> None:
        for group in self._state.groups.values():
            for held in group.held_keys.values():
                held.held_at = min(held.held_at, self._state.now)
                self._timers.schedule_release(group, held)


def _add_dead_letter(group: Group, held: HeldKey, partition: Partition, seq: i64) -> HeldKey:
    """Hold a key, or add a dead letter to a key that is held already; return that key."""
    known = group.held_keys.get(int(held.key_hash))
    if known is None:
        group.hold_key(held)
    else:
        known.held_at = held.held_at
        known.message_id = held.message_id
        held = known
    held.dead_letters.add((int(partition.pid), int(seq)))
    partition.add_held_key(seq, held)
    return held


def _add_repaired(held: HeldKey, partition: Partition, seq: i64) -> None:
    held.repaired.add((int(partition.pid), int(seq)))
    partition.add_held_key(seq, held)


def _write_key(out: NoteWriter, held: HeldKey) -> None:
    out.write_int(held.key_hash)
    out.write_seconds(held.held_at)
    out.write_bytes(held.key)
    out.write_bytes(held.message_id)


def _read_key(note: NoteReader, group: Group) -> HeldKey:
    key_hash = note.read_int()
    held_at = note.read_seconds()
    key = note.read_bytes()
    return HeldKey(group.gid, key_hash, key, note.read_bytes(), held_at)


def write_held_keys(out: NoteWriter, group: Group) -> None:
    out.write_int(len(group.held_keys))
    for held in group.held_keys.values():
        _write_key(out, held)
        for locations in (held.dead_letters, held.repaired):
            out.write_int(len(locations))
            for pid, seq in sorted(locations):
                out.write_int(pid)
                out.write_int(seq)


def load_held_keys(note: NoteReader, group: Group) -> None:
    """Load the held keys of a snapshot, after the cursors; `finish_snapshot` is next."""
    for _ in range(note.read_int()):
        held = _read_key(note, group)
        for locations in (held.dead_letters, held.repaired):
            for _ in range(note.read_int()):
                pid = int(note.read_int())
                locations.add((pid, int(note.read_int())))
        group.hold_key(held)
