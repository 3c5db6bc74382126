"""Workers: functions that process the jobs of a queue. `sluice worker module:app` runs them."""

from sluice.client import Reject, Retry
from sluice.worker.idempotency import (
    DeduplicationStore,
    MemoryDeduplication,
    RedisDeduplication,
    SqliteDeduplication,
)
from sluice.worker.running_worker import Running
from sluice.worker.task import Task
from sluice.worker.worker import Worker

__all__ = [
    "DeduplicationStore",
    "MemoryDeduplication",
    "RedisDeduplication",
    "Reject",
    "Retry",
    "Running",
    "SqliteDeduplication",
    "Task",
    "Worker",
]
