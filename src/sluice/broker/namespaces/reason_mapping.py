"""Map queue errors to MQTT reason codes: the one table of the MQTT API."""

from __future__ import annotations

from sluice.errors import (
    InvalidPayload,
    InvalidQueueConfig,
    InvalidQueueName,
    MessageTooLarge,
    NoRoom,
    NotHolder,
    QueueError,
    QueueFull,
    ResponsesFull,
    StaleDelivery,
    ThenElsewhere,
    ThenNotAllowed,
    TooManyIds,
    UnknownDelivery,
    UnknownGroup,
    UnknownMessage,
    UnknownQueue,
)
from sluice.wire.reasons import (
    IMPLEMENTATION_SPECIFIC_ERROR,
    NO_MATCHING_SUBSCRIBERS,
    NOT_AUTHORIZED,
    PAYLOAD_FORMAT_INVALID,
    QUOTA_EXCEEDED,
    TOPIC_FILTER_INVALID,
    TOPIC_NAME_INVALID,
    UNSPECIFIED_ERROR,
)


def get_reason_code(error: QueueError) -> int:
    """Return the MQTT reason code of a queue error."""
    # PUBACK and PUBREC have no "packet too large" [MQTT-3.4.2-1, 3.5.2-1]. A client that receives
    # a reason code that it does not know may end its connection and resend the message for ever.
    if isinstance(error, QueueFull | MessageTooLarge | ResponsesFull | NoRoom | TooManyIds):
        return QUOTA_EXCEEDED
    if isinstance(error, InvalidQueueName | UnknownQueue):
        return TOPIC_NAME_INVALID
    if isinstance(error, UnknownDelivery | UnknownGroup | UnknownMessage):
        return NO_MATCHING_SUBSCRIBERS
    if isinstance(error, NotHolder | ThenNotAllowed):
        return NOT_AUTHORIZED
    if isinstance(error, StaleDelivery):
        return IMPLEMENTATION_SPECIFIC_ERROR
    if isinstance(error, InvalidPayload | InvalidQueueConfig):
        return PAYLOAD_FORMAT_INVALID
    if isinstance(error, ThenElsewhere):
        return UNSPECIFIED_ERROR  # of no other refusal: a client can take the two steps itself
    return IMPLEMENTATION_SPECIFIC_ERROR


def get_suback_reason_code(error: QueueError) -> int:
    """Return the reason code for SUBACK, which has fewer reasons [MQTT-3.9.3-2]."""
    reason = get_reason_code(error)
    if reason == TOPIC_NAME_INVALID:
        return TOPIC_FILTER_INVALID
    if reason in (PAYLOAD_FORMAT_INVALID, NO_MATCHING_SUBSCRIBERS):
        return IMPLEMENTATION_SPECIFIC_ERROR
    return reason
