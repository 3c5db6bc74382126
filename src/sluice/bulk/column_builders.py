"""Build the buffers of Arrow columns from the bytes of log records.

Compiled, and without a Python object per value that outlives its copy: a row costs its bytes and
little else. The module knows the record (store/protocol.py), the body (message.py) and the layout
of Arrow's buffers; it knows neither pyarrow nor where a window of bytes comes from.

    text and bytes   offsets, i32 little endian, rows + 1 of them; data; validity bitmap if nulls
    numbers          values, little endian; validity bitmap if there are nulls
    map              offsets into two columns, one of names and one of values

Values are most of the bytes. They are not copied here as long as they are in a mapped segment:
`ValueColumn` records their addresses, and the kernel reads them from there when the batch is sent
(`bulk/writev.py`). Compressed values, and all values after the first of them in a batch, are
copied like any other text.
"""

from __future__ import annotations

from mmap import mmap
from typing import Final

from google_crc32c import value as crc32c
from librt.strings import (
    BytesWriter,
    read_i16_be,
    read_i32_le,
    read_i64_le,
    write_i32_le,
    write_i64_le,
)
from mypy_extensions import i32, i64

from sluice.bulk.merge import MERGED_PLACE_BYTES
from sluice.message import COMPRESSED
from sluice.queues.names import write_hex
from sluice.queues.ports import Codec
from sluice.store.protocol import HEADER_BYTES, MESSAGE

# Flags of the columns to fill. Columns with the same value in every row are not built here.
KEY: Final = 1
VALUE: Final = 2
SEQUENCE: Final = 4
TIMESTAMP: Final = 8
MESSAGE_ID: Final = 16
TOPIC: Final = 32
HEADERS: Final = 64
DEAD_LETTER: Final = 128  # all columns that describe a dead letter
PARTITION: Final = 256

# The headers of a dead letter: first the texts, then the numbers and times.
DEAD_LETTER_TEXTS: Final = (
    "original-queue",
    "original-topic",
    "original-message-id",
    "original-group",
    "dead-reason",
    "dead-description",
)
DEAD_LETTER_NUMBERS: Final = ("original-partition", "attempts")
DEAD_LETTER_SEQUENCE: Final = "original-sequence"
DEAD_LETTER_TIMES: Final = ("first-attempt-at", "last-attempt-at", "dead-at")
_DEAD_LETTER_FIELDS: Final[dict[bytes, int]] = {
    name.encode(): nth
    for nth, name in enumerate(
        (*DEAD_LETTER_TEXTS, *DEAD_LETTER_NUMBERS, DEAD_LETTER_SEQUENCE, *DEAD_LETTER_TIMES)
    )
}
_FIRST_NUMBER_FIELD: Final = 6
_SEQUENCE_FIELD: Final = 8
_FIRST_TIME_FIELD: Final = 9
_FIELD_COUNT: Final = 12

# Reading unneeded bytes is cheaper than another copy up to about this size.
MAX_GAP_BYTES: Final = 4096
MAX_WINDOW_BYTES: Final = 1 << 18  # fits the cache of a core

_MICROS_PER_MILLISECOND: Final = 1000  # Spark's timestamps count microseconds


class ValidityBitmap:
    """Record which rows have a value."""

    def __init__(self) -> None:
        self.nulls: i64 = 0
        self._out = BytesWriter()
        self._byte: i64 = 0
        self._count: i64 = 0

    def add(self, is_valid: bool) -> None:
        if is_valid:
            self._byte |= i64(1) << (self._count & 7)
        else:
            self.nulls += 1
        self._count += 1
        if self._count & 7 == 0:
            self._out.append(int(self._byte))
            self._byte = 0

    def take_bitmap(self) -> bytes:
        """Return the bitmap; empty when no row is null."""
        if self._count & 7:
            self._out.append(int(self._byte))
        found = self._out.getvalue() if self.nulls else b""
        self._out.truncate(0)
        self.nulls = 0
        self._byte = 0
        self._count = 0
        return found


