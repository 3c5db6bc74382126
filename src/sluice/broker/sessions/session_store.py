"""Persistence of plain MQTT: retained messages, persistent sessions and pending messages.

The broker works from memory. This module records each change as it happens and restores the state
at start. An acknowledgement that promises durability leaves after the commit.
"""

from __future__ import annotations

import json
from typing import Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.broker.sessions.inflight import Delivery
from sluice.broker.sessions.services import DeliveryRecords
from sluice.broker.sessions.session import Session
from sluice.broker.turn import Turn
from sluice.queues.log import (
    RETAINED_PID,
    SESSIONS_PID,
    BrokerState,
    write_recipients,
)
from sluice.queues.ports import Publisher
from sluice.wire.packets import Publish

# Key in a session record: filters whose retained messages are not all queued. Stored names stay.
PENDING_RETAINED_KEY: Final = "owed_retained"
# Size of the open frame above which publishers are paused.
MAX_UNCOMMITTED_BYTES: Final = 8_388_608


class VolatileSessionStore(DeliveryRecords):
    """Stores nothing: sessions and retained messages end with the broker.

    No session is persistent then, so the methods for persistent sessions are never called.
    """

    def __init__(self) -> None:
        self.is_durable: bool = False

    def open_frame_number(self) -> i64:
        """Return the number of the open frame."""
        return 0

    def is_saturated(self) -> bool:
        """Return whether the open frame has more than `MAX_UNCOMMITTED_BYTES`."""
        return False

    def store_retained(self, message: Publish) -> None:
        """Store a retained message, or its deletion if it is empty."""

    def delete_retained(self, topic: bytes) -> None: ...

    def store_session(self, session: Session) -> None:
        """Store a persistent session that has begun or changed."""

    def delete_session(self, session: Session) -> None: ...

    def new_dedup_id(self) -> int:
        return 0

    def record_outbox(
        self, session: Session, packet_id: int, dedup_id: int, publisher: Publisher
    ) -> None:
        """Record that an incoming QoS 2 message goes to other cells.

        Notify `publisher` after the commit.
        """

    def has_in_inbox(self, cell: int, session: int, key: int) -> bool:
        return False

    def record_inbox(
        self, cell: int, session: int, lowest_open_id: int, keys: list[int]
    ) -> None: ...

    def store_pending(self, message: Publish, deliveries: list[Delivery]) -> None:
        """Store one message for persistent sessions, once, until all of them have received it."""


