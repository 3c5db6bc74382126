"""QoS 1 and 2 messages on their way to one client, found by packet identifier.

Identifiers are given out in a row and come back nearly in that order, so a row of places is enough where a dict would
box and hash a number three times for each message: the place of an identifier is its last bits, and one whose place is
taken is passed over. The row is twice as long as what is in it, and is let go when it empties after a rush.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer
    from sluice.broker.sessions.subscriptions import SharedSubscription
    from sluice.queues.log.broker_state import PendingMessage
    from sluice.queues.model.delivery_lease import Lease

MIN_SLOTS: Final = 16
MAX_SLOTS: Final = 65_536
MAX_EMPTY_SLOTS: Final = 256  # an empty row of more places than this is let go
MAX_POOLED_DELIVERIES: Final = 256
UNBUILT_PACKET: Final = Publish(
    b"", b"", 1
)  # stands for the packet of a queue's message, which is made anew to be said again


class Delivery:
    """A QoS 1 or 2 message for one session, until the client has acknowledged it."""

    def __init__(
        self,
        message: Publish,
        qos: i64,
        retain: bool,
        extra_properties: bytes,
        share: SharedSubscription | None,
    ) -> None:
        self.message: Publish = message
        self.qos: i64 = qos
        self.retain: bool = retain
        self.extra_properties: bytes = (
            extra_properties  # encoded properties for this receiver alone
        )
        self.share: SharedSubscription | None = (
            share  # where it goes if this session ends before it is done
        )
        # What a session is charged for it.
        self.size: i64 = len(message.payload) + len(message.raw_properties) + len(message.topic)
        self.packet_id: i64 = 0  # once it is sent
        self.send_order: i64 = 0  # the how manieth it was to be sent
        self.is_released: bool = False  # PUBREC has come; PUBCOMP has not
        # QoS 2 to a persistent session: its packet id, or that PUBREC has come, is not stored yet.
        # Until it is, nothing about this delivery is sent.
        self.is_committing: bool = False
        self.consumer: QueueConsumer | None = None  # of a message from a queue
        self.lease: Lease | None = None  # the same, while it is this session's
        self.token: i64 = 0  # of that lease when it was sent: a later one is another delivery
        self.persistent_id: int = 0  # of a session that outlives the server: its number,
        self.pending_message: PendingMessage | None = None  # and where the message is kept for it

    def is_obsolete(self) -> bool:
        """From a queue, and settled or with another consumer by now: an answer to it counts for the line only."""
        consumer = self.consumer
        if consumer is None:
            return False
        lease = self.lease
        return (
            lease is None
            or lease.token_counter != self.token
            or lease.consumer is not consumer
            or consumer.group is None
        )

    def build_packet(self) -> Publish:
        """What is said to the client."""
        message = self.message
        consumer = self.consumer
        lease = self.lease
        if message is UNBUILT_PACKET and consumer is not None and lease is not None:
            return consumer.build_packet(lease)
        return message


class DeliveryPool:
    """Plain deliveries, used again: to make one and let it go is a fourteenth of what a plain message costs. Only what
    nobody else can hold is given back: see `Session.on_puback`."""

    def __init__(self) -> None:
        self._pool: list[Delivery] = []

    def acquire(
        self,
        message: Publish,
        qos: i64,
        retain: bool,
        extra_properties: bytes,
        share: SharedSubscription | None,
    ) -> Delivery:
        if not self._pool:
            return Delivery(message, qos, retain, extra_properties, share)
        delivery = self._pool.pop()
        delivery.message = message
        delivery.qos = qos
        delivery.retain = retain
        delivery.extra_properties = extra_properties
        delivery.share = share
        delivery.size = len(message.payload) + len(message.raw_properties) + len(message.topic)
        return delivery

    def release(self, delivery: Delivery) -> None:
        if len(self._pool) < MAX_POOLED_DELIVERIES:
            delivery.message = UNBUILT_PACKET
            delivery.extra_properties = b""
            delivery.share = None
            self._pool.append(delivery)


class Inflight:
    def __init__(self) -> None:
        self.count: i64 = 0
        self._slots: list[Delivery | None] = []
        self._mask: i64 = 0
        self._last_id: i64 = 0
        self._send_count: i64 = 0

    def __len__(self) -> int:
        return int(self.count)

    def get(self, packet_id: i64) -> Delivery | None:
        if self.count == 0:
            return None
        delivery = self._slots[packet_id & self._mask]
        return delivery if delivery is not None and delivery.packet_id == packet_id else None

    def next_id(self) -> i64:
        """An identifier that is free. There must be one: windows are smaller than the number of identifiers."""
        if 2 * self.count >= len(self._slots) and len(self._slots) < MAX_SLOTS:
            self._grow()
        packet_id: i64 = self._last_id
        while True:
            packet_id = packet_id + 1 if packet_id < 65_535 else 1
            if self._slots[packet_id & self._mask] is None:
                self._last_id = packet_id
                return packet_id

    def add(self, packet_id: i64, delivery: Delivery) -> None:
        """Take in a delivery under an identifier whose place is free; one of an earlier life may need a longer row."""
        while not self._slots or (
            self._slots[packet_id & self._mask] is not None and len(self._slots) < MAX_SLOTS
        ):
            self._grow()
        self._slots[packet_id & self._mask] = delivery
        delivery.packet_id = packet_id
        self._send_count += 1
        delivery.send_order = self._send_count
        self.count += 1

    def remove(self, packet_id: i64) -> None:
        self._slots[packet_id & self._mask] = None
        self.count -= 1
        if self.count == 0 and self._mask >= MAX_EMPTY_SLOTS:
            self._slots = []
            self._mask = 0

    def list_in_send_order(self) -> list[Delivery]:
        """All of them, as they were sent."""
        found = [one for one in self._slots if one is not None]
        found.sort(key=_get_send_order)
        return found

    def clear(self) -> None:
        self.count = 0
        self._slots = []
        self._mask = 0

    def _grow(self) -> None:
        """Twice the places. What had a place of its own has one again: its identifier has one bit more of it."""
        size: i64 = 2 * len(self._slots) or MIN_SLOTS
        before = self._slots
        self._slots = [None] * int(size)
        self._mask = size - 1
        for delivery in before:
            if delivery is not None:
                self._slots[delivery.packet_id & self._mask] = delivery


def _get_send_order(delivery: Delivery) -> int:
    return int(delivery.send_order)
