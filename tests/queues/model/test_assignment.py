"""Partition assignment: a pure function, tested with random input."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.queues.model.group import assign_partitions


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    partitions = draw(st.integers(1, 40))
    known = draw(st.lists(st.integers(0, 60), max_size=20, unique=True))
    before = draw(st.lists(st.sampled_from([-1, *known]), max_size=partitions))
    consumers = draw(st.lists(st.integers(0, 60), max_size=20, unique=True))
    return partitions, consumers, before


@given(situations())
def test_shares_differ_by_at_most_one(situation: tuple[int, list[int], list[int]]) -> None:
    partitions, consumers, before = situation
    after = assign_partitions(partitions, consumers, before)
    assert len(after) == partitions
    if not consumers:
        assert after == [-1] * partitions
        return
    shares = [after.count(consumer) for consumer in consumers]
    assert sum(shares) == partitions and max(shares) - min(shares) <= 1


@given(situations())
def test_as_few_partitions_move_as_evenness_allows(
    situation: tuple[int, list[int], list[int]],
) -> None:
    partitions, consumers, before = situation
    if not consumers:
        return
    after = assign_partitions(partitions, consumers, before)
    stayed = sum(1 for old, new in zip(before, after) if old == new)
    # The maximum that even shares allow: each consumer keeps the base share, and as many as
    # possible keep one more.
    base_count, remainder = divmod(partitions, len(consumers))
    held = [before.count(consumer) for consumer in consumers]
    best = sum(min(count, base_count) for count in held) + min(
        remainder, sum(count > base_count for count in held)
    )
    assert stayed == best


@given(situations())
def test_even_assignment_is_not_changed(situation: tuple[int, list[int], list[int]]) -> None:
    partitions, consumers, before = situation
    once = assign_partitions(partitions, consumers, before)
    assert assign_partitions(partitions, consumers, once) == once
