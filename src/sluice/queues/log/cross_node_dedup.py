"""Exactly-once publishes from one cell to another across node failures: an outbox and an inbox.

The cell of the publisher's session records a QoS 2 publish for other cells in its *outbox* under a
dedup id, which is in the log before the publish leaves. If the acknowledgement is lost with the
node, the client sends the publish again, and it leaves again with the same dedup id. The receiving
cell records the dedup id in its *inbox* in the same frame as the message; a repetition is
acknowledged and not delivered. Each publish carries the lowest dedup id that its session still has
open: lower ids are not sent again and are removed from the inbox. So the inbox holds no more of a
publisher than it has in flight.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.queues.log.frame_builder import FrameBuilder
from sluice.queues.log.notes import INBOX_RECORDED, OUTBOX_RECORDED, NoteReader, NoteWriter

# Sessions of other cells in the inbox; the least recently used one is removed.
MAX_ORIGINS: Final = 4096
PART_BITS: Final = 24  # of a key: the part of a message, after its dedup id


class CrossNodeDedup:
    def __init__(self, frame_builder: FrameBuilder) -> None:
        self._frame_builder = frame_builder
        self.next_dedup_id: i64 = 1
        self.outbox: dict[int, dict[int, int]] = {}  # by session: packet id to dedup id
        # By cell and session of the publisher: keys.
        self._inbox: dict[tuple[int, int], set[int]] = {}

    # ---- sender

    def new_dedup_id(self) -> int:
        dedup_id = int(self.next_dedup_id)
        self.next_dedup_id += 1
        return dedup_id

    def record_outbox(self, persistent_id: int, packet_id: int, dedup_id: int, now_ms: i64) -> None:
        note = NoteWriter(OUTBOX_RECORDED)
        note.write_int(persistent_id)
        note.write_int(packet_id)
        note.write_int(dedup_id)
        self._frame_builder.add_note(note, now_ms, True)
        self.load_outbox(persistent_id, packet_id, dedup_id)

    def load_outbox(self, persistent_id: int, packet_id: int, dedup_id: int) -> None:
        self.outbox.setdefault(persistent_id, {})[packet_id] = dedup_id
        self.next_dedup_id = max(self.next_dedup_id, dedup_id + 1)

    def remove_outbox(self, persistent_id: int, packet_id: int) -> None:
        """Remove a publish that was acknowledged or given up."""
        dedup_ids = self.outbox.get(persistent_id)
        if dedup_ids is not None:
            dedup_ids.pop(packet_id, None)
            if not dedup_ids:
                del self.outbox[persistent_id]

    def forget_session(self, persistent_id: int) -> None:
        self.outbox.pop(persistent_id, None)

    # ---- receiver

    def has_in_inbox(self, cell: int, persistent_id: int, key: int) -> bool:
        keys = self._inbox.get((cell, persistent_id))
        return keys is not None and key in keys

    def record_inbox(
        self, cell: int, persistent_id: int, lowest_open_id: int, keys: list[int], now_ms: i64
    ) -> None:
        """Record the keys in the open frame, together with the stored message."""
        note = NoteWriter(INBOX_RECORDED)
        note.write_int(cell)
        note.write_int(persistent_id)
        note.write_int(lowest_open_id)
        for key in keys:
            note.write_int(key)
        self._frame_builder.add_note(note, now_ms, False)
        self._add_to_inbox(cell, persistent_id, lowest_open_id, keys)

    def _add_to_inbox(
        self, cell: int, persistent_id: int, lowest_open_id: int, keys: list[int]
    ) -> None:
        known = self._inbox.pop((cell, persistent_id), set())
        remaining = {key for key in known if key >> PART_BITS >= lowest_open_id} if known else known
        remaining.update(keys)
        self._inbox[(cell, persistent_id)] = remaining  # moved to the end: most recently used
        if len(self._inbox) > MAX_ORIGINS:
            del self._inbox[next(iter(self._inbox))]

    def count_inbox(self) -> int:
        return sum(len(keys) for keys in self._inbox.values())

    # ---- recovery

    def apply_inbox(self, note: NoteReader) -> None:
        """Apply an inbox note."""
        cell = int(note.read_int())
        persistent_id = int(note.read_int())
        lowest_open_id = int(note.read_int())
        keys: list[int] = []
        while note.has_more():
            keys.append(int(note.read_int()))
        self._add_to_inbox(cell, persistent_id, lowest_open_id, keys)

    def write_snapshot(self, out: NoteWriter) -> None:
        out.write_int(self.next_dedup_id)
        out.write_int(len(self.outbox))
        for persistent_id, dedup_ids in self.outbox.items():
            out.write_int(persistent_id)
            out.write_int(len(dedup_ids))
            for packet_id, dedup_id in dedup_ids.items():
                out.write_int(packet_id)
                out.write_int(dedup_id)
        out.write_int(len(self._inbox))
        for (cell, persistent_id), keys in self._inbox.items():
            out.write_int(cell)
            out.write_int(persistent_id)
            out.write_int(len(keys))
            for key in keys:
                out.write_int(key)

    def load_snapshot(self, note: NoteReader) -> None:
        self.next_dedup_id = note.read_int()
        for _ in range(note.read_int()):
            dedup_ids = self.outbox[int(note.read_int())] = {}
            for _ in range(note.read_int()):
                packet_id = int(note.read_int())
                dedup_ids[packet_id] = int(note.read_int())
        for _ in range(note.read_int()):
            cell = int(note.read_int())
            persistent_id = int(note.read_int())
            self._inbox[(cell, persistent_id)] = {
                int(note.read_int()) for _ in range(note.read_int())
            }
