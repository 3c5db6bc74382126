"""The state of all queues from the log and back: recovery, snapshots, notes as named changes."""

from sluice.queues.recovery.incremental_snapshot import IncrementalSnapshot
from sluice.queues.recovery.loader import EngineLoader, unusable_record
from sluice.queues.recovery.note_decoder import QueueNoteDecoder

__all__ = [
    "EngineLoader",
    "IncrementalSnapshot",
    "QueueNoteDecoder",
    "unusable_record",
]
