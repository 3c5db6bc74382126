"""The language between the queue engine and its stores: records, addresses, and what a return means.

The engine writes records into frames. A frame is one group commit: all of it survives a crash, or none of it. A record
is either a MESSAGE, which is read back by its address when it is delivered, or a NOTE, which says how the state of the
queues has changed and is only ever read again by recovery. A store keeps frames in order, gives back messages, and at
start hands over what it has: the last snapshot, the messages that were kept before it, and every record since.

    record   40 bytes and a body, little endian
      u32 crc32c of everything behind it        u32 size of the whole record
      u8 kind   u8 flags   u16 spare            u32 pid: the number of a queue's partition
      u64 seq                                   u32 key: hash of the partition key, 0 for none
      u32 expires: seconds since 1970, 0: never u64 time: milliseconds since 1970
      body

A store gives fields back as they were written, and reads no meaning into them: of a value in an exclusive queue, `key`
and `expires` are the two halves of its key's mark (`queues/owners.py`).

An address is `segment << 32 | offset of the record in it`; a segment is what a store can give back to the system.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from google_crc32c import extend as extend_crc32c
from google_crc32c import value as crc32c
from librt.strings import (
    BytesWriter,
    read_i32_le,
    read_i64_le,
    write_i32_le,
    write_i64_le,
)
from mypy_extensions import i32, i64

MESSAGE: Final = 1
NOTE: Final = 2

HEADER_BYTES: Final = 40
FLAGS_OFFSET: Final = 9  # where some of its fields stand
PID_OFFSET: Final = 12
KEY_OFFSET: Final = 24
EXPIRES_OFFSET: Final = 28
TIME_OFFSET: Final = 32
# A row of an index: address and the header of a message without its crc and spare bytes (see `write_row`).
ROW_BYTES: Final = 40
SMALL_BODY_BYTES: Final = 512

_RECORD_WRITER: Final = BytesWriter()  # where a record is put together, in the loop's thread
_compute_crc32c: Final = crc32c  # found without a look into the names of this module
_continue_crc32c: Final = extend_crc32c


class Record:
    """A record taken apart. `body` is empty when it came from an index row."""

    def __init__(
        self,
        kind: i64,
        flags: i64,
        pid: i64,
        seq: i64,
        key_hash: i64,
        expires: i64,
        time: i64,
        body: bytes,
        address: i64,
        size: i64,
    ) -> None:
        self.kind: i64 = kind
        self.flags: i64 = flags
        self.pid: i64 = pid
        self.seq: i64 = seq
        self.key_hash: i64 = key_hash
        self.expires: i64 = expires
        self.time: i64 = time
        self.body: bytes = body
        self.address: i64 = address
        self.size: i64 = size


def _to_signed(value: i64) -> i32:
    return i32(value if value < 0x8000_0000 else value - 0x1_0000_0000)


def write_record(
    frame: BytesWriter,
    kind: i64,
    flags: i64,
    pid: i64,
    seq: i64,
    key_hash: i64,
    expires: i64,
    time: i64,
    body: bytes,
    body_tail: bytes = b"",
) -> None:
    """Add one record to the frame that is being made; its body is `body` and behind it `rest`."""
    writer = begin_record(
        HEADER_BYTES + len(body) + len(body_tail), kind, flags, pid, seq, key_hash, expires, time
    )
    writer.write(body)
    end_record(frame, body_tail)


def begin_record(
    size: i64, kind: i64, flags: i64, pid: i64, seq: i64, key_hash: i64, expires: i64, time: i64
) -> BytesWriter:
    """The header of a record of `size` bytes. Its body is put behind it, then `end_record` adds it to the frame."""
    writer = _RECORD_WRITER
    writer.truncate(0)
    write_i64_le(writer, flags << 40 | kind << 32 | size)
    write_i32_le(writer, _to_signed(pid))
    write_i64_le(writer, seq)
    write_i32_le(writer, _to_signed(key_hash))
    write_i32_le(writer, _to_signed(expires))
    write_i64_le(writer, time)
    return writer


def end_record(frame: BytesWriter, body_tail: bytes) -> None:
    """Behind all that was put there stands `rest`. If it is large it is copied once, into the frame; if it is small it
    is cheaper to copy than to check by itself."""
    writer = _RECORD_WRITER
    if len(body_tail) < SMALL_BODY_BYTES:
        writer.write(body_tail)
        record = writer.getvalue()
        crc: int = _compute_crc32c(record)
        write_i32_le(frame, _to_signed(crc))
        frame.write(record)
        return
    beginning = writer.getvalue()
    crc = _continue_crc32c(_compute_crc32c(beginning), body_tail)
    write_i32_le(frame, _to_signed(crc))
    frame.write(beginning)
    frame.write(body_tail)


def read_record(data: bytes, at: i64, end: i64, address: i64) -> Record | None:
    """The record at `data[at:]`, which must end by `end`; None when its bytes cannot be one that was written."""
    if at + HEADER_BYTES > end:
        return None
    size: i64 = i64(read_i32_le(data, at + 4)) & 0xFFFF_FFFF
    if size < HEADER_BYTES or at + size > end:
        return None
    crc: i64 = i64(read_i32_le(data, at)) & 0xFFFF_FFFF
    computed_crc: int = crc32c(data[at + 4 : at + size])
    return decode_record(data, at, size, address) if crc == computed_crc else None


def decode_record(data: bytes, at: i64, size: i64, address: i64) -> Record:
    """The fields of a record that is known to be whole: a store has checked what `read` gives back."""
    return Record(
        data[at + 8],
        data[at + 9],
        i64(read_i32_le(data, at + 12)) & 0xFFFF_FFFF,
        read_i64_le(data, at + 16),
        i64(read_i32_le(data, at + 24)) & 0xFFFF_FFFF,
        i64(read_i32_le(data, at + 28)) & 0xFFFF_FFFF,
        read_i64_le(data, at + 32),
        data[at + HEADER_BYTES : at + size],
        address,
        size,
    )


class RecoveryLoader(Protocol):
    """What recovery hands the past to, in this order: one snapshot or none, index rows, then records."""

    def load_snapshot(self, snapshot: bytes) -> None:
        """The state of the queues at a moment between two frames, as `Engine.snapshot` wrote it."""

    def load_rows(self, rows: bytes) -> None:
        """Messages of frames before the snapshot, each `ROW_BYTES` long (`read_row`), oldest segment first. Some may
        have been settled before the snapshot: the snapshot knows which."""

    def load_record(self, record: Record) -> None:
        """One record of a frame behind the snapshot, in the order of writing."""


class RecoveryReport:
    """What a store found when it was opened, for the log and for people."""

    def __init__(self) -> None:
        self.segments: int = 0
        self.frames: int = 0
        self.records: int = 0
        self.messages: int = 0
        self.torn_bytes: int = (
            0  # cut from the end: the frame that a crash interrupted, never acknowledged
        )
        self.rebuilt_indexes: int = 0
        self.lost_messages: list[
            tuple[int, int]
        ] = []  # (pid, seq) of damaged records, in salvage mode
        self.warnings: list[str] = []  # sentences for the operator


class Store(Protocol):
    def open(self, loader: RecoveryLoader) -> RecoveryReport:
        """Take the store for this process alone, bring back what it holds, and be ready to commit. Blocking."""

    def next_frame_address(self) -> int:
        """The address that the first record of the next frame will have."""

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> None:
        """Keep a frame of `count` records. `done` is called in the loop's thread once a crash can no longer lose it
        (`sync`: nor a power cut), in the order of commits. Called one frame at a time: not again before `done`."""

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        """The records at these addresses, whole, as they were written; None for one that is damaged. `done` is
        called in the loop's thread."""

    def is_snapshot_due(self) -> bool:
        """Whether enough was written since the last one. Asked between two frames."""

    def begin_snapshot(self) -> None:
        """The state that `snapshot` will be given covers every frame committed so far, and none that comes between."""

    def snapshot(
        self, state: list[bytes], freed_segments: Sequence[int], done: Callable[[], None]
    ) -> None:
        """Keep `state`, which covers every frame up to `begin_snapshot` (without one, up to now), and then give back
        the segments `free`, in which no message lived any more at that time. In that order: a settled message whose
        note is gone must not come back. It comes in pieces, because putting a hundred megabytes together takes longer
        than the loop should be held up; recovery gets it in one."""

    def segment_sizes(self) -> dict[int, int]:
        """Bytes of each segment that is kept, the one being written to last."""

    def seal_segment(self) -> bool:
        """End the open segment before it is full, so that it can be given back; the next frame
        begins another one.
        Returns whether there was anything to end. `next_frame` has to be asked again."""

    def scan_segment(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        """Index rows (in pieces) of all messages ever written to a sealed segment: what compaction chooses from."""

    def close(self) -> None:
        """Finish what is under way, sync, and let go of the store. Blocking."""


def _to_signed_byte(flags: i64) -> i64:
    """Flags as the highest byte of a signed number: from 128 on, interpreted code would shift them out of 64 bits."""
    return flags if flags < 128 else flags - 256


def write_row(rows: BytesWriter, address: i64, record: Record) -> None:
    """One line of an index: all of a message but its body."""
    write_i64_le(rows, address)
    write_i32_le(rows, _to_signed(record.size))
    write_i32_le(rows, _to_signed(record.pid))
    write_i64_le(rows, record.seq)
    write_i32_le(rows, _to_signed(record.key_hash))
    write_i32_le(rows, _to_signed(record.expires))
    write_i64_le(rows, _to_signed_byte(record.flags) << 56 | record.time)


def copy_row(rows: BytesWriter, data: bytes, at: i64, address: i64) -> None:
    """The same line, straight from the header of the message at `data[at:]`, whose crc nobody asks for here."""
    write_i64_le(rows, address)
    write_i32_le(rows, read_i32_le(data, at + 4))
    write_i32_le(rows, read_i32_le(data, at + 12))
    write_i64_le(rows, read_i64_le(data, at + 16))
    write_i32_le(rows, read_i32_le(data, at + 24))
    write_i32_le(rows, read_i32_le(data, at + 28))
    write_i64_le(rows, _to_signed_byte(data[at + 9]) << 56 | read_i64_le(data, at + 32))


def read_row_pid(rows: bytes, at: i64) -> i64:
    """Some of it, for those who look at many rows and want few."""
    return i64(read_i32_le(rows, at + 12)) & 0xFFFF_FFFF


def read_row_address(rows: bytes, at: i64) -> i64:
    return read_i64_le(rows, at)


def read_row(rows: bytes, at: i64) -> Record:
    flags_and_time = read_i64_le(rows, at + 32)
    return Record(
        MESSAGE,
        (flags_and_time >> 56) & 0xFF,
        i64(read_i32_le(rows, at + 12)) & 0xFFFF_FFFF,
        read_i64_le(rows, at + 16),
        i64(read_i32_le(rows, at + 24)) & 0xFFFF_FFFF,
        i64(read_i32_le(rows, at + 28)) & 0xFFFF_FFFF,
        flags_and_time & 0x00FF_FFFF_FFFF_FFFF,
        b"",
        read_i64_le(rows, at),
        i64(read_i32_le(rows, at + 8)) & 0xFFFF_FFFF,
    )
