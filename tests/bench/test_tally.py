"""What the benchmark counts: each message once, in order within its slot, and its latency."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from sluice.bench.procfs import CpuUsage
from sluice.bench.results import (
    Result,
    assess_cpu,
    disturbances,
    find_faults,
    merge_histograms,
    percentile,
    percentiles_ms,
    upper_edge,
)
from sluice.bench.tally import Histogram, Stream, slot_of


def report(lanes: dict[int, list[list[int]]], slots: int = 1) -> dict[str, Any]:
    """Return the report of a generator process that has seen these sequences, by lane and
    publisher.
    """
    report: dict[str, Any] = {"lanes": {}}
    for lane, publishers in lanes.items():
        report["lanes"][str(lane)] = []
        for sequences in publishers:
            stream = Stream(slots)
            for sequence in sequences:
                stream.record(sequence)
            report["lanes"][str(lane)].append(
                {
                    "seen": base64.b64encode(stream.seen()).decode(),
                    "doubled": int(stream.doubled),
                    "disordered": int(stream.disordered),
                }
            )
    return report


@pytest.mark.parametrize(
    ("arrived", "lost", "doubled", "disordered"),
    [
        ([0, 1, 2, 3], 0, 0, 0),
        ([0, 1, 3], 1, 0, 0),
        ([], 4, 0, 0),
        ([0, 1, 1, 2, 3], 0, 1, 0),
        ([0, 2, 1, 3], 0, 0, 1),
        ([1, 1, 0], 2, 1, 1),
        ([0, 1, 2, 3, 9], 0, 0, 1),  # one that was not sent
    ],
)
def test_lost_duplicated_and_reordered_messages_are_counted(
    arrived: list[int], lost: int, doubled: int, disordered: int
) -> None:
    faults = find_faults([report({0: [arrived]})], {0: 4}, {0: [0]})
    assert (faults.lost, faults.doubled, faults.disordered) == (lost, doubled, disordered)


def test_order_is_checked_within_a_slot_only() -> None:
    slots = 4
    by_slot = sorted(range(40), key=lambda sequence: slot_of(sequence, slots))
    assert find_faults([report({0: [by_slot]}, slots)], {0: 40}, {0: [0]}).disordered == 0
    assert (
        find_faults([report({0: [list(reversed(by_slot))]}, slots)], {0: 40}, {0: [0]}).disordered
        > 0
    )


def test_message_seen_by_two_processes_is_a_duplicate_and_by_one_is_not_lost() -> None:
    reports = [report({0: [[0, 1, 2]]}), report({0: [[2, 3]]})]
    faults = find_faults(reports, {0: 4}, {0: [0]})
    assert (faults.lost, faults.doubled) == (0, 1)


def test_every_subscriber_of_a_plain_topic_must_receive_everything() -> None:
    reports = [report({0: [[0, 1]], 1: [[0]]})]
    assert find_faults(reports, {0: 2}, {0: [0], 1: [0], 2: [0]}).lost == 1 + 2


def test_compacted_queue_may_deliver_only_the_last_value_of_each_key() -> None:
    slots = 3
    right = find_faults([report({0: [[7, 8, 9]]}, slots)], {0: 10}, {0: [0]}, last=slots)
    assert (right.lost, right.disordered) == (0, 0)
    stale = find_faults([report({0: [[4, 8, 9]]}, slots)], {0: 10}, {0: [0]}, last=slots)
    assert (stale.lost, stale.disordered) == (1, 1)


def test_percentiles_are_never_too_low_and_at_most_a_few_percent_too_high() -> None:
    histogram = Histogram()
    for microseconds in range(1, 1001):
        histogram.add(microseconds * 1000)
    counts = {bucket: count for bucket, count in enumerate(histogram.counts) if count}
    for share, true in ((0.5, 500_000), (0.99, 990_000), (0.999, 999_000)):
        found = percentile(counts, share)
        assert found is not None and true <= found <= true * 1.04
    assert percentile({}, 0.5) is None
    assert percentiles_ms(merge_histograms([{"latency": {}}], "latency")) == {
        "p50": None,
        "p99": None,
        "p99.9": None,
    }


def test_histogram_buckets_are_contiguous() -> None:
    edges = [upper_edge(bucket) for bucket in range(400)]
    assert edges == sorted(set(edges))
    for value in (0, 1, 63, 64, 65, 1000, 123_456, 10**9):
        histogram = Histogram()
        histogram.add(value)
        assert value <= upper_edge(histogram.counts.index(1)) <= value * 1.04


def assessed(broker: float | None, generators: list[float], all_processes: float = 0.0) -> Result:
    result = Result("queue", "", messages=1000, seconds=2.0)
    assess_cpu(result, CpuUsage(2.0, broker, all_processes, 0.0), generators, 0.0)
    return result


def test_saturated_generator_is_reported_when_the_broker_had_capacity() -> None:
    assert assessed(1.0, [1.9]).warnings == [
        "the generator was the bottleneck; the broker could do more: see msgs per broker CPU-second"
    ]
    assert assessed(1.9, [1.9]).warnings == []
    assert assessed(1.0, [1.0, 1.0]).warnings == []  # two processes, half busy each
    assert assessed(None, [1.9]).warnings != []


def test_messages_per_cpu_second_are_unknown_without_broker_cpu() -> None:
    assert assessed(0.5, [0.1]).per_cpu_second == 2000
    assert assessed(None, [0.1]).per_cpu_second is None


def test_other_load_on_the_machine_is_reported() -> None:
    assert disturbances([assessed(1.0, [0.5], all_processes=1.6)]) == []
    [reported] = disturbances([assessed(1.0, [0.5], all_processes=3.5)])
    assert "others used up to 1.0 cores" in reported