class BinaryColumn:
    """A column of text or of bytes."""

    def __init__(self) -> None:
        self._offsets = BytesWriter()
        self._data = BytesWriter()
        self._validity = ValidityBitmap()
        write_i32_le(self._offsets, 0)

    def size(self) -> i64:
        return len(self._data)

    def add(self, data: bytes, start: i64, end: i64) -> None:
        if end > start:
            self._data.write(data[start:end])
        write_i32_le(self._offsets, i32(len(self._data)))
        self._validity.add(True)

    def add_bytes(self, data: bytes) -> None:
        self._data.write(data)
        write_i32_le(self._offsets, i32(len(self._data)))
        self._validity.add(True)

    def add_generated_id(self, pid: i64, seq: i64) -> None:
        """Append the id of a message without one, as `names.format_message_id` does."""
        write_hex(self._data, pid)
        self._data.append(0x2D)
        write_hex(self._data, seq)
        write_i32_le(self._offsets, i32(len(self._data)))
        self._validity.add(True)

    def add_null(self) -> None:
        write_i32_le(self._offsets, i32(len(self._data)))
        self._validity.add(False)

    def take_buffers(self) -> tuple[int, bytes, bytes, bytes]:
        """Return null count, bitmap, offsets and data, and empty the column."""
        nulls = int(self._validity.nulls)
        found = (
            nulls,
            self._validity.take_bitmap(),
            self._offsets.getvalue(),
            self._data.getvalue(),
        )
        self._offsets.truncate(0)
        self._data.truncate(0)
        write_i32_le(self._offsets, 0)
        return found


class IntColumn:
    """A column of 4-byte or 8-byte integers."""

    def __init__(self, is_64_bit: bool) -> None:
        self._is_64_bit: bool = is_64_bit
        self._values = BytesWriter()
        self._validity = ValidityBitmap()

    def add(self, value: i64) -> None:
        if self._is_64_bit:
            write_i64_le(self._values, value)
        else:
            write_i32_le(self._values, i32(value))
        self._validity.add(True)

    def add_null(self) -> None:
        if self._is_64_bit:
            write_i64_le(self._values, 0)
        else:
            write_i32_le(self._values, 0)
        self._validity.add(False)

    def take_buffers(self) -> tuple[int, bytes, bytes]:
        nulls = int(self._validity.nulls)
        found = (nulls, self._validity.take_bitmap(), self._values.getvalue())
        self._values.truncate(0)
        return found


class ValueColumn:
    """The column of values; none is null.

    The first values of a batch are not copied: each has an entry of i64 address and i64 size, the
    layout of `struct iovec`. From the first value without an address on, all are copied.
    """

    def __init__(self) -> None:
        self._rows: i64 = 0
        self._end: i64 = 0  # end offset of the last value
        self._iovecs = BytesWriter()
        self._offsets = BytesWriter()
        self._data = BytesWriter()
        write_i32_le(self._offsets, 0)

    def add(self, window: bytes, start: i64, end: i64, memory_address: i64) -> None:
        """Append a value.

        `memory_address` stays valid until the batch is sent; 0 if the value is only in the window.
        """
        if memory_address and i64(len(self._iovecs)) == 16 * self._rows:
            write_i64_le(self._iovecs, memory_address)
            write_i64_le(self._iovecs, end - start)
        elif end > start:
            self._data.write(window[start:end])
        self._end_value(end - start)

    def add_bytes(self, data: bytes) -> None:
        self._data.write(data)
        self._end_value(len(data))

    def _end_value(self, size: i64) -> None:
        self._rows += 1
        self._end += size
        write_i32_le(self._offsets, i32(self._end))

    def take_buffers(self) -> tuple[bytes, bytes, bytes]:
        """Return iovecs of the first rows, offsets of all, copied bytes of the rest; then empty."""
        found = (self._iovecs.getvalue(), self._offsets.getvalue(), self._data.getvalue())
        self._iovecs.truncate(0)
        self._offsets.truncate(0)
        self._data.truncate(0)
        self._rows = 0
        self._end = 0
        write_i32_le(self._offsets, 0)
        return found


