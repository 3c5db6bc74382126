"""Offsets, ranges and limits: pure functions, tried with whatever hypothesis finds."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.spark.faults import InvalidOption
from sluice.spark.offsets import (
    TASK_ROWS,
    Range,
    Sequences,
    admit,
    from_json,
    ranges_between,
    split,
    tasks_for,
    to_json,
)

places = st.tuples(st.sampled_from(["a", "b/c", "ü"]), st.integers(0, 12))
sequences = st.dictionaries(places, st.integers(0, 10_000))


@given(sequences)
def test_equal_offsets_are_written_alike(found: Sequences) -> None:
    turned = dict(reversed(list(found.items())))
    assert json.dumps(to_json(found)) == json.dumps(to_json(turned))
    assert from_json(json.loads(json.dumps(to_json(found)))) == found


def test_partitions_are_written_in_the_order_of_their_numbers() -> None:
    assert list(to_json({("q", 10): 1, ("q", 9): 2})["queues"]["q"]) == ["9", "10"]


@pytest.mark.parametrize("offset", [{}, {"v": 2, "queues": {}}, {"0": 5}, {"v": 1, "queues": {"q": [1]}}])
def test_an_offset_of_another_source_is_refused(offset: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match="checkpointLocation of its own"):
        from_json(offset)


@given(sequences, sequences, st.integers(1, 20_000))
def test_a_limit_is_kept_and_everybody_gets_on(start: Sequences, more: Sequences, most: int) -> None:
    latest = {place: start.get(place, 0) + count for place, count in more.items()}
    end = admit(start, latest, most)
    taken = {place: end[place] - start.get(place, 0) for place in latest}
    waiting = {place: latest[place] - start.get(place, 0) for place in latest}
    assert all(0 <= taken[place] <= waiting[place] for place in latest)
    assert all(taken[place] for place in latest if waiting[place])
    assert sum(taken.values()) <= most + len(latest)
    if sum(waiting.values()) <= most:
        assert end == latest


@given(sequences, sequences, st.integers(0, 50))
def test_ranges_hold_every_sequence_once(start: Sequences, more: Sequences, least: int) -> None:
    end = {place: start.get(place, 0) + count for place, count in more.items()}
    whole = ranges_between(start, end, False)
    parts = split(whole, least)
    for place, last in end.items():
        mine = sorted((one.start, one.end) for one in parts if (one.queue, one.partition) == place)
        covered = [seq for first, behind in mine for seq in range(first, behind)]
        assert covered == list(range(start.get(place, 0), last))
    assert split(whole, least) == parts
    assert len(parts) >= min(least // 2, sum(one.end - one.start for one in whole))


@given(sequences)
def test_short_ranges_share_a_task_and_none_is_left_out(found: Sequences) -> None:
    ranges = ranges_between({}, found, False)
    tasks = tasks_for(ranges, 0)
    assert [one for task in tasks for one in task.ranges] == ranges
    sizes = [sum(one.end - one.start for one in task.ranges) for task in tasks]
    assert all(size <= TASK_ROWS or len(task.ranges) == 1 for size, task in zip(sizes, tasks))
    assert [len(task.ranges) for task in tasks_for(ranges, 1)] == [1] * len(ranges)


def test_what_is_new_or_made_again_is_read_from_its_beginning() -> None:
    found = ranges_between({("q", 0): 10}, {("q", 0): 4, ("q", 1): 3}, True)
    assert found == [Range("q", 0, 0, 4, True), Range("q", 1, 0, 3, True)]
