"""The client library of Sluice: MQTT 3.1.1 and 5.0 for asyncio, with the broker's wire code."""

from sluice.backoff import Backoff
from sluice.client.client import Client
from sluice.client.errors import (
    ClientClosed,
    ClientError,
    ConnectFailed,
    ConnectionLost,
    ConnectRefused,
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
from sluice.client.queues.consumer import Consumer
from sluice.client.queues.delivery import Delivery
from sluice.client.queues.publisher import OutgoingMessage, PartialFailure, Publisher
from sluice.client.queues.replies import ResponseInfo, response_info
from sluice.client.queues.requester import RequestFailed, RequestTimeout
from sluice.client.topics.dead_letter_envelope import DeadLetter, read_dead_letter
from sluice.client.topics.handler_loop import UnacceptableLimitReached
from sluice.client.topics.replay import ReplayResult, replay_dead_letters
from sluice.client.topics.subscription import (
    Subscription,
    SupportsDeadLetters,
    SupportsInvalidMessages,
    TopicSubscription,
)
from sluice.client.topics.topic_consumer import ConsumerFactory, TopicConsumer
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
