"""Index of last values: any number of keys, and snapshots of an earlier state."""

from __future__ import annotations

import random

import pytest

from sluice.queues.model.containers.last_values import MAX_UNSHARDED_KEYS, LastValues


def rest_of_snapshot(last_values: LastValues) -> dict[int, int]:
    """Return the remaining shards of a snapshot as one dict."""
    found: dict[int, int] = {}
    shard = last_values.next_snapshot_shard()
    while shard is not None:
        assert not found.keys() & shard.keys()
        found |= shard
        shard = last_values.next_snapshot_shard()
    return found


@pytest.mark.parametrize(
    "keys", [0, 10, MAX_UNSHARDED_KEYS, MAX_UNSHARDED_KEYS + 1, 2 * MAX_UNSHARDED_KEYS]
)
def test_every_key_is_found_however_many_there_are(keys: int) -> None:
    last_values = LastValues()
    for key in range(keys):
        last_values.put(key * 0x9E37_79B9 - (1 << 40), key)
    assert len(last_values) == keys
    assert all(last_values.get(key * 0x9E37_79B9 - (1 << 40)) == key for key in range(keys))
    assert last_values.get(5) == -1


@pytest.mark.parametrize("keys", [20, MAX_UNSHARDED_KEYS - 3, MAX_UNSHARDED_KEYS + 1])
def test_snapshot_gets_every_shard_as_it_was_when_it_began(keys: int) -> None:
    """Shards change before and after their turn, and the index may be split meanwhile."""
    rng = random.Random(keys)
    last_values = LastValues()
    for key in range(keys):
        last_values.put(key, key)
    for _ in range(3):
        before: dict[int, int] = {}
        for shard in last_values.shards:
            before |= shard
        last_values.begin_snapshot()
        found: dict[int, int] = {}
        for step in range(12):
            for _ in range(40):
                last_values.put(rng.randrange(max(0, keys - 100), keys + 400), -2 - step)
            nth = rng.randrange(len(last_values.shards))
            items = list(last_values.shards[nth].items())
            last_values.replace_shard(nth, dict(items[2:]))
            if rng.random() < 0.3:
                found |= last_values.next_snapshot_shard() or {}
        found |= rest_of_snapshot(last_values)
        assert found == before
    assert len(last_values.shards) == (1 if keys < 1000 else 64)


def test_abandoned_snapshot_leaves_nothing_for_the_next_one() -> None:
    last_values = LastValues()
    last_values.put(1, 1)
    last_values.begin_snapshot()
    last_values.put(1, 2)
    last_values.begin_snapshot()
    assert rest_of_snapshot(last_values) == {1: 2}
