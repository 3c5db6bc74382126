"""Cache of keys, looked up in topics."""

from __future__ import annotations

import random

from sluice.queues.compacted.key_cache import KeyCache
from sluice.queues.model.containers.last_values import MAX_CACHED_KEY_LENGTH, hash_key


def test_key_has_its_own_hash_after_any_other_key() -> None:
    """Keys of all lengths in several topics; many differ in one byte or share a slot."""
    rng = random.Random(1)
    keys = [rng.randbytes(rng.randrange(1, 40)) for _ in range(200)]
    for key in keys[:100]:
        at = rng.randrange(len(key))
        keys.append(key[:at] + bytes([key[at] ^ 1]) + key[at + 1 :])
    keys += [key * 9 for key in keys[:20]] + [bytes(size) for size in range(1, 20)]
    keys += [b"\0" * size + b"x" for size in range(1, 20)]
    cache = KeyCache()
    for _ in range(5000):
        key = rng.choice(keys)
        topic = b"$ECQ/w/" + rng.choice([b"c", b"car-1", b"\0\xff"]) + b"/"
        slot = cache.find_slot(topic + key, len(topic))
        assert cache.keys[slot] == key
        assert cache.key_hashes[slot] == hash_key(key)


def test_colliding_keys_replace_each_other() -> None:
    cache = KeyCache()
    key_by_slot: dict[int, bytes] = {}
    number = 0
    while True:
        key = b"%d" % number
        slot = int(cache.find_slot(b"$ECQ/w/c/" + key, 9))
        if slot in key_by_slot:
            break
        key_by_slot[slot] = key
        number += 1
    assert cache.keys[cache.find_slot(b"$ECQ/w/c/" + key_by_slot[slot], 9)] == key_by_slot[slot]
    assert cache.keys[cache.find_slot(b"$ECQ/w/c/" + key, 9)] == key


def test_long_key_is_not_cached() -> None:
    cache = KeyCache()
    long = b"k" * (MAX_CACHED_KEY_LENGTH + 1)
    assert cache.find_slot(b"$ECQ/w/c/" + long, 9) == 0
    assert sum(1 for key in cache.keys if key) == 1
