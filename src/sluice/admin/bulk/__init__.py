"""The broker's side of bulk reads and writes."""

from sluice.admin.bulk import bulk_views
from sluice.admin.bulk.bulk_service import BulkService
from sluice.admin.bulk.bulk_views import Batch, CommitResult, DeadLetterRepair, QueueTarget

__all__ = [
    "Batch",
    "BulkService",
    "CommitResult",
    "DeadLetterRepair",
    "QueueTarget",
    "bulk_views",
]
