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

from sluice.broker.cluster_port import FarDelivery
from sluice.broker.namespaces.compacted.exclusive_subscriber import OwnedDelivery, OwnedReader
from sluice.broker.sessions.inflight import UNSAID, Delivery, Inflight
from sluice.broker.limits import too_deep
from sluice.broker.acl.grants import refuse_sys
from sluice.broker.namespaces.queues.reason_mapping import reason_of
from sluice.broker.sessions.retained import FULL
from sluice.broker.sessions.subscriptions import Share, Subscription
from sluice.errors import MalformedPacket, ProtocolViolation, QueueError, refusal_to_store
from sluice.queues.names import identity_of
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
    from sluice.broker.cluster_port import Legs
    from sluice.broker.net.connection import Connection
    from sluice.broker.acl.grants import Grant
    from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer
    from sluice.broker.namespaces.queues.queue_subscriptions import Presence
    from sluice.broker.sessions.retained_sender import RetainedSender
    from sluice.broker.router import Router
    from sluice.broker.namespaces.queues.blocked_consumers import Starving
    from sluice.queues.model.delivery_lease import Lease

# In a tag, in place of the QoS of a publish: the packet that leaves when the store has the note.
FILTERS: Final = 3  # SUBACK or UNSUBACK
COMPLETE: Final = 4  # PUBCOMP
COMPLETE_UNKNOWN: Final = 5  # PUBCOMP for a packet id that is not known
RELEASE: Final = 6  # PUBREL


