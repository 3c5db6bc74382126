"""QoS 2 messages that are forwarded after the open frame is committed.

A client may resend a QoS 2 publish of a persistent session after a crash of the broker. The broker
recognizes the duplicate by its packet id, which is stored in the frame of the message. So no client
may see the message before that frame is committed. For the same reason a QoS 2 delivery to a
persistent session is sent only after its packet id is stored: after a crash the broker resends it
under that id, and no other message gets the id while the client may still use it.

There is one batch and one callback per frame, regardless of the number of messages. A crash before
the commit loses a batch together with its frame: the sender has no PUBREC and resends the message.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.sessions import DeliveryForwarder

if TYPE_CHECKING:
    from sluice.broker.routing.router import Router
    from sluice.broker.sessions import Delivery, OutboundQos, Session


class DeferredPublish:
    """A publish that is forwarded after the open frame is committed."""

    def forward(self) -> None: ...


class FrameBatch:
    """The messages that leave after one frame is committed."""

    def __init__(self) -> None:
        self.outbounds: list[OutboundQos] = []
        self.deliveries: list[Delivery] = []  # one for each of `outbounds`
        self.publishes: list[DeferredPublish] = []


class CommitForwarder(DeliveryForwarder):
    def __init__(self, router: Router) -> None:
        self._router: Router = router
        # Of the frame being committed, and of the open one.
        self._batches: deque[FrameBatch] = deque()
        self._frame_number: i64 = -1  # number of the frame of the last batch

    def defer_delivery(self, outbound: OutboundQos, delivery: Delivery) -> None:
        batch = self._open_batch()
        batch.outbounds.append(outbound)
        batch.deliveries.append(delivery)

    def defer_publish(self, publish: DeferredPublish) -> None:
        """Forward `publish` to the remaining recipients after the open frame is committed."""
        self._open_batch().publishes.append(publish)

    def reassign_shared(self, delivery: Delivery, excluded: Session) -> None:
        self._router.reassign_shared(delivery, excluded)

    def _open_batch(self) -> FrameBatch:
        session_store = self._router.session_store
        frame = session_store.open_frame_number()
        if frame != self._frame_number or not self._batches:
            self._frame_number = frame
            self._batches.append(FrameBatch())
            session_store.notify_after_commit(self, 0)
        return self._batches[-1]

    def on_committed(self, tag: i64) -> None:
        """Forward the oldest batch, which is committed."""
        batch = self._batches.popleft()
        self._router.turn.begin()
        for nth, outbound in enumerate(batch.outbounds):
            outbound.send_committed(batch.deliveries[nth])
        for publish in batch.publishes:
            publish.forward()
