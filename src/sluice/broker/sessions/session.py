"""One client's session: who it is, what it has subscribed to, and its connection, if it has one.

A session outlives its connections. `InboundQos` owns what the client sends at QoS 1 and 2,
`OutboundQos` what is sent to it. Namespaces and other cells follow a session as listeners. A
session decides; it moves no bytes.
"""

from __future__ import annotations

from mypy_extensions import i64

from sluice.broker.acl import Grant
from sluice.broker.ports import (
    NO_RETAINED_LOOKUP,
    NO_SESSION_LISTENER,
    ConnectionPort,
    RetainedLookup,
    SessionListener,
)
from sluice.broker.sessions.inbound import InboundQos
from sluice.broker.sessions.inflight import Delivery
from sluice.broker.sessions.outbound import OutboundQos
from sluice.broker.sessions.services import SessionServices
from sluice.broker.sessions.subscribe_options import SubscribeOptions
from sluice.broker.sessions.subscriptions import Subscription
from sluice.queues.compacted import OwnerSubscriber
from sluice.queues.names import make_identity
from sluice.wire.packets import V5, Publish


class Session:
    def __init__(self, client_id: str, services: SessionServices) -> None:
        self.client_id: str = client_id
        self.connection: ConnectionPort | None = None
        self.inbound: InboundQos = InboundQos(self, services)
        self.outbound: OutboundQos = OutboundQos(self, services)
        self.grant: Grant | None = None  # None: everything is allowed
        self.user: str | None = None  # the session's user; None: unknown since the restart
        self.identity: str = client_id  # identity of its deliveries; see `set_user`
        self.version: i64 = V5
        self.expiry_seconds: int = 0  # how long it outlives its connection
        self.will: Publish | None = None
        self.will_delay: int = 0
        self.disconnected_at: float = 0.0  # when the last connection ended; 0.0 while connected
        self.has_ended: bool = False
        # The number under which it is stored; 0: it ends with its connection, or with the broker.
        self.persistent_id: int = 0
        self.subscriptions: dict[bytes, Subscription] = {}
        self.subscription_bytes: int = 0  # see `estimate_filter_bytes`
        # Set while retained messages are looked up for this session.
        self.retained_lookup: RetainedLookup = NO_RETAINED_LOOKUP
        self.queue_requests: dict[bytes, SubscribeOptions] = {}  # queue subscriptions, by filter
        # Set while it is subscribed to its exclusive queue.
        self.exclusive_subscriber: OwnerSubscriber | None = None
        self.wrong_tokens: int = 0  # settlements with a delivery token of another client
        # Its home is another cell: its requests here apply to this cell alone.
        self.is_proxy: bool = False
        # Its client uses MQTT 3.1.1, here or in its home cell.
        self.lacks_user_properties: bool = False
        self.proxies: SessionListener = NO_SESSION_LISTENER  # its proxies in other cells

    def protocol_name(self) -> str:
        return "MQTT 5.0" if self.version == V5 else "MQTT 3.1.1"

    def set_user(self, user: str | None) -> None:
        """Set the user of the session; None and the empty string mean no user."""
        self.user = user
        self.identity = make_identity(self.client_id, user or "")

    def attach(self, connection: ConnectionPort) -> None:
        """Attach a connection: resend unacknowledged deliveries, then send queued ones."""
        self.connection = connection
        self.disconnected_at = 0.0
        self.inbound.begin_connection()
        self.outbound.begin_connection()

    def on_writable(self) -> None:
        """Resume deliveries after the connection became writable."""
        self.outbound.resume_sending()
        self.outbound.on_writable()
        self.proxies.on_writable()

    def end_and_collect(self) -> list[Delivery]:
        """End the session and return its deliveries; shared ones can go to another member."""
        self.has_ended = True
        self.inbound.end()
        return self.outbound.end_and_collect()
