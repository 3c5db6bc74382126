"""Ranges that a task reads together, and answers that are cut short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import pyarrow as pa
import pytest

from sluice.spark.http.bulk_client import Door, Where
from sluice.spark.errors import DataLost, Refused, StreamCut
from sluice.spark.source.offsets import Range
from sluice.spark.source.range_reader import MOST_TOGETHER, read_ranges, together

Row = tuple[int, int]  # partition and sequence


class ScriptedDoor:
    """Answers with these rows, one list for each time that it is asked, and is cut behind all but the last."""

    where = Where("http://127.0.0.1:1", retry_seconds=30)

    def __init__(self, *answers: list[list[Row]]) -> None:
        self._answers = list(answers)
        self.asked: list[dict[int, tuple[int, int]]] = []
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
        self.asked.append(dict(ranges))
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


def read(door: ScriptedDoor, *ranges: Range) -> list[bytes]:
    batches = read_ranges(cast(Door, door), ["value"], ranges)
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def test_a_cut_answer_is_taken_up_behind_the_last_row_of_each_partition() -> None:
    door = ScriptedDoor([[(0, 5), (1, 0), (0, 6), (1, 1)], [(0, 7)]], [[(1, 2), (2, 0)]], [[(2, 1)]])
    found = read(door, Range("q", 0, 5, 8), Range("q", 1, 0, 3), Range("q", 2, 0, 2))
    assert found == [b"0-5", b"1-0", b"0-6", b"1-1", b"0-7", b"1-2", b"2-0", b"2-1"]
    assert door.asked == [{0: (5, 8), 1: (0, 3), 2: (0, 2)}, {1: (2, 3), 2: (0, 2)}, {2: (1, 2)}]
    assert door.columns == ["value", "partition", "sequence"]


def test_an_answer_that_is_cut_behind_its_last_row_is_not_asked_for_again() -> None:
    door = ScriptedDoor([[(0, 0), (3, 0)]], [])
    assert read(door, Range("q", 0, 0, 1), Range("q", 3, 0, 1)) == [b"0-0", b"3-0"]
    assert len(door.asked) == 1


def test_rows_that_are_gone_are_named_with_what_was_to_be_read() -> None:
    class Refusing(ScriptedDoor):
        def rows(self, *asked: object) -> Iterator[pa.RecordBatch]:
            raise Refused("out_of_range", "partition 1 is kept from 9 on", "")

    with pytest.raises(
        DataLost, match=r"rows 0 to 3 of partition 1, 4 to 5 of partition 2 of queue 'q'.*from 9 on"
    ):
        read(Refusing(), Range("q", 1, 0, 3), Range("q", 2, 4, 5))


def test_partitions_of_a_queue_are_read_together_and_nothing_else_is() -> None:
    ranges = [
        Range("a", 0, 0, 5),
        Range("a", 1, 0, 5),
        Range("a", 1, 5, 9),
        Range("a", 2, 0, 5, lenient=True),
        Range("b", 3, 0, 5, lenient=True),
    ]
    assert together(ranges) == [ranges[:2], ranges[2:3], ranges[3:4], ranges[4:]]
    many = [Range("a", number, 0, 5) for number in range(MOST_TOGETHER + 1)]
    assert [len(some) for some in together(many)] == [MOST_TOGETHER, 1]
