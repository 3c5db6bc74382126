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

from sluice.queues.log.frame_builder import Journal, Note, NoteWriter

PASSED: Final = 38  # session, packet id, mark: a QoS 2 message is on its way to other cells
TAKEN: Final = 39  # cell, session, lowest open mark, keys: what has been given to whom here
SINCE: Final = 6  # the first version of the snapshot that tells of marks

MOST_ORIGINS: Final = (
    4096  # sessions of other cells whose marks are known; the one not heard of for longest goes
)
KEY_BITS: Final = 24  # of a key: which part of a message it is about, behind its mark


class Once:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.next_mark: i64 = 1
        self.passed: dict[int, dict[int, int]] = {}  # by session: mark by packet id
        self._taken: dict[tuple[int, int], set[int]] = {}  # by cell and session of the publisher: keys

    # ---- where it comes from

    def new_mark(self) -> int:
        mark = int(self.next_mark)
        self.next_mark += 1
        return mark

    def note_passed(self, session: int, packet_id: int, mark: int, now_ms: i64) -> None:
        note = NoteWriter(PASSED)
        note.number(session)
        note.number(packet_id)
        note.number(mark)
        self._journal.add_note(note.value(), now_ms, True)
        self.load_passed(session, packet_id, mark)

    def load_passed(self, session: int, packet_id: int, mark: int) -> None:
        self.passed.setdefault(session, {})[packet_id] = mark
        self.next_mark = max(self.next_mark, mark + 1)

    def close(self, session: int, packet_id: int) -> None:
        """It is answered for, or given up."""
        marks = self.passed.get(session)
        if marks is not None:
            marks.pop(packet_id, None)
            if not marks:
                del self.passed[session]

    def forget_session(self, session: int) -> None:
        self.passed.pop(session, None)

    # ---- where it goes to

    def has(self, cell: int, session: int, key: int) -> bool:
        keys = self._taken.get((cell, session))
        return keys is not None and key in keys

    def note_taken(self, cell: int, session: int, lowest: int, keys: list[int], now_ms: i64) -> None:
        """In the frame that is being made, with whatever is kept of the message."""
        note = NoteWriter(TAKEN)
        note.number(cell)
        note.number(session)
        note.number(lowest)
        for key in keys:
            note.number(key)
        self._journal.add_note(note.value(), now_ms, False)
        self._take(cell, session, lowest, keys)

    def _take(self, cell: int, session: int, lowest: int, keys: list[int]) -> None:
        known = self._taken.pop((cell, session), set())
        kept = {key for key in known if key >> KEY_BITS >= lowest} if known else known
        kept.update(keys)
        self._taken[(cell, session)] = kept  # at the end: it was heard of last
        if len(self._taken) > MOST_ORIGINS:
            del self._taken[next(iter(self._taken))]

    def count_taken(self) -> int:
        return sum(len(keys) for keys in self._taken.values())

    # ---- recovery

    def apply(self, note: Note) -> None:
        """What was taken."""
        cell = int(note.number())
        session = int(note.number())
        lowest = int(note.number())
        keys: list[int] = []
        while note.more():
            keys.append(int(note.number()))
        self._take(cell, session, lowest, keys)

    def write_snapshot(self, out: NoteWriter) -> None:
        out.number(self.next_mark)
        out.number(len(self.passed))
        for session, marks in self.passed.items():
            out.number(session)
            out.number(len(marks))
            for packet_id, mark in marks.items():
                out.number(packet_id)
                out.number(mark)
        out.number(len(self._taken))
        for (cell, session), keys in self._taken.items():
            out.number(cell)
            out.number(session)
            out.number(len(keys))
            for key in keys:
                out.number(key)

    def load_snapshot(self, note: Note) -> None:
        self.next_mark = note.number()
        for _ in range(note.number()):
            marks = self.passed[int(note.number())] = {}
            for _ in range(note.number()):
                packet_id = int(note.number())
                marks[packet_id] = int(note.number())
        for _ in range(note.number()):
            cell = int(note.number())
            session = int(note.number())
            self._taken[(cell, session)] = {int(note.number()) for _ in range(note.number())}
