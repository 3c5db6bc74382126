"""Read protobuf requests into values for the admin service, or refuse and name the field.

Protobuf cannot distinguish an unset plain number from 0, so 0 means the default.
"""

from __future__ import annotations

import json
from typing import Final, Literal, NoReturn

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.interceptor import InvalidRequest
from sluice.admin.model import DeadLetterFilter, MessageFilter, OutgoingMessage
from sluice.admin.queries import MAX_EXAMINED
from sluice.errors import InvalidQueueConfig

QUEUE_LIMITS: Final = (1000, 10_000)  # default and maximum
MESSAGE_LIMITS: Final = (50, 1000)
DEAD_LETTER_LIMITS: Final = (1000, 100_000)
EXAMINED_LIMITS: Final = (10_000, MAX_EXAMINED)
PAYLOAD_LIMITS: Final = (65_536, 16 << 20)
SINGLE_PAYLOAD_LIMITS: Final = (1 << 20, 16 << 20)

MAX_TIMESTAMP_SECONDS: Final = 253_402_300_800  # protobuf's timestamps end with the year 9999
MAX_DURATION_SECONDS: Final = 3_153_600_000  # 36,500 days, as for the delay of an MQTT publish


def read_limit(value: int, bounds: tuple[int, int], field: str) -> int:
    default, maximum = bounds
    if not 0 <= value <= maximum:
        raise InvalidRequest(f"{field} is {value}", f"Give 1 to {maximum:,}, or 0 for {default:,}")
    return value or default


def read_optional_number(
    request: pb.PeekMessagesRequest, field: Literal["partition", "start"]
) -> int:
    """Return a partition or a sequence; -1 when it is not set."""
    if not request.HasField(field):
        return -1
    value: int = getattr(request, field)
    if value < 0:
        raise InvalidRequest(f"{field} is {value}", "Give 0 or more, or leave it out")
    return value


def require_text(value: str, field: str, expected: str) -> str:
    if not value:
        raise InvalidRequest(f"{field} is empty", f"Give {expected}")
    return value


def read_timestamp(time: Timestamp, field: str) -> float:
    """Return seconds since 1970; 0.0 when it is not set."""
    if not 0 <= time.seconds < MAX_TIMESTAMP_SECONDS or not 0 <= time.nanos < 1_000_000_000:
        raise InvalidRequest(f"{field} is not a time", "Give one from 1970 to the year 9999")
    seconds: float = time.seconds + time.nanos / 1e9
    return seconds


def read_duration(duration: Duration, field: str) -> float:
    """Return seconds; 0.0 when it is not set."""
    if not 0 <= duration.seconds <= MAX_DURATION_SECONDS or not 0 <= duration.nanos < 1_000_000_000:
        raise InvalidRequest(f"{field} is not a duration", "Give 0 to 36,500 days")
    seconds: float = duration.seconds + duration.nanos / 1e9
    return seconds


def parse_config_json(text: str) -> object:
    if not text:
        raise InvalidQueueConfig(
            "config_json is empty", 'Send JSON such as {"name": "tasks", "partitions": 4}'
        )
    try:
        config: object = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as fault:
        raise InvalidQueueConfig(
            f"config_json is not JSON: {fault}",
            'Send JSON such as {"name": "tasks", "partitions": 4}',
        ) from None
    return config


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def read_filter(request_filter: pb.LetterFilter) -> DeadLetterFilter:  # words: allowed
    return DeadLetterFilter(
        reason=request_filter.reason,
        group=request_filter.group,
        since=read_timestamp(request_filter.since, "filter.since"),
        until=read_timestamp(request_filter.until, "filter.until"),
        contains=request_filter.contains,
        error=request_filter.error,
    )


def read_message_filter(request_filter: pb.MessageFilter) -> MessageFilter:
    return MessageFilter(
        key=request_filter.key,
        state=request_filter.state,
        since=read_timestamp(request_filter.since, "filter.since"),
        until=read_timestamp(request_filter.until, "filter.until"),
        contains=request_filter.contains,
    )


def read_new_time(
    request: pb.RescheduleMessageRequest | pb.RescheduleMessagesRequest,
) -> tuple[float | None, float]:
    """Return the delay, None if it is not set, and the time, 0.0 if it is not set."""
    has_delay = request.WhichOneof("when") == "delay"
    return (
        read_duration(request.delay, "delay") if has_delay else None,
        read_timestamp(request.deliver_at, "deliver_at"),
    )


def read_outgoing_message(request: pb.PublishRequest) -> OutgoingMessage:
    if not 0 <= request.priority <= 9:
        raise InvalidRequest(f"priority is {request.priority}", "Give 0 to 9; higher goes first")
    return OutgoingMessage(
        payload=request.payload,
        message_id=request.message_id,
        key=request.key,
        priority=request.priority,
        delay=read_duration(request.delay, "delay"),
        deliver_at=read_timestamp(request.deliver_at, "deliver_at"),
        expiry=read_duration(request.expiry, "expiry"),
        content_type=request.content_type,
        response_topic=request.response_topic,
        correlation_data=request.correlation_data,
        properties=[(one.name, one.value) for one in request.properties],
    )
