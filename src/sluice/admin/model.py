"""The resources that the admin service returns, each described once.

Frozen, built on the broker's loop, read anywhere. A field has a type, a meaning and a unit here;
REST (`rest/json_models`) and gRPC (`grpc/protobuf_responses`) derive their form from it and add
nothing. The resources of queues are in `queues.service.views`. Times are seconds since 1970, 0.0
for never; sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from sluice.queues.service import views

__all__ = [
    "Caller",
    "Client",
    "ClientConsumer",
    "ClientDetail",
    "ClientSubscription",
    "Cluster",
    "ClusterCell",
    "ClusterNode",
    "Consumer",
    "DeadLetterErrors",
    "DeadLetterFilter",
    "Diagnosis",
    "Doc",
    "Duration",
    "ErrorGroup",
    "Event",
    "Finding",
    "Group",
    "GroupState",
    "Kicked",
    "Ledger",
    "Loss",
    "Message",
    "MessageTrace",
    "Node",
    "OutgoingMessage",
    "Owner",
    "Partition",
    "Pause",
    "Published",
    "Queue",
    "QueueDetail",
    "QueuePlace",
    "Rate",
    "Redriven",
    "RoleName",
    "Sample",
    "Size",
    "Store",
    "StoreGroup",
    "StoreKind",
    "StoreQueue",
    "Time",
    "Unit",
]

# The resources of queues, and what describes a field.
Consumer = views.Consumer
Doc = views.Doc
Duration = views.Duration
Event = views.Event
Group = views.Group
Ledger = views.Ledger
Partition = views.Partition
Pause = views.Pause
Queue = views.Queue
QueueDetail = views.QueueDetail
Rate = views.Rate
Size = views.Size
Time = views.Time
Unit = views.Unit

RoleName = Literal["viewer", "operator", "admin"]
StoreKind = Literal["embedded", "memory", "redis"]


@dataclass(frozen=True, slots=True)
class Message:
    """A stored message; `state` is that in the requested group, otherwise that in the queue."""

    message_id: Annotated[str, Doc("The publisher's own id, or a generated one", example="a-1f")]
    queue: Annotated[str, Doc("The queue that stores it")]
    partition: Annotated[int, Doc("Number of its partition")]
    sequence: Annotated[int, Doc("Its place in the partition")]
    key: Annotated[str, Doc("Messages with the same key stay in order; empty for none")]
    priority: Annotated[int, Doc("0 to 9; higher goes first")]
    size: Annotated[Size, Doc("Size of the whole payload; `payload` may be cut")]
    payload: Annotated[bytes, Doc("As text; null when it is not UTF-8", example="resize cat.png")]
    enqueued_at: Annotated[Time, Doc("When it was stored")]
    expires_at: Annotated[Time, Doc("When it is removed undelivered; null: never")]
    deliver_at: Annotated[Time, Doc("Not delivered before this time; null: no delay")]
    topic: Annotated[str, Doc("The plain topic from which a binding captured it, or empty")]
    content_type: Annotated[str, Doc("As the publisher set it")]
    response_topic: Annotated[str, Doc("As the publisher set it")]
    correlation_data: Annotated[bytes, Doc("As text; null when it is not UTF-8")]
    properties: Annotated[list[tuple[str, str]], Doc("User properties of the publisher")]
    headers: Annotated[
        dict[str, str], Doc("Written by Sluice, such as the history of a dead letter")
    ]
    state: Annotated[
        str, Doc("waiting, delayed, delivered, retrying or settled", example="waiting")
    ]
    attempt: Annotated[int, Doc("Number of its last delivery, from 1; 0: not delivered yet")]
    consumer: Annotated[str, Doc("The consumer that has the delivery, or had the last one")]


@dataclass(frozen=True, slots=True)
class Owner:
    """The exclusive compacted queue of one client."""

    client: Annotated[str, Doc("Client id of the owner", example="car-1")]
    depth: Annotated[int, Doc("Unacknowledged values")]
    keys: Annotated[int, Doc("Stored values, acknowledged or not: one for each key")]
    bytes: Annotated[Size, Doc("Size of the stored values")]
    last_sequence: Annotated[int, Doc("Of the last written value; 0 when there is none")]
    acked_sequence: Annotated[int, Doc("All values up to this one are acknowledged")]
    acked_at: Annotated[Time, Doc("Time of its last acknowledgement")]
    written_at: Annotated[Time, Doc("Time of the last write")]
    subscribed: Annotated[bool, Doc("The owner has a subscription")]
    connected: Annotated[bool, Doc("The owner has a connection")]


@dataclass(frozen=True, slots=True)
class Client:
    """A client id: its connection, if it has one, and its session."""

    client: Annotated[str, Doc("Client id", example="worker-1")]
    user: Annotated[str, Doc("User name; empty: none, or unknown since the start of the broker")]
    connected: Annotated[bool, Doc("False: the session exists without a connection")]
    protocol: Annotated[str, Doc("Of its last connection", example="MQTT 5.0")]
    address: Annotated[str, Doc("HOST:PORT of the connection, or empty")]
    connected_at: Annotated[Time, Doc("Start of the connection; null: not connected")]
    disconnected_at: Annotated[Time, Doc("End of the last connection; null: connected")]
    session_expiry: Annotated[
        int, Doc("Seconds that the session outlives its connection; 4294967295: for ever")
    ]
    subscriptions: Annotated[int, Doc("Topic filters, those of queues included")]
    inflight: Annotated[int, Doc("Sent messages of QoS 1 and 2 that it has not acknowledged")]
    queued: Annotated[int, Doc("Messages that wait for the client or for its window")]
    queued_bytes: Annotated[Size, Doc("Size of both")]
    dropped: Annotated[int, Doc("Messages dropped because it was too slow, or its limits full")]


@dataclass(frozen=True, slots=True)
class ClientSubscription:
    """One topic filter of a client."""

    filter: Annotated[str, Doc("Topic filter, as the client wrote it")]
    qos: Annotated[int, Doc("Highest QoS of the deliveries")]


@dataclass(frozen=True, slots=True)
class ClientConsumer:
    """A client as a consumer of a queue."""

    queue: Annotated[str, Doc("Name of the queue")]
    group: Annotated[str, Doc("Its consumer group")]
    inflight: Annotated[int, Doc("Unsettled deliveries that it holds")]
    prefetch: Annotated[int, Doc("Unsettled deliveries that it accepts; 0: it is draining")]


@dataclass(frozen=True, slots=True)
class ClientDetail:
    """A client with its subscriptions."""

    client: Annotated[Client, Doc("The client as lists show it")]
    subscriptions: Annotated[
        list[ClientSubscription], Doc("By filter; at most the first 1,000 of each kind")
    ]
    consumers: Annotated[
        list[ClientConsumer], Doc("Queues of the same cell that it consumes: at most 1,000")
    ]


@dataclass(frozen=True, slots=True)
class Kicked:
    """The result of a kick."""

    disconnected: Annotated[bool, Doc("Its connection was closed")]
    session_ended: Annotated[bool, Doc("Its session no longer exists")]


@dataclass(frozen=True, slots=True)
class Published:
    """The result of a publish, after its commit."""

    message_id: Annotated[str, Doc("The given or generated id", example="a-1f")]
    queue: Annotated[str, Doc("The queue of the message")]
    duplicate: Annotated[
        bool, Doc("The id was published within the dedup window: not stored again")
    ]
    dead_letter: Annotated[
        bool,
        Doc("The queue refused it (full, or schema), and it became a dead letter", grpc=""),
    ]


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """A selection of dead letters; empty fields match all."""

    reason: str = ""
    group: str = ""
    since: float = 0.0  # dead at or after
    until: float = 0.0  # dead before
    contains: str = ""  # in the payload, as text
    error: str = ""  # a group of errors: the normalized description


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """A selection of messages that wait; empty fields match all."""

    key: str = ""
    state: str = ""  # waiting, delayed or retrying
    since: float = 0.0  # enqueued at or after
    until: float = 0.0  # enqueued before
    contains: str = ""  # in the payload, as text


@dataclass(frozen=True, slots=True)
class Commanded:
    """The result of a command on many messages."""

    changed: Annotated[int, Doc("Messages that were changed; with dry_run, that would be")]
    in_delivery: Annotated[int, Doc("Matches that a consumer is working on: too late")]
    left: Annotated[int, Doc("Matches of the filter beyond the limit")]
    dry_run: Annotated[bool, Doc("Whether nothing was changed")]


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Dead letters with one reason and the same error, except for numbers, ids and times."""

    reason: Annotated[str, Doc("max_retries, timeout, rejected, expired or overflow")]
    error: Annotated[
        str,
        Doc("The description with <n>, <id> and <time> for what varies", example="no width in <n>"),
    ]
    count: Annotated[int, Doc("Dead letters with it")]
    first_at: Annotated[Time, Doc("When the first one died")]
    last_at: Annotated[Time, Doc("When the last one died")]
    groups: Annotated[list[str], Doc("Consumer groups that failed; empty: all groups")]
    example: Annotated[str, Doc("Description of the last one")]


