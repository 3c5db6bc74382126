"""Broker state in the log: retained messages, sessions and their pending messages.

All of it is records of the same log, in the same frames, with the same durability as queues. There
are two kinds.

An *entry* has a key and a value, and the last value counts: a retained message by its topic, a
session by its client id. A *pending message* is for one or more sessions: it is stored once for all
of them, and deleted when the last one has it.

The broker holds values and messages in memory. This module only knows their addresses in the store,
and which of them are live.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.queues.log.cross_node_dedup import CrossNodeDedup
from sluice.queues.log.frame_builder import FrameBuilder, NoteSource
from sluice.queues.log.notes import (
    ENTRY_DELETED,
    INBOX_RECORDED,
    OUTBOX_RECORDED,
    PENDING_DELIVERED,
    QOS2_COMPLETED,
    QOS2_RECEIVED,
    QOS2_RELEASED,
    QOS2_SENT,
    NoteReader,
    NoteWriter,
)
from sluice.queues.log.segment_usage import SegmentUsage
from sluice.store.protocol import HEADER_BYTES, Record, read_record

# Partition ids that no queue has: those of owners (see `compacted/exclusive.py`), and from
# FIRST_STATE_PID on those of broker state.
FIRST_OWNER_PID: Final = 0x8000_0000
FIRST_STATE_PID: Final = 0xFFFF_FF00
RETAINED_PID: Final = 0xFFFF_FF00
SESSIONS_PID: Final = 0xFFFF_FF01
PENDING_PID: Final = 0xFFFF_FF02


class StateEntry:
    def __init__(self, pid: i64, seq: i64, address: i64, size: i64) -> None:
        self.pid: i64 = pid
        self.seq: i64 = seq
        self.address: i64 = address
        self.size: i64 = size


class PendingMessage:
    def __init__(self, seq: i64, address: i64, size: i64) -> None:
        self.seq: i64 = seq
        self.address: i64 = address
        self.size: i64 = size
        self.recipients: list[int] = []  # sessions that do not have it yet


class RestoredRecord:
    """A record found by recovery: an entry with its key, or a pending message (`key` is empty)."""

    def __init__(self, pid: i64, seq: i64, key: bytes, value: bytes) -> None:
        self.pid: i64 = pid
        self.seq: i64 = seq
        self.key: bytes = key
        self.value: bytes = value


class BrokerState(NoteSource):
    def __init__(self, frame_builder: FrameBuilder, segments: SegmentUsage) -> None:
        self.frame_builder = frame_builder
        self._segments = segments
        # Retained messages and sessions, by pid and key.
        self._entries: dict[bytes, StateEntry] = {}
        self._entries_by_seq: dict[int, StateEntry] = {}  # the same entries
        self._pending: dict[int, PendingMessage] = {}
        self._next_seq: i64 = 1
        # Alternating: pending message, session; since the last frame.
        self._delivered: list[int] = []
        self.next_persistent_id: i64 = 1
        self.dedup: CrossNodeDedup = CrossNodeDedup(frame_builder)
        self.received_qos2: dict[int, set[int]] = {}  # unreleased QoS 2 by session
        # Outgoing QoS 2 by session: packet id to pending message, 0 after its PUBREC.
        self.sent_qos2: dict[int, dict[int, int]] = {}
        # During recovery: live entries and their addresses, before their bodies are read.
        self._live_entries: dict[int, StateEntry] = {}
        # While False, no snapshot may be written: the broker has not restored its state yet.
        self.is_restored: bool = True

    # ---- entries

    def put_entry(self, pid: i64, key: bytes, value: bytes, now_ms: i64) -> None:
        """Store `value` as the new value of `key`.

        The record names the one it replaces: recovery needs to read neither, and a later deletion
        does not uncover an older value.
        """
        name = _entry_name(pid, key)
        old = self._entries.get(name)
        out = BytesWriter()
        write_i64_le(out, 0 if old is None else old.seq)
        write_i32_le(out, i32(len(key)))
        out.write(key)
        out.write(value)
        body = out.getvalue()
        seq = self._next_seq
        self._next_seq += 1
        address = self.frame_builder.add_state_record(pid, seq, 0, now_ms, body)
        entry = StateEntry(pid, seq, address, HEADER_BYTES + len(body))
        self._segments.add(address, entry.size)
        if old is not None:
            self._segments.drop(old.address, old.size)
            del self._entries_by_seq[int(old.seq)]
        self._entries[name] = entry
        self._entries_by_seq[int(seq)] = entry

    def delete_entry(self, pid: i64, key: bytes, now_ms: i64) -> None:
        entry = self._entries.pop(_entry_name(pid, key), None)
        if entry is None:
            return
        self._segments.drop(entry.address, entry.size)
        del self._entries_by_seq[int(entry.seq)]
        note = NoteWriter(ENTRY_DELETED)
        note.write_int(entry.seq)
        self.frame_builder.add_note(note, now_ms, True)

    # ---- pending messages

    def store_pending(
        self, body: bytes, recipients: list[int], expires: i64, now_ms: i64
    ) -> PendingMessage:
        """Store a message until all `recipients` have it. The body contains them too."""
        seq = self._next_seq
        self._next_seq += 1
        address = self.frame_builder.add_state_record(PENDING_PID, seq, expires, now_ms, body)
        pending = PendingMessage(seq, address, HEADER_BYTES + len(body))
        pending.recipients = recipients
        self._segments.add(address, pending.size)
        self._pending[int(seq)] = pending
        return pending

    def mark_delivered(self, pending: PendingMessage, persistent_id: int) -> None:
        """Record that a session has the message, or has ended."""
        if persistent_id not in pending.recipients:
            return
        pending.recipients.remove(persistent_id)
        if not self._delivered:
            self.frame_builder.write_at_close(self)
        self._delivered.append(int(pending.seq))
        self._delivered.append(persistent_id)
        if not pending.recipients:
            del self._pending[int(pending.seq)]
            self._segments.drop(pending.address, pending.size)

    def write_notes(self, frame_builder: FrameBuilder, now_ms: i64) -> None:
        """Write the deliveries since the last frame as a note."""
        note = NoteWriter(PENDING_DELIVERED)
        for number in self._delivered:
            note.write_int(number)
        self._delivered = []
        frame_builder.add_note(note, now_ms, False)

    # ---- incoming QoS 2

    def record_received(
        self, persistent_id: int, packet_id: int, is_released: bool, now_ms: i64
    ) -> None:
        note = NoteWriter(QOS2_RELEASED if is_released else QOS2_RECEIVED)
        note.write_int(persistent_id)
        note.write_int(packet_id)
        # A power cut must undo neither note. Without the first, a repeated PUBLISH would be a
        # second message; without the second, another message with the freed id would be taken for a
        # repetition.
        self.frame_builder.add_note(note, now_ms, True)
        self._apply_received(persistent_id, packet_id, is_released)

    def _apply_received(self, persistent_id: int, packet_id: int, is_released: bool) -> None:
        self._reserve_persistent_id(persistent_id)
        ids = self.received_qos2.setdefault(persistent_id, set())
        if is_released:
            ids.discard(packet_id)
        else:
            ids.add(packet_id)
        self.dedup.remove_outbox(persistent_id, packet_id)

    def record_outbox(self, persistent_id: int, packet_id: int, dedup_id: int, now_ms: i64) -> None:
        """Record a publish to other cells; it is not received until they have it.

        See `cross_node_dedup`.
        """
        self.dedup.record_outbox(persistent_id, packet_id, dedup_id, now_ms)
        self.received_qos2.get(persistent_id, set()).discard(packet_id)

    def _reserve_persistent_id(self, persistent_id: int) -> None:
        """Do not reuse ids: notes of an old session must not apply to a new one."""
        self.next_persistent_id = max(self.next_persistent_id, persistent_id + 1)

    # ---- outgoing QoS 2

    def record_sent(
        self, persistent_id: int, packet_id: int, pending_seq: int, now_ms: i64
    ) -> None:
        note = NoteWriter(QOS2_SENT)
        note.write_int(persistent_id)
        note.write_int(packet_id)
        note.write_int(pending_seq)
        # The next packet that is sent depends on it.
        self.frame_builder.add_note(note, now_ms, True)
        self.sent_qos2.setdefault(persistent_id, {})[packet_id] = pending_seq

    def record_completed(self, persistent_id: int, packet_id: int, now_ms: i64) -> None:
        ids = self.sent_qos2.get(persistent_id)
        if ids is None or packet_id not in ids:
            return
        note = NoteWriter(QOS2_COMPLETED)
        note.write_int(persistent_id)
        note.write_int(packet_id)
        self.frame_builder.add_note(note, now_ms, False)
        del ids[packet_id]
        if not ids:
            del self.sent_qos2[persistent_id]

    def forget_session(self, persistent_id: int) -> None:
        self.received_qos2.pop(persistent_id, None)
        self.sent_qos2.pop(persistent_id, None)
        self.dedup.forget_session(persistent_id)

    # ---- compaction

    def rewrite_record(self, record: Record) -> bool:
        """Copy the record into the open frame if it is live at its address."""
        if record.pid == PENDING_PID:
            pending = self._pending.get(int(record.seq))
            if pending is None or pending.address != record.address:
                return False
            pending.address = self._copy_record(record)
            return True
        entry = self._entries_by_seq.get(int(record.seq))
        if entry is None or entry.address != record.address:
            return False
        entry.address = self._copy_record(record)
        return True

    def _copy_record(self, record: Record) -> i64:
        new_address = self.frame_builder.add_state_record(
            record.pid, record.seq, record.expires, record.time, record.body
        )
        self._segments.drop(record.address, record.size)
        self._segments.add(new_address, record.size)
        return new_address

    def is_live(self, record: Record) -> bool:
        """Return whether an index row refers to a live record."""
        if record.pid == PENDING_PID:
            pending = self._pending.get(int(record.seq))
            return pending is not None and pending.address == record.address
        entry = self._entries_by_seq.get(int(record.seq))
        return entry is not None and entry.address == record.address

    # ---- recovery

    def write_snapshot(self, out: NoteWriter) -> None:
        out.write_int(self._next_seq)
        out.write_int(self.next_persistent_id)
        out.write_int(len(self._entries))
        for entry in self._entries.values():
            out.write_int(entry.seq)
        out.write_int(len(self._pending))
        for pending in self._pending.values():
            out.write_int(pending.seq)
            out.write_int(len(pending.recipients))
            for recipient in pending.recipients:
                out.write_int(recipient)
        unreleased = [
            (persistent_id, ids) for persistent_id, ids in self.received_qos2.items() if ids
        ]
        out.write_int(len(unreleased))
        for persistent_id, ids in unreleased:
            out.write_int(persistent_id)
            out.write_int(len(ids))
            for packet_id in ids:
                out.write_int(packet_id)
        out.write_int(len(self.sent_qos2))
        for persistent_id, sent in self.sent_qos2.items():
            out.write_int(persistent_id)
            out.write_int(len(sent))
            for packet_id, seq in sent.items():
                out.write_int(packet_id)
                out.write_int(seq)
        self.dedup.write_snapshot(out)

    def load_snapshot(self, note: NoteReader) -> None:
        self._next_seq = note.read_int()
        self.next_persistent_id = note.read_int()
        for _ in range(note.read_int()):
            seq = note.read_int()
            self._live_entries[int(seq)] = StateEntry(0, seq, -1, 0)
        for _ in range(note.read_int()):
            seq = note.read_int()
            pending = PendingMessage(seq, -1, 0)
            pending.recipients = [int(note.read_int()) for _ in range(note.read_int())]
            self._pending[int(seq)] = pending
        for _ in range(note.read_int()):
            persistent_id = int(note.read_int())
            self.received_qos2[persistent_id] = {
                int(note.read_int()) for _ in range(note.read_int())
            }
        for _ in range(note.read_int()):
            persistent_id = int(note.read_int())
            sent = self.sent_qos2[persistent_id] = {}
            for _ in range(note.read_int()):
                packet_id = int(note.read_int())
                sent[packet_id] = int(note.read_int())
        self.dedup.load_snapshot(note)

    def load_row(self, record: Record) -> None:
        """Load a record from before the snapshot, without its body."""
        self._place_record(record, False)

    def load_record(self, record: Record) -> None:
        """Load a record after the snapshot."""
        self._next_seq = max(self._next_seq, record.seq + 1)
        self._place_record(record, True)

    def _place_record(self, record: Record, is_new: bool) -> None:
        self.is_restored = False
        number = int(record.seq)
        if record.pid == PENDING_PID:
            pending = self._pending.get(number)
            if pending is None:
                if not is_new:
                    return
                pending = PendingMessage(record.seq, -1, 0)
                pending.recipients = read_recipients(record.body)
                for recipient in pending.recipients:
                    self._reserve_persistent_id(recipient)
                self._pending[number] = pending
            pending.address = record.address
            pending.size = record.size
            return
        entry = self._live_entries.get(number)
        if entry is None:
            if not is_new:
                return
            self._live_entries.pop(int(read_i64_le(record.body, 0)), None)
            entry = self._live_entries[number] = StateEntry(record.pid, record.seq, -1, 0)
        entry.pid = record.pid
        entry.address = record.address
        entry.size = record.size

    def apply_note(self, note: NoteReader) -> None:
        if note.kind == ENTRY_DELETED:
            self._live_entries.pop(int(note.read_int()), None)
        elif note.kind == PENDING_DELIVERED:
            while note.has_more():
                pending = self._pending.get(int(note.read_int()))
                persistent_id = int(note.read_int())
                if pending is not None and persistent_id in pending.recipients:
                    pending.recipients.remove(persistent_id)
                    if not pending.recipients:
                        del self._pending[int(pending.seq)]
        elif note.kind == QOS2_SENT:
            persistent_id = int(note.read_int())
            self._reserve_persistent_id(persistent_id)
            packet_id = int(note.read_int())
            self.sent_qos2.setdefault(persistent_id, {})[packet_id] = int(note.read_int())
        elif note.kind == QOS2_COMPLETED:
            self.sent_qos2.get(int(note.read_int()), {}).pop(int(note.read_int()), None)
        elif note.kind == INBOX_RECORDED:
            self.dedup.apply_inbox(note)
        elif note.kind == OUTBOX_RECORDED:
            self._apply_outbox(note)
        else:
            self._apply_received(
                int(note.read_int()), int(note.read_int()), note.kind == QOS2_RELEASED
            )

    def _apply_outbox(self, note: NoteReader) -> None:
        persistent_id = int(note.read_int())
        packet_id = int(note.read_int())
        self._reserve_persistent_id(persistent_id)
        self.received_qos2.get(persistent_id, set()).discard(packet_id)
        self.dedup.load_outbox(persistent_id, packet_id, int(note.read_int()))

    def addresses_to_restore(self) -> list[int]:
        """Return the addresses of the bodies that `restore` needs, oldest first."""
        entry_addresses = [
            int(entry.address) for entry in self._live_entries.values() if entry.address >= 0
        ]
        pending_addresses = [
            int(pending.address) for pending in self._pending.values() if pending.address >= 0
        ]
        return sorted(entry_addresses) + sorted(pending_addresses)

    def restore(self, records: list[bytes | None]) -> list[RestoredRecord]:
        """Return the live records in write order, pending messages last."""
        pending_messages: list[RestoredRecord] = []
        newest: dict[bytes, RestoredRecord] = {}
        for data in records:
            record = None if data is None else read_record(data, 0, len(data), 0)
            if record is None:
                continue
            body = record.body
            if record.pid == PENDING_PID:
                pending_messages.append(RestoredRecord(PENDING_PID, record.seq, b"", body))
                continue
            try:
                key, value = split_entry(body)
            except (ValueError, IndexError):
                continue  # damaged, although its checksum is valid
            restored = RestoredRecord(record.pid, record.seq, key, value)
            name = _entry_name(restored.pid, restored.key)
            older = newest.get(name)
            if older is None or older.seq < restored.seq:
                newest[name] = restored
        for name, restored in newest.items():
            entry = self._live_entries[int(restored.seq)]
            self._entries[name] = entry
            self._entries_by_seq[int(entry.seq)] = entry
            self._segments.add(entry.address, entry.size)
        for number, pending in list(self._pending.items()):
            if pending.address < 0:
                del self._pending[number]
            else:
                self._segments.add(pending.address, pending.size)
        self._live_entries = {}
        self.is_restored = True
        return sorted(newest.values(), key=_sequence_of) + sorted(
            pending_messages, key=_sequence_of
        )

    def find_pending(self, seq: i64) -> PendingMessage | None:
        return self._pending.get(int(seq))


def _sequence_of(restored: RestoredRecord) -> i64:
    return restored.seq


def _entry_name(pid: i64, key: bytes) -> bytes:
    return (b"r" if pid == RETAINED_PID else b"s") + key


def split_entry(body: bytes) -> tuple[bytes, bytes]:
    """Split the body of an entry into key and value; the replaced sequence comes before them."""
    size: i64 = i64(read_i32_le(body, 8))
    if size < 0 or 12 + size > len(body):
        raise ValueError(f"a key of {size} bytes in a record of {len(body)}")
    return body[12 : 12 + size], body[12 + size :]


def write_recipients(out: BytesWriter, recipients: list[int]) -> None:
    """Write the start of a pending message's body: its recipients."""
    write_i32_le(out, i32(len(recipients)))
    for recipient in recipients:
        write_i64_le(out, recipient)


def read_recipients(body: bytes) -> list[int]:
    end = 4 + 8 * int(read_i32_le(body, 0))
    if end > len(body):
        raise ValueError(f"more recipients than a record of {len(body)} bytes can contain")
    from_bytes = int.from_bytes
    return [from_bytes(body[at : at + 8], "little") for at in range(4, end, 8)]
