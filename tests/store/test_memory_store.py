"""The handles of the memory store: holding commits, cutting the power, spoiling a record."""

from __future__ import annotations

import pytest

from sluice.errors import StoreError
from sluice.store.memory import MemoryStore
from tests.store.kit import Hands, Past, frame_of, message


class Bench:
    def __init__(self) -> None:
        self.hands = Hands()
        self.store = MemoryStore(self.hands.call_soon, segment_bytes=1000)
        self.done: list[str] = []
        self.past = Past()
        self.store.open(self.past)

    def commit(self, seq: int, sync: bool = True) -> int:
        address = self.store.next_frame()
        self.store.commit(frame_of([message(seq)]), 1, sync, lambda: self.done.append(f"{seq}"))
        return address

    def crash(self, keep_unsynced: int = 0) -> list[int]:
        """Cut the power, open what is left, and say which messages are there."""
        self.store = self.store.crash(keep_unsynced)
        self.past = Past()
        self.store.open(self.past)
        return [record.seq for record in self.past.rows + self.past.records]


def test_a_commit_is_done_at_the_next_turn_and_not_before() -> None:
    bench = Bench()
    bench.commit(1)
    assert bench.done == []
    bench.hands.turn_once()
    assert bench.done == ["1"]


def test_held_commits_wait_until_they_are_released_one_by_one() -> None:
    bench = Bench()
    bench.store.hold()
    for seq in (1, 2, 3):
        bench.commit(seq)
    bench.hands.turn_once()
    assert bench.done == [] and bench.store.waiting() == 3
    bench.store.release(1)
    assert bench.done == ["1"] and bench.store.waiting() == 2
    bench.store.release()
    assert bench.done == ["1", "2", "3"]


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_a_crash_keeps_what_was_synced_and_as_much_of_the_rest_as_it_is_told(keep: int) -> None:
    bench = Bench()
    bench.commit(1)
    bench.hands.turn_once()
    bench.store.hold()
    for seq in (2, 3, 4):
        bench.commit(seq)
    assert bench.store.unsynced() == 3
    assert bench.crash(keep) == [1, 2, 3, 4][: 1 + keep]
    bench.hands.turn_once()
    assert bench.done == ["1"], "whoever died with the process is not answered"
    bench.commit(9)
    bench.hands.turn_once()
    assert bench.crash() == [*[1, 2, 3, 4][: 1 + keep], 9]


def test_a_commit_without_sync_is_answered_and_still_within_reach_of_a_power_cut() -> None:
    bench = Bench()
    bench.commit(1, sync=False)
    bench.hands.turn_once()
    assert bench.done == ["1"] and bench.store.unsynced() == 1
    assert bench.crash() == []
    bench.commit(2, sync=False)
    bench.commit(3, sync=True)
    bench.hands.turn_once()
    assert bench.crash() == [2, 3]


def test_a_snapshot_that_was_not_done_never_was() -> None:
    bench = Bench()
    for seq in range(40):
        bench.commit(seq)
    bench.hands.turn_once()
    bench.store.hold()
    bench.store.snapshot([b"state"], [1], lambda: None)
    assert bench.crash() == list(range(40))
    assert bench.past.snapshot is None
    bench.store.hold()
    bench.store.snapshot([b"state"], [1], lambda: None)
    left = bench.crash(keep_unsynced=1)
    assert bench.past.snapshot == b"state" and 0 < len(left) < 40


def test_a_damaged_record_reads_as_none() -> None:
    bench = Bench()
    addresses = [bench.commit(1), bench.commit(2)]
    bench.store.damage(addresses[0])
    answers: list[list[bytes | None]] = []
    bench.store.read(addresses, answers.append)
    bench.hands.turn_once()
    assert answers[0][0] is None and answers[0][1] is not None


def test_a_frame_that_could_not_be_read_back_is_refused() -> None:
    bench = Bench()
    with pytest.raises(StoreError, match="committed as one of 2"):
        bench.store.commit(frame_of([message(1)]), 2, True, lambda: None)
