"""Outgoing QoS 1 and 2 of one session: in flight, queued, resent.

    queued ──window free──▶ sent ──PUBACK──▶ done                            QoS 1
                            sent ──PUBREC──▶ released ──PUBCOMP──▶ done      QoS 2
    sent, released ──new connection──▶ resend with DUP, resend PUBREL        [MQTT-4.4.0-1]

While the session has a connection, deliveries go into that connection's output. Without one QoS 1
and 2 are queued up to the limits. In a persistent session the packet id of a QoS 2 message is
stored before PUBLISH, and the receipt of PUBREC before PUBREL: see `inbound`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.acl import Grant
from sluice.broker.ports import NO_CAPACITY_LISTENER, CapacityListener, ConnectionPort
from sluice.broker.sessions.inflight import Delivery, Inflight, Share
from sluice.broker.sessions.services import SessionServices
from sluice.errors import MalformedPacket, ProtocolViolation
from sluice.queues.ports import Publisher
from sluice.wire.packets import Ack, Publish
from sluice.wire.properties import PUBREC, PUBREL
from sluice.wire.reasons import PACKET_IDENTIFIER_NOT_FOUND

if TYPE_CHECKING:
    from sluice.broker.sessions.session import Session


class OutboundQos(Publisher):
    def __init__(self, session: Session, services: SessionServices) -> None:
        self._session: Session = session
        self._services: SessionServices = services
        self.window: i64 = 0  # how many unacknowledged deliveries the client accepts
        self.inflight: Inflight = Inflight()
        # Created on first use: most sessions never queue.
        self.queued: deque[Delivery] | None = None
        # Packet ids in flight that must be resent on this connection.
        self._to_resend: deque[int] | None = None
        self.buffered_bytes: i64 = 0  # of all deliveries, in flight and queued
        self.dropped_count: i64 = 0
        # Its queue consumers, and the subscriber of its exclusive queue.
        self.queue_listener: CapacityListener = NO_CAPACITY_LISTENER
        self._exclusive_listener: CapacityListener = NO_CAPACITY_LISTENER
        self._has_listeners: bool = False  # a PUBACK of a plain message costs one test

    def begin_connection(self) -> None:
        """Resend unacknowledged deliveries on a new connection, then send queued ones."""
        to_resend: deque[int] = deque()
        for delivery in self.inflight.list_in_send_order():
            if delivery.is_obsolete():
                self.inflight.remove(delivery.packet_id)
                self._release(delivery)
            elif not delivery.defer_resend():
                to_resend.append(int(delivery.packet_id))
        self._to_resend = to_resend if to_resend else None
        self.resume_sending()

    def follow_for_queues(self, listener: CapacityListener) -> None:
        """Notify `listener`, for the queue consumers of this session."""
        self.queue_listener = listener
        self._update_listeners()

    def follow_for_values(self, listener: CapacityListener) -> None:
        """Notify `listener`, for the subscriber of its exclusive queue."""
        self._exclusive_listener = listener
        self._update_listeners()

    def _update_listeners(self) -> None:
        self._has_listeners = (
            self.queue_listener is not NO_CAPACITY_LISTENER
            or self._exclusive_listener is not NO_CAPACITY_LISTENER
        )

    def on_writable(self) -> None:
        """Resume deliveries from queues after the connection became writable."""
        self._exclusive_listener.on_capacity()
        self.queue_listener.on_capacity()

    def has_capacity(self) -> bool:
        """Return whether a delivery would be sent at once."""
        connection = self._session.connection
        return (
            connection is not None
            and not connection.is_write_paused
            and self.inflight.count < self.window
        )

    def deliver(
        self,
        message: Publish,
        qos: i64,
        retain: bool,
        extra_properties: bytes,
        share: Share | None,
    ) -> Delivery | None:
        """Send `message`, or queue it until it can be sent, or count it as dropped.

        Return the delivery if it is still open.
        """
        session = self._session
        connection = session.connection
        if qos == 0:
            if connection is not None and (
                connection.is_write_paused
                or not connection.send_publish(message, 0, retain, False, 0, extra_properties)
            ):
                self._count_drop()
            return None
        if self.buffered_bytes >= self._services.limits.max_queued_bytes:
            self._count_drop()
            return None
        delivery = self._services.delivery_pool.acquire(
            message, qos, retain, extra_properties, share
        )
        if session.persistent_id:
            delivery.persistent_id = session.persistent_id
        self.buffered_bytes += delivery.size
        if (
            connection is None
            or connection.is_write_paused
            or self.inflight.count >= self.window
            or self.queued
        ):
            is_accepted = self._queue_delivery(delivery)
        else:
            is_accepted = self._send_new(delivery, connection)
        return delivery if is_accepted else None

    def deliver_after_commit(
        self,
        message: Publish,
        qos: i64,
        retain: bool,
        extra_properties: bytes,
        share: Share | None,
    ) -> Delivery | None:
        """Deliver a message that no client may see before the open frame is committed."""
        if qos == 2 and self._session.persistent_id:
            # Stores its packet id first.
            return self.deliver(message, 2, retain, extra_properties, share)
        if qos > 0 and self.buffered_bytes >= self._services.limits.max_queued_bytes:
            self._count_drop()
            return None
        delivery = self._services.delivery_pool.acquire(
            message, qos, retain, extra_properties, share
        )
        if qos > 0:
            self.buffered_bytes += delivery.size
            if self._session.persistent_id:
                delivery.persistent_id = self._session.persistent_id
        self._services.forwarder.defer_delivery(self, delivery)
        return delivery

    def send_committed(self, delivery: Delivery) -> None:
        """Send a delivery whose frame is committed, or queue it until the window is free."""
        connection = self._session.connection
        if delivery.is_committing:
            self._send_committed_qos2(delivery, connection)
        elif self._session.has_ended:
            if delivery.pending_message is not None:
                self._services.delivery_records.delete_pending(delivery)
            self._services.forwarder.reassign_shared(delivery, self._session)
        elif delivery.qos == 0:
            if connection is not None and (
                connection.is_write_paused
                or not connection.send_publish(
                    delivery.message, 0, delivery.retain, False, 0, delivery.extra_properties
                )
            ):
                self._count_drop()
        elif (
            connection is None
            or connection.is_write_paused
            or self.inflight.count >= self.window
            or self.queued
        ):
            self._queue_delivery(delivery)
        else:
            self._send_new(delivery, connection)

    def _send_committed_qos2(self, delivery: Delivery, connection: ConnectionPort | None) -> None:
        """Send a QoS 2 delivery whose packet id is stored.

        Without a connection, `begin_connection` of the next one resends it.
        """
        delivery.is_committing = False
        packet_id = delivery.packet_id
        if connection is None or self.inflight.get(packet_id) is not delivery:
            return
        if self._to_resend is not None and int(packet_id) in self._to_resend:
            self.resume_sending()
        elif not connection.send_publish(
            delivery.message, 2, delivery.retain, False, packet_id, delivery.extra_properties
        ):
            self._drop_too_large(delivery)
            if self.queued:
                self.resume_sending()

    def _drop_too_large(self, delivery: Delivery) -> None:
        """Drop a delivery that has a packet id and is larger than the client allows."""
        self.inflight.remove(delivery.packet_id)
        if delivery.persistent_id:
            self._services.delivery_records.record_completed(delivery)
        self._abandon(delivery)

    def deliver_now(self, delivery: Delivery) -> None:
        """Send a delivery of a namespace that has checked the capacity."""
        connection = self._session.connection
        if connection is not None:
            self.buffered_bytes += delivery.size
            self._send_new(delivery, connection)

    def deliver_unacknowledged(self, message: Publish, extra_properties: bytes) -> bool:
        """Send a QoS 0 message now; return False if it exceeds the client's packet size."""
        connection = self._session.connection
        if connection is None or connection.send_publish(
            message, 0, False, False, 0, extra_properties
        ):
            return True
        self._count_drop()
        return False

    def on_delivery_written(self, packet_id: i64, delivery: Delivery) -> None:
        """Register a delivery that was just written to the connection."""
        self.buffered_bytes += delivery.size
        self.inflight.add(packet_id, delivery)

    def get_capacity(self) -> i64:
        """Return how many deliveries would be sent at once."""
        connection = self._session.connection
        if connection is None or connection.is_write_paused or self._to_resend is not None:
            return 0
        return self.window - self.inflight.count

    def deliver_remote(self, delivery: Delivery) -> None:
        """Send a message that came from another cell, or queue it until it can be sent.

        It is never dropped for lack of capacity: the remote cell sends no more than the client
        accepts.
        """
        connection = self._session.connection
        self.buffered_bytes += delivery.size
        if (
            connection is None
            or not self.has_capacity()
            or self.queued
            or self._to_resend is not None
        ):
            if self.queued is None:
                self.queued = deque()
            self.queued.append(delivery)
        else:
            self._send_new(delivery, connection)

    def resend_remote(self, delivery: Delivery) -> None:
        """Resend a delivery that its cell repeated after the client reconnected."""
        connection = self._session.connection
        if delivery.end_deferral() and connection is not None:
            connection.send_publish(
                delivery.message, 1, False, True, delivery.packet_id, delivery.extra_properties
            )

    def drop_remote(self, delivery: Delivery) -> None:
        """Drop a delivery that now belongs to another consumer."""
        if self.inflight.get(delivery.packet_id) is delivery:
            self._complete(delivery.packet_id, delivery)

    def _queue_delivery(self, delivery: Delivery) -> bool:
        queued = self.queued
        if queued is None:
            queued = self.queued = deque()
        if len(queued) < self._services.limits.max_queued_messages:
            queued.append(delivery)
            return True
        self._abandon(delivery)
        return False

    def _send_new(self, delivery: Delivery, connection: ConnectionPort) -> bool:
        packet_id = self.inflight.next_id()
        if delivery.qos == 2 and delivery.persistent_id:
            # After a crash the message must be resent under this id, and no other message may use
            # the id. So the id is stored first. While a message is being published,
            # `SessionStore.store_pending` does so.
            self.inflight.add(packet_id, delivery)
            delivery.is_committing = True
            if delivery.pending_message is not None:
                self._services.delivery_records.record_sent(delivery)
            self._services.forwarder.defer_delivery(self, delivery)
            return True
        if connection.send_publish(
            delivery.message,
            delivery.qos,
            delivery.retain,
            False,
            packet_id,
            delivery.extra_properties,
        ):
            self.inflight.add(packet_id, delivery)
            return True
        self._abandon(delivery)
        return False

    def _abandon(self, delivery: Delivery) -> None:
        """Give up a delivery that is too late, too large or over the limit."""
        self._release(delivery)
        self._count_drop()
        delivery.on_abandoned()

    def _release(self, delivery: Delivery) -> None:
        """Free the memory and the pending message of a delivery that has ended."""
        self.buffered_bytes -= delivery.size
        if delivery.pending_message is not None:
            self._services.delivery_records.delete_pending(delivery)

    def _count_drop(self) -> None:
        self.dropped_count += 1
        self._services.counters.publishes_dropped += 1

    def resume_sending(self) -> None:
        """Resend, then send queued messages, as far as the window and the connection allow."""
        connection = self._session.connection
        if connection is None:
            return
        if self._to_resend is not None:
            self._resend(self._to_resend, connection)
        if self._to_resend is not None:
            return
        if self.queued:
            self._send_queued(self.queued, connection)
        self._session.retained_lookup.resume()

    def _send_queued(self, queued: deque[Delivery], connection: ConnectionPort) -> None:
        now = self._services.turn.now
        while queued and self.inflight.count < self.window and not connection.is_write_paused:
            delivery = queued.popleft()
            expires_at = delivery.message.expires_at
            if expires_at != 0.0 and expires_at <= now:
                self._abandon(delivery)
            else:
                self._send_new(delivery, connection)

    def _resend(self, to_resend: deque[int], connection: ConnectionPort) -> None:
        """Resend what an earlier connection left unacknowledged, in its first order [MQTT-4.4.0-1].

        At most as many as this connection accepts are in flight at once [MQTT-3.3.4-9].
        """
        while (
            to_resend
            and self.inflight.count - len(to_resend) < self.window
            and not connection.is_write_paused
        ):
            packet_id: i64 = to_resend[0]
            delivery = self.inflight.get(packet_id)
            if delivery is not None and delivery.is_committing:
                return  # `send_committed` or `on_committed` continues
            to_resend.popleft()
            if delivery is None:
                continue
            if delivery.is_released:
                connection.send_ack(PUBREL, packet_id, 0, "")
            elif delivery.is_obsolete():
                self.inflight.remove(packet_id)  # it became obsolete while it waited
                self._release(delivery)
            elif not connection.send_publish(
                delivery.build_packet(),
                delivery.qos,
                delivery.retain,
                True,
                packet_id,
                delivery.extra_properties,
            ):
                self._drop_too_large(delivery)
        if not to_resend:
            self._to_resend = None

    def on_puback(self, packet_id: i64, reason: i64) -> None:
        """Process a PUBACK. With success or an error, the delivery is over [MQTT-4.3.2-5]."""
        delivery = self.inflight.get(packet_id)
        if delivery is None:
            if packet_id == 0:
                # [MQTT-2.2.1-3]
                raise MalformedPacket("an acknowledgement has packet identifier 0")
            return  # acknowledged before and again after a reconnect: harmless
        if delivery.qos != 1:
            raise ProtocolViolation("a PUBACK acknowledges a QoS 2 delivery")  # [MQTT-3.3.4-1]
        self._complete(packet_id, delivery)
        if not delivery.is_pooled:
            delivery.on_acknowledged(reason)
        elif not delivery.persistent_id:
            self._services.delivery_pool.release(delivery)

    def on_qos2_ack(self, packet: Ack, connection: ConnectionPort) -> None:
        """Process PUBREC and PUBCOMP."""
        delivery = self.inflight.get(packet.packet_id)
        if delivery is not None and delivery.qos != 2:  # [MQTT-3.3.4-1]
            raise ProtocolViolation("a PUBREC or PUBCOMP acknowledges a QoS 1 delivery")
        if delivery is None:
            if packet.kind == PUBREC and packet.reason < 0x80:
                connection.send_ack(PUBREL, packet.packet_id, PACKET_IDENTIFIER_NOT_FOUND, "")
            return
        if delivery.is_committing:
            return  # it was not sent yet, or PUBREL waits for its commit
        if packet.kind == PUBREC and packet.reason < 0x80:
            if delivery.is_released or not delivery.persistent_id:
                delivery.is_released = True
                connection.send_ack(PUBREL, packet.packet_id, 0, "")
                return
            # A client that has PUBREL is done with the id: PUBLISH must not be resent after it.
            delivery.is_released = True
            delivery.is_committing = True
            self._services.delivery_records.record_pubrec(delivery)
            self._services.delivery_records.notify_after_commit(self, packet.packet_id)
        elif packet.kind == PUBREC or delivery.is_released:
            if delivery.persistent_id:
                self._services.delivery_records.record_completed(delivery)
            self._complete(packet.packet_id, delivery)
        else:
            raise ProtocolViolation("a PUBCOMP arrived before the PUBREC of its delivery")

    def _complete(self, packet_id: i64, delivery: Delivery) -> None:
        if self._has_listeners and self.inflight.count >= self.window:
            self._exclusive_listener.on_capacity()
        self.inflight.remove(packet_id)
        self._release(delivery)
        if self._has_listeners:
            self.queue_listener.on_capacity()
        if self._to_resend is not None and int(packet_id) in self._to_resend:
            # Acknowledged from the previous connection's send.
            self._to_resend.remove(int(packet_id))
        if self.queued or self._to_resend is not None:
            self.resume_sending()

    def restore_queued(self, delivery: Delivery) -> None:
        """Restore a queued message after a restart."""
        if self.queued is None:
            self.queued = deque()
        self.queued.append(delivery)
        self.buffered_bytes += delivery.size

    def restore_sent(self, delivery: Delivery, packet_id: int) -> None:
        """Restore a QoS 2 message that was sent before the restart, to resend it under its id."""
        self.inflight.add(packet_id, delivery)
        self.buffered_bytes += delivery.size

    def drop_unauthorized(self, grant: Grant) -> None:
        """Drop queued messages that the client may no longer receive; sent ones stay in flight."""
        if self.queued:
            queued, self.queued = self.queued, deque()
            for one in queued:
                if one.is_from_queue or grant.may_receive(one.message.topic):
                    self.queued.append(one)
                else:
                    self._abandon(one)
        for one in self.inflight.list_in_send_order() if self._session.connection is None else []:
            if (
                not one.is_from_queue
                and not one.is_released
                and not grant.may_receive(one.message.topic)
            ):
                self.inflight.remove(one.packet_id)
                self._abandon(one)

    def on_committed(self, tag: i64) -> None:
        """Send PUBREL for the packet id `tag`: the receipt of PUBREC is committed."""
        delivery = self.inflight.get(tag)
        if delivery is not None and delivery.is_committing and delivery.is_released:
            delivery.is_committing = False
            connection = self._session.connection
            if self._to_resend is not None and int(tag) in self._to_resend:
                self.resume_sending()
            elif connection is not None:
                connection.send_ack(PUBREL, tag, 0, "")

    def end_and_collect(self) -> list[Delivery]:
        """End all deliveries and return them; shared ones can go to another member."""
        # A QoS 2 message that was sent never goes to another session [MQTT-4.8.2-5].
        sent = self.inflight.list_in_send_order()
        reassignable = [
            one for one in sent if one.qos == 1 or (one.is_committing and not one.is_released)
        ]
        if self.queued is not None:
            reassignable.extend(self.queued)
        for one in (*sent, *(self.queued or ())):
            self._release(one)
        self.inflight.clear()
        self.queued = None
        self._to_resend = None
        self.buffered_bytes = 0
        return reassignable