@dataclass(frozen=True, slots=True)
class DeadLetterErrors:
    """The dead letters of a queue, by error."""

    errors: Annotated[list[ErrorGroup], Doc("The most frequent first; at most 1,000")]
    examined: Annotated[int, Doc("Dead letters that were counted")]
    complete: Annotated[bool, Doc("False: there are more than were counted, or more errors")]


@dataclass(frozen=True, slots=True)
class Redriven:
    """The result of a redrive."""

    retried: Annotated[int, Doc("Dead letters that are back in their queue")]
    skipped: Annotated[int, Doc("In delivery, or their original queue is gone")]
    left: Annotated[int, Doc("Matches of the filter beyond the limit")]


@dataclass(frozen=True, slots=True)
class GroupState:
    """The state of a message in one group, and why."""

    group: Annotated[str, Doc("Name of the group")]
    state: Annotated[
        str,
        Doc(
            "waiting, delayed, delivered, retrying, acked, dead, expired, purged, cancelled,"
            " settled (not known how) or not-for-it"
        ),
    ]
    consumer: Annotated[str, Doc("The consumer that has the delivery, or had the last one")]
    attempt: Annotated[int, Doc("Number of its last delivery")]
    failures: Annotated[int, Doc("Deliveries that failed")]
    due: Annotated[Time, Doc("Of a retry or a delay")]
    deadline: Annotated[Time, Doc("Of a delivery")]
    why: Annotated[str, Doc("One sentence: why the message has this state")]
    do: Annotated[str, Doc("What to do about it; empty if nothing is needed")]


