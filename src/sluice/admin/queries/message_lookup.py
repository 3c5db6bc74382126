"""Stored messages: iterating over them, finding one by its id, and building its view.

A message has the id `<partition>-<sequence>`, which tells where it is, or its publisher's own id,
which does not. The latter is searched where it is likely (deliveries, the ids of the dedup window)
and then one by one, up to a limit.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Final

from sluice.admin import model
from sluice.admin.broker_facade import BATCH_SIZE, BrokerFacade, MessageLocation, split_into_batches
from sluice.broker.namespaces import read_message_properties
from sluice.message import DELAYED, Message, decode_headers
from sluice.queues.model import LEASED, Cursor, Group, Lease, Partition, Queue
from sluice.queues.names import format_message_id, parse_message_id

# Messages that are scanned for an id that no index knows.
MAX_SCANNED_MESSAGES: Final = 50_000

WAITING: Final = "waiting"
DELIVERED: Final = "delivered"
RETRYING: Final = "retrying"
SETTLED: Final = "settled"


# ---- iterating


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


async def read_in_batches(
    facade: BrokerFacade, locations: Iterator[MessageLocation]
) -> AsyncIterator[tuple[MessageLocation, Message]]:
    """Read the messages at `locations` in batches; leave out missing and damaged ones."""
    for batch in split_into_batches(locations):
        for location, message in zip(batch, await facade.read_messages(batch), strict=True):
            if message is not None and location[0].holds(location[1]):
                yield location, message
        await facade.yield_to_loop()


async def find_unsettled(
    facade: BrokerFacade, cursors: list[Cursor], locations: Iterator[MessageLocation], limit: int
) -> list[MessageLocation]:
    """Return the first locations that a group has not settled.

    Settled messages are skipped: there may be many, stored for other groups.
    """
    found: list[MessageLocation] = []
    for nth, (partition, seq) in enumerate(locations):
        if len(found) >= limit:
            break
        if nth % BATCH_SIZE == BATCH_SIZE - 1:
            await facade.yield_to_loop()
        if state_in_group(cursors[int(partition.number)], seq)[0] != SETTLED:
            found.append((partition, seq))
    return found


# ---- finding


async def locate_message(
    facade: BrokerFacade, queue: Queue, id_text: str
) -> MessageLocation | None:
    """Return where in a queue the message with this id is stored, or None."""
    own_id = id_text.encode("utf-8", "replace")
    if not own_id:
        return None
    for group in queue.groups.values():
        lease = group.leases_by_message_id.get(own_id)
        if lease is not None:
            return lease.cursor.partition, int(lease.seq)
    parsed = parse_location(facade, queue, id_text)
    if parsed is not None and parsed[0].holds(parsed[1]):
        return parsed
    stored_at = queue.id_stored_at(own_id)
    if stored_at:
        found = await _find_by_id(facade, _iterate_around(queue, int(stored_at * 1000.0)), own_id)
        if found is not None:
            return found
    if parsed is not None and not queue.dead_by_reason:
        return None  # a generated id of a deleted message, never redriven under its old id
    return await _find_by_id(facade, islice(iterate_queue(queue), MAX_SCANNED_MESSAGES), own_id)


def parse_location(facade: BrokerFacade, queue: Queue, id_text: str) -> MessageLocation | None:
    """Return the location that a generated id contains; None for other ids and other queues."""
    pid, seq = parse_message_id(id_text.encode("utf-8", "replace"))
    partition = facade.engine.partitions.get(int(pid))
    if partition is None or partition.queue is not queue or seq >= partition.next_seq:
        return None
    return partition, int(seq)


def iterate_queue(queue: Queue) -> Iterator[MessageLocation]:
    return iterate_oldest_first(queue.partitions, [0] * len(queue.partitions))


def _iterate_around(queue: Queue, milliseconds: int) -> Iterator[MessageLocation]:
    """Yield what arrived at this moment, within the precision of stored times."""
    for partition in queue.partitions:
        seq = int(partition.first_arrived_since(milliseconds - 2))
        while seq < partition.next_seq and partition.arrival_ms(seq) <= milliseconds + 2:
            yield partition, seq
            seq = int(partition.first_live(seq + 1))


async def _find_by_id(
    facade: BrokerFacade, locations: Iterator[MessageLocation], own_id: bytes
) -> MessageLocation | None:
    async for location, message in read_in_batches(facade, locations):
        if message.id == own_id:
            return location
    return None


# ---- views


def displayed_message_id(partition: Partition, seq: int, message: Message | None) -> str:
    own_id = message.id if message is not None else b""
    return (own_id or format_message_id(partition.pid, seq)).decode("utf-8", "replace")


def build_message_view(
    location: MessageLocation, message: Message, group: Group | None, payload_bytes: int
) -> model.Message:
    partition, seq = location
    cursor = group.cursors[int(partition.number)] if group is not None else None
    state, lease = (
        state_in_group(cursor, seq) if cursor is not None else state_in_queue(partition, seq)
    )
    attached = read_message_properties(message)
    return model.Message(
        message_id=displayed_message_id(partition, seq, message),
        queue=partition.queue.name,
        partition=int(partition.number),
        sequence=seq,
        key=message.key.decode("utf-8", "replace"),
        priority=int(message.priority),
        payload=message.payload[:payload_bytes],
        size=len(message.payload),
        enqueued_at=float(message.enqueued_at) / 1000.0,
        expires_at=float(message.expires),
        deliver_at=float(partition.rescheduled.get(seq, int(message.deliver_at))) / 1000.0,
        topic=message.topic.decode("utf-8", "replace"),
        content_type=attached.content_type,
        response_topic=attached.response_topic,
        correlation_data=attached.correlation_data,
        properties=list(attached.user),
        headers=dict(decode_headers(message.headers)),
        state=state,
        attempt=int(lease.attempt) if lease is not None else 0,
        consumer=lease_holder(lease),
    )


def lease_holder(lease: Lease | None) -> str:
    return lease.holder_client_id() if lease is not None else ""


def state_in_group(cursor: Cursor, seq: int) -> tuple[str, Lease | None]:
    """Return the state of a message in one group."""
    lease = cursor.leases.get(seq)
    if lease is not None:
        return (DELIVERED if lease.state == LEASED else RETRYING), lease
    if cursor.is_settled(seq) or not cursor.partition.is_for_group(seq, cursor.group.gid):
        return SETTLED, None
    return ("delayed" if is_delayed(cursor.partition, seq) else WAITING), None


def is_delayed(partition: Partition, seq: int) -> bool:
    """Return whether the delay has not ended; new messages may not be in `delayed_seqs` yet."""
    return seq in partition.delayed_seqs or bool(
        seq >= partition.committed_end and int(partition.flags(seq)) & DELAYED
    )


def state_in_queue(partition: Partition, seq: int) -> tuple[str, Lease | None]:
    """Return the state in the queue: delivered before retrying, retrying before waiting."""
    found: tuple[str, Lease | None] = (SETTLED if partition.cursors else WAITING), None
    for cursor in partition.cursors:
        state, lease = state_in_group(cursor, seq)
        if _STATE_RANK[state] > _STATE_RANK[found[0]]:
            found = state, lease
    if not partition.cursors and is_delayed(partition, seq):
        found = "delayed", None
    return found


_STATE_RANK: Final = {SETTLED: 0, WAITING: 1, "delayed": 2, RETRYING: 3, DELIVERED: 4}
