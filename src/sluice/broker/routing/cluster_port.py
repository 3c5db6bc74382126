"""The interface through which a broker reaches queues and topics of other cells.

The base classes are a single broker: it has no other cells. In a cluster, the package `cluster`
derives from them. A session receives messages from another cell as `RemoteDelivery`; it
uses `ClusterPort` or its `SessionProxies` for everything else. They are base classes and not
protocols: calling a native method is a jump, calling through a protocol is a lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64, mypyc_attr

from sluice.broker.ports import ConnectionPort, SessionListener
from sluice.broker.sessions import Delivery, SubscribeOptions
from sluice.wire.packets import Publish
from sluice.wire.reasons import QUOTA_EXCEEDED

if TYPE_CHECKING:
    from sluice.broker.sessions import Session, SharedSubscription, Subscription, TopicBinding

LOCAL_CELL: Final = -1  # as a cell number: this cell

# User property of a proxy's CONNECT: the client uses MQTT 3.1.1 and can send no delivery token.
NO_USER_PROPERTIES: Final = ("user-properties", "none")


# User property of a CONNECT that claims a client id at its own cell for a session elsewhere:
# a token of the session, then "named" if clients have users, and "again" after a broken stream.
CLIENT_CLAIM: Final = "client-claim"
TAKEN_OVER: Final = "another connection has taken over this client id"


@mypyc_attr(allow_interpreted_subclasses=True)
class ClientClaim:
    """The claim of a session of this cell to a client id of another cell."""

    def release(self) -> None:
        """Give the client id up, because no session uses the claim."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SessionProxy:
    """The connection of a session to another cell."""

    def on_acknowledged(self, delivery: RemoteDelivery, reason: i64) -> None:
        """Forward the client's acknowledgement of a delivery that came through this proxy."""


class RemoteDelivery(Delivery):
    """A QoS 1 message from another cell, until the client has acknowledged it to the proxy."""

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
        # Packet id on the proxy's connection, and the number of that connection.
        self.remote_packet_id: i64 = remote_packet_id
        self.connection_number: i64 = connection_number
        self.is_nacked: bool = False  # explicitly nacked: its PUBACK is no ack
        # The client has reconnected, and the remote cell has not confirmed the lease yet.
        self.needs_resend: bool = False
        self.is_from_queue = True

    def defer_resend(self) -> bool:
        self.needs_resend = True  # its cell resends it if it is still this client's
        return True

    def end_deferral(self) -> bool:
        is_deferred = self.needs_resend
        self.needs_resend = False
        return is_deferred

    def on_acknowledged(self, reason: i64) -> None:
        self.proxy.on_acknowledged(self, reason)

    def on_abandoned(self) -> None:
        self.proxy.on_acknowledged(self, QUOTA_EXCEEDED)


@mypyc_attr(allow_interpreted_subclasses=True)
class SessionProxies(SessionListener):
    """The proxies of one session in other cells."""

    def publish(
        self, cell: i64, packet: Publish, is_command: bool, connection: ConnectionPort
    ) -> None:
        """Publish to a queue of another cell; acknowledge after that cell has stored the message.

        `is_command`: the packet settles deliveries, or cancels or reschedules messages.
        """

    def subscribe(
        self,
        topic_filter: bytes,
        options: SubscribeOptions,
        on_reply: Callable[[int, str], None],
    ) -> None:
        """Join queues of other cells.

        `on_reply` receives the granted QoS, or a reason code and a text.
        """

    def unsubscribe(self, topic_filter: bytes) -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class ClusterPort:
    """The rest of the cluster, as one cell sees it."""

    def __init__(self) -> None:
        self.has_other_cells: bool = False

    def owns_client(self, client_id: str) -> bool:
        """Return whether a client id belongs to this cell."""
        return True

    def claim_client(
        self,
        connection: ConnectionPort,
        client_id: str,
        user: str,
        is_named: bool,
        window: int,
        on_done: Callable[[int, str], None],
    ) -> ClientClaim:
        """Claim a client id at its own cell, which ends all earlier sessions of the client.

        `on_done` receives a reason code and a text, in a later turn. `is_named`: clients have
        users, so only clients of the same user may take over a session.
        """
        return ClientClaim()

    def adopt_claim(self, session: Session, claim: ClientClaim) -> None:
        """Bind a claim to the session that it was made for."""

    # ---- queues

    def cell_for(self, topic: bytes, payload: bytes) -> i64:
        """Return the cell of a publish below `$queue/`, `$ECQ/` or `$admin/`."""
        return LOCAL_CELL

    def matches_remote(self, topic_filter: bytes) -> bool:
        """Return whether a filter below `$queue/` or `$admin/` matches queues of other cells."""
        return False

    def matches_local(self, topic_filter: bytes) -> bool:
        """Return whether such a filter matches queues of this cell."""
        return True

    def get_proxies(self, session: Session) -> SessionProxies:
        """Return the session's proxies; create them if needed."""
        return SessionProxies()

    def restore_subscription(
        self, session: Session, topic_filter: bytes, options: SubscribeOptions
    ) -> None:
        """Restore a remote subscription after a restart."""

    def send_will(self, cell: i64, will: Publish) -> None:
        """Publish a will to a queue of another cell."""

    # ---- plain topics

    def publish(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        """Publish to the recipients in all cells; acknowledge after all have the message."""

    def publish_will(self, will: Publish, session: Session) -> None: ...

    def stores_retained(self, topic: bytes) -> bool:
        """Return whether this cell stores the retained message of a topic."""
        return True

    def forward_shared(self, message: Publish, share: SharedSubscription) -> None:
        """Offer a shared message that has no member left here to other cells."""

    def change_interest(self, topic_filter: bytes, count: int) -> None:
        """Change the number of this cell's subscriptions to a filter by `count`."""

    def on_bindings_changed(self, bindings: list[TopicBinding]) -> None: ...

    def after_interest_known(
        self, on_known: Callable[[], None], on_timeout: Callable[[], None]
    ) -> None:
        """Call `on_known` after all nodes know the filters of this cell, else `on_timeout`."""

    def send_retained(self, subscription: Subscription) -> None:
        """Send a subscription the retained messages of other cells."""
