"""The router, and what connects it with sessions: CONNECT and SUBSCRIBE, restart, other cells."""

from sluice.broker.routing.cluster_port import (
    CLIENT_CLAIM,
    LOCAL_CELL,
    NO_USER_PROPERTIES,
    TAKEN_OVER,
    ClientClaim,
    ClusterPort,
    RemoteDelivery,
    SessionProxies,
    SessionProxy,
)
from sluice.broker.routing.commit_forwarder import DeferredPublish
from sluice.broker.routing.enforcement import enforce_all_grants, enforce_grant
from sluice.broker.routing.registry import NEVER_EXPIRES, SessionRegistry
from sluice.broker.routing.router import BackpressureListener, Router
from sluice.broker.routing.session_restore import SessionRestore
from sluice.broker.routing.subscribe import handle_subscribe, handle_unsubscribe

__all__ = [
    "CLIENT_CLAIM",
    "LOCAL_CELL",
    "NEVER_EXPIRES",
    "NO_USER_PROPERTIES",
    "TAKEN_OVER",
    "BackpressureListener",
    "ClientClaim",
    "ClusterPort",
    "DeferredPublish",
    "RemoteDelivery",
    "Router",
    "SessionProxies",
    "SessionProxy",
    "SessionRegistry",
    "SessionRestore",
    "enforce_all_grants",
    "enforce_grant",
    "handle_subscribe",
    "handle_unsubscribe",
]
