"""Values are sent from where they are stored."""

from __future__ import annotations

import ctypes
import random
import socket
import struct
from itertools import accumulate

import pyarrow as pa
import pytest
from librt.strings import BytesWriter

from sluice.bulk.arrow import ArrowBatchBuilder
from sluice.bulk.column_builders import ValueColumn
from sluice.bulk.writev import MAX_IOVECS, IovecBuffer
from sluice.message import COMPRESSED, Message, write_message_fields
from sluice.queues.bodies.codec import ZstdCodec
from sluice.store.protocol import MESSAGE, write_record


class Memory:
    """Return values with gaps between them, and their places."""

    def __init__(self, values: list[bytes]) -> None:
        self._room = ctypes.create_string_buffer(b"".join(b"between" + value for value in values))
        ends = list(accumulate(len(value) + 7 for value in values))
        address = ctypes.addressof(self._room)
        self.spots = b"".join(
            struct.pack("<qq", address + end - len(value), len(value))
            for end, value in zip(ends, values)
        )
        self.offsets = struct.pack(
            f"<{len(values) + 1}i", *accumulate((len(value) for value in values), initial=0)
        )


def sent(gathered: IovecBuffer, max_bytes: int) -> bytes:
    """Send everything over a socket that accepts little at a time."""
    ours, theirs = socket.socketpair()
    found = b""
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.setblocking(False)
        is_last = False
        while not is_last:
            try:
                is_last = gathered.send(ours.fileno(), max_bytes)
            except BlockingIOError:
                found += theirs.recv(3000)
        ours.close()
        while piece := theirs.recv(1 << 16):
            found += piece
    return found


@pytest.mark.parametrize("max_bytes", [1, 100, 65_536])
def test_values_arrive_in_order_however_small_the_writes(max_bytes: int) -> None:
    draw = random.Random(max_bytes)
    sizes = [*(draw.choice([0, 0, 1, 7, 200]) for _ in range(300)), 30_000, 0, 5]
    values = [draw.randbytes(size) for size in sizes]
    memory = Memory(values)
    gathered = IovecBuffer(memory.spots, memory.offsets)
    assert len(gathered) == sum(sizes)
    assert sent(gathered, max_bytes) == b"".join(values)


def test_more_values_than_iov_max_and_many_empty_ones_are_sent() -> None:
    values = [b""] * (2 * MAX_IOVECS + 1) + [b"x"] * (2 * MAX_IOVECS + 1)
    memory = Memory(values)
    assert sent(IovecBuffer(memory.spots, memory.offsets), 1 << 20) == b"".join(values)


def test_only_empty_values_are_sent_at_once() -> None:
    memory = Memory([b"", b""])
    assert IovecBuffer(memory.spots, memory.offsets).send(-1, 100)


def test_blocked_socket_raises_as_the_system_does() -> None:
    memory = Memory([b"a"])
    with pytest.raises(OSError, match="Bad file descriptor"):
        IovecBuffer(memory.spots, memory.offsets).send(-1, 100)


def test_value_without_an_address_and_all_after_it_are_copied() -> None:
    values = ValueColumn()
    values.add(b"_one_", 1, 4, 1000)
    values.add_bytes(b"two")
    values.add(b"three", 0, 5, 2000)
    spots, offsets, copied = values.take_buffers()
    assert struct.unpack("<qq", spots) == (1000, 3)
    assert struct.unpack("<4i", offsets) == (0, 3, 6, 11)
    assert copied == b"twothree"
    assert values.take_buffers() == (b"", bytes(4), b"")


def test_batch_with_external_or_compressed_values_is_complete() -> None:
    codec = ZstdCodec()
    batches = ArrowBatchBuilder(["sequence", "value"], "q", [(0, 5)], codec)
    head = batches.schema_bytes()
    held: list[object] = []  # keeps the addresses valid
    for payloads in ([b"a" * 50, b"b" * 60, b"c" * 500, b"d"], [b"", b""], [b"", b"e"]):
        for seq, payload in enumerate(payloads):
            flags, body = (
                (COMPRESSED, codec.compress(payload)) if len(payload) > 100 else (0, payload)
            )
            start, log = BytesWriter(), BytesWriter()
            write_message_fields(start, Message(b""))
            write_record(log, MESSAGE, flags, 5, seq, 0, 0, 0, start.getvalue(), body)
            record = log.getvalue()
            memory = ctypes.create_string_buffer(record)
            held.append(memory)
            assert batches.columns.add_record(
                record, 0, len(record), seq, 0, ctypes.addressof(memory)
            )
        parts = [
            sent(part, 1 << 16) if isinstance(part, IovecBuffer) else part
            for part in batches.take_batch()
        ]
        table = pa.ipc.open_stream(head + b"".join(parts)).read_all()
        table.validate(full=True)
        assert table.column("value").to_pylist() == payloads
        assert table.column("sequence").to_pylist() == list(range(len(payloads)))
