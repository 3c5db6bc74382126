"""Keys that are recognised in their topics."""

from __future__ import annotations

import random

from sluice.queues.compacted.key_cache import KeyCache
from sluice.queues.compacted.key_index import MAX_CACHED_KEY_LENGTH, hash_key


def test_key_has_its_own_hash_whatever_was_cached_before() -> None:
    """Keys of all lengths, in topics of all kinds, many of which differ in one byte, or meet at one spot."""
    chance = random.Random(1)
    keys = [chance.randbytes(chance.randrange(1, 40)) for _ in range(200)]
    for key in keys[:100]:
        at = chance.randrange(len(key))
        keys.append(key[:at] + bytes([key[at] ^ 1]) + key[at + 1 :])
    keys += [key * 9 for key in keys[:20]] + [bytes(size) for size in range(1, 20)]
    keys += [b"\0" * size + b"x" for size in range(1, 20)]
    known = KeyCache()
    for _ in range(5000):
        key = chance.choice(keys)
        topic = b"$ECQ/w/" + chance.choice([b"c", b"car-1", b"\0\xff"]) + b"/"
        spot = known.find_slot(topic + key, len(topic))
        assert known.keys[spot] == key
        assert known.key_hashes[spot] == hash_key(key)


def test_colliding_keys_replace_each_other() -> None:
    known = KeyCache()
    first: dict[int, bytes] = {}
    number = 0
    while True:
        key = b"%d" % number
        spot = int(known.find_slot(b"$ECQ/w/c/" + key, 9))
        if spot in first:
            break
        first[spot] = key
        number += 1
    assert known.keys[known.find_slot(b"$ECQ/w/c/" + first[spot], 9)] == first[spot]
    assert known.keys[known.find_slot(b"$ECQ/w/c/" + key, 9)] == key


def test_long_key_is_not_cached() -> None:
    known = KeyCache()
    long = b"k" * (MAX_CACHED_KEY_LENGTH + 1)
    assert known.find_slot(b"$ECQ/w/c/" + long, 9) == 0
    assert sum(1 for key in known.keys if key) == 1