class Session(Publisher):
    def __init__(self, client_id: str, router: Router) -> None:
        self.client_id: str = client_id
        self.router: Router = router
        self.connection: Connection | None = None
        self.grant: Grant | None = None  # None: everything is allowed
        self.user: str | None = None  # whose it is; None: not known since the restart
        self.identity: str = client_id  # of its deliveries; set with the user: see `belong_to`
        self.version: i64 = V5
        self.expiry: int = 0  # seconds that it outlives its connection
        self.will: Publish | None = None
        self.will_delay: int = 0
        self.gone_at: float = 0.0  # when the last connection ended; 0.0 while there is one
        self.ended: bool = False
        self.subscriptions: dict[bytes, Subscription] = {}
        self.subscription_bytes: int = 0  # what they are charged for: see `cost_of_filter`
        self.retained_sender: RetainedSender | None = None  # while retained messages are looked up for it
        self.window: i64 = 0  # how many deliveries the client takes unacknowledged
        self.inflight: Inflight = Inflight()
        self.waiting: deque[Delivery] | None = None  # made when first needed: most sessions never wait
        self._unsaid: deque[int] | None = None  # in flight, and to be said again on this connection
        self.held_bytes: i64 = 0  # of all deliveries, in flight and waiting
        self.dropped: i64 = 0
        self._unreleased: set[int] | None = None  # incoming QoS 2 between PUBREC and PUBREL
        self._restored: set[int] | None = None  # those of them that are from before a restart
        self.passed: dict[int, int] | None = (
            None  # on their way to other cells: marks by packet id, lowest first
        )
        self._unstored: set[int] | None = None  # those of them that the store has not answered for
        self._unanswered: i64 = 0  # incoming QoS 1 and 2 of this connection that wait for the store
        self._epoch: i64 = 0  # counts connections: see `tag`
        self.by_queue: dict[str, QueueConsumer] = {}
        self.starving: Starving | None = None  # those of them that found the line full
        self.presence: Presence | None = None  # while they are being paused or resumed
        self.foreign: bool = (
            False  # its home is another cell: what it asks for here is meant for this cell alone
        )
        self.lacks_properties: bool = False  # its client speaks MQTT 3.1.1, here or in its home cell
        self.wrong_tokens: int = 0  # settlements with a delivery token that it was not given
        self.legs: Legs | None = None  # its lines to other cells of a cluster
        self.reader: OwnedReader | None = None  # while it is subscribed to its exclusive queue
        self.queue_requests: dict[
            bytes, tuple[int, list[str]]
        ] = {}  # what was asked for, by filter: QoS and options
        self.sid: int = (
            0  # the number under which it is kept; 0: it ends with its connection, or with the server
        )
        self._unkept: dict[
            int, tuple[int, list[int], str]
        ] = {}  # answers to SUBSCRIBE that wait for the store

    # ---- incoming publishes

    def on_publish(self, packet: Publish, connection: Connection) -> None:
        router = self.router
        limits = router.limits
        if packet.alias:
            connection.resolve_alias(packet)
        if packet.subscription_ids is not None:
            raise ProtocolViolation("a client's PUBLISH has a subscription identifier")  # [MQTT-3.3.4-6]
        qos = packet.qos
        if qos > limits.max_qos:
            raise ProtocolViolation("this QoS is not offered here", reason=QOS_NOT_SUPPORTED)
        if packet.retain:
            if not limits.retain_available:
                raise ProtocolViolation("retained messages are not offered here", reason=RETAIN_NOT_SUPPORTED)
            if packet.topic.count(b"/") >= limits.max_topic_levels:
                self.refuse(packet, connection, TOPIC_NAME_INVALID, too_deep(limits.max_topic_levels))
                return
        if packet.expiry >= 0:
            packet.expires_at = router.turn.now + float(packet.expiry)
        if qos == 2 and not self._begin_receipt(packet, connection):
            return
        grant = self.grant
        if grant is not None and not grant.may_publish(packet):
            grant.refuse(packet, self, connection)
            return
        if packet.topic[0] == 0x24:
            door = router.door
            if door is not None and door.takes(packet.topic):
                door.publish(packet, self, connection)
                return
            if packet.topic[:5] in (b"$SYS/", b"$SYS"):
                refuse_sys(packet, self, connection)
                return
        self.publish_plain(packet, connection)

    def publish_plain(self, packet: Publish, connection: Connection) -> None:
        """An ordinary topic: it is with its receivers when this returns, so it is answered at once. Where something of
        it must be kept (for a queue, a lasting session, later subscribers), the answer waits for the store.
        QoS 2 of a persistent session waits as a whole: see `Router.publish_stored`."""
        router = self.router
        if router.unavailable and not self._goes_without_store(packet, connection):
            return
        if router.abroad is not None:
            router.abroad.publish(packet, self, connection)
            return
        kept = router.kept
        try:
            if packet.qos == 2 and self.sid:
                taken = router.publish_stored(packet, self)
            else:
                taken = router.publish(packet, self)
        except QueueError as error:
            self.refuse(packet, connection, reason_of(error), str(error))
            return
        if taken < 0:
            self.refuse(packet, connection, QUOTA_EXCEEDED, FULL)
        elif packet.qos > 0 and (router.kept != kept or (packet.qos == 2 and self.sid)):
            router.answer_when_kept(self, packet)
            router.hold_back(connection)
        elif packet.qos == 1 and taken:
            connection.say_received(packet.packet_id)
        elif packet.qos > 0:
            reason: i64 = NO_MATCHING_SUBSCRIBERS if taken == 0 else 0
            connection.acknowledge(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, reason, "")
        elif router.kept != kept:
            router.hold_back(connection)

    def _goes_without_store(self, packet: Publish, connection: Connection) -> bool:
        """The store takes nothing: what would have to be kept is refused, and anything else passes. QoS 0 has no
        answer: it goes to those who are there, and is not retained."""
        router = self.router
        if not router.must_keep(packet, self):
            return True
        if packet.qos == 0:
            packet.retain = False
            router.counters.publishes_dropped += 1
            return True
        if router.no_memory:
            router.refused_for_memory += 1
        error = refusal_to_store(router.unavailable, router.no_room, router.no_memory)
        self.refuse(packet, connection, reason_of(error), str(error))
        return False

    def tag(self, packet: Publish) -> i64:
        """What the store gives back when it has `packet`: its id, QoS and connection. A QoS 1 publish is answered on
        its own connection only. A client that came back sends it again, and the id may be another message's by then."""
        return packet.packet_id | (packet.qos << 16) | (self._epoch << 20)

    def answer_later(self, packet: Publish) -> None:
        """The answer to `packet` leaves when the store has it: see `stored`."""
        self._unanswered += 1
        if packet.qos == 2:
            if self._unstored is None:
                self._unstored = set()
            self._unstored.add(int(packet.packet_id))
        if self._unanswered > self.router.limits.receive_maximum and self.version == V5:
            raise ProtocolViolation(
                "more messages are unanswered than the server's receive maximum",
                "Wait for PUBACK or PUBREC before sending more",
                reason=RECEIVE_MAXIMUM_EXCEEDED,
            )

    def stored(self, tag: i64) -> None:
        """The store has what this client published: only now does it hear so."""
        packet_id: i64 = tag & 0xFFFF
        kind: i64 = (tag >> 16) & 15
        here = (tag >> 20) == self._epoch
        if kind >= FILTERS:
            self._noted(kind, packet_id, here)
            return
        if here:
            self._unanswered -= 1
        twice = kind == 2
        if twice and self._unstored is not None:
            self._unstored.discard(int(packet_id))
        connection = self.connection
        if connection is not None and (here or twice):
            connection.acknowledge(PUBREC if twice else PUBACK, packet_id, 0, "")

    def _noted(self, kind: i64, packet_id: i64, here: bool) -> None:
        """The store has a note about a packet other than PUBLISH. `here`: of this connection."""
        connection = self.connection
        if kind == RELEASE:
            delivery = self.inflight.get(packet_id)
            if delivery is not None and delivery.storing and delivery.released:
                delivery.storing = False
                if self._unsaid is not None and int(packet_id) in self._unsaid:
                    self.pump()
                elif connection is not None:
                    connection.acknowledge(PUBREL, packet_id, 0, "")
        elif kind == FILTERS:
            if here:
                self._answer_filters(int(packet_id))
        elif here and connection is not None:  # on a new connection a client sends PUBREL again
            connection.acknowledge(
                PUBCOMP, packet_id, 0 if kind == COMPLETE else PACKET_IDENTIFIER_NOT_FOUND, ""
            )

    def all_stored(self, tags: vec[i64], start: i64, end: i64) -> None:
        """The same for many at once. Nearly all are QoS 1 on the connection that is there: four bytes each."""
        connection = self.connection
        while start < end:
            tag = tags[start]
            start += 1
            if connection is not None and tag >> 16 == (self._epoch << 4 | 1):
                self._unanswered -= 1
                connection.say_received(tag & 0xFFFF)
            else:
                self.stored(tag)

    def _begin_receipt(self, packet: Publish, connection: Connection) -> bool:
        """Exactly once: a QoS 2 message that is here already is acknowledged again and not passed on again."""
        unreleased = self._unreleased
        if unreleased is None:
            unreleased = self._unreleased = set()
        packet_id = int(packet.packet_id)
        if self._restored and packet_id in self._restored:
            self._restored.discard(packet_id)
            if not packet.dup:
                unreleased.discard(packet_id)  # its release was lost with the server: this is another message
        if packet_id in unreleased:
            if self._unstored is None or packet_id not in self._unstored:
                connection.acknowledge(PUBREC, packet.packet_id, 0, "")
            return False
        if self.version == V5 and len(unreleased) >= self.router.limits.receive_maximum:
            raise ProtocolViolation(
                "more QoS 2 messages are unreleased than the server's receive maximum",
                "Wait for PUBCOMP before sending more",
                reason=RECEIVE_MAXIMUM_EXCEEDED,
            )
        unreleased.add(packet_id)
        if self.sid:
            self.router.note_received(self, packet_id, False)
        return True

    def refuse(self, packet: Publish, connection: Connection, reason: i64, why: str) -> None:
        """Answer a publish that was not taken. 3.1.1 has no words for it: no acknowledgement, and the line is cut."""
        if packet.qos == 2 and reason >= 0x80 and self._unreleased is not None:
            self._unreleased.discard(int(packet.packet_id))
            self.end_pass(int(packet.packet_id))
            if self.sid:
                self.router.note_received(self, int(packet.packet_id), True)
        if self.version != V5:
            connection.end(int(reason), why)
        elif packet.qos > 0:
            connection.acknowledge(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, reason, why)

    # ---- outgoing deliveries

    def takes_now(self) -> bool:
        """Whether a delivery would leave at once."""
        connection = self.connection
        return connection is not None and not connection.choked and self.inflight.count < self.window

    def deliver(
        self, message: Publish, qos: i64, retain: bool, extra: bytes, share: Share | None
    ) -> Delivery | None:
        """Send `message`, or keep it until it can be sent, or count it as dropped. What is not done with when this
        returns is the answer."""
        connection = self.connection
        if qos == 0:
            if connection is not None and (
                connection.choked or not connection.send(message, 0, retain, False, 0, extra)
            ):
                self._drop()
            return None
        if self.held_bytes >= self.router.limits.max_queued_bytes:
            self._drop()
            return None
        delivery = self.router.deliveries.lend(message, qos, retain, extra, share)
        if self.sid:
            delivery.sid = self.sid
        self.held_bytes += delivery.size
        if connection is None or connection.choked or self.inflight.count >= self.window or self.waiting:
            taken = self._wait(delivery)
        else:
            taken = self._start(delivery, connection)
        return delivery if taken else None

    def hold(
        self, message: Publish, qos: i64, retain: bool, extra: bytes, share: Share | None
    ) -> Delivery | None:
        """The same for a message that nobody may see before the store has the open frame."""
        if qos == 2 and self.sid:
            return self.deliver(message, 2, retain, extra, share)  # stores its packet id first
        if qos > 0 and self.held_bytes >= self.router.limits.max_queued_bytes:
            self._drop()
            return None
        delivery = self.router.deliveries.lend(message, qos, retain, extra, share)
        if qos > 0:
            self.held_bytes += delivery.size
            if self.sid:
                delivery.sid = self.sid
        self.router.forwarder.hold_delivery(self, delivery)
        return delivery

    def forward(self, delivery: Delivery) -> None:
        """The store has the frame of `delivery`: send it, or let it wait for the window."""
        connection = self.connection
        if delivery.storing:
            self._forward_numbered(delivery, connection)
        elif self.ended:
            if delivery.mail is not None:
                self.router.unkeep(delivery)
            self.router.pass_to_another(delivery, self)
        elif delivery.qos == 0:
            if connection is not None and (
                connection.choked
                or not connection.send(delivery.message, 0, delivery.retain, False, 0, delivery.extra)
            ):
                self._drop()
        elif connection is None or connection.choked or self.inflight.count >= self.window or self.waiting:
            self._wait(delivery)
        else:
            self._start(delivery, connection)

    def _forward_numbered(self, delivery: Delivery, connection: Connection | None) -> None:
        """Send a QoS 2 delivery whose packet id is stored. Without a connection, `attach` does."""
        delivery.storing = False
        packet_id = delivery.packet_id
        if connection is None or self.inflight.get(packet_id) is not delivery:
            return
        if self._unsaid is not None and int(packet_id) in self._unsaid:
            self.pump()
        elif not connection.send(delivery.message, 2, delivery.retain, False, packet_id, delivery.extra):
            self._withdraw_numbered(delivery)
            if self.waiting:
                self.pump()

    def _withdraw_numbered(self, delivery: Delivery) -> None:
        """Drop a delivery that has a packet id: it is larger than the client allows."""
        self.inflight.remove(delivery.packet_id)
        if delivery.sid:
            self.router.note_completed(delivery)
        self._give_up(delivery)

    def deliver_lease(self, message: Publish, consumer: QueueConsumer, lease: Lease) -> None:
        """Send a message from a queue. The consumer was asked whether there is room, so it leaves at once."""
        connection = self.connection
        if connection is None:
            return
        if message.qos == 0:
            if not connection.send(message, 0, False, False, 0, consumer.extra):
                self._drop()
                self.router.hand_back(lease)
            elif consumer.by_puback:
                self.router.take_ack(lease, 0)  # there will be none: sent is done
            return
        delivery = Delivery(message, message.qos, False, consumer.extra, None)
        delivery.consumer = consumer
        delivery.lease = lease
        delivery.token = lease.token
        self.held_bytes += delivery.size
        self._start(delivery, connection)

    def lease_sent(self, size: i64, packet_id: i64, consumer: QueueConsumer, lease: Lease) -> None:
        """A message from a queue has just been written to the line, `size` bytes in all."""
        delivery = Delivery(UNSAID, 1, False, consumer.extra, None)
        delivery.consumer = consumer
        delivery.lease = lease
        delivery.token = lease.token
        delivery.size = size
        self.held_bytes += size
        self.inflight.add(packet_id, delivery)

    def room(self) -> i64:
        """How many deliveries would leave at once."""
        connection = self.connection
        if connection is None or connection.choked or self._unsaid is not None:
            return 0
        return self.window - self.inflight.count

    def deliver_owned(self, delivery: OwnedDelivery) -> None:
        """Send a value of an exclusive queue to its owner, who has room."""
        connection = self.connection
        if connection is None:
            return
        self.held_bytes += delivery.size
        self._start(delivery, connection)

    def deliver_far(self, delivery: FarDelivery) -> None:
        """Send a message that came over a leg, or keep it until it can be sent. It is never dropped for want of room:
        the far cell sends no more than the client takes at once."""
        connection = self.connection
        self.held_bytes += delivery.size
        if connection is None or not self.takes_now() or self.waiting or self._unsaid is not None:
            if self.waiting is None:
                self.waiting = deque()
            self.waiting.append(delivery)
        else:
            self._start(delivery, connection)

    def say_far_again(self, delivery: FarDelivery) -> None:
        """Its cell has said it again on a connection that the client did not have then."""
        connection = self.connection
        if delivery.unsaid and connection is not None:
            delivery.unsaid = False
            connection.send(delivery.message, 1, False, True, delivery.packet_id, delivery.extra)

    def drop_far(self, delivery: FarDelivery) -> None:
        """It is another consumer's by now."""
        if self.inflight.get(delivery.packet_id) is delivery:
            self._finish(delivery.packet_id, delivery)

    def defer_receipt(self, packet: Publish) -> None:
        """Other cells are to keep `packet`: that it was received is written down when they have it, not now. A crash in
        between must not make us tell its client that it is here."""
        if packet.qos == 2 and self.sid:
            self.router.note_received(self, int(packet.packet_id), True)

    def mark_of(self, packet: Publish) -> int:
        """Under which mark a QoS 2 message was passed on before, if its client says it again; 0: it was not."""
        return self.passed.get(int(packet.packet_id), 0) if self.passed is not None and packet.dup else 0

    def begin_pass(self, packet: Publish, mark: int) -> int:
        """It goes to other cells under this mark; the lowest that is open."""
        if self.passed is None:
            self.passed = {}
        packet_id = int(packet.packet_id)
        if self.passed.get(packet_id, 0) != mark:
            self.passed.pop(packet_id, None)
            self.passed[packet_id] = mark
        return next(iter(self.passed.values()))

    def end_pass(self, packet_id: int) -> bool:
        """It is answered for, or its client has given it up; whether it was on its way."""
        return self.passed is not None and self.passed.pop(packet_id, 0) != 0

    def answer_far(self, packet: Publish, settles: bool, epoch: i64, reason: i64, why: str) -> None:
        """What this client published was not answered for when it came, but later: by another cell, or by a door that
        gathers."""
        if reason == 0 or (self.version != V5 and (settles or reason < 0x80)):
            if packet.qos == 2 and self.sid and self._unreleased is not None:
                self.router.note_received(self, int(packet.packet_id), False)
                self.end_pass(int(packet.packet_id))
            self.stored(packet.packet_id | (packet.qos << 16) | (epoch << 20))
            return
        here = epoch == self._epoch
        if here:
            self._unanswered -= 1
        if packet.qos == 2 and self._unstored is not None:
            self._unstored.discard(int(packet.packet_id))
        connection = self.connection
        if connection is not None and (here or packet.qos == 2):
            self.refuse(packet, connection, reason, why)

    def epoch(self) -> int:
        """Which of its connections it has: an answer to another one is of no use."""
        return int(self._epoch)

    def forget_lease(self, lease: Lease) -> None:
        """A delivery from a queue is not this session's any more: an answer to it counts for the line only."""
        for delivery in self.inflight.in_order():
            if delivery.lease is lease:
                delivery.lease = None
                return

    def _wait(self, delivery: Delivery) -> bool:
        waiting = self.waiting
        if waiting is None:
            waiting = self.waiting = deque()
        if len(waiting) < self.router.limits.max_queued_messages:
            waiting.append(delivery)
            return True
        self._give_up(delivery)
        return False

    def _start(self, delivery: Delivery, connection: Connection) -> bool:
        packet_id = self.inflight.next_id()
        if delivery.qos == 2 and delivery.sid:
            # After a crash it must be sent again under this id, and no other message may have the id:
            # so the id is stored first. While a message is being published, `Keeper.post` does so.
            self.inflight.add(packet_id, delivery)
            delivery.storing = True
            if delivery.mail is not None:
                self.router.note_sent(delivery)
            self.router.forwarder.hold_delivery(self, delivery)
            return True
        if connection.send(delivery.message, delivery.qos, delivery.retain, False, packet_id, delivery.extra):
            self.inflight.add(packet_id, delivery)
            return True
        self._give_up(delivery)
        return False

    def _give_up(self, delivery: Delivery) -> None:
        """It cannot be delivered: too late, too large, or one too many. What a queue gave goes back to it; a value that
        its owner can never take is done with."""
        self._let_go(delivery)
        self._drop()
        lease = delivery.lease
        if lease is not None:
            self.router.hand_back(lease)
        elif isinstance(delivery, OwnedDelivery):
            self.router.take_owned(delivery)
        elif isinstance(delivery, FarDelivery):
            delivery.leg.acknowledged(delivery, PACKET_TOO_LARGE)

    def _let_go(self, delivery: Delivery) -> None:
        """A delivery is done with, one way or the other."""
        self.held_bytes -= delivery.size
        if delivery.mail is not None:
            self.router.unkeep(delivery)

    def _drop(self) -> None:
        self.dropped += 1
        self.router.counters.publishes_dropped += 1

    def pump(self) -> None:
        """Send what waits, as far as the window and the line allow; first of all what is to be said again."""
        connection = self.connection
        if connection is None:
            return
        if self._unsaid is not None:
            self._say_again(self._unsaid, connection)
        if self._unsaid is not None:
            return
        if self.waiting:
            self._send_waiting(self.waiting, connection)
        if self.retained_sender is not None:
            self.retained_sender.resume()

    def _send_waiting(self, waiting: deque[Delivery], connection: Connection) -> None:
        now = self.router.turn.now
        while waiting and self.inflight.count < self.window and not connection.choked:
            delivery = waiting.popleft()
            expires_at = delivery.message.expires_at
            if expires_at != 0.0 and expires_at <= now:
                self._give_up(delivery)
            else:
                self._start(delivery, connection)

    def _say_again(self, unsaid: deque[int], connection: Connection) -> None:
        """What an earlier connection left unacknowledged, in the order it was first said [MQTT-4.4.0-1], and never more
        of it at once than this connection takes [MQTT-3.3.4-9]."""
        while unsaid and self.inflight.count - len(unsaid) < self.window and not connection.choked:
            packet_id: i64 = unsaid[0]
            delivery = self.inflight.get(packet_id)
            if delivery is not None and delivery.storing:
                return  # goes on when the store has it
            unsaid.popleft()
            if delivery is None:
                continue
            if delivery.released:
                connection.acknowledge(PUBREL, packet_id, 0, "")
            elif delivery.is_void():
                self.inflight.remove(packet_id)  # its time has passed while the line was full
                self._let_go(delivery)
            elif not connection.send(
                delivery.packet(), delivery.qos, delivery.retain, True, packet_id, delivery.extra
            ):
                self._withdraw_numbered(delivery)
        if not unsaid:
            self._unsaid = None

    def on_puback(self, packet_id: i64, reason: i64) -> None:
        """PUBACK, with success or with an error: either way the client is done with it [MQTT-4.3.2-5]."""
        delivery = self.inflight.get(packet_id)
        if delivery is None or delivery.qos != 1:
            if packet_id == 0:
                raise MalformedPacket("an acknowledgement has packet identifier 0")  # [MQTT-2.2.1-3]
            return  # answered before the reconnect and again after it: harmless
        self._finish(packet_id, delivery)
        consumer = delivery.consumer
        if consumer is not None:
            lease = delivery.lease
            if consumer.by_puback and lease is not None and not delivery.is_void():
                self.router.take_ack(lease, reason)
            else:
                self.router.feed(consumer)
        elif isinstance(delivery, OwnedDelivery):
            self.router.take_owned(delivery)
        elif isinstance(delivery, FarDelivery):
            delivery.leg.acknowledged(delivery, reason)
        elif not delivery.sid:
            self.router.deliveries.give_back(delivery)

    def on_ack(self, packet: Ack, connection: Connection) -> None:
        """PUBREC, PUBREL and PUBCOMP: the rest of QoS 2, both ways."""
        key = int(packet.packet_id)
        if packet.kind == PUBREL:
            known = self._unreleased is not None and key in self._unreleased
            known = (
                self.end_pass(key) or known
            )  # what its receivers have, and a node died before it was noted
            if known:
                if self._unreleased is not None:
                    self._unreleased.discard(key)
                if self.sid:
                    self.router.note_received(self, key, True)
            if self.sid:
                # With PUBCOMP the client may give the id to another message. Also where the id is not
                # known: the note about its release may be on its way to the store.
                self._answer_when_noted(COMPLETE if known else COMPLETE_UNKNOWN, packet.packet_id)
            else:
                reason: i64 = 0 if known else PACKET_IDENTIFIER_NOT_FOUND
                connection.acknowledge(PUBCOMP, packet.packet_id, reason, "")
            return
        delivery = self.inflight.get(packet.packet_id)
        if delivery is None or delivery.qos != 2:
            if packet.kind == PUBREC and packet.reason < 0x80:
                connection.acknowledge(PUBREL, packet.packet_id, PACKET_IDENTIFIER_NOT_FOUND, "")
            return
        if delivery.storing:
            return  # it was not sent yet, or PUBREL is on its way
        if packet.kind == PUBREC and packet.reason < 0x80:
            if delivery.released or not delivery.sid:
                delivery.released = True
                connection.acknowledge(PUBREL, packet.packet_id, 0, "")
                return
            # A client that has PUBREL is done with the id: PUBLISH must not be sent again after it.
            delivery.released = True
            delivery.storing = True
            self.router.note_there(delivery)
            self._answer_when_noted(RELEASE, packet.packet_id)
        elif packet.kind == PUBREC or delivery.released:
            if delivery.sid:
                self.router.note_completed(delivery)
            self._finish(packet.packet_id, delivery)

    def _answer_when_noted(self, kind: i64, packet_id: i64) -> None:
        self.router.answer_when_noted(self, packet_id | (kind << 16) | (self._epoch << 20))

    def _finish(self, packet_id: i64, delivery: Delivery) -> None:
        if self.reader is not None and self.inflight.count >= self.window:
            self._feed_reader()
        self.inflight.remove(packet_id)
        self._let_go(delivery)
        if self.starving is not None:
            self.feed_starving()
        if self._unsaid is not None and int(packet_id) in self._unsaid:
            self._unsaid.remove(int(packet_id))  # acknowledged from what the last connection had said
        if self.waiting or self._unsaid is not None:
            self.pump()

    # ---- subscriptions

    def answer_filters(
        self, connection: Connection, head: int, packet_id: int, reasons: list[int], why: str
    ) -> None:
        """Subscriptions have changed (`subscribing`): a lasting session answers when that is kept."""
        if self.sid and self.router.keeper is not None:
            self._unkept[packet_id] = (head, reasons, why)
            self.router.keep_session(self, packet_id | (FILTERS << 16) | (self._epoch << 20))
            self.router.hold_back(connection)
        else:
            connection.answer_filters(head, packet_id, reasons, why)

    def _answer_filters(self, packet_id: int) -> None:
        head, reasons, why = self._unkept.pop(packet_id, (0, [], ""))
        if head and self.connection is not None:
            self.connection.answer_filters(head, packet_id, reasons, why)

    # ---- coming and going

    def belong_to(self, user: str | None) -> None:
        """Set the user of the session. None and the empty string: it has none."""
        self.user = user
        self.identity = identity_of(self.client_id, user or "")

    def attach(self, connection: Connection) -> None:
        """A connection for this session: it is told again what was not acknowledged, and then what waits."""
        self.connection = connection
        self.gone_at = 0.0
        self._epoch += 1
        self._unanswered = 0
        self._unkept.clear()
        unsaid: deque[int] = deque()
        for delivery in self.inflight.in_order():
            if delivery.is_void():
                self.inflight.remove(delivery.packet_id)
                self._let_go(delivery)
            elif isinstance(delivery, FarDelivery):
                delivery.unsaid = True  # its cell says it again if it is still this client's
            else:
                unsaid.append(int(delivery.packet_id))
        self._unsaid = unsaid if unsaid else None
        self.pump()
        if self.by_queue and self.router.door is not None:
            self.router.door.resumed(self)
        if self.reader is not None and self.router.door is not None:
            self.router.door.ecq.resumed(self)
        if self.legs is not None:
            self.legs.attached()

    def feed_starving(self) -> None:
        """If the first that was turned away leaves some of the room, the engine asks for the next."""
        if self.starving is not None:
            consumer = self.starving.next()
            if consumer is not None:
                self.router.feed(consumer)

    def _feed_reader(self) -> None:
        if self.reader is not None and self.router.door is not None:
            self.router.door.ecq.feed(self.reader)

    def line_is_free(self) -> None:
        """The line takes more again: whoever reads queues over it may have some."""
        self._feed_reader()
        self.feed_starving()
        if self.legs is not None:
            self.legs.line_is_free()

    def restore_waiting(self, delivery: Delivery) -> None:
        """After a restart: a message that waits for this session."""
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append(delivery)
        self.held_bytes += delivery.size

    def restore_sent(self, delivery: Delivery, packet_id: int) -> None:
        """After a restart: a QoS 2 message that was sent, and is to be said again under its id."""
        self.inflight.add(packet_id, delivery)
        self.held_bytes += delivery.size

    def withdraw(self, grant: Grant) -> None:
        """Drop what waits for a client that may not have it any more; what is on its way already stays so."""
        if self.waiting:
            waiting, self.waiting = self.waiting, deque()
            for one in waiting:
                if isinstance(one, FarDelivery) or grant.may_receive(one.message.topic):
                    self.waiting.append(one)
                else:
                    self._give_up(one)
        for one in self.inflight.in_order() if self.connection is None else []:
            plain = one.consumer is None and not isinstance(one, FarDelivery)
            if plain and not one.released and not grant.may_receive(one.message.topic):
                self.inflight.remove(one.packet_id)
                self._give_up(one)

    def restore_received(self, packet_ids: set[int]) -> None:
        """After a restart: QoS 2 messages that have come in and are not released."""
        self._unreleased = set(packet_ids)
        self._restored = set(packet_ids)

    def take_back(self) -> list[Delivery]:
        """All deliveries of a session that ends, so that shared ones can go to another member."""
        self.ended = True
        # QoS 2 that was sent never changes hands [MQTT-4.8.2-5].
        sent = self.inflight.in_order()
        given = [one for one in sent if one.qos == 1 or (one.storing and not one.released)]
        if self.waiting is not None:
            given.extend(self.waiting)
        for one in (*sent, *(self.waiting or ())):
            self._let_go(one)
        self.inflight.clear()
        self.waiting = None
        self._unsaid = None
        self.held_bytes = 0
        self._unreleased = None
        self.passed = None
        return given
