"""The broker's side of the bulk door, by itself: sequences by time, and what is told before it is kept."""

from __future__ import annotations

import asyncio

from sluice.queues.batches import note_batch
from sluice.queues.journal import PURGED
from sluice.queues.start import start_floors
from tests.admin.conftest import MakeHouse
from tests.admin.kit import AdminHouse

STARTED = 1_800_000_000.0


async def test_sequences_by_time_are_the_same_after_a_restart_of_delayed_messages_too(
    make_house: MakeHouse,
) -> None:
    """Message n comes after n minutes. Those that a snapshot covers are found in an index, which does not tell when a
    delayed one came."""
    house = make_house(("tasks", {"partitions": 1}), segment_bytes=2000)
    for nth in range(40):
        house.publish(b"x" * 100, **({"delay": "1d"} if nth % 10 else {}))
        house.advance(60)
    house.restart()
    partition = house.engine.queues["tasks"].partitions[0]
    assert 20 < partition.undated < 40, "some are of the snapshot, and some came behind it"
    for nth in range(41):
        found = await house.ask(house.admin.bulk.offsets_at("tasks", STARTED + 60 * nth))
        assert found == {0: nth}
        found = await house.ask(house.admin.bulk.offsets_at("tasks", STARTED + 60 * nth - 1))
        assert found == {0: nth}
    # Whoever cannot wait for a body begins with the first that may have come by then.
    starts = {nth: start_floors(partition.queue, f"@{STARTED + 60 * nth}") for nth in (0, 5, 10, 15, 39)}
    assert starts == {0: [0], 5: [1], 10: [1], 15: [11], 39: [39]}


async def test_sequences_by_time_where_all_are_delayed_and_some_are_gone(make_house: MakeHouse) -> None:
    house = make_house(("tasks", {"partitions": 1}), segment_bytes=2000)
    for _ in range(40):
        house.publish(b"x" * 100, delay="1d")
        house.advance(60)
    house.restart()
    partition = house.engine.queues["tasks"].partitions[0]
    for seq in (0, 1, 7, 8, 9, 20):
        house.engine.remove_for_all(partition, seq, PURGED)
    expected = {0: 2, 2: 2, 5: 5, 7: 10, 9: 10, 10: 10, 19: 19, 20: 21, 21: 21, 39: 39, 40: 40}
    for nth, seq in expected.items():
        assert await house.ask(house.admin.bulk.offsets_at("tasks", STARTED + 60 * nth)) == {0: seq}


async def test_the_last_batch_is_told_when_it_is_kept(house: AdminHouse) -> None:
    assert await house.ask(house.admin.bulk.last_batch("app")) is None
    house.runner.hold()
    note_batch(house.engine, "app", 7, 0)
    asking = asyncio.ensure_future(house.admin.bulk.last_batch("app"))
    for _ in range(10):
        await asyncio.sleep(0)
        house.loop.settle()
    assert not asking.done(), "a crash would leave nothing of it"
    house.runner.release()
    house.loop.settle()
    assert await asking == 7
