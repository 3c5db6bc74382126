"""Workers: functions that process the jobs of a queue. `sluice worker module:app` runs them."""

from sluice.worker.exceptions import Reject, Retry
from sluice.worker.idempotency import DoneLog, MemoryDone, RedisDone, SqliteDone
from sluice.worker.running_worker import Running
from sluice.worker.task import Task
from sluice.worker.worker import Worker

__all__ = [
    "DoneLog",
    "MemoryDone",
    "RedisDone",
    "Reject",
    "Retry",
    "Running",
    "SqliteDone",
    "Task",
    "Worker",
]
