"""What a compressed batch says of its size is what it has when it is unpacked."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sluice.bulk.unpacked import size_of_batch

TABLES = [
    pa.table({"value": [bytes(1_000_000)] * 3}),
    pa.table({"value": [b"a", b"", None], "key": ["k", None, "j"], "priority": [1, 2, None]}),
    pa.table({"value": pa.array([], pa.binary())}),
    pa.table({"value": [b"x" * 700] * 1000, "priority": pa.nulls(1000)}),
    pa.table(
        {
            "value": pa.array(["text"] * 50, pa.large_string()),
            "headers": pa.array([[("tenant", b"north" * 90)], []] * 25, pa.map_(pa.string(), pa.binary())),
        }
    ),
]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_the_size_of_a_batch_is_known_before_it_is_unpacked(table: pa.Table, codec: str | None) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table, 400)
    data = sink.getvalue()
    messages = list(pa.ipc.MessageReader.open_stream(pa.BufferReader(data)))
    told = [size_of_batch(message) for message in messages if message.type == "record batch"]
    batches = list(pa.ipc.open_stream(data))
    has = [
        sum(buffer.size for column in batch.columns for buffer in column.buffers() if buffer is not None)
        for batch in batches
    ]
    assert len(told) == len(batches)
    if codec is None:
        assert all(0 <= one - other < 100 for one, other in zip(has, told, strict=True))  # what fills them up
        assert sum(told) <= data.size
    else:
        assert told == has
