"""Views: what the admin service returns. Frozen, built on the broker's loop, read anywhere.

Every API shows these and adds nothing: REST and gRPC models, command line and console translate
them. Times are seconds since 1970, 0.0 for never; sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The ledger of one group: `enqueued` is the sum of the other fields."""

    enqueued: int
    waiting: int
    delivered: int
    retrying: int
    acked: int
    dead: int
    expired: int
    purged: int


@dataclass(frozen=True, slots=True)
class ConsumerView:
    client: str
    group: str
    partitions: list[int]
    inflight: int
    prefetch: int
    priority: int
    exclusive: bool
    connected: bool  # False: the session exists without a connection
    stalled: bool  # it missed a deadline and has settled or extended nothing since
    slow: bool  # its connection does not keep up with deliveries
    settled_at: float  # last settlement; 0.0: never


@dataclass(frozen=True, slots=True)
class GroupView:
    name: str
    lag: int  # waiting + delivered + retrying
    ledger: LedgerView
    floors: list[int]  # low watermark by partition: everything below is settled
    oldest_at: float  # enqueue time of the oldest unsettled message
    redelivered: int
    nacked: int
    consumers: list[ConsumerView]


@dataclass(frozen=True, slots=True)
class PartitionView:
    number: int
    first: int  # oldest stored sequence
    next: int  # sequence of the next message
    messages: int


@dataclass(frozen=True, slots=True)
class QueueView:
    """One queue in a list: everything that is cheap to compute."""

    name: str
    type: str
    ordering: str
    partitions: int
    depth: int
    max_depth: int
    bytes: int
    inflight: int
    retrying: int
    dlq: str  # name of its dead-letter queue, "" for none
    dlq_depth: int
    enqueue_rate: float
    deliver_rate: float
    ack_rate: float
    enqueued: int
    acked: int
    duplicates: int
    refused: int
    retried: int
    dead: dict[str, int]  # by reason
    active_consumers: int
    partitions_assigned: int
    groups: int
    is_dead_letters: bool  # it is the dead-letter queue of another queue
    created_at: float


@dataclass(frozen=True, slots=True)
class QueueDetail:
    stats: QueueView
    config: dict[str, object]  # complete, with defaults, durations as text
    groups: list[GroupView]
    partitions: list[PartitionView]


@dataclass(frozen=True, slots=True)
class MessageView:
    """A stored message. `state` is that in the requested group, otherwise that in the queue."""

    message_id: str
    queue: str
    partition: int
    sequence: int
    key: str
    priority: int
    payload: bytes  # cut to the requested length; `size` is the full length
    size: int
    enqueued_at: float
    expires_at: float
    deliver_at: float
    topic: str  # the plain topic from which a binding captured it
    content_type: str
    response_topic: str
    correlation_data: bytes
    properties: list[tuple[str, str]]  # set by the publisher
    headers: dict[str, str]  # written by Sluice, such as the history of a dead letter
    state: str  # waiting, delayed, delivered, retrying, settled
    attempt: int
    consumer: str  # that has the delivery, or had the last one


@dataclass(frozen=True, slots=True)
class OwnerView:
    """The exclusive compacted queue of one client."""

    client: str
    depth: int  # unacknowledged values
    keys: int  # stored values, acknowledged or not
    bytes: int
    last_sequence: int  # of the last written value; 0 when there is none
    acked_sequence: int  # all values up to this one are acknowledged
    acked_at: float  # time of the last acknowledgement
    written_at: float
    subscribed: bool
    connected: bool


@dataclass(frozen=True, slots=True)
class Published:
    message_id: str
    queue: str
    duplicate: bool  # the id was published within the dedup window: not stored again
    # The queue refused it (full, or schema), and a dead-letter queue or channel stored it.
    dead_letter: bool = False


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """A selection of dead letters; empty fields match all."""

    reason: str = ""
    group: str = ""
    since: float = 0.0  # dead at or after
    until: float = 0.0  # dead before
    contains: str = ""  # in the payload, as text


@dataclass(frozen=True, slots=True)
class Redriven:
    retried: int
    skipped: int  # in delivery to a consumer, or their original queue is gone
    left: int  # matches of the filter beyond the limit


@dataclass(frozen=True, slots=True)
class Event:
    """One step in the history of a message, for one group ("" for all)."""

    at: float
    # enqueued, delivered, extended, nacked, timed-out, vanished, released, acked, dead, redriven,
    # expired
    what: str
    group: str = ""
    consumer: str = ""
    attempt: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GroupState:
    """The state of a message in one group, and why."""

    group: str
    # waiting, delayed, delivered, retrying, acked, dead, settled (not known how), not-for-it
    state: str
    consumer: str
    attempt: int
    failures: int
    due: float  # of a retry or a delay
    deadline: float  # of a delivery
    why: str  # one sentence: why the message has this state
    do: str  # one sentence or command: what to do about it; "" if nothing is needed


@dataclass(frozen=True, slots=True)
class MessageTrace:
    message_id: str
    queue: str
    message: MessageView | None  # None: settled by all groups and no longer stored
    states: list[GroupState]
    events: list[Event]  # oldest first
    dead_letters: list[str]  # ids of its dead letters that still exist
    summary: str  # one or two sentences


@dataclass(frozen=True, slots=True)
class Finding:
    code: str  # no-queue, empty, no-group, no-consumer, ...: for scripts
    what: str  # one sentence
    do: str  # the command or step that helps
    is_fault: bool = True


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why nothing arrives: the cause first, then further findings."""

    queue: str
    healthy: bool
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    version: str
    build: str  # compiled or interpreted
    store: str
    started_at: float
    now: float
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
    # Stores of this node that have lost committed frames and whose loss no operator has confirmed.
    losses: int = 0


@dataclass(frozen=True, slots=True)
class StoreGroupView:
    """A group as the store itself reports it, summed over partitions."""

    name: str
    pending: int
    consumers: int
    lag: int
    retrying: int


@dataclass(frozen=True, slots=True)
class StoreQueueView:
    name: str
    partitions: int
    length: int
    counters: dict[str, int]  # produced, consumed, acked, retried, dead, expired, purged
    groups: list[StoreGroupView]


@dataclass(frozen=True, slots=True)
class StoreView:
    """The broker's store. `owner`, `version` and `queues` are set for a store with its own API."""

    kind: str  # embedded, memory, redis
    address: str
    healthy: bool
    fault: str
    warnings: list[str]
    segments: int
    bytes: int
    version: str
    cluster: bool
    owner: str
    frame: int
    queues: list[StoreQueueView]
    frames_lost: int = 0  # committed frames, since the store was created


@dataclass(frozen=True, slots=True)
class LossView:
    """Committed frames that a store has lost, until an operator confirms to know of it."""

    cell: int  # 0 without a cluster
    first: int
    last: int
    frames: int
    times: int  # incidents
    at: float  # of the latest incident
    queues: dict[str, int]  # lost messages by queue, as far as known


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message to publish."""

    payload: bytes
    message_id: str = ""
    key: str = ""
    priority: int = 0
    delay: float = 0.0
    deliver_at: float = 0.0
    expiry: float = 0.0  # seconds
    content_type: str = ""
    response_topic: str = ""
    correlation_data: bytes = b""
    properties: list[tuple[str, str]] = field(default_factory=list)