class RecordColumns:
    """The rows of one batch, from one or several parts.

    `pids` and `numbers` (i32 each) identify the partitions, `column_flags` the columns to fill.
    """

    def __init__(
        self,
        pids: bytes,
        partition_numbers: bytes,
        queue_topic: bytes,
        column_flags: i64,
        codec: Codec,
    ) -> None:
        self.rows: i64 = 0
        self.has_missing: bool = False  # a message was not at its place
        self.batch_bytes: i64 = 0  # of values and headers, which dominate the size
        self.key: BinaryColumn = BinaryColumn()
        self.value: ValueColumn = ValueColumn()
        self.message_id: BinaryColumn = BinaryColumn()
        self.topic: BinaryColumn = BinaryColumn()
        self.header_names: BinaryColumn = BinaryColumn()
        self.header_values: BinaryColumn = BinaryColumn()
        self.partition: IntColumn = IntColumn(False)
        self.sequence: IntColumn = IntColumn(True)
        self.timestamp: IntColumn = IntColumn(True)
        self.dead_letter_texts: list[BinaryColumn] = [
            BinaryColumn() for _ in range(_FIRST_NUMBER_FIELD)
        ]
        self.dead_letter_numbers: list[IntColumn] = [
            IntColumn(nth >= 2) for nth in range(_FIELD_COUNT - _FIRST_NUMBER_FIELD)
        ]
        # Offsets of the map: where the headers of each row begin.
        self._header_offsets = BytesWriter()
        self._header_count: i64 = 0
        self._pids: bytes = pids
        self._partition_numbers: bytes = partition_numbers
        # The topic of messages that were published to the queue itself.
        self._queue_topic: bytes = queue_topic
        self._column_flags: i64 = column_flags
        self._codec: Codec = codec
        # Spans of the headers of this row: start and end of name, start and end of value.
        self._header_spans: list[int] = []
        self._dead_letter_spans: list[int] = [-1] * (2 * _FIELD_COUNT)
        write_i32_le(self._header_offsets, 0)

    def add_record(
        self, window: bytes, at: i64, size: i64, seq: i64, part: i64 = 0, memory_address: i64 = 0
    ) -> bool:
        """Add the record at `window[at:]`; return False if it is not the intact message `seq`.

        `memory` is the address of the window until the batch is sent, 0 if it has none.
        """
        if size < HEADER_BYTES + 28 or at < 0 or at + size > len(window):
            return False
        if i64(read_i32_le(window, at + 4)) & 0xFFFF_FFFF != size:
            return False
        crc: int = crc32c(window[at + 4 : at + size])
        if i64(read_i32_le(window, at)) & 0xFFFF_FFFF != crc:
            return False
        pid: i64 = i64(read_i32_le(self._pids, 4 * part)) & 0xFFFF_FFFF
        if (
            i64(window[at + 8]) != MESSAGE
            or read_i64_le(window, at + 16) != seq
            or i64(read_i32_le(window, at + 12)) & 0xFFFF_FFFF != pid
        ):
            return False
        body: i64 = at + HEADER_BYTES
        start_id: i64 = body + 28
        start_key: i64 = start_id + i64(read_i32_le(window, body + 8))
        start_topic: i64 = start_key + i64(read_i32_le(window, body + 12))
        start_props: i64 = start_topic + i64(read_i32_le(window, body + 16))
        start_headers: i64 = start_props + i64(read_i32_le(window, body + 20))
        start_value: i64 = start_headers + i64(read_i32_le(window, body + 24))
        column_flags = self._column_flags
        if column_flags & VALUE:
            if i64(window[at + 9]) & COMPRESSED:
                try:
                    payload = self._codec.decompress(window[start_value : at + size])
                except ValueError:
                    return False
                self.value.add_bytes(payload)
                self.batch_bytes += len(payload)
            else:
                self.value.add(
                    window,
                    start_value,
                    at + size,
                    memory_address + start_value if memory_address else 0,
                )
                self.batch_bytes += at + size - start_value
        if column_flags & KEY:
            if start_topic > start_key:
                self.key.add(window, start_key, start_topic)
            else:
                self.key.add_null()
        if column_flags & PARTITION:
            self.partition.add(i64(read_i32_le(self._partition_numbers, 4 * part)))
        if column_flags & SEQUENCE:
            self.sequence.add(seq)
        if column_flags & TIMESTAMP:
            self.timestamp.add(read_i64_le(window, body) * _MICROS_PER_MILLISECOND)
        if column_flags & MESSAGE_ID:
            if start_key > start_id:
                self.message_id.add(window, start_id, start_key)
            else:
                self.message_id.add_generated_id(pid, seq)
        if column_flags & TOPIC:
            if start_props > start_topic:
                self.topic.add(window, start_topic, start_props)
            else:
                self.topic.add_bytes(self._queue_topic)
        if column_flags & HEADERS:
            self._add_headers(window, start_props, start_headers, start_value)
        if column_flags & DEAD_LETTER:
            self._add_dead_letter(window, start_headers, start_value)
        self.rows += 1
        return True

    def add_records(
        self,
        window: bytes,
        start: i64,
        memory_address: i64,
        places: bytes,
        nth: i64,
        end: i64,
        max_rows: i64,
        max_bytes: i64,
    ) -> i64:
        """Add the messages at places `nth` to `end` until the batch is full; return the next place.

        The window begins at offset `start` of the segment and at address `memory`. `has_missing`
        says that the next message is not at its place.
        """
        while nth < end and self.rows < max_rows and self.batch_bytes < max_bytes:
            at: i64 = nth * MERGED_PLACE_BYTES
            offset: i64 = (read_i64_le(places, at + 8) & 0xFFFF_FFFF) - start
            size: i64 = i64(read_i32_le(places, at + 16)) & 0xFFFF_FFFF
            part: i64 = i64(read_i32_le(places, at + 20))
            if not self.add_record(
                window, offset, size, read_i64_le(places, at), part, memory_address
            ):
                self.has_missing = True
                return nth
            nth += 1
        return nth

    def add_records_from_map(
        self,
        mapped: mmap,
        memory_address: i64,
        places: bytes,
        nth: i64,
        max_rows: i64,
        max_bytes: i64,
    ) -> i64:
        """Add messages from place `nth` on out of the mapped segment; return the next place.

        Stops at a message of another segment and when the batch is full. `memory` is the address
        of the map.
        """
        segment: i64 = read_i64_le(places, nth * MERGED_PLACE_BYTES + 8) >> 32
        count: i64 = len(places) // MERGED_PLACE_BYTES
        while nth < count and self.rows < max_rows and self.batch_bytes < max_bytes:
            address: i64 = read_i64_le(places, nth * MERGED_PLACE_BYTES + 8)
            if address >> 32 != segment:
                break
            end = find_window_end(places, nth)
            start: i64 = address & 0xFFFF_FFFF
            last: i64 = (end - 1) * MERGED_PLACE_BYTES
            stop: i64 = (read_i64_le(places, last + 8) & 0xFFFF_FFFF) + i64(
                read_i32_le(places, last + 16)
            )
            window = mapped[int(start) : int(stop)]
            nth = self.add_records(
                window, start, memory_address + start, places, nth, end, max_rows, max_bytes
            )
            if self.has_missing:
                break
        return nth

    def take_header_offsets(self) -> bytes:
        """Return the offsets of the map and start a new list."""
        found = self._header_offsets.getvalue()
        self._header_offsets.truncate(0)
        self._header_count = 0
        write_i32_le(self._header_offsets, 0)
        return found

    def begin_batch(self) -> None:
        """Start a new batch; all columns have been taken."""
        self.rows = 0
        self.batch_bytes = 0

    # ---- headers

    def _add_headers(self, window: bytes, props: i64, headers: i64, end: i64) -> None:
        """Add the publisher's properties, then the headers that Sluice wrote on the message.

        A map has each name once: the last value of a repeated name counts.
        """
        spans = self._header_spans
        spans.clear()
        find_properties(window, props, headers, spans)
        find_headers(window, headers, end, spans)
        count: i64 = len(spans)
        nth: i64 = 0
        while nth < count:
            name_start: i64 = spans[nth]
            name_end: i64 = spans[nth + 1]
            if name_start >= 0:
                if count == 4 or not _is_repeated(window, spans, nth, name_start, name_end):
                    self.header_names.add(window, name_start, name_end)
                    self.header_values.add(window, i64(spans[nth + 2]), i64(spans[nth + 3]))
                    self._header_count += 1
                    self.batch_bytes += i64(spans[nth + 3]) - name_start
            else:  # an MQTT property is identified by a number and has no name in the bytes
                name = _MQTT_PROPERTY_NAMES[-1 - int(name_start)]
                self.header_names.add_bytes(name)
                self.header_values.add(window, i64(spans[nth + 2]), i64(spans[nth + 3]))
                self._header_count += 1
            nth += 4
        write_i32_le(self._header_offsets, i32(self._header_count))

    # ---- dead letters

    def _add_dead_letter(self, window: bytes, headers: i64, end: i64) -> None:
        field_spans = self._dead_letter_spans
        nth: i64 = 0
        while nth < 2 * _FIELD_COUNT:
            field_spans[nth] = -1
            nth += 1
        spans = self._header_spans
        spans.clear()
        find_headers(window, headers, end, spans)
        nth = 0
        while nth < len(spans):
            field: i64 = _DEAD_LETTER_FIELDS.get(window[spans[nth] : spans[nth + 1]], -1)
            if field >= 0:
                field_spans[field * 2] = spans[nth + 2]
                field_spans[field * 2 + 1] = spans[nth + 3]
            nth += 4
        nth = 0
        while nth < _FIRST_NUMBER_FIELD:
            start: i64 = field_spans[nth * 2]
            if start >= 0:
                self.dead_letter_texts[nth].add(window, start, i64(field_spans[nth * 2 + 1]))
            else:
                self.dead_letter_texts[nth].add_null()
            nth += 1
        while nth < _FIELD_COUNT:
            start = field_spans[nth * 2]
            value: i64 = -1
            if start >= 0:
                stop: i64 = field_spans[nth * 2 + 1]
                value = (
                    parse_time(window, start, stop)
                    if nth >= _FIRST_TIME_FIELD
                    else parse_number(window, start, stop)
                )
                if nth < _SEQUENCE_FIELD and value > 0x7FFF_FFFF:
                    value = -1
            if value >= 0:
                self.dead_letter_numbers[nth - _FIRST_NUMBER_FIELD].add(value)
            else:
                self.dead_letter_numbers[nth - _FIRST_NUMBER_FIELD].add_null()
            nth += 1


