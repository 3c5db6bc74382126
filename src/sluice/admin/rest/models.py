"""What the REST door answers, field by field as in `admin.views`: this page only says how it looks as JSON.

Times are ISO 8601 in UTC with milliseconds, null for never. Bytes are base64 beside their text, which is null when they
are not UTF-8. The models read a view's attributes, check nothing that the service has decided, and document it all.
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
    """Bytes as text. A payload that was cut may end inside a character: that one is left out."""
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
    """The books of one group: `enqueued` is the sum of the rest."""

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
    inflight: int = Field(description="Deliveries that it has and has not settled")
    prefetch: int
    priority: int
    exclusive: bool
    connected: bool = Field(description="False: its session lives and its connection is gone")
    stalled: bool = Field(description="It let a deadline pass and has not been heard of since")
    slow: bool = Field(description="It reads more slowly than it is written to")
    settled_at: Time = Field(description="When it last settled a delivery; null: never")


class Group(ViewModel):
    name: str = Field(examples=["workers"])
    lag: int = Field(description="waiting + delivered + retrying")
    ledger: Ledger
    floors: list[int] = Field(
        description="By partition: everything before this sequence is settled"
    )
    oldest_at: Time = Field(
        description="When the oldest message that it has not settled was enqueued"
    )
    redelivered: int
    nacked: int
    consumers: list[Consumer]


class Partition(ViewModel):
    number: int
    first: int = Field(description="Oldest sequence that is kept")
    next: int = Field(description="Sequence of the message that comes next")
    messages: int


class Queue(ViewModel):
    """One queue in a list: everything that is cheap to know."""

    name: str = Field(examples=["tasks/image"])
    type: str = Field(examples=["work"])
    ordering: str = Field(examples=["partition"])
    partitions: int
    depth: int = Field(description="Messages that some group has still to settle")
    max_depth: int
    bytes: int
    inflight: int = Field(description="Deliveries under way")
    retrying: int
    dlq: str = Field(description="Name of its dead-letter queue, empty when it has none")
    dlq_depth: int
    enqueue_rate: float = Field(description="Per second")
    deliver_rate: float = Field(description="Per second")
    ack_rate: float = Field(description="Per second")
    enqueued: int
    acked: int
    duplicates: int = Field(description="Publishes whose message id was known already")
    refused: int
    retried: int
    dead: dict[str, int] = Field(
        description="Dead messages by reason", examples=[{"max_retries": 2}]
    )
    active_consumers: int
    partitions_assigned: int
    groups: int
    is_dead_letters: bool = Field(description="It is the dead-letter queue of some queue")
    created_at: Time


class QueueDetail(ViewModel):
    stats: Queue
    config: dict[str, Any] = Field(description="Whole, with defaults, durations as text")
    groups: list[Group]
    partitions: list[Partition]


class Message(ViewModel):
    """A message as it is kept. `state` is that of the group when one was asked for, else that of the queue."""

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
    topic: str = Field(description="The plain topic it was captured from, or empty")
    content_type: str
    response_topic: str
    correlation_data: Text
    correlation_data_base64: Base64 = Field(validation_alias="correlation_data")
    properties: list[tuple[str, str]] = Field(description="The publisher's own user properties")
    headers: dict[str, str] = Field(
        description="What Sluice wrote on it: the story of a dead letter"
    )
    state: str = Field(
        description="waiting, delayed, delivered, retrying or settled", examples=["waiting"]
    )
    attempt: int
    consumer: str = Field(description="Who has it, or had it last")


class Owner(ViewModel):
    """The exclusive compacted queue of one client."""

    client: str = Field(description="Client id of the owner", examples=["car-1"])
    depth: int = Field(description="Values that it has not acknowledged")
    keys: int = Field(description="Values that are kept, acknowledged or not: one for each key")
    bytes: int
    last_sequence: int = Field(description="Of the last value that was written; 0 when none was")
    acked_sequence: int = Field(description="All up to here is acknowledged")
    acked_at: Time = Field(description="When it last acknowledged something")
    written_at: Time
    subscribed: bool
    connected: bool


class Published(ViewModel):
    message_id: str = Field(examples=["a-1f"])
    queue: str
    duplicate: bool = Field(
        description="A message with this id was published within the dedup window: not stored again"
    )
    dead_letter: bool = Field(
        description="The queue was full, and the message went to its dead letters"
    )


class Redriven(ViewModel):
    retried: int
    skipped: int = Field(description="Somebody works on them, or the queue they came from is gone")
    left: int = Field(description="Matched by the filter and beyond the limit")


class Event(ViewModel):
    """One step in the life of a message, for one group (empty: for all)."""

    at: Time
    what: str = Field(
        description="enqueued, delivered, extended, nacked, timed-out, vanished, released, acked, dead, redriven "
        "or expired"
    )
    group: str
    consumer: str
    attempt: int
    detail: str


class GroupState(ViewModel):
    """Where a message stands in one group, and why."""

    group: str
    state: str = Field(
        description="waiting, delayed, delivered, retrying, acked, dead, expired, purged or not-for-it"
    )
    consumer: str
    attempt: int
    failures: int
    due: Time = Field(description="Of a retry or a delay")
    deadline: Time = Field(description="Of a delivery")
    why: str = Field(description="One sentence: why it is where it is now")
    do: str = Field(description="What to do about it; empty when all is well")


class MessageTrace(ViewModel):
    message_id: str
    queue: str
    message: Message | None = Field(description="null: settled by all, and not kept any more")
    states: list[GroupState]
    events: list[Event] = Field(description="Oldest first")
    dead_letters: list[str] = Field(description="Ids of its dead letters that are still there")
    summary: str = Field(description="The whole in one or two sentences")


class Finding(ViewModel):
    code: str = Field(examples=["no-consumer"])
    what: str
    do: str = Field(description="The command or step that helps")
    is_fault: bool


class Diagnosis(ViewModel):
    """Why nothing arrives: the first true reason first, then whatever else is worth knowing."""

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
        description="cells whose store has lost confirmed frames, which nobody has confirmed"
    )


class StoreGroup(ViewModel):
    name: str
    pending: int = Field(description="deliveries under way, as XPENDING shows them")
    consumers: int
    lag: int = Field(description="messages that were not delivered yet")
    retrying: int = Field(description="deliveries that wait for their retry")


class StoreQueue(ViewModel):
    """A queue as the store shows it, added up over partitions."""

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
    fault: str = Field(description="what is wrong with it, or nothing")
    warnings: list[str] = Field(
        description="settings of Redis under which something acknowledged can be lost"
    )
    segments: int
    bytes: int = Field(description="of the log")
    version: str = Field(description="of Redis")
    cluster: bool
    owner: str = Field(description="who holds the lease of a store in Redis")
    frame: int = Field(description="the last frame that it has")
    queues: list[StoreQueue] = Field(description="of a store in Redis")
    frames_lost: int = Field(description="frames that it had confirmed and has lost, in its life")


class Loss(ViewModel):
    """Frames that a store had confirmed and has lost."""

    cell: int = Field(description="of a cluster; 0 for a broker alone")
    first: int = Field(description="the first frame that is lost")
    last: int = Field(description="the last one")
    frames: int
    times: int = Field(description="incidents that nobody has confirmed")
    at: Time = Field(description="when the latest was noticed")
    queues: dict[str, int] = Field(description="lost messages by queue, as far as they are known")


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
        default=[], description="what an operator must see to; it takes work anyway"
    )


LOSSES: TypeAdapter[list[Loss]] = TypeAdapter(list[Loss])
NODES: TypeAdapter[list[Node]] = TypeAdapter(list[Node])
QUEUES: TypeAdapter[list[Queue]] = TypeAdapter(list[Queue])
GROUPS: TypeAdapter[list[Group]] = TypeAdapter(list[Group])
CONSUMERS: TypeAdapter[list[Consumer]] = TypeAdapter(list[Consumer])
MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])
OWNERS: TypeAdapter[list[Owner]] = TypeAdapter(list[Owner])
