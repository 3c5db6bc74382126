"""QoS 2 messages that wait for the open frame and are forwarded when the store has committed it.

A QoS 2 publish of a persistent session may come again after a crash of the broker. It is recognized
by its packet id, which is stored in the frame of the message. So nobody may see the message before
that frame is committed. For the same reason a QoS 2 delivery to a persistent session leaves only when
its packet id is stored: after a crash it is sent again under that id, and no other message gets the
id while the client may hold it open.

There is one batch and one callback per frame, however many messages are in it. A crash before the
commit loses a batch together with its frame: the sender has no PUBREC and sends the message again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.queues.ports import Publisher

if TYPE_CHECKING:
    from sluice.broker.sessions.inflight import Delivery
    from sluice.broker.router import Router
    from sluice.broker.sessions.session import Session
    from sluice.broker.sessions.subscriptions import Route
    from sluice.wire.packets import Publish


class StoredPublish:
    """A publish whose copies for persistent sessions are in the frame; others get it later."""

    def __init__(self, message: Publish, origin: Session | None, route: Route) -> None:
        self.message: Publish = message
        self.origin: Session | None = origin
        self.route: Route = route  # by which the copies were made


class Batch:
    """What leaves when one frame is committed."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.deliveries: list[Delivery] = []  # one for each of `sessions`
        self.publishes: list[StoredPublish] = []
        self.responses: list[Publish] = []


class Forwarder(Publisher):
    def __init__(self, router: Router) -> None:
        self._router: Router = router
        self._batches: deque[Batch] = deque()  # of the frame under way, and of the open one
        self._frame: i64 = -1  # the number of the frame that the last batch belongs to

    def hold_delivery(self, session: Session, delivery: Delivery) -> None:
        """Call `session.forward(delivery)` when the open frame is committed."""
        batch = self._open_batch()
        batch.sessions.append(session)
        batch.deliveries.append(delivery)

    def hold_publish(self, publish: StoredPublish) -> None:
        """Forward `publish` to the other receivers when the open frame is committed."""
        self._open_batch().publishes.append(publish)

    def hold_response(self, message: Publish) -> None:
        """Give a response to the client that waits for it when the open frame is committed."""
        self._open_batch().responses.append(message)

    def _open_batch(self) -> Batch:
        keeper = self._router.keeper
        assert keeper is not None  # without a store no session is persistent
        frame = keeper.open_frame()
        if frame != self._frame or not self._batches:
            self._frame = frame
            self._batches.append(Batch())
            keeper.answer_when_kept(self, 0)
        return self._batches[-1]

    def stored(self, tag: i64) -> None:
        """The oldest batch is committed."""
        batch = self._batches.popleft()
        router = self._router
        router.turn.begin()
        for nth, session in enumerate(batch.sessions):
            session.forward(batch.deliveries[nth])
        for publish in batch.publishes:
            router.forward(publish)
        for message in batch.responses:
            router.forward_response(message)
