"""The last message of each key of a shared queue: found again, however many there are, and as it was for a snapshot."""

from __future__ import annotations

import random

import pytest

from sluice.queues.compacted.last_values import MAX_UNSHARDED_KEYS, LastValues


def saved(latest: LastValues) -> dict[int, int]:
    """What is left of a snapshot."""
    found: dict[int, int] = {}
    part = latest.next_snapshot_shard()
    while part is not None:
        assert not found.keys() & part.keys()
        found |= part
        part = latest.next_snapshot_shard()
    return found


@pytest.mark.parametrize(
    "keys", [0, 10, MAX_UNSHARDED_KEYS, MAX_UNSHARDED_KEYS + 1, 2 * MAX_UNSHARDED_KEYS]
)
def test_every_key_is_found_however_many_there_are(keys: int) -> None:
    latest = LastValues()
    for key in range(keys):
        latest.put(key * 0x9E37_79B9 - (1 << 40), key)
    assert len(latest) == keys
    assert all(latest.get(key * 0x9E37_79B9 - (1 << 40)) == key for key in range(keys))
    assert latest.get(5) == -1


@pytest.mark.parametrize("keys", [20, MAX_UNSHARDED_KEYS - 3, MAX_UNSHARDED_KEYS + 1])
def test_snapshot_gets_every_part_as_it_was_whatever_changes_meanwhile(keys: int) -> None:
    """Before its turn and behind it; also when there are so many keys now that they are cut into parts."""
    chance = random.Random(keys)
    latest = LastValues()
    for key in range(keys):
        latest.put(key, key)
    for _ in range(3):
        before: dict[int, int] = {}
        for part in latest.shards:
            before |= part
        latest.begin_snapshot()
        found: dict[int, int] = {}
        for step in range(12):
            for _ in range(40):
                latest.put(chance.randrange(max(0, keys - 100), keys + 400), -2 - step)
            nth = chance.randrange(len(latest.shards))
            some = list(latest.shards[nth].items())
            latest.replace_shard(nth, dict(some[2:]))
            if chance.random() < 0.3:
                found |= latest.next_snapshot_shard() or {}
        found |= saved(latest)
        assert found == before
    assert len(latest.shards) == (1 if keys < 1000 else 64)


def test_abandoned_snapshot_leaves_nothing_for_the_next_one() -> None:
    latest = LastValues()
    latest.put(1, 1)
    latest.begin_snapshot()
    latest.put(1, 2)
    latest.begin_snapshot()
    assert saved(latest) == {1: 2}
