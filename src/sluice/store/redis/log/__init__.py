"""The log in Redis: frames as streams, with the threads that write and read them, and recovery."""

from sluice.store.redis.log.address_index import AddressIndex
from sluice.store.redis.log.frame_losses import (
    FrameLosses,
    LossDetector,
    confirm_loss,
    queue_or_none,
    read_frame_losses,
)
from sluice.store.redis.log.log_entries import SplitFrame, split_frame
from sluice.store.redis.log.log_recovery import LogRecovery
from sluice.store.redis.log.plan_builder import PlanBuilder
from sluice.store.redis.log.reader import LogReader
from sluice.store.redis.log.stream_reads import FRAME_GAP_BYTES
from sluice.store.redis.log.takeover import raise_fences, remove_torn_entries
from sluice.store.redis.log.write_plan import (
    ClusterPlanWriter,
    PlanWriter,
    ScriptSteps,
    SinglePlanWriter,
    WritePlan,
)
from sluice.store.redis.log.writer import CommandJob, Job, LogWriter, WriteJob

__all__ = [
    "FRAME_GAP_BYTES",
    "AddressIndex",
    "ClusterPlanWriter",
    "CommandJob",
    "FrameLosses",
    "Job",
    "LogReader",
    "LogRecovery",
    "LogWriter",
    "LossDetector",
    "PlanBuilder",
    "PlanWriter",
    "ScriptSteps",
    "SinglePlanWriter",
    "SplitFrame",
    "WriteJob",
    "WritePlan",
    "confirm_loss",
    "queue_or_none",
    "raise_fences",
    "read_frame_losses",
    "remove_torn_entries",
    "split_frame",
]
