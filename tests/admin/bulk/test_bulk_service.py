"""The bulk service: sequences by time, and answers only after the commit."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from sluice.admin.bulk import batch_commits, bulk_service
from sluice.admin.bulk.bulk_views import Batch, MessageSlice
from sluice.bulk.row_decoder import DeadLetterRepair
from sluice.errors import OutOfRange, UnknownGroup
from sluice.message import Message
from sluice.queues.bulk.start_position import resolve_start
from sluice.queues.commit_loop import CommitListener
from sluice.queues.log.notes import PURGED
from tests.admin.conftest import MakeHarness
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import settle, take

T = TypeVar("T")

STARTED = 1_800_000_000.0


async def test_sequences_by_time_are_the_same_after_restart_for_delayed_messages_too(
    make_harness: MakeHarness,
) -> None:
    """Publish message n after n minutes.

    Messages that a snapshot covers are found in an index, which has no arrival time of delayed
    messages.
    """
    harness = make_harness(("tasks", {"partitions": 1}), segment_bytes=2000)
    for nth in range(40):
        harness.publish(b"x" * 100, **({"delay": "1d"} if nth % 10 else {}))
        harness.advance(60)
    harness.restart()
    partition = harness.engine.queues["tasks"].partitions[0]
    assert 20 < partition.undated_end < 40, "some are in the snapshot, and some after it"
    for nth in range(41):
        found = await harness.call(harness.admin.bulk.offsets_at("tasks", STARTED + 60 * nth))
        assert found == {0: nth}
        found = await harness.call(harness.admin.bulk.offsets_at("tasks", STARTED + 60 * nth - 1))
        assert found == {0: nth}
    # A reader that cannot wait for a body begins with the first message that may match.
    starts = {
        nth: resolve_start(partition.queue, f"@{STARTED + 60 * nth}") for nth in (0, 5, 10, 15, 39)
    }
    assert starts == {0: [0], 5: [1], 10: [1], 15: [11], 39: [39]}


async def test_sequences_by_time_with_only_delayed_and_some_deleted_messages(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(("tasks", {"partitions": 1}), segment_bytes=2000)
    for _ in range(40):
        harness.publish(b"x" * 100, delay="1d")
        harness.advance(60)
    harness.restart()
    partition = harness.engine.queues["tasks"].partitions[0]
    for seq in (0, 1, 7, 8, 9, 20):
        harness.engine.removal.remove_for_all_groups(partition, seq, PURGED)
    expected = {0: 2, 2: 2, 5: 5, 7: 10, 9: 10, 10: 10, 19: 19, 20: 21, 21: 21, 39: 39, 40: 40}
    for nth, seq in expected.items():
        assert await harness.call(harness.admin.bulk.offsets_at("tasks", STARTED + 60 * nth)) == {
            0: seq
        }


async def test_last_batch_is_reported_after_its_commit(harness: BrokerHarness) -> None:
    assert await harness.call(harness.admin.bulk.last_batch("app")) is None
    harness.commit_loop.hold_frame()
    harness.engine.batches.write_batch_note("app", 7, 0)
    asking = asyncio.ensure_future(harness.admin.bulk.last_batch("app"))
    for _ in range(10):
        await asyncio.sleep(0)
        harness.loop.settle()
    assert not asking.done(), "a crash would lose it"
    harness.commit_loop.release_frame()
    harness.loop.settle()
    assert await asking == 7


class InjectedFault(Exception):
    """A bug in the middle of a commit."""


def rows(count: int) -> list[Message]:
    return [Message(b"row %d" % nth, b"", b"") for nth in range(count)]


def fail_at(call: int, function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function so that it raises at the given call."""
    calls = itertools.count(1)

    def failing(*arguments: object) -> T:
        if next(calls) == call:
            raise InjectedFault
        return function(*arguments)

    return failing


async def break_and_restart(harness: BrokerHarness, batch: Batch) -> None:
    """Commit a batch that fails midway, end as `sluice serve` does then, and start again."""
    broken: list[Exception] = []

    class FreezeOnFailure(CommitListener):
        def on_failure(self, error: Exception) -> None:
            broken.append(error)
            harness.commit_loop.freeze()

    harness.commit_loop.add_listener(FreezeOnFailure())
    with pytest.raises(InjectedFault):
        await harness.call(harness.admin.bulk.commit(batch))
    harness.advance(10)
    assert len(broken) == 1
    now = harness.loop.now
    harness.commit_loop.close()
    harness._start(now)


