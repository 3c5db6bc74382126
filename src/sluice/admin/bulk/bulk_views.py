"""What the desk of the bulk door is asked, and what it tells: plain values, which go from one loop to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sluice.message import Message
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue


@dataclass(frozen=True, slots=True)
class PartitionOffsets:
    partition: int
    earliest: int  # oldest sequence that is kept; `latest` when there is none
    latest: int  # sequence of the next message that will be kept
    bytes: int  # of what is kept, about


@dataclass(frozen=True, slots=True)
class QueueOffsets:
    queue: str
    incarnation: str  # see `incarnation_of`
    partitions: list[PartitionOffsets]
    dead_letters: bool  # it is the dead-letter queue of some queue: its messages have a story
    compacted: bool  # messages are replaced by younger ones, which is no loss


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How far a group is, by partition: everything below is settled. And for each partition in which it has lost
    something the first sequence of that, from where the reader is on."""

    low_watermarks: dict[int, int]
    first_lost: dict[int, int]


@dataclass(frozen=True, slots=True)
class MessageSlice:
    """Where the messages of a part of a range are, or the messages themselves where the store has no files."""

    pid: int
    places: bytes  # i64 seq, i64 address, i32 size of each
    records: list[bytes | None]
    next: int  # where the next slice begins; the end of the range when there is no more
    bytes: int  # of those messages
    max_bytes_per_second: float  # bytes per second that all readers together may have now


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """What must be known of a queue to prepare messages for it."""

    max_message_size: int
    fault_of_payload: Callable[[bytes], str] | None  # by its schema
    has_priorities: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages that are ready to be appended: runs of them for one queue each, in order."""

    app: str
    number: int
    rows: int
    runs: list[tuple[str, list[Message]]] = field(default_factory=list)
    repairs: Sequence[DeadLetterRepair] = ()
    to_all: bool = False  # repairs are for every group, not only for the one that failed
    is_forwarded_part: bool = False  # in a cluster: what of it is for the queues of this node, sent by the node that has it all


@dataclass(frozen=True, slots=True)
class CommitResult:
    rows: int
    replayed: bool
    skipped: int = 0  # repairs whose letter is gone, or being worked on


class DeadLetterRepair(Protocol):
    """A row that takes the place of a dead letter (`bulk.rows.Repair`)."""

    @property
    def queue(self) -> str: ...
    @property
    def message(self) -> Message: ...
    @property
    def dead_letter_queue(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def sequence(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LocatedRepair:
    """A repair, its letter, and where both belong."""

    repair: DeadLetterRepair
    queue: Queue
    partition: Partition
    dead_letter: Message
