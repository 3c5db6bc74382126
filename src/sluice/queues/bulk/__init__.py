"""Operations on many messages: batches, bulk reading, redrive, start positions."""

from sluice.queues.bulk.batches import BatchWriting
from sluice.queues.bulk.bulk_reading import (
    BulkProgress,
    MessageLocations,
    check_incarnation,
    check_lost,
    check_range,
    collect_locations,
    earliest_stored,
    first_lost,
    incarnation_of,
    is_progress,
    load_acknowledged,
)
from sluice.queues.bulk.redrive import Redrive
from sluice.queues.bulk.start_position import parse_iso_time, resolve_start

__all__ = [
    "BatchWriting",
    "BulkProgress",
    "MessageLocations",
    "Redrive",
    "check_incarnation",
    "check_lost",
    "check_range",
    "collect_locations",
    "earliest_stored",
    "first_lost",
    "incarnation_of",
    "is_progress",
    "load_acknowledged",
    "parse_iso_time",
    "resolve_start",
]