@dataclass(frozen=True, slots=True)
class MessageTrace:
    """The history of a message and its state in each group."""

    message_id: Annotated[str, Doc("The id of the message")]
    queue: Annotated[str, Doc("Its queue")]
    message: Annotated[Message | None, Doc("null: settled by all, and no longer stored")]
    states: Annotated[list[GroupState], Doc("One for each group")]
    events: Annotated[list[Event], Doc("Oldest first")]
    dead_letters: Annotated[list[str], Doc("Ids of its dead letters that still exist")]
    summary: Annotated[str, Doc("One or two sentences")]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a diagnosis."""

    code: Annotated[
        str, Doc("no-queue, empty, no-group, no-consumer, ...: for scripts", example="no-consumer")
    ]
    what: Annotated[str, Doc("One sentence")]
    do: Annotated[str, Doc("The command or step that helps")]
    is_fault: Annotated[bool, Doc("False: for information")] = True


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why nothing arrives: the cause first, then further findings."""

    queue: Annotated[str, Doc("The diagnosed queue")]
    healthy: Annotated[bool, Doc("No finding is a fault")]
    findings: Annotated[list[Finding], Doc("The cause first")]


@dataclass(frozen=True, slots=True)
class Node:
    """One server: version, store, connections, packets."""

    name: Annotated[str, Doc("Name of the node", example="local")]
    version: Annotated[str, Doc("Version of Sluice")]
    build: Annotated[str, Doc("compiled or interpreted")]
    store: Annotated[str, Doc("Kind or address of the store")]
    started_at: Annotated[Time, Doc("When it started")]
    now: Annotated[Time, Doc("Its clock")]
    connections: Annotated[int, Doc("Open connections")]
    sessions: Annotated[int, Doc("Sessions of connected and disconnected clients")]
    subscriptions: Annotated[int, Doc("Subscriptions to plain topics")]
    retained: Annotated[int, Doc("Retained messages, without those of $SYS")]
    queues: Annotated[int, Doc("Queues, including dead-letter queues")]
    messages: Annotated[int, Doc("Messages of all queues that some group has not settled")]
    bytes_received: Annotated[int, Doc("Bytes from clients since the start, as the following")]
    bytes_sent: Annotated[int, Doc("Bytes to clients")]
    packets_received: Annotated[int, Doc("MQTT packets from clients")]
    packets_sent: Annotated[int, Doc("MQTT packets to clients")]
    publishes_received: Annotated[int, Doc("PUBLISH packets from clients")]
    publishes_sent: Annotated[int, Doc("PUBLISH packets to clients")]
    publishes_dropped: Annotated[int, Doc("Messages dropped for a receiver")]
    stopping: Annotated[bool, Doc("The server is stopping")]
    losses: Annotated[
        int, Doc("Cells whose store has lost committed frames and whose loss is not confirmed")
    ] = 0


