"""The client library of Sluice: MQTT 3.1.1 and 5.0 for asyncio, with the broker's wire code."""

from sluice.backoff import Backoff
from sluice.client.client import Client
from sluice.client.errors import (
    ClientClosed,
    ClientError,
    ConnectFailed,
    ConnectionLost,
    ConnectRefused,
    PublishesFailed,
    PublishRefused,
    QueueConfigRefused,
    Refusal,
    ServerDisconnected,
    SubscribeRefused,
    TooManyUnconfirmed,
    UnsubscribeRefused,
    Unsupported,
)
from sluice.client.message import Message
from sluice.client.net import Confirm
from sluice.client.options import Will
from sluice.client.outcomes import Reject, Retry
from sluice.client.payload_codecs import UnreadablePayload
from sluice.client.protocol import Connected, PublishResult, ServerInfo
from sluice.client.queues import (
    Consumer,
    Delivery,
    OutgoingMessage,
    PartialFailure,
    Publisher,
    RequestFailed,
    RequestTimeout,
    ResponseInfo,
    response_info,
)
from sluice.client.topics import (
    ConsumerFactory,
    DeadLetter,
    ReplayResult,
    Subscription,
    SupportsDeadLetters,
    SupportsInvalidMessages,
    TopicConsumer,
    TopicSubscription,
    UnacceptableLimitReached,
    read_dead_letter,
    replay_dead_letters,
)
from sluice.wire.properties import Properties

__all__ = [
    "Backoff",
    "Client",
    "ClientClosed",
    "ClientError",
    "Confirm",
    "ConnectFailed",
    "ConnectRefused",
    "Connected",
    "ConnectionLost",
    "Consumer",
    "ConsumerFactory",
    "DeadLetter",
    "Delivery",
    "Message",
    "OutgoingMessage",
    "PartialFailure",
    "Properties",
    "PublishRefused",
    "PublishResult",
    "Publisher",
    "PublishesFailed",
    "QueueConfigRefused",
    "Refusal",
    "Reject",
    "ReplayResult",
    "RequestFailed",
    "RequestTimeout",
    "ResponseInfo",
    "Retry",
    "ServerDisconnected",
    "ServerInfo",
    "SubscribeRefused",
    "Subscription",
    "SupportsDeadLetters",
    "SupportsInvalidMessages",
    "TooManyUnconfirmed",
    "TopicConsumer",
    "TopicSubscription",
    "UnacceptableLimitReached",
    "UnreadablePayload",
    "UnsubscribeRefused",
    "Unsupported",
    "Will",
    "read_dead_letter",
    "replay_dead_letters",
    "response_info",
]