@pytest.mark.parametrize(
    "where", ["second portion", "pause behind the first portion", "second queue"]
)
async def test_batch_aborted_while_appending_leaves_nothing(
    make_harness: MakeHarness, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(("#", {"partitions": 1}))
    runs = [("tasks", rows(100)), ("others", rows(100))]
    with monkeypatch.context() as patched:
        if where == "pause behind the first portion":
            facade = harness.admin.bulk._facade
            patched.setattr(facade, "yield_to_loop", fail_at(1, facade.yield_to_loop))
        else:
            call = 2 if where == "second portion" else 5
            bulk = harness.admin.bulk
            patched.setattr(bulk, "_append_portion", fail_at(call, bulk._append_portion))
        await break_and_restart(harness, Batch("app", 1, 200, runs))
    assert (harness.depth("tasks"), harness.depth("others")) == (0, 0)
    assert await harness.call(harness.admin.bulk.last_batch("app")) is None
    runs = [("tasks", rows(100)), ("others", rows(100))]
    done = await harness.call(harness.admin.bulk.commit(Batch("app", 1, 200, runs)))
    assert (done.rows, done.replayed) == (200, False)
    assert (harness.depth("tasks"), harness.depth("others")) == (100, 100)


async def test_batch_aborted_while_replacing_dead_letters_leaves_them_all(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(("#", {"partitions": 1}))
    worker = harness.worker()
    for nth in range(3):
        harness.publish(b"bad %d" % nth)
        [message] = take(worker)
        assert settle(worker, "reject", message)[0] == 0
    worker.disconnect()
    assert harness.depth("dlq/tasks") == 3

    def repairs() -> list[DeadLetterRepair]:
        return [
            DeadLetterRepair("tasks", Message(b"good", b"", b""), "dlq/tasks", 0, seq)
            for seq in range(3)
        ]

    with monkeypatch.context() as patched:
        bulk = harness.admin.bulk
        patched.setattr(bulk, "_apply_repair", fail_at(2, bulk._apply_repair))
        await break_and_restart(harness, Batch("app", 1, 13, [("tasks", rows(10))], repairs()))
    assert (harness.depth("tasks"), harness.depth("dlq/tasks")) == (0, 3)
    assert await harness.call(harness.admin.bulk.last_batch("app")) is None
    again = Batch("app", 1, 13, [("tasks", rows(10))], repairs())
    done = await harness.call(harness.admin.bulk.commit(again))
    assert (done.replayed, done.skipped) == (False, 0)
    assert (harness.depth("tasks"), harness.depth("dlq/tasks")) == (13, 0)


PLACES = 5000  # of a slice: more than twice the number collected in one turn


async def slice_disturbed(
    harness: BrokerHarness, monkeypatch: pytest.MonkeyPatch, disturb: Callable[[], object]
) -> MessageSlice:
    """Read all of tasks for group g; call `disturb` once, while the slice is collected."""
    admin = harness.admin.bulk
    await harness.call(admin.targets(["tasks"]))
    await harness.call(admin.advance("tasks", "g", {}, True, "earliest"))
    await harness.call(admin.commit(Batch("app", 1, PLACES, [("tasks", rows(PLACES))])))
    facade = admin._facade
    yield_to_loop = facade.yield_to_loop
    waiting = [disturb]

    async def disturbed() -> None:
        await yield_to_loop()
        if waiting:
            waiting.pop()()

    with monkeypatch.context() as patched:
        patched.setattr(facade, "yield_to_loop", disturbed)
        try:
            return await harness.call(
                admin.slice("tasks", 0, 0, PLACES, False, 10_000, 1 << 30, "g")
            )
        finally:
            assert not waiting, "it was collected in one turn"


async def test_slice_collected_over_several_turns_is_complete(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(("tasks", {"partitions": 1}))
    found = await slice_disturbed(harness, monkeypatch, lambda: None)
    assert (len(found.places) // bulk_service.LOCATION_BYTES, found.next) == (PLACES, PLACES)


async def test_reader_learns_what_its_group_loses_while_a_slice_is_collected(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(("tasks", {"partitions": 1}))
    with pytest.raises(OutOfRange):
        await slice_disturbed(
            harness,
            monkeypatch,
            lambda: harness.engine.removal.purge_queue(harness.engine.queues["tasks"]),
        )


async def test_reader_is_refused_if_its_group_is_deleted_while_a_slice_is_collected(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(("tasks", {"partitions": 1}))
    with pytest.raises(UnknownGroup):
        await slice_disturbed(
            harness,
            monkeypatch,
            lambda: harness.engine.lifecycle.delete_group(
                harness.engine.queues["tasks"].groups["g"]
            ),
        )


async def test_reader_is_refused_if_its_group_is_recreated_meanwhile(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(("tasks", {"partitions": 1}))

    def make_again() -> None:
        queue = harness.engine.queues["tasks"]
        harness.engine.lifecycle.delete_group(queue.groups["g"])
        harness.engine.lifecycle.get_or_create_group(queue, "g", [0])

    with pytest.raises(UnknownGroup):
        await slice_disturbed(harness, monkeypatch, make_again)


@pytest.mark.parametrize("by", ["targets", "commit"])
async def test_other_clients_are_served_while_a_batch_creates_queues(
    make_harness: MakeHarness, by: str
) -> None:
    """No turn of the loop creates more than a few queues, and no row is stored before all exist."""
    harness = make_harness(("#", {"partitions": 1}))
    names = [f"new/{nth}" for nth in range(100)]
    task: asyncio.Future[Any]
    if by == "targets":
        task = asyncio.ensure_future(harness.admin.bulk.targets(names))
    else:
        runs = [(name, rows(1)) for name in names]
        task = asyncio.ensure_future(harness.admin.bulk.commit(Batch("app", 1, 100, runs)))
    before = len(harness.engine.queues)
    largest = 0
    while not task.done():
        await asyncio.sleep(0)
        harness.loop.settle()
        count = len(harness.engine.queues)
        largest = max(largest, count - before)
        before = count
        if 0 < count < 100:
            assert all(harness.depth(name) == 0 for name in names)
    assert task.exception() is None
    assert set(names) <= set(harness.engine.queues)
    assert 0 < largest <= batch_commits.QUEUES_CREATED_PER_TURN
    harness.loop.settle()
    assert sum(harness.depth(name) for name in names) == (100 if by == "commit" else 0)
