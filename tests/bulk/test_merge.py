"""Places of several partitions, as they lie in the log."""

from __future__ import annotations

from sluice.bulk.merge import MERGED_BYTES, Merge, without
from sluice.bulk.worker_protocol import MERGED, PLACE


def places(*addresses: int, first: int = 0) -> bytes:
    return b"".join(PLACE.pack(first + nth, address, 10) for nth, address in enumerate(addresses))


def taken(merged: bytes) -> list[tuple[int, int, int]]:
    """Part, sequence and address of each."""
    found = [MERGED.unpack_from(merged, at) for at in range(0, len(merged), MERGED_BYTES)]
    assert all(size == 10 for _, _, size, _ in found)
    return [(part, seq, address) for seq, address, _, part in found]


def test_messages_of_several_partitions_come_as_they_lie_in_the_log() -> None:
    merge = Merge(2)
    merge.add(0, places(100, 300, 500))
    merge.add(1, places(200, 400))
    merge.end(0)
    merge.end(1)
    assert taken(merge.next(100)) == [(0, 0, 100), (1, 0, 200), (0, 1, 300), (1, 1, 400), (0, 2, 500)]
    assert merge.is_over()
    assert merge.next(100) == b""


def test_nobody_goes_on_while_something_before_it_may_still_be_told() -> None:
    merge = Merge(2)
    merge.add(0, places(100, 300))
    assert merge.next(100) == b""
    merge.add(1, places(200))
    assert taken(merge.next(100)) == [(0, 0, 100), (1, 0, 200)]
    assert merge.take_finished() == [1]
    assert not merge.is_over()
    merge.end(1)
    assert taken(merge.next(100)) == [(0, 1, 300)]
    assert merge.take_finished() == [0]
    merge.end(0)
    assert merge.is_over()


def test_no_more_come_than_were_asked_for() -> None:
    merge = Merge(1)
    merge.add(0, places(1, 2, 3))
    merge.add(0, places(4, first=3))
    assert [address for _, _, address in taken(merge.next(2))] == [1, 2]
    assert merge.take_finished() == []
    assert [address for _, _, address in taken(merge.next(2))] == [3, 4]
    assert merge.take_finished() == [0, 0]


def test_a_partition_stays_in_its_own_order_wherever_its_messages_lie() -> None:
    """One that was moved lies behind those that followed it."""
    merge = Merge(2)
    merge.add(0, places(900, 100, 200))
    merge.add(1, places(150, 950))
    for part in (0, 1):
        merge.end(part)
    assert [seq for part, seq, _ in taken(merge.next(100)) if part == 0] == [0, 1, 2]


def test_a_partition_that_is_told_anew_is_waited_for() -> None:
    merge = Merge(2)
    merge.add(0, places(100, 200))
    merge.end(0)
    merge.add(1, places(150, 250))
    merged = merge.next(2)
    merge.drop(0)
    assert taken(without(merged, 0)) == [(1, 0, 150)]
    assert merge.next(100) == b""
    assert not merge.is_over()
    merge.add(0, places(700))
    merge.end(0)
    merge.end(1)
    assert taken(merge.next(100)) == [(1, 1, 250), (0, 0, 700)]
    assert merge.is_over()
