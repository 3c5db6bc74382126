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
    from sluice.broker.sessions.subscriptions import SharedSubscription, Subscription, TopicBinding

LOCAL_CELL: Final = -1  # as the number of a cell: this one

# A user property of a leg's CONNECT: the client itself speaks MQTT 3.1.1 and can send no delivery token.
NO_USER_PROPERTIES: Final = ("user-properties", "none")


@mypyc_attr(allow_interpreted_subclasses=True)
class SessionProxy:
    """A session's line to another cell."""

    def on_acknowledged(self, delivery: RemoteDelivery, reason: i64) -> None:
        """The client has answered a delivery that came over this line."""


class RemoteDelivery(Delivery):
    """A QoS 1 message that came over a leg, until the client has acknowledged it: then the leg is told."""

    def __init__(
        self,
        message: Publish,
        extra_properties: bytes,
        proxy: SessionProxy,
        remote_packet_id: i64,
        connection_number: i64,
    ) -> None:
        super().__init__(message, 1, False, extra_properties, None)
        self.proxy: SessionProxy = proxy
        self.remote_packet_id: i64 = remote_packet_id  # its packet id on the leg,
        self.connection_number: i64 = (
            connection_number  # and which of the leg's connections that was
        )
        self.is_nacked: bool = False  # its client has said so by name: its PUBACK is no ack
        self.needs_resend: bool = False  # the client has a new connection, and it is not known yet whether it is still its


@mypyc_attr(allow_interpreted_subclasses=True)
class SessionProxies:
    """One session's lines to other cells."""

    def publish(
        self, cell: i64, packet: Publish, is_settlement: bool, connection: Connection
    ) -> None:
        """Something for a queue of another cell; answered when that cell has it. `settles`: it is about a delivery."""

    def subscribe(
        self,
        topic_filter: bytes,
        qos: int,
        raw_options: list[str],
        on_reply: Callable[[int, str], None],
    ) -> None:
        """Join queues of other cells. `answer` is given the granted QoS, or a reason and why."""

    def unsubscribe(self, topic_filter: bytes) -> None: ...

    def on_attached(self) -> None:
        """The session has a connection."""

    def on_detached(self) -> None:
        """It has none, and waits."""

    def on_session_ended(self) -> None: ...

    def on_writable(self) -> None:
        """The client reads again."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ClusterPort:
    """The rest of the cluster, as one of its cells sees it."""

    # ---- queues

    def cell_for(self, topic: bytes, payload: bytes) -> i64:
        """Which cell a publish below `$queue/`, `$ECQ/` or `$admin/` is for."""
        return LOCAL_CELL

    def matches_remote(self, topic_filter: bytes) -> bool:
        """Whether a filter below `$queue/` or `$admin/` means queues of other cells (as well)."""
        return False

    def matches_local(self, topic_filter: bytes) -> bool:
        """Whether such a filter means queues of this cell (as well)."""
        return True

    def get_proxies(self, session: Session) -> SessionProxies:
        """Its lines to other cells; it has them from now on."""
        return SessionProxies()

    def restore_subscription(
        self, session: Session, topic_filter: bytes, qos: i64, raw_options: list[str]
    ) -> None:
        """A far subscription from before a restart."""

    def send_will(self, cell: i64, will: Publish) -> None:
        """A will for a queue of another cell."""

    # ---- plain topics

    def publish(self, packet: Publish, session: Session, connection: Connection) -> None:
        """Give a plain publish to its receivers in all cells, and answer it when all have it."""

    def publish_will(self, will: Publish, session: Session) -> None: ...

    def stores_retained(self, topic: bytes) -> bool:
        """Whether the retained message of a topic is kept in this cell."""
        return True

    def forward_shared(self, message: Publish, share: SharedSubscription) -> None:
        """A shared message has no member left here to go to: perhaps another cell has one."""

    def change_interest(self, topic_filter: bytes, count: int) -> None:
        """A filter of this cell has so many subscriptions more, or less."""

    def on_bindings_changed(self, bindings: list[TopicBinding]) -> None: ...

    def after_interest_known(
        self, on_known: Callable[[], None], on_timeout: Callable[[], None]
    ) -> None:
        """Call `known` when every node has heard of the filters of this cell, or `late` if one does
        not in time."""

    def send_retained(self, subscription: Subscription) -> None:
        """Give a subscription what is retained for it in other cells."""
