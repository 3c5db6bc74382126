"""Reads of bodies that are not in memory: planning, decoding, and rewriting by compaction."""

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

MAX_READ_MESSAGES: Final = 128  # per read
MAX_READ_BYTES: Final = 262_144  # per read, if the cache is large enough
MAX_NEIGHBOR_PARTITIONS: Final = 32  # partitions that read along
MAX_NEIGHBOR_MESSAGES: Final = 1024  # per partition that reads along
NEIGHBOR_CACHE_DIVISOR: Final = 16  # share of the cache for each of them
NO_ADDRESS_LIMIT: Final = 0x7FFF_FFFF_FFFF_FFFF
# Share of the cache that one read may always use, even if the cache is full.
MIN_READ_CACHE_DIVISOR: Final = 32

# The purpose of a read.
FOR_DELIVERY: Final = 0  # a cursor is blocked until the first body is read
FOR_PREFETCH: Final = 3  # a cursor will need them soon
FOR_EXPIRY: Final = 1  # an expired message is dead-lettered
FOR_DEAD_LETTER: Final = 2  # a failed message without its body in memory is dead-lettered


class BodyRead:
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


def request_bodies(engine: Engine, cursor: Cursor, first: i64) -> None:
    """Read the body of `first` and of following messages.

    The partitions of a queue are interleaved in the log. So other partitions also read their
    records before the last of these addresses, as far as the cache has space: one pass over the
    same bytes serves all of them.
    """
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
            # Parked messages are needed before unscanned ones.
            start: i64 = (
                other.low_watermark
                if other.low_watermark > other.prefetched_to
                else other.prefetched_to
            )
            if (
                start < other.partition.committed_end
                and other.partition.address(start) <= max_address
            ):
                # A partition with a larger lag has much to read before it reaches this address.
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
    """Plan a read of at most so many messages and bytes, none after `max_address`."""
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
    """Decode the message of a record; return None if it is damaged."""
    flags: i64 = data[FLAGS_OFFSET]
    try:
        message = decode_body(data, HEADER_BYTES)
    except (ValueError, IndexError):
        return None  # valid checksum, invalid contents
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
    """Copy a record that is live at `address` into the open frame, so that its segment can go."""
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
