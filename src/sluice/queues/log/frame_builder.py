"""The open frame: the records of everything that the engine has decided since the last commit.

Messages are written as they arrive. Settled sequences are collected per group and partition and
written once, when the frame is closed: a thousand acknowledgements become a handful of notes.
Publishers are notified of the commit after the store has confirmed it, and never earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from librt.vecs import append, vec
from mypy_extensions import i32, i64

from sluice.message import Message, write_fields, write_message_fields
from sluice.store.protocol import MESSAGE, NOTE, begin_record, end_record, write_record

if TYPE_CHECKING:
    from sluice.queues.compacted.exclusive import ExclusiveQueues
    from sluice.queues.log.broker_state import BrokerState
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.model.partition import Partition
    from sluice.queues.ports import Publisher

# Note kinds, in the first byte of the body, and their fields.

# qid, first pid of the added partitions, count, name, configuration, time, gates
QUEUE_CREATED: Final = 1
QUEUE_DELETED: Final = 2  # qid
GROUP_CREATED: Final = 3  # qid, gid, name, then the start sequence of each partition
GROUP_DELETED: Final = 4  # gid
SETTLED: Final = 5  # gid, pid, outcome, then ranges of sequences
# gid, pid, seq, failures, due, first and last delivery, description, new events (`history`), token,
# used part of `total_timeout` (older notes end with the description, the events or the token)
RETRY: Final = 6
# pid, then ranges: not by a group (purged or expired without groups, retention over)
REMOVED: Final = 7
GROUP_SEEK: Final = 8  # gid, then the start sequence of each partition
TARGET_GROUP: Final = 9  # pid, seq, gid: the next message is for one group only
DEAD_LETTERED: Final = 10  # qid, reason: for the counters
DELIVERY_RELEASED: Final = 11  # gid, pid, seq, new events: released, not a failure
# application, number, rows, time: a batch whose messages are in the same frame (`bulk_ops`)
BATCH_COMMITTED: Final = 12
# gid, pid, position of a bulk reader; if it starts there, the end of the lost range, else -1
# (`lost_ranges`)
BULK_PROGRESS: Final = 13
TOKEN_SECRET: Final = 14  # the secret from which delivery tokens are derived

MAX_REUSED_BUFFER_BYTES: Final = 1_048_576  # larger buffers are not reused

# Outcomes of a settlement.
ACKED: Final = 0
DEAD: Final = 1
EXPIRED: Final = 2
PURGED: Final = 3


class Frame:
    """A closed frame on its way to the store, and what to do after its commit."""

    def __init__(self, data: bytes, count: i64, sync: bool) -> None:
        self.data: bytes = data
        self.count: i64 = count
        self.sync: bool = sync
        self.publishers: list[Publisher] = []
        self.tag_starts: vec[i64] = vec[i64]()  # for each publisher, the index of its first tag
        self.tags: vec[i64] = vec[i64]()
        self.partitions: list[Partition] = []
        # For each partition, the end of its messages in this frame.
        self.end_sequences: list[int] = []


class FrameBuilder:
    def __init__(self) -> None:
        self._out = BytesWriter()
        self._count: i64 = 0
        self._sync: bool = False
        self._has_owner_values: bool = False  # contains values of exclusive queues
        self._base_address: i64 = 0  # address of the frame's first record
        self.frame_number: i64 = 0  # number of the open frame
        self._publishers: list[Publisher] = []
        self._last_publisher: Publisher | None = None
        self._tag_starts: vec[i64] = vec[i64]()
        self._tags: vec[i64] = vec[i64]()
        self._partitions: list[Partition] = []
        self._dirty_cursors: list[Cursor] = []
        self._partitions_with_removals: list[Partition] = []
        # Has a note to write when the frame is closed.
        self.pending_state: BrokerState | None = None
        # The same for acknowledgements of exclusive queues.
        self.pending_owner_acks: ExclusiveQueues | None = None

    def begin_frame(self, base_address: i64) -> None:
        """Set the address of the open frame, before its first record is written."""
        self._base_address = base_address

    def base_address(self) -> i64:
        """Return the address of the open frame: all earlier records were given to the store."""
        return self._base_address

    def size(self) -> i64:
        """Return the bytes in the open frame."""
        return len(self._out)

    def has_pending(self) -> bool:
        """Return whether there is anything to commit."""
        return (
            self._count > 0
            or len(self._dirty_cursors) > 0
            or len(self._tags) > 0
            or len(self._partitions_with_removals) > 0
            or self.pending_state is not None
            or self.pending_owner_acks is not None
        )

    def is_urgent(self) -> bool:
        """Return whether a client waits for the commit, or a crash loses more than settlements.

        Settlements alone can wait for the next records: a lost settlement means a redelivery.
        """
        return (
            self._sync
            or self._has_owner_values
            or len(self._tags) > 0
            or len(self._partitions) > 0
            or len(self._out) > 1_048_576
        )

    def add_message(
        self,
        partition: Partition,
        flags: i64,
        seq: i64,
        key: i64,
        expires: i64,
        time: i64,
        size: i64,
        message: Message,
        payload: bytes,
        sync: bool,
    ) -> i64:
        """Write a message with a record of `size` bytes that ends with `payload`.

        Return its address.
        """
        out = self._out
        address: i64 = self._base_address + len(out)
        write_message_fields(
            begin_record(size, MESSAGE, flags, partition.pid, seq, key, expires, time), message
        )
        end_record(out, payload)
        self._count += 1
        if sync:
            self._sync = True
        self._mark_touched(partition)
        return address

    def copy_message(self, partition: Partition, record: bytes) -> i64:
        """Copy the record of a message; return its new address."""
        address: i64 = self._base_address + len(self._out)
        self._out.write(record)
        self._count += 1
        self._mark_touched(partition)
        return address

    def _mark_touched(self, partition: Partition) -> None:
        if not partition.is_in_open_frame:
            partition.is_in_open_frame = True
            self._partitions.append(partition)

    def add_state_record(self, pid: i64, seq: i64, expires: i64, time: i64, body: bytes) -> i64:
        """Write a record of `broker_state`; return its address."""
        address: i64 = self._base_address + len(self._out)
        write_record(self._out, MESSAGE, 0, pid, seq, 0, expires, time, body)
        self._count += 1
        self._sync = True
        return address

    def add_owner_value(
        self,
        pid: i64,
        seq: i64,
        flags: i64,
        key_hash: i64,
        time: i64,
        size: i64,
        key: bytes,
        props: bytes,
        headers: bytes,
        payload: bytes,
        sync: bool,
    ) -> i64:
        """Write a value of an exclusive queue; return its address. Two fields hold the key hash."""
        frame = self._out
        address: i64 = self._base_address + len(frame)
        low: i64 = key_hash & 0xFFFF_FFFF
        high: i64 = (key_hash >> 32) & 0xFFFF_FFFF
        out = begin_record(size, MESSAGE, flags, pid, seq, low, high, time)
        write_fields(out, time, b"", key, b"", props, headers)
        end_record(frame, payload)
        self._count += 1
        self._has_owner_values = True
        if sync:
            self._sync = True
        return address

    def copy_owner_value(self, record: bytes) -> i64:
        """Copy the record of a value of an exclusive queue; return its new address."""
        address: i64 = self._base_address + len(self._out)
        self._out.write(record)
        self._count += 1
        self._has_owner_values = True
        return address

    def add_note(self, body: bytes, now_ms: i64, sync: bool) -> None:
        write_record(self._out, NOTE, 0, 0, 0, 0, 0, now_ms, body)
        self._count += 1
        if sync:
            self._sync = True

    def request_sync(self) -> None:
        """Sync the open frame to disk when it is committed."""
        self._sync = True

    def add_commit_waiter(self, publisher: Publisher, tag: i64) -> None:
        if publisher is not self._last_publisher:
            self._last_publisher = publisher
            self._publishers.append(publisher)
            self._tag_starts = append(self._tag_starts, i64(len(self._tags)))
        self._tags = append(self._tags, tag)

    def add_dirty_cursor(self, cursor: Cursor) -> None:
        self._dirty_cursors.append(cursor)

    def add_removal(self, partition: Partition, seq: i64) -> None:
        if not partition.removed_seqs:
            self._partitions_with_removals.append(partition)
            partition.removed_seqs = []
        partition.removed_seqs.append(int(seq))

    def flush(self, now_ms: i64) -> None:
        """Write the collected settlements as notes.

        Commands that change the meaning of settlements (a new group, a seek, new rules) call this
        before they write their notes, so that recovery goes through the same states in the same
        order.
        """
        for cursor in self._dirty_cursors:
            cursor.write_settlements(self, now_ms)
        self._dirty_cursors = []
        for partition in self._partitions_with_removals:
            note = NoteWriter(REMOVED)
            note.write_int(partition.pid)
            note.write_ranges(partition.removed_seqs)
            partition.removed_seqs = []
            self.add_note(note.to_bytes(), now_ms, False)
        self._partitions_with_removals = []

    def close(self, now_ms: i64) -> Frame:
        """Close the frame: collected settlements become notes. Call `begin_frame` next."""
        self.flush(now_ms)
        if self.pending_state is not None:
            self.pending_state.write_delivered(now_ms)
            self.pending_state = None
        if self.pending_owner_acks is not None:
            self.pending_owner_acks.write_acks(now_ms)
            self.pending_owner_acks = None
        frame = Frame(self._out.getvalue(), self._count, self._sync)
        frame.publishers = self._publishers
        frame.tag_starts = self._tag_starts
        frame.tags = self._tags
        frame.partitions = self._partitions
        for partition in self._partitions:
            partition.is_in_open_frame = False
            frame.end_sequences.append(int(partition.next_seq))
        if len(self._out) > MAX_REUSED_BUFFER_BYTES:
            self._out = BytesWriter()
        else:
            # The next frame reuses the buffer, which then does not have to grow again.
            self._out.truncate(0)
        self.frame_number += 1
        self._count = 0
        self._sync = False
        self._has_owner_values = False
        self._publishers = []
        self._last_publisher = None
        self._tag_starts = vec[i64]()
        self._tags = vec[i64]()
        self._partitions = []
        return frame


class NoteReader:
    """Reads the fields of a note in the order in which they were written."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes = body
        self._offset: i64 = 1
        self.kind: i64 = body[0]

    def read_int(self) -> i64:
        value = read_i64_le(self._body, self._offset)
        self._offset += 8
        return value

    def read_seconds(self) -> float:
        return float(self.read_int()) / 1000.0

    def read_count(self, maximum: i64) -> i64:
        """Read a number of repetitions; raise ValueError if it is implausible."""
        value = self.read_int()
        if value < 0 or value > maximum:
            raise ValueError(f"a count of {value}, where {maximum} is the maximum")
        return value

    def read_text(self) -> str:
        return self.read_bytes().decode("utf-8", "surrogateescape")

    def read_bytes(self) -> bytes:
        size: i64 = i64(read_i32_le(self._body, self._offset))
        start = self._offset + 4
        if size < 0 or start + size > len(self._body):
            raise ValueError(f"a text of {size} bytes, where {len(self._body) - start} are left")
        self._offset = start + size
        return self._body[start : self._offset]

    def has_more(self) -> bool:
        return self._offset < len(self._body)


