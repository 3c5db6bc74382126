"""Operations on clients: list them, show one, end a connection or a session.

A client is a session of this broker, with or without a connection. Proxies of sessions of other
cells do not count: each client is listed once, by the cell that has its session.
"""

from __future__ import annotations

import heapq
from itertools import islice
from typing import Final

from sluice.admin import model
from sluice.admin.broker_facade import BATCH_SIZE, BrokerFacade
from sluice.broker.namespaces import list_consumers
from sluice.broker.sessions import Session
from sluice.errors import ClientNotConnected, UnknownClient

NAMES_PER_TURN: Final = 4096  # sessions examined before the loop is yielded
MAX_SHOWN: Final = 1000  # subscriptions and queues of one client
KICK_REASON: Final = "an operator has ended this connection"


async def list_clients(
    facade: BrokerFacade, prefix: str, after: str, limit: int, connected: bool | None, user: str
) -> list[model.Client]:
    """Return clients by client id, starting after `after`; `connected` None: all."""
    facade.sync_clock()
    sessions = facade.broker.registry.sessions
    names = list(sessions)
    found: list[str] = []
    for start in range(0, len(names), NAMES_PER_TURN):
        batch = [
            name
            for name in names[start : start + NAMES_PER_TURN]
            if name > after
            and name.startswith(prefix)
            and _matches(sessions.get(name), connected, user)
        ]
        if batch:
            found = heapq.nsmallest(limit, [*found, *batch])
        await facade.yield_to_loop()
    views: list[model.Client] = []
    for nth, name in enumerate(found):
        if nth % BATCH_SIZE == BATCH_SIZE - 1:
            await facade.yield_to_loop()
        session = sessions.get(name)
        if session is not None:
            views.append(build_client_view(session))
    return views


def _matches(session: Session | None, connected: bool | None, user: str) -> bool:
    if session is None or session.is_proxy:
        return False
    if connected is not None and connected != (session.connection is not None):
        return False
    return not user or session.user == user


def has_session(facade: BrokerFacade, client: str) -> bool:
    session = facade.broker.registry.sessions.get(client)
    return session is not None and not session.is_proxy


def find_session(facade: BrokerFacade, client: str) -> Session:
    session = facade.broker.registry.sessions.get(client)
    if session is None or session.is_proxy:
        raise UnknownClient(client)
    return session


def build_client_view(session: Session) -> model.Client:
    connection = session.connection
    return model.Client(
        client=session.client_id,
        user=session.user or "",
        connected=connection is not None,
        protocol=session.protocol_name(),
        address="" if connection is None else connection.peer(),
        connected_at=0.0 if connection is None else float(connection.opened_at),
        disconnected_at=0.0 if connection is not None else float(session.disconnected_at),
        session_expiry=int(session.expiry_seconds),
        subscriptions=len(session.subscriptions) + len(session.queue_requests),
        inflight=len(session.outbound.inflight),
        queued=0 if session.outbound.queued is None else len(session.outbound.queued),
        queued_bytes=int(session.outbound.buffered_bytes),
        dropped=int(session.outbound.dropped_count),
    )


def build_client_detail(session: Session) -> model.ClientDetail:
    filters = {
        one: int(subscription.qos)
        for one, subscription in islice(session.subscriptions.items(), MAX_SHOWN)
    }
    for one, options in islice(session.queue_requests.items(), MAX_SHOWN):
        filters[one] = int(options.qos)
    consumers = [
        model.ClientConsumer(
            queue=str(consumer.queue),
            group="" if consumer.group is None else consumer.group.name,
            inflight=int(consumer.in_flight),
            prefetch=int(consumer.prefetch),
        )
        for consumer in islice(list_consumers(session), MAX_SHOWN)
    ]
    return model.ClientDetail(
        client=build_client_view(session),
        subscriptions=[
            model.ClientSubscription(one.decode("utf-8", "replace"), qos)
            for one, qos in sorted(filters.items())
        ],
        consumers=sorted(consumers, key=lambda one: (one.queue, one.group)),
    )


async def kick_client(facade: BrokerFacade, client: str, end_session: bool) -> model.Kicked:
    """End the connection of a client, and with `end_session` its session as well."""
    session = find_session(facade, client)
    was_connected = session.connection is not None
    if not was_connected and not end_session:
        raise ClientNotConnected(client)
    facade.begin_change()
    facade.broker.registry.disconnect(session, KICK_REASON)
    sessions = facade.broker.registry.sessions
    if end_session and sessions.get(client) is session:
        facade.broker.registry.end_session(session)
    is_gone = sessions.get(client) is not session
    await facade.wait_committed()
    return model.Kicked(disconnected=was_connected, session_ended=is_gone)
