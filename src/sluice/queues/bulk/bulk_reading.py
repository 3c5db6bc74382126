"""Bulk reading: locations of messages, and the progress of readers that keep their own position.

All functions work in portions: between them, the caller yields to other work.
"""

from __future__ import annotations

from librt.strings import BytesWriter, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.errors import OutOfRange, QueueMadeAgain
from sluice.queues.flow import Removal
from sluice.queues.log import ACKED, NoteReader, NoteWriter, notes
from sluice.queues.model import NO_ADDRESS, Cursor, EngineState, LostRanges, Partition, Queue


class MessageLocations:
    """Locations of messages, each as i64 seq, i64 address, i32 size."""

    def __init__(self) -> None:
        self.count: i64 = 0
        self.bytes: i64 = 0
        self._out = BytesWriter()

    def add(self, seq: i64, address: i64, size: i32) -> None:
        write_i64_le(self._out, seq)
        write_i64_le(self._out, address)
        write_i32_le(self._out, size)
        self.count += 1
        self.bytes += i64(size)

    def value(self) -> bytes:
        return self._out.getvalue()


def collect_locations(
    partition: Partition,
    start: i64,
    end: i64,
    gid: i64,
    max_count: i64,
    max_bytes: i64,
    locations: MessageLocations,
) -> i64:
    """Add the locations of messages from `start` to `end`; return where to continue.

    Stops at `max_count` messages or about `max_bytes`. With a group (`gid` is not 0), messages for
    another single group are left out.
    """
    seq = partition.first_live(start)
    while seq < end and locations.count < max_count and locations.bytes < max_bytes:
        block = partition.find_block(seq)
        if block is None:
            break
        at = block.index_of(seq)
        stop: i64 = len(block.address)
        while (
            at < stop and seq < end and locations.count < max_count and locations.bytes < max_bytes
        ):
            address: i64 = block.address[at]
            if address != NO_ADDRESS and (gid == 0 or partition.is_for_group(seq, gid)):
                locations.add(seq, address, block.size[at])
            at += 1
            seq = block.seq_at(at) if at < stop else seq + 1
        seq = partition.first_live(seq)
    return min(seq, end)


# ---- ranges


def incarnation_of(queue: Queue) -> str:
    """Return what distinguishes a queue from an earlier or later one of the same name.

    Sequences belong to one incarnation. A store never reuses a queue number; the creation time
    distinguishes the queues of different stores (in memory, emptied, salvaged). Both are stored
    and survive restarts and moves to another node. The time is rounded as the journal rounds it,
    so that it is the same before and after recovery.
    """
    return f"{int(queue.qid)}-{int(queue.created_at * 1000.0 + 0.5)}"


def check_incarnation(queue: Queue, expected: str) -> None:
    """Refuse a queue of another incarnation; an empty `expected` accepts all."""
    if expected and expected != incarnation_of(queue):
        raise QueueMadeAgain(queue.name, expected, incarnation_of(queue))


def earliest_stored(partition: Partition) -> int:
    return min(int(partition.first_live(0)), int(partition.committed_end))


def check_range(partition: Partition, start: int, end: int, cursor: Cursor | None) -> None:
    """Refuse a range that is not stored; `cursor` is that of the group that reads, if any."""
    queue = partition.queue
    description = f"partition {partition.number} of queue {queue.name!r}"
    earliest, latest = earliest_stored(partition), int(partition.committed_end)
    if start >= end:
        return
    if cursor is not None:
        check_lost(cursor, start, end)
    elif start < earliest and not queue.rules.is_compacted:
        raise OutOfRange(
            f"{description} is kept from {earliest} on, and {start} is before that",
            "Begin at the earliest; messages are kept until every group has settled them,"
            " so read with a group",
            earliest,
            latest,
        )
    if end > latest:
        raise OutOfRange(
            f"{description} goes up to {latest}, and {end} is beyond",
            "Ask for its offsets; a queue that was deleted and created again starts at 0",
            earliest,
            latest,
        )


