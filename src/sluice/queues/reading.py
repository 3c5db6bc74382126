"""Bodies that are not in memory: asking for them, and what is done when they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.message import COMPRESSED, DELAYED, PRIORITY_BITS, Message, decode_body
from sluice.queues.delivery import Lease
from sluice.queues.keeping import FIRST_PID
from sluice.queues.partition import BLOCK, GONE, Partition
from sluice.queues.ports import Codec
from sluice.store.protocol import take_apart

if TYPE_CHECKING:
    from sluice.queues.cursor import Cursor
    from sluice.queues.engine import Engine

READ_AHEAD: Final = 128  # messages that one read brings, at most
READ_BYTES: Final = 262_144  # and how many bytes of them, in a cache that is large enough
READ_SHARE: Final = 8  # of the cache: what is read ahead must still be there when its turn comes

# What a read is for.
DELIVER: Final = 0  # a cursor cannot go on without the first of them
EXPIRE: Final = 1  # an expired message becomes a dead letter
BURY: Final = 2  # so does one that failed, and was given back before that was decided


class Read:
    def __init__(self, what: i64, partition: Partition, sequences: list[int], addresses: list[int]) -> None:
        self.what: i64 = what
        self.partition: Partition = partition
        self.sequences: list[int] = sequences
        self.addresses: list[int] = addresses
        self.cursor: Cursor | None = None
        self.lease: Lease | None = None
        self.reason: str = ""


def read_ahead(cursor: Cursor, first: i64, cache_bytes: i64) -> Read:
    """Ask for the body of `first`, and of those that come behind it."""
    partition = cursor.partition
    sequences: list[int] = []
    addresses: list[int] = []
    size: i64 = 0
    most: i64 = min(READ_BYTES, cache_bytes // READ_SHARE)
    seq = first
    while seq < partition.committed and len(sequences) < READ_AHEAD and (seq == first or size < most):
        block = partition.block(seq)
        if block is None:
            break
        at: i64 = seq & (BLOCK - 1)
        number = int(seq)
        if (
            block.address[at] != GONE
            and number not in partition.young
            and (seq == first or (not cursor.settled(seq) and number not in cursor.leases))
        ):
            sequences.append(number)
            addresses.append(int(block.address[at]))
            size += 200 + i64(block.size[at])
        seq = partition.first_live(seq + 1)
    cursor.fetching = True
    read = Read(DELIVER, partition, sequences, addresses)
    read.cursor = cursor
    return read


def message_of(data: bytes, codec: Codec) -> Message | None:
    """The message of a record; None for one that is damaged."""
    record = take_apart(data, 0, len(data), 0)
    message = decode_body(record.body)
    message.expires = record.expires
    message.priority = record.flags & PRIORITY_BITS
    if record.flags & DELAYED:
        message.deliver_at = record.time
    if record.flags & COMPRESSED:
        try:
            message.payload = codec.decompress(message.payload)
        except ValueError:
            return None
    return message


def rewrite(engine: Engine, data: bytes, address: i64) -> bool:
    """Compaction: write a message that still lives at `address` anew, so that its old segment can go."""
    record = take_apart(data, 0, len(data), address)
    if record.pid >= FIRST_PID:
        return engine.keeping.rewrite(record)
    partition = engine.partitions.get(int(record.pid))
    if partition is None or partition.address(record.seq) != address:
        return False
    moved = engine.journal.add_message(
        partition, record.flags, record.seq, record.key, record.expires, record.time, record.body, b"", False
    )
    partition.move(record.seq, moved)
    engine.segments.drop(address, record.size)
    engine.segments.add(moved, record.size)
    return True
