"""What the admin service answers: plain facts, frozen, made on the broker's loop and read anywhere.

Every door shows these and adds nothing of its own: the REST and gRPC models, the command line and the console are
translations of this page. Times are seconds since 1970, 0.0 for never; sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LedgerView:
    """Of one group: `enqueued` is the sum of the rest."""

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
    connected: bool  # False: its session lives and its connection is gone
    stalled: bool  # it let a deadline pass and has not been heard of since
    slow: bool  # it reads more slowly than it is written to
    settled_at: float  # when it last settled a delivery; 0.0: never


@dataclass(frozen=True, slots=True)
class GroupView:
    name: str
    lag: int  # waiting + delivered + retrying
    ledger: LedgerView
    floors: list[int]  # by partition: everything before this sequence is settled
    oldest_at: float  # when the oldest message that it has not settled was enqueued
    redelivered: int
    nacked: int
    consumers: list[ConsumerView]


@dataclass(frozen=True, slots=True)
class PartitionView:
    number: int
    first: int  # oldest sequence that is kept
    next: int  # sequence of the message that comes next
    messages: int


@dataclass(frozen=True, slots=True)
class QueueView:
    """One queue in a list: everything that is cheap to know."""

    name: str
    type: str
    ordering: str
    partitions: int
    depth: int
    max_depth: int
    bytes: int
    inflight: int
    retrying: int
    dlq: str  # name of its dead-letter queue, "" when it has none
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
    is_dead_letters: bool  # it is the dead-letter queue of some queue
    created_at: float


@dataclass(frozen=True, slots=True)
class QueueDetail:
    stats: QueueView
    config: dict[str, object]  # whole, with defaults, durations as text
    groups: list[GroupView]
    partitions: list[PartitionView]


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message as it is kept. `state` is that of `group` when one was asked for, else that of the queue."""

    message_id: str
    queue: str
    partition: int
    sequence: int
    key: str
    priority: int
    payload: bytes  # cut to what was asked for; `size` is the whole
    size: int
    enqueued_at: float
    expires_at: float
    deliver_at: float
    topic: str  # the plain topic it was captured from
    content_type: str
    response_topic: str
    correlation_data: bytes
    properties: list[tuple[str, str]]  # the publisher's own
    headers: dict[str, str]  # what Sluice wrote on it: the story of a dead letter
    state: str  # waiting, delayed, delivered, retrying, settled
    attempt: int
    consumer: str  # who has it, or had it last


@dataclass(frozen=True, slots=True)
class OwnerView:
    """The exclusive compacted queue of one client."""

    client: str
    depth: int  # values that it has not acknowledged
    keys: int  # values that are kept, acknowledged or not
    bytes: int
    last_sequence: int  # of the last value that was written; 0 when none was
    acked_sequence: int  # all up to here is acknowledged
    acked_at: float  # when it last acknowledged something
    written_at: float
    subscribed: bool
    connected: bool


@dataclass(frozen=True, slots=True)
class Published:
    message_id: str
    queue: str
    duplicate: (
        bool  # a message with this id was published within the dedup window: not stored again
    )
    dead_letter: bool = (
        False  # the queue did not take it (full, or not by its schema) and a channel beside it did
    )


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which dead letters; what is empty does not matter."""

    reason: str = ""
    group: str = ""
    since: float = 0.0  # dead at or after
    until: float = 0.0  # dead before
    contains: str = ""  # in the payload, as text


@dataclass(frozen=True, slots=True)
class Redriven:
    retried: int
    skipped: int  # somebody works on them, or the queue they came from is gone
    left: int  # that the filter would still match, beyond the limit


@dataclass(frozen=True, slots=True)
class Event:
    """One step in the life of a message, for one group ("" for all)."""

    at: float
    what: str  # enqueued, delivered, extended, nacked, timed-out, vanished, released, acked, dead, redriven, expired
    group: str = ""
    consumer: str = ""
    attempt: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GroupState:
    """Where a message stands in one group, and why."""

    group: str
    state: str  # waiting, delayed, delivered, retrying, acked, dead, settled (nobody knows how), not-for-it
    consumer: str
    attempt: int
    failures: int
    due: float  # of a retry or a delay
    deadline: float  # of a delivery
    why: str  # one sentence: why it is where it is now
    do: str  # one sentence or command: what to do about it; "" when all is well


@dataclass(frozen=True, slots=True)
class MessageTrace:
    message_id: str
    queue: str
    message: MessageView | None  # None: settled by all, and not kept any more
    states: list[GroupState]
    events: list[Event]  # oldest first
    dead_letters: list[str]  # ids of its dead letters that are still there
    summary: str  # the whole in one or two sentences


@dataclass(frozen=True, slots=True)
class Finding:
    code: str  # no-queue, empty, no-group, no-consumer, ... : for scripts
    what: str  # one sentence
    do: str  # the command or step that helps
    is_fault: bool = True


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why nothing arrives: the first true reason first, then whatever else is worth knowing."""

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
    losses: int = (
        0  # stores of this node that have lost confirmed frames, which nobody has confirmed
    )


@dataclass(frozen=True, slots=True)
class StoreGroupView:
    """A group as the store itself shows it, added up over partitions."""

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
    """What the broker keeps its messages in. `owner`, `version`, `queues` are of a store that others can look into."""

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
    frames_lost: int = 0  # that it had confirmed, in its life


@dataclass(frozen=True, slots=True)
class LossView:
    """Frames that a store had confirmed and has lost, until an operator confirms that they know."""

    cell: int  # 0 for a broker alone
    first: int
    last: int
    frames: int
    times: int  # incidents
    at: float  # of the latest
    queues: dict[str, int]  # messages by queue, as far as it is known


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
