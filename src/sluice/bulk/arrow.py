"""Arrow schema and record batches of bulk reads.

The types are those that Spark itself uses (string and binary with 32-bit offsets, microseconds in
UTC), so that no cast is needed. This is the only module on the read path that needs pyarrow;
`is_installed` says whether it is there.
"""

from __future__ import annotations

from array import array
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from sluice.bulk import column_builders
from sluice.bulk.column_builders import BinaryColumn, IntColumn, RecordColumns
from sluice.bulk.writev import IovecBuffer
from sluice.queues.ports import Codec

if TYPE_CHECKING:
    from mmap import mmap

    import pyarrow as pa

BATCH_ROWS: Final = 8192
BATCH_BYTES: Final = 8 << 20
STREAM_END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_DUMMY_ADDRESS: Final = 64  # never dereferenced; no process maps this page

StreamPart = memoryview | IovecBuffer

BASE_COLUMNS: Final = (
    "key",
    "value",
    "queue",
    "partition",
    "sequence",
    "timestamp",
    "message_id",
    "attempt",
    "topic",
)
VALUE_COLUMN: Final = "value"
HEADERS_COLUMN: Final = "headers"
DEAD_LETTER_COLUMNS: Final = (
    "original_queue",
    "original_topic",
    "original_partition",
    "original_sequence",
    "original_message_id",
    "original_group",
    "reason",
    "description",
    "attempts",
    "first_attempt",
    "last_attempt",
    "dead_at",
)
ALL_COLUMNS: Final = (*BASE_COLUMNS, HEADERS_COLUMN, *DEAD_LETTER_COLUMNS)

_COLUMN_FLAGS: Final = {
    "key": column_builders.KEY,
    VALUE_COLUMN: column_builders.VALUE,
    "partition": column_builders.PARTITION,
    "sequence": column_builders.SEQUENCE,
    "timestamp": column_builders.TIMESTAMP,
    "message_id": column_builders.MESSAGE_ID,
    "topic": column_builders.TOPIC,
    HEADERS_COLUMN: column_builders.HEADERS,
    **dict.fromkeys(DEAD_LETTER_COLUMNS, column_builders.DEAD_LETTER),
}
# Positions of the dead-letter columns in the lists of `RecordColumns`.
_DEAD_LETTER_TEXT_INDEX: Final = {
    "original_queue": 0,
    "original_topic": 1,
    "original_message_id": 2,
    "original_group": 3,
    "reason": 4,
    "description": 5,
}
_DEAD_LETTER_INT_INDEX: Final = {
    "original_partition": 0,
    "attempts": 1,
    "original_sequence": 2,
    "first_attempt": 3,
    "last_attempt": 4,
    "dead_at": 5,
}


def is_installed() -> bool:
    """Return whether pyarrow is installed, without importing it."""
    return find_spec("pyarrow") is not None


def default_columns(headers: bool, dead_letters: bool) -> list[str]:
    """Return the columns of a read that names none."""
    return [
        *BASE_COLUMNS,
        *([HEADERS_COLUMN] if headers else []),
        *(DEAD_LETTER_COLUMNS if dead_letters else []),
    ]


def map_address(mapped: mmap) -> tuple[int, object]:
    """Return the address of a map and the object that keeps it mapped."""
    import pyarrow as pa

    buffer = pa.py_buffer(mapped)
    return buffer.address, buffer


def build_schema(names: list[str]) -> pa.Schema:
    import pyarrow as pa

    timestamp_type = pa.timestamp("us", "UTC")
    types = {
        "key": pa.binary(),
        "value": pa.binary(),
        "partition": pa.int32(),
        "sequence": pa.int64(),
        "timestamp": timestamp_type,
        "attempt": pa.int32(),
        HEADERS_COLUMN: pa.map_(pa.string(), pa.binary()),
        "original_partition": pa.int32(),
        "original_sequence": pa.int64(),
        "attempts": pa.int32(),
        "first_attempt": timestamp_type,
        "last_attempt": timestamp_type,
        "dead_at": timestamp_type,
    }
    return pa.schema([(name, types.get(name, pa.string())) for name in names])


class PartCollector:
    """Collect what Arrow writes of a stream, part by part and without a copy.

    `placeholder` identifies a buffer whose length Arrow knows and whose bytes it does not have;
    `replacement` is collected in its place.
    """

    closed = False

    def __init__(self) -> None:
        self._parts: list[StreamPart] = []
        self.placeholder: tuple[int, int] = (0, 0)  # address and length; never read
        self.replacement: list[StreamPart] = []

    def write(self, data: Any) -> None:
        if self.replacement and (getattr(data, "address", 0), len(data)) == self.placeholder:
            self._parts += self.replacement
            self.replacement = []
        else:
            self._parts.append(memoryview(data))

    def flush(self) -> None:
        pass

    def take_parts(self) -> list[StreamPart]:
        found, self._parts = self._parts, []
        return found


