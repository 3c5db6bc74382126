"""What a store may ask the side that knows what records are about.

A store keeps frames without understanding them. One that others look into (Redis, with its own tools) should show there
what the queues are: groups, pending deliveries, retries by their time. So whoever builds such a store hands it a
`Meaning`, which turns notes into changes in plain words. It is asked in the loop's thread, when a frame is committed:
what it says is as of that frame. A note of which it knows nothing is no change; the store keeps it all the same.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

Ranges = list[tuple[int, int]]  # first sequence and count


class Change:
    """Something that a frame changes."""


class QueueCreated(Change):
    """A queue is there, or is there with another configuration or more partitions."""

    def __init__(self, queue: str, config: str, pids: list[int]) -> None:
        self.queue = queue
        self.config = config
        self.pids = pids


class QueueDeleted(Change):
    def __init__(self, queue: str, pids: list[int]) -> None:
        self.queue = queue
        self.pids = pids


class GroupPositioned(Change):
    """A group begins, or begins anew, at a sequence of each partition."""

    def __init__(self, group: str, positions: list[tuple[int, int]]) -> None:
        self.group = group
        self.positions = positions  # pid and sequence


class GroupDeleted(Change):
    def __init__(self, group: str, pids: list[int]) -> None:
        self.group = group
        self.pids = pids


class MessagesSettled(Change):
    """`how` is acked, dead, expired or purged."""

    def __init__(self, group: str, pid: int, outcome: str, ranges: Ranges) -> None:
        self.group = group
        self.pid = pid
        self.outcome = outcome
        self.ranges = ranges


class RetryScheduled(Change):
    """A delivery has failed and waits."""

    def __init__(
        self, group: str, pid: int, seq: int, failures: int, due_at: float, description: str
    ) -> None:
        self.group = group
        self.pid = pid
        self.seq = seq
        self.failures = failures
        self.due_at = due_at  # seconds since 1970
        self.description = description


class MessagesRemoved(Change):
    """Messages that are gone without a group's doing, or that are to be seen no longer though older ones are kept: of a
    compacted queue everything that has left it. A group may have had one in hand."""

    def __init__(self, pid: int, ranges: Ranges) -> None:
        self.pid = pid
        self.ranges = ranges


class GroupSnapshot:
    """How a group stands in one partition now."""

    def __init__(self, group: str, pid: int, next_seq: int) -> None:
        self.group = group
        self.pid = pid
        self.next_seq = next_seq  # the first sequence that was not offered yet
        self.delivery_count = 0  # how many deliveries there were since the start
        self.holders: dict[int, str] = {}  # deliveries under way: who has them
        self.attempts: dict[int, int] = {}  # of those of them that are not the first
        self.scheduled_retries: dict[
            int, RetryScheduled
        ] = {}  # deliveries that wait for their retry


@mypyc_attr(allow_interpreted_subclasses=True)
class NoteDecoder:
    """This one knows nothing."""

    def locate_partition(self, pid: int) -> tuple[str, int] | None:
        """The name and the number of a partition; None when it is not known (any more)."""
        return None

    def is_queue_partition(self, pid: int) -> bool:
        """Whether its messages are those of a queue, encoded as `sluice.message` does."""
        return False

    def decode_changes(self, notes: list[bytes]) -> list[Change]:
        """What the notes of one frame change, in order, and what else has gone since the frame before it."""
        return []

    def first_live_seq(self, pid: int) -> int:
        """Everything below this sequence is gone; -1 when that is not known."""
        return -1

    def stream_length(self, pid: int) -> int:
        """From the first message that lives to the last one: so long a stream may have to be."""
        return 0

    def compacted_messages(self) -> dict[int, list[int]]:
        """The partitions of compacted queues, and the messages that each holds."""
        return {}

    def is_unsettled(self, group: str, pid: int, seq: int) -> bool:
        """Whether a group has still to settle a message."""
        return False

    def group_snapshots(self, include_unchanged: bool) -> list[GroupSnapshot]:
        """How groups stand: those in which something has moved since this was last asked, or all."""
        return []
