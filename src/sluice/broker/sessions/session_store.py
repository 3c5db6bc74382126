"""What survives a restart of plain MQTT: retained messages, lasting sessions, and what waits for them.

The broker works from memory; this module writes down what it must not forget as it happens, and builds it up again at
the start. An answer that promises one of these things leaves when the store has it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.broker.sessions.inflight import Delivery
from sluice.broker.sessions.session import Session
from sluice.broker.sessions.subscriptions import Subscription
from sluice.broker.turn import Turn
from sluice.queues.log.broker_state import MAIL, RETAINED, SESSIONS, Keeping, Kept, write_readers
from sluice.queues.ports import Publisher
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.sessions.registry import Registry
    from sluice.broker.router import Router


OWED: Final = "owed_retained"  # in a session record: filters whose retained messages are not all queued
HELD_BYTES: Final = 8_388_608  # what may wait for the store before those who publish are held back


class Keeper:
    def __init__(self, keeping: Keeping, turn: Turn) -> None:
        self._keeping: Keeping = keeping
        self._turn: Turn = turn

    def _now(self) -> i64:
        self._turn.schedule()
        return int(self._turn.now * 1000.0)

    def answer_when_kept(self, publisher: Publisher, tag: i64) -> None:
        self._turn.schedule()
        self._keeping.journal.add_receipt(publisher, tag)

    def open_frame(self) -> i64:
        """Return the number of the frame that is being made."""
        return self._keeping.journal.frames

    def is_full(self) -> bool:
        """Whether more waits for the store than should."""
        return self._keeping.journal.size() > HELD_BYTES

    # ---- retained messages

    def keep_retained(self, message: Publish) -> None:
        if message.payload:
            self._keeping.put(RETAINED, message.topic, encode_message(message), self._now())
        else:
            self.drop_retained(message.topic)

    def drop_retained(self, topic: bytes) -> None:
        self._keeping.drop(RETAINED, topic, self._now())

    # ---- sessions

    def keep_session(self, session: Session) -> None:
        """A session that outlives its connection has begun or changed."""
        if session.sid == 0:
            session.sid = int(self._keeping.next_session)
            self._keeping.next_session += 1
        sender = session.retained_sender
        owed = sender.owed() if sender is not None else []
        if sender is not None:
            sender.is_stored = len(owed) > 0
        value = encode_session(session, owed)
        self._keeping.put(SESSIONS, session.client_id.encode(), value, self._now())

    def drop_session(self, session: Session) -> None:
        if session.sid:
            self._keeping.drop(SESSIONS, session.client_id.encode(), self._now())
            self._keeping.forget_session(session.sid)

    def note_received(self, session: Session, packet_id: int, released: bool) -> None:
        """An incoming QoS 2 message of a lasting session, and its release."""
        self._keeping.note_received(session.sid, packet_id, released, self._now())

    # ---- exactly once between cells

    def new_mark(self) -> int:
        return self._keeping.once.new_mark()

    def pass_on(self, session: Session, packet_id: int, mark: int, then: Publisher) -> None:
        """An incoming QoS 2 message of a lasting session is to go to other cells: when that is written down."""
        self._keeping.note_passed(session.sid, packet_id, mark, self._now())
        self.answer_when_kept(then, 0)

    def has_taken(self, cell: int, session: int, key: int) -> bool:
        return self._keeping.once.has(cell, session, key)

    def note_taken(self, cell: int, session: int, lowest: int, keys: list[int]) -> None:
        self._keeping.once.note_taken(cell, session, lowest, keys, self._now())

    # ---- what waits for sessions

    def post(self, message: Publish, deliveries: list[Delivery]) -> None:
        """One message for lasting sessions: kept once, until all of them have it."""
        readers = [delivery.sid for delivery in deliveries]
        out = BytesWriter()
        write_readers(out, readers)
        for delivery in deliveries:
            out.append(int(delivery.qos))
            out.append(1 if delivery.retain else 0)
            _write(out, delivery.extra)
        _write(out, message.topic)
        out.write(encode_message(message))
        expires: i64 = int(message.expires_at + 0.999)
        mail = self._keeping.post(out.getvalue(), readers, expires, self._now())
        for delivery in deliveries:
            delivery.mail = mail
            if delivery.storing:
                self.note_sent(delivery)

    def note_sent(self, delivery: Delivery) -> None:
        """Store the packet id of a QoS 2 message: it may be sent again under that id alone."""
        mail = delivery.mail
        if mail is not None:
            self._keeping.note_sent(delivery.sid, int(delivery.packet_id), int(mail.seq), self._now())

    def note_there(self, delivery: Delivery) -> None:
        """Store that PUBREC has come: the message itself is done with, its packet id is not."""
        self._keeping.note_sent(delivery.sid, int(delivery.packet_id), 0, self._now())
        self.done(delivery)

    def note_completed(self, delivery: Delivery) -> None:
        self._keeping.note_completed(delivery.sid, int(delivery.packet_id), self._now())

    def done(self, delivery: Delivery) -> None:
        mail = delivery.mail
        if mail is not None:
            delivery.mail = None
            self._turn.schedule()
            self._keeping.done(mail, delivery.sid)

    # ---- the start

    def restore(self, found: list[Kept], router: Router, registry: Registry) -> None:
        """Build up what was kept: sessions and retained messages come first, then mail in its order."""
        by_sid: dict[int, Session] = {}
        owing: list[tuple[Session, list[bytes]]] = []
        for kept in found:
            if kept.pid == RETAINED:
                router.retained.restore(decode_message(kept.key, kept.value))
            elif kept.pid == SESSIONS:
                told = json.loads(kept.value)
                session = self._restore_session(kept.key.decode(), told, router, registry)
                by_sid[session.sid] = session
                owed: list[str] = told.get(OWED, [])
                if owed:
                    owing.append((session, [name.encode() for name in owed]))
            elif kept.pid == MAIL:
                self._restore_mail(kept, by_sid)
        for sid in [*self._keeping.received, *self._keeping.sent, *self._keeping.once.passed]:
            if sid not in by_sid:
                self._keeping.forget_session(sid)
        for sid, session in by_sid.items():
            self._keeping.next_session = max(self._keeping.next_session, sid + 1)
            for packet_id, mail in self._keeping.sent.get(sid, {}).items():
                if mail == 0:
                    delivery = Delivery(Publish(b"", b"", 2), 2, False, b"", None)
                    delivery.sid = sid
                    delivery.released = True
                    session.restore_sent(delivery, packet_id)
        if router.abroad is None:
            for session, filters in owing:  # all retained messages and all mail are in memory now
                router.resume_retained(session, filters)

    def _restore_session(
        self, client_id: str, told: dict[str, Any], router: Router, registry: Registry
    ) -> Session:
        session = Session(client_id, router)
        session.sid = told["sid"]
        session.version = told["version"]
        session.expiry = told["expiry"]
        session.belong_to(told.get("user"))
        session.foreign = told.get("foreign", False)
        for name, qos, no_local, as_published, handling, identifier in told["subscriptions"]:
            subscription = Subscription(
                session, name.encode(), qos, no_local, as_published, handling, identifier
            )
            router.subscribe(subscription)
            if router.door is not None and name.startswith("$admin/"):
                router.door.watch()
        for name, qos, options in told["queues"]:
            session.queue_requests[name.encode()] = (qos, options)  # they stay while queues are switched off
            if router.door is not None:
                router.door.rejoin(session, name.encode(), qos, options)
        received = self._keeping.received.get(session.sid)
        if received:
            session.restore_received(received)
        passed = self._keeping.once.passed.get(session.sid)
        if passed:
            session.passed = dict(sorted(passed.items(), key=_by_mark))
        registry.restore(session)
        return session

    def _restore_mail(self, kept: Kept, by_sid: dict[int, Session]) -> None:
        mail = self._keeping.mail(kept.seq)
        if mail is None:
            return
        body = kept.value
        count: i64 = i64(read_i32_le(body, 0))
        at: i64 = 4 + 8 * count
        headers: list[tuple[int, int, bool, bytes]] = []
        for nth in range(count):
            qos = body[at]
            retain = body[at + 1] == 1
            size: i64 = i64(read_i32_le(body, at + 2))
            extra = body[at + 6 : at + 6 + size]
            at += 6 + size
            headers.append((int(read_i64_le(body, 4 + 8 * nth)), qos, retain, extra))
        size = i64(read_i32_le(body, at))
        topic = body[at + 4 : at + 4 + size]
        message = decode_message(topic, body[at + 4 + size :])
        for sid, qos, retain, extra in headers:
            if sid not in mail.readers:
                continue
            session = by_sid.get(sid)
            if session is None:
                self._keeping.done(mail, sid)
                continue
            delivery = Delivery(message, qos, retain, extra, None)
            delivery.sid = sid
            delivery.mail = mail
            packet_id = sent_as(self._keeping.sent.get(sid), int(kept.seq))
            if packet_id:
                session.restore_sent(delivery, packet_id)
            else:
                session.restore_waiting(delivery)


def _by_mark(passed: tuple[int, int]) -> int:
    return passed[1]


def sent_as(sent: dict[int, int] | None, mail: int) -> int:
    """The packet id under which a session was sent a QoS 2 message; 0 when it was not."""
    if sent is not None:
        for packet_id, seq in sent.items():
            if seq == mail:
                return packet_id
    return 0


def _write(out: BytesWriter, data: bytes) -> None:
    write_i32_le(out, i32(len(data)))
    out.write(data)


def encode_message(message: Publish) -> bytes:
    """All of a message but its topic."""
    out = BytesWriter()
    out.append(int(message.qos))
    write_i64_le(out, int(message.expires_at * 1000.0))
    _write(out, message.raw)
    out.write(message.payload)
    return out.getvalue()


def decode_message(topic: bytes, value: bytes) -> Publish:
    size: i64 = i64(read_i32_le(value, 9))
    message = Publish(topic, value[13 + size :], i64(value[0]), True, False, 0, value[13 : 13 + size])
    message.expires_at = float(read_i64_le(value, 1)) / 1000.0
    return message


def encode_session(session: Session, owed: list[bytes]) -> bytes:
    subscriptions = [
        [
            one.topic_filter.decode(),
            int(one.qos),
            one.no_local,
            one.retain_as_published,
            one.retain_handling,
            one.identifier,
        ]
        for one in session.subscriptions.values()
    ]
    queues = [[name.decode(), qos, told] for name, (qos, told) in session.queue_requests.items()]
    told: dict[str, object] = {
        "sid": session.sid,
        "version": int(session.version),
        "expiry": session.expiry,
        "user": session.user or None,  # of nobody in particular: whoever has a name may go on with it
        "subscriptions": subscriptions,
        "queues": queues,
    }
    if session.foreign:
        told["foreign"] = True
    if owed:
        told[OWED] = [name.decode() for name in owed]
    return json.dumps(told, separators=(",", ":")).encode()
