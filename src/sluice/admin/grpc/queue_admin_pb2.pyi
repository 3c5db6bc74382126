import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class QueueStats(_message.Message):
    __slots__ = ("name", "total_messages", "inflight_messages", "dlq_messages", "enqueue_rate", "ack_rate", "active_consumers", "partitions_assigned", "retrying", "dequeue_rate", "type", "ordering", "partitions", "max_depth", "bytes", "dlq_name", "is_dead_letters", "enqueued", "acked", "duplicates", "refused", "retry_count", "dead", "groups", "created_at", "nack_rate", "avg_delivery_latency", "avg_process_latency", "pause")
    class PartitionsAssignedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DeadEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DLQ_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ENQUEUE_RATE_FIELD_NUMBER: _ClassVar[int]
    ACK_RATE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    RETRYING_FIELD_NUMBER: _ClassVar[int]
    DEQUEUE_RATE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ORDERING_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DLQ_NAME_FIELD_NUMBER: _ClassVar[int]
    IS_DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    ENQUEUED_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RETRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    NACK_RATE_FIELD_NUMBER: _ClassVar[int]
    AVG_DELIVERY_LATENCY_FIELD_NUMBER: _ClassVar[int]
    AVG_PROCESS_LATENCY_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    name: str
    total_messages: int
    inflight_messages: int
    dlq_messages: int
    enqueue_rate: float
    ack_rate: float
    active_consumers: int
    partitions_assigned: _containers.ScalarMap[str, int]
    retrying: int
    dequeue_rate: float
    type: str
    ordering: str
    partitions: int
    max_depth: int
    bytes: int
    dlq_name: str
    is_dead_letters: bool
    enqueued: int
    acked: int
    duplicates: int
    refused: int
    retry_count: int
    dead: _containers.ScalarMap[str, int]
    groups: int
    created_at: _timestamp_pb2.Timestamp
    nack_rate: float
    avg_delivery_latency: float
    avg_process_latency: float
    pause: Pause
    def __init__(self, name: _Optional[str] = ..., total_messages: _Optional[int] = ..., inflight_messages: _Optional[int] = ..., dlq_messages: _Optional[int] = ..., enqueue_rate: _Optional[float] = ..., ack_rate: _Optional[float] = ..., active_consumers: _Optional[int] = ..., partitions_assigned: _Optional[_Mapping[str, int]] = ..., retrying: _Optional[int] = ..., dequeue_rate: _Optional[float] = ..., type: _Optional[str] = ..., ordering: _Optional[str] = ..., partitions: _Optional[int] = ..., max_depth: _Optional[int] = ..., bytes: _Optional[int] = ..., dlq_name: _Optional[str] = ..., is_dead_letters: _Optional[bool] = ..., enqueued: _Optional[int] = ..., acked: _Optional[int] = ..., duplicates: _Optional[int] = ..., refused: _Optional[int] = ..., retry_count: _Optional[int] = ..., dead: _Optional[_Mapping[str, int]] = ..., groups: _Optional[int] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., nack_rate: _Optional[float] = ..., avg_delivery_latency: _Optional[float] = ..., avg_process_latency: _Optional[float] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ...) -> None: ...

