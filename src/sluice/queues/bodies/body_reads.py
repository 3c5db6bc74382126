"""Bodies that are not in memory: asking for them, and what is done when they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import read_i32_le, read_i64_le
from mypy_extensions import i64

from sluice.message import COMPRESSED, DELAYED, PRIORITY_BITS, Message, decode_body
from sluice.queues.model.message_columns import GONE
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.log.broker_state import FIRST_OWNER, FIRST_PID
from sluice.queues.model.partition import Partition
from sluice.queues.ports import Codec
from sluice.store.protocol import EXPIRES_AT, FLAGS_AT, HEADER_BYTES, PID_AT, TIME_AT, take_apart

if TYPE_CHECKING:
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.engine import Engine

READ_AHEAD: Final = 128  # messages that one read brings, at most
READ_BYTES: Final = 262_144  # and how many bytes of them, in a cache that is large enough
NEIGHBOURS: Final = 32  # partitions that read along with one that must
ALONG: Final = 1024  # messages that each of them reads, at most
AHEAD_SHARE: Final = 16  # of the cache, for each
NO_HORIZON: Final = 0x7FFF_FFFF_FFFF_FFFF
LEAST_SHARE: Final = 32  # of the cache: what one read brings even where others have taken all the room

# What a read is for.
DELIVER: Final = 0  # a cursor cannot go on without the first of them
AHEAD: Final = 3  # a cursor will need them soon
EXPIRE: Final = 1  # an expired message becomes a dead letter
BURY: Final = 2  # so does one that failed, and was given back before that was decided


class Read:
    def __init__(self, what: i64, partition: Partition, sequences: list[int], addresses: list[int]) -> None:
        self.what: i64 = what
        self.partition: Partition = partition
        self.sequences: list[int] = sequences
        self.addresses: list[int] = addresses
        self.bytes: i64 = 0  # about how much room they will take
        self.cursor: Cursor | None = None
        self.lease: Lease | None = None
        self.reason: str = ""


def read_for(engine: Engine, cursor: Cursor, first: i64) -> None:
    """Ask for the body of `first`, and of those that come behind it. The partitions of a queue lie mixed in the log, so
    its neighbours read what lies before the last of these too, as far as there is room for it: one pass over the same
    bytes serves them all."""
    room: i64 = engine.young.room_ahead()
    most: i64 = min(READ_BYTES, max(room // 2, engine.young.budget // LEAST_SHARE))
    read = _read(DELIVER, cursor, first, READ_AHEAD, most, NO_HORIZON)
    engine.reads.append(read)
    if not read.addresses:
        return
    room -= read.bytes
    horizon: i64 = read.addresses[len(read.addresses) - 1]
    cursors = cursor.group.cursors
    count: i64 = len(cursors)
    step: i64 = 1
    while step < count and step <= NEIGHBOURS and room > 0:
        other = cursors[(cursor.partition.number + step) % count]
        step += 1
        if (
            other.consumer is not None
            and not other.fetching
            and not other.reading
            and len(other.ahead) < ALONG
        ):
            # What is parked behind its key is wanted before what is fresh.
            start: i64 = other.floor if other.floor > other.read_to else other.read_to
            if start < other.partition.committed and other.partition.address(start) <= horizon:
                # One that lags behind has much to read before it has come as far.
                read = _read(
                    AHEAD, other, start, ALONG, min(room, engine.young.budget // AHEAD_SHARE), horizon
                )
                engine.reads.append(read)
                room -= read.bytes


def _read(what: i64, cursor: Cursor, first: i64, limit: i64, most: i64, horizon: i64) -> Read:
    """At most so many messages and bytes, none that lies behind the horizon."""
    partition = cursor.partition
    young = partition.young
    ahead = cursor.ahead
    sequences: list[int] = []
    addresses: list[int] = []
    size: i64 = 0
    untouched = cursor.untouched()
    end = partition.committed
    seq = first
    while seq < end and limit > 0 and (seq == first or size < most):
        block = partition.block(seq)
        if block is None:
            seq = partition.first_live(seq + 1)
            continue
        at = block.at(seq)
        address = block.address[at]
        if address > horizon:
            break
        if address == GONE:
            seq = partition.first_live(seq + 1)
            continue
        number: object = int(seq)
        if (
            (len(young) == 0 or number not in young)
            and (len(ahead) == 0 or number not in ahead)
            and (
                seq >= untouched
                or (seq == first and what == DELIVER)
                or (not cursor.settled(seq) and int(seq) not in cursor.leases)
            )
        ):
            sequences.append(int(seq))
            addresses.append(int(address))
            limit -= 1
            size += 200 + i64(block.size[at])
        seq += 1
    if seq > cursor.read_to:
        cursor.read_to = seq
    if what == DELIVER:
        cursor.fetching = True
    else:
        cursor.reading = True
    read = Read(what, partition, sequences, addresses)
    read.cursor = cursor
    read.bytes = size
    return read


def message_of(data: bytes, codec: Codec) -> Message | None:
    """The message of a record; None for one that is damaged."""
    flags: i64 = data[FLAGS_AT]
    try:
        message = decode_body(data, HEADER_BYTES)
    except (ValueError, IndexError):
        return None  # its checksum is right, and its contents are not
    message.expires = i64(read_i32_le(data, EXPIRES_AT)) & 0xFFFF_FFFF
    message.priority = flags & PRIORITY_BITS
    if flags & DELAYED:
        message.deliver_at = read_i64_le(data, TIME_AT)
    if flags & COMPRESSED:
        try:
            message.payload = codec.decompress(message.payload)
        except ValueError:
            return None
    return message


def rewrite(engine: Engine, data: bytes, address: i64) -> bool:
    """Compaction: write a message that still lives at `address` anew, so that its old segment can go."""
    pid: i64 = i64(read_i32_le(data, PID_AT)) & 0xFFFF_FFFF
    if FIRST_OWNER <= pid < FIRST_PID:
        return engine.exclusive.rewrite(pid, data, address)
    record = take_apart(data, 0, len(data), address)
    if pid >= FIRST_PID:
        return engine.keeping.rewrite(record)
    partition = engine.partitions.get(int(record.pid))
    if partition is None or partition.address(record.seq) != address:
        return False
    moved = engine.journal.copy_message(partition, data)
    partition.move(record.seq, moved)
    engine.segments.drop(address, record.size)
    engine.segments.add(moved, record.size)
    return True
