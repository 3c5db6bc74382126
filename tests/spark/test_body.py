"""The memory into which a reader reads batches: used again, and never while somebody has one."""

from __future__ import annotations

import io
from http.client import HTTPResponse
from typing import cast

import pytest

from sluice.spark.door import LARGE, Body

ROWS = 3 * LARGE


def body_of(data: bytes, rooms: list[bytearray]) -> Body:
    return Body(cast(HTTPResponse, io.BytesIO(data)), rooms)


def test_what_is_kept_of_an_answer_stays_as_it_is() -> None:
    parts = [bytes([nth]) * ROWS for nth in range(8)]
    body = body_of(b"".join(parts), [])
    kept = [body.read(ROWS) for _ in parts]
    assert [bytes(one) for one in kept] == parts


def test_memory_is_used_again_when_nobody_has_it_any_more() -> None:
    rooms: list[bytearray] = []
    body = body_of(b"a" * ROWS + b"b" * ROWS, rooms)
    first = body.read(ROWS)
    assert isinstance(first, memoryview)
    first.release()
    second = body.read(ROWS)
    assert len(rooms) == 1
    with pytest.raises(BufferError):
        rooms[0].append(0)
    assert bytes(second) == b"b" * ROWS


def test_an_answer_that_ends_early_is_as_long_as_it_is() -> None:
    body = body_of(b"a" * LARGE, [])
    assert len(body.read(ROWS)) == LARGE
