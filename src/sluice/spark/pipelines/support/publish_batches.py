"""Cut rows into batches for the broker, and encode them as Arrow streams.

A commit of the bulk API is one write to the log and bounded (`bulk.max_batch_bytes`), so large
results are published in batches. The same table is always cut in the same places, so that a batch
is identified by its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

MAX_BATCH_BYTES: Final = 8 << 20  # of a commit: publishers and consumers wait 5 ms for each MB
MAX_BATCH_ROWS: Final = 20_000
ROW_BYTES: Final = 60  # besides payload, key and headers
HEADER_BYTES: Final = 8
MESSAGE_COLUMNS: Final = ("value", "key", "queue", "headers", "delay", "priority", "message_id")
# Position of the dead letter that a row replaces; the bulk API has this name.
DEAD_LETTER_COLUMN: Final = "letter"  # words: allowed


def split_batches(table: pa.Table) -> Iterator[pa.Table]:
    """Cut a table into batches, always in the same places."""
    start = size = 0
    for nth, bytes_ in enumerate(_row_bytes(table)):
        if nth > start and (size + bytes_ > MAX_BATCH_BYTES or nth - start >= MAX_BATCH_ROWS):
            yield table.slice(start, nth - start)
            start, size = nth, 0
        size += bytes_
    if start < table.num_rows:
        yield table.slice(start)


def _row_bytes(table: pa.Table) -> list[int]:
    """Estimate the encoded size of each row: exact for payload, key and headers, a constant for the
    rest.
    """
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
    """Return the bytes of the headers of each row, from the offsets of the map array."""
    import pyarrow.compute as pc

    each = pc.add(pc.add(_lengths(headers.keys), _lengths(headers.items)), HEADER_BYTES)
    until = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(each)])
    ends = until.take(headers.offsets)
    return pc.subtract(ends.slice(1), ends.slice(0, len(headers)))


def arrow_stream_bytes(table: pa.Table) -> bytes:
    """Encode a table as an Arrow stream, without columns that the broker does not know."""
    table = table.select(
        [name for name in (*MESSAGE_COLUMNS, DEAD_LETTER_COLUMN) if name in table.column_names]
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data
