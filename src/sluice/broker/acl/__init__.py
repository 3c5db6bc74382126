"""Access rules, the rights of one client, and the interface to authentication."""

from sluice.broker.acl.access import (
    AccessControl,
    AnonymousAccess,
    AuthCallback,
    AuthResult,
    PeerInfo,
)
from sluice.broker.acl.acl import (
    ACTIONS,
    CONNECT,
    EXACT,
    PUBLISH,
    QUEUE_ACTIONS,
    QUEUE_ADMIN,
    SUBSCRIBE,
    TOPIC_ACTIONS,
    AccessControlList,
    Rule,
    clause_for_filter,
    clause_for_topic,
    covers,
    matches_glob,
    overlaps,
)
from sluice.broker.acl.client_pattern import ClientPattern
from sluice.broker.acl.grants import (
    MAY_NOT_PUBLISH,
    MAY_NOT_SUBSCRIBE,
    Grant,
    will_error,
)

__all__ = [
    "ACTIONS",
    "CONNECT",
    "EXACT",
    "MAY_NOT_PUBLISH",
    "MAY_NOT_SUBSCRIBE",
    "PUBLISH",
    "QUEUE_ACTIONS",
    "QUEUE_ADMIN",
    "SUBSCRIBE",
    "TOPIC_ACTIONS",
    "AccessControl",
    "AccessControlList",
    "AnonymousAccess",
    "AuthCallback",
    "AuthResult",
    "ClientPattern",
    "Grant",
    "PeerInfo",
    "Rule",
    "clause_for_filter",
    "clause_for_topic",
    "covers",
    "matches_glob",
    "overlaps",
    "will_error",
]
