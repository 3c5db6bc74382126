"""The metadata of a partition: added and removed in any order, with little memory."""

from __future__ import annotations

import random

import pytest

from sluice.queues.log.notes import NoteReader, NoteWriter
from sluice.queues.model.containers.message_columns import BLOCK_SIZE, NO_ADDRESS, AddressSnapshot
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.recovery.incremental_snapshot import snapshot_addresses, write_gaps
from tests.queues.kit import rules_of

WIDE = 100 * BLOCK_SIZE


def partition_of() -> Partition:
    return Partition(Queue(1, rules_of("prices", {"is_compacted": True})), 1, 0)


def slot_count(partition: Partition) -> int:
    """Return the number of slots in memory."""
    return sum(
        len(block.address)
        for blocks in (partition._sparse_blocks, partition._blocks)
        for block in blocks
    )


def check(partition: Partition, model: dict[int, tuple[int, int, int]]) -> None:
    """Compare with the model: address, size and time of live messages."""
    seq = partition.first_live(0)
    found = {}
    while seq < partition.next_seq:
        block = partition.find_block(seq)
        assert block is not None
        found[int(seq)] = (
            int(partition.address(seq)),
            int(block.size[block.index_of(seq)]),
            int(partition.arrival_ms(seq)),
        )
        seq = partition.first_live(seq + 1)
    assert found == model
    assert list(found) == sorted(found)
    assert partition.live_count == len(model)