class SessionStore(VolatileSessionStore):
    """Records in the log of the queues."""

    def __init__(self, state: BrokerState, turn: Turn) -> None:
        super().__init__()
        self.is_durable = True
        self._state: BrokerState = state
        self._turn: Turn = turn

    def _timestamp_ms(self) -> i64:
        self._turn.schedule_flush()
        return int(self._turn.now * 1000.0)

    def notify_after_commit(self, publisher: Publisher, tag: i64) -> None:
        self._turn.schedule_flush()
        self._state.frame_builder.add_commit_waiter(publisher, tag)

    def open_frame_number(self) -> i64:
        return self._state.frame_builder.frame_number

    def is_saturated(self) -> bool:
        return self._state.frame_builder.size() > MAX_UNCOMMITTED_BYTES

    # ---- retained messages

    def store_retained(self, message: Publish) -> None:
        if message.payload:
            self._state.put_entry(
                RETAINED_PID, message.topic, encode_message(message), self._timestamp_ms()
            )
        else:
            self.delete_retained(message.topic)

    def delete_retained(self, topic: bytes) -> None:
        self._state.delete_entry(RETAINED_PID, topic, self._timestamp_ms())

    # ---- sessions

    def store_session(self, session: Session) -> None:
        if session.persistent_id == 0:
            session.persistent_id = int(self._state.next_persistent_id)
            self._state.next_persistent_id += 1
        lookup = session.retained_lookup
        pending_filters = lookup.pending_filters()
        if lookup.is_running():
            lookup.is_in_session_record = len(pending_filters) > 0
        value = encode_session(session, pending_filters)
        self._state.put_entry(SESSIONS_PID, session.client_id.encode(), value, self._timestamp_ms())

    def delete_session(self, session: Session) -> None:
        if session.persistent_id:
            self._state.delete_entry(SESSIONS_PID, session.client_id.encode(), self._timestamp_ms())
            self._state.forget_session(session.persistent_id)

    def record_received(self, persistent_id: int, packet_id: int, released: bool) -> None:
        self._state.record_received(persistent_id, packet_id, released, self._timestamp_ms())

    # ---- exactly once between cells

    def new_dedup_id(self) -> int:
        return self._state.dedup.new_dedup_id()

    def record_outbox(
        self, session: Session, packet_id: int, dedup_id: int, publisher: Publisher
    ) -> None:
        self._state.record_outbox(session.persistent_id, packet_id, dedup_id, self._timestamp_ms())
        self.notify_after_commit(publisher, 0)

    def has_in_inbox(self, cell: int, session: int, key: int) -> bool:
        return self._state.dedup.has_in_inbox(cell, session, key)

    def record_inbox(self, cell: int, session: int, lowest_open_id: int, keys: list[int]) -> None:
        self._state.dedup.record_inbox(cell, session, lowest_open_id, keys, self._timestamp_ms())

    # ---- pending messages

    def store_pending(self, message: Publish, deliveries: list[Delivery]) -> None:
        recipients = [delivery.persistent_id for delivery in deliveries]
        out = BytesWriter()
        write_recipients(out, recipients)
        for delivery in deliveries:
            out.append(int(delivery.qos))
            out.append(1 if delivery.retain else 0)
            _write_bytes(out, delivery.extra_properties)
        _write_bytes(out, message.topic)
        out.write(encode_message(message))
        expires: i64 = int(message.expires_at + 0.999)
        pending_message = self._state.store_pending(
            out.getvalue(), recipients, expires, self._timestamp_ms()
        )
        for delivery in deliveries:
            delivery.pending_message = pending_message
            if delivery.is_committing:
                self.record_sent(delivery)

    def record_sent(self, delivery: Delivery) -> None:
        pending_message = delivery.pending_message
        if pending_message is not None:
            self._state.record_sent(
                delivery.persistent_id,
                int(delivery.packet_id),
                int(pending_message.seq),
                self._timestamp_ms(),
            )

    def record_pubrec(self, delivery: Delivery) -> None:
        self._state.record_sent(
            delivery.persistent_id, int(delivery.packet_id), 0, self._timestamp_ms()
        )
        self.delete_pending(delivery)

    def record_completed(self, delivery: Delivery) -> None:
        self._state.record_completed(
            delivery.persistent_id, int(delivery.packet_id), self._timestamp_ms()
        )

    def delete_pending(self, delivery: Delivery) -> None:
        pending_message = delivery.pending_message
        if pending_message is not None:
            delivery.pending_message = None
            self._turn.schedule_flush()
            self._state.mark_delivered(pending_message, delivery.persistent_id)


def _write_bytes(out: BytesWriter, data: bytes) -> None:
    write_i32_le(out, i32(len(data)))
    out.write(data)


def encode_message(message: Publish) -> bytes:
    """Encode a message without its topic."""
    out = BytesWriter()
    out.append(int(message.qos))
    write_i64_le(out, int(message.expires_at * 1000.0))
    _write_bytes(out, message.raw_properties)
    out.write(message.payload)
    return out.getvalue()


def decode_message(topic: bytes, value: bytes) -> Publish:
    size: i64 = i64(read_i32_le(value, 9))
    message = Publish(
        topic, value[13 + size :], i64(value[0]), True, False, 0, value[13 : 13 + size]
    )
    message.expires_at = float(read_i64_le(value, 1)) / 1000.0
    return message


def encode_session(session: Session, pending_filters: list[bytes]) -> bytes:
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
    queues = [
        [name.decode(), *options.encode()] for name, options in session.queue_requests.items()
    ]
    record: dict[str, object] = {
        "sid": session.persistent_id,
        "version": int(session.version),
        "expiry": session.expiry_seconds,
        # None: a session without a user may be continued by any user.
        "user": session.user or None,
        "subscriptions": subscriptions,
        "queues": queues,
    }
    if session.is_proxy:
        record["foreign"] = True
    if pending_filters:
        record[PENDING_RETAINED_KEY] = [name.decode() for name in pending_filters]
    return json.dumps(record, separators=(",", ":")).encode()
