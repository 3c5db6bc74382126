"""Restores persistent sessions, retained messages and pending messages after a restart."""

from __future__ import annotations

import json
from typing import Any

from librt.strings import read_i32_le, read_i64_le
from mypy_extensions import i64

from sluice.broker.routing.registry import SessionRegistry
from sluice.broker.routing.router import Router
from sluice.broker.sessions import (
    PENDING_RETAINED_KEY,
    Delivery,
    Session,
    Subscription,
    decode_message,
    decode_options,
)
from sluice.queues.log import (
    PENDING_PID,
    RETAINED_PID,
    SESSIONS_PID,
    BrokerState,
    RestoredRecord,
)
from sluice.wire.packets import Publish


class SessionRestore:
    def __init__(self, state: BrokerState, router: Router, registry: SessionRegistry) -> None:
        self._state: BrokerState = state
        self._router: Router = router
        self._registry: SessionRegistry = registry

    def restore(self, entries: list[RestoredRecord]) -> None:
        """Restore sessions and retained messages first, then pending messages in their order."""
        router = self._router
        by_persistent_id: dict[int, Session] = {}
        unsent_retained: list[tuple[Session, list[bytes]]] = []
        for entry in entries:
            if entry.pid == RETAINED_PID:
                router.retained.restore(decode_message(entry.key, entry.value))
            elif entry.pid == SESSIONS_PID:
                record = json.loads(entry.value)
                session = self._restore_session(entry.key.decode(), record)
                by_persistent_id[session.persistent_id] = session
                pending_filters: list[str] = record.get(PENDING_RETAINED_KEY, [])
                if pending_filters:
                    unsent_retained.append((session, [name.encode() for name in pending_filters]))
            elif entry.pid == PENDING_PID:
                self._restore_pending(entry, by_persistent_id)
        for persistent_id in [
            *self._state.received_qos2,
            *self._state.sent_qos2,
            *self._state.dedup.outbox,
        ]:
            if persistent_id not in by_persistent_id:
                self._state.forget_session(persistent_id)
        for persistent_id, session in by_persistent_id.items():
            self._state.next_persistent_id = max(self._state.next_persistent_id, persistent_id + 1)
            for packet_id, sequence in self._state.sent_qos2.get(persistent_id, {}).items():
                if sequence == 0:
                    delivery = Delivery(Publish(b"", b"", 2), 2, False, b"", None)
                    delivery.persistent_id = persistent_id
                    delivery.is_released = True
                    session.outbound.restore_sent(delivery, packet_id)
        if not router.cluster.has_other_cells:
            # All retained and all pending messages are in memory now.
            for session, filters in unsent_retained:
                router.resume_retained(session, filters)

    def _restore_session(self, client_id: str, record: dict[str, Any]) -> Session:
        router = self._router
        session = Session(client_id, router.session_services)
        session.persistent_id = record["sid"]
        session.version = record["version"]
        session.expiry_seconds = record["expiry"]
        session.set_user(record.get("user"))
        session.is_proxy = record.get("foreign", False)
        for name, qos, no_local, as_published, handling, identifier in record["subscriptions"]:
            subscription = Subscription(
                session, name.encode(), qos, no_local, as_published, handling, identifier
            )
            router.subscribe(subscription)
            router.namespaces.find(subscription.topic_filter).on_subscribed(subscription)
        for name, qos, texts in record["queues"]:
            # Queue subscriptions stay stored while queues are switched off.
            options = decode_options(qos, texts)
            session.queue_requests[name.encode()] = options
            topic_filter = name.encode()
            router.namespaces.find(topic_filter).restore_subscription(
                session, topic_filter, options
            )
        received = self._state.received_qos2.get(session.persistent_id)
        if received:
            session.inbound.restore_received(received)
        outbox = self._state.dedup.outbox.get(session.persistent_id)
        if outbox:
            session.inbound.outbox = dict(sorted(outbox.items(), key=_dedup_id_of))
        self._registry.restore(session)
        return session

    def _restore_pending(self, entry: RestoredRecord, by_persistent_id: dict[int, Session]) -> None:
        pending_message = self._state.find_pending(entry.seq)
        if pending_message is None:
            return
        body = entry.value
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
        for persistent_id, qos, retain, extra in headers:
            if persistent_id not in pending_message.recipients:
                continue
            session = by_persistent_id.get(persistent_id)
            if session is None:
                self._state.mark_delivered(pending_message, persistent_id)
                continue
            delivery = Delivery(message, qos, retain, extra, None)
            delivery.persistent_id = persistent_id
            delivery.pending_message = pending_message
            packet_id = find_sent_packet_id(
                self._state.sent_qos2.get(persistent_id), int(entry.seq)
            )
            if packet_id:
                session.outbound.restore_sent(delivery, packet_id)
            else:
                session.outbound.restore_queued(delivery)


def _dedup_id_of(outbox_item: tuple[int, int]) -> int:
    return outbox_item[1]


def find_sent_packet_id(sent: dict[int, int] | None, sequence: int) -> int:
    """Return the packet id under which a QoS 2 message was sent to a session, or 0."""
    if sent is not None:
        for packet_id, seq in sent.items():
            if seq == sequence:
                return packet_id
    return 0
