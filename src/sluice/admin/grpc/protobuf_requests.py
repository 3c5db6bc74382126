"""What callers ask, read from protobuf: values that the admin service takes, or a refusal that names the field.

Protobuf has no "not given" for a plain number: 0 stands for it, and means the default.
"""

from __future__ import annotations

import json
from typing import Final, Literal, NoReturn

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.interceptor import InvalidRequest
from sluice.admin.views import LetterFilter, Outgoing
from sluice.errors import InvalidQueueConfig

QUEUES: Final = (1000, 10_000)  # default and most
MESSAGES: Final = (50, 1000)
LETTERS: Final = (1000, 100_000)
PAYLOAD_BYTES: Final = (65_536, 16 << 20)
WHOLE_PAYLOAD_BYTES: Final = (1 << 20, 16 << 20)

LATEST: Final = 253_402_300_800  # protobuf's times end with the year 9999
LONGEST: Final = 3_153_600_000  # 36,500 days, as for the delay of a publish over MQTT


def count(value: int, bounds: tuple[int, int], field: str) -> int:
    default, most = bounds
    if not 0 <= value <= most:
        raise InvalidRequest(f"{field} is {value}", f"Give 1 to {most:,}, or 0 for {default:,}")
    return value or default


def place(request: pb.PeekMessagesRequest, field: Literal["partition", "start"]) -> int:
    """A partition or a sequence; -1 when it is not given."""
    if not request.HasField(field):
        return -1
    value: int = getattr(request, field)
    if value < 0:
        raise InvalidRequest(f"{field} is {value}", "Give 0 or more, or leave it out")
    return value


def given(value: str, field: str, kinds: str) -> str:
    if not value:
        raise InvalidRequest(f"{field} is empty", f"Give {kinds}")
    return value


def seconds_of(time: Timestamp, field: str) -> float:
    """Since 1970; 0.0 when it is not set."""
    if not 0 <= time.seconds < LATEST or not 0 <= time.nanos < 1_000_000_000:
        raise InvalidRequest(f"{field} is not a time", "Give one from 1970 to the year 9999")
    seconds: float = time.seconds + time.nanos / 1e9
    return seconds


def length_of(duration: Duration, field: str) -> float:
    """In seconds; 0.0 when it is not set."""
    if not 0 <= duration.seconds <= LONGEST or not 0 <= duration.nanos < 1_000_000_000:
        raise InvalidRequest(f"{field} is not a duration", "Give 0 to 36,500 days")
    seconds: float = duration.seconds + duration.nanos / 1e9
    return seconds


def config_of(text: str) -> object:
    if not text:
        raise InvalidQueueConfig(
            "config_json is empty", 'Send JSON such as {"name": "tasks", "partitions": 4}'
        )
    try:
        config: object = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as fault:
        raise InvalidQueueConfig(
            f"config_json is not JSON: {fault}", 'Send JSON such as {"name": "tasks", "partitions": 4}'
        ) from None
    return config


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON")


def filter_of(given: pb.LetterFilter) -> LetterFilter:
    return LetterFilter(
        reason=given.reason,
        group=given.group,
        since=seconds_of(given.since, "filter.since"),
        until=seconds_of(given.until, "filter.until"),
        contains=given.contains,
    )


def outgoing_of(request: pb.PublishRequest) -> Outgoing:
    if not 0 <= request.priority <= 9:
        raise InvalidRequest(f"priority is {request.priority}", "Give 0 to 9; higher goes first")
    return Outgoing(
        payload=request.payload,
        message_id=request.message_id,
        key=request.key,
        priority=request.priority,
        delay=length_of(request.delay, "delay"),
        deliver_at=seconds_of(request.deliver_at, "deliver_at"),
        expiry=length_of(request.expiry, "expiry"),
        content_type=request.content_type,
        response_topic=request.response_topic,
        correlation_data=request.correlation_data,
        properties=[(one.name, one.value) for one in request.properties],
    )