def find_window_end(places: bytes, nth: i64) -> i64:
    """Return the end of the run of places from `nth` on that one copy can bring.

    The places of a run ascend and are close to each other.
    """
    count: i64 = len(places) // MERGED_PLACE_BYTES
    start: i64 = read_i64_le(places, nth * MERGED_PLACE_BYTES + 8)
    end: i64 = start + i64(read_i32_le(places, nth * MERGED_PLACE_BYTES + 16))
    nth += 1
    while nth < count:
        address: i64 = read_i64_le(places, nth * MERGED_PLACE_BYTES + 8)
        size: i64 = i64(read_i32_le(places, nth * MERGED_PLACE_BYTES + 16))
        if (
            address < end
            or address - end > MAX_GAP_BYTES
            or address + size - start > MAX_WINDOW_BYTES
        ):
            break
        if address >> 32 != start >> 32:
            break
        end = address + size
        nth += 1
    return nth


# MQTT's own properties of a PUBLISH that become headers; property i has the name span -1 - i.
_MQTT_PROPERTY_NAMES: Final[list[bytes]] = [b"content-type", b"response-topic", b"correlation-data"]


def find_properties(window: bytes, at: i64, end: i64, spans: list[int]) -> None:
    """Collect the spans of the properties of an encoded PUBLISH: starts and ends of both parts."""
    while at < end:
        identifier: i64 = window[at]
        at += 1
        if identifier == 0x01:
            at += 1
            continue
        size: i64 = i64(read_i16_be(window, at)) & 0xFFFF
        at += 2
        if identifier == 0x26:
            spans.append(int(at))
            spans.append(int(at + size))
            at += size
            size = i64(read_i16_be(window, at)) & 0xFFFF
            at += 2
        else:
            name: i64 = -1 if identifier == 0x03 else (-2 if identifier == 0x08 else -3)
            spans.append(int(name))
            spans.append(int(name))
        spans.append(int(at))
        spans.append(int(at + size))
        at += size


