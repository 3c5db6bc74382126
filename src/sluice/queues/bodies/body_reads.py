"""Bodies that are not in memory: asking for them, and what is done when they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import read_i32_le, read_i64_le
from mypy_extensions import i64

from sluice.message import COMPRESSED, DELAYED, PRIORITY_MASK, Message, decode_body
from sluice.queues.log.broker_state import FIRST_OWNER_PID, FIRST_STATE_PID
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.message_columns import NO_ADDRESS
from sluice.queues.model.partition import Partition
from sluice.queues.ports import Codec
from sluice.store.protocol import (
    EXPIRES_OFFSET,
    FLAGS_OFFSET,
    HEADER_BYTES,
    PID_OFFSET,
    TIME_OFFSET,
    decode_record,
)

if TYPE_CHECKING:
    from sluice.queues.engine import Engine
    from sluice.queues.model.cursor import Cursor

MAX_READ_MESSAGES: Final = 128  # messages that one read brings, at most
MAX_READ_BYTES: Final = 262_144  # and how many bytes of them, in a cache that is large enough
MAX_NEIGHBOR_PARTITIONS: Final = 32  # partitions that read along with one that must
MAX_NEIGHBOR_MESSAGES: Final = 1024  # messages that each of them reads, at most
NEIGHBOR_CACHE_DIVISOR: Final = 16  # of the cache, for each
NO_ADDRESS_LIMIT: Final = 0x7FFF_FFFF_FFFF_FFFF
MIN_READ_CACHE_DIVISOR: Final = (
    32  # of the cache: what one read brings even where others have taken all the room
)

# What a read is for.
FOR_DELIVERY: Final = 0  # a cursor cannot go on without the first of them
FOR_PREFETCH: Final = 3  # a cursor will need them soon
FOR_EXPIRY: Final = 1  # an expired message becomes a dead letter
FOR_DEAD_LETTER: Final = 2  # so does one that failed, and was given back before that was decided


class BodyRead:
    def __init__(
        self, purpose: i64, partition: Partition, sequences: list[int], addresses: list[int]
    ) -> None:
        self.purpose: i64 = purpose
        self.partition: Partition = partition
        self.sequences: list[int] = sequences
        self.addresses: list[int] = addresses
        self.size_bytes: i64 = 0  # about how much room they will take
        self.cursor: Cursor | None = None
        self.lease: Lease | None = None
        self.reason: str = ""


def request_bodies(engine: Engine, cursor: Cursor, first: i64) -> None:
    """Ask for the body of `first`, and of those that come behind it. The partitions of a queue lie mixed in the log, so
    its neighbours read what lies before the last of these too, as far as there is room for it: one pass over the same
    bytes serves them all."""
    capacity: i64 = engine.body_cache.prefetch_capacity()
    max_bytes: i64 = min(
        MAX_READ_BYTES, max(capacity // 2, engine.body_cache.max_bytes // MIN_READ_CACHE_DIVISOR)
    )
    read = _plan_read(FOR_DELIVERY, cursor, first, MAX_READ_MESSAGES, max_bytes, NO_ADDRESS_LIMIT)
    engine.reads.append(read)
    if not read.addresses:
        return
    capacity -= read.size_bytes
    max_address: i64 = read.addresses[len(read.addresses) - 1]
    cursors = cursor.group.cursors
    count: i64 = len(cursors)
    step: i64 = 1
    while step < count and step <= MAX_NEIGHBOR_PARTITIONS and capacity > 0:
        other = cursors[(cursor.partition.number + step) % count]
        step += 1
        if (
            other.consumer is not None
            and not other.is_waiting_for_body
            and not other.is_prefetching
            and len(other.prefetched_bodies) < MAX_NEIGHBOR_MESSAGES
        ):
            # What is parked behind its key is wanted before what is fresh.
            start: i64 = (
                other.low_watermark
                if other.low_watermark > other.prefetched_to
                else other.prefetched_to
            )
            if (
                start < other.partition.committed_end
                and other.partition.address(start) <= max_address
            ):
                # One that lags behind has much to read before it has come as far.
                read = _plan_read(
                    FOR_PREFETCH,
                    other,
                    start,
                    MAX_NEIGHBOR_MESSAGES,
                    min(capacity, engine.body_cache.max_bytes // NEIGHBOR_CACHE_DIVISOR),
                    max_address,
                )
                engine.reads.append(read)
                capacity -= read.size_bytes


def _plan_read(
    purpose: i64, cursor: Cursor, first: i64, max_messages: i64, max_bytes: i64, max_address: i64
) -> BodyRead:
    """At most so many messages and bytes, none that lies behind the horizon."""
    partition = cursor.partition
    cached = partition.cached_bodies
    prefetched = cursor.prefetched_bodies
    sequences: list[int] = []
    addresses: list[int] = []
    size: i64 = 0
    untouched = cursor.untouched_from()
    end = partition.committed_end
    seq = first
    while seq < end and max_messages > 0 and (seq == first or size < max_bytes):
        block = partition.find_block(seq)
        if block is None:
            seq = partition.first_live(seq + 1)
            continue
        at = block.index_of(seq)
        address = block.address[at]
        if address > max_address:
            break
        if address == NO_ADDRESS:
            seq = partition.first_live(seq + 1)
            continue
        number: object = int(seq)
        if (
            (len(cached) == 0 or number not in cached)
            and (len(prefetched) == 0 or number not in prefetched)
            and (
                seq >= untouched
                or (seq == first and purpose == FOR_DELIVERY)
                or (not cursor.is_settled(seq) and int(seq) not in cursor.leases)
            )
        ):
            sequences.append(int(seq))
            addresses.append(int(address))
            max_messages -= 1
            size += 200 + i64(block.size[at])
        seq += 1
    if seq > cursor.prefetched_to:
        cursor.prefetched_to = seq
    if purpose == FOR_DELIVERY:
        cursor.is_waiting_for_body = True
    else:
        cursor.is_prefetching = True
    read = BodyRead(purpose, partition, sequences, addresses)
    read.cursor = cursor
    read.size_bytes = size
    return read


def decode_message(data: bytes, codec: Codec) -> Message | None:
    """The message of a record; None for one that is damaged."""
    flags: i64 = data[FLAGS_OFFSET]
    try:
        message = decode_body(data, HEADER_BYTES)
    except (ValueError, IndexError):
        return None  # its checksum is right, and its contents are not
    message.expires = i64(read_i32_le(data, EXPIRES_OFFSET)) & 0xFFFF_FFFF
    message.priority = flags & PRIORITY_MASK
    if flags & DELAYED:
        message.deliver_at = read_i64_le(data, TIME_OFFSET)
    if flags & COMPRESSED:
        try:
            message.payload = codec.decompress(message.payload)
        except ValueError:
            return None
    return message


def rewrite_record(engine: Engine, data: bytes, address: i64) -> bool:
    """Compaction: write a message that still lives at `address` anew, so that its old segment can go."""
    pid: i64 = i64(read_i32_le(data, PID_OFFSET)) & 0xFFFF_FFFF
    if FIRST_OWNER_PID <= pid < FIRST_STATE_PID:
        return engine.exclusive.rewrite_record(pid, data, address)
    record = decode_record(data, 0, len(data), address)
    if pid >= FIRST_STATE_PID:
        return engine.broker_state.rewrite_record(record)
    partition = engine.partitions.get(int(record.pid))
    if partition is None or partition.address(record.seq) != address:
        return False
    new_address = engine.frame_builder.copy_message(partition, data)
    partition.set_address(record.seq, new_address)
    engine.segment_usage.drop(address, record.size)
    engine.segment_usage.add(new_address, record.size)
    return True
