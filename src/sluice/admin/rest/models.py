"""The responses of the REST API: the views of `admin.views` as JSON, field by field.

Times are ISO 8601 in UTC with milliseconds, null for never. Bytes are base64 beside their text,
which is null when they are not UTF-8. The models read the attributes of a view and document them;
they validate nothing that the service has decided.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    WithJsonSchema,
)

from sluice.admin.rest.params import format_iso_time


def _text(value: bytes | None, info: ValidationInfo) -> str | None:
    """Decode bytes as text; a cut payload may end inside a character, which is left out."""
    assert value is not None
    cut = info.data.get("size", 0) - len(value)
    for end in range(len(value), max(-1, len(value) - (4 if cut > 0 else 1)), -1):
        try:
            return value[:end].decode()
        except UnicodeDecodeError:
            continue
    return None


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


Time = Annotated[
    str | None,
    BeforeValidator(format_iso_time),
    WithJsonSchema(
        {
            "anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}],
            "examples": ["2030-01-31T12:00:00.000Z"],
        }
    ),
]
Text = Annotated[str | None, BeforeValidator(_text)]
Base64 = Annotated[str, BeforeValidator(_base64)]


class ViewModel(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class Ledger(ViewModel):
    """The ledger of one group: `enqueued` is the sum of the other fields."""

    enqueued: int
    waiting: int
    delivered: int
    retrying: int
    acked: int
    dead: int
    expired: int
    purged: int


class Consumer(ViewModel):
    client: str = Field(description="Client id", examples=["worker-1"])
    group: str
    partitions: list[int] = Field(
        description="Partitions that it serves; without one it gets messages without a key"
    )
    inflight: int = Field(description="Unsettled deliveries that it holds")
    prefetch: int
    priority: int
    exclusive: bool
    connected: bool = Field(description="False: the session exists without a connection")
    stalled: bool = Field(description="It missed a deadline and has settled nothing since")
    slow: bool = Field(description="Its connection does not keep up with deliveries")
    settled_at: Time = Field(description="Time of its last settlement; null: never")


class Group(ViewModel):
    name: str = Field(examples=["workers"])
    lag: int = Field(description="waiting + delivered + retrying")
    ledger: Ledger
    floors: list[int] = Field(description="Low watermark by partition: everything below is settled")
    oldest_at: Time = Field(description="Enqueue time of the oldest unsettled message")
    redelivered: int
    nacked: int
    consumers: list[Consumer]


class Partition(ViewModel):
    number: int
    first: int = Field(description="Oldest stored sequence")
    next: int = Field(description="Sequence of the next message")
    messages: int


class Queue(ViewModel):
    """One queue in a list: everything that is cheap to compute."""

    name: str = Field(examples=["tasks/image"])
    type: str = Field(examples=["work"])
    ordering: str = Field(examples=["partition"])
    partitions: int
    depth: int = Field(description="Messages that some group has not settled yet")
    max_depth: int
    bytes: int
    inflight: int = Field(description="Deliveries in flight")
    retrying: int
    dlq: str = Field(description="Name of its dead-letter queue; empty for none")
    dlq_depth: int
    enqueue_rate: float = Field(description="Per second")
    deliver_rate: float = Field(description="Per second")
    ack_rate: float = Field(description="Per second")
    enqueued: int
    acked: int
    duplicates: int = Field(description="Publishes with a known message id")
    refused: int
    retried: int
    dead: dict[str, int] = Field(
        description="Dead letters by reason", examples=[{"max_retries": 2}]
    )
    active_consumers: int
    partitions_assigned: int
    groups: int
    is_dead_letters: bool = Field(description="It is the dead-letter queue of another queue")
    created_at: Time


class QueueDetail(ViewModel):
    stats: Queue
    config: dict[str, Any] = Field(description="Complete, with defaults, durations as text")
    groups: list[Group]
    partitions: list[Partition]


class Message(ViewModel):
    """A stored message; `state` is that in the requested group, otherwise that in the queue."""

    message_id: str = Field(examples=["a-1f"])
    queue: str
    partition: int
    sequence: int
    key: str
    priority: int
    size: int = Field(description="Bytes of the whole payload; `payload` may be cut")
    payload: Text = Field(
        description="As text; null when it is not UTF-8", examples=["resize cat.png"]
    )
    payload_base64: Base64 = Field(validation_alias="payload", examples=["cmVzaXplIGNhdC5wbmc="])
    enqueued_at: Time
    expires_at: Time
    deliver_at: Time
    topic: str = Field(description="The plain topic from which a binding captured it, or empty")
    content_type: str
    response_topic: str
    correlation_data: Text
    correlation_data_base64: Base64 = Field(validation_alias="correlation_data")
    properties: list[tuple[str, str]] = Field(description="User properties of the publisher")
    headers: dict[str, str] = Field(
        description="Written by Sluice, such as the history of a dead letter"
    )
    state: str = Field(
        description="waiting, delayed, delivered, retrying or settled", examples=["waiting"]
    )
    attempt: int
    consumer: str = Field(description="The consumer that has the delivery, or had the last one")


class Owner(ViewModel):
    """The exclusive compacted queue of one client."""

    client: str = Field(description="Client id of the owner", examples=["car-1"])
    depth: int = Field(description="Unacknowledged values")
    keys: int = Field(description="Stored values, acknowledged or not: one for each key")
    bytes: int
    last_sequence: int = Field(description="Of the last written value; 0 when there is none")
    acked_sequence: int = Field(description="All values up to this one are acknowledged")
    acked_at: Time = Field(description="Time of its last acknowledgement")
    written_at: Time
    subscribed: bool
    connected: bool


class Published(ViewModel):
    message_id: str = Field(examples=["a-1f"])
    queue: str
    duplicate: bool = Field(
        description="The id was published within the dedup window: not stored again"
    )
    dead_letter: bool = Field(
        description="The queue was full, and the message became a dead letter"
    )


class Redriven(ViewModel):
    retried: int
    skipped: int = Field(description="In delivery, or their original queue is gone")
    left: int = Field(description="Matches of the filter beyond the limit")


class Event(ViewModel):
    """One step in the history of a message, for one group (empty: for all)."""

    at: Time
    what: str = Field(
        description="enqueued, delivered, extended, nacked, timed-out, vanished, released, acked,"
        " dead, redriven or expired"
    )
    group: str
    consumer: str
    attempt: int
    detail: str


class GroupState(ViewModel):
    """The state of a message in one group, and why."""

    group: str
    state: str = Field(
        description="waiting, delayed, delivered, retrying, acked, dead, expired, purged or"
        " not-for-it"
    )
    consumer: str
    attempt: int
    failures: int
    due: Time = Field(description="Of a retry or a delay")
    deadline: Time = Field(description="Of a delivery")
    why: str = Field(description="One sentence: why the message has this state")
    do: str = Field(description="What to do about it; empty if nothing is needed")


class MessageTrace(ViewModel):
    message_id: str
    queue: str
    message: Message | None = Field(description="null: settled by all, and no longer stored")
    states: list[GroupState]
    events: list[Event] = Field(description="Oldest first")
    dead_letters: list[str] = Field(description="Ids of its dead letters that still exist")
    summary: str = Field(description="One or two sentences")


class Finding(ViewModel):
    code: str = Field(examples=["no-consumer"])
    what: str
    do: str = Field(description="The command or step that helps")
    is_fault: bool


class Diagnosis(ViewModel):
    """Why nothing arrives: the cause first, then further findings."""

    queue: str
    healthy: bool
    findings: list[Finding]


class Node(ViewModel):
    name: str = Field(examples=["local"])
    version: str
    build: str = Field(description="compiled or interpreted")
    store: str
    started_at: Time
    now: Time
    connections: int
    sessions: int
    subscriptions: int
    retained: int
    queues: int
    messages: int
    bytes_received: int
    bytes_sent: int
    packets_received: int
    packets_sent: int
    publishes_received: int
    publishes_sent: int
    publishes_dropped: int
    stopping: bool
    losses: int = Field(
        description="cells whose store has lost committed frames and whose loss is not confirmed"
    )


class StoreGroup(ViewModel):
    name: str
    pending: int = Field(description="deliveries in flight, as XPENDING shows them")
    consumers: int
    lag: int = Field(description="messages that were not delivered yet")
    retrying: int = Field(description="deliveries that wait for their retry")


class StoreQueue(ViewModel):
    """A queue as the store reports it, summed over partitions."""

    name: str
    partitions: int
    length: int = Field(description="entries of its streams")
    counters: dict[str, int] = Field(
        examples=[
            {
                "produced": 9,
                "consumed": 5,
                "acked": 2,
                "retried": 1,
                "dead": 0,
                "expired": 0,
                "purged": 0,
            }
        ]
    )
    groups: list[StoreGroup]


class Store(ViewModel):
    kind: Literal["embedded", "memory", "redis"]
    address: str
    healthy: bool
    fault: str = Field(description="what is wrong with it, or empty")
    warnings: list[str] = Field(description="settings of Redis that can lose acknowledged messages")
    segments: int
    bytes: int = Field(description="of the log")
    version: str = Field(description="of Redis")
    cluster: bool
    owner: str = Field(description="the holder of the lease of a store in Redis")
    frame: int = Field(description="the last frame of the store")
    queues: list[StoreQueue] = Field(description="of a store in Redis")
    frames_lost: int = Field(description="lost committed frames since the store was created")


class Loss(ViewModel):
    """Committed frames that a store has lost."""

    cell: int = Field(description="of a cluster; 0 without a cluster")
    first: int = Field(description="the first lost frame")
    last: int = Field(description="the last one")
    frames: int
    times: int = Field(description="unconfirmed incidents")
    at: Time = Field(description="when the latest was noticed")
    queues: dict[str, int] = Field(description="lost messages by queue, as far as known")


class Sample(BaseModel):
    """Event `queues` of the live stream."""

    node: Node
    queues: list[Queue]


class Caller(BaseModel):
    name: str
    role: Literal["viewer", "operator", "admin"]
    anonymous: bool


class Purged(BaseModel):
    purged: int


class Found(BaseModel):
    queues: list[str] = Field(description="Queues that know the message")


class Health(BaseModel):
    status: Literal["ok"]
    loop_ms: float = Field(description="How long the broker's loop took to answer")


class Readiness(BaseModel):
    status: Literal["ready"]
    store: str
    warnings: list[str] = Field(
        default=[], description="what an operator must attend to; the server is ready anyway"
    )


LOSSES: TypeAdapter[list[Loss]] = TypeAdapter(list[Loss])
NODES: TypeAdapter[list[Node]] = TypeAdapter(list[Node])
QUEUES: TypeAdapter[list[Queue]] = TypeAdapter(list[Queue])
GROUPS: TypeAdapter[list[Group]] = TypeAdapter(list[Group])
CONSUMERS: TypeAdapter[list[Consumer]] = TypeAdapter(list[Consumer])
MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])
OWNERS: TypeAdapter[list[Owner]] = TypeAdapter(list[Owner])
