"""The contract between the queue engine and its stores: records, addresses, guarantees.

The engine writes records into frames. A frame is one group commit: a crash keeps all of it or none
of it. A record is either a MESSAGE, which the engine reads back by its address when it delivers the
message, or a NOTE, which describes a change of the queues' state and is read by recovery only. A
store keeps frames in order and returns messages. When it is opened, it passes on what it holds: the
last snapshot, the messages stored before that snapshot, and every record after it.

    record   40 bytes and a body, little endian
      u32 crc32c of all following bytes         u32 size of the whole record
      u8 kind   u8 flags   u16 spare            u32 pid: number of a partition, of all queues
      u64 seq                                   u32 key: hash of the partition key, 0 for none
      u32 expires: seconds since 1970, 0: never u64 time: milliseconds since 1970
      body

A store returns fields as they were written and does not interpret them. For a value of an exclusive
queue, `key` and `expires` are the two halves of the hash of its key (`queues/compacted`).

An address is `segment << 32 | offset of the record in it`. A segment is the unit that a store can
delete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import google_crc32c
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

from sluice.errors import StoreError

MESSAGE: Final = 1
NOTE: Final = 2

HEADER_BYTES: Final = 40
FLAGS_OFFSET: Final = 9  # offsets of some fields of a record
PID_OFFSET: Final = 12
KEY_OFFSET: Final = 24
EXPIRES_OFFSET: Final = 28
TIME_OFFSET: Final = 32
# An index row: address and header of a message without crc and spare bytes (see `write_row`).
ROW_BYTES: Final = 40
SMALL_BODY_BYTES: Final = 512

_RECORD_WRITER: Final = BytesWriter()  # builds records; used by the loop's thread only
_compute_crc32c: Final = crc32c  # avoids a lookup in the module's globals
_continue_crc32c: Final = extend_crc32c


class Record:
    """A decoded record. `body` is empty when it came from an index row."""

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
    """Append one record to the frame; its body is `body` followed by `body_tail`."""
    writer = begin_record(
        HEADER_BYTES + len(body) + len(body_tail), kind, flags, pid, seq, key_hash, expires, time
    )
    writer.write(body)
    end_record(frame, body_tail)


def begin_record(
    size: i64, kind: i64, flags: i64, pid: i64, seq: i64, key_hash: i64, expires: i64, time: i64
) -> BytesWriter:
    """Begin a record of `size` bytes with its header and return the writer for its body.

    `end_record` completes the record and appends it to the frame.
    """
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
    """Complete the record with `body_tail` and append it to the frame.

    A large tail is copied only once, into the frame. A small tail is cheaper to copy twice than to
    checksum separately.
    """
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
    """Return the record at `data[at:]`, or None if the bytes up to `end` are not a valid record."""
    if at + HEADER_BYTES > end:
        return None
    size: i64 = i64(read_i32_le(data, at + 4)) & 0xFFFF_FFFF
    if size < HEADER_BYTES or at + size > end:
        return None
    crc: i64 = i64(read_i32_le(data, at)) & 0xFFFF_FFFF
    computed_crc: int = crc32c(data[at + 4 : at + size])
    return decode_record(data, at, size, address) if crc == computed_crc else None


def decode_record(data: bytes, at: i64, size: i64, address: i64) -> Record:
    """Decode a record that is known to be valid: a store has checked the result of `read`."""
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
    """Receives the stored state in recovery: one snapshot or none, then rows, then records."""

    def load_snapshot(self, snapshot: bytes) -> None:
        """Load the state between two frames, as `queues/recovery/snapshot.py` wrote it."""

    def load_rows(self, rows: bytes) -> None:
        """Load messages of frames before the snapshot, oldest segment first.

        Each row is `ROW_BYTES` long (see `read_row`). Some messages may have been settled before
        the snapshot; the snapshot contains that information.
        """

    def load_record(self, record: Record) -> None:
        """Load one record of a frame after the snapshot, in the order of writing."""


class RecoveryReport:
    """What a store found when it was opened, for logs and operators."""

    def __init__(self) -> None:
        self.segments: int = 0
        self.frames: int = 0
        self.records: int = 0
        self.messages: int = 0
        # The frame at the end that a crash interrupted. It was never acknowledged.
        self.torn_bytes: int = 0
        self.rebuilt_indexes: int = 0
        # (pid, seq) of damaged records, in salvage mode
        self.lost_messages: list[tuple[int, int]] = []
        self.warnings: list[str] = []  # sentences for the operator


class Store(Protocol):
    def open(self, loader: RecoveryLoader) -> RecoveryReport:
        """Lock the store for this process, recover its contents and prepare for commits. Blocks."""

    def next_frame_address(self) -> int:
        """Return the address that the first record of the next frame will have."""

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> int:
        """Persist a frame of `count` records, then call `done` in the loop's thread.

        Return the address that the first record of the next frame will have.

        `done` means that a crash can no longer lose the frame (with `sync`: nor a power cut). Calls
        of `done` keep the order of commits. The caller commits one frame at a time and waits for
        `done`.
        """

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        """Read whole records, as they were written; a damaged one is None.

        The store calls `done` in the loop's thread.
        """

    def is_snapshot_due(self) -> bool:
        """Return whether enough was written since the last snapshot. Called between two frames."""

    def begin_snapshot(self) -> None:
        """Mark the current end of the log: the next `snapshot` covers every frame up to here."""

    def snapshot(
        self, state: list[bytes], freed_segments: Sequence[int], done: Callable[[], None]
    ) -> None:
        """Persist `state` and then delete `freed_segments`.

        `state` covers every frame up to `begin_snapshot` (without that call, up to now). At that
        time no message in `freed_segments` was live. The order matters: a settled message
        must not come back because its note was deleted. The state comes in pieces, because joining
        a hundred megabytes would block the loop for too long; recovery receives it as one value.
        """

    def segment_sizes(self) -> dict[int, int]:
        """Return the bytes of each stored segment, with the open segment last."""

    def seal_segment(self) -> bool:
        """Close the open segment before it is full, so that it can be deleted later.

        The next frame begins another segment. Return whether there was anything to close. Callers
        must call `next_frame_address` again.
        """

    def scan_segment(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        """Return index rows, in pieces, of all messages ever written to a sealed segment.

        Compaction chooses from them.
        """

    def close(self) -> None:
        """Finish pending work, sync, and unlock the store. Blocks."""


def _to_signed_byte(flags: i64) -> i64:
    """Return flags as the highest byte of a signed number.

    From 128 on, interpreted code would shift them out of 64 bits.
    """
    return flags if flags < 128 else flags - 256


def write_row(rows: BytesWriter, address: i64, record: Record) -> None:
    """Write an index row: all fields of a message without its body."""
    write_i64_le(rows, address)
    write_i32_le(rows, _to_signed(record.size))
    write_i32_le(rows, _to_signed(record.pid))
    write_i64_le(rows, record.seq)
    write_i32_le(rows, _to_signed(record.key_hash))
    write_i32_le(rows, _to_signed(record.expires))
    write_i64_le(rows, _to_signed_byte(record.flags) << 56 | record.time)


def copy_row(rows: BytesWriter, data: bytes, at: i64, address: i64) -> None:
    """Copy an index row from the header of the message at `data[at:]` without checking its crc."""
    write_i64_le(rows, address)
    write_i32_le(rows, read_i32_le(data, at + 4))
    write_i32_le(rows, read_i32_le(data, at + 12))
    write_i64_le(rows, read_i64_le(data, at + 16))
    write_i32_le(rows, read_i32_le(data, at + 24))
    write_i32_le(rows, read_i32_le(data, at + 28))
    write_i64_le(rows, _to_signed_byte(data[at + 9]) << 56 | read_i64_le(data, at + 32))


def read_row_pid(rows: bytes, at: i64) -> i64:
    """Return only the partition of a row, for callers that filter many rows."""
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


def check_crc32c() -> None:
    """Refuse the pure Python version of google-crc32c: a message would cost fifty times as much."""
    if google_crc32c.implementation != "c":
        raise StoreError(
            "google-crc32c runs without its compiled part, which is too slow for the log",
            "Install a wheel of google-crc32c for this platform, or a C compiler and reinstall it",
        )