def check_lost(cursor: Cursor, start: int, end: int) -> None:
    lost = int(first_lost(cursor, start, end))
    if lost >= 0:
        partition = cursor.partition
        raise OutOfRange(
            f"partition {partition.number} of queue {partition.queue.name!r} has lost {lost} before"
            f" group {cursor.group.name!r} had read it: other clients settled it for this group, or"
            " it was purged, expired or dropped because the queue was full",
            "Give the bulk reader a group of its own; lenient leaves out lost messages",
            earliest_stored(partition),
            int(partition.committed_end),
        )


# ---- progress


class BulkProgress:
    """Records how far bulk readers have read, and what others settled before them."""

    def __init__(self, state: EngineState, removal: Removal) -> None:
        self._state: EngineState = state
        self._removal: Removal = removal

    def settle_range(self, cursor: Cursor, end: i64, max_count: i64) -> bool:
        """Settle all before `end` for a group, in portions; return whether that is complete."""
        self.acknowledge(cursor, end)
        partition = cursor.partition
        gid = cursor.group.gid
        seq = partition.first_live(cursor.low_watermark)
        while seq < end:
            if max_count <= 0:
                return False
            if not cursor.is_settled(seq) and partition.is_for_group(seq, gid):
                self._removal.settle_unleased(cursor, seq, ACKED, cursor.leases.get(int(seq)))
                max_count -= 1
            seq = partition.first_live(seq + 1)
        if cursor.low_watermark < end:
            cursor.advance_watermark(end)  # the messages between were already deleted
        return True

    def acknowledge(self, cursor: Cursor, end: i64) -> None:
        """Record that a reader is done with everything below `end`.

        With the first report nothing is lost yet: if the low watermark is higher, it is unknown
        which messages others settled, and which were never for the group.
        """
        lost_ranges = cursor.lost_ranges
        if lost_ranges is None:
            self.start_tracking(cursor, end)
        elif lost_ranges.acknowledged_to < end:
            self._write_note(cursor, end, -1)
            lost_ranges.acknowledge(end)

    def start_tracking(self, cursor: Cursor, start: i64) -> None:
        """Start tracking for a reader that starts at `start`."""
        # Earlier settlements are not lost ranges.
        self._state.write_settlements()
        self._write_note(cursor, start, start)
        cursor.lost_ranges = LostRanges(start)

    def _write_note(self, cursor: Cursor, acknowledged_to: i64, lost_to: i64) -> None:
        note = NoteWriter(notes.BULK_PROGRESS)
        note.write_int(cursor.group.gid)
        note.write_int(cursor.partition.pid)
        note.write_int(acknowledged_to)
        note.write_int(lost_to)
        self._state.frame_builder.add_note(note, self._state.now_ms(), False)


def first_lost(cursor: Cursor, start: i64, end: i64) -> i64:
    """Return the first lost message from `start` to before `end`; -1 for none.

    Messages below `acknowledged_to` were processed by another reader, or by a previous run of this
    one.
    """
    lost_ranges = cursor.lost_ranges
    if lost_ranges is None:
        return -1
    partition = cursor.partition
    if start < lost_ranges.acknowledged_to and not partition.queue.rules.is_compacted:
        seq = partition.first_missing(start, min(lost_ranges.acknowledged_to, end))
        if seq >= 0:
            return seq
    for first, after in lost_ranges.ranges():
        if first >= end:
            break
        seq = partition.first_missing(max(i64(first), start), min(i64(after), end))
        if seq >= 0:
            return seq
    return -1


def is_progress(cursor: Cursor, end: i64) -> bool:
    """Return whether the group has not settled, or has not recorded, everything below `end`."""
    return (
        cursor.low_watermark < end
        or cursor.lost_ranges is None
        or cursor.lost_ranges.acknowledged_to < end
    )


def load_acknowledged(note: NoteReader, cursor: Cursor) -> None:
    """Load a note of a previous run."""
    acknowledged_to = note.read_int()
    # Above `acknowledged_to` in older stores, which counted unknown messages as lost.
    lost_to = note.read_int()
    if lost_to < 0 and cursor.lost_ranges is not None:
        cursor.lost_ranges.acknowledge(acknowledged_to)
    else:
        cursor.lost_ranges = LostRanges(acknowledged_to)
        cursor.lost_ranges.add(acknowledged_to, lost_to)
