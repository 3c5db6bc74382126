"""What of a cluster one cell must know: that some names lie elsewhere, and whom to ask for them.

A broker alone has none of this (`Router.abroad` is None). In a cluster the room `cluster` derives from these classes.
Messages from another cell are `FarDelivery` to a session; all else is asked of `Abroad`, or of the session's `Legs`.
They are classes to derive from, not protocols: a call to a native method is a jump, a call through a protocol a search.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64, mypyc_attr

from sluice.broker.sessions.inflight import Delivery
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.net.connection import Connection
    from sluice.broker.sessions.session import Session
    from sluice.broker.sessions.subscriptions import Capture, Share, Subscription

HERE: Final = -1  # as the number of a cell: this one

# A user property of a leg's CONNECT: the client itself speaks MQTT 3.1.1 and can send no delivery token.
WITHOUT_PROPERTIES: Final = ("user-properties", "none")


@mypyc_attr(allow_interpreted_subclasses=True)
class Leg:
    """A session's line to another cell."""

    def acknowledged(self, delivery: FarDelivery, reason: i64) -> None:
        """The client has answered a delivery that came over this line."""


class FarDelivery(Delivery):
    """A QoS 1 message that came over a leg, until the client has acknowledged it: then the leg is told."""

    def __init__(self, message: Publish, extra: bytes, leg: Leg, far_id: i64, life: i64) -> None:
        super().__init__(message, 1, False, extra, None)
        self.leg: Leg = leg
        self.far_id: i64 = far_id  # its packet id on the leg,
        self.life: i64 = life  # and which of the leg's connections that was
        self.failed: bool = False  # its client has said so by name: its PUBACK is no ack
        self.unsaid: bool = (
            False  # the client has a new connection, and it is not known yet whether it is still its
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class Legs:
    """One session's lines to other cells."""

    def publish(self, cell: i64, packet: Publish, settles: bool, connection: Connection) -> None:
        """Something for a queue of another cell; answered when that cell has it. `settles`: it is about a delivery."""

    def subscribe(
        self, topic_filter: bytes, qos: int, wishes: list[str], answer: Callable[[int, str], None]
    ) -> None:
        """Join queues of other cells. `answer` is given the granted QoS, or a reason and why."""

    def unsubscribe(self, topic_filter: bytes) -> None: ...

    def attached(self) -> None:
        """The session has a connection."""

    def departed(self) -> None:
        """It has none, and waits."""

    def ended(self) -> None: ...

    def line_is_free(self) -> None:
        """The client reads again."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Abroad:
    """The rest of the cluster, as one of its cells sees it."""

    # ---- queues

    def cell_for(self, topic: bytes, payload: bytes) -> i64:
        """Which cell a publish below `$queue/`, `$ECQ/` or `$admin/` is for."""
        return HERE

    def is_far(self, topic_filter: bytes) -> bool:
        """Whether a filter below `$queue/` or `$admin/` means queues of other cells (as well)."""
        return False

    def is_near(self, topic_filter: bytes) -> bool:
        """Whether such a filter means queues of this cell (as well)."""
        return True

    def legs_of(self, session: Session) -> Legs:
        """Its lines to other cells; it has them from now on."""
        return Legs()

    def rejoin(self, session: Session, topic_filter: bytes, qos: i64, wishes: list[str]) -> None:
        """A far subscription from before a restart."""

    def post_will(self, cell: i64, will: Publish) -> None:
        """A will for a queue of another cell."""

    # ---- plain topics

    def publish(self, packet: Publish, session: Session, connection: Connection) -> None:
        """Give a plain publish to its receivers in all cells, and answer it when all have it."""

    def publish_will(self, will: Publish, session: Session) -> None: ...

    def keeps(self, topic: bytes) -> bool:
        """Whether the retained message of a topic is kept in this cell."""
        return True

    def hand_on(self, message: Publish, share: Share) -> None:
        """A shared message has no member left here to go to: perhaps another cell has one."""

    def interest(self, topic_filter: bytes, count: int) -> None:
        """A filter of this cell has so many subscriptions more, or less."""

    def captures_changed(self, captures: list[Capture]) -> None: ...

    def when_known(self, known: Callable[[], None], late: Callable[[], None]) -> None:
        """Call `known` when every node has heard of the filters of this cell, or `late` if one does
        not in time."""

    def send_retained(self, subscription: Subscription) -> None:
        """Give a subscription what is retained for it in other cells."""
