"""The size of a compressed batch is known before decompression, or the batch is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sluice.bulk.ipc_sizes import count_rows, find_message_error, unpacked_size
from sluice.bulk.row_decoder import inspect_stage
from sluice.bulk.staging import Stage
from sluice.errors import BatchTooLarge, InvalidBatch, TooManyRows

MAX_ROWS = 1_000_000
TABLES = [
    pa.table({"value": [bytes(1_000_000)] * 3}),
    pa.table({"value": [b"a", b"", None], "key": ["k", None, "j"], "priority": [1, 2, None]}),
    pa.table({"value": pa.array([], pa.binary())}),
    pa.table({"value": [b"x" * 700] * 1000, "priority": pa.nulls(1000)}),
    pa.table(
        {
            "value": pa.array(["text"] * 50, pa.large_string()),
            "headers": pa.array(
                [[("tenant", b"north" * 90)], []] * 25, pa.map_(pa.string(), pa.binary())
            ),
        }
    ),
]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_size_of_a_batch_is_known_before_decompression(table: pa.Table, codec: str | None) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
    ) as writer:
        writer.write_table(table, 400)
    data = sink.getvalue()
    messages = list(pa.ipc.MessageReader.open_stream(pa.BufferReader(data)))
    reported = [unpacked_size(message) for message in messages if message.type == "record batch"]
    batches = list(pa.ipc.open_stream(data))
    has = [
        sum(
            buffer.size
            for column in batch.columns
            for buffer in column.buffers()
            if buffer is not None
        )
        for batch in batches
    ]
    assert len(reported) == len(batches)
    if codec is None:
        # padding
        assert all(0 <= one - other < 100 for one, other in zip(has, reported, strict=True))
        assert sum(reported) <= data.size
    else:
        assert reported == has


BOMB = 64 << 20
LIMIT = 1 << 20
KEY = {"ARROW:experimental_compression": "zstd"}


def stream_of_zeros(
    version: int, custom_metadata: dict[str, str] | None = None, codec: str | None = "zstd"
) -> bytes:
    """One value of 64 MiB of zeros: a few KB when compressed."""
    batch = pa.record_batch({"value": pa.array([bytes(BOMB)], pa.large_binary())})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(
        metadata_version=pa.ipc.MetadataVersion(version), compression=codec
    )
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata=custom_metadata)
    return bytes(sink.getvalue())


def without_compression_field(data: bytes) -> bytes:
    """Clear field 3 (compression) in the table of the first record batch: Arrow 0.17 had none."""
    _, batch = pa.ipc.MessageReader.open_stream(pa.BufferReader(data))
    header = bytes(batch.metadata)
    begin = data.index(header)
    table = int.from_bytes(header[:4], "little")

    def field(table: int, number: int) -> tuple[int, int]:
        fields = table - int.from_bytes(header[table : table + 4], "little", signed=True)
        slot = fields + 4 + 2 * number
        return slot, table + int.from_bytes(header[slot : slot + 2], "little")

    _, at = field(table, 2)
    slot, _ = field(at + int.from_bytes(header[at : at + 4], "little"), 3)
    return data[: begin + slot] + bytes(2) + data[begin + slot + 2 :]


def stage_of(data: bytes) -> Stage:
    stage = Stage("one", "etl", 1, "jobs", None)
    stage.data = data
    return stage


def test_batch_compressed_by_arrow_0_17_is_refused_before_decompression() -> None:
    data = without_compression_field(stream_of_zeros(3, KEY))
    assert len(data) < 50_000
    (batch,) = pa.ipc.open_stream(data)  # the reader does accept it
    assert batch.nbytes > BOMB
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(InvalidBatch) as refused:
            inspect_stage(stage_of(data), LIMIT, MAX_ROWS)
    finally:
        pa.set_memory_pool(usual)
    assert "V5" in refused.value.what and "Arrow 1.0" in refused.value.remedy
    assert (pool.max_memory() or 0) < LIMIT


def test_key_of_the_old_compression_is_refused_in_version_5_too() -> None:
    for data in (stream_of_zeros(4, KEY), without_compression_field(stream_of_zeros(4, KEY))):
        with pytest.raises(InvalidBatch, match="experimental_compression"):
            inspect_stage(stage_of(data), LIMIT, MAX_ROWS)


def test_messages_of_older_versions_are_refused_compressed_or_not() -> None:
    for codec in (None, "zstd"):
        messages = pa.ipc.MessageReader.open_stream(
            pa.BufferReader(stream_of_zeros(3, codec=codec))
        )
        assert [bool(find_message_error(message)) for message in messages] == [True, True]


def test_compressed_batch_of_the_current_version_is_refused_by_its_size() -> None:
    with pytest.raises(BatchTooLarge):
        inspect_stage(stage_of(stream_of_zeros(4)), LIMIT, MAX_ROWS)
    with pytest.raises(BatchTooLarge):
        inspect_stage(stage_of(stream_of_zeros(4, {"author": "x"})), LIMIT, MAX_ROWS)
    assert inspect_stage(stage_of(stream_of_zeros(4)), 2 * BOMB, MAX_ROWS)[0] == 1


def test_dictionaries_are_refused() -> None:
    batch = pa.record_batch({"value": pa.array(["a", "a"]).dictionary_encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data = bytes(sink.getvalue())
    with pytest.raises(InvalidBatch, match="dictionary"):
        inspect_stage(stage_of(data), LIMIT, MAX_ROWS)
    messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(data))
    assert [find_message_error(message) for message in messages] == [
        "",
        "it has a message of type 'dictionary'",
        "",
    ]


def stream_of(batches: list[pa.RecordBatch], codec: str | None = "zstd") -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def test_rows_without_bytes_are_counted_before_they_are_read() -> None:
    """Empty values and columns of nulls: two million rows in a few KB, each an object in memory."""
    rows = 2 * MAX_ROWS
    offsets = pa.py_buffer(bytes(4 * (rows + 1)))
    empty = pa.Array.from_buffers(pa.binary(), rows, [None, offsets, pa.py_buffer(b"")])
    data = stream_of([pa.record_batch({"value": empty, "key": pa.nulls(rows)})])
    assert len(data) < 5_000
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(TooManyRows, match=r"2000000 rows or more.*bulk\.max_batch_rows"):
            inspect_stage(stage_of(data), 1 << 30, MAX_ROWS)
    finally:
        pa.set_memory_pool(usual)
    assert (pool.max_memory() or 0) < 1 << 20


def test_rows_of_all_batches_of_an_upload_are_counted() -> None:
    batch = pa.record_batch({"value": pa.array([b""] * 400)})
    data = stream_of([batch] * 3)
    messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(data))
    assert [count_rows(one) for one in messages if one.type == "record batch"] == [400] * 3
    assert inspect_stage(stage_of(data), LIMIT, 1200)[0] == 1200
    with pytest.raises(TooManyRows):
        inspect_stage(stage_of(data), LIMIT, 1199)


def test_batch_with_a_false_row_count_is_refused() -> None:
    data = stream_of([pa.record_batch({"value": pa.array([b"a"] * 77)})], codec=None)
    for reported in (3, -1, 1 << 40):
        lie = data.replace(
            (77).to_bytes(8, "little"), reported.to_bytes(8, "little", signed=True), 1
        )
        assert lie != data
        with pytest.raises((InvalidBatch, TooManyRows)):
            inspect_stage(stage_of(lie), LIMIT, MAX_ROWS)
