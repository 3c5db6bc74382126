"""Acknowledgements that a queue remembers: the last ones, within the bounds of all queues."""

from __future__ import annotations

from sluice.queues.model import RecentAcks, RowBudget


def acknowledge(
    acks: RecentAcks, seq: int, at_ms: int = 1000, name: bytes = b"", gid: int = 1
) -> None:
    acks.add(1, seq, gid, f"c-{seq}", name, 1, at_ms, at_ms, at_ms + 1000)


def test_last_acknowledgements_are_found_by_location_and_by_id() -> None:
    acks = RecentAcks(RowBudget(100))
    for seq in range(250):
        acknowledge(acks, seq, 1000 * seq, b"m%d" % seq)
    assert [acks.find(b"", 1, seq) for seq in (0, 149, 250)] == [[], [], []]
    (oldest,) = acks.find(b"m150", -1, -1)
    assert (oldest.holder, oldest.delivered_at, oldest.acked_at) == ("c-150", 150.0, 151.0)
    (newest,) = acks.find(b"", 1, 249)
    assert (newest.gid, newest.holder, newest.attempt) == (1, "c-249", 1)


def test_message_of_two_groups_has_one_row_of_each_and_the_newest_counts() -> None:
    acks = RecentAcks(RowBudget(100))
    for gid, at_ms in ((1, 10_000), (2, 20_000), (1, 30_000)):
        acknowledge(acks, 7, at_ms, b"m", gid)
    assert [(one.gid, one.acked_at) for one in acks.find(b"m", -1, -1)] == [(1, 31.0), (2, 21.0)]


def test_queues_share_a_bound_and_a_deleted_queue_returns_its_rows() -> None:
    budget = RowBudget(100, 100)
    first, second = RecentAcks(budget), RecentAcks(budget)
    for seq in range(200):
        acknowledge(first, seq)
        acknowledge(second, seq)
    remembered = [
        sum(1 for seq in range(200) if acks.find(b"", 1, seq)) for acks in (first, second)
    ]
    assert remembered == [64, 16]  # the rest is less than what a queue takes at once
    first.release()
    assert first.find(b"", 1, 199) == [] and budget.remaining == 84
