"""Schedules: recurring publishes to queues."""

from sluice.queues.schedules.recurrence import NEVER, format_tick
from sluice.queues.schedules.schedule import (
    MISSED_NAMES,
    OUTCOME_NAMES,
    Run,
    Schedule,
    Timing,
)
from sluice.queues.schedules.schedules import (
    MAX_MISSED_TICKS,
    Schedules,
)

__all__ = [
    "MAX_MISSED_TICKS",
    "MISSED_NAMES",
    "NEVER",
    "OUTCOME_NAMES",
    "Run",
    "Schedule",
    "Schedules",
    "Timing",
    "format_tick",
]
