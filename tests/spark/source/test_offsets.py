"""Offsets, ranges and limits: pure functions, tested with hypothesis."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.spark.errors import InvalidOption
from sluice.spark.source.offsets import (
    TASK_BYTES,
    TASK_ROWS,
    Range,
    Sequences,
    batch_start,
    distribute_ranges,
    from_json,
    incarnations_in,
    limit_rows,
    make_batch_end,
    plan_tasks,
    ranges_between,
    recreated_queues,
    shortened_queues,
    split_ranges,
    to_json,
)

places = st.tuples(st.sampled_from(["a", "b/c", "ü"]), st.integers(0, 12))
sequences = st.dictionaries(places, st.integers(0, 10_000))


@given(sequences)
def test_equal_offsets_are_written_alike(found: Sequences) -> None:
    turned = dict(reversed(list(found.items())))
    assert json.dumps(to_json(found)) == json.dumps(to_json(turned))
    assert from_json(json.loads(json.dumps(to_json(found)))) == found


def test_incarnation_is_written_where_known() -> None:
    found = {("b", 0): 2, ("a", 1): 5}
    offset = to_json(found, {"b": "2-7", "a": "1-7", "gone": "3-7"})
    assert json.dumps(offset["incarnations"]) == '{"a": "1-7", "b": "2-7"}'
    assert (from_json(offset), incarnations_in(offset)) == (found, {"a": "1-7", "b": "2-7"})
    assert to_json(found, {"a": ""}) == to_json(found), "a broker that does not tell"
    assert incarnations_in(to_json(found)) == {}
    assert recreated_queues({"a": "1-7", "b": "2-7", "c": ""}, {"a": "9-9", "c": "3-7"}) == {"a"}


def test_partitions_are_written_in_numeric_order() -> None:
    assert list(to_json({("q", 10): 1, ("q", 9): 2})["queues"]["q"]) == ["9", "10"]


@pytest.mark.parametrize(
    "offset", [{}, {"v": 2, "queues": {}}, {"0": 5}, {"v": 1, "queues": {"q": [1]}}]
)
def test_offset_of_another_source_is_refused(offset: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match="checkpointLocation of its own"):
        from_json(offset)


@given(sequences, sequences, st.integers(1, 20_000))
def test_limit_is_respected_and_every_partition_progresses(
    start: Sequences, more: Sequences, most: int
) -> None:
    latest = {place: start.get(place, 0) + count for place, count in more.items()}
    end = limit_rows(start, latest, most)
    taken = {place: end[place] - start.get(place, 0) for place in latest}
    waiting = {place: latest[place] - start.get(place, 0) for place in latest}
    assert all(0 <= taken[place] <= waiting[place] for place in latest)
    assert all(taken[place] for place in latest if waiting[place])
    assert sum(taken.values()) <= most + len(latest)
    if sum(waiting.values()) <= most:
        assert end == latest


@given(sequences, sequences, st.integers(0, 50))
def test_ranges_contain_every_sequence_once(start: Sequences, more: Sequences, least: int) -> None:
    end = {place: start.get(place, 0) + count for place, count in more.items()}
    whole = ranges_between(start, end, False)
    parts = split_ranges(whole, least)
    for place, last in end.items():
        mine = sorted((one.start, one.end) for one in parts if (one.queue, one.partition) == place)
        covered = [seq for first, behind in mine for seq in range(first, behind)]
        assert covered == list(range(start.get(place, 0), last))
    assert split_ranges(whole, least) == parts
    assert len(parts) >= min(least // 2, sum(one.end - one.start for one in whole))


@given(sequences, st.integers(0, 4), st.sampled_from([100.0, 1e6]))
def test_partitions_are_assigned_to_tasks_whole_and_none_is_left_out(
    found: Sequences, least: int, row_bytes: float
) -> None:
    ranges = ranges_between({}, found, False)
    tasks = plan_tasks(ranges, least, row_bytes)
    if least <= len(ranges):
        assert sorted((one for task in tasks for one in task.ranges), key=ranges.index) == ranges
    assert len(tasks) >= min(least, len(ranges))
    assert all(task.ranges for task in tasks)
    assert plan_tasks(ranges, least, row_bytes) == tasks


def test_there_are_as_many_tasks_as_cores_and_more_for_large_reads() -> None:
    cores = len(os.sched_getaffinity(0))
    wide = [Range("q", number, 0, TASK_ROWS) for number in range(4 * cores)]
    assert len(plan_tasks(wide, 0, 1.0)) == cores
    assert len(plan_tasks(wide, 0, 2 * TASK_BYTES / (4 * TASK_ROWS))) == 2 * cores
    assert len(plan_tasks(wide, 0, TASK_BYTES)) == 4 * cores, "each partition its own, and no more"
    assert len(plan_tasks(wide, 3 * cores, 1.0)) == 3 * cores
    assert len(plan_tasks([Range("q", number, 0, 2) for number in range(10)], 0)) == 1, (
        "short ones share one"
    )


def test_tasks_have_similar_sizes() -> None:
    lengths = [90_000, 10_000, 50_000, 40_000, 60_000, 50_000]
    ranges = [Range("q", number, 0, length) for number, length in enumerate(lengths)]
    sizes = [sum(one.end for one in share) for share in distribute_ranges(ranges, 2)]
    assert max(sizes) - min(sizes) <= 20_000


def test_new_partitions_are_read_from_their_start_and_empty_ranges_skipped() -> None:
    found = ranges_between({("q", 0): 10}, {("q", 0): 4, ("q", 1): 3}, True)
    assert found == [Range("q", 1, 0, 3, True)]


def test_shrunken_queue_is_another_one_only_if_its_incarnation_is_unknown() -> None:
    start, end = {("q", 0): 10, ("r", 0): 1}, {("q", 0): 4, ("r", 0): 2}
    assert shortened_queues(start, end, {}, {"q": "1-7"}) == {"q"}
    assert shortened_queues(start, end, {"q": "1-7"}, {}) == {"q"}
    assert shortened_queues(start, end, {"q": "1-7"}, {"q": "1-7"}) == set()
    assert shortened_queues(start, {}, {}, {}) == set(), "one that is gone stays where it was"


def test_end_of_a_first_batch_records_its_start() -> None:
    start, end = to_json({("q", 0): 10}, {"q": "1-7"}), to_json({("q", 0): 14}, {"q": "1-7"})
    first = json.loads(json.dumps(make_batch_end(end, start, start)))
    assert from_json(first) == from_json(end)
    assert batch_start({"v": 1, "queues": {"q": {"0": 200}}}, first) == start
    assert batch_start(first, end) == first, "later ones begin where the one before has ended"
    assert make_batch_end(end, first, None) == first, "nothing is further: the same text"
    assert batch_start(first, first) == first, "and nothing to read"
    assert make_batch_end(start, start, start) == start


def test_empty_queue_is_still_a_task() -> None:
    assert [task.ranges for task in plan_tasks([Range("q", 0, 4, 10)], 0, 0.0)] == [
        (Range("q", 0, 4, 10),)
    ]


def test_system_without_cpu_affinity_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert (
        len(plan_tasks([Range("q", nth, 0, TASK_ROWS) for nth in range(64)], 0)) == os.cpu_count()
    )
