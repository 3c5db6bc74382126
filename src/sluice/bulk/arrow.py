"""Columns as Arrow: which columns a reader may ask for, their types, and batches as the bytes of an Arrow stream.

The types are those that Spark itself uses (string and binary with 32-bit offsets, microseconds in UTC), so that nothing
is cast on the way. The only module that a reader's path needs pyarrow for; who has none is told by `is_here`.
"""

from __future__ import annotations

from array import array
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from sluice.bulk import column_builders as made
from sluice.bulk.column_builders import Columns, Numbers, Texts
from sluice.bulk.writev import Gathered
from sluice.queues.ports import Codec

if TYPE_CHECKING:
    from mmap import mmap

    import pyarrow as pa

BATCH_ROWS: Final = 8192
BATCH_BYTES: Final = 8 << 20
END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of an Arrow stream
_NOWHERE: Final = 64  # an address that is never looked at: no page of any process has it

Part = memoryview | Gathered

BASE: Final = (
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
VALUE: Final = "value"
HEADERS: Final = "headers"
STORY: Final = (
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
ALL: Final = (*BASE, HEADERS, *STORY)

_FILLED: Final = {
    "key": made.KEY,
    VALUE: made.VALUE,
    "partition": made.PARTITION,
    "sequence": made.SEQUENCE,
    "timestamp": made.TIMESTAMP,
    "message_id": made.MESSAGE_ID,
    "topic": made.TOPIC,
    HEADERS: made.HEADERS,
    **dict.fromkeys(STORY, made.STORY),
}
# Where the columns of a dead letter stand among those that `Columns` fills.
_STORY_TEXT: Final = {
    "original_queue": 0,
    "original_topic": 1,
    "original_message_id": 2,
    "original_group": 3,
    "reason": 4,
    "description": 5,
}
_STORY_NUMBER: Final = {
    "original_partition": 0,
    "attempts": 1,
    "original_sequence": 2,
    "first_attempt": 3,
    "last_attempt": 4,
    "dead_at": 5,
}


def is_here() -> bool:
    """Whether pyarrow is installed; it is not imported for that."""
    return find_spec("pyarrow") is not None


def usual(headers: bool, dead_letters: bool) -> list[str]:
    """The columns of a reader that names none."""
    return [*BASE, *([HEADERS] if headers else []), *(STORY if dead_letters else [])]


def address_of(mapped: mmap) -> tuple[int, object]:
    """Where a map is in memory, and what keeps it there."""
    import pyarrow as pa

    kept = pa.py_buffer(mapped)
    return kept.address, kept


def schema_of(names: list[str]) -> pa.Schema:
    import pyarrow as pa

    moment = pa.timestamp("us", "UTC")
    types = {
        "key": pa.binary(),
        "value": pa.binary(),
        "partition": pa.int32(),
        "sequence": pa.int64(),
        "timestamp": moment,
        "attempt": pa.int32(),
        HEADERS: pa.map_(pa.string(), pa.binary()),
        "original_partition": pa.int32(),
        "original_sequence": pa.int64(),
        "attempts": pa.int32(),
        "first_attempt": moment,
        "last_attempt": moment,
        "dead_at": moment,
    }
    return pa.schema([(name, types.get(name, pa.string())) for name in names])


class Parts:
    """What Arrow writes of a stream, in the parts in which it writes it: the buffers themselves, and no copy. For
    `missing`, a buffer that Arrow knows by its length only, something else is put."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self.missing: tuple[int, int] = (0, 0)  # its address and length; nothing reads there
        self.instead: list[Part] = []

    def write(self, data: Any) -> None:
        if self.instead and (getattr(data, "address", 0), len(data)) == self.missing:
            self._parts += self.instead
            self.instead = []
        else:
            self._parts.append(memoryview(data))

    def flush(self) -> None:
        pass

    def take(self) -> list[Part]:
        found, self._parts = self._parts, []
        return found


class Batches:
    """Record batches of one partition or of several: `parts` are number and pid of each. `queue` is the same in every
    row, and so is the attempt: what is read by range is read for the first time, whoever has had it meanwhile."""

    def __init__(self, names: list[str], queue: str, parts: list[tuple[int, int]], codec: Codec) -> None:
        import pyarrow as pa

        same: dict[str, Any] = {"queue": queue, "attempt": 1}
        if len(parts) == 1:
            same["partition"] = parts[0][0]
        wanted = 0
        for name in names:
            wanted |= 0 if name in same else _FILLED.get(name, 0)
        numbers = array("i", [number for number, _ in parts]).tobytes()
        pids = array("I", [pid for _, pid in parts]).tobytes()
        self.columns = Columns(pids, numbers, f"$queue/{queue}".encode(), wanted, codec)
        self.schema = schema_of(names)
        self._same: dict[str, Any] = {}
        for name, value in same.items():
            if name in names:
                self._same[name] = pa.repeat(pa.scalar(value, self.schema.field(name).type), BATCH_ROWS)
        self._parts = Parts()
        self._stream = pa.ipc.new_stream(self._parts, self.schema)
        self._stream.write_batch(pa.RecordBatch.from_pylist([], schema=self.schema))
        self._parts.take()  # the head, which comes with the first batch, and that

    def head(self) -> bytes:
        """How the stream begins."""
        return bytes(self.schema.serialize())

    def take(self) -> list[Part]:
        """What was added, as the bytes of one batch."""
        import pyarrow as pa

        rows = int(self.columns.rows)
        arrays = [self._array(field, rows) for field in self.schema]
        self.columns.begin()
        self._stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self.schema))
        return self._parts.take()

    def take_copied(self) -> list[memoryview]:
        """The same of a batch whose values have no addresses."""
        return [part for part in self.take() if isinstance(part, memoryview)]

    def _array(self, field: pa.Field, rows: int) -> Any:
        name = field.name
        columns = self.columns
        same = self._same.get(name)
        if same is not None:
            return same.slice(0, rows)
        if name == VALUE:
            return self._values(rows)
        if name == HEADERS:
            return self._map(rows)
        if name in _STORY_TEXT:
            return _text_array(field.type, rows, columns.story_texts[_STORY_TEXT[name]])
        if name in _STORY_NUMBER:
            return _number_array(field.type, rows, columns.story_numbers[_STORY_NUMBER[name]])
        column = getattr(columns, name)
        make = _number_array if isinstance(column, Numbers) else _text_array
        return make(field.type, rows, column)

    def _values(self, rows: int) -> Any:
        """Those that are sent from where they are, and behind them those that were copied."""
        import pyarrow as pa

        spots, offsets, copied = self.columns.value.take()
        data = pa.py_buffer(copied)
        whole = int.from_bytes(offsets[-4:], "little")
        if len(copied) < whole:
            data = pa.foreign_buffer(_NOWHERE, whole)
            self._parts.missing = (_NOWHERE, whole)
            self._parts.instead = [Gathered(spots, offsets), memoryview(copied)]
        return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), data])

    def _map(self, rows: int) -> Any:
        import pyarrow as pa

        offsets = self.columns.take_pairs()
        pairs = int.from_bytes(offsets[-4:], "little")
        return pa.MapArray.from_arrays(
            pa.Array.from_buffers(pa.int32(), rows + 1, [None, pa.py_buffer(offsets)]),
            _text_array(pa.string(), pairs, self.columns.names),
            _text_array(pa.binary(), pairs, self.columns.values),
        )


def _text_array(kind: pa.DataType, rows: int, column: Texts) -> Any:
    import pyarrow as pa

    nulls, bits, offsets, data = column.take()
    buffers = [pa.py_buffer(bits) if nulls else None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, rows, buffers, nulls)


def _number_array(kind: pa.DataType, rows: int, column: Numbers) -> Any:
    import pyarrow as pa

    nulls, bits, values = column.take()
    return pa.Array.from_buffers(
        kind, rows, [pa.py_buffer(bits) if nulls else None, pa.py_buffer(values)], nulls
    )
