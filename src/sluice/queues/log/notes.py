"""Notes: records of the log that change state. All note numbers, and how their fields are encoded.

A note is its number in one byte, then its fields in the order listed here. Integers have eight
bytes, texts and bytes a length of four bytes before them, times and durations are milliseconds.
Numbers are part of the stored format: a number is never used for anything else.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

# ---- queues

# qid, first pid of the added partitions, count, name, configuration, time, gates
QUEUE_CREATED: Final = 1
QUEUE_DELETED: Final = 2  # qid
GROUP_CREATED: Final = 3  # qid, gid, name, then the start sequence of each partition
GROUP_DELETED: Final = 4  # gid
SETTLED: Final = 5  # gid, pid, outcome, then ranges of sequences
# gid, pid, seq, failures, due, first and last delivery, description, new events (`history`), token,
# used part of `total_timeout`
RETRY: Final = 6
# pid, then ranges: not by a group (purged or expired without groups, retention over)
REMOVED: Final = 7
GROUP_SEEK: Final = 8  # gid, then the start sequence of each partition
TARGET_GROUP: Final = 9  # pid, seq, gid: the next message is for one group only
# qid, reason; if it ended a delivery: gid, 1 if by a nack, 1 if it was a redelivery. For counters
DEAD_LETTERED: Final = 10
DELIVERY_RELEASED: Final = 11  # gid, pid, seq, new events: released, not a failure
# application, number, rows, time: a batch whose messages are in the same frame
BATCH_COMMITTED: Final = 12
# gid, pid, position of a bulk reader; if it starts there, the end of the lost range, else -1
# (`lost_ranges`)
BULK_PROGRESS: Final = 13
TOKEN_SECRET: Final = 14  # the secret from which delivery tokens are derived
QUEUE_PAUSED: Final = 16  # qid, then the pause: time (0: resumed), operator, reason
GROUP_ADMISSION: Final = 17  # gid, pause as above, when its breaker opened (0: closed)
RESCHEDULED: Final = 18  # pid, seq, new due time, new expiry in seconds (0: never)
SCHEDULE_STORED: Final = 19  # a new or changed schedule: `Schedule.write`
SCHEDULE_REMOVED: Final = 20  # name
SCHEDULE_RAN: Final = 21  # name, last handled tick, how many runs, the run: `Run.write`
KEY_HELD: Final = 22  # gid, pid and seq of the dead letter, then the key: `key_holds`
KEY_REPAIRED: Final = 23  # gid, key hash, pid and seq of a dead letter that was redriven
KEY_RELEASED: Final = 24  # gid, key hash: its timeout is over

# ---- broker state

FIRST_STATE_NOTE: Final = 32
ENTRY_DELETED: Final = 32  # seq
PENDING_DELIVERED: Final = 33  # pairs: pending message, session
QOS2_RECEIVED: Final = 34  # session, packet id: a QoS 2 message was received
QOS2_RELEASED: Final = 35  # session, packet id: its PUBREL was received
# session, packet id, pending message: a QoS 2 message was sent; 0: its PUBREC was received
QOS2_SENT: Final = 36
QOS2_COMPLETED: Final = 37  # session, packet id: its PUBCOMP was received
# session, packet id, dedup id: a QoS 2 message is being sent to other cells
OUTBOX_RECORDED: Final = 38
# cell, session, lowest open dedup id, keys: parts of messages that were received here
INBOX_RECORDED: Final = 39

# ---- exclusive queues

FIRST_OWNER_NOTE: Final = 48
OWNER_CREATED: Final = 48  # number, client, first sequence
# for each owner: number, acked, time, count and sequences of out-of-order acks
OWNER_ACKED: Final = 49
OWNER_SEEK: Final = 50  # number, the sequence after which it continues
OWNER_VALUE_REMOVED: Final = 51  # number, seq, key hash: expired or damaged
OWNERS_SWEPT: Final = 52  # time in seconds: older values of all owners are removed
OWNER_PURGED: Final = 53  # number
OWNER_DELETED: Final = 54  # number

# ---- outcomes of a settlement

ACKED: Final = 0
DEAD: Final = 1
EXPIRED: Final = 2
PURGED: Final = 3
CANCELLED: Final = 4
OUTCOMES: Final = 5  # how many there are

MAX_MILLISECONDS: Final = 1 << 60  # of a time: a float of more may be rounded to 2^63


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
        """Read a time or a duration; raise ValueError if `write_seconds` could not write it."""
        milliseconds = self.read_int()
        if milliseconds < -MAX_MILLISECONDS or milliseconds > MAX_MILLISECONDS:
            raise ValueError(f"a time of {milliseconds} ms")
        return float(milliseconds) / 1000.0

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


def write_sorted_ranges(out: BytesWriter, sequences: list[int]) -> None:
    """Write sorted sequences as (first, count) pairs."""
    at: i64 = 0
    size: i64 = len(sequences)
    while at < size:
        first: i64 = sequences[at]
        count: i64 = 1
        while at + count < size and sequences[at + count] == first + count:
            count += 1
        write_i64_le(out, first)
        write_i64_le(out, count)
        at += count


def count_ranges(sequences: list[int]) -> i64:
    """Return how many pairs `write_sorted_ranges` writes."""
    size: i64 = len(sequences)
    count: i64 = 1 if size else 0
    at: i64 = 1
    while at < size:
        if sequences[at] != sequences[at - 1] + 1:
            count += 1
        at += 1
    return count


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
        """Sort sequences and write them as (first, count) pairs, to the end of the note."""
        sequences.sort()
        write_sorted_ranges(self._out, sequences)

    def to_bytes(self) -> bytes:
        return self._out.getvalue()

    def size(self) -> int:
        return len(self._out)

    def take_bytes(self) -> bytes:
        """Return the bytes since the last call."""
        value = self._out.getvalue()
        self._out.truncate(0)
        return value
