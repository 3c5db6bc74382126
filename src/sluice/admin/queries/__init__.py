"""What the admin service answers: one module for each kind of resource."""

from sluice.admin.queries import (
    client_operations,
    dead_letter_operations,
    message_lookup,
    owner_operations,
    publish_operation,
    schedule_operations,
    view_builders,
    waiting_messages,
)
from sluice.admin.queries.dead_letter_errors import MAX_EXAMINED
from sluice.admin.queries.diagnosis import message_trace, phrases, queue_diagnosis
from sluice.admin.queries.diagnosis.recent_flow import RecentFlow
from sluice.admin.queries.offline_verification import combine_reports, verify_store
from sluice.admin.queries.store_status import LossTracker, StoreStatus
from sluice.admin.queries.view_builders import build_caller, build_cluster

__all__ = [
    "MAX_EXAMINED",
    "LossTracker",
    "RecentFlow",
    "StoreStatus",
    "build_caller",
    "build_cluster",
    "client_operations",
    "combine_reports",
    "dead_letter_operations",
    "message_lookup",
    "message_trace",
    "owner_operations",
    "phrases",
    "publish_operation",
    "queue_diagnosis",
    "schedule_operations",
    "verify_store",
    "view_builders",
    "waiting_messages",
]