class NoteWriter:
    def __init__(self, kind: i64) -> None:
        self._out = BytesWriter()
        self._out.append(int(kind))

    def write_int(self, value: i64) -> None:
        write_i64_le(self._out, value)

    def write_seconds(self, seconds: float) -> None:
        """Write a time or a duration in milliseconds."""
        write_i64_le(self._out, int(seconds * 1000.0 + 0.5))

    def write_text(self, value: str) -> None:
        self.write_bytes(value.encode("utf-8", "surrogateescape"))

    def write_bytes(self, value: bytes) -> None:
        write_i32_le(self._out, i32(len(value)))
        self._out.write(value)

    def write_ranges(self, sequences: list[int]) -> None:
        """Write sorted sequences as (first, count) pairs, to the end of the note."""
        sequences.sort()
        at: i64 = 0
        size: i64 = len(sequences)
        while at < size:
            first: i64 = sequences[at]
            count: i64 = 1
            while at + count < size and sequences[at + count] == first + count:
                count += 1
            write_i64_le(self._out, first)
            write_i64_le(self._out, count)
            at += count

    def to_bytes(self) -> bytes:
        return self._out.getvalue()

    def size(self) -> int:
        return len(self._out)

    def take_bytes(self) -> bytes:
        """Return the bytes since the last call."""
        value = self._out.getvalue()
        self._out.truncate(0)
        return value
