"""The hash by which the owner of a client is found."""

from __future__ import annotations

import random

from sluice.queues.compacted.owner_table import (
    MAX_FAST_NAME_BYTES,
    TOPIC_PREFIX,
    hash_client,
    hash_name,
)


def test_name_has_the_same_hash_at_any_buffer_offset() -> None:
    rng = random.Random(1)
    for size in range(MAX_FAST_NAME_BYTES + 5):
        name = rng.randbytes(size)
        for topic in (
            TOPIC_PREFIX + name + b"/k",
            TOPIC_PREFIX + name + b"/a/longer/key",
            b"another prefix " + name,
        ):
            start = topic.index(name, 7)
            assert hash_name(topic, start, start + size) == hash_client(name)


def test_similar_names_have_different_hashes() -> None:
    rng = random.Random(2)
    names = {
        b"%s%d" % (prefix, number)
        for prefix in (b"", b"car-", b"a-longer-name-")
        for number in range(20_000)
    }
    names |= {bytes(size) for size in range(MAX_FAST_NAME_BYTES + 5)}
    for _ in range(2_000):
        name = bytearray(rng.randbytes(rng.randrange(1, MAX_FAST_NAME_BYTES)))
        names.add(bytes(name))
        name[rng.randrange(len(name))] ^= 1 << rng.randrange(8)
        names.add(bytes(name))
    assert len({int(hash_client(name)) for name in names}) == len(names)
    assert all(-(1 << 63) <= hash_client(name) < 1 << 63 for name in names)


def test_numbered_names_are_spread_evenly_over_the_table() -> None:
    slots = 1 << 14
    for prefix in (b"", b"owner-", b"a-longer-name-than-that-"):
        hashes = [int(hash_client(b"%s%d" % (prefix, number))) for number in range(slots)]
        for shift in (0, 6, 20, 40):
            used = len({found >> shift & (slots - 1) for found in hashes})
            assert 0.60 * slots < used < 0.66 * slots  # 1 - 1/e of them
