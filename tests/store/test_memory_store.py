"""Tests of the memory store's controls: held commits, power cuts, damaged records."""

from __future__ import annotations

import pytest

from sluice.errors import StoreError
from sluice.store.memory import MemoryStore
from tests.store.kit import ManualLoop, RecordingLoader, frame_of, message


class MemoryStoreHarness:
    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.store = MemoryStore(self.loop.call_soon, segment_bytes=1000)
        self.done: list[str] = []
        self.loaded = RecordingLoader()
        self.store.open(self.loaded)

    def commit(self, seq: int, sync: bool = True) -> int:
        address = self.store.next_frame_address()
        self.store.commit(frame_of([message(seq)]), 1, sync, lambda: self.done.append(f"{seq}"))
        return address

    def crash(self, keep_unsynced: int = 0) -> list[int]:
        """Cut the power, open the surviving store, and return its messages."""
        self.store = self.store.crash(keep_unsynced)
        self.loaded = RecordingLoader()
        self.store.open(self.loaded)
        return [record.seq for record in self.loaded.rows + self.loaded.records]


def test_commit_completes_in_the_next_turn() -> None:
    bench = MemoryStoreHarness()
    bench.commit(1)
    assert bench.done == []
    bench.loop.turn_once()
    assert bench.done == ["1"]


def test_held_commits_wait_until_released_one_by_one() -> None:
    bench = MemoryStoreHarness()
    bench.store.hold()
    for seq in (1, 2, 3):
        bench.commit(seq)
    bench.loop.turn_once()
    assert bench.done == [] and bench.store.count_pending() == 3
    bench.store.release(1)
    assert bench.done == ["1"] and bench.store.count_pending() == 2
    bench.store.release()
    assert bench.done == ["1", "2", "3"]


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_crash_keeps_synced_records_and_the_requested_part_of_the_rest(keep: int) -> None:
    bench = MemoryStoreHarness()
    bench.commit(1)
    bench.loop.turn_once()
    bench.store.hold()
    for seq in (2, 3, 4):
        bench.commit(seq)
    assert bench.store.count_unsynced() == 3
    assert bench.crash(keep) == [1, 2, 3, 4][: 1 + keep]
    bench.loop.turn_once()
    assert bench.done == ["1"], "commits of the crashed process do not complete"
    bench.commit(9)
    bench.loop.turn_once()
    assert bench.crash() == [*[1, 2, 3, 4][: 1 + keep], 9]


def test_commit_without_sync_completes_but_may_be_lost_in_a_power_cut() -> None:
    bench = MemoryStoreHarness()
    bench.commit(1, sync=False)
    bench.loop.turn_once()
    assert bench.done == ["1"] and bench.store.count_unsynced() == 1
    assert bench.crash() == []
    bench.commit(2, sync=False)
    bench.commit(3, sync=True)
    bench.loop.turn_once()
    assert bench.crash() == [2, 3]


def test_unfinished_snapshot_does_not_count() -> None:
    bench = MemoryStoreHarness()
    for seq in range(40):
        bench.commit(seq)
    bench.loop.turn_once()
    bench.store.hold()
    bench.store.snapshot([b"state"], [1], lambda: None)
    assert bench.crash() == list(range(40))
    assert bench.loaded.snapshot is None
    bench.store.hold()
    bench.store.snapshot([b"state"], [1], lambda: None)
    left = bench.crash(keep_unsynced=1)
    assert bench.loaded.snapshot == b"state" and 0 < len(left) < 40


def test_damaged_record_reads_as_none() -> None:
    bench = MemoryStoreHarness()
    addresses = [bench.commit(1), bench.commit(2)]
    bench.store.damage(addresses[0])
    answers: list[list[bytes | None]] = []
    bench.store.read(addresses, answers.append)
    bench.loop.turn_once()
    assert answers[0][0] is None and answers[0][1] is not None


def test_frame_that_could_not_be_read_back_is_refused() -> None:
    bench = MemoryStoreHarness()
    with pytest.raises(StoreError, match="committed as one of 2"):
        bench.store.commit(frame_of([message(1)]), 2, True, lambda: None)
