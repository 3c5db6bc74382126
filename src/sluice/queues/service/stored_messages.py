"""Stored messages: iterating over them, and the state of one. Read-only.

A location is the partition of a message and its sequence. It stays valid while others change the
queue, but its message may be gone: see `is_stored`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from mypy_extensions import i64

from sluice.message import DELAYED as HAS_DELAY
from sluice.message import Message
from sluice.queues.model import LEASED, Cursor, Group, Lease, Partition, Queue
from sluice.queues.names import format_message_id
from sluice.queues.service.views import (
    DELAYED,
    DELIVERED,
    MESSAGE_STATES,
    RETRYING,
    SETTLED,
    WAITING,
    StoredMessage,
)

MessageLocation = tuple[Partition, int]

_STATE_RANK: Final = {state: rank for rank, state in enumerate(MESSAGE_STATES)}


# ---- iterating


def iterate_from_start(queue: Queue) -> Iterator[MessageLocation]:
    return iterate_oldest_first(queue.partitions, [0] * len(queue.partitions))


def iterate_oldest_first(
    partitions: list[Partition], starts: list[int]
) -> Iterator[MessageLocation]:
    """Yield stored messages from these sequences on, in order of arrival; may span many turns."""
    ends = [int(partition.next_seq) for partition in partitions]
    heap: list[tuple[int, int, int]] = []
    for nth, partition in enumerate(partitions):
        _push_next(heap, nth, partition, starts[nth], ends[nth])
    while heap:
        _, nth, seq = heapq.heappop(heap)
        yield partitions[nth], seq
        _push_next(heap, nth, partitions[nth], seq + 1, ends[nth])


def _push_next(
    heap: list[tuple[int, int, int]], nth: int, partition: Partition, start: int, end: int
) -> None:
    seq = int(partition.first_live(start))
    if seq < end:
        heapq.heappush(heap, (int(partition.arrival_ms(seq)), nth, seq))


def iterate_after(queue: Queue, location: MessageLocation) -> Iterator[MessageLocation]:
    """Yield what arrived after a message, in order of time; the message may be gone by now."""
    partition, seq = location
    time = int(partition.arrival_ms(seq))  # still known for a while after deletion
    if time == 0:
        nearest = int(partition.first_live(seq))
        time = int(partition.arrival_ms(nearest)) if nearest < partition.next_seq else 0
    starts: list[int] = []
    for other in queue.partitions:
        if other is partition:
            starts.append(seq + 1)
            continue
        start = int(other.first_arrived_since(time)) if time else 0
        if other.number < partition.number:  # at equal times, the lower partition comes first
            while start < other.next_seq and other.arrival_ms(start) == time:
                start = int(other.first_live(start + 1))
        starts.append(start)
    return iterate_oldest_first(queue.partitions, starts)


def iterate_around(queue: Queue, milliseconds: int) -> Iterator[MessageLocation]:
    """Yield what arrived at this moment, within the precision of stored times."""
    for partition in queue.partitions:
        seq = int(partition.first_arrived_since(milliseconds - 2))
        while seq < partition.next_seq and partition.arrival_ms(seq) <= milliseconds + 2:
            yield partition, seq
            seq = int(partition.first_live(seq + 1))


# ---- one message


def is_stored(location: MessageLocation) -> bool:
    return location[0].holds(location[1])


def queue_of(location: MessageLocation) -> str:
    return location[0].queue.name


def stored_size(location: MessageLocation) -> int:
    """Return the bytes that the store holds of a message."""
    block = location[0].find_block(location[1])
    return 0 if block is None else int(block.size[block.index_of(location[1])])


def arrived_at(location: MessageLocation) -> float:
    return int(location[0].arrival_ms(location[1])) / 1000.0


def generated_id(location: MessageLocation) -> str:
    return format_message_id(location[0].pid, location[1]).decode()


def displayed_id(location: MessageLocation, message: Message | None) -> str:
    """Return the publisher's own id of a message, or its generated one."""
    if message is not None and message.id:
        return message.id.decode("utf-8", "replace")
    return generated_id(location)


def describe(location: MessageLocation, group: Group | None) -> StoredMessage:
    """Return the state of a message in one group, or in the queue."""
    partition, seq = location
    state, lease = (
        state_in_group(group.cursors[partition.number], seq)
        if group is not None
        else _state_in_queue(partition, seq)
    )
    moved_ms = partition.rescheduled.get(seq)
    return StoredMessage(
        partition.queue.name,
        int(partition.number),
        seq,
        None if moved_ms is None else moved_ms / 1000.0,
        state,
        int(lease.attempt) if lease is not None else 0,
        lease.holder_client_id() if lease is not None else "",
    )


def state_in_group(cursor: Cursor, seq: i64) -> tuple[str, Lease | None]:
    lease = cursor.leases.get(int(seq))
    if lease is not None:
        return (DELIVERED if lease.state == LEASED else RETRYING), lease
    if cursor.is_settled(seq) or not cursor.partition.is_for_group(seq, cursor.group.gid):
        return SETTLED, None
    return (DELAYED if is_delayed(cursor.partition, seq) else WAITING), None


def is_delayed(partition: Partition, seq: i64) -> bool:
    """Return whether the delay has not ended; new messages may not be in `delayed_seqs` yet."""
    return seq in partition.delayed_seqs or bool(
        seq >= partition.committed_end and int(partition.flags(seq)) & HAS_DELAY
    )


def _state_in_queue(partition: Partition, seq: i64) -> tuple[str, Lease | None]:
    """Return the state in the queue: delivered before retrying, retrying before waiting."""
    if not partition.cursors:
        return (DELAYED if is_delayed(partition, seq) else WAITING), None
    state: str = SETTLED
    lease: Lease | None = None
    for cursor in partition.cursors:
        other, held = state_in_group(cursor, seq)
        if _STATE_RANK[other] > _STATE_RANK[state]:
            state, lease = other, held
    return state, lease
