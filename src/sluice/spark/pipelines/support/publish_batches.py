"""Rows on their way to the broker: cut into portions, as Arrow streams.

A commit of the bulk door is one write to the log and bounded (`bulk.max_batch_bytes`), so what may be large is
published in portions. The same table is cut in the same places, so that a portion is known by its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

MAX_BATCH_BYTES: Final = 8 << 20  # of a commit: publishers and consumers wait 5 ms for each MB
MAX_BATCH_ROWS: Final = 20_000
ROW_BYTES: Final = 60  # of what is not payload, key or header
HEADER_BYTES: Final = 8
MESSAGE_COLUMNS: Final = ("value", "key", "queue", "headers", "delay", "priority", "message_id")
DEAD_LETTER_COLUMN: Final = "letter"  # where the dead letter lies whose place a row takes


def split_batches(table: pa.Table) -> Iterator[pa.Table]:
    """Cut a table where a portion is full. The same table is cut in the same places."""
    start = size = 0
    for nth, bytes_ in enumerate(_row_bytes(table)):
        if nth > start and (size + bytes_ > MAX_BATCH_BYTES or nth - start >= MAX_BATCH_ROWS):
            yield table.slice(start, nth - start)
            start, size = nth, 0
        size += bytes_
    if start < table.num_rows:
        yield table.slice(start)


def _row_bytes(table: pa.Table) -> list[int]:
    """About what each row takes on its way: payload, key and headers as they are, a guess for the rest."""
    import pyarrow.compute as pc

    sizes = pc.add(_lengths(table["value"]), ROW_BYTES)
    if "key" in table.column_names:
        sizes = pc.add(sizes, _lengths(table["key"]))
    if "headers" in table.column_names:
        sizes = pc.add(
            sizes,
            pa.chunked_array([_header_bytes(one) for one in table["headers"].chunks], pa.int64()),
        )
    found: list[int] = sizes.to_pylist()
    return found


def _lengths(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    import pyarrow.compute as pc

    return pc.fill_null(pc.binary_length(texts), 0).cast(pa.int64())


def _header_bytes(headers: pa.MapArray) -> pa.Array:
    """Of each row: the names and values that lie between its offsets, and the offsets of those."""
    import pyarrow.compute as pc

    each = pc.add(pc.add(_lengths(headers.keys), _lengths(headers.items)), HEADER_BYTES)
    until = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(each)])
    ends = until.take(headers.offsets)
    return pc.subtract(ends.slice(1), ends.slice(0, len(headers)))


def arrow_stream_bytes(table: pa.Table) -> bytes:
    """As the bytes of an Arrow stream; columns that the broker does not know are left out."""
    table = table.select(
        [name for name in (*MESSAGE_COLUMNS, DEAD_LETTER_COLUMN) if name in table.column_names]
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data
