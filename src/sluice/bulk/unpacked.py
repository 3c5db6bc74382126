"""How large the batches of an Arrow stream are when they are unpacked, told before anything is.

A batch may be compressed, and a few hundred bytes stand for gigabytes. Whoever unpacks it first takes the memory that
the batch says it needs, so what it says bounds that memory; a batch that has more or less to unpack is broken. What it
says stands in these places (`format/Message.fbs` of Arrow; a table of Flatbuffers finds its fields by their numbers):

    Message      field 2: the header, here a RecordBatch
    RecordBatch  field 2: buffers, each i64 offset and i64 length within the body    field 3: compression, if any
    a buffer of a compressed batch    i64 size when unpacked, -1: it is not packed    its bytes

pyarrow has verified the header when it hands a message out; the sizes in the body nobody has.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

HEADER: Final = 2
BUFFERS: Final = 2
COMPRESSION: Final = 3
BUFFER: Final = struct.Struct("<qq")
SIZE: Final = struct.Struct("<q")


def size_of_batch(message: pa.ipc.Message) -> int:
    """Bytes of all buffers of a record batch, unpacked."""
    data: Any = memoryview(message.metadata)
    body: Any = memoryview(message.body)
    batch = _follow(data, _field(data, _follow(data, 0), HEADER))
    buffers = _field(data, batch, BUFFERS)
    if not buffers:
        return 0
    is_packed = _field(data, batch, COMPRESSION) != 0
    vector = _follow(data, buffers)
    count = int.from_bytes(data[vector : vector + 4], "little")
    total = 0
    for offset, length in BUFFER.iter_unpack(data[vector + 4 : vector + 4 + count * BUFFER.size]):
        size = length
        if is_packed and length >= SIZE.size and 0 <= offset <= len(body) - SIZE.size:
            (told,) = SIZE.unpack_from(body, offset)
            size = told if told >= 0 else length - SIZE.size
        total += max(0, size)
    return total


def _follow(data: Any, at: int) -> int:
    return at + int.from_bytes(data[at : at + 4], "little")


def _field(data: Any, table: int, number: int) -> int:
    """Where a field of a table stands; 0 when it has none."""
    fields = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    size = int.from_bytes(data[fields : fields + 2], "little")
    slot = 4 + 2 * number
    if slot + 2 > size:
        return 0
    offset = int.from_bytes(data[fields + slot : fields + slot + 2], "little")
    return table + offset if offset else 0
