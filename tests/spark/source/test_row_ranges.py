"""Ranges that a task reads together, and responses that are cut short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import pyarrow as pa
import pytest

from sluice.http_client import Endpoint
from sluice.spark.errors import DataLost, Refused, StreamCut
from sluice.spark.http.bulk_client import BulkClient
from sluice.spark.source.offsets import Range
from sluice.spark.source.range_reader import MAX_RANGES_PER_REQUEST, group_ranges, read_ranges

Row = tuple[int, int]  # partition and sequence


class ScriptedBulkClient:
    """Answers with these rows, one list for each request, and cuts all responses but the last."""

    where = Endpoint("http://127.0.0.1:1", retry_seconds=30)

    def __init__(self, *answers: list[list[Row]]) -> None:
        self._answers = list(answers)
        self.arguments: list[dict[int, tuple[int, int]]] = []
        self.columns: list[str] = []

    def rows(
        self,
        queue: str,
        ranges: Mapping[int, tuple[int, int]],
        columns: list[str],
        lenient: bool,
        group: str,
        incarnation: str,
    ) -> Iterator[pa.RecordBatch]:
        self.arguments.append(dict(ranges))
        self.columns = columns
        for rows in self._answers.pop(0):
            yield pa.record_batch(
                {
                    "value": pa.array([b"%d-%d" % row for row in rows], pa.binary()),
                    "partition": pa.array([partition for partition, _ in rows], pa.int32()),
                    "sequence": pa.array([sequence for _, sequence in rows], pa.int64()),
                }
            )
        if self._answers:
            raise StreamCut("the broker was restarted")


def read(client: ScriptedBulkClient, *ranges: Range) -> list[bytes]:
    batches = read_ranges(cast(BulkClient, client), ["value"], ranges)
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def test_truncated_response_is_resumed_after_the_last_row_of_each_partition() -> None:
    client = ScriptedBulkClient(
        [[(0, 5), (1, 0), (0, 6), (1, 1)], [(0, 7)]], [[(1, 2), (2, 0)]], [[(2, 1)]]
    )
    found = read(client, Range("q", 0, 5, 8), Range("q", 1, 0, 3), Range("q", 2, 0, 2))
    assert found == [b"0-5", b"1-0", b"0-6", b"1-1", b"0-7", b"1-2", b"2-0", b"2-1"]
    assert client.arguments == [
        {0: (5, 8), 1: (0, 3), 2: (0, 2)},
        {1: (2, 3), 2: (0, 2)},
        {2: (1, 2)},
    ]
    assert client.columns == ["value", "partition", "sequence"]


def test_response_truncated_after_its_last_row_is_not_requested_again() -> None:
    client = ScriptedBulkClient([[(0, 0), (3, 0)]], [])
    assert read(client, Range("q", 0, 0, 1), Range("q", 3, 0, 1)) == [b"0-0", b"3-0"]
    assert len(client.arguments) == 1


def test_deleted_rows_are_reported_with_the_requested_range() -> None:
    class Refusing(ScriptedBulkClient):
        def rows(self, *arguments: object) -> Iterator[pa.RecordBatch]:
            raise Refused("out_of_range", "partition 1 is kept from 9 on", "")

    with pytest.raises(
        DataLost, match=r"rows 0 to 3 of partition 1, 4 to 5 of partition 2 of queue 'q'.*from 9 on"
    ):
        read(Refusing(), Range("q", 1, 0, 3), Range("q", 2, 4, 5))


def test_only_partitions_of_one_queue_are_read_together() -> None:
    ranges = [
        Range("a", 0, 0, 5),
        Range("a", 1, 0, 5),
        Range("a", 1, 5, 9),
        Range("a", 2, 0, 5, lenient=True),
        Range("b", 3, 0, 5, lenient=True),
    ]
    assert group_ranges(ranges) == [ranges[:2], ranges[2:3], ranges[3:4], ranges[4:]]
    many = [Range("a", number, 0, 5) for number in range(MAX_RANGES_PER_REQUEST + 1)]
    assert [len(some) for some in group_ranges(many)] == [MAX_RANGES_PER_REQUEST, 1]
