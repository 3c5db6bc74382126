"""Refusals of queues as MQTT reason codes: the one table of this door."""

from __future__ import annotations

from sluice.errors import (
    InvalidPayload,
    InvalidQueueConfig,
    InvalidQueueName,
    MessageTooLarge,
    NoRoom,
    QueueError,
    QueueFull,
    ResponsesFull,
    StaleDelivery,
    UnknownDelivery,
    UnknownGroup,
    UnknownQueue,
)
from sluice.wire.reasons import (
    IMPLEMENTATION_SPECIFIC_ERROR,
    NO_MATCHING_SUBSCRIBERS,
    PAYLOAD_FORMAT_INVALID,
    QUOTA_EXCEEDED,
    TOPIC_FILTER_INVALID,
    TOPIC_NAME_INVALID,
)


def reason_of(error: QueueError) -> int:
    """The MQTT reason for a refusal."""
    # PUBACK and PUBREC know no "packet too large" [MQTT-3.4.2-1, 3.5.2-1]: clients that look hang up on it, and send
    # the message again.
    if isinstance(error, QueueFull | ResponsesFull | NoRoom | MessageTooLarge):
        return QUOTA_EXCEEDED
    if isinstance(error, InvalidQueueName | UnknownQueue):
        return TOPIC_NAME_INVALID
    if isinstance(error, UnknownDelivery | UnknownGroup):
        return NO_MATCHING_SUBSCRIBERS
    if isinstance(error, StaleDelivery):
        return IMPLEMENTATION_SPECIFIC_ERROR
    if isinstance(error, InvalidPayload | InvalidQueueConfig):
        return PAYLOAD_FORMAT_INVALID
    return IMPLEMENTATION_SPECIFIC_ERROR


def subscribe_reason_of(error: QueueError) -> int:
    """The same for SUBACK, which knows fewer reasons [MQTT-3.9.3-2]."""
    reason = reason_of(error)
    if reason == TOPIC_NAME_INVALID:
        return TOPIC_FILTER_INVALID
    return IMPLEMENTATION_SPECIFIC_ERROR if reason == PAYLOAD_FORMAT_INVALID else reason
