"""The buffers into which batches are read: reused, and never while a batch refers to one."""

from __future__ import annotations

import io
import socket
import threading
from http.client import HTTPResponse
from typing import cast

import pyarrow as pa

from sluice.spark.http.arrow_body import (
    END_OF_STREAM,
    LARGE_READ_BYTES,
    MAX_BUFFER_BYTES,
    RECEIVE_LOW_WATER_BYTES,
    ArrowBody,
    BufferPool,
)

ROWS = 3 * LARGE_READ_BYTES


def body_of(data: bytes) -> ArrowBody:
    return ArrowBody(cast(HTTPResponse, io.BytesIO(data)), None)


def address_of(buffer: memoryview) -> object:
    return id(buffer.obj)


def test_retained_slices_of_a_response_do_not_change() -> None:
    parts = [bytes([nth]) * ROWS for nth in range(8)]
    body = body_of(b"".join(parts))
    stored = [body.read(ROWS) for _ in parts]
    assert [bytes(one) for one in stored] == parts


def test_buffer_is_reused_when_no_batch_references_it() -> None:
    rooms = BufferPool()
    first = rooms.acquire(ROWS)
    second = rooms.acquire(ROWS)
    assert address_of(second) != address_of(first)
    before = address_of(first)
    first.release()
    assert address_of(rooms.acquire(ROWS)) == before


def test_oversized_buffer_is_freed() -> None:
    rooms = BufferPool()
    rooms.acquire(MAX_BUFFER_BYTES + 1).release()
    assert rooms.buffer_count() == 0


def test_truncated_response_has_its_real_length() -> None:
    assert len(body_of(b"a" * LARGE_READ_BYTES).read(ROWS)) == LARGE_READ_BYTES


def test_rows_that_look_like_an_end_of_stream_are_not_taken_for_it() -> None:
    table = pa.table({"sequence": pa.array([*range(7), 0xFFFF_FFFF], pa.int64())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    whole = bytes(sink.getvalue())
    assert whole.endswith(END_OF_STREAM + END_OF_STREAM)
    for data, has_ended in ((whole, True), (whole[: -len(END_OF_STREAM)], False)):
        body = body_of(data)
        assert pa.ipc.open_stream(body).read_all().num_rows == 8
        assert body.has_ended() == has_ended


def test_last_bytes_of_a_response_arrive_without_anything_after_them() -> None:
    """A kept connection sends nothing after a response: a reader must not wait for more than its
    body.
    """
    data = bytes(range(256)) * (3 * RECEIVE_LOW_WATER_BYTES // 256) + b"end"
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with line, theirs:
        line.settimeout(30)
        sender = threading.Thread(
            target=theirs.sendall, args=(head + b"%x\r\n%b\r\n" % (len(data), data),)
        )
        sender.start()
        answer = HTTPResponse(line)
        answer.begin()
        assert bytes(ArrowBody(answer, line).read(len(data))) == data
        sender.join()
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        answer.close()