class Partition(_message.Message):
    __slots__ = ("number", "first", "next", "messages", "last_delivery")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    LAST_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    number: int
    first: int
    next: int
    messages: int
    last_delivery: _timestamp_pb2.Timestamp
    def __init__(self, number: _Optional[int] = ..., first: _Optional[int] = ..., next: _Optional[int] = ..., messages: _Optional[int] = ..., last_delivery: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("stats", "config_json", "groups", "partitions")
    STATS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    stats: QueueStats
    config_json: str
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    partitions: _containers.RepeatedCompositeFieldContainer[Partition]
    def __init__(self, stats: _Optional[_Union[QueueStats, _Mapping]] = ..., config_json: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., partitions: _Optional[_Iterable[_Union[Partition, _Mapping]]] = ...) -> None: ...

class QueueConfig(_message.Message):
    __slots__ = ("config_json",)
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    config_json: str
    def __init__(self, config_json: _Optional[str] = ...) -> None: ...

class CreateQueueRequest(_message.Message):
    __slots__ = ("config_json",)
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    config_json: str
    def __init__(self, config_json: _Optional[str] = ...) -> None: ...

class ListQueuesRequest(_message.Message):
    __slots__ = ("prefix", "after", "limit")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    after: str
    limit: int
    def __init__(self, prefix: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListQueuesResponse(_message.Message):
    __slots__ = ("queues", "next")
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedCompositeFieldContainer[QueueStats]
    next: str
    def __init__(self, queues: _Optional[_Iterable[_Union[QueueStats, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class GetQueueRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetQueueStatsRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PauseQueueRequest(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ResumeQueueRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteQueueRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteQueueResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UpdateConfigRequest(_message.Message):
    __slots__ = ("name", "config_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    config_json: str
    def __init__(self, name: _Optional[str] = ..., config_json: _Optional[str] = ...) -> None: ...

class PurgeQueueRequest(_message.Message):
    __slots__ = ("name", "older_than", "keep_newest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_FIELD_NUMBER: _ClassVar[int]
    KEEP_NEWEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    older_than: _duration_pb2.Duration
    keep_newest: int
    def __init__(self, name: _Optional[str] = ..., older_than: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., keep_newest: _Optional[int] = ...) -> None: ...

class PurgeQueueResponse(_message.Message):
    __slots__ = ("purged",)
    PURGED_FIELD_NUMBER: _ClassVar[int]
    purged: int
    def __init__(self, purged: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("prefix", "queue", "limit")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    queue: str
    limit: int
    def __init__(self, prefix: _Optional[str] = ..., queue: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("node", "queues", "queue")
    NODE_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    queues: _containers.RepeatedCompositeFieldContainer[QueueStats]
    queue: Queue
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., queues: _Optional[_Iterable[_Union[QueueStats, _Mapping]]] = ..., queue: _Optional[_Union[Queue, _Mapping]] = ...) -> None: ...

class Property(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("message_id", "queue", "partition", "sequence", "key", "priority", "payload", "size", "enqueued_at", "expires_at", "deliver_at", "topic", "content_type", "response_topic", "correlation_data", "properties", "headers", "state", "attempt", "consumer")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ENQUEUED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOPIC_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_DATA_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    queue: str
    partition: int
    sequence: int
    key: str
    priority: int
    payload: bytes
    size: int
    enqueued_at: _timestamp_pb2.Timestamp
    expires_at: _timestamp_pb2.Timestamp
    deliver_at: _timestamp_pb2.Timestamp
    topic: str
    content_type: str
    response_topic: str
    correlation_data: bytes
    properties: _containers.RepeatedCompositeFieldContainer[Property]
    headers: _containers.ScalarMap[str, str]
    state: str
    attempt: int
    consumer: str
    def __init__(self, message_id: _Optional[str] = ..., queue: _Optional[str] = ..., partition: _Optional[int] = ..., sequence: _Optional[int] = ..., key: _Optional[str] = ..., priority: _Optional[int] = ..., payload: _Optional[bytes] = ..., size: _Optional[int] = ..., enqueued_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., deliver_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., topic: _Optional[str] = ..., content_type: _Optional[str] = ..., response_topic: _Optional[str] = ..., correlation_data: _Optional[bytes] = ..., properties: _Optional[_Iterable[_Union[Property, _Mapping]]] = ..., headers: _Optional[_Mapping[str, str]] = ..., state: _Optional[str] = ..., attempt: _Optional[int] = ..., consumer: _Optional[str] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("queue", "payload", "message_id", "key", "priority", "delay", "deliver_at", "expiry", "content_type", "response_topic", "correlation_data", "properties")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOPIC_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_DATA_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    queue: str
    payload: bytes
    message_id: str
    key: str
    priority: int
    delay: _duration_pb2.Duration
    deliver_at: _timestamp_pb2.Timestamp
    expiry: _duration_pb2.Duration
    content_type: str
    response_topic: str
    correlation_data: bytes
    properties: _containers.RepeatedCompositeFieldContainer[Property]
    def __init__(self, queue: _Optional[str] = ..., payload: _Optional[bytes] = ..., message_id: _Optional[str] = ..., key: _Optional[str] = ..., priority: _Optional[int] = ..., delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deliver_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expiry: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., content_type: _Optional[str] = ..., response_topic: _Optional[str] = ..., correlation_data: _Optional[bytes] = ..., properties: _Optional[_Iterable[_Union[Property, _Mapping]]] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("message_id", "queue", "duplicate")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    queue: str
    duplicate: bool
    def __init__(self, message_id: _Optional[str] = ..., queue: _Optional[str] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class PeekMessagesRequest(_message.Message):
    __slots__ = ("queue", "group", "partition", "start", "limit", "payload_bytes")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    partition: int
    start: int
    limit: int
    payload_bytes: int
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., partition: _Optional[int] = ..., start: _Optional[int] = ..., limit: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class PeekMessagesResponse(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class GetMessageRequest(_message.Message):
    __slots__ = ("queue", "message_id", "payload_bytes")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    queue: str
    message_id: str
    payload_bytes: int
    def __init__(self, queue: _Optional[str] = ..., message_id: _Optional[str] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class CancelMessageRequest(_message.Message):
    __slots__ = ("queue", "message_id")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    queue: str
    message_id: str
    def __init__(self, queue: _Optional[str] = ..., message_id: _Optional[str] = ...) -> None: ...

class CancelMessageResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MessageFilter(_message.Message):
    __slots__ = ("key", "state", "since", "until", "contains")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    CONTAINS_FIELD_NUMBER: _ClassVar[int]
    key: str
    state: str
    since: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    contains: str
    def __init__(self, key: _Optional[str] = ..., state: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., contains: _Optional[str] = ...) -> None: ...

class CancelMessagesRequest(_message.Message):
    __slots__ = ("queue", "filter", "limit", "dry_run")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    queue: str
    filter: MessageFilter
    limit: int
    dry_run: bool
    def __init__(self, queue: _Optional[str] = ..., filter: _Optional[_Union[MessageFilter, _Mapping]] = ..., limit: _Optional[int] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class RescheduleMessageRequest(_message.Message):
    __slots__ = ("queue", "message_id", "delay", "deliver_at")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    message_id: str
    delay: _duration_pb2.Duration
    deliver_at: _timestamp_pb2.Timestamp
    def __init__(self, queue: _Optional[str] = ..., message_id: _Optional[str] = ..., delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deliver_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RescheduleMessagesRequest(_message.Message):
    __slots__ = ("queue", "filter", "limit", "dry_run", "delay", "deliver_at")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    filter: MessageFilter
    limit: int
    dry_run: bool
    delay: _duration_pb2.Duration
    deliver_at: _timestamp_pb2.Timestamp
    def __init__(self, queue: _Optional[str] = ..., filter: _Optional[_Union[MessageFilter, _Mapping]] = ..., limit: _Optional[int] = ..., dry_run: _Optional[bool] = ..., delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deliver_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Commanded(_message.Message):
    __slots__ = ("changed", "in_delivery", "left", "dry_run")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    IN_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    changed: int
    in_delivery: int
    left: int
    dry_run: bool
    def __init__(self, changed: _Optional[int] = ..., in_delivery: _Optional[int] = ..., left: _Optional[int] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("queue", "message_id")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    queue: str
    message_id: str
    def __init__(self, queue: _Optional[str] = ..., message_id: _Optional[str] = ...) -> None: ...

class GroupState(_message.Message):
    __slots__ = ("group", "state", "consumer", "attempt", "failures", "due", "deadline", "why", "do")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    DO_FIELD_NUMBER: _ClassVar[int]
    group: str
    state: str
    consumer: str
    attempt: int
    failures: int
    due: _timestamp_pb2.Timestamp
    deadline: _timestamp_pb2.Timestamp
    why: str
    do: str
    def __init__(self, group: _Optional[str] = ..., state: _Optional[str] = ..., consumer: _Optional[str] = ..., attempt: _Optional[int] = ..., failures: _Optional[int] = ..., due: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., why: _Optional[str] = ..., do: _Optional[str] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("at", "what", "group", "consumer", "attempt", "detail")
    AT_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    at: _timestamp_pb2.Timestamp
    what: str
    group: str
    consumer: str
    attempt: int
    detail: str
    def __init__(self, at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., what: _Optional[str] = ..., group: _Optional[str] = ..., consumer: _Optional[str] = ..., attempt: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Biography(_message.Message):
    __slots__ = ("message_id", "queue", "message", "states", "events", "dead_letters", "summary")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    queue: str
    message: Message
    states: _containers.RepeatedCompositeFieldContainer[GroupState]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    dead_letters: _containers.RepeatedScalarFieldContainer[str]
    summary: str
    def __init__(self, message_id: _Optional[str] = ..., queue: _Optional[str] = ..., message: _Optional[_Union[Message, _Mapping]] = ..., states: _Optional[_Iterable[_Union[GroupState, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., dead_letters: _Optional[_Iterable[str]] = ..., summary: _Optional[str] = ...) -> None: ...

class FindMessageRequest(_message.Message):
    __slots__ = ("message_id",)
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    def __init__(self, message_id: _Optional[str] = ...) -> None: ...

class FindMessageResponse(_message.Message):
    __slots__ = ("queues",)
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, queues: _Optional[_Iterable[str]] = ...) -> None: ...

class Ledger(_message.Message):
    __slots__ = ("enqueued", "waiting", "delivered", "retrying", "acked", "dead", "expired", "purged", "cancelled")
    ENQUEUED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    RETRYING_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    PURGED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    enqueued: int
    waiting: int
    delivered: int
    retrying: int
    acked: int
    dead: int
    expired: int
    purged: int
    cancelled: int
    def __init__(self, enqueued: _Optional[int] = ..., waiting: _Optional[int] = ..., delivered: _Optional[int] = ..., retrying: _Optional[int] = ..., acked: _Optional[int] = ..., dead: _Optional[int] = ..., expired: _Optional[int] = ..., purged: _Optional[int] = ..., cancelled: _Optional[int] = ...) -> None: ...

class Consumer(_message.Message):
    __slots__ = ("client", "group", "partitions", "inflight", "prefetch", "priority", "exclusive", "connected", "stalled", "slow", "settled_at", "last_heartbeat")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIVE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    SETTLED_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    client: str
    group: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    inflight: int
    prefetch: int
    priority: int
    exclusive: bool
    connected: bool
    stalled: bool
    slow: bool
    settled_at: _timestamp_pb2.Timestamp
    last_heartbeat: _timestamp_pb2.Timestamp
    def __init__(self, client: _Optional[str] = ..., group: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., inflight: _Optional[int] = ..., prefetch: _Optional[int] = ..., priority: _Optional[int] = ..., exclusive: _Optional[bool] = ..., connected: _Optional[bool] = ..., stalled: _Optional[bool] = ..., slow: _Optional[bool] = ..., settled_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_heartbeat: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("name", "lag", "ledger", "floors", "oldest_at", "redelivered", "nacked", "consumers", "pause", "breaker", "held_by", "held_keys")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    FLOORS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_AT_FIELD_NUMBER: _ClassVar[int]
    REDELIVERED_FIELD_NUMBER: _ClassVar[int]
    NACKED_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    HELD_KEYS_FIELD_NUMBER: _ClassVar[int]
    name: str
    lag: int
    ledger: Ledger
    floors: _containers.RepeatedScalarFieldContainer[int]
    oldest_at: _timestamp_pb2.Timestamp
    redelivered: int
    nacked: int
    consumers: _containers.RepeatedCompositeFieldContainer[Consumer]
    pause: Pause
    breaker: str
    held_by: _containers.RepeatedScalarFieldContainer[str]
    held_keys: _containers.RepeatedCompositeFieldContainer[HeldKey]
    def __init__(self, name: _Optional[str] = ..., lag: _Optional[int] = ..., ledger: _Optional[_Union[Ledger, _Mapping]] = ..., floors: _Optional[_Iterable[int]] = ..., oldest_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., redelivered: _Optional[int] = ..., nacked: _Optional[int] = ..., consumers: _Optional[_Iterable[_Union[Consumer, _Mapping]]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., breaker: _Optional[str] = ..., held_by: _Optional[_Iterable[str]] = ..., held_keys: _Optional[_Iterable[_Union[HeldKey, _Mapping]]] = ...) -> None: ...

class HeldKey(_message.Message):
    __slots__ = ("key", "message_id", "held_at", "releases_at", "dead_letters", "repaired", "waiting")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_AT_FIELD_NUMBER: _ClassVar[int]
    RELEASES_AT_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    key: str
    message_id: str
    held_at: _timestamp_pb2.Timestamp
    releases_at: _timestamp_pb2.Timestamp
    dead_letters: int
    repaired: int
    waiting: int
    def __init__(self, key: _Optional[str] = ..., message_id: _Optional[str] = ..., held_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., releases_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., dead_letters: _Optional[int] = ..., repaired: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("at", "by", "reason")
    AT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    at: _timestamp_pb2.Timestamp
    by: str
    reason: str
    def __init__(self, at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., by: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PauseGroupRequest(_message.Message):
    __slots__ = ("queue", "group", "reason")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    reason: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ResumeGroupRequest(_message.Message):
    __slots__ = ("queue", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class ListGroupsRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    def __init__(self, groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ...) -> None: ...

class GetGroupRequest(_message.Message):
    __slots__ = ("queue", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class CreateGroupRequest(_message.Message):
    __slots__ = ("queue", "group", "start")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    start: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., start: _Optional[str] = ...) -> None: ...

class DeleteGroupRequest(_message.Message):
    __slots__ = ("queue", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class DeleteGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SeekGroupRequest(_message.Message):
    __slots__ = ("queue", "group", "to")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    to: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., to: _Optional[str] = ...) -> None: ...

class ListConsumersRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class ListConsumersResponse(_message.Message):
    __slots__ = ("consumers",)
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    consumers: _containers.RepeatedCompositeFieldContainer[Consumer]
    def __init__(self, consumers: _Optional[_Iterable[_Union[Consumer, _Mapping]]] = ...) -> None: ...

class LetterFilter(_message.Message):
    __slots__ = ("reason", "group", "since", "until", "contains", "error")
    REASON_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    CONTAINS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reason: str
    group: str
    since: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    contains: str
    error: str
    def __init__(self, reason: _Optional[str] = ..., group: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., contains: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("queue", "filter", "after", "limit", "payload_bytes")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    queue: str
    filter: LetterFilter
    after: str
    limit: int
    payload_bytes: int
    def __init__(self, queue: _Optional[str] = ..., filter: _Optional[_Union[LetterFilter, _Mapping]] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("letters", "next")
    LETTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    letters: _containers.RepeatedCompositeFieldContainer[Message]
    next: str
    def __init__(self, letters: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class GetDeadLetterRequest(_message.Message):
    __slots__ = ("queue", "message_id", "payload_bytes")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    queue: str
    message_id: str
    payload_bytes: int
    def __init__(self, queue: _Optional[str] = ..., message_id: _Optional[str] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class RetryDeadLetterRequest(_message.Message):
    __slots__ = ("queue", "message_id", "to_all", "payload")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TO_ALL_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    queue: str
    message_id: str
    to_all: bool
    payload: bytes
    def __init__(self, queue: _Optional[str] = ..., message_id: _Optional[str] = ..., to_all: _Optional[bool] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ListDeadLetterErrorsRequest(_message.Message):
    __slots__ = ("queue", "filter", "limit")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    filter: LetterFilter
    limit: int
    def __init__(self, queue: _Optional[str] = ..., filter: _Optional[_Union[LetterFilter, _Mapping]] = ..., limit: _Optional[int] = ...) -> None: ...

class ErrorGroup(_message.Message):
    __slots__ = ("reason", "error", "count", "first_at", "last_at", "groups", "example")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_AT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    error: str
    count: int
    first_at: _timestamp_pb2.Timestamp
    last_at: _timestamp_pb2.Timestamp
    groups: _containers.RepeatedScalarFieldContainer[str]
    example: str
    def __init__(self, reason: _Optional[str] = ..., error: _Optional[str] = ..., count: _Optional[int] = ..., first_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., groups: _Optional[_Iterable[str]] = ..., example: _Optional[str] = ...) -> None: ...

class DeadLetterErrors(_message.Message):
    __slots__ = ("errors", "examined", "complete")
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    errors: _containers.RepeatedCompositeFieldContainer[ErrorGroup]
    examined: int
    complete: bool
    def __init__(self, errors: _Optional[_Iterable[_Union[ErrorGroup, _Mapping]]] = ..., examined: _Optional[int] = ..., complete: _Optional[bool] = ...) -> None: ...

class RetryDeadLettersRequest(_message.Message):
    __slots__ = ("queue", "filter", "limit", "to_all")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TO_ALL_FIELD_NUMBER: _ClassVar[int]
    queue: str
    filter: LetterFilter
    limit: int
    to_all: bool
    def __init__(self, queue: _Optional[str] = ..., filter: _Optional[_Union[LetterFilter, _Mapping]] = ..., limit: _Optional[int] = ..., to_all: _Optional[bool] = ...) -> None: ...

class Redriven(_message.Message):
    __slots__ = ("retried", "skipped", "left")
    RETRIED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    retried: int
    skipped: int
    left: int
    def __init__(self, retried: _Optional[int] = ..., skipped: _Optional[int] = ..., left: _Optional[int] = ...) -> None: ...

class PurgeDeadLettersRequest(_message.Message):
    __slots__ = ("queue", "filter")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    queue: str
    filter: LetterFilter
    def __init__(self, queue: _Optional[str] = ..., filter: _Optional[_Union[LetterFilter, _Mapping]] = ...) -> None: ...

class PurgeDeadLettersResponse(_message.Message):
    __slots__ = ("purged",)
    PURGED_FIELD_NUMBER: _ClassVar[int]
    purged: int
    def __init__(self, purged: _Optional[int] = ...) -> None: ...

class DeleteDeadLetterRequest(_message.Message):
    __slots__ = ("queue", "message_id")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    queue: str
    message_id: str
    def __init__(self, queue: _Optional[str] = ..., message_id: _Optional[str] = ...) -> None: ...

class DeleteDeadLetterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DiagnoseRequest(_message.Message):
    __slots__ = ("queue", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("code", "what", "do", "is_fault")
    CODE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    DO_FIELD_NUMBER: _ClassVar[int]
    IS_FAULT_FIELD_NUMBER: _ClassVar[int]
    code: str
    what: str
    do: str
    is_fault: bool
    def __init__(self, code: _Optional[str] = ..., what: _Optional[str] = ..., do: _Optional[str] = ..., is_fault: _Optional[bool] = ...) -> None: ...

class Diagnosis(_message.Message):
    __slots__ = ("queue", "healthy", "findings")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    healthy: bool
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    def __init__(self, queue: _Optional[str] = ..., healthy: _Optional[bool] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("faults",)
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    faults: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, faults: _Optional[_Iterable[str]] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ("place_of",)
    PLACE_OF_FIELD_NUMBER: _ClassVar[int]
    place_of: str
    def __init__(self, place_of: _Optional[str] = ...) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("enabled", "name", "me", "nodes", "cells", "moving", "place")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ME_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    name: str
    me: str
    nodes: _containers.RepeatedCompositeFieldContainer[ClusterNode]
    cells: _containers.RepeatedCompositeFieldContainer[ClusterCell]
    moving: int
    place: ClusterCell
    def __init__(self, enabled: _Optional[bool] = ..., name: _Optional[str] = ..., me: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[ClusterNode, _Mapping]]] = ..., cells: _Optional[_Iterable[_Union[ClusterCell, _Mapping]]] = ..., moving: _Optional[int] = ..., place: _Optional[_Union[ClusterCell, _Mapping]] = ...) -> None: ...

class ClusterNode(_message.Message):
    __slots__ = ("id", "name", "started_at", "link", "mqtt", "http", "grpc", "cells", "suspected_by")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    MQTT_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_BY_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    started_at: _timestamp_pb2.Timestamp
    link: str
    mqtt: str
    http: str
    grpc: str
    cells: int
    suspected_by: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., link: _Optional[str] = ..., mqtt: _Optional[str] = ..., http: _Optional[str] = ..., grpc: _Optional[str] = ..., cells: _Optional[int] = ..., suspected_by: _Optional[_Iterable[str]] = ...) -> None: ...

class ClusterCell(_message.Message):
    __slots__ = ("cell", "node", "wanted")
    CELL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    cell: int
    node: str
    wanted: str
    def __init__(self, cell: _Optional[int] = ..., node: _Optional[str] = ..., wanted: _Optional[str] = ...) -> None: ...

class GetNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "version", "build", "store", "started_at", "now", "connections", "sessions", "subscriptions", "retained", "queues", "messages", "bytes_received", "bytes_sent", "packets_received", "packets_sent", "publishes_received", "publishes_sent", "publishes_dropped", "stopping", "losses")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    PACKETS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PACKETS_SENT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHES_SENT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    build: str
    store: str
    started_at: _timestamp_pb2.Timestamp
    now: _timestamp_pb2.Timestamp
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
    losses: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., build: _Optional[str] = ..., store: _Optional[str] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., now: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., connections: _Optional[int] = ..., sessions: _Optional[int] = ..., subscriptions: _Optional[int] = ..., retained: _Optional[int] = ..., queues: _Optional[int] = ..., messages: _Optional[int] = ..., bytes_received: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., packets_received: _Optional[int] = ..., packets_sent: _Optional[int] = ..., publishes_received: _Optional[int] = ..., publishes_sent: _Optional[int] = ..., publishes_dropped: _Optional[int] = ..., stopping: _Optional[bool] = ..., losses: _Optional[int] = ...) -> None: ...

class GetStoreRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Store(_message.Message):
    __slots__ = ("kind", "address", "healthy", "fault", "warnings", "segments", "bytes", "version", "cluster", "owner", "frame", "queues", "frames_lost", "replicas", "replica_timeouts")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_LOST_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_TIMEOUTS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    address: str
    healthy: bool
    fault: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    segments: int
    bytes: int
    version: str
    cluster: bool
    owner: str
    frame: int
    queues: _containers.RepeatedCompositeFieldContainer[StoreQueue]
    frames_lost: int
    replicas: int
    replica_timeouts: int
    def __init__(self, kind: _Optional[str] = ..., address: _Optional[str] = ..., healthy: _Optional[bool] = ..., fault: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ..., segments: _Optional[int] = ..., bytes: _Optional[int] = ..., version: _Optional[str] = ..., cluster: _Optional[bool] = ..., owner: _Optional[str] = ..., frame: _Optional[int] = ..., queues: _Optional[_Iterable[_Union[StoreQueue, _Mapping]]] = ..., frames_lost: _Optional[int] = ..., replicas: _Optional[int] = ..., replica_timeouts: _Optional[int] = ...) -> None: ...

class ListLossesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLossesResponse(_message.Message):
    __slots__ = ("losses",)
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    losses: _containers.RepeatedCompositeFieldContainer[Loss]
    def __init__(self, losses: _Optional[_Iterable[_Union[Loss, _Mapping]]] = ...) -> None: ...

class ConfirmLossRequest(_message.Message):
    __slots__ = ("cell",)
    CELL_FIELD_NUMBER: _ClassVar[int]
    cell: int
    def __init__(self, cell: _Optional[int] = ...) -> None: ...

class Loss(_message.Message):
    __slots__ = ("cell", "first", "last", "frames", "times", "at", "queues")
    class QueuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CELL_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    cell: int
    first: int
    last: int
    frames: int
    times: int
    at: _timestamp_pb2.Timestamp
    queues: _containers.ScalarMap[str, int]
    def __init__(self, cell: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., frames: _Optional[int] = ..., times: _Optional[int] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., queues: _Optional[_Mapping[str, int]] = ...) -> None: ...

class StoreQueue(_message.Message):
    __slots__ = ("name", "partitions", "length", "counters", "groups")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    partitions: int
    length: int
    counters: _containers.ScalarMap[str, int]
    groups: _containers.RepeatedCompositeFieldContainer[StoreGroup]
    def __init__(self, name: _Optional[str] = ..., partitions: _Optional[int] = ..., length: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., groups: _Optional[_Iterable[_Union[StoreGroup, _Mapping]]] = ...) -> None: ...

class StoreGroup(_message.Message):
    __slots__ = ("name", "pending", "consumers", "lag", "retrying")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    RETRYING_FIELD_NUMBER: _ClassVar[int]
    name: str
    pending: int
    consumers: int
    lag: int
    retrying: int
    def __init__(self, name: _Optional[str] = ..., pending: _Optional[int] = ..., consumers: _Optional[int] = ..., lag: _Optional[int] = ..., retrying: _Optional[int] = ...) -> None: ...

class ListOwnersRequest(_message.Message):
    __slots__ = ("prefix", "after", "limit")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    after: str
    limit: int
    def __init__(self, prefix: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListOwnersResponse(_message.Message):
    __slots__ = ("owners",)
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    owners: _containers.RepeatedCompositeFieldContainer[Owner]
    def __init__(self, owners: _Optional[_Iterable[_Union[Owner, _Mapping]]] = ...) -> None: ...

class GetOwnerRequest(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: str
    def __init__(self, client: _Optional[str] = ...) -> None: ...

class PeekOwnerRequest(_message.Message):
    __slots__ = ("client", "start", "limit", "payload_bytes")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    client: str
    start: int
    limit: int
    payload_bytes: int
    def __init__(self, client: _Optional[str] = ..., start: _Optional[int] = ..., limit: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class PurgeOwnerRequest(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: str
    def __init__(self, client: _Optional[str] = ...) -> None: ...

class Owner(_message.Message):
    __slots__ = ("client", "depth", "keys", "bytes", "last_sequence", "acked_sequence", "acked_at", "written_at", "subscribed", "connected")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACKED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACKED_AT_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_AT_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    client: str
    depth: int
    keys: int
    bytes: int
    last_sequence: int
    acked_sequence: int
    acked_at: _timestamp_pb2.Timestamp
    written_at: _timestamp_pb2.Timestamp
    subscribed: bool
    connected: bool
    def __init__(self, client: _Optional[str] = ..., depth: _Optional[int] = ..., keys: _Optional[int] = ..., bytes: _Optional[int] = ..., last_sequence: _Optional[int] = ..., acked_sequence: _Optional[int] = ..., acked_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., written_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., subscribed: _Optional[bool] = ..., connected: _Optional[bool] = ...) -> None: ...

class ListClientsRequest(_message.Message):
    __slots__ = ("prefix", "after", "limit", "connected", "user")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    after: str
    limit: int
    connected: bool
    user: str
    def __init__(self, prefix: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., connected: _Optional[bool] = ..., user: _Optional[str] = ...) -> None: ...

class ListClientsResponse(_message.Message):
    __slots__ = ("clients", "next")
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    clients: _containers.RepeatedCompositeFieldContainer[Client]
    next: str
    def __init__(self, clients: _Optional[_Iterable[_Union[Client, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class GetClientRequest(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: str
    def __init__(self, client: _Optional[str] = ...) -> None: ...

class KickClientRequest(_message.Message):
    __slots__ = ("client", "end_session")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    END_SESSION_FIELD_NUMBER: _ClassVar[int]
    client: str
    end_session: bool
    def __init__(self, client: _Optional[str] = ..., end_session: _Optional[bool] = ...) -> None: ...

class Kicked(_message.Message):
    __slots__ = ("disconnected", "session_ended")
    DISCONNECTED_FIELD_NUMBER: _ClassVar[int]
    SESSION_ENDED_FIELD_NUMBER: _ClassVar[int]
    disconnected: bool
    session_ended: bool
    def __init__(self, disconnected: _Optional[bool] = ..., session_ended: _Optional[bool] = ...) -> None: ...

class Client(_message.Message):
    __slots__ = ("client", "user", "connected", "protocol", "address", "connected_at", "disconnected_at", "session_expiry", "subscriptions", "inflight", "queued", "queued_bytes", "dropped")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_AT_FIELD_NUMBER: _ClassVar[int]
    DISCONNECTED_AT_FIELD_NUMBER: _ClassVar[int]
    SESSION_EXPIRY_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    client: str
    user: str
    connected: bool
    protocol: str
    address: str
    connected_at: _timestamp_pb2.Timestamp
    disconnected_at: _timestamp_pb2.Timestamp
    session_expiry: int
    subscriptions: int
    inflight: int
    queued: int
    queued_bytes: int
    dropped: int
    def __init__(self, client: _Optional[str] = ..., user: _Optional[str] = ..., connected: _Optional[bool] = ..., protocol: _Optional[str] = ..., address: _Optional[str] = ..., connected_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., disconnected_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., session_expiry: _Optional[int] = ..., subscriptions: _Optional[int] = ..., inflight: _Optional[int] = ..., queued: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., dropped: _Optional[int] = ...) -> None: ...

class ClientSubscription(_message.Message):
    __slots__ = ("filter", "qos")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    QOS_FIELD_NUMBER: _ClassVar[int]
    filter: str
    qos: int
    def __init__(self, filter: _Optional[str] = ..., qos: _Optional[int] = ...) -> None: ...

class ClientConsumer(_message.Message):
    __slots__ = ("queue", "group", "inflight", "prefetch")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    inflight: int
    prefetch: int
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., inflight: _Optional[int] = ..., prefetch: _Optional[int] = ...) -> None: ...

class ClientDetail(_message.Message):
    __slots__ = ("client", "subscriptions", "consumers")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    client: Client
    subscriptions: _containers.RepeatedCompositeFieldContainer[ClientSubscription]
    consumers: _containers.RepeatedCompositeFieldContainer[ClientConsumer]
    def __init__(self, client: _Optional[_Union[Client, _Mapping]] = ..., subscriptions: _Optional[_Iterable[_Union[ClientSubscription, _Mapping]]] = ..., consumers: _Optional[_Iterable[_Union[ClientConsumer, _Mapping]]] = ...) -> None: ...

class WhoAmIRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Identity(_message.Message):
    __slots__ = ("name", "role", "anonymous")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ANONYMOUS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    anonymous: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., anonymous: _Optional[bool] = ...) -> None: ...
