"""The memory into which a reader reads batches: used again, and never while somebody has one."""

from __future__ import annotations

import io
import socket
import threading
from http.client import HTTPResponse
from typing import cast

import pyarrow as pa

from sluice.spark.http.arrow_body import END, LARGE, LARGEST_ROOM, WAKE_BYTES, Body, Rooms

ROWS = 3 * LARGE


def body_of(data: bytes) -> Body:
    return Body(cast(HTTPResponse, io.BytesIO(data)), None)


def address_of(room: memoryview) -> object:
    return id(room.obj)


def test_what_is_kept_of_an_answer_stays_as_it_is() -> None:
    parts = [bytes([nth]) * ROWS for nth in range(8)]
    body = body_of(b"".join(parts))
    kept = [body.read(ROWS) for _ in parts]
    assert [bytes(one) for one in kept] == parts


def test_memory_is_used_again_when_nobody_has_it_any_more() -> None:
    rooms = Rooms()
    first = rooms.take(ROWS)
    second = rooms.take(ROWS)
    assert address_of(second) != address_of(first)
    before = address_of(first)
    first.release()
    assert address_of(rooms.take(ROWS)) == before


def test_memory_that_is_too_large_to_be_kept_is_given_back() -> None:
    rooms = Rooms()
    rooms.take(LARGEST_ROOM + 1).release()
    assert rooms.kept() == 0


def test_an_answer_that_ends_early_is_as_long_as_it_is() -> None:
    assert len(body_of(b"a" * LARGE).read(ROWS)) == LARGE


def test_rows_that_look_like_the_end_of_a_stream_are_not_taken_for_it() -> None:
    table = pa.table({"sequence": pa.array([*range(7), 0xFFFF_FFFF], pa.int64())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    whole = bytes(sink.getvalue())
    assert whole.endswith(END + END)
    for data, has_ended in ((whole, True), (whole[: -len(END)], False)):
        body = body_of(data)
        assert pa.ipc.open_stream(body).read_all().num_rows == 8
        assert body.has_ended() == has_ended


def test_the_last_bytes_of_an_answer_come_although_nothing_follows_them() -> None:
    """A connection that is kept says nothing behind an answer: who waits for much must not wait for more than that."""
    data = bytes(range(256)) * (3 * WAKE_BYTES // 256) + b"end"
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with line, theirs:
        line.settimeout(30)
        sender = threading.Thread(target=theirs.sendall, args=(head + b"%x\r\n%b\r\n" % (len(data), data),))
        sender.start()
        answer = HTTPResponse(line)
        answer.begin()
        assert bytes(Body(answer, line).read(len(data))) == data
        sender.join()
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        answer.close()
