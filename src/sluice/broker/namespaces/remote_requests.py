"""Requests for a namespace that concern other cells of a cluster; alone, a broker has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.broker.ports import ConnectionPort
from sluice.broker.sessions import SubscribeOptions
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.routing import Router
    from sluice.broker.sessions import Session


def forward_publish(
    router: Router, packet: Publish, session: Session, connection: ConnectionPort
) -> bool:
    """Publish in the cell that owns the topic; return False if it is this one."""
    if session.is_proxy:
        return False
    cluster = router.cluster
    cell = cluster.cell_for(packet.topic, packet.payload)
    if cell < 0:
        return False
    cluster.get_proxies(session).publish(cell, packet, False, connection)
    return True


def forward_will(router: Router, will: Publish) -> bool:
    """Publish a will in the cell that owns its topic; return False if it is this one."""
    cell = router.cluster.cell_for(will.topic, will.payload)
    if cell < 0:
        return False
    router.cluster.send_will(cell, will)
    return True


def restore_remote(
    router: Router, session: Session, topic_filter: bytes, options: SubscribeOptions
) -> bool:
    """Restore a subscription in other cells; return whether this cell has a part of it, too."""
    cluster = router.cluster
    if session.is_proxy or not cluster.matches_remote(topic_filter):
        return True
    cluster.restore_subscription(session, topic_filter, options)
    return cluster.matches_local(topic_filter)


def unsubscribe_remote(router: Router, session: Session, topic_filter: bytes) -> bool:
    """End a subscription in other cells; return whether the session had requested it."""
    cluster = router.cluster
    if not session.is_proxy and cluster.matches_remote(topic_filter):
        cluster.get_proxies(session).unsubscribe(topic_filter)
    return session.queue_requests.pop(topic_filter, None) is not None
