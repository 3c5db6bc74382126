"""The broker's side of the bulk door, by itself: sequences by time, and what is told before it is kept."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from sluice.admin.bulk.bulk_service import bulk_service
from sluice.admin.bulk.bulk_views import Batch, Slice
from sluice.bulk.row_decoder import Repair
from sluice.errors import OutOfRange, UnknownGroup
from sluice.message import Message
from sluice.queues.flow import dead_letters
from sluice.queues.bulk.bulk_ops import append_some, note_batch
from sluice.queues.log.frame_builder import PURGED
from sluice.queues.bulk.start_position import start_floors
from tests.admin.conftest import MakeHouse
from tests.admin.kit import AdminHouse
from tests.broker.namespaces.kit import settle, take

T = TypeVar("T")

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


class Planted(Exception):
    """A fault of ours in the middle of a commit."""


def rows(count: int) -> list[Message]:
    return [Message(b"row %d" % nth, b"", b"") for nth in range(count)]


def fail_at(call: int, function: Callable[..., T]) -> Callable[..., T]:
    """The function, raising at this call of it."""
    calls = itertools.count(1)

    def failing(*arguments: object) -> T:
        if next(calls) == call:
            raise Planted
        return function(*arguments)

    return failing


async def break_and_restart(house: AdminHouse, batch: Batch) -> None:
    """Commit a batch that breaks off, end as `sluice serve` does then, and start again."""
    broken: list[Exception] = []

    def failed(fault: Exception) -> None:
        broken.append(fault)
        house.runner.freeze()

    house.runner.on_broken = failed
    with pytest.raises(Planted):
        await house.ask(house.admin.bulk.commit(batch))
    house.advance(10)
    assert len(broken) == 1
    now = house.loop.now
    house.runner.close()
    house._start(now)


@pytest.mark.parametrize("where", ["second portion", "pause behind the first portion", "second queue"])
async def test_a_batch_that_breaks_off_while_it_is_appended_leaves_nothing(
    make_house: MakeHouse, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(("#", {"partitions": 1}))
    runs = [("tasks", rows(100)), ("others", rows(100))]
    with monkeypatch.context() as patched:
        if where == "pause behind the first portion":
            hands = house.admin.bulk._hands
            patched.setattr(hands, "breathe", fail_at(1, hands.breathe))
        else:
            call = 2 if where == "second portion" else 5
            patched.setattr(bulk_service, "append_some", fail_at(call, append_some))
        await break_and_restart(house, Batch("app", 1, 200, runs))
    assert (house.depth("tasks"), house.depth("others")) == (0, 0)
    assert await house.ask(house.admin.bulk.last_batch("app")) is None
    runs = [("tasks", rows(100)), ("others", rows(100))]
    done = await house.ask(house.admin.bulk.commit(Batch("app", 1, 200, runs)))
    assert (done.rows, done.replayed) == (200, False)
    assert (house.depth("tasks"), house.depth("others")) == (100, 100)


async def test_a_batch_that_breaks_off_while_it_replaces_dead_letters_leaves_them_all(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(("#", {"partitions": 1}))
    worker = house.worker()
    for nth in range(3):
        house.publish(b"bad %d" % nth)
        [message] = take(worker)
        assert settle(worker, "reject", message)[0] == 0
    worker.disconnect()
    assert house.depth("dlq/tasks") == 3

    def repairs() -> list[Repair]:
        return [Repair("tasks", Message(b"good", b"", b""), "dlq/tasks", 0, seq) for seq in range(3)]

    with monkeypatch.context() as patched:
        patched.setattr(dead_letters, "replace", fail_at(2, dead_letters.replace))
        await break_and_restart(house, Batch("app", 1, 13, [("tasks", rows(10))], repairs()))
    assert (house.depth("tasks"), house.depth("dlq/tasks")) == (0, 3)
    assert await house.ask(house.admin.bulk.last_batch("app")) is None
    again = Batch("app", 1, 13, [("tasks", rows(10))], repairs())
    done = await house.ask(house.admin.bulk.commit(again))
    assert (done.replayed, done.skipped) == (False, 0)
    assert (house.depth("tasks"), house.depth("dlq/tasks")) == (13, 0)


PLACES = 5000  # of a slice: more than twice of what is collected in one turn


async def slice_disturbed(
    house: AdminHouse, monkeypatch: pytest.MonkeyPatch, disturb: Callable[[], object]
) -> Slice:
    """Read all of tasks for group g; `disturb` is called once, while the slice is being collected."""
    admin = house.admin.bulk
    await house.ask(admin.targets(["tasks"]))
    await house.ask(admin.advance("tasks", "g", {}, True, "earliest"))
    await house.ask(admin.commit(Batch("app", 1, PLACES, [("tasks", rows(PLACES))])))
    hands = admin._hands
    breathe = hands.breathe
    waiting = [disturb]

    async def disturbed() -> None:
        await breathe()
        if waiting:
            waiting.pop()()

    with monkeypatch.context() as patched:
        patched.setattr(hands, "breathe", disturbed)
        try:
            return await house.ask(admin.slice("tasks", 0, 0, PLACES, False, 10_000, 1 << 30, "g"))
        finally:
            assert not waiting, "it was collected in one turn"


async def test_a_slice_that_is_collected_in_several_turns_is_whole(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(("tasks", {"partitions": 1}))
    found = await slice_disturbed(house, monkeypatch, lambda: None)
    assert (len(found.places) // bulk_service.PLACE_BYTES, found.next) == (PLACES, PLACES)


async def test_a_reader_is_told_what_its_group_loses_while_a_slice_is_collected(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(("tasks", {"partitions": 1}))
    with pytest.raises(OutOfRange):
        await slice_disturbed(house, monkeypatch, lambda: house.engine.purge(house.engine.queues["tasks"]))


async def test_a_reader_whose_group_is_deleted_while_a_slice_is_collected_is_refused(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(("tasks", {"partitions": 1}))
    with pytest.raises(UnknownGroup):
        await slice_disturbed(
            house,
            monkeypatch,
            lambda: house.engine.drop_group(house.engine.queues["tasks"].groups["g"]),
        )


async def test_a_reader_whose_group_is_deleted_and_made_again_meanwhile_is_refused(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(("tasks", {"partitions": 1}))

    def make_again() -> None:
        queue = house.engine.queues["tasks"]
        house.engine.drop_group(queue.groups["g"])
        house.engine.group(queue, "g", [0])

    with pytest.raises(UnknownGroup):
        await slice_disturbed(house, monkeypatch, make_again)


@pytest.mark.parametrize("by", ["targets", "commit"])
async def test_others_are_served_while_a_batch_creates_queues(make_house: MakeHouse, by: str) -> None:
    """No turn of the loop creates more than a few of them, and none of the rows is there before all are."""
    house = make_house(("#", {"partitions": 1}))
    names = [f"new/{nth}" for nth in range(100)]
    task: asyncio.Future[Any]
    if by == "targets":
        task = asyncio.ensure_future(house.admin.bulk.targets(names))
    else:
        runs = [(name, rows(1)) for name in names]
        task = asyncio.ensure_future(house.admin.bulk.commit(Batch("app", 1, 100, runs)))
    before = len(house.engine.queues)
    most = 0
    while not task.done():
        await asyncio.sleep(0)
        house.loop.settle()
        count = len(house.engine.queues)
        most = max(most, count - before)
        before = count
        if 0 < count < 100:
            assert all(house.depth(name) == 0 for name in names)
    assert task.exception() is None
    assert set(names) <= set(house.engine.queues)
    assert 0 < most <= bulk_service.CREATED_AT_ONCE
    house.loop.settle()
    assert sum(house.depth(name) for name in names) == (100 if by == "commit" else 0)
