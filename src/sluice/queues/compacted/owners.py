"""All owners of exclusive queues: their values on the one log, and how they are brought back from it.

What is here runs twice: when it happens, and when recovery reads the notes of it again. So nothing here writes a note;
`exclusive` does, which is the rest of this class. A value that replaces another needs none: reading it again does the
same. The snapshot says which sequences are kept, the index rows of the store where they stand and what their marks are.

A snapshot of millions of values takes longer than anybody should wait. So it is written some owners at a time, while
the broker works, and still says how things stood when it was begun: whoever changes an owner that is not written yet
writes it first (`save`).
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i64_le
from librt.vecs import vec
from mypy_extensions import i64

from sluice.message import TOMBSTONE
from sluice.queues.compacted.owner_lookup import Finder
from sluice.queues.compacted.owner_table import BASE, FACTS, HEAD, MINDS, NEXT, PIECE_AT, UNSAVED, WORD_MASK, Heads, numbers
from sluice.queues.log.frame_builder import Journal, Note, NoteWriter
from sluice.queues.log.broker_state import FIRST_OWNER, FIRST_PID
from sluice.queues.compacted.owner import NOTHING_DONE, Owner
from sluice.queues.ports import Reader
from sluice.queues.compacted.value_rows import ADDRESS, ROW
from sluice.queues.compacted.value_rows import FACTS as ROW_FACTS
from sluice.queues.log.segment_usage import Segments
from sluice.queues.compacted.slab import Space
from sluice.store.protocol import ROW_BYTES, Record, address_of_row, pid_of_row

# Notes, behind those of `keeping`.
OWNER_MADE: Final = 48  # number, client, first sequence
OWNER_ACKED: Final = 49  # for each: number, acked, when, how many out of turn, and those
OWNER_SOUGHT: Final = 50  # number, the sequence it goes on behind
OWNER_REMOVED: Final = 51  # number, seq, mark: expired or damaged
OWNERS_SWEPT: Final = 52  # time in seconds: what is older is gone, of every owner
OWNER_PURGED: Final = 53  # number
OWNER_GONE: Final = 54  # number

TOGETHER: Final = 64  # rows of an index that are looked at together


class Owners:
    def __init__(self, journal: Journal, segments: Segments) -> None:
        self.journal: Journal = journal
        self.segments: Segments = segments
        self._space: Space = Space()
        self.heads: Heads = self._space.heads
        self.finder: Finder = Finder(self._space)
        self._nobody: Owner = Owner("", 0, 1, Space())
        self.owners: dict[str, Owner] = {}
        self.next_number: i64 = 1
        # Where a new owner's sequences begin: behind those of every owner that was forgotten.
        self.first: i64 = 1
        self.values: i64 = 0  # of all owners
        self.replaced: i64 = 0  # counters, since the start
        self.aged: i64 = 0  # removed by the sweep
        self.cached: i64 = 0  # bytes of bodies that readers have at hand
        self.saving: bool = False  # a snapshot is being written
        self._unsaved: list[Owner] = []  # whom to write into it, unless a change has done so already
        self._save_at: i64 = 0
        self._out: NoteWriter | None = None
        self._places: vec[i64] = numbers(TOGETHER)  # of whom `bring_near` looks for something, and for what
        self._marks: vec[i64] = numbers(TOGETHER)

    # ---- owners and values come and go

    def add_owner(self, client: str, number: i64, first: i64) -> Owner:
        owner = Owner(client, number, first, self._space)
        self.owners[client] = owner
        self.finder.admit(owner)
        if number >= self.next_number:
            self.next_number = number + 1
        return owner

    def find(self, owner: Owner, mark: i64) -> i64:
        """The slot of a key; -1 when there is none."""
        return owner.find(mark)

    def take(
        self,
        place: i64,
        slot: i64,
        seq: i64,
        address: i64,
        mark: i64,
        seconds: i64,
        size: i64,
        tombstone: bool,
    ) -> i64:
        """A value comes for the owner at `place`, where that of the same key stands in `slot` if there is one; the
        slot where it stands then."""
        segments = self.segments
        words = self.heads.words
        head = place * HEAD
        if slot >= 0 and not tombstone and not words[head + FACTS] & (MINDS | UNSAVED):
            base = words[head + BASE]
            rows = self._space.at[base >> PIECE_AT].rows
            at = (base & WORD_MASK) + slot * ROW
            facts = rows[at + ROW_FACTS]
            if not facts & 1:  # nor was it a tombstone: nobody but the row and the head has to know
                segments.drop(rows[at + ADDRESS], (facts >> 1) & 0x7FFF_FFFF)
                rows[at] = seq
                rows[at + ADDRESS] = address
                rows[at + ROW_FACTS] = seconds << 32 | size << 1
                words[head + NEXT] = seq + 1
                self.replaced += 1
                segments.add_lasting(address, size)
                return slot
        owner = self.finder.at[place]
        if owner.is_unsaved:
            self.save(owner)
        if slot >= 0:
            segments.drop(owner.address(slot), owner.size(slot))
            if owner.reader is not None or owner.done:
                self._withdraw(owner, owner.seq(slot))
            owner.put(slot, seq, address, seconds, size, tombstone)
            self.replaced += 1
        else:
            slot = owner.add(seq, address, mark, seconds, size, tombstone)
            self.values += 1
        segments.add_lasting(address, size)
        return slot

    def drop(self, owner: Owner, slot: i64) -> None:
        """A value is gone, whatever its reader makes of it."""
        if owner.is_unsaved:
            self.save(owner)
        self.segments.drop(owner.address(slot), owner.size(slot))
        if owner.reader is not None or owner.done:
            self._withdraw(owner, owner.seq(slot))
        owner.remove(slot)
        self.values -= 1

    def _withdraw(self, owner: Owner, seq: i64) -> None:
        """Nobody waits for this value any more."""
        if owner.done:
            owner.done.discard(int(seq))
        reader = owner.reader
        if reader is not None:
            self.forget_body(reader, seq)
            if reader.out:
                reader.out.pop(int(seq), None)

    def tidy(self, owner: Owner) -> None:
        """Values were dropped: let their room go if it is much. Slots are others after this."""
        if owner.is_sparse():
            owner.pack()

    def forget_body(self, reader: Reader, seq: i64) -> None:
        message = reader.bodies.pop(int(seq), None) if reader.bodies else None
        if message is not None:
            self.cached -= message.cost

    def remove_all(self, owner: Owner) -> None:
        slot: i64 = 0
        while slot < owner.slots():
            if owner.seq(slot):
                self.drop(owner, slot)
            slot += 1
        self.tidy(owner)

    def let_go(self, owner: Owner) -> None:
        """The owner itself goes."""
        if owner.is_unsaved:
            self.save(owner)
        self.remove_all(owner)
        self.finder.dismiss(owner)
        self.first = max(self.first, owner.next)
        self.owners.pop(owner.client, None)

    def sweep(self, seconds: i64) -> bool:
        """Take out what is older. An owner is looked through only if it may have such a value."""
        found = False
        for owner in self.owners.values():
            if owner.live == 0 or owner.oldest >= seconds:
                continue
            oldest: i64 = 0x7FFF_FFFF
            slot: i64 = 0
            while slot < owner.slots():
                if owner.seq(slot):
                    time = owner.time(slot)
                    if time < seconds:
                        self.drop(owner, slot)
                        self.aged += 1
                        found = True
                    elif time < oldest:
                        oldest = time
                slot += 1
            owner.oldest = oldest
            self.tidy(owner)
        return found

    # ---- how far an owner has come

    def go_behind(self, owner: Owner, behind: i64) -> None:
        if owner.is_unsaved:
            self.save(owner)
        owner.acked = max(0, min(behind, owner.next - 1))
        owner.done = NOTHING_DONE
        if owner.tombstones:
            self.end_tombstones(owner)

    def end_tombstones(self, owner: Owner) -> None:
        """Those that the owner has heard of are forgotten."""
        slot: i64 = 0
        while slot < owner.slots() and owner.tombstones:
            if owner.is_tombstone(slot) and 0 < owner.seq(slot) <= owner.acked:
                self.drop(owner, slot)
            slot += 1
        self.tidy(owner)

    def write_state(self, note: NoteWriter, owner: Owner) -> None:
        note.number(owner.number)
        note.number(owner.acked)
        note.number(owner.acked_at)
        note.number(len(owner.done))
        for seq in owner.done:
            note.number(seq)

    def read_state(self, note: Note, owner: Owner) -> None:
        owner.acked = note.number()
        owner.acked_at = note.number()
        count = note.number()
        owner.done = {int(note.number()) for _ in range(count)} if count else NOTHING_DONE

    # ---- snapshot

    def begin_snapshot(self, out: NoteWriter) -> None:
        """Write how things stand now, to the end of `out`: some of it with each `save_some`."""
        self.saving = True
        self.heads.all_unsaved()
        self._unsaved = list(self.owners.values())
        self._save_at = 0
        self._out = out
        out.number(self.next_number)
        out.number(self.first)
        out.number(len(self.owners))

    def save_some(self, most: i64) -> bool:
        """Write owners with about as many values; whether all are written."""
        left = most
        size: i64 = len(self._unsaved)
        while self._save_at < size and left > 0:
            owner = self._unsaved[self._save_at]
            self._save_at += 1
            if owner.is_unsaved:
                self.save(owner)
                left -= 8 + owner.slots()
        if self._save_at < size:
            return False
        self.saving = False
        self._unsaved = []
        self._out = None
        return True

    def save(self, owner: Owner) -> None:
        """Write an owner into the snapshot, before it changes."""
        out = self._out
        if out is not None:
            owner.set_saved()
            out.text(owner.client)
            out.number(owner.next)
            out.number(owner.gone_at)
            self.write_state(out, owner)
            out.data(owner.write_sequences())

    def load_snapshot(self, note: Note, both_ways: bool) -> None:
        """Not `both_ways`: one from before sequences stood in no order."""
        self.next_number = note.number()
        self.first = note.number()
        for _ in range(note.number()):
            client = note.text()
            next_seq = note.number()
            gone_at = note.number()
            owner = self.add_owner(client, note.number(), next_seq)
            owner.gone_at = gone_at
            self.read_state(note, owner)
            owner.read_sequences(note.data(), both_ways)

    def load_row(self, record: Record) -> None:
        """A value from before the snapshot, without its body; one that was moved comes again, further on."""
        owner = self.finder.numbered(record.pid - FIRST_OWNER)
        slot: i64 = -1 if owner is None else owner.slot_of(record.seq)
        if owner is not None and slot >= 0:
            owner.found(
                slot,
                record.address,
                mark_in(record),
                record.time // 1000,
                record.size,
                record.flags & TOMBSTONE != 0,
            )

    def end_rows(self) -> list[str]:
        """All rows are read; what is missing, in words."""
        lost: list[str] = []
        for owner in self.owners.values():
            missing = owner.settle()
            self.values += owner.live
            if missing:
                lost.append(f"of $ECQ/{owner.client} values are missing in the store: {missing}")
            slot: i64 = 0
            while slot < owner.slots():
                if owner.seq(slot):
                    self.segments.add_lasting(owner.address(slot), owner.size(slot))
                slot += 1
        return lost

    # ---- records behind it

    def load_record(self, record: Record) -> None:
        """A value behind the snapshot, as it came, or as compaction wrote it anew."""
        owner = self.finder.numbered(record.pid - FIRST_OWNER)
        if owner is None:
            return
        if record.seq >= owner.next:
            mark = mark_in(record)
            self.take(
                owner.place,
                self.find(owner, mark),
                record.seq,
                record.address,
                mark,
                record.time // 1000,
                record.size,
                record.flags & TOMBSTONE != 0,
            )
            return
        found = self.place_of(record)
        if found >= 0:
            self.segments.drop(self.finder.address(found), record.size)
            self.segments.add_lasting(record.address, record.size)
            self.finder.move(found, record.address)

    def apply(self, note: Note) -> None:
        what = note.what
        if what == OWNERS_SWEPT:
            self.sweep(note.number())
        elif what == OWNER_ACKED:
            while note.more():
                found = self.finder.numbered(note.number())
                owner = found if found is not None else self._nobody  # its numbers are passed over
                self.read_state(note, owner)
                if owner.tombstones:
                    self.end_tombstones(owner)
        elif what == OWNER_MADE:
            number = note.number()
            client = note.text()
            self.add_owner(client, number, note.number())
        else:
            found = self.finder.numbered(note.number())
            if found is None:
                return
            if what == OWNER_SOUGHT:
                self.go_behind(found, note.number())
            elif what == OWNER_PURGED:
                self.remove_all(found)
            elif what == OWNER_REMOVED:
                seq = note.number()
                slot = self.find(found, note.number()) if note.more() else found.slot_of(seq)
                if slot >= 0 and found.seq(slot) == seq:
                    self.drop(found, slot)
                    self.tidy(found)
            elif what == OWNER_GONE:
                self.let_go(found)

    def place_of(self, record: Record) -> i64:
        """Where the value stands that a record is (`Finder`); -1 when it is kept no more."""
        found = self.finder.find_numbered(record.pid - FIRST_OWNER, mark_in(record))
        return found if found >= 0 and self.finder.seq(found) == record.seq else -1

    def lives(self, record: Record) -> bool:
        """Whether an index row stands for a value that lives there."""
        found = self.place_of(record)
        return found >= 0 and self.finder.address(found) == record.address

    def row_lives(self, rows: bytes, at: i64) -> bool:
        """The same of a row as it stands in the index."""
        finder = self.finder
        found = finder.find_numbered(pid_of_row(rows, at) - FIRST_OWNER, mark_of_row(rows, at))
        return found >= 0 and finder.address(found) == address_of_row(rows, at)

    def bring_near(self, rows: bytes, at: i64) -> i64:
        """Rows of an index are about to be looked at, of which a segment has hundreds of thousands: have what that
        needs near for the next of them; up to which."""
        finder = self.finder
        end = min(at + TOGETHER * ROW_BYTES, len(rows))
        size: i64 = 0
        while at < end:
            pid = pid_of_row(rows, at)
            if FIRST_OWNER <= pid < FIRST_PID:
                self._places[size] = finder.place_numbered(pid - FIRST_OWNER)
                self._marks[size] = mark_of_row(rows, at)
                size += 1
            at += ROW_BYTES
        if size > 1:
            finder.bring_near(self._places, self._marks, size)
        return end


def mark_of_row(rows: bytes, at: i64) -> i64:
    """The same in a row of an index."""
    return read_i64_le(rows, at + 24)


def mark_in(record: Record) -> i64:
    """The mark as it stands in the header of a record: see `Journal.add_owned`."""
    high: i64 = record.expires if record.expires < 0x8000_0000 else record.expires - 0x1_0000_0000
    return high << 32 | record.key
