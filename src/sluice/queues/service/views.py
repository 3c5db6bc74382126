"""What an inspection of queues returns: frozen values, each field with its type and its meaning.

A field is declared here and nowhere else. REST derives JSON schemas from these classes, gRPC fills
its messages from them, and `$admin`, metrics and command line show their fields. `admin.model` adds
the resources that are not part of the queues. Times are seconds since 1970, 0.0 for never; sizes
are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal

from sluice.queues.ports import ConnectionState


@dataclass(frozen=True, slots=True)
class Doc:
    """The documentation of a field.

    `grpc` is its name in gRPC if that is another one; "" if gRPC does not have the field.
    """

    text: str
    example: object = None
    grpc: str | None = None


class Unit(Enum):
    TIME = "seconds since 1970"
    PER_SECOND = "per second"
    SECONDS = "seconds"
    BYTES = "bytes"


Time = Annotated[float, Unit.TIME]
Rate = Annotated[float, Unit.PER_SECOND]
Duration = Annotated[float, Unit.SECONDS]
Size = Annotated[int, Unit.BYTES]


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger of one group: `enqueued` is the sum of the other fields."""

    enqueued: Annotated[int, Doc("Messages that the group had to settle")]
    waiting: Annotated[int, Doc("Not delivered yet")]
    delivered: Annotated[int, Doc("In delivery to a consumer")]
    retrying: Annotated[int, Doc("Failed, and waiting for the next attempt")]
    acked: Annotated[int, Doc("Settled by an acknowledgement")]
    dead: Annotated[int, Doc("Given up: dead-lettered or dropped")]
    expired: Annotated[int, Doc("Removed because their time to live ended")]
    purged: Annotated[int, Doc("Removed by an operator")]
    cancelled: Annotated[int, Doc("Cancelled before they were delivered")]

    def lag(self) -> int:
        """Return the number of unsettled messages."""
        return self.waiting + self.delivered + self.retrying


@dataclass(frozen=True, slots=True)
class Pause:
    """Who paused a queue or a group: nothing is delivered until it is resumed."""

    at: Annotated[Time, Doc("Since when it is paused")]
    by: Annotated[str, Doc("Who paused it", example="ann")]
    reason: Annotated[str, Doc("Why", example="the printer is out of paper")]


