"""What happens to messages: publishing, dispatch, settlement, retries, dead letters, removal.

Each class is one part of the engine, which wires them.
"""

from sluice.queues.flow.appender import Appender
from sluice.queues.flow.commands import (
    IdSearches,
    MessageCommands,
    load_rescheduled,
    write_rescheduled,
)
from sluice.queues.flow.dead_letters import (
    REASONS,
    UNACCEPTABLE,
    DeadLetters,
    format_iso_time,
    is_reason,
    same_reason,
    strip_dead_letter_headers,
)
from sluice.queues.flow.delivery import (
    RUN_BYTES,
    SECRET_BYTES,
    DeliveryControl,
    DeliveryToken,
    DeliveryTokens,
    Dispatch,
    KeyHolds,
    LeaseLookup,
    Settlement,
    load_admission,
    load_held_keys,
    read_events,
    read_pause,
    store_released,
    take_released,
    write_admission,
    write_events,
    write_held_keys,
    write_pause,
    write_retry,
)
from sluice.queues.flow.delivery.pending_dead_letters import PendingDeadLetters
from sluice.queues.flow.dispatch_schedule import DispatchSchedule
from sluice.queues.flow.key_compaction import KeyCompaction, check_message
from sluice.queues.flow.lifecycle import Lifecycle, write_gates
from sluice.queues.flow.publishing import Publishing, free_length
from sluice.queues.flow.removal import Removal
from sluice.queues.flow.retention import Retention
from sluice.queues.flow.timers import Timers

__all__ = [
    "REASONS",
    "RUN_BYTES",
    "SECRET_BYTES",
    "UNACCEPTABLE",
    "Appender",
    "DeadLetters",
    "DeliveryControl",
    "DeliveryToken",
    "DeliveryTokens",
    "Dispatch",
    "DispatchSchedule",
    "IdSearches",
    "KeyCompaction",
    "KeyHolds",
    "LeaseLookup",
    "Lifecycle",
    "MessageCommands",
    "PendingDeadLetters",
    "Publishing",
    "Removal",
    "Retention",
    "Settlement",
    "Timers",
    "check_message",
    "format_iso_time",
    "free_length",
    "is_reason",
    "load_admission",
    "load_held_keys",
    "load_rescheduled",
    "read_events",
    "read_pause",
    "same_reason",
    "store_released",
    "strip_dead_letter_headers",
    "take_released",
    "write_admission",
    "write_events",
    "write_gates",
    "write_held_keys",
    "write_pause",
    "write_rescheduled",
    "write_retry",
]