class ArrowBatchBuilder:
    """Build the record batches of one or several partitions, given as pairs of number and pid.

    Queue and attempt are the same in every row: a read by range counts as a first delivery, even
    if consumers had the message before.
    """

    def __init__(
        self, names: list[str], queue: str, partitions: list[tuple[int, int]], codec: Codec
    ) -> None:
        import pyarrow as pa

        constants: dict[str, Any] = {"queue": queue, "attempt": 1}
        if len(partitions) == 1:
            constants["partition"] = partitions[0][0]
        column_flags = 0
        for name in names:
            column_flags |= 0 if name in constants else _COLUMN_FLAGS.get(name, 0)
        numbers = array("i", [number for number, _ in partitions]).tobytes()
        pids = array("I", [pid for _, pid in partitions]).tobytes()
        self.columns = RecordColumns(pids, numbers, f"$queue/{queue}".encode(), column_flags, codec)
        self.schema = build_schema(names)
        self._constant_columns: dict[str, Any] = {}
        for name, value in constants.items():
            if name in names:
                self._constant_columns[name] = pa.repeat(
                    pa.scalar(value, self.schema.field(name).type), BATCH_ROWS
                )
        self._parts = PartCollector()
        self._stream = pa.ipc.new_stream(self._parts, self.schema)
        self._stream.write_batch(pa.RecordBatch.from_pylist([], schema=self.schema))
        self._parts.take_parts()  # drop the schema, which comes with the first batch, and the batch

    def schema_bytes(self) -> bytes:
        """Return the start of the stream."""
        return bytes(self.schema.serialize())

    def take_batch(self) -> list[StreamPart]:
        """Return the added rows as the bytes of one batch."""
        import pyarrow as pa

        rows = int(self.columns.rows)
        arrays = [self._build_array(field, rows) for field in self.schema]
        self.columns.begin_batch()
        self._stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self.schema))
        return self._parts.take_parts()

    def take_copied_batch(self) -> list[memoryview]:
        """Return the bytes of a batch whose values have no addresses."""
        return [part for part in self.take_batch() if isinstance(part, memoryview)]

    def _build_array(self, field: pa.Field, rows: int) -> Any:
        name = field.name
        columns = self.columns
        constant = self._constant_columns.get(name)
        if constant is not None:
            return constant.slice(0, rows)
        if name == VALUE_COLUMN:
            return self._value_array(rows)
        if name == HEADERS_COLUMN:
            return self._headers_array(rows)
        if name in _DEAD_LETTER_TEXT_INDEX:
            return _binary_array(
                field.type, rows, columns.dead_letter_texts[_DEAD_LETTER_TEXT_INDEX[name]]
            )
        if name in _DEAD_LETTER_INT_INDEX:
            return _int_array(
                field.type, rows, columns.dead_letter_numbers[_DEAD_LETTER_INT_INDEX[name]]
            )
        column = getattr(columns, name)
        make = _int_array if isinstance(column, IntColumn) else _binary_array
        return make(field.type, rows, column)

    def _value_array(self, rows: int) -> Any:
        """Build the value column: first the values sent from the map, then the copied ones."""
        import pyarrow as pa

        iovecs, offsets, copied = self.columns.value.take_buffers()
        data = pa.py_buffer(copied)
        total_bytes = int.from_bytes(offsets[-4:], "little")
        if len(copied) < total_bytes:
            data = pa.foreign_buffer(_DUMMY_ADDRESS, total_bytes)
            self._parts.placeholder = (_DUMMY_ADDRESS, total_bytes)
            self._parts.replacement = [IovecBuffer(iovecs, offsets), memoryview(copied)]
        return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), data])

    def _headers_array(self, rows: int) -> Any:
        import pyarrow as pa

        offsets = self.columns.take_header_offsets()
        pairs = int.from_bytes(offsets[-4:], "little")
        return pa.MapArray.from_arrays(
            pa.Array.from_buffers(pa.int32(), rows + 1, [None, pa.py_buffer(offsets)]),
            _binary_array(pa.string(), pairs, self.columns.header_names),
            _binary_array(pa.binary(), pairs, self.columns.header_values),
        )


def _binary_array(kind: pa.DataType, rows: int, column: BinaryColumn) -> Any:
    import pyarrow as pa

    nulls, validity, offsets, data = column.take_buffers()
    buffers = [pa.py_buffer(validity) if nulls else None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, rows, buffers, nulls)


def _int_array(kind: pa.DataType, rows: int, column: IntColumn) -> Any:
    import pyarrow as pa

    nulls, validity, values = column.take_buffers()
    return pa.Array.from_buffers(
        kind, rows, [pa.py_buffer(validity) if nulls else None, pa.py_buffer(values)], nulls
    )
