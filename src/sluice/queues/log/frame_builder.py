"""The frame that is being made: what the engine has decided since the last commit, as records.

Messages go in as they come. Settled sequences are gathered per group and partition and written once, when the frame is
closed: a thousand acknowledgements are a handful of notes. A receipt is kept for whoever must hear of the commit; it is
answered when the store has said `done`, and by nothing else.
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

# The notes: what changed, in the first byte of the body.
QUEUE_CREATED: Final = (
    1  # qid, first pid of the partitions added, count, name, configuration, time, gates
)
QUEUE_DELETED: Final = 2  # qid
GROUP_CREATED: Final = 3  # qid, gid, name, then the floor of each partition
GROUP_DELETED: Final = 4  # gid
SETTLED: Final = 5  # gid, pid, how, then ranges of sequences
RETRY: Final = (
    # gid, pid, seq, failures, due, first and last delivery, description, new steps (`history`), token,
    # time spent of `total_timeout` (older notes end with the description, the steps or the token)
    6
)
REMOVED: Final = (
    7  # pid, then ranges: by no group's doing (purged or expired without groups, retention over)
)
GROUP_SEEK: Final = 8  # gid, then the floor of each partition
TARGET_GROUP: Final = 9  # pid, seq, gid: the message that follows is for one group alone
DEAD_LETTERED: Final = 10  # qid, reason: for the counters
DELIVERY_RELEASED: Final = 11  # gid, pid, seq, new steps: given back, which is no failure
BATCH_COMMITTED: Final = 12  # application, number, rows, time: a batch whose messages stand in the same frame (`batches`)
BULK_PROGRESS: Final = 13  # gid, pid, how far a reader is; if it begins there, what is lost already ends, else -1 (`losses`)
TOKEN_SECRET: Final = 14  # the secret that delivery tokens are derived from (`tokens`)

MAX_REUSED_BUFFER_BYTES: Final = 1_048_576  # of a frame that was sent

# How a message was settled.
ACKED: Final = 0
DEAD: Final = 1
EXPIRED: Final = 2
PURGED: Final = 3


class Frame:
    """A closed frame on its way to the store, and what follows from its commit."""

    def __init__(self, data: bytes, count: i64, sync: bool) -> None:
        self.data: bytes = data
        self.count: i64 = count
        self.sync: bool = sync
        self.publishers: list[Publisher] = []
        self.tag_starts: vec[i64] = vec[i64]()  # for each of them, where its tags begin
        self.tags: vec[i64] = vec[i64]()
        self.partitions: list[Partition] = []
        self.end_sequences: list[
            int
        ] = []  # for each of them the sequence up to which this frame goes


class FrameBuilder:
    def __init__(self) -> None:
        self._out = BytesWriter()
        self._count: i64 = 0
        self._sync: bool = False
        self._has_owner_values: bool = False  # has values of exclusive queues
        self._base_address: i64 = 0  # address of the frame's first record
        self.frame_number: i64 = 0  # closed so far: the number of the open frame
        self._publishers: list[Publisher] = []
        self._last_publisher: Publisher | None = None  # the last of them
        self._tag_starts: vec[i64] = vec[i64]()
        self._tags: vec[i64] = vec[i64]()
        self._partitions: list[Partition] = []
        self._dirty_cursors: list[Cursor] = []
        self._partitions_with_removals: list[Partition] = []  # from which something was removed
        self.pending_state: BrokerState | None = (
            None  # has a note to write when the frame is closed
        )
        self.pending_owner_acks: ExclusiveQueues | None = (
            None  # so have the owners of exclusive queues
        )

    def begin_frame(self, base_address: i64) -> None:
        """The store says where the frame under construction will stand. Before its first record is written."""
        self._base_address = base_address

    def base_address(self) -> i64:
        """Where the open frame stands: all before it is with the store."""
        return self._base_address

    def size(self) -> i64:
        """Bytes that wait in the open frame."""
        return len(self._out)

    def has_pending(self) -> bool:
        """Whether there is anything to commit."""
        return (
            self._count > 0
            or len(self._dirty_cursors) > 0
            or len(self._tags) > 0
            or len(self._partitions_with_removals) > 0
            or self.pending_state is not None
            or self.pending_owner_acks is not None
        )

    def is_urgent(self) -> bool:
        """Whether somebody waits for the commit, or a crash could lose more than a settlement. Settlements alone can
        ride with what comes next: one that is lost is a redelivery."""
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
        """Write a message, whose record has `size` bytes and ends with `payload`; the address it will have."""
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
        """Write such a record once more, as it is; the address it will have."""
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
        """Write a record that belongs to no queue (see `keeping`); the address it will have."""
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
        """Write a value of an exclusive queue; the address it will have. Its key's mark stands in two fields."""
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
        """The same again for a value of an exclusive queue."""
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
        """Let a power cut not take back the frame that is being made, once it is kept."""
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
        """Write down what was settled so far. Whatever changes what settling means (a new group, a seek, other rules)
        is noted behind this, so that recovery goes through the same states in the same order."""
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
        """End the frame: gathered settlements become notes, and a new frame begins (see `begin`)."""
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
            self._out.truncate(
                0
            )  # its room is for the next frame, which would get it piece by piece
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
    """A cursor over the body of a note: the fields in the order in which they were put."""

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
        """A number that says how often something is done: refused if it is absurd."""
        value = self.read_int()
        if value < 0 or value > maximum:
            raise ValueError(f"a count of {value}, where {maximum} is the most that there can be")
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
        """A time or a duration, kept in milliseconds."""
        write_i64_le(self._out, int(seconds * 1000.0 + 0.5))

    def write_text(self, value: str) -> None:
        self.write_bytes(value.encode("utf-8", "surrogateescape"))

    def write_bytes(self, value: bytes) -> None:
        write_i32_le(self._out, i32(len(value)))
        self._out.write(value)

    def write_ranges(self, sequences: list[int]) -> None:
        """Sorted sequences as (first, count) pairs, to the end of the note."""
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
        """What was written since the last cut."""
        value = self._out.getvalue()
        self._out.truncate(0)
        return value
