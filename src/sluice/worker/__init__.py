"""Workers: functions that do the jobs of a queue. `sluice worker module:app` runs them."""

from sluice.worker.app import Worker
from sluice.worker.done import DoneLog, MemoryDone, RedisDone, SqliteDone
from sluice.worker.outcome import Reject, Retry
from sluice.worker.running import Running
from sluice.worker.task import Task

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
