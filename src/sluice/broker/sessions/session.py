"""One client's session: what it has subscribed to, what is on its way to it, and the rules of QoS 1 and 2 both ways.

A session outlives its connections. With a connection it answers at once, into that connection's output; without one it
keeps what must be kept (QoS 1 and 2) up to its limits. It decides, and moves no bytes itself.

Outgoing deliveries (QoS 1 and 2):

    waiting ──window free──▶ sent ──PUBACK──▶ done                            QoS 1
                             sent ──PUBREC──▶ released ──PUBCOMP──▶ done      QoS 2
    sent, released ──new connection──▶ sent again with DUP, PUBREL again      [MQTT-4.4.0-1]

In a persistent session each step of QoS 2 is stored before the packet leaves that tells the client
of it: the packet id before PUBLISH, that PUBREC has come before PUBREL; and of incoming messages, the
message with its packet id before PUBREC, and that PUBREL has come before PUBCOMP. So after a crash
both sides go on from the same step. A session that ends with its connection cannot go on after a
crash, and nothing of this is stored for it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from librt.vecs import vec
from mypy_extensions import i64

from sluice.broker.acl.grants import refuse_sys_publish
from sluice.broker.cluster_port import RemoteDelivery
from sluice.broker.limits import topic_depth_error
from sluice.broker.namespaces.compacted.exclusive_subscriber import (
    ExclusiveDelivery,
    ExclusiveSubscriber,
)
from sluice.broker.namespaces.queues.reason_mapping import get_reason_code
from sluice.broker.sessions.inflight import UNBUILT_PACKET, Delivery, Inflight
from sluice.broker.sessions.retained import RETAINED_FULL
from sluice.broker.sessions.subscriptions import SharedSubscription, Subscription
from sluice.errors import MalformedPacket, ProtocolViolation, QueueError, make_store_refusal
from sluice.queues.names import make_identity
from sluice.queues.ports import Publisher
from sluice.wire.packets import V5, Ack, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from sluice.wire.reasons import (
    NO_MATCHING_SUBSCRIBERS,
    PACKET_IDENTIFIER_NOT_FOUND,
    PACKET_TOO_LARGE,
    QOS_NOT_SUPPORTED,
    QUOTA_EXCEEDED,
    RECEIVE_MAXIMUM_EXCEEDED,
    RETAIN_NOT_SUPPORTED,
    TOPIC_NAME_INVALID,
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
    from sluice.queues.model.delivery_lease import Lease

# In a tag, in place of the QoS of a publish: the packet that leaves when the store has the note.
TAG_SUBACK: Final = 3  # SUBACK or UNSUBACK
TAG_PUBCOMP: Final = 4  # PUBCOMP
TAG_PUBCOMP_UNKNOWN: Final = 5  # PUBCOMP for a packet id that is not known
TAG_PUBREL: Final = 6  # PUBREL


class Session(Publisher):
    def __init__(self, client_id: str, router: Router) -> None:
        self.client_id: str = client_id
        self.router: Router = router
        self.connection: Connection | None = None
        self.grant: Grant | None = None  # None: everything is allowed
        self.user: str | None = None  # whose it is; None: not known since the restart
        self.identity: str = client_id  # of its deliveries; set with the user: see `belong_to`
        self.version: i64 = V5
        self.expiry_seconds: int = 0  # seconds that it outlives its connection
        self.will: Publish | None = None
        self.will_delay: int = 0
        self.disconnected_at: float = 0.0  # when the last connection ended; 0.0 while there is one
        self.has_ended: bool = False
        self.subscriptions: dict[bytes, Subscription] = {}
        self.subscription_bytes: int = 0  # what they are charged for: see `cost_of_filter`
        self.retained_sender: RetainedSender | None = (
            None  # while retained messages are looked up for it
        )
        self.window: i64 = 0  # how many deliveries the client takes unacknowledged
        self.inflight: Inflight = Inflight()
        self.queued: deque[Delivery] | None = (
            None  # made when first needed: most sessions never wait
        )
        self._to_resend: deque[int] | None = (
            None  # in flight, and to be said again on this connection
        )
        self.buffered_bytes: i64 = 0  # of all deliveries, in flight and waiting
        self.dropped_count: i64 = 0
        self._unreleased: set[int] | None = None  # incoming QoS 2 between PUBREC and PUBREL
        self._restored_ids: set[int] | None = None  # those of them that are from before a restart
        self.outbox: dict[int, int] | None = (
            None  # on their way to other cells: marks by packet id, lowest first
        )
        self._uncommitted: set[int] | None = (
            None  # those of them that the store has not answered for
        )
        self._unacked_publishes: i64 = (
            0  # incoming QoS 1 and 2 of this connection that wait for the store
        )
        self._connection_epoch: i64 = 0  # counts connections: see `tag`
        self.queue_consumers: dict[str, QueueConsumer] = {}
        self.blocked_consumers: BlockedConsumers | None = (
            None  # those of them that found the line full
        )
        self.presence_task: PresenceTask | None = None  # while they are being paused or resumed
        self.is_proxy: bool = (
            False  # its home is another cell: what it asks for here is meant for this cell alone
        )
        self.lacks_user_properties: bool = (
            False  # its client speaks MQTT 3.1.1, here or in its home cell
        )
        self.wrong_tokens: int = 0  # settlements with a delivery token that it was not given
        self.proxies: SessionProxies | None = None  # its lines to other cells of a cluster
        self.exclusive_subscriber: ExclusiveSubscriber | None = (
            None  # while it is subscribed to its exclusive queue
        )
        self.queue_requests: dict[
            bytes, tuple[int, list[str]]
        ] = {}  # what was asked for, by filter: QoS and options
        self.persistent_id: int = 0  # the number under which it is kept; 0: it ends with its connection, or with the server
        self._pending_subacks: dict[
            int, tuple[int, list[int], str]
        ] = {}  # answers to SUBSCRIBE that wait for the store

    # ---- incoming publishes

    def on_publish(self, packet: Publish, connection: Connection) -> None:
        router = self.router
        limits = router.limits
        if packet.topic_alias:
            connection.resolve_alias(packet)
        if packet.subscription_ids is not None:
            raise ProtocolViolation(
                "a client's PUBLISH has a subscription identifier"
            )  # [MQTT-3.3.4-6]
        qos = packet.qos
        if qos > limits.max_qos:
            raise ProtocolViolation("this QoS is not offered here", reason=QOS_NOT_SUPPORTED)
        if packet.retain:
            if not limits.retain_available:
                raise ProtocolViolation(
                    "retained messages are not offered here", reason=RETAIN_NOT_SUPPORTED
                )
            if packet.topic.count(b"/") >= limits.max_topic_levels:
                self.refuse(
                    packet,
                    connection,
                    TOPIC_NAME_INVALID,
                    topic_depth_error(limits.max_topic_levels),
                )
                return
        if packet.expiry_seconds >= 0:
            packet.expires_at = router.turn.now + float(packet.expiry_seconds)
        if qos == 2 and not self._begin_qos2_receipt(packet, connection):
            return
        grant = self.grant
        if grant is not None and not grant.may_publish(packet):
            grant.refuse(packet, self, connection)
            return
        if packet.topic[0] == 0x24:
            handler = router.queue_handler
            if handler is not None and handler.handles(packet.topic):
                handler.publish(packet, self, connection)
                return
            if packet.topic[:5] in (b"$SYS/", b"$SYS"):
                refuse_sys_publish(packet, self, connection)
                return
        self.publish_plain(packet, connection)

    def publish_plain(self, packet: Publish, connection: Connection) -> None:
        """An ordinary topic: it is with its receivers when this returns, so it is answered at once. Where something of
        it must be kept (for a queue, a lasting session, later subscribers), the answer waits for the store.
        QoS 2 of a persistent session waits as a whole: see `Router.publish_stored`."""
        router = self.router
        if router.unavailable_reason and not self._can_skip_store(packet, connection):
            return
        if router.cluster is not None:
            router.cluster.publish(packet, self, connection)
            return
        stored_before = router.stored_count
        try:
            if packet.qos == 2 and self.persistent_id:
                recipient_count = router.publish_after_commit(packet, self)
            else:
                recipient_count = router.publish(packet, self)
        except QueueError as error:
            self.refuse(packet, connection, get_reason_code(error), str(error))
            return
        if recipient_count < 0:
            self.refuse(packet, connection, QUOTA_EXCEEDED, RETAINED_FULL)
        elif packet.qos > 0 and (
            router.stored_count != stored_before or (packet.qos == 2 and self.persistent_id)
        ):
            router.ack_after_commit(self, packet)
            router.apply_backpressure(connection)
        elif packet.qos == 1 and recipient_count:
            connection.send_puback(packet.packet_id)
        elif packet.qos > 0:
            reason: i64 = NO_MATCHING_SUBSCRIBERS if recipient_count == 0 else 0
            connection.send_ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, reason, "")
        elif router.stored_count != stored_before:
            router.apply_backpressure(connection)

    def _can_skip_store(self, packet: Publish, connection: Connection) -> bool:
        """The store takes nothing: what would have to be kept is refused, and anything else passes. QoS 0 has no
        answer: it goes to those who are there, and is not retained."""
        router = self.router
        if not router.needs_store(packet, self):
            return True
        if packet.qos == 0:
            packet.retain = False
            router.counters.publishes_dropped += 1
            return True
        if router.is_out_of_memory:
            router.refused_out_of_memory += 1
        error = make_store_refusal(
            router.unavailable_reason, router.is_out_of_space, router.is_out_of_memory
        )
        self.refuse(packet, connection, get_reason_code(error), str(error))
        return False

    def make_tag(self, packet: Publish) -> i64:
        """What the store gives back when it has `packet`: its id, QoS and connection. A QoS 1 publish is answered on
        its own connection only. A client that came back sends it again, and the id may be another message's by then."""
        return packet.packet_id | (packet.qos << 16) | (self._connection_epoch << 20)

    def expect_commit(self, packet: Publish) -> None:
        """The answer to `packet` leaves when the store has it: see `stored`."""
        self._unacked_publishes += 1
        if packet.qos == 2:
            if self._uncommitted is None:
                self._uncommitted = set()
            self._uncommitted.add(int(packet.packet_id))
        if self._unacked_publishes > self.router.limits.receive_maximum and self.version == V5:
            raise ProtocolViolation(
                "more messages are unanswered than the server's receive maximum",
                "Wait for PUBACK or PUBREC before sending more",
                reason=RECEIVE_MAXIMUM_EXCEEDED,
            )

    def on_committed(self, tag: i64) -> None:
        """The store has what this client published: only now does it hear so."""
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
        """The store has a note about a packet other than PUBLISH. `here`: of this connection."""
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
        elif (
            is_current_connection and connection is not None
        ):  # on a new connection a client sends PUBREL again
            connection.send_ack(
                PUBCOMP, packet_id, 0 if kind == TAG_PUBCOMP else PACKET_IDENTIFIER_NOT_FOUND, ""
            )

    def on_committed_many(self, tags: vec[i64], start: i64, end: i64) -> None:
        """The same for many at once. Nearly all are QoS 1 on the connection that is there: four bytes each."""
        connection = self.connection
        while start < end:
            tag = tags[start]
            start += 1
            if connection is not None and tag >> 16 == (self._connection_epoch << 4 | 1):
                self._unacked_publishes -= 1
                connection.send_puback(tag & 0xFFFF)
            else:
                self.on_committed(tag)

    def _begin_qos2_receipt(self, packet: Publish, connection: Connection) -> bool:
        """Exactly once: a QoS 2 message that is here already is acknowledged again and not passed on again."""
        unreleased = self._unreleased
        if unreleased is None:
            unreleased = self._unreleased = set()
        packet_id = int(packet.packet_id)
        if self._restored_ids and packet_id in self._restored_ids:
            self._restored_ids.discard(packet_id)
            if not packet.dup:
                unreleased.discard(
                    packet_id
                )  # its release was lost with the server: this is another message
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
            self.router.record_received(self, packet_id, False)
        return True

    def refuse(
        self, packet: Publish, connection: Connection, reason: i64, reason_string: str
    ) -> None:
        """Answer a publish that was not taken. 3.1.1 has no words for it: no acknowledgement, and the line is cut."""
        if packet.qos == 2 and reason >= 0x80 and self._unreleased is not None:
            self._unreleased.discard(int(packet.packet_id))
            self.remove_from_outbox(int(packet.packet_id))
            if self.persistent_id:
                self.router.record_received(self, int(packet.packet_id), True)
        if self.version != V5:
            connection.end(int(reason), reason_string)
        elif packet.qos > 0:
            connection.send_ack(
                PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, reason, reason_string
            )

    # ---- outgoing deliveries

    def has_capacity(self) -> bool:
        """Whether a delivery would leave at once."""
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
        """Send `message`, or keep it until it can be sent, or count it as dropped. What is not done with when this
        returns is the answer."""
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
        """The same for a message that nobody may see before the store has the open frame."""
        if qos == 2 and self.persistent_id:
            return self.deliver(
                message, 2, retain, extra_properties, share
            )  # stores its packet id first
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
        """The store has the frame of `delivery`: send it, or let it wait for the window."""
        connection = self.connection
        if delivery.is_committing:
            self._send_committed_qos2(delivery, connection)
        elif self.has_ended:
            if delivery.pending_message is not None:
                self.router.delete_pending(delivery)
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
        """Send a QoS 2 delivery whose packet id is stored. Without a connection, `attach` does."""
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
        """Drop a delivery that has a packet id: it is larger than the client allows."""
        self.inflight.remove(delivery.packet_id)
        if delivery.persistent_id:
            self.router.record_completed(delivery)
        self._abandon(delivery)

    def deliver_lease(self, message: Publish, consumer: QueueConsumer, lease: Lease) -> None:
        """Send a message from a queue. The consumer was asked whether there is room, so it leaves at once."""
        connection = self.connection
        if connection is None:
            return
        if message.qos == 0:
            if not connection.send_publish(message, 0, False, False, 0, consumer.extra_properties):
                self._count_drop()
                self.router.nack_too_large(lease)
            elif consumer.acks_by_puback:
                self.router.settle_by_puback(lease, 0)  # there will be none: sent is done
            return
        delivery = Delivery(message, message.qos, False, consumer.extra_properties, None)
        delivery.consumer = consumer
        delivery.lease = lease
        delivery.token = lease.token_counter
        self.buffered_bytes += delivery.size
        self._send_new(delivery, connection)

    def on_lease_written(
        self, written_bytes: i64, packet_id: i64, consumer: QueueConsumer, lease: Lease
    ) -> None:
        """A message from a queue has just been written to the line, `size` bytes in all."""
        delivery = Delivery(UNBUILT_PACKET, 1, False, consumer.extra_properties, None)
        delivery.consumer = consumer
        delivery.lease = lease
        delivery.token = lease.token_counter
        delivery.size = written_bytes
        self.buffered_bytes += written_bytes
        self.inflight.add(packet_id, delivery)

    def get_capacity(self) -> i64:
        """How many deliveries would leave at once."""
        connection = self.connection
        if connection is None or connection.is_write_paused or self._to_resend is not None:
            return 0
        return self.window - self.inflight.count

    def deliver_exclusive(self, delivery: ExclusiveDelivery) -> None:
        """Send a value of an exclusive queue to its owner, who has room."""
        connection = self.connection
        if connection is None:
            return
        self.buffered_bytes += delivery.size
        self._send_new(delivery, connection)

    def deliver_remote(self, delivery: RemoteDelivery) -> None:
        """Send a message that came over a leg, or keep it until it can be sent. It is never dropped for want of room:
        the far cell sends no more than the client takes at once."""
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
        """Its cell has said it again on a connection that the client did not have then."""
        connection = self.connection
        if delivery.needs_resend and connection is not None:
            delivery.needs_resend = False
            connection.send_publish(
                delivery.message, 1, False, True, delivery.packet_id, delivery.extra_properties
            )

    def drop_remote(self, delivery: RemoteDelivery) -> None:
        """It is another consumer's by now."""
        if self.inflight.get(delivery.packet_id) is delivery:
            self._complete(delivery.packet_id, delivery)

    def defer_receipt(self, packet: Publish) -> None:
        """Other cells are to keep `packet`: that it was received is written down when they have it, not now. A crash in
        between must not make us tell its client that it is here."""
        if packet.qos == 2 and self.persistent_id:
            self.router.record_received(self, int(packet.packet_id), True)

    def find_dedup_id(self, packet: Publish) -> int:
        """Under which mark a QoS 2 message was passed on before, if its client says it again; 0: it was not."""
        return (
            self.outbox.get(int(packet.packet_id), 0)
            if self.outbox is not None and packet.dup
            else 0
        )

    def add_to_outbox(self, packet: Publish, dedup_id: int) -> int:
        """It goes to other cells under this mark; the lowest that is open."""
        if self.outbox is None:
            self.outbox = {}
        packet_id = int(packet.packet_id)
        if self.outbox.get(packet_id, 0) != dedup_id:
            self.outbox.pop(packet_id, None)
            self.outbox[packet_id] = dedup_id
        return next(iter(self.outbox.values()))

    def remove_from_outbox(self, packet_id: int) -> bool:
        """It is answered for, or its client has given it up; whether it was on its way."""
        return self.outbox is not None and self.outbox.pop(packet_id, 0) != 0

    def ack_deferred(
        self,
        packet: Publish,
        is_settlement: bool,
        connection_epoch: i64,
        reason: i64,
        reason_string: str,
    ) -> None:
        """What this client published was not answered for when it came, but later: by another cell, or by a door that
        gathers."""
        if reason == 0 or (self.version != V5 and (is_settlement or reason < 0x80)):
            if packet.qos == 2 and self.persistent_id and self._unreleased is not None:
                self.router.record_received(self, int(packet.packet_id), False)
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
        """Which of its connections it has: an answer to another one is of no use."""
        return int(self._connection_epoch)

    def detach_lease(self, lease: Lease) -> None:
        """A delivery from a queue is not this session's any more: an answer to it counts for the line only."""
        for delivery in self.inflight.list_in_send_order():
            if delivery.lease is lease:
                delivery.lease = None
                return

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
            # After a crash it must be sent again under this id, and no other message may have the id:
            # so the id is stored first. While a message is being published, `Keeper.post` does so.
            self.inflight.add(packet_id, delivery)
            delivery.is_committing = True
            if delivery.pending_message is not None:
                self.router.record_sent(delivery)
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
        """It cannot be delivered: too late, too large, or one too many. What a queue gave goes back to it; a value that
        its owner can never take is done with."""
        self._release(delivery)
        self._count_drop()
        lease = delivery.lease
        if lease is not None:
            self.router.nack_too_large(lease)
        elif isinstance(delivery, ExclusiveDelivery):
            self.router.ack_exclusive(delivery)
        elif isinstance(delivery, RemoteDelivery):
            delivery.proxy.on_acknowledged(delivery, PACKET_TOO_LARGE)

    def _release(self, delivery: Delivery) -> None:
        """A delivery is done with, one way or the other."""
        self.buffered_bytes -= delivery.size
        if delivery.pending_message is not None:
            self.router.delete_pending(delivery)

    def _count_drop(self) -> None:
        self.dropped_count += 1
        self.router.counters.publishes_dropped += 1

    def resume_sending(self) -> None:
        """Send what waits, as far as the window and the line allow; first of all what is to be said again."""
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
        """What an earlier connection left unacknowledged, in the order it was first said [MQTT-4.4.0-1], and never more
        of it at once than this connection takes [MQTT-3.3.4-9]."""
        while (
            to_resend
            and self.inflight.count - len(to_resend) < self.window
            and not connection.is_write_paused
        ):
            packet_id: i64 = to_resend[0]
            delivery = self.inflight.get(packet_id)
            if delivery is not None and delivery.is_committing:
                return  # goes on when the store has it
            to_resend.popleft()
            if delivery is None:
                continue
            if delivery.is_released:
                connection.send_ack(PUBREL, packet_id, 0, "")
            elif delivery.is_obsolete():
                self.inflight.remove(packet_id)  # its time has passed while the line was full
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
        """PUBACK, with success or with an error: either way the client is done with it [MQTT-4.3.2-5]."""
        delivery = self.inflight.get(packet_id)
        if delivery is None or delivery.qos != 1:
            if packet_id == 0:
                raise MalformedPacket(
                    "an acknowledgement has packet identifier 0"
                )  # [MQTT-2.2.1-3]
            return  # answered before the reconnect and again after it: harmless
        self._complete(packet_id, delivery)
        consumer = delivery.consumer
        if consumer is not None:
            lease = delivery.lease
            if consumer.acks_by_puback and lease is not None and not delivery.is_obsolete():
                self.router.settle_by_puback(lease, reason)
            else:
                self.router.schedule_dispatch(consumer)
        elif isinstance(delivery, ExclusiveDelivery):
            self.router.ack_exclusive(delivery)
        elif isinstance(delivery, RemoteDelivery):
            delivery.proxy.on_acknowledged(delivery, reason)
        elif not delivery.persistent_id:
            self.router.delivery_pool.release(delivery)

    def on_qos2_ack(self, packet: Ack, connection: Connection) -> None:
        """PUBREC, PUBREL and PUBCOMP: the rest of QoS 2, both ways."""
        packet_id = int(packet.packet_id)
        if packet.kind == PUBREL:
            is_known = self._unreleased is not None and packet_id in self._unreleased
            is_known = (
                self.remove_from_outbox(packet_id) or is_known
            )  # what its receivers have, and a node died before it was noted
            if is_known:
                if self._unreleased is not None:
                    self._unreleased.discard(packet_id)
                if self.persistent_id:
                    self.router.record_received(self, packet_id, True)
            if self.persistent_id:
                # With PUBCOMP the client may give the id to another message. Also where the id is not
                # known: the note about its release may be on its way to the store.
                self._notify_after_commit(
                    TAG_PUBCOMP if is_known else TAG_PUBCOMP_UNKNOWN, packet.packet_id
                )
            else:
                reason: i64 = 0 if is_known else PACKET_IDENTIFIER_NOT_FOUND
                connection.send_ack(PUBCOMP, packet.packet_id, reason, "")
            return
        delivery = self.inflight.get(packet.packet_id)
        if delivery is None or delivery.qos != 2:
            if packet.kind == PUBREC and packet.reason < 0x80:
                connection.send_ack(PUBREL, packet.packet_id, PACKET_IDENTIFIER_NOT_FOUND, "")
            return
        if delivery.is_committing:
            return  # it was not sent yet, or PUBREL is on its way
        if packet.kind == PUBREC and packet.reason < 0x80:
            if delivery.is_released or not delivery.persistent_id:
                delivery.is_released = True
                connection.send_ack(PUBREL, packet.packet_id, 0, "")
                return
            # A client that has PUBREL is done with the id: PUBLISH must not be sent again after it.
            delivery.is_released = True
            delivery.is_committing = True
            self.router.record_pubrec(delivery)
            self._notify_after_commit(TAG_PUBREL, packet.packet_id)
        elif packet.kind == PUBREC or delivery.is_released:
            if delivery.persistent_id:
                self.router.record_completed(delivery)
            self._complete(packet.packet_id, delivery)

    def _notify_after_commit(self, kind: i64, packet_id: i64) -> None:
        self.router.notify_after_commit(
            self, packet_id | (kind << 16) | (self._connection_epoch << 20)
        )

    def _complete(self, packet_id: i64, delivery: Delivery) -> None:
        if self.exclusive_subscriber is not None and self.inflight.count >= self.window:
            self._dispatch_exclusive()
        self.inflight.remove(packet_id)
        self._release(delivery)
        if self.blocked_consumers is not None:
            self.dispatch_blocked()
        if self._to_resend is not None and int(packet_id) in self._to_resend:
            self._to_resend.remove(
                int(packet_id)
            )  # acknowledged from what the last connection had said
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
        """Subscriptions have changed (`subscribing`): a lasting session answers when that is kept."""
        if self.persistent_id and self.router.session_store is not None:
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

    # ---- coming and going

    def set_user(self, user: str | None) -> None:
        """Set the user of the session. None and the empty string: it has none."""
        self.user = user
        self.identity = make_identity(self.client_id, user or "")

    def attach(self, connection: Connection) -> None:
        """A connection for this session: it is told again what was not acknowledged, and then what waits."""
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
            elif isinstance(delivery, RemoteDelivery):
                delivery.needs_resend = True  # its cell says it again if it is still this client's
            else:
                to_resend.append(int(delivery.packet_id))
        self._to_resend = to_resend if to_resend else None
        self.resume_sending()
        if self.queue_consumers and self.router.queue_handler is not None:
            self.router.queue_handler.on_attached(self)
        if self.exclusive_subscriber is not None and self.router.queue_handler is not None:
            self.router.queue_handler.exclusive_handler.on_attached(self)
        if self.proxies is not None:
            self.proxies.on_attached()

    def dispatch_blocked(self) -> None:
        """If the first that was turned away leaves some of the room, the engine asks for the next."""
        if self.blocked_consumers is not None:
            consumer = self.blocked_consumers.pop_next()
            if consumer is not None:
                self.router.schedule_dispatch(consumer)

    def _dispatch_exclusive(self) -> None:
        if self.exclusive_subscriber is not None and self.router.queue_handler is not None:
            self.router.queue_handler.exclusive_handler.schedule_dispatch(self.exclusive_subscriber)

    def on_writable(self) -> None:
        """The line takes more again: whoever reads queues over it may have some."""
        self._dispatch_exclusive()
        self.dispatch_blocked()
        if self.proxies is not None:
            self.proxies.on_writable()

    def restore_queued(self, delivery: Delivery) -> None:
        """After a restart: a message that waits for this session."""
        if self.queued is None:
            self.queued = deque()
        self.queued.append(delivery)
        self.buffered_bytes += delivery.size

    def restore_sent(self, delivery: Delivery, packet_id: int) -> None:
        """After a restart: a QoS 2 message that was sent, and is to be said again under its id."""
        self.inflight.add(packet_id, delivery)
        self.buffered_bytes += delivery.size

    def drop_unauthorized(self, grant: Grant) -> None:
        """Drop what waits for a client that may not have it any more; what is on its way already stays so."""
        if self.queued:
            queued, self.queued = self.queued, deque()
            for one in queued:
                if isinstance(one, RemoteDelivery) or grant.may_receive(one.message.topic):
                    self.queued.append(one)
                else:
                    self._abandon(one)
        for one in self.inflight.list_in_send_order() if self.connection is None else []:
            is_plain = one.consumer is None and not isinstance(one, RemoteDelivery)
            if is_plain and not one.is_released and not grant.may_receive(one.message.topic):
                self.inflight.remove(one.packet_id)
                self._abandon(one)

    def restore_received(self, packet_ids: set[int]) -> None:
        """After a restart: QoS 2 messages that have come in and are not released."""
        self._unreleased = set(packet_ids)
        self._restored_ids = set(packet_ids)

    def end_and_collect(self) -> list[Delivery]:
        """All deliveries of a session that ends, so that shared ones can go to another member."""
        self.has_ended = True
        # QoS 2 that was sent never changes hands [MQTT-4.8.2-5].
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
