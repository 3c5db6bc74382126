"""Create, change and inspect queues: their settings with templates, and their rates."""

from sluice.queues.service import views
from sluice.queues.service.queue_config import (
    DEFAULT_PARTITIONS,
    MAX_BINDING_LEVELS,
    MAX_CONFIG_BYTES,
    QueueConfig,
    check_new_bindings,
    parse_stored_rules,
    read_config,
)
from sluice.queues.service.queue_service import QueueCounters, QueueService
from sluice.queues.service.templates import QueueTemplates, Template

__all__ = [
    "DEFAULT_PARTITIONS",
    "MAX_BINDING_LEVELS",
    "MAX_CONFIG_BYTES",
    "QueueConfig",
    "QueueCounters",
    "QueueService",
    "QueueTemplates",
    "Template",
    "check_new_bindings",
    "parse_stored_rules",
    "read_config",
    "views",
]