@dataclass(frozen=True, slots=True)
class StoreGroup:
    """A group as the store itself reports it, summed over partitions."""

    name: Annotated[str, Doc("Name of the group")]
    pending: Annotated[int, Doc("Deliveries in flight, as XPENDING shows them")]
    consumers: Annotated[int, Doc("Consumers that the store knows of")]
    lag: Annotated[int, Doc("Messages that were not delivered yet")]
    retrying: Annotated[int, Doc("Deliveries that wait for their retry")]


@dataclass(frozen=True, slots=True)
class StoreQueue:
    """A queue as the store reports it, summed over partitions."""

    name: Annotated[str, Doc("Name of the queue")]
    partitions: Annotated[int, Doc("Number of partitions")]
    length: Annotated[int, Doc("Entries of its streams")]
    counters: Annotated[
        dict[str, int],
        Doc(
            "Messages by outcome",
            example={
                "produced": 9,
                "consumed": 5,
                "acked": 2,
                "retried": 1,
                "dead": 0,
                "expired": 0,
                "purged": 0,
                "cancelled": 0,
            },
        ),
    ]
    groups: Annotated[list[StoreGroup], Doc("By name")]


@dataclass(frozen=True, slots=True)
class Store:
    """The store. `owner`, `version` and `queues` are set for a store with its own API."""

    kind: Annotated[StoreKind, Doc("Where messages are stored")]
    address: Annotated[str, Doc("As the configuration names it")]
    healthy: Annotated[bool, Doc("It accepts writes and answers")]
    fault: Annotated[str, Doc("What is wrong with it, or empty")]
    warnings: Annotated[list[str], Doc("Settings of Redis that can lose acknowledged messages")]
    segments: Annotated[int, Doc("Segments of the log")]
    bytes: Annotated[Size, Doc("Size of the log")]
    version: Annotated[str, Doc("Of Redis")]
    cluster: Annotated[bool, Doc("Redis is a cluster")]
    owner: Annotated[str, Doc("The holder of the lease of a store in Redis")]
    frame: Annotated[int, Doc("The last frame of the store")]
    queues: Annotated[list[StoreQueue], Doc("Of a store in Redis")]
    frames_lost: Annotated[int, Doc("Lost committed frames since the store was created")] = 0
    replicas: Annotated[int, Doc("Connected replicas of Redis; of one node of a Cluster")] = 0
    replica_timeouts: Annotated[
        int, Doc("Commits that replicas did not acknowledge in time, since the start")
    ] = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """Committed frames that a store has lost, until an operator confirms to know of it."""

    cell: Annotated[int, Doc("Of a cluster; 0 without a cluster")]
    first: Annotated[int, Doc("The first lost frame")]
    last: Annotated[int, Doc("The last one")]
    frames: Annotated[int, Doc("Number of lost frames")]
    times: Annotated[int, Doc("Unconfirmed incidents")]
    at: Annotated[Time, Doc("When the latest was noticed")]
    queues: Annotated[dict[str, int], Doc("Lost messages by queue, as far as known")]


