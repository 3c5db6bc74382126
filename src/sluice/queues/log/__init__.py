"""The log as the engine writes it: notes, the open frame, broker state, live bytes of segments.

This is the lowest part of `queues`: it knows no queue and no group. `recovery` reads the log.
"""

from sluice.queues.log import notes
from sluice.queues.log.broker_state import (
    FIRST_OWNER_PID,
    FIRST_STATE_PID,
    PENDING_PID,
    RETAINED_PID,
    SESSIONS_PID,
    BrokerState,
    PendingMessage,
    RestoredRecord,
    write_recipients,
)
from sluice.queues.log.cross_node_dedup import PART_BITS
from sluice.queues.log.frame_builder import Frame, FrameBuilder, LoggedPartition, NoteSource
from sluice.queues.log.notes import (
    ACKED,
    CANCELLED,
    DEAD,
    EXPIRED,
    OUTCOMES,
    PURGED,
    NoteReader,
    NoteWriter,
)
from sluice.queues.log.segment_usage import SegmentUsage

__all__ = [
    "ACKED",
    "CANCELLED",
    "DEAD",
    "EXPIRED",
    "FIRST_OWNER_PID",
    "FIRST_STATE_PID",
    "OUTCOMES",
    "PART_BITS",
    "PENDING_PID",
    "PURGED",
    "RETAINED_PID",
    "SESSIONS_PID",
    "BrokerState",
    "Frame",
    "FrameBuilder",
    "LoggedPartition",
    "NoteReader",
    "NoteSource",
    "NoteWriter",
    "PendingMessage",
    "RestoredRecord",
    "SegmentUsage",
    "notes",
    "write_recipients",
]
