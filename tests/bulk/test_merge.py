"""Places of several partitions are merged into the order of the log."""

from __future__ import annotations

from sluice.bulk.merge import MERGED_PLACE_BYTES, PlaceMerge, exclude_part
from sluice.bulk.worker_protocol import MERGED_PLACE, PLACE


def places(*addresses: int, first: int = 0) -> bytes:
    return b"".join(PLACE.pack(first + nth, address, 10) for nth, address in enumerate(addresses))


def taken(merged: bytes) -> list[tuple[int, int, int]]:
    """Return part, sequence and address of each place."""
    found = [
        MERGED_PLACE.unpack_from(merged, at) for at in range(0, len(merged), MERGED_PLACE_BYTES)
    ]
    assert all(size == 10 for _, _, size, _ in found)
    return [(part, seq, address) for seq, address, _, part in found]


def test_messages_of_several_partitions_come_in_log_order() -> None:
    merge = PlaceMerge(2)
    merge.add_slice(0, places(100, 300, 500))
    merge.add_slice(1, places(200, 400))
    merge.end_part(0)
    merge.end_part(1)
    assert taken(merge.take_next(100)) == [
        (0, 0, 100),
        (1, 0, 200),
        (0, 1, 300),
        (1, 1, 400),
        (0, 2, 500),
    ]
    assert merge.is_exhausted()
    assert merge.take_next(100) == b""


def test_partition_waits_while_an_earlier_position_may_still_be_announced() -> None:
    merge = PlaceMerge(2)
    merge.add_slice(0, places(100, 300))
    assert merge.take_next(100) == b""
    merge.add_slice(1, places(200))
    assert taken(merge.take_next(100)) == [(0, 0, 100), (1, 0, 200)]
    assert merge.take_finished() == [1]
    assert not merge.is_exhausted()
    merge.end_part(1)
    assert taken(merge.take_next(100)) == [(0, 1, 300)]
    assert merge.take_finished() == [0]
    merge.end_part(0)
    assert merge.is_exhausted()


def test_no_more_positions_than_requested_are_returned() -> None:
    merge = PlaceMerge(1)
    merge.add_slice(0, places(1, 2, 3))
    merge.add_slice(0, places(4, first=3))
    assert [address for _, _, address in taken(merge.take_next(2))] == [1, 2]
    assert merge.take_finished() == []
    assert [address for _, _, address in taken(merge.take_next(2))] == [3, 4]
    assert merge.take_finished() == [0, 0]


def test_partition_stays_in_order_wherever_its_messages_are_stored() -> None:
    """A message that compaction moved is stored after those that followed it."""
    merge = PlaceMerge(2)
    merge.add_slice(0, places(900, 100, 200))
    merge.add_slice(1, places(150, 950))
    for part in (0, 1):
        merge.end_part(part)
    assert [seq for part, seq, _ in taken(merge.take_next(100)) if part == 0] == [0, 1, 2]


def test_partition_with_refreshed_positions_is_waited_for() -> None:
    merge = PlaceMerge(2)
    merge.add_slice(0, places(100, 200))
    merge.end_part(0)
    merge.add_slice(1, places(150, 250))
    merged = merge.take_next(2)
    merge.reset_part(0)
    assert taken(exclude_part(merged, 0)) == [(1, 0, 150)]
    assert merge.take_next(100) == b""
    assert not merge.is_exhausted()
    merge.add_slice(0, places(700))
    merge.end_part(0)
    merge.end_part(1)
    assert taken(merge.take_next(100)) == [(1, 1, 250), (0, 0, 700)]
    assert merge.is_exhausted()
