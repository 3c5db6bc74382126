"""One client's session: its subscriptions, its deliveries, and QoS 1 and 2 in both directions.

A session outlives its connections. While it has a connection it responds at once, into that
connection's output. Without one it stores QoS 1 and 2 messages up to its limits. A session decides;
it moves no bytes.

Outgoing deliveries (QoS 1 and 2):

    queued ──window free──▶ sent ──PUBACK──▶ done                            QoS 1
                            sent ──PUBREC──▶ released ──PUBCOMP──▶ done      QoS 2
    sent, released ──new connection──▶ resend with DUP, resend PUBREL        [MQTT-4.4.0-1]

In a persistent session each step of QoS 2 is stored before the packet leaves that reports it. For
outgoing messages, the packet id is stored before PUBLISH and the receipt of PUBREC before PUBREL.
For incoming messages, the message with its packet id is stored before PUBREC and the receipt of
PUBREL before PUBCOMP. So after a crash both sides continue from the same step. A session that ends
with its connection cannot continue after a crash, and nothing of this is stored for it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from librt.vecs import vec
from mypy_extensions import i64

from sluice.broker.cluster_port import RemoteDelivery
from sluice.broker.namespaces.compacted.exclusive_subscriber import (
    ExclusiveSubscriber,
)
from sluice.broker.sessions.inflight import Delivery, Inflight
from sluice.broker.sessions.subscriptions import SharedSubscription, Subscription
from sluice.broker.subscribe_options import SubscribeOptions
from sluice.errors import MalformedPacket, ProtocolViolation
from sluice.queues.names import make_identity
from sluice.queues.ports import Publisher
from sluice.wire.packets import V5, Ack, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from sluice.wire.reasons import (
    PACKET_IDENTIFIER_NOT_FOUND,
    RECEIVE_MAXIMUM_EXCEEDED,
)

if TYPE_CHECKING:
    from sluice.broker.acl.grants import Grant
    from sluice.broker.cluster_port import SessionProxies
    from sluice.broker.namespaces.queues.blocked_consumers import BlockedConsumers
    from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer
    from sluice.broker.namespaces.queues.queue_subscriptions import PresenceTask
    from sluice.broker.net.connection import Connection
    from sluice.broker.router import Router
    from sluice.broker.sessions.retained_sender import RetainedSender

# In a tag, in place of the QoS of a publish: the packet to send after the note is committed.
TAG_SUBACK: Final = 3  # SUBACK or UNSUBACK
TAG_PUBCOMP: Final = 4
TAG_PUBCOMP_UNKNOWN: Final = 5  # PUBCOMP for an unknown packet id
TAG_PUBREL: Final = 6


class Session(Publisher):
    def __init__(self, client_id: str, router: Router) -> None:
        self.client_id: str = client_id
        self.router: Router = router
        self.connection: Connection | None = None
        self.grant: Grant | None = None  # None: everything is allowed
        self.user: str | None = None  # the session's user; None: unknown since the restart
        self.identity: str = client_id  # identity of its deliveries; see `set_user`
        self.version: i64 = V5
        self.expiry_seconds: int = 0  # how long it outlives its connection
        self.will: Publish | None = None
        self.will_delay: int = 0
        self.disconnected_at: float = 0.0  # when the last connection ended; 0.0 while connected
        self.has_ended: bool = False
        self.subscriptions: dict[bytes, Subscription] = {}
        self.subscription_bytes: int = 0  # see `estimate_filter_bytes`
        # Set while retained messages are looked up for this session.
        self.retained_sender: RetainedSender | None = None
        self.window: i64 = 0  # how many unacknowledged deliveries the client accepts
        self.inflight: Inflight = Inflight()
        # Created on first use: most sessions never queue.
        self.queued: deque[Delivery] | None = None
        # Packet ids in flight that must be resent on this connection.
        self._to_resend: deque[int] | None = None
        self.buffered_bytes: i64 = 0  # of all deliveries, in flight and queued
        self.dropped_count: i64 = 0
        self._unreleased: set[int] | None = None  # incoming QoS 2 between PUBREC and PUBREL
        self._restored_ids: set[int] | None = None  # the subset from before a restart
        # QoS 2 messages on their way to other cells: dedup ids by packet id, lowest first
        self.outbox: dict[int, int] | None = None
        # The subset of `_unreleased` that is not committed yet.
        self._uncommitted: set[int] | None = None
        # Incoming QoS 1 and 2 publishes of this connection that wait for a commit.
        self._unacked_publishes: i64 = 0
        self._connection_epoch: i64 = 0  # counts connections; see `make_tag`
        self.queue_consumers: dict[str, QueueConsumer] = {}
        # Queue consumers that found the connection without capacity.
        self.blocked_consumers: BlockedConsumers | None = None
        # While queue consumers are paused or resumed.
        self.presence_task: PresenceTask | None = None
        # Its home is another cell: its requests here apply to this cell alone.
        self.is_proxy: bool = False
        # Its client uses MQTT 3.1.1, here or in its home cell.
        self.lacks_user_properties: bool = False
        self.wrong_tokens: int = 0  # settlements with a delivery token of another client
        self.proxies: SessionProxies | None = None  # its proxies in other cells of a cluster
        # Set while it is subscribed to its exclusive queue.
        self.exclusive_subscriber: ExclusiveSubscriber | None = None
        self.queue_requests: dict[bytes, SubscribeOptions] = {}  # queue subscriptions, by filter
        # The number under which it is stored; 0: it ends with its connection, or with the broker.
        self.persistent_id: int = 0
        # SUBACKs that wait for a commit
        self._pending_subacks: dict[int, tuple[int, list[int], str]] = {}

    def protocol_name(self) -> str:
        return "MQTT 5.0" if self.version == V5 else "MQTT 3.1.1"

    # ---- incoming publishes

    def make_tag(self, packet: Publish) -> i64:
        """Return the tag that the store hands back after the commit: packet id, QoS and connection.

        A QoS 1 publish is acknowledged on its own connection only. A client that reconnects resends
        it, and by then the packet id may belong to another message.
        """
        return packet.packet_id | (packet.qos << 16) | (self._connection_epoch << 20)

    def expect_commit(self, packet: Publish) -> None:
        """Count a publish whose acknowledgement waits for the commit; see `on_committed`."""
        self._unacked_publishes += 1
        if packet.qos == 2:
            if self._uncommitted is None:
                self._uncommitted = set()
            self._uncommitted.add(int(packet.packet_id))
        if self._unacked_publishes > self.router.limits.receive_maximum and self.version == V5:
            raise ProtocolViolation(
                "more messages are unacknowledged than the server's receive maximum",
                "Wait for PUBACK or PUBREC before sending more",
                reason=RECEIVE_MAXIMUM_EXCEEDED,
            )

    def on_committed(self, tag: i64) -> None:
        """Acknowledge a packet of this client after the store has committed it."""
        packet_id: i64 = tag & 0xFFFF
        kind: i64 = (tag >> 16) & 15
        is_current_connection = (tag >> 20) == self._connection_epoch
        if kind >= TAG_SUBACK:
            self._on_note_committed(kind, packet_id, is_current_connection)
            return
        if is_current_connection:
            self._unacked_publishes -= 1
        is_qos2 = kind == 2
        if is_qos2 and self._uncommitted is not None:
            self._uncommitted.discard(int(packet_id))
        connection = self.connection
        if connection is not None and (is_current_connection or is_qos2):
            connection.send_ack(PUBREC if is_qos2 else PUBACK, packet_id, 0, "")

    def _on_note_committed(self, kind: i64, packet_id: i64, is_current_connection: bool) -> None:
        """Send the packet that waited for the commit of a note: PUBREL, SUBACK or PUBCOMP."""
        connection = self.connection
        if kind == TAG_PUBREL:
            delivery = self.inflight.get(packet_id)
            if delivery is not None and delivery.is_committing and delivery.is_released:
                delivery.is_committing = False
                if self._to_resend is not None and int(packet_id) in self._to_resend:
                    self.resume_sending()
                elif connection is not None:
                    connection.send_ack(PUBREL, packet_id, 0, "")
        elif kind == TAG_SUBACK:
            if is_current_connection:
                self._send_committed_suback(int(packet_id))
        elif is_current_connection and connection is not None:  # else the client resends PUBREL
            connection.send_ack(
                PUBCOMP, packet_id, 0 if kind == TAG_PUBCOMP else PACKET_IDENTIFIER_NOT_FOUND, ""
            )

    def on_committed_many(self, tags: vec[i64], start: i64, end: i64) -> None:
        """Acknowledge many packets.

        Nearly all are QoS 1 on the current connection: four bytes each.
        """
        connection = self.connection
        while start < end:
            tag = tags[start]
            start += 1
            if connection is not None and tag >> 16 == (self._connection_epoch << 4 | 1):
                self._unacked_publishes -= 1
                connection.send_puback(tag & 0xFFFF)
            else:
                self.on_committed(tag)

    def begin_receipt(self, packet: Publish, connection: Connection) -> bool:
        """Register an incoming QoS 2 message, or acknowledge a duplicate again and return False."""
        unreleased = self._unreleased
        if unreleased is None:
            unreleased = self._unreleased = set()
        packet_id = int(packet.packet_id)
        if self._restored_ids and packet_id in self._restored_ids:
            self._restored_ids.discard(packet_id)
            if not packet.dup:
                # The release was lost in the crash: this is another message.
                unreleased.discard(packet_id)
        if packet_id in unreleased:
            if self._uncommitted is None or packet_id not in self._uncommitted:
                connection.send_ack(PUBREC, packet.packet_id, 0, "")
            return False
        if self.version == V5 and len(unreleased) >= self.router.limits.receive_maximum:
            raise ProtocolViolation(
                "more QoS 2 messages are unreleased than the server's receive maximum",
                "Wait for PUBCOMP before sending more",
                reason=RECEIVE_MAXIMUM_EXCEEDED,
            )
        unreleased.add(packet_id)
        if self.persistent_id:
            self.router.session_store.record_received(self, packet_id, False)
        return True

    def refuse(
        self, packet: Publish, connection: Connection, reason: i64, reason_string: str
    ) -> None:
        """Refuse a publish. MQTT 3.1.1 has no error acknowledgement, so the connection ends."""
        if packet.qos == 2 and reason >= 0x80 and self._unreleased is not None:
            self._unreleased.discard(int(packet.packet_id))
            self.remove_from_outbox(int(packet.packet_id))
            if self.persistent_id:
                self.router.session_store.record_received(self, int(packet.packet_id), True)
        if self.version != V5:
            connection.end(int(reason), reason_string)
        elif packet.qos > 0:
            connection.send_ack(
                PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, reason, reason_string
            )

    # ---- outgoing deliveries

    def has_capacity(self) -> bool:
        """Return whether a delivery would be sent at once."""
        connection = self.connection
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
        share: SharedSubscription | None,
    ) -> Delivery | None:
        """Send `message`, or queue it until it can be sent, or count it as dropped.

        Return the delivery if it is still open.
        """
        connection = self.connection
        if qos == 0:
            if connection is not None and (
                connection.is_write_paused
                or not connection.send_publish(message, 0, retain, False, 0, extra_properties)
            ):
                self._count_drop()
            return None
        if self.buffered_bytes >= self.router.limits.max_queued_bytes:
            self._count_drop()
            return None
        delivery = self.router.delivery_pool.acquire(message, qos, retain, extra_properties, share)
        if self.persistent_id:
            delivery.persistent_id = self.persistent_id
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
        share: SharedSubscription | None,
    ) -> Delivery | None:
        """Deliver a message that no client may see before the open frame is committed."""
        if qos == 2 and self.persistent_id:
            # Stores its packet id first.
            return self.deliver(message, 2, retain, extra_properties, share)
        if qos > 0 and self.buffered_bytes >= self.router.limits.max_queued_bytes:
            self._count_drop()
            return None
        delivery = self.router.delivery_pool.acquire(message, qos, retain, extra_properties, share)
        if qos > 0:
            self.buffered_bytes += delivery.size
            if self.persistent_id:
                delivery.persistent_id = self.persistent_id
        self.router.forwarder.defer_delivery(self, delivery)
        return delivery

    def send_committed(self, delivery: Delivery) -> None:
        """Send a delivery whose frame is committed, or queue it until the window is free."""
        connection = self.connection
        if delivery.is_committing:
            self._send_committed_qos2(delivery, connection)
        elif self.has_ended:
            if delivery.pending_message is not None:
                self.router.session_store.delete_pending(delivery)
            self.router.reassign_shared(delivery, self)
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

    def _send_committed_qos2(self, delivery: Delivery, connection: Connection | None) -> None:
        """Send a QoS 2 delivery whose packet id is stored.

        Without a connection, `attach` resends it.
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
            self.router.session_store.record_completed(delivery)
        self._abandon(delivery)

    def deliver_now(self, delivery: Delivery) -> None:
        """Send a delivery of a namespace that has checked the capacity."""
        connection = self.connection
        if connection is not None:
            self.buffered_bytes += delivery.size
            self._send_new(delivery, connection)

    def deliver_unacknowledged(self, message: Publish, extra_properties: bytes) -> bool:
        """Send a QoS 0 message now; return False if it exceeds the client's packet size."""
        connection = self.connection
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
        connection = self.connection
        if connection is None or connection.is_write_paused or self._to_resend is not None:
            return 0
        return self.window - self.inflight.count

    def deliver_remote(self, delivery: RemoteDelivery) -> None:
        """Send a message that came from another cell, or queue it until it can be sent.

        It is never dropped for lack of capacity: the remote cell sends no more than the client
        accepts.
        """
        connection = self.connection
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

    def resend_remote(self, delivery: RemoteDelivery) -> None:
        """Resend a delivery that its cell repeated after the client reconnected."""
        connection = self.connection
        if delivery.needs_resend and connection is not None:
            delivery.needs_resend = False
            connection.send_publish(
                delivery.message, 1, False, True, delivery.packet_id, delivery.extra_properties
            )

    def drop_remote(self, delivery: RemoteDelivery) -> None:
        """Drop a delivery that now belongs to another consumer."""
        if self.inflight.get(delivery.packet_id) is delivery:
            self._complete(delivery.packet_id, delivery)

    def defer_receipt(self, packet: Publish) -> None:
        """Undo the receipt of a QoS 2 packet that other cells are to store.

        The receipt is recorded after they have stored it. After a crash in between, the broker must
        not claim to the client that it has the message.
        """
        if packet.qos == 2 and self.persistent_id:
            self.router.session_store.record_received(self, int(packet.packet_id), True)

    def find_dedup_id(self, packet: Publish) -> int:
        """Return the dedup id under which a resent QoS 2 message was already forwarded, or 0."""
        return (
            self.outbox.get(int(packet.packet_id), 0)
            if self.outbox is not None and packet.dup
            else 0
        )

    def add_to_outbox(self, packet: Publish, dedup_id: int) -> int:
        """Add `packet` to the outbox under `dedup_id`; return the lowest open dedup id."""
        if self.outbox is None:
            self.outbox = {}
        packet_id = int(packet.packet_id)
        if self.outbox.get(packet_id, 0) != dedup_id:
            self.outbox.pop(packet_id, None)
            self.outbox[packet_id] = dedup_id
        return next(iter(self.outbox.values()))

    def remove_from_outbox(self, packet_id: int) -> bool:
        """Remove an acknowledged or abandoned message; return whether it was in the outbox."""
        return self.outbox is not None and self.outbox.pop(packet_id, 0) != 0

    def ack_deferred(
        self,
        packet: Publish,
        is_settlement: bool,
        connection_epoch: i64,
        reason: i64,
        reason_string: str,
    ) -> None:
        """Acknowledge a publish whose result came later: from another cell or a batched write."""
        if reason == 0 or (self.version != V5 and (is_settlement or reason < 0x80)):
            if packet.qos == 2 and self.persistent_id and self._unreleased is not None:
                self.router.session_store.record_received(self, int(packet.packet_id), False)
                self.remove_from_outbox(int(packet.packet_id))
            self.on_committed(packet.packet_id | (packet.qos << 16) | (connection_epoch << 20))
            return
        is_current_connection = connection_epoch == self._connection_epoch
        if is_current_connection:
            self._unacked_publishes -= 1
        if packet.qos == 2 and self._uncommitted is not None:
            self._uncommitted.discard(int(packet.packet_id))
        connection = self.connection
        if connection is not None and (is_current_connection or packet.qos == 2):
            self.refuse(packet, connection, reason, reason_string)

    def get_connection_epoch(self) -> int:
        """Return the number of the current connection.

        Acknowledgements for another one are useless.
        """
        return int(self._connection_epoch)

    def _queue_delivery(self, delivery: Delivery) -> bool:
        queued = self.queued
        if queued is None:
            queued = self.queued = deque()
        if len(queued) < self.router.limits.max_queued_messages:
            queued.append(delivery)
            return True
        self._abandon(delivery)
        return False

    def _send_new(self, delivery: Delivery, connection: Connection) -> bool:
        packet_id = self.inflight.next_id()
        if delivery.qos == 2 and delivery.persistent_id:
            # After a crash the message must be resent under this id, and no other message may use
            # the id. So the id is stored first. While a message is being published,
            # `SessionStore.store_pending` does so.
            self.inflight.add(packet_id, delivery)
            delivery.is_committing = True
            if delivery.pending_message is not None:
                self.router.session_store.record_sent(delivery)
            self.router.forwarder.defer_delivery(self, delivery)
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
            self.router.session_store.delete_pending(delivery)

    def _count_drop(self) -> None:
        self.dropped_count += 1
        self.router.counters.publishes_dropped += 1

    def resume_sending(self) -> None:
        """Resend, then send queued messages, as far as the window and the connection allow."""
        connection = self.connection
        if connection is None:
            return
        if self._to_resend is not None:
            self._resend(self._to_resend, connection)
        if self._to_resend is not None:
            return
        if self.queued:
            self._send_queued(self.queued, connection)
        if self.retained_sender is not None:
            self.retained_sender.resume()

    def _send_queued(self, queued: deque[Delivery], connection: Connection) -> None:
        now = self.router.turn.now
        while queued and self.inflight.count < self.window and not connection.is_write_paused:
            delivery = queued.popleft()
            expires_at = delivery.message.expires_at
            if expires_at != 0.0 and expires_at <= now:
                self._abandon(delivery)
            else:
                self._send_new(delivery, connection)

    def _resend(self, to_resend: deque[int], connection: Connection) -> None:
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
            self.router.delivery_pool.release(delivery)

    def on_qos2_ack(self, packet: Ack, connection: Connection) -> None:
        """Process PUBREC, PUBREL and PUBCOMP."""
        packet_id = int(packet.packet_id)
        if packet.kind == PUBREL:
            is_known = self._unreleased is not None and packet_id in self._unreleased
            # The recipients have the message, but a node died before that was recorded.
            is_known = self.remove_from_outbox(packet_id) or is_known
            if is_known:
                if self._unreleased is not None:
                    self._unreleased.discard(packet_id)
                if self.persistent_id:
                    self.router.session_store.record_received(self, packet_id, True)
            if self.persistent_id:
                # After PUBCOMP the client may reuse the id for another message. This also holds for
                # an unknown id: the record of its release may be on its way to the store.
                self._notify_after_commit(
                    TAG_PUBCOMP if is_known else TAG_PUBCOMP_UNKNOWN, packet.packet_id
                )
            else:
                reason: i64 = 0 if is_known else PACKET_IDENTIFIER_NOT_FOUND
                connection.send_ack(PUBCOMP, packet.packet_id, reason, "")
            return
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
            self.router.session_store.record_pubrec(delivery)
            self._notify_after_commit(TAG_PUBREL, packet.packet_id)
        elif packet.kind == PUBREC or delivery.is_released:
            if delivery.persistent_id:
                self.router.session_store.record_completed(delivery)
            self._complete(packet.packet_id, delivery)
        else:
            raise ProtocolViolation("a PUBCOMP arrived before the PUBREC of its delivery")

    def _notify_after_commit(self, kind: i64, packet_id: i64) -> None:
        self.router.session_store.notify_after_commit(
            self, packet_id | (kind << 16) | (self._connection_epoch << 20)
        )

    def _complete(self, packet_id: i64, delivery: Delivery) -> None:
        if self.exclusive_subscriber is not None and self.inflight.count >= self.window:
            self.exclusive_subscriber.schedule_dispatch()
        self.inflight.remove(packet_id)
        self._release(delivery)
        if self.blocked_consumers is not None:
            self.blocked_consumers.dispatch_next()
        if self._to_resend is not None and int(packet_id) in self._to_resend:
            # Acknowledged from the previous connection's send.
            self._to_resend.remove(int(packet_id))
        if self.queued or self._to_resend is not None:
            self.resume_sending()

    # ---- subscriptions

    def send_suback(
        self,
        connection: Connection,
        head: int,
        packet_id: int,
        reasons: list[int],
        reason_string: str,
    ) -> None:
        """Send a SUBACK or UNSUBACK; for a persistent session, after the change is committed."""
        if self.persistent_id:
            self._pending_subacks[packet_id] = (head, reasons, reason_string)
            self.router.store_session(
                self, packet_id | (TAG_SUBACK << 16) | (self._connection_epoch << 20)
            )
            self.router.apply_backpressure(connection)
        else:
            connection.send_suback(head, packet_id, reasons, reason_string)

    def _send_committed_suback(self, packet_id: int) -> None:
        head, reasons, reason_string = self._pending_subacks.pop(packet_id, (0, [], ""))
        if head and self.connection is not None:
            self.connection.send_suback(head, packet_id, reasons, reason_string)

    # ---- connecting, restoring and ending

    def set_user(self, user: str | None) -> None:
        """Set the user of the session; None and the empty string mean no user."""
        self.user = user
        self.identity = make_identity(self.client_id, user or "")

    def attach(self, connection: Connection) -> None:
        """Attach a connection: resend unacknowledged deliveries, then send queued ones."""
        self.connection = connection
        self.disconnected_at = 0.0
        self._connection_epoch += 1
        self._unacked_publishes = 0
        self._pending_subacks.clear()
        to_resend: deque[int] = deque()
        for delivery in self.inflight.list_in_send_order():
            if delivery.is_obsolete():
                self.inflight.remove(delivery.packet_id)
                self._release(delivery)
            elif not delivery.defer_resend():
                to_resend.append(int(delivery.packet_id))
        self._to_resend = to_resend if to_resend else None
        self.resume_sending()
        self.router.namespaces.on_attached(self)
        if self.proxies is not None:
            self.proxies.on_attached()

    def on_writable(self) -> None:
        """Resume deliveries from queues after the connection became writable."""
        if self.exclusive_subscriber is not None:
            self.exclusive_subscriber.schedule_dispatch()
        if self.blocked_consumers is not None:
            self.blocked_consumers.dispatch_next()
        if self.proxies is not None:
            self.proxies.on_writable()

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
        for one in self.inflight.list_in_send_order() if self.connection is None else []:
            if (
                not one.is_from_queue
                and not one.is_released
                and not grant.may_receive(one.message.topic)
            ):
                self.inflight.remove(one.packet_id)
                self._abandon(one)

    def restore_received(self, packet_ids: set[int]) -> None:
        """Restore the ids of incoming QoS 2 messages that are not released."""
        self._unreleased = set(packet_ids)
        self._restored_ids = set(packet_ids)

    def end_and_collect(self) -> list[Delivery]:
        """End the session and return its deliveries; shared ones can go to another member."""
        self.has_ended = True
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
        self._unreleased = None
        self.outbox = None
        return reassignable
