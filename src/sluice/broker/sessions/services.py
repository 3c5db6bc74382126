"""What all sessions of a broker share, and the interfaces to what stores their deliveries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.limits import Limits
from sluice.broker.sessions.inflight import Delivery, DeliveryPool
from sluice.broker.turn import Turn
from sluice.metrics import Counters
from sluice.queues.ports import Publisher

if TYPE_CHECKING:
    from sluice.broker.sessions.outbound import OutboundQos
    from sluice.broker.sessions.session import Session


class DeliveryRecords:
    """Records the QoS flows of persistent sessions. This base class stores nothing."""

    def notify_after_commit(self, publisher: Publisher, tag: i64) -> None:
        """Call `publisher.on_committed(tag)` after everything recorded so far is committed."""

    def record_received(self, persistent_id: int, packet_id: int, released: bool) -> None:
        """Record an incoming QoS 2 message of a persistent session, or its release."""

    def record_sent(self, delivery: Delivery) -> None:
        """Store the packet id of a QoS 2 message: it may only be resent under that id."""

    def record_pubrec(self, delivery: Delivery) -> None:
        """Store the receipt of PUBREC: the message is no longer needed, its packet id is."""

    def record_completed(self, delivery: Delivery) -> None: ...

    def delete_pending(self, delivery: Delivery) -> None:
        """Delete the stored message of a delivery that has ended."""


class DeliveryForwarder(Publisher):
    """Sends deliveries after a commit, and gives shared ones to other sessions."""

    def defer_delivery(self, outbound: OutboundQos, delivery: Delivery) -> None:
        """Call `outbound.send_committed(delivery)` after the open frame is committed."""

    def reassign_shared(self, delivery: Delivery, excluded: Session) -> None:
        """Give a delivery of the ended session `excluded` to another member of its share."""


class SessionServices:
    """The session store implements `delivery_records`, the commit forwarder `forwarder`."""

    def __init__(
        self,
        limits: Limits,
        turn: Turn,
        counters: Counters,
        delivery_records: DeliveryRecords,
        forwarder: DeliveryForwarder,
    ) -> None:
        self.limits: Limits = limits
        self.turn: Turn = turn
        self.counters: Counters = counters
        self.delivery_records: DeliveryRecords = delivery_records
        self.forwarder: DeliveryForwarder = forwarder
        self.delivery_pool: DeliveryPool = DeliveryPool()
