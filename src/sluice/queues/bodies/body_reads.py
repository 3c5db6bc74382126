"""Reads of bodies that are not in memory: planning and decoding."""

from __future__ import annotations

from typing import Final

from librt.strings import read_i32_le, read_i64_le
from mypy_extensions import i64

from sluice.message import COMPRESSED, DELAYED, PRIORITY_MASK, Message, decode_body
from sluice.queues.bodies.body_cache import BodyCache
from sluice.queues.model import (
    FOR_DEAD_LETTER,
    FOR_DELIVERY,
    FOR_EXPIRY,
    FOR_PREFETCH,
    NO_ADDRESS,
    BodyRead,
    Cursor,
    Effects,
    Lease,
    Partition,
)
from sluice.queues.ports import Codec
from sluice.store.protocol import EXPIRES_OFFSET, FLAGS_OFFSET, HEADER_BYTES, TIME_OFFSET

MAX_READ_MESSAGES: Final = 128  # per read
MAX_READ_BYTES: Final = 262_144  # per read, if the cache is large enough
MAX_NEIGHBOR_PARTITIONS: Final = 32  # partitions that read along
MAX_NEIGHBOR_MESSAGES: Final = 1024  # per partition that reads along
NEIGHBOR_CACHE_DIVISOR: Final = 16  # share of the cache for each of them
NO_ADDRESS_LIMIT: Final = 0x7FFF_FFFF_FFFF_FFFF
# Share of the cache that one read may always use, even if the cache is full.
MIN_READ_CACHE_DIVISOR: Final = 32


class BodyReads:
    """Requests the bodies that deliveries and dead letters need."""

    def __init__(self, effects: Effects, body_cache: BodyCache) -> None:
        self._effects: Effects = effects
        self._body_cache: BodyCache = body_cache

    def request_for_expiry(self, partition: Partition, seq: i64) -> None:
        """Read a message that has expired and is to be dead-lettered."""
        self._effects.reads.append(
            BodyRead(FOR_EXPIRY, partition, [int(seq)], [int(partition.address(seq))])
        )

    def request_for_dead_letter(self, lease: Lease, reason: str) -> None:
        """Read a message that failed and is to be dead-lettered."""
        partition = lease.cursor.partition
        read = BodyRead(
            FOR_DEAD_LETTER, partition, [int(lease.seq)], [int(partition.address(lease.seq))]
        )
        read.lease = lease
        read.reason = reason
        self._effects.reads.append(read)

    def repeat(self, read: BodyRead, seq: int, address: i64) -> None:
        """Read a record again: compaction has moved it and freed its old address."""
        retry = BodyRead(read.purpose, read.partition, [seq], [int(address)])
        retry.lease = read.lease
        retry.reason = read.reason
        self._effects.reads.append(retry)

    def request_for_delivery(self, cursor: Cursor, first: i64) -> None:
        """Read the body of `first` and of following messages.

        The partitions of a queue are interleaved in the log. So other partitions also read their
        records before the last of these addresses, as far as the cache has space: one pass over the
        same bytes serves all of them.
        """
        cache = self._body_cache
        capacity: i64 = cache.prefetch_capacity()
        max_bytes: i64 = min(
            MAX_READ_BYTES, max(capacity // 2, cache.max_bytes // MIN_READ_CACHE_DIVISOR)
        )
        read = _plan_read(
            FOR_DELIVERY, cursor, first, MAX_READ_MESSAGES, max_bytes, NO_ADDRESS_LIMIT
        )
        self._effects.reads.append(read)
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
                        min(capacity, cache.max_bytes // NEIGHBOR_CACHE_DIVISOR),
                        max_address,
                    )
                    self._effects.reads.append(read)
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
        boxed_seq: object = int(seq)
        if (
            (len(cached) == 0 or boxed_seq not in cached)
            and (len(prefetched) == 0 or boxed_seq not in prefetched)
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
        message.deliver_at_ms = read_i64_le(data, TIME_OFFSET)
    if flags & COMPRESSED:
        try:
            message.payload = codec.decompress(message.payload)
        except ValueError:
            return None
    return message
