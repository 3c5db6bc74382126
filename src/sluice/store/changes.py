"""Changes of queues and groups for stores that show them, and their decoder.

A store keeps frames without interpreting them. A store that other tools can inspect (Redis) should
also show the state of the queues: groups, pending deliveries, retries by due time. The component
that creates such a store passes it a `NoteDecoder`, which turns notes into changes. The store calls
the decoder in the loop's thread when it commits a frame; the answer describes the state as of that
frame. A note that the decoder does not know is no change; the store keeps it all the same.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

Ranges = list[tuple[int, int]]  # first sequence and count


class Change:
    """A change that a frame makes."""


class QueueCreated(Change):
    """A queue was created, or has a new configuration or more partitions."""

    def __init__(self, queue: str, config: str, pids: list[int]) -> None:
        self.queue = queue
        self.config = config
        self.pids = pids


class QueueDeleted(Change):
    def __init__(self, queue: str, pids: list[int]) -> None:
        self.queue = queue
        self.pids = pids


class GroupPositioned(Change):
    """A group starts, or restarts, at a sequence of each partition."""

    def __init__(self, group: str, positions: list[tuple[int, int]]) -> None:
        self.group = group
        self.positions = positions  # pid and sequence


class GroupDeleted(Change):
    def __init__(self, group: str, pids: list[int]) -> None:
        self.group = group
        self.pids = pids


class MessagesSettled(Change):
    """A group settled messages; `outcome` is acked, dead, expired, purged or cancelled."""

    def __init__(self, group: str, pid: int, outcome: str, ranges: Ranges) -> None:
        self.group = group
        self.pid = pid
        self.outcome = outcome
        self.ranges = ranges


class RetryScheduled(Change):
    """A delivery failed and waits for its retry."""

    def __init__(
        self, group: str, pid: int, seq: int, failures: int, due_at: float, description: str
    ) -> None:
        self.group = group
        self.pid = pid
        self.seq = seq
        self.failures = failures
        self.due_at = due_at  # seconds since 1970
        self.description = description


class RetryRescheduled(RetryScheduled):
    """A command moved a retry that is scheduled already."""


class MessagesRemoved(Change):
    """Messages were removed, but not by a group.

    For a compacted queue: all messages that left it, although older ones may still be stored. A
    group may hold a delivery of a removed message.
    """

    def __init__(self, pid: int, ranges: Ranges) -> None:
        self.pid = pid
        self.ranges = ranges


class GroupSnapshot:
    """The state of a group in one partition."""

    def __init__(self, group: str, pid: int, next_seq: int) -> None:
        self.group = group
        self.pid = pid
        self.next_seq = next_seq  # first sequence that was not dispatched yet
        self.delivery_count = 0  # deliveries since the start
        self.holders: dict[int, str] = {}  # deliveries in flight: sequence to client id
        self.attempts: dict[int, int] = {}  # deliveries in flight whose attempt is above 1
        self.scheduled_retries: dict[int, RetryScheduled] = {}


@mypyc_attr(allow_interpreted_subclasses=True)
class NoteDecoder:
    """Null object: knows no partitions and no changes."""

    def locate_partition(self, pid: int) -> tuple[str, int] | None:
        """Return queue name and partition number, or None if the pid is not known (any more)."""
        return None

    def is_queue_partition(self, pid: int) -> bool:
        """Return whether its messages belong to a queue and are encoded by `sluice.message`."""
        return False

    def decode_changes(self, bodies: list[bytes]) -> list[Change]:
        """Return the changes in the bodies of one frame's notes, in order, and recent removals."""
        return []

    def first_live_seq(self, pid: int) -> int:
        """Return the sequence below which everything is deleted, or -1 if it is not known."""
        return -1

    def stream_length(self, pid: int) -> int:
        """Return the distance from the first live message to the last: the stream length needed."""
        return 0

    def compacted_messages(self) -> dict[int, list[int]]:
        """Return the partitions of compacted queues with the messages that each holds."""
        return {}

    def is_unsettled(self, group: str, pid: int, seq: int) -> bool:
        """Return whether a group still has to settle a message."""
        return False

    def group_snapshots(self, include_unchanged: bool) -> list[GroupSnapshot]:
        """Return the state of groups that changed since the last call, or of all groups."""
        return []
