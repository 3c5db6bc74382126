"""What a partition knows of its messages: whatever comes and goes, in whatever order, and in how little memory."""

from __future__ import annotations

import random

import pytest

from sluice.queues.model.message_columns import BLOCK, GONE, Outline
from sluice.queues.log.frame_builder import Note, NoteWriter
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.log.incremental_snapshot import outlines_of, write_gaps
from tests.queues.kit import rules_of

WIDE = 100 * BLOCK


def partition_of() -> Partition:
    return Partition(Queue(1, rules_of("prices", {"compacted": True})), 1, 0)


def places(partition: Partition) -> int:
    """How many messages there is room for in memory."""
    return sum(len(block.address) for blocks in (partition._packs, partition._blocks) for block in blocks)


def check(partition: Partition, model: dict[int, tuple[int, int, int]]) -> None:
    """The model has the address, size and time of what lives."""
    seq = partition.first_live(0)
    found = {}
    while seq < partition.next:
        block = partition.block(seq)
        assert block is not None
        found[int(seq)] = (
            int(partition.address(seq)),
            int(block.size[block.at(seq)]),
            int(partition.time(seq)),
        )
        seq = partition.first_live(seq + 1)
    assert found == model
    assert list(found) == sorted(found)
    assert partition.live == len(model)


@pytest.mark.parametrize("seed", range(3))
def test_messages_come_and_go_in_any_order_over_a_wide_range(seed: int) -> None:
    """Last values of keys of which some are written often and some never again; then the same brought back by a start,
    which finds them in the order of the store."""
    chance = random.Random(seed)
    partition = partition_of()
    model: dict[int, tuple[int, int, int]] = {}
    last: dict[int, int] = {}  # by key
    keys = chance.choice((1, 30, 3000))
    for number in range(10_000):
        key = int(keys * chance.random() ** 4) if chance.random() < 0.9 else number
        old = last.get(key)
        if old is not None and chance.random() < 0.97:
            assert partition.remove(old) == model.pop(old)[0]
        seq = int(partition.append(number, number % 1000, 7, 0, 0, 1, 1_000_000 + number))
        model[seq] = (number, number % 1000, 1_000_000 + number)
        last[key] = seq
        if number % 4000 == 0:
            check(partition, model)
        if chance.random() < 0.05:
            gone = chance.randrange(seq + 1)
            assert (partition.remove(gone) == GONE) == (gone not in model)
            model.pop(gone, None)
            last = {key: one for key, one in last.items() if one != gone}
    check(partition, model)
    for seq in chance.sample(sorted(model), min(50, len(model))):
        partition.move(seq, 5)
        model[seq] = (5, *model[seq][1:])
        assert not partition.holds(seq + 1) or seq + 1 in model
    check(partition, model)

    again = partition_of()
    again.next = partition.next
    order = sorted(model)
    moved = chance.sample(order, len(order) // 3)  # what compaction has written anew comes later
    for seq in [seq for seq in order if seq not in set(moved)] + moved:
        address, size, time = model[seq]
        again.insert(seq, address, size, 7, 0, 0, 1, time)
    check(again, model)
    for seq in order:
        again.remove(seq)
    assert again.live == 0 and again._packs == []


def kept_by(partition: Partition, outlines: list[Outline], end: int) -> set[int]:
    """What a snapshot will say was here."""
    gaps = NoteWriter(0)
    reached = 0
    for outline in outlines:
        reached = int(write_gaps(gaps, outline, reached))
    gone = set(range(reached, end))
    found = Note(gaps.value())
    while found.more():
        start = int(found.number())
        gone.update(range(start, start + int(found.number())))
    assert reached <= end and all(block.outline is None for block in partition.all_blocks())
    return set(range(end)) - gone


@pytest.mark.parametrize("most", [40, 1500])
def test_a_snapshot_knows_what_was_here_whatever_comes_and_goes_until_it_is_written(most: int) -> None:
    chance = random.Random(most)
    partition = partition_of()
    living: list[int] = []

    def change(count: int) -> None:
        for _ in range(count):
            living.append(int(partition.append(1, 10, 7, 0, 0, 1, 1_000_000)))
            while len(living) > most or (living and chance.random() < 0.45):
                partition.remove(living.pop(int(len(living) * chance.random())))

    for _ in range(5):
        change(chance.randrange(8 * BLOCK))
        before, end = set(living), int(partition.next)
        outlines = outlines_of(partition)
        change(chance.randrange(8 * BLOCK))
        assert kept_by(partition, outlines, end) == before


def test_a_snapshot_knows_what_was_here_when_remains_move_together_until_it_is_written() -> None:
    partition = partition_of()

    def go_on(blocks: int) -> None:
        """Of each block one message stays."""
        for _ in range(blocks * BLOCK):
            seq = int(partition.append(1, 10, 7, 0, 0, 1, 1_000_000))
            if seq % BLOCK:
                partition.remove(seq)

    go_on(20)
    outlines = outlines_of(partition)
    assert partition._packs
    go_on(20)
    assert kept_by(partition, outlines, 20 * BLOCK) == set(range(0, 20 * BLOCK, BLOCK))


def test_memory_goes_by_what_lives_however_far_apart_that_is() -> None:
    """Ten keys are written all the time. A hundred others were written once in a while, and never again."""
    partition = partition_of()
    hot: list[int] = []
    for number in range(WIDE):
        seq = int(partition.append(number, 10, 7, 0, 0, 0, 1_000_000 + number))
        if number % (WIDE // 100) == 0:
            continue
        hot.append(seq)
        if len(hot) > 10:
            partition.remove(hot.pop(0))
    assert partition.live == 110
    assert places(partition) <= 10 * BLOCK
    assert len(partition._packs) <= 1
    assert len(partition._blocks) <= 10


def test_a_settled_message_that_was_inserted_after_a_younger_one_is_found_by_its_own_time() -> None:
    partition = partition_of()
    for seq, time in ((2, 3000), (0, 1000), (1, 2000)):
        partition.insert(seq, seq, 10, 7, 0, 0, 0, time)
    assert partition.settled_before(999) == []
    assert partition.settled_before(1000) == [0]
    assert partition.settled_before(2999) == [0, 1]
    far = 20 * BLOCK
    partition.insert(far, far, 10, 7, 0, 0, 0, 9000)
    assert partition._packs
    assert partition.settled_before(1000) == [0]


def test_what_was_settled_or_has_expired_is_found_in_old_remains_too() -> None:
    partition = partition_of()
    for number in range(20 * BLOCK):
        expires = 500 + number if number % BLOCK == 3 else 0
        partition.append(number, 10, 7, expires, 0, number % 2, 1_000_000 + number)
        if number % BLOCK != 3 and number % BLOCK != 4:
            partition.remove(number)
    assert partition._packs
    assert partition.next_expiry() == 503
    assert partition.expired(503 + BLOCK) == [3, 3 + BLOCK]
    assert partition.settled_before(1_000_004 + BLOCK) == [4, 4 + BLOCK]
    assert partition.first_since(1_000_005) == 3 + BLOCK
    assert not partition.settle_one(4) or partition.left(4) <= 0
    assert partition.holes(3)[:2] == [(5, BLOCK - 2), (5 + BLOCK, BLOCK - 2)]
