"""Compute the uncompressed size of the batches of an Arrow stream before decompressing them.

A batch may be compressed: a few hundred bytes can stand for gigabytes. The decompressor allocates
the memory that the batch declares, so the declared size bounds that memory; a batch that
decompresses to another size is broken. The declared sizes are in these places
(`format/Message.fbs` of Arrow; a Flatbuffers table finds its fields by their numbers):

    Message      field 2: the header, here a RecordBatch    field 4: custom metadata, text pairs
    RecordBatch  field 0: i64 number of rows
                 field 2: buffers, each i64 offset and i64 length within the body
                 field 3: compression, if any
    a buffer of a compressed batch    i64 uncompressed size, -1: not compressed    its bytes

pyarrow verifies the header before it returns a message; nothing verifies the sizes in the body.

Arrow's reader also accepts an older form of compression: metadata version V4, no field 3, and the
codec under a key of the custom metadata. The sizes computed here would be those of the compressed
bytes, so only messages of version V5 without that key are accepted (`find_message_error`).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

VERSION_5: Final = 4  # as the enum of `format/Schema.fbs` counts
ACCEPTED_TYPES: Final = ("schema", "record batch")  # no column may have a dictionary
OLD_COMPRESSION: Final = b"ARROW:experimental_compression"
HEADER_FIELD: Final = 2
CUSTOM_METADATA_FIELD: Final = 4
ROWS_FIELD: Final = 0
BUFFERS_FIELD: Final = 2
COMPRESSION_FIELD: Final = 3
BUFFER_STRUCT: Final = struct.Struct("<qq")
SIZE_STRUCT: Final = struct.Struct("<q")


def find_message_error(message: pa.ipc.Message) -> str:
    """Return why the size of a message cannot be trusted, or the empty string."""
    if message.metadata_version != VERSION_5:
        return "its metadata version is not V5"
    if message.type not in ACCEPTED_TYPES:
        return f"it has a message of type {message.type!r}"
    if OLD_COMPRESSION in _metadata_keys(memoryview(message.metadata)):
        return f"its custom metadata has the key {OLD_COMPRESSION.decode()}"
    return ""


def _metadata_keys(data: Any) -> list[bytes]:
    pairs = _find_field(data, _follow_offset(data, 0), CUSTOM_METADATA_FIELD)
    if not pairs:
        return []
    keys = []
    vector = _follow_offset(data, pairs)
    count = int.from_bytes(data[vector : vector + 4], "little")
    for at in range(vector + 4, vector + 4 + 4 * count, 4):
        field = _find_field(data, _follow_offset(data, at), 0)
        if field:
            text = _follow_offset(data, field)
            size = int.from_bytes(data[text : text + 4], "little")
            keys.append(bytes(data[text + 4 : text + 4 + size]))
    return keys


def count_rows(message: pa.ipc.Message) -> int:
    """Return how many rows a record batch has, as its header says.

    A column of nulls or of empty texts has no bytes, or compresses to none, so that the size says
    nothing about the rows; and each row becomes an object.
    """
    data: Any = memoryview(message.metadata)
    field = _find_field(
        data,
        _follow_offset(data, _find_field(data, _follow_offset(data, 0), HEADER_FIELD)),
        ROWS_FIELD,
    )
    return int(SIZE_STRUCT.unpack_from(data, field)[0]) if field else 0


def unpacked_size(message: pa.ipc.Message) -> int:
    """Return the bytes of all buffers of a record batch after decompression."""
    data: Any = memoryview(message.metadata)
    body: Any = memoryview(message.body)
    batch = _follow_offset(data, _find_field(data, _follow_offset(data, 0), HEADER_FIELD))
    buffers = _find_field(data, batch, BUFFERS_FIELD)
    if not buffers:
        return 0
    is_compressed = _find_field(data, batch, COMPRESSION_FIELD) != 0
    vector = _follow_offset(data, buffers)
    count = int.from_bytes(data[vector : vector + 4], "little")
    total = 0
    for offset, length in BUFFER_STRUCT.iter_unpack(
        data[vector + 4 : vector + 4 + count * BUFFER_STRUCT.size]
    ):
        size = length
        if (
            is_compressed
            and length >= SIZE_STRUCT.size
            and 0 <= offset <= len(body) - SIZE_STRUCT.size
        ):
            (declared,) = SIZE_STRUCT.unpack_from(body, offset)
            size = declared if declared >= 0 else length - SIZE_STRUCT.size
        total += max(0, size)
    return total


def _follow_offset(data: Any, at: int) -> int:
    return at + int.from_bytes(data[at : at + 4], "little")


def _find_field(data: Any, table: int, number: int) -> int:
    """Return the position of a field of a table; 0 when the table has no such field."""
    fields = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    size = int.from_bytes(data[fields : fields + 2], "little")
    slot = 4 + 2 * number
    if slot + 2 > size:
        return 0
    offset = int.from_bytes(data[fields + slot : fields + slot + 2], "little")
    return table + offset if offset else 0
