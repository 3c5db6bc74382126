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


class QueueMade(Change):
    """A queue is there, or is there with another configuration or more partitions."""

    def __init__(self, queue: str, config: str, pids: list[int]) -> None:
        self.queue = queue
        self.config = config
        self.pids = pids


class QueueGone(Change):
    def __init__(self, queue: str, pids: list[int]) -> None:
        self.queue = queue
        self.pids = pids


class GroupPlaced(Change):
    """A group begins, or begins anew, at a sequence of each partition."""

    def __init__(self, group: str, floors: list[tuple[int, int]]) -> None:
        self.group = group
        self.floors = floors  # pid and sequence


class GroupGone(Change):
    def __init__(self, group: str, pids: list[int]) -> None:
        self.group = group
        self.pids = pids


class Settled(Change):
    """`how` is acked, dead, expired or purged."""

    def __init__(self, group: str, pid: int, how: str, ranges: Ranges) -> None:
        self.group = group
        self.pid = pid
        self.how = how
        self.ranges = ranges


class Retried(Change):
    """A delivery has failed and waits."""

    def __init__(self, group: str, pid: int, seq: int, failures: int, due: float, description: str) -> None:
        self.group = group
        self.pid = pid
        self.seq = seq
        self.failures = failures
        self.due = due  # seconds since 1970
        self.description = description


class Removed(Change):
    """Messages that are gone without a group's doing, or that are to be seen no longer though older ones are kept: of a
    compacted queue everything that has left it. A group may have had one in hand."""

    def __init__(self, pid: int, ranges: Ranges) -> None:
        self.pid = pid
        self.ranges = ranges


class Standing:
    """How a group stands in one partition now."""

    def __init__(self, group: str, pid: int, fresh: int) -> None:
        self.group = group
        self.pid = pid
        self.fresh = fresh  # the first sequence that was not offered yet
        self.delivered = 0  # how many deliveries there were since the start
        self.held: dict[int, str] = {}  # deliveries under way: who has them
        self.attempts: dict[int, int] = {}  # of those of them that are not the first
        self.waiting: dict[int, Retried] = {}  # deliveries that wait for their retry


@mypyc_attr(allow_interpreted_subclasses=True)
class Meaning:
    """This one knows nothing."""

    def place_of(self, pid: int) -> tuple[str, int] | None:
        """The name and the number of a partition; None when it is not known (any more)."""
        return None

    def is_queue(self, pid: int) -> bool:
        """Whether its messages are those of a queue, encoded as `sluice.message` does."""
        return False

    def changes_of(self, notes: list[bytes]) -> list[Change]:
        """What the notes of one frame change, in order, and what else has gone since the frame before it."""
        return []

    def first_live(self, pid: int) -> int:
        """Everything below this sequence is gone; -1 when that is not known."""
        return -1

    def length(self, pid: int) -> int:
        """From the first message that lives to the last one: so long a stream may have to be."""
        return 0

    def compacted(self) -> dict[int, list[int]]:
        """The partitions of compacted queues, and the messages that each holds."""
        return {}

    def needs(self, group: str, pid: int, seq: int) -> bool:
        """Whether a group has still to settle a message."""
        return False

    def groups(self, all_of_them: bool) -> list[Standing]:
        """How groups stand: those in which something has moved since this was last asked, or all."""
        return []
