"""The parts of one broker, wired together, and the lifecycle of its connections.

The broker owns what exists once: the turn, the scheduler, the counters, the router, the sessions
and the open connections. Nothing here is on the path of a message.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final

from sluice.broker.acl import AccessControl
from sluice.broker.limits import Limits
from sluice.broker.namespaces import IncomingPublishes, PlainTopics, ReservedTopics
from sluice.broker.net import Connection, ConnectionLimits, ConnectionTimeout, Handshake
from sluice.broker.routing import Router, SessionRegistry
from sluice.broker.sessions import SessionStore, VolatileSessionStore
from sluice.broker.turn import Scheduler, Turn
from sluice.clock import Clock, Deadline, steady_time
from sluice.errors import ProtocolViolation, UnsupportedVersion
from sluice.metrics import Counters
from sluice.queues.log import BrokerState
from sluice.wire.packets import V5
from sluice.wire.reasons import SERVER_SHUTTING_DOWN, get_reason_name

NO_DESCRIPTORS: Final = (
    "nearly all files that this process may open are open: "
    "raise the limit (ulimit -n), or set mqtt.max_connections below it"
)


class Broker:
    """One broker.

    `loop` is an asyncio event loop, or an object with its `call_soon` and `call_later`. `log` takes
    an event and its fields. `state` stores sessions and retained messages; without it they end with
    the broker.
    """

    def __init__(
        self,
        loop: Any,
        limits: Limits,
        access: AccessControl,
        log: Callable[[str, dict[str, object]], None],
        clock: Clock = steady_time,
        connection_limits: ConnectionLimits | None = None,
        state: BrokerState | None = None,
    ) -> None:
        self.limits: Limits = limits
        self.access: AccessControl = access
        self.log = log
        self.counters: Counters = Counters()
        self.turn: Turn = Turn(loop.call_soon, clock)
        self.scheduler: Scheduler = Scheduler(self.turn, loop.call_later)
        session_store = VolatileSessionStore() if state is None else SessionStore(state, self.turn)
        self.router: Router = Router(limits, self.turn, self.counters, session_store)
        namespaces = self.router.namespaces
        plain = PlainTopics(self.router)
        namespaces.serve_plain(plain)
        reserved = ReservedTopics(self.router)
        namespaces.register(b"$SYS/", reserved)
        namespaces.register_topic(b"$SYS", reserved)
        self.incoming: IncomingPublishes = IncomingPublishes(
            limits, self.turn, self.counters, namespaces, plain
        )
        self.registry: SessionRegistry = SessionRegistry(self.router, self.scheduler)
        # An instance that is passed in is shared with other cells.
        self.connection_limits: ConnectionLimits = (
            ConnectionLimits(limits) if connection_limits is None else connection_limits
        )
        self.handshake: Handshake = Handshake(self)
        self.connections: set[Connection] = set()
        self.started_at: float = self.turn.now
        self.stopping: bool = False
        self._when_empty: Callable[[], object] | None = None

    def connect(self) -> Connection:
        """Create a connection for a new socket; every listener's protocol factory."""
        return Connection(self)

    def wake_at(self, when: float, deadline: Deadline) -> None:
        self.scheduler.wake_at(when, deadline)

    def on_opened(self, connection: Connection) -> None:
        self.counters.connections_opened += 1
        self.counters.connections_open += 1
        self.connections.add(connection)
        high = self.limits.write_buffer_high
        connection.transport.set_write_buffer_limits(high, high // 4)
        self.wake_at(self.turn.now + self.limits.connect_timeout, ConnectionTimeout(connection))
        last = self.limits.max_descriptor
        if last and connection.file_descriptor() > last:
            self.counters.connections_refused += 1
            self.log("connect refused", {"peer": connection.peer(), "why": NO_DESCRIPTORS})
            connection.abort()
        elif not self.connection_limits.admit_socket(connection):
            self.counters.connections_refused += 1
            connection.abort()

    def on_closed(self, connection: Connection) -> None:
        self.counters.connections_open -= 1
        self.connections.discard(connection)
        self.connection_limits.on_closed(connection)
        if self._when_empty is not None and not self.connections:
            self._when_empty()

    def on_violation(self, connection: Connection, violation: ProtocolViolation) -> None:
        """Log a protocol violation. Before the CONNACK, refuse the CONNECT if there was one."""
        self.counters.protocol_violations += 1
        session = connection.session
        client = session.client_id if session is not None else ""
        self.log(
            "protocol violation",
            {"client": client, "peer": connection.peer(), "fault": str(violation)},
        )
        if session is None and (
            connection.version == V5 or isinstance(violation, UnsupportedVersion)
        ):
            if isinstance(violation, UnsupportedVersion) and violation.level > V5:
                connection.version = V5
            self.handshake.refuse(connection, violation.reason, str(violation))

    def on_refused(self, connection: Connection, reason: int, reason_string: str) -> None:
        self.counters.connections_refused += 1
        self.log(
            "connect refused",
            {"peer": connection.peer(), "reason": get_reason_name(reason), "why": reason_string},
        )

    def make_client_id(self) -> str:
        """Return an id for a client without one; 96 random bits do not collide."""
        while True:
            name = f"sluice-{secrets.token_hex(12)}"
            if self.router.cluster.owns_client(name):
                return name

    def stop(
        self,
        when_empty: Callable[[], object],
        reason: int = SERVER_SHUTTING_DOWN,
        reason_string: str = "the server is shutting down",
    ) -> None:
        """End all connections with `reason` and call `when_empty` after the last one has closed."""
        self.stopping = True
        self.router.namespaces.on_stopping()
        self._when_empty = when_empty
        self.turn.begin()
        if not self.connections:
            when_empty()
        for connection in list(self.connections):
            connection.end(reason, reason_string)

    def close(self) -> None:
        """Abort the remaining connections and stop the scheduler."""
        for connection in list(self.connections):
            connection.abort()
        self.scheduler.close()
