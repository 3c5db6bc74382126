"""What the broker must not forget besides queues: retained messages, sessions, and the messages that wait for them.

All of it is records of the same log, in the same frames, under the same promise. There are two kinds.

A *thing* has a key and a value, and the last value counts: a retained message by its topic, a session by its client id.
*Mail* is one message for one or more sessions: written once, whoever it is for, and let go when the last one has it.

The broker holds values and messages in memory; here is only where they stand in the store, and what lives of them.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.queues.log.frame_builder import Journal, Note, NoteWriter
from sluice.queues.log.cross_node_dedup import PASSED, SINCE, TAKEN, Once
from sluice.queues.log.segment_usage import Segments
from sluice.store.protocol import Record, read_record

# Partition numbers that no queue ever has: those of owners (see `exclusive`), and from FIRST_PID on these.
FIRST_OWNER: Final = 0x8000_0000
FIRST_PID: Final = 0xFFFF_FF00
RETAINED: Final = 0xFFFF_FF00
SESSIONS: Final = 0xFFFF_FF01
MAIL: Final = 0xFFFF_FF02

# Notes; the numbers of queues end below.
THING_GONE: Final = 32  # pid, seq
MAIL_DONE: Final = 33  # pairs: mail, session
RECEIVED: Final = 34  # session, packet id: a QoS 2 message has come in
RELEASED: Final = 35  # session, packet id: and its PUBREL
SENT: Final = 36  # session, packet id, mail: a QoS 2 message has gone out; mail 0: and its PUBREC has come
COMPLETED: Final = 37  # session, packet id: and its PUBCOMP


class Thing:
    def __init__(self, pid: i64, seq: i64, address: i64, size: i64) -> None:
        self.pid: i64 = pid
        self.seq: i64 = seq
        self.address: i64 = address
        self.size: i64 = size


class Mail:
    def __init__(self, seq: i64, address: i64, size: i64) -> None:
        self.seq: i64 = seq
        self.address: i64 = address
        self.size: i64 = size
        self.readers: list[int] = []  # sessions that do not have it yet


class Kept:
    """Something that recovery found: a thing with its key, or mail (`key` is empty then)."""

    def __init__(self, pid: i64, seq: i64, key: bytes, value: bytes) -> None:
        self.pid: i64 = pid
        self.seq: i64 = seq
        self.key: bytes = key
        self.value: bytes = value


class Keeping:
    def __init__(self, journal: Journal, segments: Segments) -> None:
        self.journal = journal
        self._segments = segments
        self._things: dict[bytes, Thing] = {}  # retained messages and sessions, by pid and key
        self._by_seq: dict[int, Thing] = {}  # the same
        self._mail: dict[int, Mail] = {}
        self._next: i64 = 1
        self._done: list[int] = []  # mail and session in turn, since the last frame
        self.next_session: i64 = 1
        self.once: Once = Once(journal)
        self.received: dict[int, set[int]] = {}  # unreleased QoS 2 by session
        self.sent: dict[
            int, dict[int, int]
        ] = {}  # outgoing QoS 2 by session: mail by packet id, 0 when it is there
        # Of recovery: what lives, and where, before its bodies are read.
        self._living: dict[int, Thing] = {}
        self.is_whole: bool = (
            True  # else nothing may be thrown away: the broker has not been given back its own yet
        )

    # ---- things

    def put(self, pid: i64, key: bytes, value: bytes, now_ms: i64) -> None:
        """Keep `value` in place of what `key` had. The record names the one it replaces: recovery knows without
        reading either of them, and what is dropped later does not uncover an older value."""
        name = _name(pid, key)
        old = self._things.get(name)
        out = BytesWriter()
        write_i64_le(out, 0 if old is None else old.seq)
        write_i32_le(out, i32(len(key)))
        out.write(key)
        out.write(value)
        body = out.getvalue()
        seq = self._next
        self._next += 1
        address = self.journal.add_kept(pid, seq, 0, now_ms, body)
        thing = Thing(pid, seq, address, 40 + len(body))
        self._segments.add(address, thing.size)
        if old is not None:
            self._segments.drop(old.address, old.size)
            del self._by_seq[int(old.seq)]
        self._things[name] = thing
        self._by_seq[int(seq)] = thing

    def drop(self, pid: i64, key: bytes, now_ms: i64) -> None:
        thing = self._things.pop(_name(pid, key), None)
        if thing is None:
            return
        self._segments.drop(thing.address, thing.size)
        del self._by_seq[int(thing.seq)]
        note = NoteWriter(THING_GONE)
        note.number(thing.seq)
        self.journal.add_note(note.value(), now_ms, True)

    # ---- mail

    def post(self, body: bytes, readers: list[int], expires: i64, now_ms: i64) -> Mail:
        """Keep a message until every one of `readers` has it. The body names them too."""
        seq = self._next
        self._next += 1
        address = self.journal.add_kept(MAIL, seq, expires, now_ms, body)
        mail = Mail(seq, address, 40 + len(body))
        mail.readers = readers
        self._segments.add(address, mail.size)
        self._mail[int(seq)] = mail
        return mail

    def done(self, mail: Mail, session: int) -> None:
        """One session has it, or has ended."""
        if session not in mail.readers:
            return
        mail.readers.remove(session)
        if not self._done:
            self.journal.note_last = self
        self._done.append(int(mail.seq))
        self._done.append(session)
        if not mail.readers:
            del self._mail[int(mail.seq)]
            self._segments.drop(mail.address, mail.size)

    def write_done(self, now_ms: i64) -> None:
        """The frame is closed: who has got what since the last one."""
        note = NoteWriter(MAIL_DONE)
        for number in self._done:
            note.number(number)
        self._done = []
        self.journal.add_note(note.value(), now_ms, False)

    # ---- incoming QoS 2

    def note_received(self, session: int, packet_id: int, released: bool, now_ms: i64) -> None:
        note = NoteWriter(RELEASED if released else RECEIVED)
        note.number(session)
        note.number(packet_id)
        # A power cut must take neither of them back. Without the first, a repeated PUBLISH is a second
        # message; without the second, another message under the freed id is taken for a repeat.
        self.journal.add_note(note.value(), now_ms, True)
        self._apply_received(session, packet_id, released)

    def _apply_received(self, session: int, packet_id: int, released: bool) -> None:
        self._knows_session(session)
        ids = self.received.setdefault(session, set())
        if released:
            ids.discard(packet_id)
        else:
            ids.add(packet_id)
        self.once.close(session, packet_id)

    def note_passed(self, session: int, packet_id: int, mark: int, now_ms: i64) -> None:
        """It goes on to other cells: not received before those have it. See `once`."""
        self.once.note_passed(session, packet_id, mark, now_ms)
        self.received.get(session, set()).discard(packet_id)

    def _knows_session(self, session: int) -> None:
        """Numbers of sessions are not used twice: what was noted of an old one must not fall to a new one."""
        self.next_session = max(self.next_session, session + 1)

    # ---- outgoing QoS 2

    def note_sent(self, session: int, packet_id: int, mail: int, now_ms: i64) -> None:
        note = NoteWriter(SENT)
        note.number(session)
        note.number(packet_id)
        note.number(mail)
        self.journal.add_note(note.value(), now_ms, True)  # what is sent next depends on it
        self.sent.setdefault(session, {})[packet_id] = mail

    def note_completed(self, session: int, packet_id: int, now_ms: i64) -> None:
        ids = self.sent.get(session)
        if ids is None or packet_id not in ids:
            return
        note = NoteWriter(COMPLETED)
        note.number(session)
        note.number(packet_id)
        self.journal.add_note(note.value(), now_ms, False)
        del ids[packet_id]
        if not ids:
            del self.sent[session]

    def forget_session(self, session: int) -> None:
        self.received.pop(session, None)
        self.sent.pop(session, None)
        self.once.forget_session(session)

    # ---- compaction

    def rewrite(self, record: Record) -> bool:
        """Write what still lives at this record's address anew."""
        if record.pid == MAIL:
            mail = self._mail.get(int(record.seq))
            if mail is None or mail.address != record.address:
                return False
            mail.address = self._move(record)
            return True
        thing = self._by_seq.get(int(record.seq))
        if thing is None or thing.address != record.address:
            return False
        thing.address = self._move(record)
        return True

    def _move(self, record: Record) -> i64:
        moved = self.journal.add_kept(record.pid, record.seq, record.expires, record.time, record.body)
        self._segments.drop(record.address, record.size)
        self._segments.add(moved, record.size)
        return moved

    def lives(self, record: Record) -> bool:
        """Whether an index row stands for something that lives there."""
        if record.pid == MAIL:
            mail = self._mail.get(int(record.seq))
            return mail is not None and mail.address == record.address
        thing = self._by_seq.get(int(record.seq))
        return thing is not None and thing.address == record.address

    # ---- recovery

    def write_snapshot(self, out: NoteWriter) -> None:
        out.number(self._next)
        out.number(self.next_session)
        out.number(len(self._things))
        for thing in self._things.values():
            out.number(thing.seq)
        out.number(len(self._mail))
        for mail in self._mail.values():
            out.number(mail.seq)
            out.number(len(mail.readers))
            for reader in mail.readers:
                out.number(reader)
        waiting = [(session, ids) for session, ids in self.received.items() if ids]
        out.number(len(waiting))
        for session, ids in waiting:
            out.number(session)
            out.number(len(ids))
            for packet_id in ids:
                out.number(packet_id)
        out.number(len(self.sent))
        for session, sent in self.sent.items():
            out.number(session)
            out.number(len(sent))
            for packet_id, seq in sent.items():
                out.number(packet_id)
                out.number(seq)
        self.once.write_snapshot(out)

    def load_snapshot(self, note: Note) -> None:
        self._next = note.number()
        self.next_session = note.number()
        for _ in range(note.number()):
            seq = note.number()
            self._living[int(seq)] = Thing(0, seq, -1, 0)
        for _ in range(note.number()):
            seq = note.number()
            mail = Mail(seq, -1, 0)
            mail.readers = [int(note.number()) for _ in range(note.number())]
            self._mail[int(seq)] = mail
        for _ in range(note.number()):
            session = int(note.number())
            self.received[session] = {int(note.number()) for _ in range(note.number())}
        for _ in range(note.number()):
            session = int(note.number())
            sent = self.sent[session] = {}
            for _ in range(note.number()):
                packet_id = int(note.number())
                sent[packet_id] = int(note.number())
        if note.what >= SINCE:
            self.once.load_snapshot(note)

    def load_row(self, record: Record) -> None:
        """A record from before the snapshot, without its body."""
        self._place(record, False)

    def load_record(self, record: Record) -> None:
        """A record behind the snapshot."""
        self._next = max(self._next, record.seq + 1)
        self._place(record, True)

    def _place(self, record: Record, new: bool) -> None:
        self.is_whole = False
        number = int(record.seq)
        if record.pid == MAIL:
            mail = self._mail.get(number)
            if mail is None:
                if not new:
                    return
                mail = Mail(record.seq, -1, 0)
                mail.readers = readers_of(record.body)
                for reader in mail.readers:
                    self._knows_session(reader)
                self._mail[number] = mail
            mail.address = record.address
            mail.size = record.size
            return
        thing = self._living.get(number)
        if thing is None:
            if not new:
                return
            self._living.pop(int(read_i64_le(record.body, 0)), None)
            thing = self._living[number] = Thing(record.pid, record.seq, -1, 0)
        thing.pid = record.pid
        thing.address = record.address
        thing.size = record.size

    def apply(self, note: Note) -> None:
        if note.what == THING_GONE:
            self._living.pop(int(note.number()), None)
        elif note.what == MAIL_DONE:
            while note.more():
                mail = self._mail.get(int(note.number()))
                session = int(note.number())
                if mail is not None and session in mail.readers:
                    mail.readers.remove(session)
                    if not mail.readers:
                        del self._mail[int(mail.seq)]
        elif note.what == SENT:
            session = int(note.number())
            self._knows_session(session)
            packet_id = int(note.number())
            self.sent.setdefault(session, {})[packet_id] = int(note.number())
        elif note.what == COMPLETED:
            self.sent.get(int(note.number()), {}).pop(int(note.number()), None)
        elif note.what == TAKEN:
            self.once.apply(note)
        elif note.what == PASSED:
            self._passed(note)
        else:
            self._apply_received(int(note.number()), int(note.number()), note.what == RELEASED)

    def _passed(self, note: Note) -> None:
        session = int(note.number())
        packet_id = int(note.number())
        self._knows_session(session)
        self.received.get(session, set()).discard(packet_id)
        self.once.load_passed(session, packet_id, int(note.number()))

    def found(self) -> list[int]:
        """Where the bodies stand that `restore` needs, oldest first."""
        things = [int(thing.address) for thing in self._living.values() if thing.address >= 0]
        mails = [int(mail.address) for mail in self._mail.values() if mail.address >= 0]
        return sorted(things) + sorted(mails)

    def restore(self, records: list[bytes | None]) -> list[Kept]:
        """What lives, in the order of its writing, mail last: what the broker builds itself up from."""
        mails: list[Kept] = []
        newest: dict[bytes, Kept] = {}
        for data in records:
            record = None if data is None else read_record(data, 0, len(data), 0)
            if record is None:
                continue
            body = record.body
            if record.pid == MAIL:
                mails.append(Kept(MAIL, record.seq, b"", body))
                continue
            try:
                key, value = split_thing(body)
            except (ValueError, IndexError):
                continue  # damaged, as above, though its checksum is right
            kept = Kept(record.pid, record.seq, key, value)
            name = _name(kept.pid, kept.key)
            before = newest.get(name)
            if before is None or before.seq < kept.seq:
                newest[name] = kept
        for name, kept in newest.items():
            thing = self._living[int(kept.seq)]
            self._things[name] = thing
            self._by_seq[int(thing.seq)] = thing
            self._segments.add(thing.address, thing.size)
        for number, mail in list(self._mail.items()):
            if mail.address < 0:
                del self._mail[number]
            else:
                self._segments.add(mail.address, mail.size)
        self._living = {}
        self.is_whole = True
        return sorted(newest.values(), key=_by_sequence) + sorted(mails, key=_by_sequence)

    def mail(self, seq: i64) -> Mail | None:
        return self._mail.get(int(seq))


def _by_sequence(kept: Kept) -> i64:
    return kept.seq


def _name(pid: i64, key: bytes) -> bytes:
    return (b"r" if pid == RETAINED else b"s") + key


def split_thing(body: bytes) -> tuple[bytes, bytes]:
    """Key and value of a thing, behind the number of the record that it replaces."""
    size: i64 = i64(read_i32_le(body, 8))
    if size < 0 or 12 + size > len(body):
        raise ValueError(f"a key of {size} bytes in a record of {len(body)}")
    return body[12 : 12 + size], body[12 + size :]


def write_readers(out: BytesWriter, readers: list[int]) -> None:
    """The head of a mail's body: who it is for."""
    write_i32_le(out, i32(len(readers)))
    for reader in readers:
        write_i64_le(out, reader)


def readers_of(body: bytes) -> list[int]:
    end = 4 + 8 * int(read_i32_le(body, 0))
    if end > len(body):
        raise ValueError(f"more readers than a record of {len(body)} bytes can name")
    from_bytes = int.from_bytes
    return [from_bytes(body[at : at + 8], "little") for at in range(4, end, 8)]