def find_headers(window: bytes, at: i64, end: i64, spans: list[int]) -> None:
    """Collect the spans of the headers that Sluice wrote (`message.encode_header`)."""
    while at < end:
        size: i64 = i64(read_i16_be(window, at)) & 0xFFFF
        spans.append(int(at + 2))
        spans.append(int(at + 2 + size))
        at += 2 + size
        size = i64(read_i16_be(window, at)) & 0xFFFF
        spans.append(int(at + 2))
        spans.append(int(at + 2 + size))
        at += 2 + size


def _is_repeated(window: bytes, spans: list[int], nth: i64, name_start: i64, name_end: i64) -> bool:
    name = window[name_start:name_end]
    # MQTT's own property of that name wins, wherever it is.
    if name in _MQTT_PROPERTY_NAMES:
        position: i64 = 0
        while position < len(spans):
            if i64(spans[position]) < 0 and _MQTT_PROPERTY_NAMES[-1 - spans[position]] == name:
                return True
            position += 4
    later: i64 = nth + 4
    while later < len(spans):
        start: i64 = spans[later]
        if start >= 0 and i64(spans[later + 1]) - start == name_end - name_start:
            if window[start : start + name_end - name_start] == name:
                return True
        later += 4
    return False


def parse_number(data: bytes, at: i64, end: i64) -> i64:
    """Parse decimal digits; return -1 for anything else."""
    if at >= end or end - at > 18:
        return -1
    value: i64 = 0
    while at < end:
        digit: i64 = i64(data[at]) - 0x30
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + digit
        at += 1
    return value