@dataclass(frozen=True, slots=True)
class Consumer:
    """A member of a group."""

    client: Annotated[str, Doc("Client id", example="worker-1")]
    group: Annotated[str, Doc("The group of which it is a member")]
    partitions: Annotated[
        list[int], Doc("Partitions that it serves; without one it gets messages without a key")
    ]
    inflight: Annotated[int, Doc("Unsettled deliveries that it holds")]
    prefetch: Annotated[int, Doc("Unsettled deliveries that it accepts; 0: it is draining")]
    priority: Annotated[int, Doc("Consumers of a higher priority get messages first")]
    exclusive: Annotated[bool, Doc("It consumes alone; other members stand by")]
    connected: Annotated[bool, Doc("False: the session exists without a connection")]
    stalled: Annotated[bool, Doc("It missed a deadline and has settled or extended nothing since")]
    slow: Annotated[bool, Doc("Its connection does not keep up with deliveries")]
    settled_at: Annotated[Time, Doc("Time of its last settlement; null: never")]
    last_heartbeat: Annotated[
        Time, Doc("Time of the last packet of its client; null: no connection since the start")
    ]


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key of which nothing is delivered to a group: a message of it died."""

    key: Annotated[str, Doc("The key; empty in a strict queue, which is held as a whole")]
    message_id: Annotated[str, Doc("The message that died", example="order-17")]
    held_at: Annotated[Time, Doc("Since when it is held")]
    releases_at: Annotated[Time, Doc("When it is released in any case; null: never")]
    dead_letters: Annotated[int, Doc("Dead letters that are neither put back nor discarded")]
    repaired: Annotated[int, Doc("Dead letters that were put back and are not settled")]
    waiting: Annotated[int, Doc("Later messages that wait, as far as the group has seen them")]


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group: its backlog, its ledger and its members."""

    name: Annotated[str, Doc("Name of the group", example="workers")]
    lag: Annotated[int, Doc("waiting + delivered + retrying")]
    ledger: Annotated[Ledger, Doc("Messages of the group by state and outcome")]
    floors: Annotated[list[int], Doc("Low watermark by partition: everything below is settled")]
    oldest_at: Annotated[Time, Doc("Enqueue time of the oldest unsettled message")]
    redelivered: Annotated[int, Doc("Deliveries that were not the first of their message")]
    nacked: Annotated[int, Doc("Deliveries that were nacked")]
    pause: Annotated[Pause | None, Doc("Its own pause; null: it is not paused")]
    breaker: Annotated[str, Doc("closed, open or probing", example="closed")]
    held_by: Annotated[
        list[str],
        Doc(
            "Why it gets no message now: paused, queue-paused, breaker, max_inflight, max_rate;"
            " or no message of some keys: max_inflight_per_key, max_rate_per_key",
            example=["paused"],
        ),
    ]
    held_keys: Annotated[list[HeldKey], Doc("Keys that are held for repair, at most 100")]
    consumers: Annotated[list[Consumer], Doc("Its members")]


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of a queue with an order of its own."""

    number: Annotated[int, Doc("Number within the queue, from 0")]
    first: Annotated[int, Doc("Oldest stored sequence")]
    next: Annotated[int, Doc("Sequence of the next message")]
    messages: Annotated[int, Doc("Stored messages")]
    last_delivery: Annotated[Time, Doc("Time of the last delivery; null: none since the start")]


@dataclass(frozen=True, slots=True)
class Queue:
    """One queue in a list: everything that is cheap to compute."""

    name: Annotated[str, Doc("Name of the queue", example="tasks/image")]
    type: Annotated[str, Doc("work or compacted", example="work")]
    ordering: Annotated[str, Doc("none, partition or strict", example="partition")]
    partitions: Annotated[int, Doc("Number of partitions")]
    total_messages: Annotated[int, Doc("Messages that some group has not settled yet")]
    max_depth: Annotated[int, Doc("Depth at which the queue is full")]
    bytes: Annotated[Size, Doc("Size of the stored messages")]
    inflight_messages: Annotated[int, Doc("Deliveries in flight")]
    retrying: Annotated[int, Doc("Deliveries that failed and wait for the next attempt")]
    dlq: Annotated[str, Doc("Name of its dead-letter queue; empty for none", grpc="dlq_name")]
    dlq_messages: Annotated[int, Doc("Messages in its dead-letter queue")]
    enqueue_rate: Annotated[Rate, Doc("Enqueued messages")]
    dequeue_rate: Annotated[Rate, Doc("Deliveries")]
    ack_rate: Annotated[Rate, Doc("Acknowledgements")]
    nack_rate: Annotated[Rate, Doc("Negative acknowledgements")]
    avg_delivery_latency: Annotated[Duration, Doc("From enqueue to first delivery, recently")]
    avg_process_latency: Annotated[Duration, Doc("From delivery to acknowledgement, recently")]
    enqueued: Annotated[int, Doc("Messages since the queue was created")]
    acked: Annotated[int, Doc("Acknowledgements by the present groups")]
    duplicates: Annotated[int, Doc("Publishes with a known message id")]
    refused: Annotated[int, Doc("Publishes that were refused")]
    retry_count: Annotated[int, Doc("Failures after which a message is retried")]
    dead: Annotated[dict[str, int], Doc("Dead letters by reason", example={"max_retries": 2})]
    active_consumers: Annotated[int, Doc("Consumers of all groups")]
    partitions_assigned: Annotated[
        dict[str, int], Doc("Partitions that each consumer serves", example={"worker-1": 5})
    ]
    groups: Annotated[int, Doc("Number of groups")]
    pause: Annotated[Pause | None, Doc("Its pause, for all groups; null: it is not paused")]
    is_dead_letters: Annotated[bool, Doc("It is the dead-letter queue of another queue")]
    created_at: Annotated[Time, Doc("Time of creation")]


@dataclass(frozen=True, slots=True)
class QueueDetail:
    """Counters, configuration, groups and partitions of one queue."""

    stats: Annotated[Queue, Doc("The queue as lists show it")]
    config: Annotated[
        dict[str, object],
        Doc("Complete, with defaults, durations as text", grpc="config_json"),
    ]
    groups: Annotated[list[Group], Doc("By name")]
    partitions: Annotated[list[Partition], Doc("By number")]


@dataclass(frozen=True, slots=True)
class Event:
    """One step in the history of a message, for one group (empty: for all)."""

    at: Annotated[Time, Doc("When it happened")]
    what: Annotated[
        str,
        Doc(
            "enqueued, delivered, extended, nacked, timed-out, vanished, released, acked,"
            " dead, redriven or expired"
        ),
    ]
    group: Annotated[str, Doc("The group, or empty")] = ""
    consumer: Annotated[str, Doc("The consumer of the delivery, or empty")] = ""
    attempt: Annotated[int, Doc("Number of the delivery")] = 0
    detail: Annotated[str, Doc("What else is known, such as the description of a failure")] = ""


# ---- What metrics and diagnosis read. No API shows these values as they are.


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    """Counters of a group for /metrics."""

    name: str
    consumers: int
    ledger: Ledger
    delayed: int  # of the waiting messages
    workers_wanted: int
    oldest_at: float  # when the oldest unsettled message was due; 0.0 when there is none
    is_paused: bool  # by itself or with its queue
    is_breaker_open: bool  # or probing
    is_limited: bool  # a limit allows no delivery now
    held_keys: int  # for repair
    limited_keys: int  # keys with messages that wait for a limit of their key


@dataclass(frozen=True, slots=True)
class QueueMetrics:
    """Counters of a queue for /metrics, with those of deleted groups, so that no sum falls."""

    name: str
    depth: int
    max_depth: int
    max_in_flight: int  # of each group; 0: no limit
    max_rate: float  # per second
    max_in_flight_per_key: int  # of each key in each group; 0: no limit
    max_rate_per_key: float
    delivery_timeout: float  # seconds
    bytes: int
    enqueued: int
    dequeued: int
    acked: int
    nacked: int
    redelivered: int
    retried: int
    duplicates: int
    refused: int
    dead: dict[str, int]
    delivery_counts: list[int]  # by histogram bound; empty when nothing was counted
    delivery_seconds: float
    process_counts: list[int]
    process_seconds: float
    is_dead_letter_queue: bool
    groups: list[GroupMetrics] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """Where a message is stored, and its state in one group or in the queue."""

    queue: str
    partition: int
    sequence: int
    rescheduled_to: float | None  # None: as the publisher wrote
    state: str  # as in `MESSAGE_STATES`
    attempt: int
    consumer: str


WAITING = "waiting"
DELAYED = "delayed"
RETRYING = "retrying"
DELIVERED = "delivered"
SETTLED = "settled"
MESSAGE_STATES = (SETTLED, WAITING, DELAYED, RETRYING, DELIVERED)


@dataclass(frozen=True, slots=True)
class Member:
    """A consumer, as the diagnosis of its group sees it."""

    number: int  # within the group
    client: str
    prefetch: int
    in_flight: int
    priority: int
    is_exclusive: bool
    is_connected: bool
    is_stalled: bool
    settled_at: float  # 0.0: never
    active_at: float  # last sign of life
    partitions: tuple[int, ...]
    connection: ConnectionState | None  # None: it has no session


Phase = Literal["delivered", "backoff", "due", "dead-lettering"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that was delivered to a group and that the group has not settled."""

    message_id: str
    key: str  # empty: none, or not in memory
    phase: Phase
    consumer: str  # client id of the last one
    holder: Member | None  # who has it, if that consumer is still a member
    attempt: int
    failures: int
    description: str  # of the last failure
    last_delivered_at: float
    retry_at: float
    deadline: float


@dataclass(frozen=True, slots=True)
class HeldDeliveries:
    """What one member holds."""

    count: int
    oldest_at: float
    first_deadline: float


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Why no undelivered message of a group can be delivered now: counts by reason."""

    retrying: int
    parked: int  # behind an earlier message of their key
    gated: int  # of the parked: behind messages of an earlier partition
    delayed: int
    next_due: float  # of the delayed ones
    next_retry: float
    last_failed: Delivery | None  # of the retrying ones


@dataclass(frozen=True, slots=True)
class BusyKeys:
    """Undelivered messages of a group that all wait for deliveries of their keys."""

    waiting: int
    keys: int
    oldest: Delivery
