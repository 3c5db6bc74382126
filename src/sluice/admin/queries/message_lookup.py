"""Messages as they are kept: walking over them, finding one by its id, and what is shown of each.

A message goes by `<partition>-<sequence>`, which says where it is, or by its publisher's own id, which does not: that
one is looked for where it is likely (deliveries, the ids of the dedup window) and then one by one, up to a limit.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Final

from sluice.admin.broker_facade import AT_ONCE, Hands, Place, slices
from sluice.admin.views import MessageView
from sluice.broker.namespaces.queues.publish_builder import attached_to
from sluice.message import DELAYED, Message, decode_headers
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, Lease
from sluice.queues.model.group import Group
from sluice.queues.names import message_id, parse_message_id
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue

SCAN_MOST: Final = 50_000  # messages that are looked through for an id that leads nowhere directly

WAITING: Final = "waiting"
DELIVERED: Final = "delivered"
RETRYING: Final = "retrying"
SETTLED: Final = "settled"


# ---- walking


def oldest_first(partitions: list[Partition], starts: list[int]) -> Iterator[Place]:
    """What is kept from these sequences on, in the order in which it came. It may be walked over many turns."""
    ends = [int(partition.next) for partition in partitions]
    heap: list[tuple[int, int, int]] = []
    for nth, partition in enumerate(partitions):
        _push(heap, nth, partition, starts[nth], ends[nth])
    while heap:
        _, nth, seq = heapq.heappop(heap)
        yield partitions[nth], seq
        _push(heap, nth, partitions[nth], seq + 1, ends[nth])


def _push(heap: list[tuple[int, int, int]], nth: int, partition: Partition, start: int, end: int) -> None:
    seq = int(partition.first_live(start))
    if seq < end:
        heapq.heappush(heap, (int(partition.time(seq)), nth, seq))


async def read_through(hands: Hands, places: Iterator[Place]) -> AsyncIterator[tuple[Place, Message]]:
    """The messages at `places`, read some at a time; what is gone or damaged is left out."""
    for some in slices(places):
        for place, message in zip(some, await hands.read(some), strict=True):
            if message is not None and place[0].holds(place[1]):
                yield place, message
        await hands.breathe()


async def unsettled(hands: Hands, cursors: list[Cursor], places: Iterator[Place], limit: int) -> list[Place]:
    """The first places that a group has still to settle. What it has settled may be much, and is kept for others."""
    found: list[Place] = []
    for nth, (partition, seq) in enumerate(places):
        if len(found) >= limit:
            break
        if nth % AT_ONCE == AT_ONCE - 1:
            await hands.breathe()
        if state_in(cursors[int(partition.number)], seq)[0] != SETTLED:
            found.append((partition, seq))
    return found


# ---- finding


async def locate(hands: Hands, queue: Queue, name: str) -> Place | None:
    """Where in a queue the message of this name is kept; None when it is not, or not any more."""
    own = name.encode("utf-8", "replace")
    if not own:
        return None
    for group in queue.groups.values():
        lease = group.own_ids.get(own)
        if lease is not None:
            return lease.cursor.partition, int(lease.seq)
    direct = place_of(hands, queue, name)
    if direct is not None and direct[0].holds(direct[1]):
        return direct
    stored_at = queue.stored_at(own)
    if stored_at:
        found = await _with_id(hands, _around(queue, int(stored_at * 1000.0)), own)
        if found is not None:
            return found
    if direct is not None and not queue.dead:
        return None  # an id of ours, of a message that is gone, and none was ever put back under its old name
    return await _with_id(hands, islice(whole(queue), SCAN_MOST), own)


def place_of(hands: Hands, queue: Queue, name: str) -> Place | None:
    """Where the id itself says that a message is or was; None when it is not one of ours, or of another queue."""
    pid, seq = parse_message_id(name.encode("utf-8", "replace"))
    partition = hands.engine.partitions.get(int(pid))
    if partition is None or partition.queue is not queue or seq >= partition.next:
        return None
    return partition, int(seq)


def whole(queue: Queue) -> Iterator[Place]:
    return oldest_first(queue.partitions, [0] * len(queue.partitions))


def _around(queue: Queue, milliseconds: int) -> Iterator[Place]:
    """What came at this moment, give or take what is lost in the keeping of times."""
    for partition in queue.partitions:
        seq = int(partition.first_since(milliseconds - 2))
        while seq < partition.next and partition.time(seq) <= milliseconds + 2:
            yield partition, seq
            seq = int(partition.first_live(seq + 1))


async def _with_id(hands: Hands, places: Iterator[Place], own: bytes) -> Place | None:
    async for place, message in read_through(hands, places):
        if message.id == own:
            return place
    return None


# ---- showing


def name_of(partition: Partition, seq: int, message: Message | None) -> str:
    own = message.id if message is not None else b""
    return (own or message_id(partition.pid, seq)).decode("utf-8", "replace")


def message_view(place: Place, message: Message, group: Group | None, payload_bytes: int) -> MessageView:
    partition, seq = place
    cursor = group.cursors[int(partition.number)] if group is not None else None
    state, lease = state_in(cursor, seq) if cursor is not None else state_of(partition, seq)
    attached = attached_to(message)
    return MessageView(
        message_id=name_of(partition, seq, message),
        queue=partition.queue.name,
        partition=int(partition.number),
        sequence=seq,
        key=message.key.decode("utf-8", "replace"),
        priority=int(message.priority),
        payload=message.payload[:payload_bytes],
        size=len(message.payload),
        enqueued_at=float(message.enqueued_at) / 1000.0,
        expires_at=float(message.expires),
        deliver_at=float(message.deliver_at) / 1000.0,
        topic=message.topic.decode("utf-8", "replace"),
        content_type=attached.content_type,
        response_topic=attached.response_topic,
        correlation_data=attached.correlation_data,
        properties=list(attached.user),
        headers=dict(decode_headers(message.headers)),
        state=state,
        attempt=int(lease.attempt) if lease is not None else 0,
        consumer=holder_of(lease),
    )


def holder_of(lease: Lease | None) -> str:
    return lease.client() if lease is not None else ""


def state_in(cursor: Cursor, seq: int) -> tuple[str, Lease | None]:
    """Where a message stands in one group."""
    lease = cursor.leases.get(seq)
    if lease is not None:
        return (DELIVERED if lease.state == LEASED else RETRYING), lease
    if cursor.settled(seq) or not cursor.partition.is_for(seq, cursor.group.gid):
        return SETTLED, None
    return ("delayed" if is_delayed(cursor.partition, seq) else WAITING), None


def is_delayed(partition: Partition, seq: int) -> bool:
    """Whether its time has not come; what was published just now is not in the list of those yet."""
    return seq in partition.delayed or bool(
        seq >= partition.committed and int(partition.flags(seq)) & DELAYED
    )


def state_of(partition: Partition, seq: int) -> tuple[str, Lease | None]:
    """Where it stands in the queue: in somebody's hands before waiting for a retry, before waiting at all."""
    found: tuple[str, Lease | None] = (SETTLED if partition.cursors else WAITING), None
    for cursor in partition.cursors:
        state, lease = state_in(cursor, seq)
        if _RANK[state] > _RANK[found[0]]:
            found = state, lease
    if not partition.cursors and is_delayed(partition, seq):
        found = "delayed", None
    return found


_RANK: Final = {SETTLED: 0, WAITING: 1, "delayed": 2, RETRYING: 3, DELIVERED: 4}