def parse_time(data: bytes, at: i64, end: i64) -> i64:
    """Parse a time as `dead_letters.format_iso_time` writes it.

    Returns microseconds since 1970, or -1 for anything else.
    """
    if end - at != 24 or i64(data[at + 10]) != 0x54 or i64(data[at + 23]) != 0x5A:
        return -1
    year = parse_number(data, at, at + 4)
    month = parse_number(data, at + 5, at + 7)
    day = parse_number(data, at + 8, at + 10)
    hour = parse_number(data, at + 11, at + 13)
    minute = parse_number(data, at + 14, at + 16)
    second = parse_number(data, at + 17, at + 19)
    thousandth = parse_number(data, at + 20, at + 23)
    if (
        year < 1970
        or month < 1
        or month > 12
        or day < 1
        or hour < 0
        or minute < 0
        or second < 0
        or thousandth < 0
    ):
        return -1
    # Days since 1970 in the Gregorian calendar. Years begin in March, so the leap day comes last.
    if month <= 2:
        year -= 1
        month += 12
    days: i64 = (
        365 * year
        + year // 4
        - year // 100
        + year // 400
        + (153 * (month - 3) + 2) // 5
        + day
        - 719_469
    )
    seconds: i64 = days * 86_400 + hour * 3600 + minute * 60 + second
    return (seconds * 1000 + thousandth) * _MICROS_PER_MILLISECOND
