"""Exactly once from one cell of a cluster to another, whichever of them dies: an outbox and an inbox.

Where the session of a publisher lives, a QoS 2 publish for other cells is *passed on* under a mark, which is in the log
before anybody hears of it. If its answer is lost with the node, its client says it again, and it goes out again under
the same mark. Where it is delivered, the mark is *taken* in the same frame as what is kept of it, and what comes again
under it is answered and given to nobody. With each publish comes the lowest mark that its session still has open: those
below will not be said again, and are forgotten. So a publisher is remembered for no more than it has under way.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.queues.log.frame_builder import FrameBuilder, NoteReader, NoteWriter

OUTBOX_RECORDED: Final = (
    38  # session, packet id, mark: a QoS 2 message is on its way to other cells
)
INBOX_RECORDED: Final = (
    39  # cell, session, lowest open mark, keys: what has been given to whom here
)
FIRST_SNAPSHOT_VERSION: Final = 6  # the first version of the snapshot that tells of marks

MAX_ORIGINS: Final = (
    4096  # sessions of other cells whose marks are known; the one not heard of for longest goes
)
PART_BITS: Final = 24  # of a key: which part of a message it is about, behind its mark


class CrossNodeDedup:
    def __init__(self, frame_builder: FrameBuilder) -> None:
        self._frame_builder = frame_builder
        self.next_dedup_id: i64 = 1
        self.outbox: dict[int, dict[int, int]] = {}  # by session: mark by packet id
        self._inbox: dict[
            tuple[int, int], set[int]
        ] = {}  # by cell and session of the publisher: keys

    # ---- where it comes from

    def new_dedup_id(self) -> int:
        dedup_id = int(self.next_dedup_id)
        self.next_dedup_id += 1
        return dedup_id

    def record_outbox(self, session_id: int, packet_id: int, dedup_id: int, now_ms: i64) -> None:
        note = NoteWriter(OUTBOX_RECORDED)
        note.write_int(session_id)
        note.write_int(packet_id)
        note.write_int(dedup_id)
        self._frame_builder.add_note(note.to_bytes(), now_ms, True)
        self.load_outbox(session_id, packet_id, dedup_id)

    def load_outbox(self, session_id: int, packet_id: int, dedup_id: int) -> None:
        self.outbox.setdefault(session_id, {})[packet_id] = dedup_id
        self.next_dedup_id = max(self.next_dedup_id, dedup_id + 1)

    def remove_outbox(self, session_id: int, packet_id: int) -> None:
        """It is answered for, or given up."""
        dedup_ids = self.outbox.get(session_id)
        if dedup_ids is not None:
            dedup_ids.pop(packet_id, None)
            if not dedup_ids:
                del self.outbox[session_id]

    def forget_session(self, session_id: int) -> None:
        self.outbox.pop(session_id, None)

    # ---- where it goes to

    def has_in_inbox(self, cell: int, session_id: int, key: int) -> bool:
        keys = self._inbox.get((cell, session_id))
        return keys is not None and key in keys

    def record_inbox(
        self, cell: int, session_id: int, lowest_open_id: int, keys: list[int], now_ms: i64
    ) -> None:
        """In the frame that is being made, with whatever is kept of the message."""
        note = NoteWriter(INBOX_RECORDED)
        note.write_int(cell)
        note.write_int(session_id)
        note.write_int(lowest_open_id)
        for key in keys:
            note.write_int(key)
        self._frame_builder.add_note(note.to_bytes(), now_ms, False)
        self._add_to_inbox(cell, session_id, lowest_open_id, keys)

    def _add_to_inbox(
        self, cell: int, session_id: int, lowest_open_id: int, keys: list[int]
    ) -> None:
        known = self._inbox.pop((cell, session_id), set())
        remaining = {key for key in known if key >> PART_BITS >= lowest_open_id} if known else known
        remaining.update(keys)
        self._inbox[(cell, session_id)] = remaining  # at the end: it was heard of last
        if len(self._inbox) > MAX_ORIGINS:
            del self._inbox[next(iter(self._inbox))]

    def count_inbox(self) -> int:
        return sum(len(keys) for keys in self._inbox.values())

    # ---- recovery

    def apply_inbox(self, note: NoteReader) -> None:
        """What was taken."""
        cell = int(note.read_int())
        session_id = int(note.read_int())
        lowest_open_id = int(note.read_int())
        keys: list[int] = []
        while note.has_more():
            keys.append(int(note.read_int()))
        self._add_to_inbox(cell, session_id, lowest_open_id, keys)

    def write_snapshot(self, out: NoteWriter) -> None:
        out.write_int(self.next_dedup_id)
        out.write_int(len(self.outbox))
        for session_id, dedup_ids in self.outbox.items():
            out.write_int(session_id)
            out.write_int(len(dedup_ids))
            for packet_id, dedup_id in dedup_ids.items():
                out.write_int(packet_id)
                out.write_int(dedup_id)
        out.write_int(len(self._inbox))
        for (cell, session_id), keys in self._inbox.items():
            out.write_int(cell)
            out.write_int(session_id)
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
            session_id = int(note.read_int())
            self._inbox[(cell, session_id)] = {int(note.read_int()) for _ in range(note.read_int())}
