"""What survives a restart of plain MQTT: retained messages, lasting sessions, and what waits for them.

The broker works from memory; this module writes down what it must not forget as it happens, and builds it up again at
the start. An answer that promises one of these things leaves when the store has it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.broker.session import Delivery, Session
from sluice.broker.subscriptions import Subscription
from sluice.broker.turn import Turn
from sluice.queues.keeping import MAIL, RETAINED, SESSIONS, Keeping, write_readers
from sluice.store.protocol import Record
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.registry import Registry
    from sluice.broker.router import Router


class Keeper:
    def __init__(self, keeping: Keeping, turn: Turn) -> None:
        self._keeping: Keeping = keeping
        self._turn: Turn = turn

    def _now(self) -> i64:
        self._turn.schedule()
        return int(self._turn.now * 1000.0)

    def answer_when_kept(self, session: Session, tag: i64) -> None:
        self._turn.schedule()
        self._keeping.journal.add_receipt(session, tag)

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
        self._keeping.put(SESSIONS, session.client_id.encode(), encode_session(session), self._now())

    def drop_session(self, session: Session) -> None:
        if session.sid:
            self._keeping.drop(SESSIONS, session.client_id.encode(), self._now())
            self._keeping.received.pop(session.sid, None)

    def note_received(self, session: Session, packet_id: int, released: bool) -> None:
        """An incoming QoS 2 message of a lasting session, and its release."""
        self._keeping.note_received(session.sid, packet_id, released, self._now())

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

    def done(self, delivery: Delivery) -> None:
        mail = delivery.mail
        if mail is not None:
            delivery.mail = None
            self._turn.schedule()
            self._keeping.done(mail, delivery.sid)

    # ---- the start

    def restore(self, records: list[Record], router: Router, registry: Registry) -> None:
        """Build up what was kept. `records` has sessions and retained messages first, then mail in its order."""
        by_sid: dict[int, Session] = {}
        for record in records:
            if record.pid == RETAINED:
                key, value = _split(record.body)
                router.retained.put(decode_message(key, value), False)
            elif record.pid == SESSIONS:
                key, value = _split(record.body)
                session = self._restore_session(key.decode(), json.loads(value), router, registry)
                by_sid[session.sid] = session
            elif record.pid == MAIL:
                self._restore_mail(record, by_sid)

    def _restore_session(
        self, client_id: str, told: dict[str, Any], router: Router, registry: Registry
    ) -> Session:
        session = Session(client_id, router)
        session.sid = told["sid"]
        session.version = told["version"]
        session.expiry = told["expiry"]
        for name, qos, no_local, as_published, handling, identifier in told["subscriptions"]:
            subscription = Subscription(
                session, name.encode(), qos, no_local, as_published, handling, identifier
            )
            router.subscribe(subscription)
        if router.door is not None:
            for name, qos, options in told["queues"]:
                router.door.rejoin(session, name.encode(), qos, options)
        received = self._keeping.received.get(session.sid)
        if received:
            session.restore_received(received)
        registry.restore(session)
        return session

    def _restore_mail(self, record: Record, by_sid: dict[int, Session]) -> None:
        mail = self._keeping.mail(record.seq)
        if mail is None:
            return
        body = record.body
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
            session.restore_waiting(delivery)


def _write(out: BytesWriter, data: bytes) -> None:
    write_i32_le(out, i32(len(data)))
    out.write(data)


def _split(body: bytes) -> tuple[bytes, bytes]:
    """Key and value of a kept thing."""
    size: i64 = i64(read_i32_le(body, 0))
    return body[4 : 4 + size], body[4 + size :]


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


def encode_session(session: Session) -> bytes:
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
    told = {
        "sid": session.sid,
        "version": int(session.version),
        "expiry": session.expiry,
        "subscriptions": subscriptions,
        "queues": queues,
    }
    return json.dumps(told, separators=(",", ":")).encode()
