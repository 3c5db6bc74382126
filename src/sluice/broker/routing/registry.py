"""All sessions by client id: their start, takeover, disconnection, end, and their wills.

              CONNECT               connection ends
    (none) ──────────▶ connected ────────────────────▶ disconnected ──session expiry──▶ (none)
                        ▲     │  expiry 0: ends at once     │
                        └─────┴──── CONNECT: taken over ────┘
                                    clean start: ends, and a new one begins

The broker publishes a will when its delay has passed, or earlier if the session ends, unless the
client disconnected normally or reconnected before [MQTT-3.1.2-8, 3.1.3-9].
"""

from __future__ import annotations

from typing import Final

from sluice.broker.ports import ConnectionPort
from sluice.broker.routing.router import Router
from sluice.broker.sessions import Session
from sluice.broker.turn import Scheduler
from sluice.clock import Deadline
from sluice.wire.packets import Publish
from sluice.wire.reasons import ADMINISTRATIVE_ACTION, SESSION_TAKEN_OVER

NEVER_EXPIRES: Final = 0xFFFF_FFFF  # session expiry interval without expiry


class SessionRegistry:
    def __init__(self, router: Router, scheduler: Scheduler) -> None:
        self._router = router
        self._scheduler = scheduler
        self.sessions: dict[str, Session] = {}

    def open_session(
        self, connection: ConnectionPort, client_id: str, clean_start: bool
    ) -> tuple[Session, bool]:
        """Return the session for a CONNECT, and whether it existed before."""
        session = self.sessions.get(client_id)
        if session is not None and session.connection is not None:
            session.connection.end(
                SESSION_TAKEN_OVER, "another connection has taken over this client id"
            )
            session = self.sessions.get(client_id)  # it may have ended with its connection
        if session is not None and clean_start:
            self.end_session(session)
            session = None
        is_present = session is not None
        if session is None:
            session = Session(client_id, self._router.session_services)
            self.sessions[client_id] = session
        if connection.is_from_cluster:
            return session, is_present  # a client of another cell, which counts it
        counters = self._router.counters
        counters.clients_connected += 1
        counters.clients_maximum = max(counters.clients_maximum, counters.clients_connected)
        return session, is_present

    def on_connected(self, session: Session, connection: ConnectionPort) -> None:
        """Attach `session` to its connection, after its CONNACK was written."""
        session.attach(connection)
        self._router.namespaces.on_attached(session)
        session.proxies.on_attached()

    def on_disconnected(self, session: Session) -> None:
        """Detach `session` from its connection, which has ended."""
        now = self._router.turn.now
        session.connection = None
        session.disconnected_at = now
        self._router.counters.clients_connected -= 0 if session.is_proxy else 1
        will = session.will
        if session.expiry_seconds == 0:
            self.end_session(session)
            return
        if will is not None:
            if session.will_delay == 0:
                self._publish_will(session)
            else:
                self._scheduler.wake_at(now + session.will_delay, _DelayedWill(self, session, will))
        self._router.namespaces.on_detached(session)
        session.proxies.on_detached()
        session.retained_lookup.resume()  # messages for a persistent session are stored for it
        if session.expiry_seconds != NEVER_EXPIRES:
            self._scheduler.wake_at(now + session.expiry_seconds, _SessionExpiry(self, session))

    def disconnect(self, session: Session, reason_string: str) -> None:
        """End the connection of `session`, if it has one, by administrative action."""
        if session.connection is not None:
            session.connection.end(ADMINISTRATIVE_ACTION, reason_string)

    def end_session(self, session: Session) -> None:
        """End `session`, publish its will and delete its state."""
        if self.sessions.get(session.client_id) is session:
            del self.sessions[session.client_id]
        session.disconnected_at = 0.0  # makes its expiry deadline obsolete
        self._publish_will(session)
        self._router.end_session(session)

    def restore(self, session: Session) -> None:
        """Restore a session after a restart; its expiry starts again."""
        self.sessions[session.client_id] = session
        session.disconnected_at = self._router.turn.now
        if session.expiry_seconds != NEVER_EXPIRES:
            self._scheduler.wake_at(
                session.disconnected_at + session.expiry_seconds, _SessionExpiry(self, session)
            )

    def is_connected(self, client_id: str) -> bool:
        session = self.sessions.get(client_id)
        return session is not None and session.connection is not None

    def on_expired(self, session: Session) -> None:
        self._router.counters.sessions_expired += 1
        self.end_session(session)

    def on_will_due(self, session: Session) -> None:
        self._publish_will(session)

    def _publish_will(self, session: Session) -> None:
        will = session.will
        if will is None:
            return
        session.will = None
        if session.grant is not None and not session.grant.may_publish(will):
            return  # the rules have changed since CONNECT
        if will.expiry_seconds >= 0:
            will.expires_at = self._router.turn.now + float(will.expiry_seconds)
        self._router.namespaces.find(will.topic).publish_will(will, session)


class _SessionExpiry(Deadline):
    def __init__(self, registry: SessionRegistry, session: Session) -> None:
        self._registry = registry
        self._session = session
        self._disconnected_at: float = session.disconnected_at

    def is_obsolete(self) -> bool:
        return self._session.disconnected_at != self._disconnected_at  # the client has reconnected

    def fire(self, now: float) -> float:
        self._registry.on_expired(self._session)
        return 0.0


class _DelayedWill(Deadline):
    def __init__(self, registry: SessionRegistry, session: Session, will: Publish) -> None:
        self._registry = registry
        self._session = session
        self._will = will

    def is_obsolete(self) -> bool:
        # The will was published at the session's end, or replaced on reconnect.
        return self._session.will is not self._will

    def fire(self, now: float) -> float:
        self._registry.on_will_due(self._session)
        return 0.0
