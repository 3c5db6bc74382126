"""What an inspection of queues returns: frozen values, each field with its type and its meaning.

A field is declared here and nowhere else. REST derives JSON schemas from these classes, gRPC fills
its messages from them, and `$admin`, metrics and command line show their fields. `admin.model` adds
the resources that are not part of the queues. Times are seconds since 1970, 0.0 for never; sizes
are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated


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
            "Why it gets no message now: paused, queue-paused, breaker, max_inflight, max_rate",
            example=["paused"],
        ),
    ]
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
