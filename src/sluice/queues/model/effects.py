"""Effects: what the engine asks of its caller besides deliveries and frames.

Commands fill one `Effects` object; the commit loop takes it once per turn and carries it out: read
bodies, report alerts and warnings, announce queues that the engine has created.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64, mypyc_attr

from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue

# The purpose of a read.
FOR_DELIVERY: Final = 0  # a cursor leases nothing until the first body is read
FOR_EXPIRY: Final = 1  # an expired message is dead-lettered
FOR_DEAD_LETTER: Final = 2  # a failed message without its body in memory is dead-lettered
FOR_PREFETCH: Final = 3  # a cursor will need them soon
FOR_SEARCH: Final = 4  # a command names a message by the id of its publisher
MAX_SEARCHED_MESSAGES: Final = 50_000  # that one search reads


@mypyc_attr(allow_interpreted_subclasses=True)
class IdSearch:
    """What is searched, and what was found. The subclass knows what the search is for."""

    def __init__(self, queue: Queue, wanted: list[bytes]) -> None:
        self.queue: Queue = queue
        self.wanted: set[bytes] = set(wanted)
        self.found: dict[bytes, tuple[Partition, int]] = {}
        self.is_cut: bool = False  # more messages are stored than a search may read
        self.remaining: i64 = MAX_SEARCHED_MESSAGES
        # Partition, and first and last sequence to read; the next range is the last one.
        self.ranges: list[tuple[Partition, int, int]] = []

    def on_done(self) -> None:
        """Called once, when all is found or everything was read."""


class BodyRead:
    """Bodies to read from the store; the result goes to `Engine.on_read_done`."""

    def __init__(
        self, purpose: i64, partition: Partition, sequences: list[int], addresses: list[int]
    ) -> None:
        self.purpose: i64 = purpose
        self.partition: Partition = partition
        self.sequences: list[int] = sequences
        self.addresses: list[int] = addresses
        self.size_bytes: i64 = 0  # approximate memory for the bodies
        self.cursor: Cursor | None = None
        self.lease: Lease | None = None
        self.reason: str = ""
        self.search: IdSearch | None = None


class Alert:
    """A dead letter to report. One of reason `overflow` is reported only to an `alert_webhook`."""

    def __init__(
        self,
        url: str,
        queue: str,
        dlq: str,
        message_id: str,
        group: str,
        reason: str,
        headers: dict[str, str],
    ) -> None:
        self.url = url
        self.queue = queue
        self.dlq = dlq
        self.message_id = message_id
        self.group = group
        self.reason = reason
        self.headers = headers


class Effects:
    def __init__(self) -> None:
        self.reads: list[BodyRead] = []
        self.alerts: list[Alert] = []
        self.warnings: list[str] = []  # for the log of the caller
        # Queues that were created automatically, for dead letters.
        self.created_queues: list[Queue] = []

    def take(self) -> Effects:
        """Return the effects so far and start over; allocate only if there are any."""
        if not (self.reads or self.alerts or self.warnings or self.created_queues):
            return NO_EFFECTS
        taken = Effects()
        taken.reads = self.reads
        taken.alerts = self.alerts
        taken.warnings = self.warnings
        taken.created_queues = self.created_queues
        self.reads = []
        self.alerts = []
        self.warnings = []
        self.created_queues = []
        return taken

    def add(self, later: Effects) -> None:
        """Add the effects of a later turn."""
        self.reads += later.reads
        self.alerts += later.alerts
        self.warnings += later.warnings
        self.created_queues += later.created_queues


# Shared by all turns without effects; never modified.
NO_EFFECTS: Final = Effects()
