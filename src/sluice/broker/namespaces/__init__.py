"""The handlers of topic namespaces, and the checks that are the same in all."""

from sluice.broker.namespaces.admin_topics import AdminTopics
from sluice.broker.namespaces.compacted.handler import ExclusiveQueueHandler
from sluice.broker.namespaces.incoming import IncomingPublishes
from sluice.broker.namespaces.plain_topics import PlainTopics
from sluice.broker.namespaces.queues.api_messages import (
    MessageProperties,
    build_message,
    read_content_type,
    read_message_properties,
)
from sluice.broker.namespaces.queues.handler import CreatedQueueListener, QueueHandler
from sluice.broker.namespaces.queues.memberships import list_consumers
from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer, encode_user_property
from sluice.broker.namespaces.queues.queue_options import read_message_ids
from sluice.broker.namespaces.queues.schema_checks import SchemaChecks
from sluice.broker.namespaces.reason_mapping import get_reason_code
from sluice.broker.namespaces.reserved_topics import ReservedTopics
from sluice.broker.namespaces.responses import (
    PendingResponses,
    ResponseTopics,
    refuse_reserved_name,
)

__all__ = [
    "AdminTopics",
    "CreatedQueueListener",
    "ExclusiveQueueHandler",
    "IncomingPublishes",
    "MessageProperties",
    "PendingResponses",
    "PlainTopics",
    "QueueConsumer",
    "QueueHandler",
    "ReservedTopics",
    "ResponseTopics",
    "SchemaChecks",
    "build_message",
    "encode_user_property",
    "get_reason_code",
    "list_consumers",
    "read_content_type",
    "read_message_ids",
    "read_message_properties",
    "refuse_reserved_name",
]
