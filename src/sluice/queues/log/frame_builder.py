"""The open frame: the records of everything that the engine has decided since the last commit.

Messages are written as they arrive. Settled sequences are collected per group and partition and
written once, when the frame is closed: a thousand acknowledgements become a handful of notes. What
collects them derives from `NoteSource`; the frame knows nothing else about queues, groups and
sessions. Publishers are notified of the commit after the store has confirmed it, and never earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter, write_i64_le
from librt.vecs import append, vec
from mypy_extensions import i64

from sluice.message import Message, write_fields, write_message_fields
from sluice.queues.log.notes import (
    REMOVED,
    SETTLED,
    NoteWriter,
    count_ranges,
    write_sorted_ranges,
)
from sluice.store.protocol import (
    HEADER_BYTES,
    MESSAGE,
    NOTE,
    begin_record,
    end_record,
    write_record,
)

if TYPE_CHECKING:
    from sluice.queues.ports import Publisher

MAX_REUSED_BUFFER_BYTES: Final = 1_048_576  # larger buffers are not reused
# A frame of this size is committed at once, even if it has only settlements.
MAX_DELAYED_BYTES: Final = 1_048_576

_NO_REMOVED: Final[list[int]] = []  # shared by partitions without removals; never modified


class NoteSource:
    """Collects changes of the open frame and writes them as notes before it is closed."""

    def write_notes(self, frame_builder: FrameBuilder, now_ms: i64) -> None:
        """Write what was collected since the last call, if anything."""


class LoggedPartition(NoteSource):
    """The part of a partition that frames use: what it has in them, and what is committed."""

    def __init__(self, pid: i64) -> None:
        self.pid: i64 = pid
        self.next_seq: i64 = 0
        self.committed_end: i64 = 0  # lower sequences are durable and may be delivered
        self.is_in_open_frame: bool = False  # has messages in the open frame
        # Removed since the last frame, where no settlement of a group implies it.
        self.removed_seqs: list[int] = _NO_REMOVED

    def write_notes(self, frame_builder: FrameBuilder, now_ms: i64) -> None:
        note = NoteWriter(REMOVED)
        note.write_int(self.pid)
        note.write_ranges(self.removed_seqs)
        self.removed_seqs = _NO_REMOVED
        frame_builder.add_note(note, now_ms, False)


class Frame:
    """A closed frame on its way to the store, and what to do after its commit."""

    def __init__(self, data: bytes, count: i64, sync: bool) -> None:
        self.data: bytes = data
        self.count: i64 = count
        self.sync: bool = sync
        self.publishers: list[Publisher] = []
        self.tag_starts: vec[i64] = vec[i64]()  # for each publisher, the index of its first tag
        self.tags: vec[i64] = vec[i64]()
        self.partitions: list[LoggedPartition] = []
        # For each partition, the end of its messages in this frame.
        self.end_sequences: list[int] = []

    def mark_committed(self) -> None:
        """Record that the messages of this frame are durable."""
        for nth, partition in enumerate(self.partitions):
            if partition.committed_end < self.end_sequences[nth]:
                partition.committed_end = self.end_sequences[nth]


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
        self._partitions: list[LoggedPartition] = []
        # What has notes to write: settlements, removals, and all others.
        self._settlements: list[NoteSource] = []
        self._removals: list[NoteSource] = []
        self._other_notes: list[NoteSource] = []

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
            or len(self._settlements) > 0
            or len(self._tags) > 0
            or len(self._removals) > 0
            or len(self._other_notes) > 0
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
            or len(self._out) > MAX_DELAYED_BYTES
        )

    def add_message(
        self,
        partition: LoggedPartition,
        flags: i64,
        seq: i64,
        key_hash: i64,
        expires: i64,
        time_ms: i64,
        size: i64,
        message: Message,
        payload: bytes,
        sync: bool,
    ) -> i64:
        """Write a message as a record of `size` bytes that ends with `payload`.

        `payload` is that of the message, or its compressed form. Return the address.
        """
        out = self._out
        address: i64 = self._base_address + len(out)
        write_message_fields(
            begin_record(size, MESSAGE, flags, partition.pid, seq, key_hash, expires, time_ms),
            message,
        )
        end_record(out, payload)
        self._count += 1
        if sync:
            self._sync = True
        self._mark_touched(partition)
        return address

    def copy_message(self, partition: LoggedPartition, record: bytes) -> i64:
        """Copy the record of a message; return its new address."""
        address: i64 = self._base_address + len(self._out)
        self._out.write(record)
        self._count += 1
        self._mark_touched(partition)
        return address

    def _mark_touched(self, partition: LoggedPartition) -> None:
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

    def add_note(self, note: NoteWriter, now_ms: i64, sync: bool) -> None:
        write_record(self._out, NOTE, 0, 0, 0, 0, 0, now_ms, note.to_bytes())
        self._count += 1
        if sync:
            self._sync = True

    def add_settled_note(
        self, gid: i64, pid: i64, outcome: i64, sequences: list[int], now_ms: i64
    ) -> None:
        """Write the note SETTLED without building it first: a frame may have one per message."""
        if len(sequences) > 1:
            sequences.sort()
        out = begin_record(
            HEADER_BYTES + 25 + 16 * count_ranges(sequences), NOTE, 0, 0, 0, 0, 0, now_ms
        )
        out.append(int(SETTLED))
        write_i64_le(out, gid)
        write_i64_le(out, pid)
        write_i64_le(out, outcome)
        write_sorted_ranges(out, sequences)
        end_record(self._out, b"")
        self._count += 1

    def request_sync(self) -> None:
        """Sync the open frame to disk when it is committed."""
        self._sync = True

    def add_commit_waiter(self, publisher: Publisher, tag: i64) -> None:
        """Notify `publisher` of the commit of the open frame, with its own `tag`."""
        if publisher is not self._last_publisher:
            self._last_publisher = publisher
            self._publishers.append(publisher)
            self._tag_starts = append(self._tag_starts, i64(len(self._tags)))
        self._tags = append(self._tags, tag)

    def add_settlements(self, source: NoteSource) -> None:
        """Write the settlements of `source` as notes before the frame is closed."""
        self._settlements.append(source)

    def add_removal(self, partition: LoggedPartition, seq: i64) -> None:
        if not partition.removed_seqs:
            self._removals.append(partition)
            partition.removed_seqs = []
        partition.removed_seqs.append(int(seq))

    def write_at_close(self, source: NoteSource) -> None:
        """Write the notes of `source` when the frame is closed."""
        self._other_notes.append(source)

    def write_collected_notes(self, now_ms: i64) -> None:
        """Write the collected settlements and removals as notes.

        Commands that change the meaning of settlements (a new group, a seek, new rules) call this
        before they write their notes, so that recovery goes through the same states in the same
        order.
        """
        for source in self._settlements:
            source.write_notes(self, now_ms)
        self._settlements = []
        for source in self._removals:
            source.write_notes(self, now_ms)
        self._removals = []

    def close(self, now_ms: i64) -> Frame:
        """Close the frame after all collected notes are written. Call `begin_frame` next."""
        self.write_collected_notes(now_ms)
        for source in self._other_notes:
            source.write_notes(self, now_ms)
        self._other_notes = []
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
