"""Workers: functions that process the jobs of a queue. `sluice worker module:app` runs them."""

from sluice.client import Reject, Retry
from sluice.worker.idempotency import (
    DeduplicationStore,
    MemoryDeduplication,
    RedisDeduplication,
    SqliteDeduplication,
)
from sluice.worker.job_context import JobLogFilter, current_delivery
from sluice.worker.retry_policy import RetryPolicy
from sluice.worker.running_worker import Running
from sluice.worker.task import Task
from sluice.worker.worker import Worker

__all__ = [
    "DeduplicationStore",
    "JobLogFilter",
    "MemoryDeduplication",
    "RedisDeduplication",
    "Reject",
    "Retry",
    "RetryPolicy",
    "Running",
    "SqliteDeduplication",
    "Task",
    "Worker",
    "current_delivery",
]
