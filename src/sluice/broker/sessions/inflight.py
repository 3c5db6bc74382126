"""QoS 1 and 2 messages in flight to one client, indexed by packet id.

Packet ids are assigned in sequence and come back nearly in that order. So an array of slots is
enough, where a dict would box and hash a number three times for each message. The slot of a packet
id is given by its low bits; an id whose slot is occupied is skipped. The array has at least twice
as many slots as messages, and is freed when it becomes empty after a burst.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.queues.log import PendingMessage

MIN_SLOTS: Final = 16
MAX_SLOTS: Final = 65_536
MAX_EMPTY_SLOTS: Final = 256  # a larger array is freed when it is empty
MAX_POOLED_DELIVERIES: Final = 256
# Placeholder for the packet of a queue message, which is built again for a resend.
UNBUILT_PACKET: Final = Publish(b"", b"", 1)


class Share:
    """A shared subscription, as far as a delivery knows it."""


class Delivery:
    """A QoS 1 or 2 message for one session, until the client has acknowledged it."""

    def __init__(
        self,
        message: Publish,
        qos: i64,
        retain: bool,
        extra_properties: bytes,
        share: Share | None,
    ) -> None:
        self.message: Publish = message
        self.qos: i64 = qos
        self.retain: bool = retain
        # Encoded properties for this recipient alone.
        self.extra_properties: bytes = extra_properties
        # Gets the message if this session ends before the acknowledgement.
        self.share: Share | None = share
        # The bytes that count against the session's limit.
        self.size: i64 = len(message.payload) + len(message.raw_properties) + len(message.topic)
        self.packet_id: i64 = 0  # set when it is sent
        self.send_order: i64 = 0  # position in the send sequence, used to resend in order
        self.is_released: bool = False  # PUBREC has arrived, PUBCOMP has not
        # QoS 2 to a persistent session: the packet id or the receipt of PUBREC is not stored yet.
        # Until then nothing about this delivery is sent.
        self.is_committing: bool = False
        self.is_from_queue: bool = False  # a message from a queue, of this or another cell
        self.is_pooled: bool = False  # `DeliveryPool` may reuse it
        self.persistent_id: int = 0  # of a persistent session
        self.pending_message: PendingMessage | None = None  # the message as stored for it

    def is_obsolete(self) -> bool:
        """Return whether the message no longer belongs to this client, and is not resent."""
        return False

    def build_packet(self) -> Publish:
        """Return the packet to send."""
        return self.message

    def defer_resend(self) -> bool:
        """Return whether something else resends it after a reconnect."""
        return False

    def end_deferral(self) -> bool:
        """Return whether its resend was deferred; it no longer is."""
        return False

    def on_acknowledged(self, reason: i64) -> None:
        """Called after the client has acknowledged it, with success or an error."""

    def on_abandoned(self) -> None:
        """Called after it was given up: too late, too large or over a limit."""


class DeliveryPool:
    """Reuse plain deliveries: allocating one is a fourteenth of the cost of a plain message.

    Only deliveries without other references may be released: see `OutboundQos.on_puback`.
    """

    def __init__(self) -> None:
        self._pool: list[Delivery] = []

    def acquire(
        self,
        message: Publish,
        qos: i64,
        retain: bool,
        extra_properties: bytes,
        share: Share | None,
    ) -> Delivery:
        if not self._pool:
            delivery = Delivery(message, qos, retain, extra_properties, share)
            delivery.is_pooled = True
            return delivery
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
        """Return a free packet id.

        One always exists: windows are smaller than the number of ids.
        """
        if 2 * self.count >= len(self._slots) and len(self._slots) < MAX_SLOTS:
            self._grow()
        packet_id: i64 = self._last_id
        while True:
            packet_id = packet_id + 1 if packet_id < 65_535 else 1
            if self._slots[packet_id & self._mask] is None:
                self._last_id = packet_id
                return packet_id

    def add(self, packet_id: i64, delivery: Delivery) -> None:
        """Add a delivery under a packet id; a restored id may need more slots."""
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
        """Return all deliveries in the order in which they were sent."""
        found = [one for one in self._slots if one is not None]
        found.sort(key=_get_send_order)
        return found

    def clear(self) -> None:
        self.count = 0
        self._slots = []
        self._mask = 0

    def _grow(self) -> None:
        """Double the slots.

        Ids never collide after it: each slot index gains one more bit of the id.
        """
        size: i64 = 2 * len(self._slots) or MIN_SLOTS
        before = self._slots
        self._slots = [None] * int(size)
        self._mask = size - 1
        for delivery in before:
            if delivery is not None:
                self._slots[delivery.packet_id & self._mask] = delivery


def _get_send_order(delivery: Delivery) -> int:
    return int(delivery.send_order)