@pytest.mark.parametrize("seed", range(3))
def test_messages_are_added_and_removed_in_any_order_over_a_wide_range(seed: int) -> None:
    """Last values of keys, some written often and some once; then recovered in store order."""
    rng = random.Random(seed)
    partition = partition_of()
    model: dict[int, tuple[int, int, int]] = {}
    last: dict[int, int] = {}  # by key
    keys = rng.choice((1, 30, 3000))
    for number in range(10_000):
        key = int(keys * rng.random() ** 4) if rng.random() < 0.9 else number
        old = last.get(key)
        if old is not None and rng.random() < 0.97:
            assert partition.remove(old) == model.pop(old)[0]
        seq = int(partition.append(number, number % 1000, 7, 0, 0, 1, 1_000_000 + number))
        model[seq] = (number, number % 1000, 1_000_000 + number)
        last[key] = seq
        if number % 4000 == 0:
            check(partition, model)
        if rng.random() < 0.05:
            removed = rng.randrange(seq + 1)
            assert (partition.remove(removed) == NO_ADDRESS) == (removed not in model)
            model.pop(removed, None)
            last = {key: one for key, one in last.items() if one != removed}
    check(partition, model)
    for seq in rng.sample(sorted(model), min(50, len(model))):
        partition.set_address(seq, 5)
        model[seq] = (5, *model[seq][1:])
        assert not partition.holds(seq + 1) or seq + 1 in model
    check(partition, model)

    restored = partition_of()
    restored.next_seq = partition.next_seq
    order = sorted(model)
    moved = rng.sample(order, len(order) // 3)  # copied by compaction, so they come later
    for seq in [seq for seq in order if seq not in set(moved)] + moved:
        address, size, time = model[seq]
        restored.insert(seq, address, size, 7, 0, 0, 1, time)
    check(restored, model)
    for seq in order:
        restored.remove(seq)
    assert restored.live_count == 0 and restored._sparse_blocks == []


def stored_in_snapshot(
    partition: Partition, address_snapshots: list[AddressSnapshot], end: int
) -> set[int]:
    """Return the sequences that a snapshot will contain."""
    gaps = NoteWriter(0)
    reached = 0
    for address_snapshot in address_snapshots:
        reached = int(write_gaps(gaps, address_snapshot, reached))
    removed = set(range(reached, end))
    found = NoteReader(gaps.to_bytes())
    while found.has_more():
        start = int(found.read_int())
        removed.update(range(start, start + int(found.read_int())))
    assert reached <= end and all(
        block.address_snapshot is None for block in partition.all_blocks()
    )
    return set(range(end)) - removed


@pytest.mark.parametrize("max_live", [40, 1500])
def test_snapshot_has_the_state_of_its_start_during_changes(max_live: int) -> None:
    rng = random.Random(max_live)
    partition = partition_of()
    live: list[int] = []

    def change(count: int) -> None:
        for _ in range(count):
            live.append(int(partition.append(1, 10, 7, 0, 0, 1, 1_000_000)))
            while len(live) > max_live or (live and rng.random() < 0.45):
                partition.remove(live.pop(int(len(live) * rng.random())))

    for _ in range(5):
        change(rng.randrange(8 * BLOCK_SIZE))
        before, end = set(live), int(partition.next_seq)
        address_snapshots = snapshot_addresses(partition)
        change(rng.randrange(8 * BLOCK_SIZE))
        assert stored_in_snapshot(partition, address_snapshots, end) == before


def test_snapshot_has_the_state_of_its_start_when_sparse_blocks_are_merged() -> None:
    partition = partition_of()

    def append_sparse(blocks: int) -> None:
        """Append blocks and keep one message of each."""
        for _ in range(blocks * BLOCK_SIZE):
            seq = int(partition.append(1, 10, 7, 0, 0, 1, 1_000_000))
            if seq % BLOCK_SIZE:
                partition.remove(seq)

    append_sparse(20)
    address_snapshots = snapshot_addresses(partition)
    assert partition._sparse_blocks
    append_sparse(20)
    assert stored_in_snapshot(partition, address_snapshots, 20 * BLOCK_SIZE) == set(
        range(0, 20 * BLOCK_SIZE, BLOCK_SIZE)
    )


def test_memory_grows_with_live_messages_however_far_apart() -> None:
    """Ten keys are written all the time. A hundred others were written once."""
    partition = partition_of()
    hot: list[int] = []
    for number in range(WIDE):
        seq = int(partition.append(number, 10, 7, 0, 0, 0, 1_000_000 + number))
        if number % (WIDE // 100) == 0:
            continue
        hot.append(seq)
        if len(hot) > 10:
            partition.remove(hot.pop(0))
    assert partition.live_count == 110
    assert slot_count(partition) <= 10 * BLOCK_SIZE
    assert len(partition._sparse_blocks) <= 1
    assert len(partition._blocks) <= 10


def test_settled_message_inserted_after_a_younger_one_is_found_by_its_own_time() -> None:
    partition = partition_of()
    for seq, time in ((2, 3000), (0, 1000), (1, 2000)):
        partition.insert(seq, seq, 10, 7, 0, 0, 0, time)
    assert partition.find_settled_before(999) == []
    assert partition.find_settled_before(1000) == [0]
    assert partition.find_settled_before(2999) == [0, 1]
    far = 20 * BLOCK_SIZE
    partition.insert(far, far, 10, 7, 0, 0, 0, 9000)
    assert partition._sparse_blocks
    assert partition.find_settled_before(1000) == [0]


def test_settled_or_expired_messages_are_found_in_old_sparse_blocks_too() -> None:
    partition = partition_of()
    for number in range(20 * BLOCK_SIZE):
        expires = 500 + number if number % BLOCK_SIZE == 3 else 0
        partition.append(number, 10, 7, expires, 0, number % 2, 1_000_000 + number)
        if number % BLOCK_SIZE != 3 and number % BLOCK_SIZE != 4:
            partition.remove(number)
    assert partition._sparse_blocks
    assert partition.next_expiry() == 503
    assert partition.find_expired(503 + BLOCK_SIZE) == [3, 3 + BLOCK_SIZE]
    assert partition.find_settled_before(1_000_004 + BLOCK_SIZE) == [4, 4 + BLOCK_SIZE]
    assert partition.first_arrived_since(1_000_005) == 3 + BLOCK_SIZE
    assert not partition.remove_pending_group(4) or partition.pending_groups(4) <= 0
    assert partition.deleted_ranges(3)[:2] == [
        (5, BLOCK_SIZE - 2),
        (5 + BLOCK_SIZE, BLOCK_SIZE - 2),
    ]
