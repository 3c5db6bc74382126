"""Arguments and results of the bulk service: plain values that cross from one loop to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sluice.message import Message
from sluice.queues.model import Partition, Queue


@dataclass(frozen=True, slots=True)
class PartitionOffsets:
    partition: int
    earliest: int  # oldest stored sequence; `latest` when there is none
    latest: int  # sequence of the next committed message
    bytes: int  # stored, approximately


@dataclass(frozen=True, slots=True)
class QueueOffsets:
    queue: str
    incarnation: str  # see `incarnation_of`
    partitions: list[PartitionOffsets]
    dead_letters: bool  # it is the dead-letter queue of another queue
    compacted: bool  # newer messages replace older ones, which is not a loss


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """The progress of a group by partition: everything below is settled.

    `lost` has the first lost sequence, from the reader's position on, of each partition with one.
    """

    low_watermarks: dict[int, int]
    first_lost: dict[int, int]


@dataclass(frozen=True, slots=True)
class MessageSlice:
    """The places of messages of a range, or the records themselves if the store has no files."""

    pid: int
    places: bytes  # i64 seq, i64 address, i32 size of each
    records: list[bytes | None]
    next: int  # first sequence of the next slice; the end of the range when complete
    bytes: int  # size of these messages
    max_bytes_per_second: float  # allowed now for all readers together


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """The properties of a queue that preparing messages for it needs."""

    max_message_size: int
    fault_of_payload: Callable[[bytes], str] | None  # checks the queue's schema
    has_priorities: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages to append, as runs for one queue each, in order."""

    app: str
    number: int
    rows: int
    runs: list[tuple[str, list[Message]]] = field(default_factory=list)
    repairs: Sequence[DeadLetterRepair] = ()
    to_all: bool = False  # repairs are for every group, not only for the one that failed
    # In a cluster: the share for the queues of this node, sent by the node that received the batch.
    is_forwarded_part: bool = False


@dataclass(frozen=True, slots=True)
class CommitResult:
    rows: int
    replayed: bool
    skipped: int = 0  # repairs whose dead letter is gone or being processed


class DeadLetterRepair(Protocol):
    """A row that replaces a dead letter (`bulk.row_decoder.DeadLetterRepair`)."""

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
    """A repair with the dead letter and the queues of both."""

    repair: DeadLetterRepair
    queue: Queue
    partition: Partition
    dead_letter: Message
