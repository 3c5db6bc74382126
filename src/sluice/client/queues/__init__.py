"""Publishing to queues, consuming from them, requests and replies."""

from sluice.client.queues.consumer import Consumer
from sluice.client.queues.delivery import BROKER_PROPERTIES, Delivery, sanitize_text
from sluice.client.queues.publisher import (
    QUEUE_PREFIX,
    OutgoingMessage,
    PartialFailure,
    Publisher,
    SendOptions,
)
from sluice.client.queues.replies import (
    REPLY_QUEUE_PREFIX,
    ResponseInfo,
    make_reply,
    response_info,
    response_topic_of,
)
from sluice.client.queues.requester import Requester, RequestFailed, RequestTimeout

__all__ = [
    "BROKER_PROPERTIES",
    "QUEUE_PREFIX",
    "REPLY_QUEUE_PREFIX",
    "Consumer",
    "Delivery",
    "OutgoingMessage",
    "PartialFailure",
    "Publisher",
    "RequestFailed",
    "RequestTimeout",
    "Requester",
    "ResponseInfo",
    "SendOptions",
    "make_reply",
    "response_info",
    "response_topic_of",
    "sanitize_text",
]
