"""Applies changed access rules to sessions that were created under other rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.broker.acl import Grant

if TYPE_CHECKING:
    from sluice.broker.routing.registry import SessionRegistry
    from sluice.broker.routing.router import Router
    from sluice.broker.sessions import Session


def enforce_grant(router: Router, session: Session, grant: Grant) -> None:
    """Apply the current rules to one session.

    Unsubscribe it from filters that are no longer allowed, and drop queued messages that it may not
    receive. The client is not notified: MQTT has no packet with which a server ends one
    subscription.
    """
    for topic_filter in list(session.subscriptions):
        if not grant.may_subscribe(topic_filter):
            router.unsubscribe(session, topic_filter)
    for topic_filter in list(session.queue_requests):
        if not grant.may_subscribe(topic_filter):
            router.namespaces.find(topic_filter).unsubscribe(session, topic_filter)
    session.outbound.drop_unauthorized(grant)
    if session.persistent_id:
        router.session_store.store_session(session)


def enforce_all_grants(router: Router, registry: SessionRegistry) -> None:
    """Apply changed rules to all existing sessions."""
    for session in list(registry.sessions.values()):
        if session.grant is not None:
            enforce_grant(router, session, session.grant)
