"""Sessions: subscriptions, QoS in both directions, retained messages, and their records."""

from sluice.broker.sessions.inflight import UNBUILT_PACKET, Delivery
from sluice.broker.sessions.outbound import OutboundQos
from sluice.broker.sessions.retained_messages import (
    RETAINED_FULL,
    STEPS_PER_SLICE,
    Match,
    RetainedMessages,
    RetainedWalk,
    WalkFilter,
)
from sluice.broker.sessions.services import DeliveryForwarder, SessionServices
from sluice.broker.sessions.session import Session
from sluice.broker.sessions.session_store import (
    PENDING_RETAINED_KEY,
    SessionStore,
    VolatileSessionStore,
    decode_message,
)
from sluice.broker.sessions.subscribe_options import SubscribeOptions, decode_options, read_options
from sluice.broker.sessions.subscriptions import (
    Recipient,
    Route,
    SharedSubscription,
    Subscription,
    SubscriptionTree,
    TopicBinding,
    encode_subscription_ids,
    estimate_filter_bytes,
)

__all__ = [
    "PENDING_RETAINED_KEY",
    "RETAINED_FULL",
    "STEPS_PER_SLICE",
    "UNBUILT_PACKET",
    "Delivery",
    "DeliveryForwarder",
    "Match",
    "OutboundQos",
    "Recipient",
    "RetainedMessages",
    "RetainedWalk",
    "Route",
    "Session",
    "SessionServices",
    "SessionStore",
    "SharedSubscription",
    "SubscribeOptions",
    "Subscription",
    "SubscriptionTree",
    "TopicBinding",
    "VolatileSessionStore",
    "WalkFilter",
    "decode_message",
    "decode_options",
    "encode_subscription_ids",
    "estimate_filter_bytes",
    "read_options",
]
