"""Create and change queues (their settings with templates), and inspect them."""

from sluice.queues.service import stored_messages, views
from sluice.queues.service.group_inspector import GroupInspector, show_pause
from sluice.queues.service.inspector import EngineInspector, QueueInspector
from sluice.queues.service.message_events import events_in_message, merge_events
from sluice.queues.service.queue_config import (
    DEFAULT_PARTITIONS,
    MAX_BINDING_LEVELS,
    MAX_CONFIG_BYTES,
    QueueConfig,
    check_new_bindings,
    parse_stored_rules,
    read_config,
)
from sluice.queues.service.queue_service import QueueService
from sluice.queues.service.schedule_timing import check_schedule_name, make_timing
from sluice.queues.service.stored_messages import MessageLocation
from sluice.queues.service.templates import QueueTemplates, Template

__all__ = [
    "DEFAULT_PARTITIONS",
    "MAX_BINDING_LEVELS",
    "MAX_CONFIG_BYTES",
    "EngineInspector",
    "GroupInspector",
    "MessageLocation",
    "QueueConfig",
    "QueueInspector",
    "QueueService",
    "QueueTemplates",
    "Template",
    "check_new_bindings",
    "check_schedule_name",
    "events_in_message",
    "make_timing",
    "merge_events",
    "parse_stored_rules",
    "read_config",
    "show_pause",
    "stored_messages",
    "views",
]