@dataclass(frozen=True, slots=True)
class Sample:
    """Event `queues` of the live stream."""

    node: Annotated[Node, Doc("The node that answers")]
    queues: Annotated[list[Queue], Doc("By name")]


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller's identity as the server sees it."""

    name: Annotated[str, Doc("Name of the user or token")]
    role: Annotated[RoleName, Doc("What the caller may do")]
    anonymous: Annotated[bool, Doc("The caller sent no credentials, and needs none")]


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of the cluster."""

    id: Annotated[str, Doc("Of this incarnation: it changes with a restart")]
    name: Annotated[str, Doc("Name of the node")]
    started_at: Annotated[Time, Doc("When it started")]
    link: Annotated[str, Doc("The address for other nodes")]
    mqtt: Annotated[str, Doc("The address for clients")]
    http: Annotated[str, Doc("The address of REST API and console")]
    grpc: Annotated[str, Doc("The address of the gRPC API")]
    cells: Annotated[int, Doc("Number of cells that it owns")]
    suspected_by: Annotated[list[str], Doc("Nodes that do not reach it")]


@dataclass(frozen=True, slots=True)
class ClusterCell:
    """A cell: a part of all queues and sessions, which one node owns."""

    cell: Annotated[int, Doc("Number of the cell")]
    node: Annotated[str, Doc("The owner; empty: no live node")]
    wanted: Annotated[str, Doc("The planned owner: another node while the cell moves")]


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """The owner of a queue, existing or not."""

    queue: Annotated[str, Doc("Name of the queue")]
    cell: Annotated[int, Doc("Its cell")]
    node: Annotated[str, Doc("The owner of the cell; empty: no live node")]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Without a cluster: `enabled` false, and nothing else."""

    enabled: Annotated[bool, Doc("The server is part of a cluster")]
    name: Annotated[str, Doc("Name of the cluster")] = ""
    me: Annotated[
        str, Doc("Name of the node that answers; empty while it is not in the cluster")
    ] = ""
    nodes: Annotated[list[ClusterNode], Doc("The nodes that this one sees")] = field(
        default_factory=list
    )
    cells: Annotated[list[ClusterCell], Doc("By number")] = field(default_factory=list)
    moving: Annotated[int, Doc("Cells that are not yet at their planned owner")] = 0
    place: Annotated[QueuePlace | None, Doc("Of the requested queue", grpc="")] = None


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """What happened at a tick of a schedule."""

    tick: Annotated[Time, Doc("The time for which it was scheduled")]
    at: Annotated[Time, Doc("When it happened")]
    outcome: Annotated[
        str, Doc("published, duplicate, refused (and tried again) or missed", example="published")
    ]
    message_id: Annotated[str, Doc("Id of the message; empty for a missed tick")]
    detail: Annotated[str, Doc("Why it was refused, or how many ticks were missed")]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A recurring publish to a queue."""

    name: Annotated[str, Doc("Name, unique in the cell of its queue", example="nightly")]
    queue: Annotated[str, Doc("The queue that gets its messages")]
    cron: Annotated[str, Doc("Cron expression; empty: an interval", example="30 2 * * *")]
    every: Annotated[str, Doc("Interval; empty: a cron expression", example="15m")]
    time_zone: Annotated[str, Doc("Of the cron expression", example="Europe/Berlin")]
    jitter: Annotated[str, Doc("Largest delay of a tick", example="0s")]
    missed: Annotated[str, Doc("What happens to missed ticks: skip, once or all", example="skip")]
    key: Annotated[str, Doc("Partition key of its messages")]
    size: Annotated[Size, Doc("Of the payload")]
    payload: Annotated[bytes, Doc("Payload of its messages")]
    expiry: Annotated[Duration, Doc("Time to live of its messages; 0: that of the queue")]
    pause: Annotated[Pause | None, Doc("null: it is not paused")]
    fault: Annotated[str, Doc("Why it cannot tick, such as a time zone that this system lacks")]
    next_runs: Annotated[list[Time], Doc("The next five ticks; empty while it is paused")]
    last_runs: Annotated[list[ScheduleRun], Doc("The last five runs, newest first")]
    counts: Annotated[dict[str, int], Doc("Runs by outcome", example={"published": 9})]
    created_at: Annotated[Time, Doc("Time of creation")]
    changed_by: Annotated[str, Doc("Who stored it", example="ann")]


@dataclass(frozen=True, slots=True)
class NewSchedule:
    """A schedule to store. Durations are texts such as "15m"."""

    name: str
    message: OutgoingMessage
    cron: str = ""
    every: str = ""
    time_zone: str = ""
    jitter: str = ""
    missed: str = "skip"


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
